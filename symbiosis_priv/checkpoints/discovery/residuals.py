"""Finds where a linear, a residual sum, a norm and the next linears follow one another, for `composed` layer groups.

    h' = h + W1 a          h is the input of an earlier norm
    n  = norm(h')          n = r (C h' * g) + b, with one factor r per row. LayerNorm: C subtracts a row's mean.
                           RMSNorm: C changes nothing, and b = 0
    y  = W2 n              the members of one layer group, all with the input n

Then `y = r (W2 (C h * g) + W2 diag(g) C W1 a) + W2 b`. The first product is an ordinary one, and the second one, with
`W1 a`, is that of a composed group, whose bias is `W2 b`. A tenant knows h and a at the same time, so one round trip
brings both (`tenant.model.trips`). Sums of two linears' outputs (attention and MLP side by side) are not composed.

What is found here decides what providers serve, and not what a tenant computes: it compares the sum and the norm with
these formulas in every pass.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.discovery.linears import called
from symbiosis_priv.checkpoints.discovery.tracing import inputs_of
from symbiosis_priv.checkpoints.layers import AGAIN, THROUGH, Composed, GroupSpec

_SUMS = ("add", "__add__", "__radd__", "add_", "__iadd__")
_VIEWS = ("view", "reshape", "flatten", "contiguous")


def with_composed(model: PreTrainedModel, specs: Sequence[GroupSpec]) -> list[GroupSpec]:
    """Add the composed groups of a model without weights, each after the group of its first linear. Returns `specs` if
    the model has none."""
    groups = {member: spec for spec in specs for member in spec.members if spec.experts == 1}
    trace = _Trace(model, groups)
    for inputs in inputs_of(model.forward, model.config, model.main_input_name):
        if trace.run(model.forward, inputs):
            break
    found = {spec.members: [spec] for spec in specs}
    for composed, first, second in trace.places:
        members = (f"{first.members[0]}{AGAIN}", *(f"{member}{THROUGH}" for member in second.members))
        spec = GroupSpec(members, first.inputs, (*first.outputs, *second.outputs), composed=composed)
        found[first.members].append(spec)
    return [spec for made in found.values() for spec in made]


class _Sum(NamedTuple):
    """The linears whose outputs were added, and the last norm of the other term, or ""."""

    outputs: frozenset[str]
    residual: str = ""


class _Trace(TorchFunctionMode):
    """Follows outputs of linears through sums and norms to the next linears, in one run. `places` are the composed
    groups that were found: what they compose, the group of W1, and that of W2."""

    def __init__(self, model: nn.Module, groups: Mapping[str, GroupSpec]) -> None:
        super().__init__()
        self.places: list[tuple[Composed, GroupSpec, GroupSpec]] = []
        self._groups = groups
        self._linears = {name: module for name, module in model.named_modules() if name in groups}
        self._norms = {name: norm for name, m in model.named_modules() if (norm := _norm(m)) is not None}
        self._modules = {name: model.get_submodule(name) for name in self._norms}

    def run(self, function: Callable[..., Any], inputs: dict[str, Any]) -> bool:
        """Run a function of the model. Returns False if it failed; then nothing was found."""
        self._alive: list[Any] = []  # so that no other tensor gets the `id` of one of these
        self._outputs: dict[int, str] = {}
        self._sums: dict[int, _Sum] = {}
        self._rows: dict[int, int] = {}  # a view: a tensor with the same rows
        self._inputs: dict[int, str] = {}  # the last norm of a tensor
        self._normed: dict[int, tuple[str, _Sum | None]] = {}  # a norm, and the sum that it was given
        self._reached: dict[str, int] = {}
        hooks = [m.register_forward_hook(partial(self._linear, n), with_kwargs=True) for n, m in self._linears.items()]
        hooks += [m.register_forward_hook(partial(self._norm, n), with_kwargs=True) for n, m in self._modules.items()]
        try:
            with self:
                function(**inputs)
        except Exception:  # the architecture's code may raise any error where it was not written for such inputs
            return False
        finally:
            for hook in hooks:
                hook.remove()
        self.places = self._found()
        return True

    def _linear(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        self._alive += [x, output]
        self._outputs[self._id(output)] = name
        self._reached[name] = id(x) if name not in self._reached else -1  # called twice: no single place

    def _norm(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if args and not kwargs:
            self._alive += [args[0], output]
            self._inputs[self._id(args[0])] = name
            self._normed[id(output)] = (name, self._sums.get(self._id(args[0])))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if called(func) in _SUMS and not kwargs and len(args) == 2 and all(isinstance(x, Tensor) for x in args):
            self._alive += [*args, result]
            one, other = (self._terms(self._id(x)) for x in args)
            for of in (self._sums, self._outputs, self._inputs):
                of.pop(self._id(result), None)  # a sum in place
            if one is not None and other is not None and not (one.residual and other.residual):
                self._sums[self._id(result)] = _Sum(one.outputs | other.outputs, one.residual or other.residual)
        elif called(func) in _VIEWS and isinstance(result, Tensor) and result.shape[-1:] == args[0].shape[-1:]:
            self._alive += [args[0], result]
            self._rows[id(result)] = self._id(args[0])
        return result

    def _terms(self, x: int) -> "_Sum | None":
        if x in self._inputs:
            return _Sum(frozenset(), self._inputs[x])
        return _Sum(frozenset({self._outputs[x]})) if x in self._outputs else self._sums.get(x)

    def _id(self, x: Tensor) -> int:
        """The identity of the first tensor with these rows."""
        return self._rows.get(id(x), id(x))

    def _found(self) -> list[tuple[Composed, GroupSpec, GroupSpec]]:
        places = []
        by_input: dict[int, list[str]] = {}
        for name, x in self._reached.items():
            by_input.setdefault(x, []).append(name)
        taken: set[str] = set()
        for normed, (norm, total) in self._normed.items():
            second = [self._groups[name] for name in by_input.get(normed, ())]
            if total is None or not total.residual or len(total.outputs) != 1 or not second:
                continue
            [first] = total.outputs
            alone = len(self._groups[first].members) == 1
            if first not in taken and alone and {*second[0].members} <= {*by_input[normed]}:
                composed = Composed(residual=total.residual, norm=norm, **self._norms[norm])
                places.append((composed, self._groups[first], second[0]))
                taken.add(first)
        return places


def _norm(module: nn.Module) -> dict[str, Any] | None:
    """Returns what `Composed` says of a norm, by name; None if a module is no norm with one factor per row. Tried on a
    small instance, without the model's weights."""
    parameters = dict(module.named_parameters())
    shapes = {p.shape for p in parameters.values()} or {torch.Size(getattr(module, "normalized_shape", ()))}
    if not {*parameters} <= {"weight", "bias"} or len(shapes) > 1 or [*module.buffers()]:
        return None
    [shape] = shapes
    if len(shape) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.rand(*sides, dtype=torch.float32, device="cpu", generator=generator) + 0.5
        for sides in (shape, shape, (2, *shape))
    )
    given = {"weight": weight, "bias": bias}
    small = copy.copy(module)
    small.__dict__["_parameters"] = {name: given[name] if name in parameters else None for name in module._parameters}
    try:
        n = small.forward(x)
    except Exception:  # foreign code may raise anything
        return None
    if not isinstance(n, Tensor) or n.shape != x.shape or n.dtype != x.dtype:
        return None
    n = n - bias if "bias" in parameters else n
    for one_plus, centred in itertools.product((False, True), repeat=2):
        u = x - x.mean(1, keepdim=True) if centred else x
        u = u * (weight + int(one_plus)) if "weight" in parameters else u
        factor = (n * u).sum(1, keepdim=True) / (u * u).sum(1, keepdim=True)
        if torch.allclose(n, factor * u, rtol=1e-5, atol=1e-5 if centred else 0):
            return {"parameters": tuple(sorted(parameters, reverse=True)), "one_plus": one_plus, "centred": centred}
    return None
