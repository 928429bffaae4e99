"""Planted faults: each is a mistake that a tenant's code could have, and has an attack that must find it.

If the suite never found a fault, its verdict "hidden" would prove nothing. Most faults are planted into a recording:
the rows of a real run are masked again in a wrong way, as an executor would have received them. `reused_pads`,
`without_ml_kem`, `uncovered_effects` and `blind_to_companies` break the real tenant while it runs.
"""

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import expand, random_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD
from symbiosis_priv.federation.parties import Parties
from symbiosis_priv.network import hybrid
from tenant.core.pads import SessionSecret
from tenant.masking.paper_pool import gaussian
from threat_model.attacks.base import Attack, DirectedAttack, Outcome, Trial
from threat_model.attacks.collusion import Collusion
from threat_model.attacks.recorded_links import Harvest
from threat_model.attacks.reused_noise import Differencing
from threat_model.attacks.statistics_of_masks import SamplerGrid, SeedRecovery
from threat_model.attacks.tokens import Averaging, RowScale, SubspaceProjection
from threat_model.evidence.public import Public
from threat_model.evidence.schemes import PAD, AttackedScheme
from threat_model.evidence.views import Exchange, ExecutorView
from threat_model.lab import PLANTED, Lab, Recording

NOISE = 16.0


def score(attack: Attack[Any, Any], view: object, public: Public, recording: Recording) -> Outcome:
    """The attack's score on a view with a fault in it."""
    guess = attack.run(view, public, torch.Generator().manual_seed(0))
    return Outcome(0, 0, 0.0, 1.0) if guess is None else attack.score(guess, recording.truth)


def plant(lab: Lab, ring: Recording, floats: Recording, step: Callable[[str], None]) -> list[Trial]:
    """Plant every fault, and run the attack that must find it. `ring` is a recording without masks, `floats` one on the
    float path, whose truth has the float rows. `step` is called with a description before each step."""
    step("planted faults")
    public = lab.public
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

    unfused, siblings = unfused_view(floats, public)
    plans: list[tuple[str, str, Attack[Any, Any], ExecutorView, Recording, Public]] = [
        ("ring masks from torch.randint", "rule 1", SeedRecovery(), _remasked(ring, small_integers), ring, public),
        ("float masks from torch.randn", "rule 1", SeedRecovery(), _remasked(floats, small_normals), floats, public),
        ("one-time masks in float32", "rule 1", SamplerGrid(), _remasked(floats, normals), floats, public),
        ("noises of low rank", "rule 1", SubspaceProjection(), _remasked(floats, low_rank, index=0), floats, public),
        ("scale on the wire", "rule 5", RowScale(), _with_scales(ring, public), ring, public),
        ("unfused q/k/v, separate float noise", "rule 4", Averaging(), unfused, floats, siblings),
    ]
    found = [
        Trial((name, rule, attack.name), True, score(attack, view, known, recording))
        for name, rule, attack, view, recording, known in plans
    ]

    def live(
        planting: AbstractContextManager[object], scheme: AttackedScheme, federation: Path | None = None
    ) -> Recording:
        with planting:
            return lab.record(scheme, PLANTED, federation=federation)

    def both(name: str, rule: str, kind: type[DirectedAttack[Any, Any]], recording: Recording) -> None:
        for attack in map(kind, DIRECTIONS):
            outcome = score(attack, recording.views.of(attack.party), public, recording)
            found.append(Trial((f"{name}, {attack.direction}", rule, attack.name), True, outcome))

    step("planted faults: a tenant that reuses pads")
    both("reused pad rows", "rule 3", Differencing, live(reused_pads(), PAD))
    step("planted faults: a combiner without ML-KEM")
    both("the second key leaves ML-KEM out", "pad", Harvest, live(without_ml_kem(), PAD))
    step("planted faults: effects outside the second key")
    both("effects are under TLS alone", "pad", Harvest, live(uncovered_effects(), PAD))
    step("planted faults: a tenant whose helper is of its executor's company")
    recording = live(blind_to_companies(), PAD, lab.one_company)
    both("executor and helper of one company", "rule 8", Collusion, recording)
    return found


def unfused_view(recording: Recording, public: Public) -> tuple[ExecutorView, Public]:
    """q, k and v sent separately: three requests of the same rows, each under its own fresh noise. Returns also the
    public knowledge that they are siblings. `recording`: a recording on the float path."""
    count = len(public.manifest.groups)
    groups = (0, count, count + 1)
    exchanges = []
    for order, call in recording.truth.of(index=0, direction=FORWARD).items():
        for i, group in enumerate(groups):
            noisy = (call.rows.double() + 4.0 * _normal(*call.rows.shape)).float()
            exchanges.append(Exchange(order + i * 10**9, group, FORWARD, "float", noisy, noisy))
    return ExecutorView(tuple(exchanges)), replace(public, siblings=(groups,))


def reused_pads() -> AbstractContextManager[object]:
    """Inside this block, sessions hand out row 0 of every keystream again and again (rule 3)."""
    return mock.patch.object(SessionSecret, "burn", return_value=0)


def without_ml_kem() -> AbstractContextManager[object]:
    """Inside this block, the second key of helpers' links follows from X25519's secret alone."""
    combine = hybrid.combine
    return mock.patch.object(hybrid, "combine", lambda _, *others: combine(b"", *others))


def uncovered_effects() -> AbstractContextManager[object]:
    """Inside this block, helpers of this process send effects as they are, and tenants take them so."""

    def plain(_: hybrid.Sealing, nonce: bytes, payload: memoryview) -> memoryview:
        return memoryview(bytes(payload))

    return mock.patch.multiple(hybrid.Sealing, cover=plain, uncover=plain)


def blind_to_companies() -> AbstractContextManager[object]:
    """Inside this block, a tenant accepts a helper that belongs to its executor's company (rule 8)."""
    return mock.patch.object(Parties, "same", return_value=False)


def _normal(rows: int, width: int) -> Tensor:
    """Standard normals, float64, that do not come from a seed of torch's generator."""
    return gaussian(expand(random_key(), first_row=0, rows=rows, width=2 * width))


def _remasked(recording: Recording, mask: Callable[[Tensor], Tensor], *, index: int | None = None) -> ExecutorView:
    """The executor's view if the tenant had masked each request with `mask`. Requests for effects are left out."""
    calls = recording.truth.calls
    kept = [e for e in recording.views.executor.of(index=index) if e.order in calls]
    masked = [replace(e, rows=mask(calls[e.order].rows)) for e in kept]
    return ExecutorView(tuple(e if e.arithmetic == "ring" else replace(e, arithmetic="float") for e in masked))


def _with_scales(recording: Recording, public: Public) -> ExecutorView:
    """The view with a row scale in each header. The attack reads only the header, so the rows need no mask."""
    exchanges = []
    for exchange in recording.views.executor.of(index=0, direction=FORWARD):
        tokens = recording.truth.calls[exchange.order].tokens
        assert tokens is not None
        _, scale = public.in_ring(0, FORWARD, public.vocabulary_rows[tokens])
        exchanges.append(replace(exchange, fields={**exchange.fields, "scale": scale[:, 0].tolist()}))
    return ExecutorView(tuple(exchanges))
