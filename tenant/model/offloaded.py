"""Parameters that replace the weight of an offloaded layer: metadata without values.

Shape, number of elements, dtype and device are those of the whole parameter, so that PEFT sizes its adapters and counts
parameters as for an unsplit model. The size in bytes is 0. Reading the values raises an error that names the caller and
says what works instead; zeros would train a wrong adapter silently.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from symbiosis_priv.checkpoints.discovery.linears import called, is_metadata
from symbiosis_priv.errors import UnsupportedMethodError

# Operations that copy a parameter (the copy has no values either), and operations that switch gradients.
_COPIES = frozenset(
    ("to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16", "detach", "clone", "data.__get__")
)
_SWITCHES = frozenset(("requires_grad_", "requires_grad.__set__", "grad.__set__", "data.__set__"))
# Operations whose result follows from the whole parameter's shape. An element takes 0 bytes here.
_SIZES: dict[str, Callable[..., Any]] = {
    "shape.__get__": lambda shape: shape,
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
    "dim": len,
    "ndimension": len,
    "ndim.__get__": len,
    "__len__": lambda shape: shape[0],
    "numel": torch.Size.numel,
    "nelement": torch.Size.numel,
    "element_size": lambda shape: 0,
    "itemsize.__get__": lambda shape: 0,
}


NO_DISK = (
    "device_map puts offloaded layers on disk, and their weights stay at the providers. Map every module to a device: "
    "device_map='cpu' or 'cuda'"
)


class OffloadedWeight(nn.Parameter):
    """The weight of an offloaded `nn.Linear`: a frozen parameter without values. Other libraries read dtype and device
    from parameters. Raises `UnsupportedMethodError` if `shape` is a tensor: accelerate passes one to offload the
    parameter to disk."""

    layer: ClassVar[str] = "nn.Linear"
    adapters: ClassVar[tuple[str, ...]] = (
        *("Lora", "AdaLora", "Beft", "BOFT", "Bottleneck", "C3A", "DiffPruning", "FourierFT", "Gralora", "IA3", "Lily"),
        *("LoHa", "LoKr", "MaskBert", "Miss", "OFT", "Poly", "Pvera", "RandLora", "Road", "UniLora", "VBLoRA", "Vera"),
        "WaveFT",
    )
    """The PEFT methods that work on this layer."""

    _is_hf_initialized = True  # transformers must not initialise the parameter
    _whole: torch.Size

    def __new__(
        cls,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        requires_grad: bool = False,
    ) -> Self:
        if isinstance(shape, Tensor):  # accelerate passes a tensor and `requires_grad`
            raise UnsupportedMethodError(NO_DISK)
        return cls._of(torch.empty(0, dtype=dtype, device=device), torch.Size(shape))

    @classmethod
    def _of(cls, nothing: Tensor, shape: torch.Size) -> Self:
        parameter: Self = Tensor._make_subclass(cls, nothing, False)
        parameter._whole = shape
        return parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = called(func)
        asked = args[0] if args and isinstance(args[0], OffloadedWeight) else None
        if asked is not None and name in _SIZES:
            return _SIZES[name](asked._whole, *args[1:], **kwargs)
        grad = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if name in ("requires_grad_", "requires_grad.__set__") and grad:
            raise UnsupportedMethodError(
                "the weight of an offloaded layer cannot be trained: it stays at the providers. Train an adapter on "
                "that layer (such as LoRA), and enable the gradients of the tenant's own parameters only"
            )
        known = is_metadata(name) or name in _COPIES or name in _SWITCHES
        if not known or (name == "data.__set__" and not isinstance(args[1], OffloadedWeight)):
            raise UnsupportedMethodError(f"{cls._no_reading()} (refused: Tensor.{name.partition('.')[0]})")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if asked is None or result is asked or not (name in _COPIES and isinstance(result, Tensor)):
                return result
            return asked.like(result)

    def like(self, nothing: Tensor) -> Self:
        """Return the same parameter with the dtype and device of `nothing`, a tensor without elements."""
        return self._of(nothing, self._whole)

    @classmethod
    def _no_reading(cls) -> str:
        return cls.refusal(*describe_reader())

    @classmethod
    def refusal(cls, who: str, advice: str | None = None) -> str:
        """Return the message that refuses `who`, a reader of the weight. `advice` says what works instead; None lists
        the PEFT methods that work."""
        advice = advice or (
            f"On an offloaded {cls.layer}, PEFT's {', '.join(cls.adapters)} work, and methods that do not change "
            f"linears, such as prompt tuning"
        )
        return f"{who} needs the base weight, which stays at the providers. {advice}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = self.like(torch.empty(0, dtype=self.dtype, device=self.device))
        return twin

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedMethodError(
            "a split model cannot be pickled: its weights stay at the providers, its session in this process. Save the "
            "adapter with model.save_pretrained(...), or model.state_dict(), and load it into a newly split model"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes a keyword that torch alone knows
        return f"{type(self).__name__}({tuple(self._whole)}, dtype={self.dtype}, device='{self.device}')"


def set_dtype_and_device(module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Set dtype and device of a module's offloaded parameters, after the checkpoint was loaded."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, OffloadedWeight):
            setattr(module, name, parameter.like(torch.empty(0, dtype=dtype, device=device)))


class OffloadedConv1DWeight(OffloadedWeight):
    """The weight of an offloaded `Conv1D`."""

    layer = "Conv1D"
    adapters = (
        *("Lora", "AdaLora", "Bottleneck", "DiffPruning", "FourierFT", "Gralora", "IA3", "MaskBert", "Pvera"),
        *("RandLora", "UniLora", "VBLoRA", "Vera", "WaveFT"),
    )


# A word in the name of a calling function or module, the description of that caller, and what works instead.
_MERGE_ELSEWHERE = (
    "Merge the adapter into the full model instead: "
    "PeftModel.from_pretrained(full_model, 'my-adapter').merge_and_unload()"
)
LORA_STARTS = "Use LoRA with init_lora_weights=True, 'gaussian' or 'orthogonal'"
_READERS: dict[str, tuple[str, str | None]] = {
    "loftq": ("LoftQ (it re-quantises W)", LORA_STARTS),
    "merge": ("merging an adapter into W", _MERGE_ELSEWHERE),
    "unmerge": ("merging an adapter into W", _MERGE_ELSEWHERE),
    "resized": ("resizing the LM head", "Resize it and save the checkpoint first, then have providers serve that"),
}


def describe_reader() -> tuple[str, str | None]:
    """Describe the code that reads a parameter, from the call stack, and what to do instead (None if unknown)."""
    frame: FrameType | None = sys._getframe(1)
    caller = "this"
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if caller == "this" and not module.startswith(("tenant.model.", "torch.")):
            caller = f"{module}.{function}()"
        if module.startswith(("peft.", "transformers.")):
            for word in f"{function}.{module}".lower().replace("_", ".").split("."):
                if word in _READERS:
                    return _READERS[word]
        if module.startswith("trl."):
            return "TRL's product with the LM head", "Call tenant.compute_all_logits(trainer) after the trainer is made"
        if module.startswith("peft.tuners."):
            return f"PEFT's {module.split('.')[2]}", None
        if module.startswith("transformers.models."):
            return (
                f"the model's own code ({function})",
                "It computes with that weight outside the layer, so this model cannot be split for this use; use "
                "another base model",
            )
        frame = frame.f_back
    return caller, None
