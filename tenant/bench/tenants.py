"""Many tenants at one provider: its batching policies and its shards beside each other, by turns and in one run.

Every variant has a provider of its own, all of them of the same synthetic model, and at any time one of them has work
to do. The tenants are processes of their own over real TLS (`load`); they ask, and compute with an adapter, so that
what is measured is the provider. On a machine that both share, their processor time counts too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv import certificates
from symbiosis_priv.certificates import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.system import processes as start
from tenant.bench.load import Asker, Kind, Load, Report
from tenant.bench.report import Row
from tenant.bench.status import METRICS, status_of

_START_S = 600.0  # a wide model is quantised first
_SLACK_S = 120.0  # for the last turn of each tenant
_CHECKED_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """So many tenants of each kind at once."""

    generating: int
    training: int


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What the tenants of a kind ask for, by turns.

    Args:
        generating_rows, training_rows: of each request.
        ranks: of their adapters.
    """

    generating_rows: tuple[int, ...]
    training_rows: tuple[int, ...]
    ranks: tuple[int, ...]

    def askers(self, scenario: Scenario) -> Iterator[tuple[str, Kind, int, int]]:
        """(name, kind, rows, rank) of each tenant."""
        kinds: tuple[tuple[Kind, int, tuple[int, ...]], ...] = (
            ("generating", scenario.generating, self.generating_rows),
            ("training", scenario.training, self.training_rows),
        )
        for kind, count, sizes in kinds:
            pairs = [(rows, rank) for rank in self.ranks for rows in sizes]
            for i, (rows, rank) in zip(range(count), itertools.cycle(pairs), strict=False):
                yield f"{kind}-{i}", kind, rows, rank


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a provider computes.

    Args:
        policy: of its scheduler.
        ranks: processes that hold the model together.
        sharding: how they share a product out.
    """

    policy: str
    ranks: int = 1
    sharding: str = "columns"

    def __str__(self) -> str:
        return self.policy if self.ranks == 1 else f"{self.policy}-{self.ranks}-{self.sharding}"


def variants(*, policies: Sequence[str], ranks: Sequence[int], shardings: Sequence[str]) -> Iterator[Variant]:
    """All combinations; a single process shares nothing out."""
    for policy in policies:
        for count in ranks:
            for sharding in shardings if count > 1 else shardings[:1]:
                yield Variant(policy=policy, ranks=count, sharding=sharding)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One variant under one scenario.

    Args:
        generating, training: tenants.
        generating_rows: of requests of those who generate, each size once.
        tokens_per_s: rows that generating tenants got through the model.
        token_ms: mean, p50 and p99 of a token of a batch; None without generating tenants.
        trained_rows_per_s: rows that training tenants got through it, forward and back.
        step_ms: likewise, of a step; None without training tenants.
        rows_per_s: of products, whoever they were for.
        batch_rows, batch_requests: means of a product.
        product_share: of the time in which the executor had something to do, what it spent in products: its throughput
            over that of the bare kernel for the same rows.
        idle_share: of all time, what it spent waiting.
        resident_mib: the provider's memory afterwards.
        answers: compared with those that the same tenant got alone.
        wrong: of these.
        alone: a digest of what each tenant got alone, by its name.
    """

    variant: Variant
    generating: int
    generating_rows: tuple[int, ...]
    training: int
    tokens_per_s: float
    token_ms: tuple[float, float, float] | None
    trained_rows_per_s: float
    step_ms: tuple[float, float, float] | None
    rows_per_s: float
    batch_rows: float
    batch_requests: float
    product_share: float
    idle_share: float
    resident_mib: float
    answers: int
    wrong: int
    alone: Mapping[str, str]


def tenants_row(figures: Figures) -> Row:
    """For a report."""
    nothing = (None, None, None)
    token, step = figures.token_ms or nothing, figures.step_ms or nothing
    return {
        "generating": figures.generating,
        "generating_rows": ", ".join(map(str, figures.generating_rows)) or None,
        "training": figures.training,
        "policy": figures.variant.policy,
        "ranks": figures.variant.ranks,
        "sharding": figures.variant.sharding if figures.variant.ranks > 1 else None,
        "tokens_per_s": figures.tokens_per_s,
        "token_mean_ms": token[0],
        "token_p50_ms": token[1],
        "token_p99_ms": token[2],
        "trained_rows_per_s": figures.trained_rows_per_s,
        "step_p50_ms": step[1],
        "step_p99_ms": step[2],
        "rows_per_s": figures.rows_per_s,
        "batch_rows": figures.batch_rows,
        "batch_requests": figures.batch_requests,
        "product_share": figures.product_share,
        "idle_share": figures.idle_share,
        "resident_mib": figures.resident_mib,
        "answers": figures.answers,
        "wrong": figures.wrong,
    }


def measure_tenants(
    directory: Path,
    *,
    scenarios: Sequence[Scenario],
    mixes: Sequence[Mix],
    variants: Sequence[Variant],
    hidden: int,
    layers: int,
    seconds: float,
    threads: int,
    on_result: Callable[[Figures], None],
) -> None:
    """Start a provider per variant and let the tenants of each scenario ask each of them by turns.

    Args:
        directory: new or empty.
        scenarios: who asks.
        mixes: for what: every scenario with the first one, then with the next.
        variants: of providers.
        hidden: width of the model.
        layers: its blocks, of four layer groups each.
        seconds: of each measurement.
        threads: torch threads of a provider.
        on_result: told every line as soon as it is there.

    Raises:
        ProtocolError: a tenant could not go on.
    """
    model = directory / "model"
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)  # the same model, whoever measures
    LlamaForCausalLM(config).save_pretrained(model)
    most = max(s.generating + s.training for s in scenarios)
    with contextlib.ExitStack() as running:
        benches = [
            running.enter_context(_Bench(directory / str(variant), model, variant, threads=threads, tenants=most))
            for variant in variants
        ]
        for mix, scenario, bench in itertools.product(mixes, scenarios, benches):
            on_result(bench.run(scenario, mix, seconds=seconds))


