"""Adversaries that answer wrongly and observe the tenant's reaction.

Privacy against a lying provider needs integrity (rule 6): a provider that adds an error and sees whether the tenant
continues learns something about the secret product. With verification every wrong answer ends the session, whatever
the secret is, so the abort carries no information. The planted fault is a tenant that only checks whether a result is
plausible: its aborts depend on the secret.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from provider.refusal import Refusal
from provider.relay.blocks import BlockStore, KeptBlock, without_blocks
from provider.relay.links import _block_of, make_block
from symbiosis_priv.arithmetic.keystream import expand, random_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, RANGE, Direction
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import QuarantinedError, VerificationError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.local import silenced
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.core.parts import UncheckedProduct
from tenant.demo.run import Tamper
from tenant.masking.backend import RingBackend, RingRows
from tenant.masking.registry import session_scheme
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from threat_model.active.manipulated_folders import attack_folders
from threat_model.active.registries import attack_registry
from threat_model.evidence.statistics import Interval, clopper_pearson
from threat_model.lab import Lab

Lie = Callable[[Tensor], None]
"""Changes an answer int32 `[r, o]` in place."""

_ROWS = 3
_WARM = 3  # single rows after which a session repeats what it has prepared
_PLAUSIBLE = 1 << 29
_PATIENCE_S: Final = 60.0  # a busy executor misses a block, and then nothing is relayed for some seconds
_GATEWAY: Final = "provider.gateway.connection"
_fetch = BlockStore.fetch


@dataclass(frozen=True)
class Detection:
    """The detection rate of one kind of lie over real sessions. `valuation`: the 2-adic valuation of its error."""

    name: str
    caught: int
    trials: int
    valuation: int | None = None

    @property
    def interval(self) -> Interval:
        """99 % interval of the detection rate."""
        return clopper_pearson(self.caught, self.trials)


@dataclass(frozen=True)
class AbortLeak:
    """Information that aborts carry about one secret bit per session (the sign of a product), in bits."""

    name: str
    trials: int
    aborts: int
    information: float


@dataclass(frozen=True)
class ActiveReport:
    detections: tuple[Detection, ...]
    leaks: tuple[AbortLeak, ...]

    @property
    def sound(self) -> bool:
        """True if every lie was caught, verified aborts told nothing, and the planted fault was found."""
        verified, skipped = self.leaks
        informed = skipped.information > 0.3  # bits about 32 fair bits, exceeded by chance once in 10^7
        return all(d.caught == d.trials for d in self.detections) and not verified.information and informed


@contextmanager
def plausible_is_enough() -> Iterator[None]:
    """The planted fault: inside this context, a tenant accepts every answer that is a plausible product."""

    def decode(self: RingRows, unchecked: UncheckedProduct) -> list[int]:
        product, _ = unchecked.unmasked()
        self.product[unchecked.start : unchecked.start + len(product)] = product
        wrong: list[int] = (product.long().abs().amax(dim=1) >= _PLAUSIBLE).nonzero()[:, 0].tolist()
        return wrong

    with mock.patch.object(RingRows, "decode", decode):
        yield


def attack_actively(lab: Lab, *, repeats: int, rng: torch.Generator) -> ActiveReport:
    """Run every lie against real, masked sessions. `repeats`: sessions per lie."""
    with silenced("tenant"):  # every session here ends in a quarantine, which would be logged
        preparation = prepare(lab.store, digest=lab.federation.model_digest, cache=lab.cache)
        detections = []
        for kind, role, lies, valuation in _lies(lab, rng):
            caught = 0
            for trial in range(repeats):
                liar = Tamper(role, lies[trial % len(lies)])
                caught += _session(lab, preparation, liar, DIRECTIONS[trial % 2], rng)[0]
            detections.append(Detection(kind, caught, repeats, valuation))
        late = [_lie_while_decoding(lab, preparation, honest, rng) for honest in range(2 * repeats)]
        detections.append(Detection("one wrong answer while single rows are decoded", sum(late), len(late)))
        for what, refused in (
            ("hostile folder", attack_folders(lab)),
            ("lying registry", attack_registry(lab.federation)),
            ("lying relay", attack_relays(lab, preparation)),
        ):
            detections += [Detection(f"{what}: {name}", int(caught), 1) for name, caught in refused.items()]
        leaks = [_leak(lab, preparation, "with verification", 8 * repeats, rng)]
        with plausible_is_enough():
            leaks.append(_leak(lab, preparation, "verification skipped (planted)", 8 * repeats, rng))
        return ActiveReport(tuple(detections), tuple(leaks))


_Kind = tuple[str, wire.Role, list[Lie], int | None]
"""The name of some lies that are used in turn, the role of the liar, the lies, and the valuation of their error."""


def _lies(lab: Lab, rng: torch.Generator) -> list[_Kind]:
    def error(valuation: int) -> Lie:
        def lie(answer: Tensor) -> None:
            odd = int(torch.randint(0, 1 << 30, (), generator=rng)) * 2 + 1
            place = int(torch.randint(answer.numel(), (), generator=rng))
            answer.view(-1)[place] += _signed(odd << valuation)

        return lie

    def near_range(answer: Tensor) -> None:
        place = int(torch.randint(answer.numel(), (), generator=rng))
        answer.view(-1)[place] += RANGE - 1

    def swap(answer: Tensor) -> None:
        answer.copy_(answer.flip(0))

    def other_layer(answer: Tensor) -> None:
        # the product of other rows, of the same shape, with another block's weights
        shapes = [(group.inputs, group.stacked_outputs) for group in lab.public.manifest.groups]
        weight = lab.public.quantised(shapes.index(shapes[0], 1)).weight.to(torch.int32)
        rows = expand(random_key(), first_row=0, rows=len(answer), width=weight.shape[1])
        if answer.shape[1] == weight.shape[0]:
            answer.copy_(rows @ weight.t())
        else:
            answer.add_(1)

    earlier: list[Tensor] = []

    def replay(answer: Tensor) -> None:
        old = next((e for e in earlier if e.shape == answer.shape), None)
        earlier.append(answer.clone())
        answer.copy_(old if old is not None else torch.zeros_like(answer))

    def repeated(answer: Tensor) -> None:
        answer[0, 0] += _signed(1 << 31)

    return [
        *((f"error of valuation {v}", "executor", [error(v)], v) for v in range(32)),
        ("error as large as the range", "executor", [near_range], None),
        ("the same error in every session", "executor", [repeated], None),
        ("rows swapped", "executor", [swap], None),
        ("another layer's product", "executor", [other_layer], None),
        ("replayed answer", "executor", [replay], None),
        ("helper: wrong effects", "helper", [error(v) for v in (0, 16, 29, 30, 31)], None),
        ("helper: replayed effects", "helper", [replay], None),
    ]


def _session(
    lab: Lab, preparation: Preparation, liar: Tamper | None, direction: Direction, rng: torch.Generator
) -> tuple[bool, Tensor]:
    """Run one request in a fresh session. Returns True if it aborted, and the true product int64 `[r, o]`."""
    index = GroupIndex(0)
    facts = preparation.facts[index]
    x = torch.randint(-1000, 1000, (_ROWS, facts.inputs(direction)), generator=rng, dtype=torch.int64)
    weight = lab.public.quantised(index).weight.long()
    truth = x @ (weight.t() if direction == FORWARD else weight)
    options = SessionOptions(masking="pad", deadline_s=20, pool_memory=0, wiretap=liar)
    with closing(Session(lab.federation, preparation, options=options)) as session:
        try:
            session.product(index, direction, x.to(torch.int32))
        except (VerificationError, QuarantinedError):
            return True, truth
    return False, truth


def _lie_while_decoding(lab: Lab, preparation: Preparation, honest: int, rng: torch.Generator) -> bool:
    """Multiply single rows, as generation does, of which the last one gets a wrong answer, after `_WARM` and `honest`
    right ones. Returns True if the session accepts the right answers, and aborts at the wrong one."""
    answers = 0

    def lie_once(answer: Tensor) -> None:
        nonlocal answers
        answers += 1
        if answers > _WARM + honest:
            place = int(torch.randint(answer.numel(), (), generator=rng))
            answer.view(-1)[place] += 1

    facts = session_scheme("pad").facts(preparation)
    options = SessionOptions(masking="pad", deadline_s=20, wiretap=Tamper("executor", lie_once))
    with closing(RingBackend(facts, Session(lab.federation, preparation, options=options))) as backend:
        row = torch.randn((1, facts[0].inputs(FORWARD)), generator=rng)
        for _ in range(_WARM + honest):
            backend.linear(0, FORWARD, row)
        try:
            backend.linear(0, FORWARD, row)
        except VerificationError:
            return True
    return False


def _leak(lab: Lab, preparation: Preparation, name: str, trials: int, rng: torch.Generator) -> AbortLeak:
    """Changes one entry so that the result is implausibly large exactly if the secret entry is positive."""

    def probe(answer: Tensor) -> None:
        answer[0, 0] += _PLAUSIBLE - 1

    aborts, secret = [], []
    for _ in range(trials):
        aborted, truth = _session(lab, preparation, Tamper("executor", probe), FORWARD, rng)
        aborts.append(aborted)
        secret.append(bool(truth[0, 0] > 0))
    return AbortLeak(name, trials, sum(aborts), mutual_information(aborts, secret))


def mutual_information(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Plug-in estimate of the mutual information in bits; exactly 0 if one of the sequences is constant."""
    n, of_a, of_b, joint = len(a), Counter(a), Counter(b), Counter(zip(a, b, strict=True))
    return sum(count / n * math.log2(count * n / (of_a[x] * of_b[y])) for (x, y), count in joint.items())


