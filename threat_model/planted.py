"""Planted faults: each is a mistake that a tenant's code could have, and has an attack that must find it.

If the suite never found a fault, its verdict "hidden" would prove nothing. Most faults are planted into a recording:
the rows of a real run are masked again in a wrong way, as an executor would have received them. `reused_pads`,
`bare_effects`, `twin_helpers` and `blind_to_companies` break the real tenant while it runs.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, expand, random_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.federation.parties import Parties
from symbiosis_priv.network import wire
from tenant.core.pads import Pad, SessionSecret
from tenant.masking.paper_pool import gaussian
from threat_model.attacks import Attack, Outcome
from threat_model.attacks.collusion import Collusion
from threat_model.attacks.exchanges import RelayedAnswers
from threat_model.attacks.first_layer import Averaging, EvenMasks, RowScale, SubspaceProjection
from threat_model.attacks.reused_noise import Differencing
from threat_model.attacks.statistics_of_masks import SamplerGrid, SeedRecovery
from threat_model.evidence.public import Public
from threat_model.evidence.views import CollusionView, Exchange, ExecutorView
from threat_model.lab import Recording

NOISE = 16.0


@dataclass(frozen=True, eq=False)
class Fault:
    """A planted mistake, its place, and the attack that must find it."""

    name: str
    rule: str
    attack: Attack[Any, Any]
    view: ExecutorView | CollusionView
    public: Public
    recording: Recording

    def outcome(self) -> Outcome:
        """The attack's score on this fault."""
        guess = self.attack.run(self.view, self.public, torch.Generator().manual_seed(0))
        return Outcome(0, 0, 0.0, 1.0) if guess is None else self.attack.score(guess, self.recording.truth)


def plant(ring: Recording, floats: Recording, public: Public) -> list[Fault]:
    """Every fault that a recording can show.

    Args:
        ring: a recording without masks, in the ring.
        floats: a recording on the float path; its truth has the float rows.
    """
    small, other = torch.Generator().manual_seed(1234), torch.Generator().manual_seed(77)
    fresh = torch.Generator().manual_seed(secrets.randbits(60))
    axes = _normal(24, public.manifest.groups[0].inputs) * NOISE

    def small_integers(x: Tensor) -> Tensor:
        return x + torch.randint(-(1 << 31), 1 << 31, x.shape, generator=small).to(torch.int32)

    def small_normals(x: Tensor) -> Tensor:
        return x + NOISE * torch.randn(x.shape, generator=other)

    def normals(x: Tensor) -> Tensor:
        return x + NOISE * torch.randn(x.shape, generator=fresh)

    def low_rank(x: Tensor) -> Tensor:
        return (x.double() + _normal(len(x), len(axes)) @ axes).float()

    plans: list[tuple[str, str, Attack[Any, Any], ExecutorView, Recording]] = [
        ("ring masks from torch.randint", "rule 1", SeedRecovery(), _remasked(ring, small_integers), ring),
        ("float masks from torch.randn", "rule 1", SeedRecovery(), _remasked(floats, small_normals), floats),
        ("one-time masks in float32", "rule 1", SamplerGrid(), _remasked(floats, normals), floats),
        ("noises of low rank", "rule 1", SubspaceProjection(), _remasked(floats, low_rank, group=0), floats),
        ("scale on the wire", "rule 5", RowScale(), _with_scales(ring, public), ring),
    ]
    found = [Fault(name, rule, attack, view, public, recording) for name, rule, attack, view, recording in plans]
    return [*found, unfused_fault(floats, public)]


def unfused_fault(recording: Recording, public: Public) -> Fault:
    """q, k and v sent separately: three requests of the same rows, each under its own fresh noise.

    Args:
        recording: a recording on the float path.
    """
    count = len(public.manifest.groups)
    groups = (0, count, count + 1)
    exchanges = []
    for order, call in recording.truth.of(group=0, direction=FORWARD):
        for i, group in enumerate(groups):
            noisy = (call.rows.double() + 4.0 * _normal(*call.rows.shape)).float()
            exchanges.append(Exchange(order + i * 10**9, 0.0, group, FORWARD, "float", noisy, noisy))
    siblings = replace(public, siblings=(groups,))
    view = ExecutorView(tuple(exchanges))
    return Fault("unfused q/k/v, separate float noise", "rule 4", Averaging(), view, siblings, recording)


