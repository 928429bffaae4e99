"""What an offloaded layer shows in place of its weight and bias: 0 elements, their metadata, and refusals by name.

Whoever would compute with a weight that is not there gets an error that says who asked and what works instead, where
zeros or garbage would train a wrong adapter in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis_priv.errors import UnsupportedMethodError

# What may be asked of a weight that is not there: where it is and what it is made of, never what is in it.
_METADATA = frozenset(
    (
        *("to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16", "detach", "clone", "requires_grad_"),
        *("is_floating_point", "is_complex", "numel", "nelement", "element_size", "dim", "is_contiguous", "data_ptr"),
        *("untyped_storage", "storage_offset", "__repr__", "__hash__", "__reduce_ex__"),
    )
)
_ATTRIBUTES = frozenset(
    (
        *("dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "nbytes", "itemsize"),
        *("is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla", "is_sparse", "is_nested", "is_quantized"),
        *("_version", "_backward_hooks"),
    )
)
# What tools that list parameters ask besides, and `Module.to`.
_LISTED = frozenset(("shape", "size", "data", "_has_compatible_shallow_copy_type"))
_METHODS = {
    "dora": "DoRA (it normalises by the columns of W)",
    "pissa": "PiSSA (it factorises W)",
    "olora": "OLoRA (it factorises W)",
    "loftq": "LoftQ (it re-quantises W)",
    "corda": "CorDA (it factorises W)",
    "eva": "EVA",
    "loha": "LoHa (its update is the size of W)",
    "lokr": "LoKr (its update is the size of W)",
    "merge": "merging an adapter into W",
    "unmerge": "merging an adapter into W",
    "resized": "resizing the LM head",
}


class OffloadedWeight(Tensor):
    """A 0-element weight that answers for dtype and device and refuses to be read."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        attribute, _, access = name.partition(".")
        if attribute not in (_ATTRIBUTES if access else _METADATA) or _unfreezes(func, args, kwargs):
            raise UnsupportedMethodError(
                f"{_who()} needs the base weight, which stays at the providers. Train LoRA, IA3, OFT, VeRA, AdaLoRA, "
                f"prefix or prompt tuning here; merge or initialise from W on the full checkpoint "
                f"(refused: Tensor.{attribute})."
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()  # torch's own would lose the class


class OffloadedBias(nn.Parameter):
    """A 0-element bias that cannot be trained. It is listed among the parameters, so that BitFit finds and asks it."""

    _is_hf_initialized = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _unfreezes(func, args, kwargs):
            raise UnsupportedMethodError(
                "the bias of an offloaded layer cannot be trained here (BitFit, or bias='all' or '..._only' in a PEFT "
                "configuration); use bias='none', or lora_bias=True for a bias of the adapter's own"
            )
        attribute, _, access = _name(func).partition(".")
        if attribute not in _LISTED | (_ATTRIBUTES if access else _METADATA):
            raise UnsupportedMethodError(
                f"{_who()} needs the bias of an offloaded layer, which is in that layer's output already; use a method "
                f"that leaves it alone, such as LoRA (refused: Tensor.{attribute})."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _unfreezes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call on a tensor turns its gradient on."""
    if _name(func) not in ("requires_grad_", "requires_grad.__set__"):
        return False
    return bool(args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True))


def _name(func: Callable[..., Any]) -> str:
    """`clone`, or `dtype.__get__` for an attribute."""
    name = getattr(func, "__name__", "")
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{owner}.{name}" if name in ("__get__", "__set__") else name


def _who() -> str:
    """Who reads the weight, from the code that is running: a PEFT method, or else a function."""
    frame: FrameType | None = sys._getframe(2)
    caller = "this"
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if caller == "this" and not module.startswith("torch."):
            caller = f"{module}.{function}()"
        if module.startswith(("peft.", "transformers.")):
            for part in (function, *module.split(".")):
                for word in part.lower().split("_"):
                    if word in _METHODS:
                        return _METHODS[word]
        frame = frame.f_back
    return caller