def _signed(value: int) -> int:
    """Return a residue modulo 2^32 as int32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def attack_relays(lab: Lab, preparation: Preparation) -> dict[str, bool]:
    """Lies about relayed effects, planted in providers of this process: a helper that signs a wrong block, and an
    executor that subtracts something else than it hands out. Returns, for each lie, True if the product was refused and
    only the liar was named."""

    def wrong_block(effect: memoryview, request: wire.Effect, entry: GroupEntry) -> memoryview:
        block = bytearray(make_block(effect, request, entry))
        block[0] ^= 1
        return memoryview(block)

    def longer_block(effect: memoryview, request: wire.Effect, entry: GroupEntry) -> memoryview:
        block = wrong_block(effect, request, entry)
        return memoryview(bytes(block) + bytes(len(block) // request.rows))

    def longer_binding(request: wire.Effect) -> wire.Binding:
        block = _block_of(request)
        return msgspec.structs.replace(block, rows=block.rows + 1)

    def other_rows(
        answer: memoryview, parts: Iterable[tuple[wire.BlockRows, memoryview]], request: wire.Execute
    ) -> NDArray[np.int32]:
        return np.ascontiguousarray(without_blocks(answer, parts, request)[::-1])

    def withhold(*_: object) -> KeptBlock:
        raise Refusal(wire.ErrorCode.REFUSED, "there is no such block")

    make, fetch = f"{_GATEWAY}.make_block", "provider.relay.blocks.BlockStore.fetch"
    subtract: dict[str, Callable[..., Any]] = {f"{_GATEWAY}.without_blocks": other_rows}
    longer: dict[str, Callable[..., Any]] = {make: longer_block, "provider.relay.links._block_of": longer_binding}
    lies: dict[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {
        "a helper signs a wrong block": ("helper", {make: wrong_block}),
        "a helper signs more rows than were ordered": ("helper", longer),
        "an executor subtracts other rows": ("executor", subtract),
        "an executor withholds the block": ("executor", subtract | {fetch: withhold}),
        "an executor's block is not signed": ("executor", subtract | {fetch: _changed(signature=bytes(64))}),
        "an executor's block is another one": ("executor", subtract | {fetch: _changed(nonce=bytes(16))}),
        "an executor changes the block": ("executor", subtract | {fetch: _changed()}),
    }
    federation, options = load_federation(lab.relayed), SessionOptions(masking="pad", deadline_s=20, pool_memory=0)
    rows = torch.arange(3 * preparation.facts[0].inputs(FORWARD), dtype=torch.int32).view(3, -1) % 97 - 48
    found = dict.fromkeys(lies, False)
    for name, (liar, replacements) in lies.items():
        with ExitStack() as stack:
            for target, lie in replacements.items():
                stack.enter_context(mock.patch(target, lie))
            session = stack.enter_context(closing(Session(federation, preparation, options=options)))
            deadline = time.monotonic() + _PATIENCE_S
            try:
                while not session.ledger().rows_relayed and time.monotonic() < deadline:
                    session.product(GroupIndex(0), FORWARD, rows)
            except VerificationError as error:
                found[name] = error.provider == liar
    return found


def _changed(**fields: bytes) -> Callable[..., KeptBlock]:
    """Returns a `fetch` that changes fields of the block's header, or the payload if no field is named."""

    def fetch(store: BlockStore, tenant: Any, block: bytes) -> KeptBlock:
        kept = _fetch(store, tenant, block)
        header = msgspec.structs.replace(kept.header, **fields)
        assert kept.payload is not None
        payload = kept.payload if fields else memoryview(bytes(kept.payload)[::-1])
        return KeptBlock(header, kept.helper, kept.size, payload)

    return fetch
