"""Many tenants at one provider: its batching policies beside each other, by turns and in one run.

Every policy has a provider of its own, all of them of the same synthetic model, and at any time one of them has work to
do. The tenants are processes of their own over real TLS (`load`); they only ask, so that what is measured is the
provider. On a machine that both share, their processor time counts too.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv.certificates import Identity, Kind, issue
from symbiosis_priv.errors import ConnectionLostError, ProtocolError
from symbiosis_priv.federation import parse_address
from symbiosis_priv.local import LocalFederation
from symbiosis_priv.weights import WeightStore
from tenant.bench.load import Asker, Load, Report
from tenant.bench.report import Row

POLICIES = ("none", "lockstep", "opportunistic")
_SLACK_S = 240.0  # for starting the tenants, and their answers alone
_GENERATING_ROWS = (1, 2, 4, 8)
_TRAINING_ROWS = (64, 256)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """So many tenants of each kind at once."""

    generating: int
    training: int

    def askers(self) -> list[tuple[str, Any, int]]:
        """(name, kind, rows) of each: batch sizes by turns."""
        generating = zip(range(self.generating), itertools.cycle(_GENERATING_ROWS), strict=False)
        training = zip(range(self.training), itertools.cycle(_TRAINING_ROWS), strict=False)
        return [
            *((f"generating-{i}", "generating", rows) for i, rows in generating),
            *((f"training-{i}", "training", rows) for i, rows in training),
        ]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One policy under one scenario.

    Args:
        tokens_per_s: rows that generating tenants got through the model.
        token_ms: p50 and p99 of a token of a batch; None without generating tenants.
        trained_rows_per_s: rows that training tenants got through it, forward and back.
        step_ms: p50 and p99 of a step; None without training tenants.
        batch_rows, batch_requests: means of a product.
        resident_mib: the provider's memory afterwards.
        wrong: answers that differ from those that the same tenant got alone.
    """

    policy: str
    generating: int
    training: int
    tokens_per_s: float
    token_ms: tuple[float, float] | None
    trained_rows_per_s: float
    step_ms: tuple[float, float] | None
    batch_rows: float
    batch_requests: float
    resident_mib: float
    wrong: int


def tenants_row(figures: Figures) -> Row:
    """For a report."""
    token, step = figures.token_ms or (None, None), figures.step_ms or (None, None)
    return {
        "policy": figures.policy,
        "generating": figures.generating,
        "training": figures.training,
        "tokens_per_s": figures.tokens_per_s,
        "token_p50_ms": token[0],
        "token_p99_ms": token[1],
        "trained_rows_per_s": figures.trained_rows_per_s,
        "step_p50_ms": step[0],
        "step_p99_ms": step[1],
        "batch_rows": figures.batch_rows,
        "batch_requests": figures.batch_requests,
        "resident_mib": figures.resident_mib,
        "wrong": figures.wrong,
    }


