"""`RemoteLinear` and `RemoteConv1D`: the modules that replace an offloaded `nn.Linear` or `Conv1D`.

Siblings (q/k/v, gate/up) are called one after the other with the same tensor. The first call runs the whole group in
one request, and the calls of the other siblings return their parts of the result. So a group costs one round trip and
one mask (rule 4), forward and backward. Two calls have the same input if the tensor object and its version are the
same; two tensors with equal values are different inputs. A tensor made in inference mode has no version, so its values
are compared with a copy. Like autograd, this module does not notice a write through `x.data` between siblings.

The forward pass saves nothing for backward: the input's gradient is `g @ W`, which needs neither input nor output.
"""

import copy
import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD
from symbiosis_priv.errors import UnsupportedMethodError
from tenant.masking.backend import Backend
from tenant.model import compiled
from tenant.model.offloaded import OffloadedBias, OffloadedConv1DWeight, OffloadedWeight


class LayerGroup:
    """The linears of one layer group. Calls the backend once per distinct input."""

    def __init__(self, backend: Backend, index: int) -> None:
        self.backend = backend
        self.index = index
        self.inputs = backend.facts[index].entry.inputs
        self._outputs = backend.facts[index].entry.outputs
        self._pending: _Pending | None = None

        self.handle = compiled.register(self)

    def output(self, x: Tensor, member: int) -> Tensor:
        """Return one member's output `[..., o]` for input x `[..., d]`, in x's dtype (in autocast's, if enabled)."""
        pending = self._pending
        if pending is None or not pending.is_for(x) or pending.parts[member] is None:
            parts = _GroupLinear.apply(x, self)  # type: ignore[no-untyped-call]
            pending = self._pending = _Pending(x, list(parts))
        part, pending.parts[member] = pending.parts[member], None
        if all(p is None for p in pending.parts):
            self._pending = None
        assert part is not None
        return part

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shape of each member's output for input `x`."""
        return [(*x.shape[:-1], width) for width in self._outputs]

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Compute each member's output, in `dtype`, with one backend call."""
        rows = x.reshape(-1, x.shape[-1])
        # separate tensors, not views of one: callers may write to them
        parts = tuple(torch.empty(shape, dtype=dtype, device=x.device) for shape in self.shapes(x))
        self.backend.multiply(self.index, FORWARD, [rows], [part.view(len(rows), part.shape[-1]) for part in parts])
        return parts

    def backward(self, grads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Compute the input's gradient, in `dtype`, from all members' output gradients, with one backend call."""
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = torch.empty((*grads[0].shape[:-1], self.inputs), dtype=dtype, device=grads[0].device)
        self.backend.multiply(self.index, BACKWARD, rows, [grad_x.view(len(rows[0]), self.inputs)])
        return grad_x

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.backend, self.index)  # a copied model shares the session, not the pending outputs


class _Pending:
    """The outputs of a group call that siblings have not returned yet."""

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
    """Everything besides the tensor object that a group's outputs depend on: version, gradient modes and dtype."""
    version = None if x.is_inference() else x._version
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return version, x.requires_grad, modes, _output_dtype(x)


def _output_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _GroupLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: LayerGroup) -> tuple[Tensor, ...]:
        return compiled.forward(group, x, _output_dtype(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, LayerGroup], output: tuple[Tensor, ...]) -> None:
        x, ctx.group = inputs
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return compiled.backward(ctx.group, grads, ctx.dtype), None


class RemoteLayer(nn.Module):
    """A frozen linear whose weight is at the providers. PEFT treats it as the class that it replaces.

    Args:
        weight: stands for the weight.
        bias: stands for the bias; None if the linear has no bias. The group's product includes the bias.
        group: the layer group of the linear.
        member: index of the linear in the group.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, *, weight: OffloadedWeight, bias: OffloadedBias | None, group: LayerGroup, member: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = weight, bias
        self.group, self.member = group, member

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = compiled.output(input, self.group.handle, self.member)
        return y

    def _save_to_state_dict(self, *_: Any) -> None:
        """Save nothing: the values are at the providers."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, _meta: Any, strict: bool, _missing: Any, unexpected: Any, _: Any
    ) -> None:
        unexpected.extend(key for key in state_dict if strict and key.startswith(prefix))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the layer as part of a model. A copy of one layer alone is refused: PEFT makes it to train the layer."""
        if not memo:
            raise UnsupportedMethodError(
                "an offloaded layer cannot be trained: its weight stays at the providers. "
                "Name it in target_modules instead of modules_to_save (with a task_type, PEFT adds a classification "
                "head to modules_to_save)"
            )
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group={self.group.index}"


class RemoteLinear(RemoteLayer, nn.Linear):  # type: ignore[misc]  # torch declares a Tensor where it sets a Parameter
    """Replaces an `nn.Linear`."""

    def __init__(self, inputs: int, outputs: int, *, group: LayerGroup, member: int, bias: bool = False) -> None:
        super().__init__(
            weight=OffloadedWeight((outputs, inputs)),
            bias=OffloadedBias((outputs,)) if bias else None,
            group=group,
            member=member,
        )
        self.in_features, self.out_features = inputs, outputs


class RemoteConv1D(RemoteLayer, Conv1D):  # type: ignore[misc]
    """Replaces a `Conv1D`, whose weight is transposed. PEFT handles `Conv1D` and `nn.Linear` differently."""

    def __init__(self, inputs: int, outputs: int, *, group: LayerGroup, member: int, bias: bool = True) -> None:
        super().__init__(
            weight=OffloadedConv1DWeight((inputs, outputs)),
            bias=OffloadedBias((outputs,)) if bias else None,
            group=group,
            member=member,
        )
        self.nx, self.nf = inputs, outputs
