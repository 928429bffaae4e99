"""Runs offloaded layers under `torch.compile` without a graph break: the product of a group is one node of the graph.

Dynamo cannot trace sockets, threads and native code, and each call that it cannot trace breaks the graph. So `output`
is marked `allow_in_graph`, and Dynamo does not trace into it. AOTAutograd and Inductor then run the Python code of
`LayerGroup` with fake tensors. Siblings share one group call as in eager mode, and only the product becomes an
operator, which runs when the graph runs. Operators take no Python objects, so an integer handle identifies a group.
"""

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """The part of `LayerGroup` that this module uses."""

    handle: int
    inputs: int

    def output(self, x: Tensor, member: int) -> Tensor: ...

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]: ...

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]: ...

    def backward(self, grads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor: ...


_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register(group: Group) -> int:
    """Return a handle of a group, valid while the group exists."""
    handle = next(_handles)
    _groups[handle] = group
    return handle


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def output(x: Tensor, handle: int, member: int) -> Tensor:
    """Call `LayerGroup.output` of the group with this handle."""
    return _groups[handle].output(x, member)


def forward(group: Group, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Call `group.forward`: directly for plain tensors, as an operator for the fake tensors of tracing."""
    return group.forward(x, dtype) if type(x) is Tensor else tuple(_forward(x, group.handle, dtype))


def backward(group: Group, grads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Call `group.backward`: directly for plain tensors, as an operator for the fake tensors of tracing."""
    if all(type(grad) is Tensor for grad in grads):
        return group.backward(grads, dtype)
    grad_x: Tensor = _backward(list(grads), group.handle, dtype)
    return grad_x


@torch.library.custom_op("symbiosis_priv::group_forward", mutates_args=())
def _forward(x: Tensor, handle: int, dtype: torch.dtype) -> list[Tensor]:
    return list(_groups[handle].forward(x, dtype))


@_forward.register_fake
def _(x: Tensor, handle: int, dtype: torch.dtype) -> list[Tensor]:
    return [x.new_empty(shape, dtype=dtype) for shape in _groups[handle].shapes(x)]


@torch.library.custom_op("symbiosis_priv::group_backward", mutates_args=())
def _backward(grads: list[Tensor], handle: int, dtype: torch.dtype) -> Tensor:
    return _groups[handle].backward(tuple(grads), dtype)


@_backward.register_fake
def _(grads: list[Tensor], handle: int, dtype: torch.dtype) -> Tensor:
    return grads[0].new_empty((*grads[0].shape[:-1], _groups[handle].inputs), dtype=dtype)
