"""A batch of rows of several tasks, and what happens at one layer of the model.

The base layer runs once on all rows. Methods that change its input (OFT, IA3 at the input of a feed-forward layer) have
changed the rows of their tasks before. Then each task's operator computes its task's rows. Rows are the first dimension
of every input and output, so a row never meets another task's operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symbiosis_priv.errors import TaskError, UnsupportedModelError
from tenant.tasks.adapter import Adapter
from tenant.tasks.operators import Operator, operator, operator_key

BASE = "__base__"
"""PEFT's name for rows without an adapter."""


class Batch:
    """Rows of several tasks.

    Args:
        names: the task of each row; `BASE` for a row without an adapter.
        adapters: the adapter of each task.
        rows_first: names of layers whose rows are known to be the first dimension; grows.
    """

    def __init__(self, names: Sequence[str], adapters: Mapping[str, Adapter], rows_first: set[str]) -> None:
        self._rows: dict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(names):
            self._rows[name].append(row)
        self._count = len(names)
        self._adapters = adapters
        self._plans: dict[tuple[str, torch.device], _Plan] = {}
        self._inputs: dict[tuple[str, ...], _Inputs] = {}
        self._rows_first = rows_first

    def extends(self, names: tuple[str, ...]) -> bool:
        """Returns True if a task of this batch has an adapter at one of these layers."""
        return any(name in adapter.layers for adapter in self._adapters.values() for name in names)

    def before(self, name: str, siblings: tuple[str, ...], x: Tensor) -> Tensor:
        """Return the base layer's input at the layer `name`: `x` itself if no task changes it.

        Args:
            name: the layer.
            siblings: the layers that are called with the same `x` and computed in one request (q/k/v), `name` included.
                All of them get one tensor, which holds the rows that any of them needs.
            x: the layer's input.

        Raises:
            UnsupportedModelError: the rows are not the first dimension of `x`.
            TaskError: `x` has another number of rows.
        """
        inputs = self._inputs.get(siblings)
        if inputs is None or not inputs.is_for(x):
            if len(self._rows) > 1:
                self._check(name, x)
            inputs = self._inputs[siblings] = self._gathered(siblings, x)
        return inputs.rows

    def after(self, name: str, siblings: tuple[str, ...], y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        """Return the layer's output. `y` is the base layer's output for the input that `before` returned."""
        inputs = self._inputs[siblings]
        x, order = inputs.x, inputs.orders.get(name)
        inputs.waiting.discard(name)
        if not inputs.waiting:
            del self._inputs[siblings]
        if order is not None:
            y = y.index_select(0, order)
        plan = self._plan(name, y.device)
        if not plan.parts:
            return y
        outputs = [part.operator.after(_select(x, part.rows), _select(y, part.rows), base) for part in plan.parts]
        if plan.rest is not None:
            outputs.append(y.index_select(0, plan.rest))
        if plan.order is None:
            return outputs[0]
        shapes = {tuple(output.shape[1:]) for output in outputs}
        if len(shapes) > 1:
            widths = ", ".join(str(shape[-1]) for shape in sorted(shapes))
            raise TaskError(
                f"the tasks of this batch have heads of different sizes at {name} ({widths}), so their rows do not "
                f"fit one tensor; use batches of tasks whose heads are alike"
            )
        return torch.cat(outputs).index_select(0, plan.order)

    def _gathered(self, siblings: tuple[str, ...], x: Tensor) -> _Inputs:
        """Let the tasks change their rows of `x`, separately for each sibling, and collect all rows that are needed."""
        pieces, count = [x], len(x)
        orders: dict[str, Tensor] = {}
        for name in siblings:
            order = orders[name] = torch.arange(len(x), dtype=torch.long, device=x.device)
            for part in self._plan(name, x.device).parts:
                changed = part.operator.before(_select(x, part.rows))
                if changed is not None:
                    order[slice(None) if part.rows is None else part.rows] = torch.arange(
                        count, count + len(changed), dtype=torch.long, device=x.device
                    )
                    count += len(changed)
                    pieces.append(changed.to(x.dtype))
        if len(pieces) == 1:
            return _Inputs(x, x, {}, set(siblings))
        needed, flat = torch.unique(torch.cat(list(orders.values())), return_inverse=True)
        rows = torch.cat(pieces).index_select(0, needed)
        return _Inputs(x, rows, dict(zip(siblings, flat.split(len(x)), strict=True)), set(siblings))

    def _plan(self, name: str, device: torch.device) -> _Plan:
        plan = self._plans.get((name, device))
        if plan is None:
            plan = self._plans[name, device] = self._planned(name, device)
        return plan

    def _planned(self, name: str, device: torch.device) -> _Plan:
        groups: dict[tuple[Hashable, int], list[tuple[nn.Module, list[int]]]] = defaultdict(list)
        rest: list[int] = []
        for task, rows in self._rows.items():
            layer = None if task == BASE else self._adapters[task].layers.get(name)
            if layer is None:
                rest += rows
            else:
                groups[operator_key(layer), len(rows)].append((layer, rows))
        in_order = list(range(self._count))
        parts: list[_Part] = []
        order: list[int] = []
        for (key, _), members in groups.items():
            rows = [row for _, of_task in members for row in of_task]
            index = None if rows == in_order else torch.tensor(rows, dtype=torch.long, device=device)
            parts.append(_Part(operator([layer for layer, _ in members], key), index))
            order += rows
        if len(parts) == 1 and order == in_order:
            return _Plan(parts, None, None)
        order += rest
        return _Plan(
            parts,
            torch.tensor(rest, dtype=torch.long, device=device) if rest else None,
            torch.argsort(torch.tensor(order, dtype=torch.long, device=device)),
        )

    def _check(self, name: str, x: Tensor) -> None:
        if x.shape[0] != self._count:
            raise TaskError(
                f"the batch names the tasks of {self._count} rows, and {name} gets {list(x.shape)}: name one task per "
                f"row (with num_beams or num_return_sequences, one per sequence)"
            )
        if x.dim() > 2 and name not in self._rows_first:
            if x.shape[1] == self._count:  # the first two dimensions may be (tokens, rows), as in XLNet and Longformer
                raise UnsupportedModelError(
                    f"{name} gets {list(x.shape)}: its rows could be the first or the second dimension; pad the first "
                    f"batch to another number of tokens than rows"
                )
            self._rows_first.add(name)


class _Inputs:
    """One input of a layer group: `x`, the rows to send, and where each sibling finds its rows among them."""

    def __init__(self, x: Tensor, rows: Tensor, orders: dict[str, Tensor], waiting: set[str]) -> None:
        self.x, self.rows, self.orders, self.waiting = x, rows, orders, waiting
        self._state = self._now(x)

    def is_for(self, x: Tensor) -> bool:
        """Returns True if `x` is the tensor that these rows were made from, unchanged."""
        return x is self.x and self._now(x) == self._state

    @staticmethod
    def _now(x: Tensor) -> tuple[object, ...]:
        return None if x.is_inference() else x._version, torch.is_grad_enabled()


class _Part(NamedTuple):
    operator: Operator
    rows: Tensor | None  # None: all rows, in order


class _Plan(NamedTuple):
    parts: list[_Part]
    rest: Tensor | None  # rows without an adapter at this layer
    # order that puts the parts' rows into the batch's order; None if one part has all rows in order
    order: Tensor | None


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