class _Bench:
    """A provider, and its tenants' certificates."""

    def __init__(self, directory: Path, model: Path, variant: Variant, *, threads: int, tenants: int) -> None:
        options: dict[str, dict[str, object]] = {
            "executor": {"threads": threads, "ranks": variant.ranks, "sharding": variant.sharding},
            "scheduler": {"policy": variant.policy},
            "limits": {"max_connections": max(256, 2 * tenants)},
            "metrics": METRICS,
        }
        self._variant = variant
        self._directory = directory
        cache = model.parent / "cache"  # one for all of them: they serve the same weights
        self._local = LocalFederation(
            model, directory, helpers=0, cache=cache, provider_options=options, deadline_s=_START_S
        )
        groups = WeightStore(model, cache=cache).manifest().groups
        self._groups = tuple((group.inputs, group.stacked_outputs) for group in groups)
        self._rounds = itertools.count()
        self._identities: dict[str, Identity] = {}

    def __enter__(self) -> Self:
        self._local.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._local.stop()

    def run(self, scenario: Scenario, mix: Mix, *, seconds: float) -> Figures:
        """One measurement."""
        load = Load(
            federation=self._local.federation,
            groups=self._groups,
            seconds=seconds,
            checked_s=min(_CHECKED_S, seconds),
            tenants=tuple(self._asker(*asker) for asker in mix.askers(scenario)),
        )
        folder = self._directory / f"round-{next(self._rounds)}"
        folder.mkdir()
        looks: list[dict[str, Any]] = []
        reports = _ask(load, folder, look=lambda: looks.append(self._executor()))
        return self._figures(scenario, reports, before=looks[0], after=looks[1], seconds=seconds)

    def _asker(self, name: str, kind: Kind, rows: int, rank: int) -> Asker:
        identity = self._identities.get(name)
        if identity is None:
            keys = self._directory / "keys"
            authority = Identity(certificate=keys / "authority.pem", key=keys / "authority.key")
            identity = certificates.issue(keys, authority=authority, kind=certificates.Kind.TENANT, name=name)
            self._identities[name] = identity
        return Asker(name=name, certificate=identity.certificate, key=identity.key, kind=kind, rows=rows, rank=rank)

    def _executor(self) -> dict[str, Any]:
        """What the provider's `/status` says of its executor."""
        executor: dict[str, Any] = status_of(self._local, "executor")["executor"]
        return executor

    def _figures(
        self,
        scenario: Scenario,
        reports: list[Report],
        *,
        before: dict[str, Any],
        after: dict[str, Any],
        seconds: float,
    ) -> Figures:
        def grown(name: str) -> float:
            return float(after[name] - before[name])

        products = sum(after["batch_rows"]["counts"]) - sum(before["batch_rows"]["counts"])
        rows, requests = (after[name]["total"] - before[name]["total"] for name in ("batch_rows", "batch_requests"))
        generating = [report for report in reports if report.kind == "generating"]
        training = [report for report in reports if report.kind == "training"]
        return Figures(
            variant=self._variant,
            generating=scenario.generating,
            generating_rows=tuple(sorted({report.rows for report in generating})),
            training=scenario.training,
            tokens_per_s=sum(r.rows * len(r.turns) for r in generating) / seconds,
            token_ms=_times(generating),
            trained_rows_per_s=sum(r.rows * len(r.turns) for r in training) / seconds,
            step_ms=_times(training),
            rows_per_s=rows / grown("uptime"),
            batch_rows=rows / max(1, products),
            batch_requests=requests / max(1, products),
            product_share=grown("seconds") / (grown("uptime") - grown("idle")),
            idle_share=grown("idle") / grown("uptime"),
            resident_mib=after["resident"] / (1 << 20),
            answers=sum(report.answers for report in reports),
            wrong=sum(report.wrong for report in reports),
            alone={report.name: report.alone for report in reports},
        )


def _ask(load: Load, folder: Path, *, look: Callable[[], None]) -> list[Report]:
    """Run the tenants; calls `look` when the measurement begins and when it ends."""
    errors = folder / "errors"
    with (
        errors.open("wb") as log,
        subprocess.Popen(
            start.command("tenant.bench.load", str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(load, enc_hook=str))
        process.stdin.close()
        if process.stdout.readline():  # they have begun
            time.sleep(load.checked_s)
            look()
            time.sleep(load.seconds)
            look()
        status = process.wait(_SLACK_S)
    if status:
        raise ProtocolError(f"a tenant could not go on: {errors.read_text(errors='replace')[-2000:]}")
    files = [folder / f"{tenant.name}.json" for tenant in load.tenants]
    reports = [msgspec.json.decode(file.read_bytes(), type=Report) for file in files]
    if broken := [report.error for report in reports if report.error]:
        raise ProtocolError(f"{len(broken)} tenants could not go on; the first: {broken[0]}")
    return reports


def _times(reports: list[Report]) -> tuple[float, float, float] | None:
    """Mean, p50 and p99 over the turns of all of them, in milliseconds."""
    turns = [1000 * seconds for report in reports for seconds in report.turns]
    if not turns:
        return None
    p50, p99 = np.percentile(turns, [50, 99])
    return float(np.mean(turns)), float(p50), float(p99)
