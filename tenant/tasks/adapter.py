"""The adapter of one task: its name and folder, which another party may have written, and its PEFT layers.

PEFT adds adapters to a model by replacing modules. This module passes PEFT a skeleton of the model instead: the same
tree of modules with stand-ins for the linears and the model's other parameters. The adapter's layers are taken from the
skeleton. So the model never changes, a task cannot change another task, and an adapter folder cannot change tensors of
the base model.
"""

import copy
import itertools
import math
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.discovery.linears import is_linear
from symbiosis_priv.checkpoints.vetting import on_this_machine, vet_adapter
from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedMethodError
from tenant.model.loading import load_adapter
from tenant.model.offloaded import OffloadedConv1DWeight, OffloadedWeight
from tenant.model.remote_linear import LayerGroup, RemoteConv1D, RemoteLayer, RemoteLinear
from tenant.tasks import methods as _methods  # noqa: F401 - makes its methods known to PEFT
from tenant.tasks.methods.sparse import Patterns

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_READ = (".", CONFIG, TENSORS, "chat_template.jinja", "tokenizer_config.json")
"""The files of a task's folder that are read."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class TaskFolder:
    """A task's PEFT folder, and its PEFT method in capitals. `within` is the folder in which the files must lie; None
    if the user named `folder`."""

    folder: Path
    method: str
    within: Path | None = None


def check_name(name: str) -> str:
    """Return `name`. Raises `ConfigError` unless it has 1 to 64 ASCII letters, digits, `.`, `_` and `-`, and begins
    with a letter or digit. So no name leads out of a folder, and no two names look alike."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!a} is not a task name: write up to 64 of the characters A-Z a-z 0-9 . _ -, "
            f"beginning with a letter or digit"
        )
    return name


def stored(folder: Path, *, within: Path | None = None) -> TaskFolder:
    """Check a task's folder without reading its tensors. No symbolic link may lead out of `within`. Raises
    `ConfigError` if the folder is not a PEFT folder; `CheckpointError` if `vet_adapter` refuses the folder, or a file
    lies outside `within`."""
    root = None if within is None else within.resolve()
    for path in (folder / name for name in _READ):
        if root is not None and not path.resolve().is_relative_to(root):
            raise CheckpointError(f"{path} is a symbolic link out of {within}; copy the task's files into its folder")
    method = str(vet_adapter(folder).get("peft_type")).upper()
    if not (folder / TENSORS).is_file():
        raise ConfigError(f"{folder} is not a whole PEFT folder: it has no {TENSORS}")
    return TaskFolder(folder=folder, method=method, within=within)


def memory_of(source: TaskFolder) -> int:
    """Return the bytes that a task's tensors take in memory. PEFT loads half precision as float32. The places of a
    sparse product are int32, and a pattern with as many numbers, and MaskBert's weights, are made of them. Raises
    `CheckpointError` if the file of tensors is damaged."""
    file = source.folder / TENSORS
    size = {"I32": 12, "I64": 16, "F64": 8}
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = [tensors.get_slice(key) for key in tensors.keys()]  # noqa: SIM118 - it is not a dict
            return sum(math.prod(part.get_shape()) * size.get(part.get_dtype(), 4) for part in slices)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); fetch it again") from error


