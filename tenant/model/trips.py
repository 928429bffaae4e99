"""Two round trips for a transformer block while tokens are decoded, instead of four.

An ordinary pass waits for the product of every layer group in turn. Where a federation serves composed groups
(`checkpoints.discovery.residuals`), the tenant sends two rows at once, each with its own pad and scale:

    h * g  through  W2                       h: the residual stream. g: the weight of the next norm
    a      through  [W1; W2 diag(g) W1]      a: the input of the linear W1. Returns o = W1 a, and y2

The first product is y1. With `h' = h + o` and the norm's factor r, the next linears' output `W2 norm(h')` is
`r (y1 + y2)`. It is known before the model asks for it, so the pass waits once. LayerNorm subtracts the mean of h'
first: the tenant subtracts the mean of h, and the composed group has the weights `W2 diag(g) C W1`, of which C
subtracts that of o. The bias b of the norm adds `W2 b`, which is the composed group's bias.

The model's own code runs as ever: it adds, normalises, and calls the next linears. This module sees four calls:

    before the sum     a hook of the norm before W1 keeps its input h
    W1                 `Trip.send` makes the round trip, and returns o
    the next norm      its hook compares its input with h + o, and its output with `r (h' * g) + b`, which gives r
    W2                 `LayerGroup.output` returns what the hook has set, if its input is the norm's output

Nothing is assumed about a model or an adapter. If a sum, a norm or a tensor is not the expected one, the next linears
make a round trip of their own. An adapter may add to the output of W1: what it adds is computed before the rows are
sent, and belongs to h. If it changes the output in another way, the comparison fails, and the block takes four round
trips.

Passes with gradients, and passes of more than `MOST_ROWS` rows, take four: composed groups need about twice the
multiply-adds and half again as many bytes, which costs more than it saves there.
"""

import logging
import weakref
from collections.abc import Mapping
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.discovery.linears import name_in
from symbiosis_priv.checkpoints.layers import AGAIN, THROUGH
from tenant.masking.backend import Product
from tenant.model.remote_linear import LayerGroup, RemoteLayer, output_dtype
from tenant.options import MOST_ROWS

log = logging.getLogger(__name__)

_REST = 256  # passes in four round trips after a comparison has failed, before the next try
_ROUNDINGS = 4  # of a norm or a sum in the model's dtype, for comparisons
_OF_SUMS = 16  # of sums over a row, which are float32's in every dtype
_LARGEST_FACTOR = 2.0**20  # of a norm that adds 1e-12 or more to the variance


