"""Offloaded layers under `torch.compile`: a group's product is one node of the graph, and no break in it.

Dynamo cannot follow sockets, threads and native code, and what it cannot follow breaks the graph, once per layer. So it
takes `output` as it is (`allow_in_graph`), and whoever traces further (AOTAutograd, Inductor) runs the Python of
`LayerGroup` with tensors that have no values: siblings find each other as always, and only the product itself becomes
an operator, which runs when the graph does. Numbers stand for groups, because operators take no objects.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """What is needed of a `LayerGroup`."""

    handle: int
    inputs: int

    def output(self, x: Tensor, member: int) -> Tensor: ...

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]: ...

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]: ...

    def backward(self, grads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor: ...


_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register(group: Group) -> int:
    """A number for a group, for as long as there is the group."""
    handle = next(_handles)
    _groups[handle] = group
    return handle


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def output(x: Tensor, handle: int, member: int) -> Tensor:
    """`LayerGroup.output` of the group with that number."""
    return _groups[handle].output(x, member)


def forward(group: Group, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """`group.forward`, as an operator if this is being traced."""
    return group.forward(x, dtype) if type(x) is Tensor else tuple(_forward(x, group.handle, dtype))


def backward(group: Group, grads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """`group.backward`, as an operator if this is being traced."""
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