def stored_in(repository: Path) -> dict[str, TaskFolder]:
    """Check every task folder in `repository`. Returns them by name; files and hidden folders are skipped. Raises
    `ConfigError` or `CheckpointError` if one folder is refused (`check_name`, `stored`)."""
    if not repository.is_dir():
        raise ConfigError(f"the folder of tasks {repository} does not exist")
    folders = [path for path in sorted(repository.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return {check_name(path.name): stored(path, within=repository) for path in folders}


NAME = "default"
"""PEFT's name of the adapter in each layer of a task."""
_numbers = itertools.count(1)
_base: ContextVar[Callable[..., Any]] = ContextVar("base")


class Adapter:
    """The PEFT layers of one task, each stored under the name of the module that it extends.

    Args:
        peft: the skeleton with the adapter.
        trainable: True if the adapter's parameters get gradients.
        on_disk: True if a folder holds the same parameters.

    Attributes:
        number: a number that no other adapter of this process has.
        bytes: bytes of the layers' tensors and patterns.
        keys: cached results of `operator_key` by the layer's name, for an adapter that is not trained.

    Raises:
        UnsupportedMethodError: the method changes more than the model's modules.
    """

    def __init__(self, peft: PeftModel, skeleton: nn.Module, *, trainable: bool, on_disk: bool) -> None:
        self.number = next(_numbers)
        self.keys: dict[str, tuple[Any, Hashable]] = {}
        config: PeftConfig = peft.peft_config[NAME]
        method = getattr(config.peft_type, "value", str(config.peft_type))
        self.method, self.training, self.trainable = method, peft.training, trainable
        self.layers: dict[str, Any] = {}
        outer = "/"  # a name that no module has
        for name, module in skeleton.named_modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not name.startswith(outer):
                outer = f"{name}."
                self.layers[name] = module
        if not self.layers:
            raise UnsupportedMethodError(
                f"{method} adds no layer to the model (it changes the model's input, for instance), and rows of "
                f"several tasks share the model; use an adapter of layers, such as LoRA or IA3"
            )
        if trainable and getattr(config, "learn_support", False):
            raise UnsupportedMethodError(
                "diff pruning adds a penalty to the model's own loss while it learns which weights change; train this "
                "task with PEFT alone, and register the saved folder"
            )
        of_base: set[int] = set()
        for layer in self.layers.values():
            base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer.original_module
            if isinstance(layer, BaseTunerLayer):
                base.forward = partial(_run_base, base)
            named = (*base.named_parameters(), *base.named_buffers())
            of_base |= {id(tensor) for name, tensor in named if not name.startswith("moved.")}
        every = (tensor for layer in self.layers.values() for tensor in (*layer.parameters(), *layer.buffers()))
        own = [one for one in every if id(one) not in of_base]
        for tensor in own if on_disk else ():
            tensor.data = tensor.data.clone()  # PEFT's tensors are the mapped file, which may change
        self.bytes = _bytes(own)
        for module in (module for layer in self.layers.values() for module in layer.modules()):
            if isinstance(patterns := getattr(module, "patterns", None), Patterns):
                cast(Any, module).pattern(NAME)  # now, so that its memory counts before the first batch
                self.bytes += patterns.bytes
        self._peft = peft if trainable else None
        self._saved = self._version() if on_disk else -1

    @property
    def changed(self) -> bool:
        """True if the parameters were written to since they were saved, or never saved. COFT writes to them in each
        pass."""
        return self.trainable and self._version() != self._saved

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that training changes."""
        return (p for layer in self.layers.values() for p in layer.parameters() if p.requires_grad)

    def named(self) -> dict[str, nn.Parameter]:
        """Return the adapter's parameters by their names in its file."""
        return {
            f"base_model.model.{layer}.{name.replace(f'.{NAME}', '')}": parameter
            for layer, module in self.layers.items()
            for name, parameter in module.named_parameters()
            if not name.startswith("base_layer.")
        }

    def twin(self, tensors: Mapping[str, Tensor]) -> "Adapter":
        """Return an adapter for inference with the values of `tensors`, by their names in the file, in place of this
        adapter's parameters."""
        twin = copy.copy(self)
        twin.number = next(_numbers)
        values = {
            id(one): nn.Parameter(tensors[name].to(one.device, one.dtype, copy=True), requires_grad=False)
            for name, one in self.named().items()
        }
        twin.layers = {name: _with(layer, values) for name, layer in self.layers.items()}
        twin.bytes = _bytes(values.values())
        return twin

    def train(self, mode: bool) -> None:
        """Set training mode, which switches dropout."""
        if self.training != mode:
            self.training = mode
            for layer in self.layers.values():
                layer.train(mode)

    def save(self, folder: Path) -> None:
        """Write a PEFT folder. Raises `UnsupportedMethodError` if the adapter was loaded for inference, because its
        folder exists already."""
        if self._peft is None:
            raise UnsupportedMethodError("this task was loaded for inference; copy its folder")
        with on_this_machine():
            self._peft.save_pretrained(str(folder), save_embedding_layers=False)  # those of the base model
        self._saved = self._version()

    def _version(self) -> int:
        return sum(tensor._version for layer in self.layers.values() for tensor in layer.parameters())


@torch.inference_mode(False)  # the adapter may be trained later
def load(model: PreTrainedModel, source: TaskFolder, *, trainable: bool) -> Adapter:
    """Load the adapter of a task's folder. Raises `CheckpointError` if `load_adapter` refuses the folder;
    `UnsupportedMethodError` if the method cannot be used for a task."""
    _refuse(vet_adapter(source.folder))
    skeleton: Any = _skeleton(model)
    peft = load_adapter(skeleton, source.folder)
    adapter = Adapter(peft, skeleton, trainable=trainable, on_disk=True)
    for layer in adapter.layers.values() if trainable else ():
        layer.set_adapter(NAME)  # enables the gradients of the adapter's parameters
    return adapter


@torch.inference_mode(False)
def create(model: PreTrainedModel, config: PeftConfig) -> Adapter:
    """Make the untrained adapter of a PEFT configuration. Raises `UnsupportedMethodError` if the method needs base
    weights or cannot be used for a task."""
    _refuse(vars(config))
    skeleton: Any = _skeleton(model)
    peft = get_peft_model(skeleton, copy.deepcopy(config), adapter_name=NAME)
    return Adapter(peft, skeleton, trainable=True, on_disk=False)


def _with(module: Any, values: Mapping[int, nn.Parameter]) -> Any:
    """Return a copy of a module with other parameters, by the id of a parameter. Parts without such a parameter are the
    same objects, except dropout, which is switched for each adapter."""
    parts = {name: part if part is None else _with(part, values) for name, part in module._modules.items()}
    parameters = {name: values.get(id(one), one) for name, one in module._parameters.items()}
    pairs = [(parts, module._modules), (parameters, module._parameters)]
    if not isinstance(module, nn.Dropout) and all(new[name] is one for new, old in pairs for name, one in old.items()):
        return module
    kind: Any = type(module)
    twin = kind.__new__(kind)
    vars(twin).update(vars(module) | {"_modules": parts, "_parameters": parameters})
    return twin


@contextmanager
def base_layer(run: Callable[..., Any]) -> Iterator[None]:
    """Context manager: the base layers of adapters call `run` instead of computing their product."""
    token = _base.set(run)
    try:
        yield
    finally:
        _base.reset(token)


def _refuse(settings: Mapping[str, Any]) -> None:
    """Refuse an adapter that changes what all tasks share: the base model's biases, and its layers."""
    if settings.get("layer_replication"):
        raise UnsupportedMethodError(
            "layer_replication changes the model, which all tasks share; use it with PEFT alone"
        )
    bias = settings.get("bias")
    if bias not in ("none", None, False, True):
        raise UnsupportedMethodError(
            f"bias = {str(bias)[:40]!r} trains biases of the base model, which all tasks share; use bias='none'"
        )


def _run_base(base: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    y: Tensor = _base.get()(x, *args, **kwargs)
    for part in getattr(base, "moved", None) or ():  # as in `RemoteLayer.forward`
        y = y - part(x).to(y.dtype)
    return y


# The skeleton


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the tree of modules. Linears become stand-ins; the copy shares all other parameters and buffers."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo |= {id(buffer): buffer for buffer in module._buffers.values() if buffer is not None}
        for tensor in module._parameters.values():
            if tensor is not None and not isinstance(tensor, OffloadedWeight):
                # another object for the same storage, so that PEFT switches no gradient of the model's own parameter
                memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
        memo |= {id(value): value for value in vars(module).values() if isinstance(value, LayerGroup)}
        if isinstance(module, RemoteLayer) or is_linear(module):
            kind = next(stand_in for kind, stand_in in _STAND_INS.items() if isinstance(module, kind))
            stand_in: Any = kind.__new__(kind)
            nn.Module.__init__(stand_in)
            vars(stand_in).update({name: one for name, one in vars(module).items() if name not in vars(stand_in)})
            weight, bias = cast(Tensor, module.weight), cast(Tensor | None, module.bias)
            offloaded = OffloadedConv1DWeight if isinstance(module, Conv1D) else OffloadedWeight
            stand_in.moved = None
            stand_in.weight = offloaded(weight.shape, dtype=weight.dtype, device=weight.device)
            stand_in.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
            stand_in.original = weakref.ref(module)
            memo[id(module)] = stand_in
    with torch.no_grad():
        twin: PreTrainedModel = copy.deepcopy(model, memo)
    twin.eval()
    return twin


class _StandIn(nn.Module):
    """Replaces a linear in a skeleton: has its sizes, dtype, device and bias, but no weight. A copy has the weight.

    The batch computes the product (`base_layer`).
    """

    original: Callable[[], nn.Module]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.original(), memo)  # PEFT copies a head to train it (`modules_to_save`)


_STAND_INS: dict[type[nn.Module], Any] = {
    kind: type(f"_{kind.__name__}", (_StandIn, kind), {}) for kind in (RemoteConv1D, RemoteLinear, Conv1D, nn.Linear)
}


# Memory


def _bytes(tensors: Any) -> int:
    return sum({StorageWeakRef(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