class Trip:
    """The round trip of one composed group.

    Args:
        before, after: the names of the norms before W1 and after it.
        first, second: the layer groups of W1 and W2.
        owner, leaf: the module that calls W1, and its attribute.
    """

    def __init__(
        self, index: int, first: LayerGroup, second: LayerGroup, *, before: str, after: str, owner: nn.Module, leaf: str
    ) -> None:
        self.index, self.second, self.before, self.after = index, second, before, after
        self._first, self._owner, self._leaf = weakref.ref(first), weakref.ref(owner), leaf  # `first` holds this object
        self._rests = 0
        entry, facts = second.backend.facts[index].entry, second.backend.facts
        assert entry.composed is not None
        self._composed, self._width, self._widths = entry.composed, entry.outputs[0], entry.outputs[1:]
        composed, own = (
            torch.zeros(f.entry.stacked_outputs, dtype=torch.float32, device="cpu") if f.bias is None else f.bias
            for f in (facts[index], facts[second.index])
        )
        self._constants = {  # on one device; see `_on`
            "first_bias": composed[: self._width].to(torch.float32),
            "bias": (composed[self._width :] + own).to(torch.float32),  # the norm's factor does not multiply it
            "gain": torch.ones(self._width, dtype=torch.float32, device="cpu"),
        }

    def send(self, x: Tensor) -> Tensor | None:
        """Compute the output of W1, and keep the sum of both products. Returns None if this input takes an ordinary
        product."""
        state, dtype = _state, output_dtype(x)
        if state.adding is self:
            return x.new_zeros((*x.shape[:-1], self._width), dtype=dtype)
        sent, state.sent = state.sent, None
        if sent is not None:  # the norm after another W1 was not called
            sent.trip.failed()
        norm, h = state.residual or (None, x)
        width, count = self._width, x.numel() // x.shape[-1]
        if norm != self.before or h.numel() != count * width or h.device != x.device or self._has_other_rows():
            return None
        if self._rests:
            self._rests -= 1
            return None
        added = self._added(x)
        if added is not None and added.numel() != h.numel():
            return None
        terms = [term.reshape(count, width) for term in (h, added) if term is not None]
        total = sum(terms, self._on(x.device)["first_bias"])
        o, through, own = (
            torch.empty((count, size), dtype=torch.float32, device=x.device)
            for size in (width, sum(self._widths), sum(self._widths))
        )
        rows = self._before_factor(total)
        self.second.backend.multiply_all(
            [
                Product(self.index, FORWARD, [x.reshape(count, -1)], [o, through]),
                Product(self.second.index, FORWARD, [rows], [own]),
            ]
        )
        y = own.add_(through).sub_(self._on(x.device)["bias"])
        o = o.to(dtype)
        size = sum((term.to(torch.float32).abs() for term in terms), o.to(torch.float32).abs())
        state.sent = _Sent(self, sum(terms, o), size, y)
        return o.view(*x.shape[:-1], width)

    def _added(self, x: Tensor) -> Tensor | None:
        """What an adapter adds to the output for an input `x`: its own output where the linear returns zeros."""
        owner = self._owner()
        module = None if owner is None else owner._modules.get(self._leaf)
        if module is None or (isinstance(module, RemoteLayer) and not module.adds):
            return None
        _state.adding = self
        try:
            if not isinstance(module, RemoteLayer):  # a layer of PEFT around it
                return module(x)  # type: ignore[no-any-return]
            zeros = module.forward(x)
            return zeros if module.tasks is None else module.tasks(module, zeros)
        finally:
            _state.adding = None

    def finish(self, sent: "_Sent", total: Tensor, norm: nn.Module, normed: Tensor) -> bool:
        """Set the output of the next linears for a norm's output. Returns False if it, the norm's weight, or its input
        `total` is not the expected one."""
        if total.numel() != sent.total.numel() or normed.shape != total.shape:
            return False
        rows, found = total.reshape(sent.total.shape), normed.reshape(sent.total.shape)
        if not _same(rows, sent.total, sent.size) or not self._is_as_loaded(norm):
            return False
        wide, constants = rows.to(torch.float32), self._on(rows.device)
        unscaled = self._before_factor(wide)
        bias = constants["norm.bias"] if "norm.bias" in constants else torch.zeros_like(unscaled[0])
        peak = unscaled.abs().amax(-1, keepdim=True)
        factor = _factor(found - bias, unscaled, peak)
        size = (factor * unscaled).abs_()
        if self._composed.centred:  # the mean is rounded, too
            of_mean = (constants["gain"] * (wide.abs() + wide.abs().mean(-1, keepdim=True))).abs_()
            # of a row with equal entries, the norm returns its bias and roundings, which tell no factor
            equal = peak <= _OF_SUMS * torch.finfo(torch.float32).eps * of_mean.amax(-1, keepdim=True)
            size = factor.abs().masked_fill_(equal, _LARGEST_FACTOR) * of_mean + bias.abs()
        if not _same(found, factor * unscaled + bias, size):
            return False
        y = (sent.product * factor).add_(constants["bias"])
        dtype = output_dtype(normed)
        parts = [part.to(dtype).contiguous() for part in y.split(self._widths, dim=1)]
        self.second.set_output(normed, [part.view(*total.shape[:-1], -1) for part in parts])
        return True

    def take(self, norm: nn.Module) -> None:
        """Keep the norm's parameters as they were loaded: providers have composed them. If the norm is trained later,
        its block takes four round trips."""
        parameters = {name: norm.get_parameter(name).detach() for name in self._composed.parameters}
        kept = {f"norm.{name}": tensor.to(torch.float32, copy=True) for name, tensor in parameters.items()}
        if "norm.weight" in kept:
            kept["gain"] = kept["norm.weight"] + int(self._composed.one_plus)
        self._constants |= kept

    def _is_as_loaded(self, norm: nn.Module) -> bool:
        now = {name: getattr(norm, name) for name in self._composed.parameters}
        return all(torch.equal(p, self._on(p.device)[f"norm.{name}"].to(p.dtype)) for name, p in now.items())

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """The biases and the norm's parameters in a device's memory, to which they are copied once."""
        if any(constant.device != device for constant in self._constants.values()):
            self._constants = {name: constant.to(device) for name, constant in self._constants.items()}
        return self._constants

    def _before_factor(self, x: Tensor) -> Tensor:
        """What the norm's factor multiplies, float32 `[r, d]`."""
        x = x.to(torch.float32)
        return (x - x.mean(-1, keepdim=True) if self._composed.centred else x) * self._on(x.device)["gain"]

    def failed(self) -> None:
        """Take ordinary products for some passes."""
        log.debug("composed group %d: the sum or the norm is another one; the next passes take four", self.index)
        self._rests = _REST

    def _has_other_rows(self) -> bool:
        first = self._first()
        return first is None or len(first.adapter_rows) + len(self.second.adapter_rows) > 0


