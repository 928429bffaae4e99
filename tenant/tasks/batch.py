"""A batch of rows of several tasks, and how one layer of the model computes them.

Operators that change the base layer's input (OFT, IA3 at the input of a feed-forward layer) first change the rows of
their tasks. The base layer then runs once on all rows. At last each task's operator computes the output of its task's
rows. Rows are the first dimension of every input and output, so no operator sees rows of another task.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv.errors import TaskError, UnsupportedModelError
from tenant.tasks.adapter import Adapter
from tenant.tasks.operators import ByPeft, Operator, operator_key

BASE = "__base__"
"""PEFT's name for rows without an adapter."""


class Composition:
    """Maps the rows of a batch to tasks. Several batches may use a composition at the same time.

    Args:
        names: the task of each row; `BASE` for a row without an adapter.
        adapters: the adapter of each task.
        block: number of rows of a block, or None; see `Tasks.batch`.
    """

    def __init__(self, names: Sequence[str], adapters: Mapping[str, Adapter], block: int | None) -> None:
        self._rows: dict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(names):
            self._rows[name].append(row)
        self.count = len(names)
        self.counted = block is not None or len(self._rows) > 1
        """False if one name serves any number of rows."""
        self.layers = frozenset(layer for adapter in adapters.values() for layer in adapter.layers)
        self._adapters, self._block = adapters, block
        self._plans: dict[tuple[str, torch.device], _Plan] = {}
        self._places: dict[tuple[object, ...], _Places] = {}  # layers with the same tasks share tensors
        self._needed: dict[tuple[object, ...], tuple[Tensor, dict[str, Tensor]]] = {}

    def plan(self, name: str, device: torch.device) -> _Plan:
        """Return how the layer `name` is computed."""
        if (plan := self._plans.get((name, device))) is not None:
            return plan
        groups: dict[tuple[type[Operator], Hashable, int], list[str]] = defaultdict(list)
        rest: list[str] = []
        for task, rows in self._rows.items():
            layer = None if task == BASE else self._adapters[task].layers.get(name)
            if layer is None:
                rest.append(task)
            else:
                adapter = self._adapters[task]
                keys = {} if adapter.trainable or adapter.training else adapter.keys
                if name not in keys:
                    keys[name] = operator_key(layer)
                kind, key = keys[name]
                if self._block is not None and not kind.row_exact:
                    kind, key = ByPeft, id(layer)
                groups[kind, key, len(rows)].append(task)
        members = tuple(map(tuple, groups.values()))
        places = self._places.get((members, device))
        if places is None:
            places = self._places[members, device] = self._placed(members, rest, device)
        sections = []
        parts, rest_rows, order = places
        for (kind, _, _), tasks, part in zip(groups, members, parts, strict=True):
            layers = [self._adapters[task].layers[name] for task in tasks]
            sections.append(_Section(kind(layers, block=self._block), part))
        plan = self._plans[name, device] = _Plan(sections, rest_rows, order)
        return plan

    def needed(
        self,
        siblings: tuple[str, ...],
        changed: tuple[tuple[str, int], ...],
        lengths: tuple[int, ...],
        device: torch.device,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows that siblings need, and the positions of each sibling's rows among them.

        Row numbers count the rows of the input first, and then the changed rows of each section.

        Args:
            changed: the sections whose operators have changed their rows, as (layer, number of the section).
            lengths: the number of rows of the input, and of the changed rows of each section.
        """
        key = siblings, changed, lengths, device
        if key not in self._needed:
            counts, starts = lengths[0], dict(zip(changed, itertools.accumulate(lengths), strict=False))
            orders = []
            for name in siblings:
                order = torch.arange(counts, dtype=torch.long, device=device)
                for number, section in enumerate(self.plan(name, device).sections):
                    start = starts.get((name, number))
                    if start is None:
                        continue
                    if section.rows is None:
                        order += start
                    else:
                        places = torch.arange(len(section.rows), dtype=torch.long, device=device)
                        order[section.rows] = start + places
                orders.append(order)
            rows, flat = torch.unique(torch.cat(orders), return_inverse=True)
            self._needed[key] = rows, dict(zip(siblings, flat.split(counts), strict=True))
        return self._needed[key]

    def _placed(self, groups: Sequence[Sequence[str]], rest: Sequence[str], device: torch.device) -> _Places:
        parts = [[row for task in tasks for row in self._rows[task]] for tasks in (*groups, rest)]
        order = list(itertools.chain.from_iterable(parts))
        if groups and order == parts[0] == list(range(self.count)):
            return [None], None, None
        *sections, without = (torch.tensor(rows, dtype=torch.long, device=device) for rows in parts)
        places = torch.tensor(order, dtype=torch.long, device=device).argsort()
        return sections, without if len(without) else None, places


class Batch:
    """One use of a composition in a forward pass. `rows_first` collects the names of layers whose first dimension is
    known to be rows."""

    def __init__(self, composition: Composition, rows_first: set[str]) -> None:
        self._composition = composition
        self._inputs: dict[tuple[str, ...], _Inputs] = {}
        self._rows_first = rows_first

    def extends(self, names: tuple[str, ...]) -> bool:
        """Returns True if a task of this batch has an adapter at one of these layers."""
        return not self._composition.layers.isdisjoint(names)

    def before(self, name: str, siblings: tuple[str, ...], x: Tensor) -> Tensor:
        """Return the base layer's input at the layer `name`: `x` itself if no task changes it.

        Args:
            siblings: the layers that are called with the same `x` and computed in one request (q/k/v), `name` included.
                All of them get the same tensor, which holds the rows that any sibling needs.

        Raises:
            UnsupportedModelError: the rows are not the first dimension of `x`.
            TaskError: `x` has another number of rows.
        """
        inputs = self._inputs.get(siblings)
        if inputs is not None and inputs.is_for(x):
            return inputs.rows
        count = self._composition.count
        if self._composition.counted and x.shape[0] != count:
            raise TaskError(
                f"the batch names the tasks of {count} rows, and {name} gets {list(x.shape)}: name one task per "
                f"row (with num_beams or num_return_sequences, one per sequence)"
            )
        if self._composition.counted and x.dim() > 2 and name not in self._rows_first:
            if x.shape[1] == count > 1:  # the first two dimensions may be (tokens, rows), as in XLNet and Longformer
                raise UnsupportedModelError(
                    f"{name} gets {list(x.shape)}: its rows could be the first or the second dimension; pad the first "
                    f"batch to another number of tokens than rows"
                )
            self._rows_first.add(name)
        pieces, changed = [x], []
        for sibling in siblings:
            for number, section in enumerate(self._composition.plan(sibling, x.device).sections):
                if section.operator.changes_input:
                    rows = section.operator.before(_select(x, section.rows))
                    if rows is not None:
                        pieces.append(rows.to(x.dtype))
                        changed.append((sibling, number))
        inputs = _Inputs(x, x, {}, set(siblings))
        if changed:
            lengths = tuple(map(len, pieces))
            needed, inputs.orders = self._composition.needed(siblings, tuple(changed), lengths, x.device)
            inputs.rows = torch.cat(pieces).index_select(0, needed)
        self._inputs[siblings] = inputs
        return inputs.rows

    def after(
        self, name: str, siblings: tuple[str, ...], y: Tensor, base: Callable[..., Tensor], *, again: bool = False
    ) -> Tensor:
        """Return the layer's output. `y`: the base layer's output for the input that `before` returned. `base`:
        computes the base layer once more, for methods that need a second product. `again`: `after` will be called again
        for the same input."""
        inputs = self._inputs[siblings]
        x, order = inputs.x, inputs.orders.get(name)
        if not again:
            inputs.waiting.discard(name)
        if not inputs.waiting:
            del self._inputs[siblings]
        if order is not None:
            y = y.index_select(0, order)
        plan = self._composition.plan(name, y.device)
        if not plan.sections:
            return y
        outputs = [each.operator.after(_select(x, each.rows), _select(y, each.rows), base) for each in plan.sections]
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


class _Inputs:
    """One input of a layer group: `x`, the rows to send, and the positions of each sibling's rows among them."""

    def __init__(self, x: Tensor, rows: Tensor, orders: dict[str, Tensor], waiting: set[str]) -> None:
        self.x, self.rows, self.orders, self.waiting = x, rows, orders, waiting
        self._state = _state(x)

    def is_for(self, x: Tensor) -> bool:
        """Returns True if these rows were made from `x`, and `x` has not changed since."""
        return x is self.x and _state(x) == self._state


def _state(x: Tensor) -> tuple[object, ...]:
    return None if x.is_inference() else x._version, torch.is_grad_enabled()


_Places = tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]
"""The rows of each section, those without an adapter, and the position of each row among both."""


class _Section(NamedTuple):
    operator: Operator
    rows: Tensor | None  # the operator's rows; None for all rows, in order


class _Plan(NamedTuple):
    sections: list[_Section]
    rest: Tensor | None  # rows without an adapter at this layer
    order: Tensor | None  # position of each row in the outputs of sections and rest; None if one section has all rows


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
