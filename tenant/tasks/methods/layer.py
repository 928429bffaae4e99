"""What the methods of this package share: they are made known to PEFT, and put a module around a linear. PEFT's methods
that compute with base weights are refused on offloaded layers.

`register_peft_method` takes only names that `PeftType` has, and Python's enums cannot be extended by public means. So
`add` first inserts the member as the enum's metaclass does.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from peft import PeftConfig, PeftType
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_MIXED_MODEL_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import register_peft_method
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.arithmetic.ring import Widths
from symbiosis_priv.checkpoints.discovery.linears import widths
from symbiosis_priv.errors import ConfigError, UnsupportedMethodError
from tenant.model.offloaded import OffloadedWeight


def add(name: str, *, config: type[PeftConfig], tuner: type[BaseTuner]) -> None:
    """Add a method to PEFT. The names of its parameters start with `tuner.prefix`. Raises `ConfigError` if PEFT has a
    method of this name."""
    member = name.upper()
    if member in PeftType.__members__:
        raise ConfigError(f"PEFT has a method {member} of its own; install peft 0.21, which has none")
    peft_type(member)
    register_peft_method(name=name, config_cls=config, model_cls=tuner, prefix=tuner.prefix)


def peft_type(member: str) -> PeftType:
    """Return a member of `PeftType`. Makes it if there is none."""
    if member not in PeftType.__members__:
        new = str.__new__(PeftType, member)
        new._name_ = new._value_ = member
        new.__objclass__ = PeftType  # type: ignore[attr-defined]
        new._sort_order_ = len(PeftType)  # type: ignore[attr-defined]
        PeftType._member_names_.append(member)
        PeftType._member_map_[member] = PeftType._value2member_map_[member] = new
        type.__setattr__(PeftType, member, new)
    return PeftType[member]


def use_instead(kind: PeftType, tuner: type[BaseTuner]) -> None:
    """Make PEFT use `tuner`, a subclass of PEFT's own class, for one of PEFT's methods."""
    for mapping in (PEFT_TYPE_TO_TUNER_MAPPING, PEFT_TYPE_TO_MIXED_MODEL_MAPPING):
        known: Any = mapping.get(kind)
        if known is not None:
            assert issubclass(tuner, known)
            mapping[kind] = tuner


def adapted(module: nn.Module) -> Any:
    """Return the module that PEFT adapts: the one inside the layers of PEFT, or `module` itself."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _refused(name: str, tuner: type[BaseTuner]) -> type[BaseTuner]:
    """Return PEFT's class for the method `name`, which refuses offloaded layers."""

    class Refused(tuner):  # type: ignore[misc, valid-type]
        def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
            weight = getattr(adapted(args[2]), "weight", None)
            if isinstance(weight, OffloadedWeight):
                raise UnsupportedMethodError(weight.refusal(f"PEFT's {name}"))
            super()._create_and_replace(*args, **kwargs)

    return Refused


for _kind, _tuner in PEFT_TYPE_TO_TUNER_MAPPING.items():
    _name = PEFT_TYPE_TO_CONFIG_MAPPING[_kind].__name__.removesuffix("Config")
    if _name not in OffloadedWeight.adapters and issubclass(_tuner, BaseTuner):
        use_instead(_kind, _refused(_name, _tuner))


CANNOT_MERGE = (
    "merging changes base weights, which stay at the providers. Save the adapter, and merge it into the full model, "
    "where the method can be merged at all"
)


@dataclass
class MethodConfig(PeftConfig):
    """The fields that all methods of this package have. `modules_to_save` are modules of the tenant, such as a
    classification head. `learns_with` is the name of the field that enables learning of masks or supports; it is False
    in a saved adapter."""

    method: ClassVar[str]
    learns_with: ClassVar[str | None] = None

    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = peft_type(self.method)
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, list):
                setattr(self, name, set(value))

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration, with learning of masks or supports disabled."""
        final: dict[str, Any] = {self.learns_with: False} if self.learns_with else {}
        super(MethodConfig, replace(self, **final)).save_pretrained(save_directory, **kwargs)


class MethodLayer(nn.Module, BaseTunerLayer):
    """A linear, or another adapter's module around it, with adapters: `y = base(x) + sum of change(adapter, x,
    base(x))`."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._active_adapter = adapter_name
        self.merged_adapters = []
        self.make_containers()
        self.update_layer(adapter_name, config)

    @abstractmethod
    def make_containers(self) -> None:
        """Make the empty dictionaries that `adapter_layer_names` and `other_param_names` name."""

    @abstractmethod
    def make(self, adapter: str, config: Any) -> None:
        """Make the parameters of one adapter."""

    @abstractmethod
    def change(self, adapter: str, x: Tensor, y: Tensor) -> Tensor | None:
        """Return what an adapter adds to the linear's output y `[..., o]` for the input x `[..., d]`; None if the
        linear does not have the adapter."""

    def saved(self, adapter: str) -> dict[str, Tensor | None]:
        """Return tensors to save in place of an adapter's own, by the name of their dictionary; None to save no
        tensor."""
        return {}

    def update_layer(self, adapter_name: str, config: Any) -> None:
        self.make(adapter_name, config)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @property
    def widths(self) -> Widths:
        return widths(self.get_base_layer())

    @property
    def integer(self) -> torch.dtype:
        """The dtype of a position in the weight."""
        return torch.int32 if math.prod(self.widths) < 1 << 31 else torch.int64

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return y
        result = y
        for adapter in self.active_adapters:
            change = self.change(adapter, x, y)
            if change is not None:
                result = result + change.to(y.dtype)
        return result

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Always raises, because base weights cannot be changed."""
        raise UnsupportedMethodError(CANNOT_MERGE)

    def unmerge(self) -> None:
        """Always raises; see `merge`."""
        raise UnsupportedMethodError(CANNOT_MERGE)


class MethodTuner(BaseTuner):
    """Puts a `MethodLayer` around each targeted module."""

    tuner_layer_cls: type[MethodLayer]
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 - PEFT declares it so

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: Any,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, self.tuner_layer_cls):
            target.update_layer(adapter_name, peft_config)
            return
        if not self.fits(base := adapted(target)):
            raise ValueError(f"{current_key} is a {type(base).__name__}; name linears in target_modules")
        layer = self.tuner_layer_cls(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:  # an adapter for a mixed batch is not trained
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | Conv1D)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if config.learns_with and getattr(config, config.learns_with):
            raise UnsupportedMethodError(
                f"a saved adapter is sparse, and {config.learns_with}=True learns which weights change; load it with "
                f"PeftModel.from_pretrained(model, folder)"
            )
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        """Return the tensors to save, replaced as each layer's `saved` says."""
        found = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        for name, layer in model.named_modules():
            if isinstance(layer, cls.tuner_layer_cls):
                for kind, tensor in layer.saved(adapter_name).items():
                    key = f"{name}.{kind}.{adapter_name}"
                    if tensor is None:
                        del found[key]
                    else:
                        found[key] = tensor
        return found