@contextmanager
def reused_pads() -> Iterator[None]:
    """Inside this block, sessions hand out row 0 of every keystream again and again (rule 3)."""
    with mock.patch.object(SessionSecret, "burn", return_value=0):
        yield


def reused_pad_faults(recording: Recording, public: Public) -> list[Fault]:
    """The faults of a recording made under `reused_pads`."""
    return [
        Fault(f"reused pad rows, {d}", "rule 3", Differencing(d), recording.views.executor, public, recording)
        for d in DIRECTIONS
    ]


@contextmanager
def bare_effects() -> Iterator[None]:
    """Inside this block, helpers of this process relay bare effects, and tenants open answers without a second
    keystream."""

    def bare(effect: memoryview, request: wire.Effect, entry: GroupEntry) -> memoryview:
        _, outputs = entry.columns(request.direction)
        return request.encoding.pack(np.frombuffer(effect, dtype="<i4").reshape(request.rows, outputs))

    with mock.patch("provider.gateway.connection.make_block", bare), mock.patch.object(Pad, "open_relayed"):
        yield


def bare_effect_faults(recording: Recording, public: Public) -> list[Fault]:
    """The faults of a recording made under `bare_effects`."""
    return [
        Fault(f"relayed effects are bare, {d}", "relay", RelayedAnswers(d), recording.views.executor, public, recording)
        for d in DIRECTIONS
    ]


@contextmanager
def twin_helpers() -> Iterator[None]:
    """Inside this block, all helpers of a session get one seed, as if their entries were one party (rule 11)."""
    with mock.patch.object(SessionSecret, "seed_for", return_value=secrets.token_bytes(SEED_BYTES)):
        yield


def twin_helper_fault(recording: Recording, public: Public) -> Fault:
    """The fault of a recording of two helpers made under `twin_helpers`."""
    return Fault("two helpers, one key", "rule 11", EvenMasks(), recording.views.executor, public, recording)


@contextmanager
def blind_to_companies() -> Iterator[None]:
    """Inside this block, a tenant accepts a helper that belongs to its executor's company (rule 8)."""
    with mock.patch.object(Parties, "same", return_value=False):
        yield


def one_company_faults(recording: Recording, public: Public) -> list[Fault]:
    """The faults of a recording of `Lab.one_company` made under `blind_to_companies`: the company combines its two
    logs."""
    view = CollusionView(recording.views.executor, recording.views.helpers)
    return [
        Fault(f"executor and helper of one company, {d}", "rule 8", Collusion(d), view, public, recording)
        for d in DIRECTIONS
    ]


def _normal(rows: int, width: int) -> Tensor:
    """Standard normals, float64, that do not come from a seed of torch's generator."""
    return gaussian(expand(random_key(), first_row=0, rows=rows, width=2 * width))


def _remasked(recording: Recording, mask: Callable[[Tensor], Tensor], *, group: int | None = None) -> ExecutorView:
    """The executor's view if the tenant had masked each request with `mask`. Requests for effects are left out."""
    view = recording.views.executor
    plain = {order: call.rows for order, call in recording.truth.calls.items()}
    kept = [e for e in view.exchanges if e.order in plain and group in (None, e.group)]
    return ExecutorView(tuple(replace(e, rows=mask(plain[e.order]), arithmetic=_arithmetic(e)) for e in kept))


def _arithmetic(exchange: Exchange) -> wire.Arithmetic:
    """The arithmetic of a request with one-time noise: none of these requests is for effects."""
    return "ring" if exchange.arithmetic == "ring" else "float"


def _with_scales(recording: Recording, public: Public) -> ExecutorView:
    """The view with a row scale in each header. The attack reads only the header, so the rows need no mask."""
    exchanges = []
    for exchange in recording.views.executor.of(group=0, direction=FORWARD):
        tokens = recording.truth.calls[exchange.order].tokens
        assert tokens is not None
        _, scale = public.in_ring(0, FORWARD, public.vocabulary_rows[tokens])
        exchanges.append(replace(exchange, fields={**exchange.fields, "scale": scale[:, 0].tolist()}))
    return ExecutorView(tuple(exchanges))
