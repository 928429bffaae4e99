"""The linears that are not there: `RemoteLinear` stands where a frozen `nn.Linear` or `Conv1D` stood.

Siblings (q/k/v, gate/up) receive the same tensor one after the other. The first of them runs the whole group in one
request, and the others pick up their part, forward and backward alike: one round trip, one mask (rule 4). What makes
a tensor "the same" is its identity and version; equal values elsewhere are another input. (Tensors made in inference
mode count no versions: for them a copy tells whether they were written to. Writing through `x.data` between siblings is
as invisible here as it is to autograd.)

Nothing is saved for backward: the input's gradient is `g @ W`, which needs neither input nor output.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from symbiosis_priv.errors import UnsupportedMethodError
from symbiosis_priv.ring import BACKWARD, FORWARD
from tenant.backend import Backend


class LayerGroup:
    """The linears of one block that share an input; calls the backend once per distinct input."""

    def __init__(self, backend: Backend, index: int) -> None:
        self.backend = backend
        self.index = index
        self._outputs = backend.facts[index].entry.outputs
        self._pending: _Pending | None = None

    def output(self, x: Tensor, member: int) -> Tensor:
        """The output of one member for input x `[..., d]`; `[..., o]` in x's dtype (autocast's, if enabled)."""
        pending = self._pending
        if pending is None or not pending.is_for(x) or pending.parts[member] is None:
            parts = _GroupLinear.apply(x, self)  # type: ignore[no-untyped-call]
            pending = self._pending = _Pending(x, list(parts))
        part, pending.parts[member] = pending.parts[member], None
        if all(p is None for p in pending.parts):
            self._pending = None
        assert part is not None
        return part

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Every member's output, one backend call."""
        y = self.backend.linear(self.index, FORWARD, x.reshape(-1, x.shape[-1]))
        dtype = _output_dtype(x)
        parts = []  # no views: callers may write to them
        for part in y.split(list(self._outputs), dim=-1):
            out = torch.empty((*x.shape[:-1], part.shape[-1]), dtype=dtype, device=x.device)
            out.view(part.shape).copy_(part)
            parts.append(out)
        return tuple(parts)

    def backward(self, grads: tuple[Tensor, ...]) -> Tensor:
        """The input's gradient from every member's output gradient, one backend call."""
        g = torch.cat(grads, dim=-1)
        grad_x = self.backend.linear(self.index, BACKWARD, g.reshape(-1, g.shape[-1]))
        return grad_x.view(*g.shape[:-1], grad_x.shape[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        return LayerGroup(self.backend, self.index)  # a copied model shares the session, not the calls in flight


class _Pending:
    """Outputs of a group call that siblings have yet to collect."""

    def __init__(self, x: Tensor, parts: list[Tensor | None]) -> None:
        self._x = weakref.ref(x)
        self._state = _state(x)
        self._copy = x.clone() if x.is_inference() and len(parts) > 1 else None
        self.parts = parts

    def is_for(self, x: Tensor) -> bool:
        if self._x() is not x or self._state != _state(x):
            return False
        return self._copy is None or torch.equal(self._copy, x)


def _state(x: Tensor) -> tuple[object, ...]:
    """What decides a group's outputs besides x itself: changed in place, other gradients, another dtype."""
    version = None if x.is_inference() else x._version
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return version, x.requires_grad, modes, _output_dtype(x)


def _output_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _GroupLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: LayerGroup) -> tuple[Tensor, ...]:
        return group.forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, LayerGroup], output: tuple[Tensor, ...]) -> None:
        x, ctx.group = inputs
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.backward(grads).to(ctx.dtype), None


class RemoteLinear(nn.Linear):
    """A frozen linear whose weight is at the providers. An `nn.Linear` to PEFT, with nothing in it.

    Args:
        inputs: in_features.
        outputs: out_features.
        group: the layer group it belongs to.
        member: its place in the group.
        bias: whether the linear has one. The group adds it; here is only something that refuses to be trained.
    """

    _is_hf_initialized = True  # nothing here for transformers to initialise

    def __init__(self, inputs: int, outputs: int, *, group: LayerGroup, member: int, bias: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.register_parameter("bias", OffloadedBias(torch.empty(0), False) if bias else None)
        self.group, self.member = group, member
        # a buffer outside the state dict: nobody looks for it in a checkpoint, saves it or trains it
        self.register_buffer("weight", torch.empty(0), persistent=False)

    def seal(self, *, dtype: torch.dtype, device: torch.device) -> None:
        """Once the checkpoint is loaded, replace the empty weight by one that says no to readers."""
        self.weight = torch.empty(0, dtype=dtype, device=device).as_subclass(OffloadedWeight)
        if self.bias is not None:
            self.bias = OffloadedBias(torch.empty(0, dtype=dtype, device=device), False)

    def forward(self, input: Tensor) -> Tensor:
        return self.group.output(input, self.member)

    def _save_to_state_dict(self, *_: Any) -> None:
        """Nothing here is saved."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, _meta: Any, strict: bool, _missing: Any, unexpected: Any, _: Any
    ) -> None:
        unexpected.extend(key for key in state_dict if strict and key.startswith(prefix))

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteLinear:
        """As part of a model. A copy of one layer alone is PEFT's way to train the layer itself."""
        if not memo:
            raise UnsupportedMethodError(
                "an offloaded layer cannot be trained itself: its weight stays at the providers. "
                "Name it in target_modules instead of modules_to_save (where PEFT puts a classification head by "
                "itself, if there is a task_type)"
            )
        twin = memo[id(self)] = RemoteLinear.__new__(RemoteLinear)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group={self.group.index}"


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