def measure_tenants(
    directory: Path,
    *,
    scenarios: list[Scenario],
    hidden: int,
    layers: int,
    seconds: float,
    threads: int,
    on_result: Callable[[Figures], None],
) -> None:
    """Start a provider per policy and let the tenants of each scenario ask each of them by turns.

    Args:
        directory: new or empty.
        scenarios: who asks.
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
    LlamaForCausalLM(config).save_pretrained(model)
    most = max(s.generating + s.training for s in scenarios)
    with contextlib.ExitStack() as running:
        benches = [
            running.enter_context(_Bench(directory / policy, model, policy=policy, threads=threads, tenants=most))
            for policy in POLICIES
        ]
        for scenario in scenarios:
            for bench in benches:
                on_result(bench.run(scenario, seconds=seconds))


class _Bench:
    """A provider with one policy, and its tenants' certificates."""

    def __init__(self, directory: Path, model: Path, *, policy: str, threads: int, tenants: int) -> None:
        options: dict[str, dict[str, object]] = {
            "executor": {"threads": threads},
            "scheduler": {"policy": policy},
            "limits": {"max_connections": max(256, 2 * tenants)},
            "metrics": {"listen": "127.0.0.1:0"},
        }
        self._policy = policy
        self._directory = directory
        self._local = LocalFederation(model, directory, helpers=0, provider_options=options)
        groups = WeightStore(model, cache=directory / "cache").manifest().groups
        self._groups = tuple((group.inputs, group.stacked_outputs) for group in groups)
        self._rounds = itertools.count()
        self._identities: dict[str, Identity] = {}

    def __enter__(self) -> _Bench:
        self._local.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._local.stop()

    def run(self, scenario: Scenario, *, seconds: float) -> Figures:
        """One measurement."""
        load = Load(
            federation=self._local.federation,
            groups=self._groups,
            seconds=seconds,
            tenants=tuple(self._asker(*asker) for asker in scenario.askers()),
        )
        folder = self._directory / f"round-{next(self._rounds)}"
        folder.mkdir()
        before = self._status()
        reports = _ask(load, folder)
        return self._figures(scenario, reports, before=before, after=self._status(), seconds=seconds)

    def _asker(self, name: str, kind: Any, rows: int) -> Asker:
        identity = self._identities.get(name)
        if identity is None:
            keys = self._directory / "keys"
            authority = Identity(certificate=keys / "authority.pem", key=keys / "authority.key")
            identity = self._identities[name] = issue(keys, authority=authority, kind=Kind.TENANT, name=name)
        return Asker(name=name, certificate=identity.certificate, key=identity.key, kind=kind, rows=rows)

    def _status(self) -> dict[str, Any]:
        """The provider's `/status`."""
        lines = self._local.logs("executor").splitlines()
        ready = next(json.loads(line) for line in lines if '"event": "listening"' in line)
        host, port = parse_address(ready["metrics"])
        connection = http.client.HTTPConnection(host, port, timeout=10.0)
        try:
            connection.request("GET", "/status")
            status: dict[str, Any] = json.loads(connection.getresponse().read())
        except OSError as error:
            raise ConnectionLostError(f"the provider does not answer at {ready['metrics']}: {error}") from error
        finally:
            connection.close()
        return status

    def _figures(
        self,
        scenario: Scenario,
        reports: list[Report],
        *,
        before: dict[str, Any],
        after: dict[str, Any],
        seconds: float,
    ) -> Figures:
        def mean(name: str) -> float:
            total = after["executor"][name]["total"] - before["executor"][name]["total"]
            products = sum(after["executor"][name]["counts"]) - sum(before["executor"][name]["counts"])
            return float(total / max(1, products))

        generating = [report for report in reports if report.kind == "generating"]
        training = [report for report in reports if report.kind == "training"]
        return Figures(
            policy=self._policy,
            generating=scenario.generating,
            training=scenario.training,
            tokens_per_s=sum(r.rows * len(r.turns) for r in generating) / seconds,
            token_ms=_percentiles(generating),
            trained_rows_per_s=sum(r.rows * len(r.turns) for r in training) / seconds,
            step_ms=_percentiles(training),
            batch_rows=mean("batch_rows"),
            batch_requests=mean("batch_requests"),
            resident_mib=after["executor"]["resident"] / (1 << 20),
            wrong=sum(report.wrong for report in reports),
        )


def _ask(load: Load, folder: Path) -> list[Report]:
    """Run the tenants."""
    done = subprocess.run(
        [sys.executable, "-m", "tenant.bench.load", str(folder)],
        input=msgspec.json.encode(load, enc_hook=str),
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=load.seconds + _SLACK_S,
        check=False,
    )
    if done.returncode:
        raise ProtocolError(f"a tenant could not go on: {done.stderr.decode(errors='replace')[-2000:]}")
    files = [folder / f"{tenant.name}.json" for tenant in load.tenants]
    reports = [msgspec.json.decode(file.read_bytes(), type=Report) for file in files]
    if broken := [report.error for report in reports if report.error]:
        raise ProtocolError(f"{len(broken)} tenants could not go on; the first: {broken[0]}")
    return reports


def _percentiles(reports: list[Report]) -> tuple[float, float] | None:
    """p50 and p99 over the turns of all of them, in milliseconds."""
    turns = [1000 * seconds for report in reports for seconds in report.turns]
    if not turns:
        return None
    p50, p99 = np.percentile(turns, [50, 99])
    return float(p50), float(p99)