class _Sent(NamedTuple):
    """A round trip whose norm has not been called yet.

    Args:
        total: `[r, d]`, the expected input of the norm: h + o, and what an adapter adds.
        size: float32 `[r, d]`, the sum of the terms' sizes, by which their sum may be rounded otherwise.
        product: float32 `[r, o]`, y1 + y2 without bias.
    """

    trip: Trip
    total: Tensor
    size: Tensor
    product: Tensor


class _State(local):
    """What one thread's pass has reached.

    Attributes:
        residual: the last norm, and its input.
        sent: the last round trip, until the norm after it is called.
        adding: the trip that asks for what an adapter adds.
    """

    residual: tuple[str, Tensor] | None = None
    sent: _Sent | None = None
    adding: Trip | None = None


_state = _State()


class _AfterNorm:
    """Hook of a norm. `name` is the norm's name in the manifest."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        state = _state
        sent, state.sent, state.residual = state.sent, None, None
        total = args[0] if len(args) == 1 else None
        if type(total) is not Tensor or type(output) is not Tensor:
            return
        if sent is not None and not (sent.trip.after == self.name and sent.trip.finish(sent, total, module, output)):
            sent.trip.failed()
        if 0 < total.numel() // total.shape[-1] <= MOST_ROWS:
            state.residual = self.name, total


def _factor(scaled: Tensor, unscaled: Tensor, peak: Tensor) -> Tensor:
    """The factor of each row, `[r, 1]`, 0 for a row of zeros. `peak` is the row's largest absolute value."""
    peak = peak.masked_fill(peak == 0, 1)
    unit = unscaled / peak  # squares of small and of large numbers would leave the range of float32
    return (scaled * unit).sum(-1, keepdim=True) / unit.square().sum(-1, keepdim=True).clamp_(min=1) / peak


def _same(found: Tensor, expected: Tensor, size: Tensor) -> bool:
    """Returns True if two tensors differ by roundings of values of this size only."""
    own, sums = torch.finfo(found.dtype), torch.finfo(torch.float32)
    least = max(_ROUNDINGS * own.eps * own.smallest_normal, sums.smallest_normal)  # subnormal numbers have fewer digits
    bound = size.mul_(_ROUNDINGS * own.eps + _OF_SUMS * sums.eps).add_(least)
    return bool(((found.to(torch.float32) - expected.to(torch.float32)).abs() <= bound).all())


def join_groups(model: PreTrainedModel, groups: Mapping[tuple[str, ...], LayerGroup]) -> list[tuple[Trip, nn.Module]]:
    """Connect the layer groups of a split model by its composed groups. `groups`: the layer groups of the model's
    offloaded linears, by the names of their members, and its composed groups. Returns trips, and the norm after W1.
    Call `Trip.take` with the norm after the weights were loaded."""
    modules = dict(model.named_modules())
    made, hooked = [], set[str]()
    for members, group in groups.items():
        entry = group.backend.facts[group.index].entry
        if entry.composed is None:
            continue
        first = groups.get((members[0].removesuffix(AGAIN),))
        second = groups.get(tuple(member.removesuffix(THROUGH) for member in members[1:]))
        names = (entry.composed.residual, entry.composed.norm, members[0].removesuffix(AGAIN))
        before, after, linear = (name_in(model, name, modules) for name in names)
        if first is None or second is None or before is None or after is None or linear is None:
            continue
        owner, _, leaf = linear.rpartition(".")
        where = {"before": names[0], "after": names[1], "owner": modules[owner], "leaf": leaf}
        first.trip = trip = Trip(group.index, first, second, **where)
        for name, module in ((names[0], modules[before]), (names[1], modules[after])):
            if name not in hooked:
                module.register_forward_hook(_AfterNorm(name))
                hooked.add(name)
        made.append((trip, modules[after]))
    return made
