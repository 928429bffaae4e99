"""`bench provider`: many tenants at one provider, which serves a synthetic model.

Each tenant is a process with a TLS connection that sends random rows, without a model.
A generating tenant sends its rows through every layer group forward, as for one token of a batch. A training tenant
sends them forward and backward, as for one step. Every answer is compared with the one that the tenant received while
it was alone. Tenants and providers share one machine, so the CPU time of tenants affects the figures.
"""

import contextlib
import itertools
import os
import re
import signal
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import torch
import typer
from torch import Tensor

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.local import METRICS, LocalFederation
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tenant.bench.measured_models import HALF_THE_CORES, Threads, provide, small_llama
from tenant.bench.options import Progress, Seconds, benchmark
from tenant.bench.processes import Child, ask_all, cpu_seconds
from tenant.bench.report import Goal, Row, by, figure, percentile, ratio, where
from tenant.connections.channel import Channel, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, mask

Kind = Literal["generating", "training"]
_DEADLINE_S = 120.0
_NICE = 10  # the provider has priority, because in practice tenants have their own machines
_SLOW, _RUNS_S = "slow", 0.025  # a slow tenant runs for this time, and stands still three times as long
_TRAINING_ROWS: Final = (2, 16, 64, 256)


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    counts = by(where(rows, training=0, slow=0), "generating")
    for beside, others in (
        ("two training ones", {"training": 2, "slow": 0}),
        ("a slow one", {"training": 0, "slow": 1}),
    ):
        found = where(rows, generating=6, **others)
        if 6 in counts and found:
            what = f"mean time of a token of six tenants with {beside}, over six alone"
            yield Goal(what, ratio(found[0], counts[6], "token_mean_ms"), at_most=1.05)
    if 1 in counts and 16 in counts:
        tokens = ratio(counts[16], counts[1], "tokens_per_s")
        yield Goal("tokens of sixteen tenants over those of one", tokens, at_least=4)
    if 16 in counts:
        what = "products' share of the executor's busy time, sixteen tenants"
        yield Goal(what, figure(counts[16], "product_share"), at_least=0.9)


@benchmark("provider", goals=goals)
def provider(
    folder: Path,
    progress: Progress,
    *,
    tenants: Annotated[
        str, typer.Option(help="How many at once, generating+training+slow, separated by commas.")
    ] = "1+0,16+0,6+0,6+2,6+0+1,8+4,0+8",
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model.")] = 2048,
    seconds: Seconds = 8.0,
    threads: Threads = HALF_THE_CORES,
) -> Iterator[Row]:
    """Let many tenants send requests to one provider, and compare all answers. A slow tenant generates too, with a
    quarter of a core; its own speed is not shown.

    Status 1 if one bit of an answer differs from the answer that the same tenant received alone."""
    counts = [re.fullmatch(r"(\d+)\+(\d+)(?:\+(\d+))?", part.strip()) for part in tenants.split(",")]
    scenarios = [Scenario(*(int(number or 0) for number in count.groups())) for count in counts if count is not None]
    if len(scenarios) < len(counts) or not all(scene.generating + scene.training for scene in scenarios):
        raise ConfigError(
            f"--tenants {tenants!r}: write GENERATING+TRAINING(+SLOW) separated by commas, like 1+0,6+0+1"
        )
    model = small_llama(hidden, inner=2 * hidden).save(folder / "model")
    options: dict[str, dict[str, object]] = {
        "executor": {"threads": threads},
        "limits": {"max_connections": max(256, 2 * max(map(sum, scenarios)))},
        "metrics": METRICS,
    }
    with provide(model, folder / "provider", threads=threads, helpers=0, provider_options=options) as local:
        groups = WeightStore(model, cache=local.cache).manifest().groups
        shapes = tuple((group.inputs, group.stacked_outputs) for group in groups)
        identities: dict[str, Identity] = {}
        for scenario in scenarios:
            loads = []
            for name, kind, rows in scenario.tenants():
                if name not in identities:
                    identities[name] = local.issue_tenant(name)
                loads.append(Load(name, identities[name], kind, rows, local.federation, shapes))
            yield {**scenario._asdict(), **_run(local, loads, seconds)}


class Scenario(NamedTuple):
    """The number of concurrent tenants of each kind."""

    generating: int
    training: int
    slow: int = 0

    def tenants(self) -> Iterator[tuple[str, Kind, int]]:
        """Yield (name, kind, rows of a request) of each tenant: training ones have the numbers of rows in rotation."""
        kinds: tuple[tuple[str, Kind, int, Sequence[int]], ...] = (
            ("generating", "generating", self.generating, (1,)),
            ("training", "training", self.training, _TRAINING_ROWS),
            (_SLOW, "generating", self.slow, (1,)),
        )
        for name, kind, count, sizes in kinds:
            for i, rows in zip(range(count), itertools.cycle(sizes), strict=False):
                yield f"{name}-{i}", kind, rows


class Load(NamedTuple):
    """One tenant, and the requests that it sends. `rows`: of each request, one for each sequence of a batch. `groups`:
    (inputs, outputs) of each layer group."""

    name: str
    identity: Identity
    kind: Kind
    rows: int
    federation: Path
    groups: tuple[tuple[int, int], ...]


class Result(NamedTuple):
    """Seconds of each token or step (at least one), and the number of answers and of those that differ from the answers
    received alone."""

    turns: list[float]
    answers: int
    wrong: int


def _run(local: LocalFederation, loads: Sequence[Load], seconds: float) -> Row:
    """Let tenants send requests alone, one after the other, and then all of them for `seconds` seconds."""
    with contextlib.ExitStack() as running:
        tenants: list[Child[float, Result]] = [
            running.enter_context(Child(load.name, serve_load, load)) for load in loads
        ]
        for tenant in tenants:
            tenant.ask(0.0, timeout_s=_DEADLINE_S)
        pid = local.pid("executor") or 0
        before, cpu = local.status("executor")["executor"], cpu_seconds(pid)
        slow = [tenant.pid for load, tenant in zip(loads, tenants, strict=True) if load.name.startswith(_SLOW)]
        with _slowed(slow):
            results = ask_all(tenants, seconds, timeout_s=seconds + _DEADLINE_S)
        after, cpu = local.status("executor")["executor"], cpu_seconds(pid) - cpu
    found = [(load, its) for load, its in zip(loads, results, strict=True) if not load.name.startswith(_SLOW)]
    answers = sum(result.answers for result in results)
    return {
        **_speed(found, "generating", "tokens_per_s", "token", seconds),
        **_speed(found, "training", "trained_rows_per_s", "step", seconds),
        **_products(before, after),
        # of the whole provider; for a narrow model nearly all of it is the gateway's
        "request_cpu_ms": 1000 * cpu / max(1, answers),
        "answers": answers,
        "wrong": sum(result.wrong for result in results),
    }


def _speed(found: Sequence[tuple[Load, Result]], kind: Kind, per_s: str, turn: str, seconds: float) -> Row:
    """Rows per second of the tenants of a kind, and the times of their turns (None without such tenants)."""
    of_kind = [(load.rows, result.turns) for load, result in found if load.kind == kind]
    turns = [spent for _, turns in of_kind for spent in turns]
    row: Row = {
        per_s: sum(rows * len(turns) for rows, turns in of_kind) / seconds,
        f"{turn}_mean_ms": 1000 * statistics.fmean(turns) if turns else None,
    }
    return row | {f"{turn}_p{q}_ms": percentile(turns, q, unit=1e-3) if turns else None for q in (50, 99)}


def _products(before: dict[str, Any], after: dict[str, Any]) -> Row:
    """What an executor has done between two statuses. `batch_rows`, `batch_requests`: means per product;
    `product_share`: products' share of its busy time; `idle_share`: of the whole time."""
    uptime, idle, busy = (float(after[name] - before[name]) for name in ("uptime", "idle", "seconds"))
    products = max(1, sum(after["batch_rows"]["counts"]) - sum(before["batch_rows"]["counts"]))
    rows, requests = (after[name]["total"] - before[name]["total"] for name in ("batch_rows", "batch_requests"))
    return {
        "rows_per_s": rows / uptime,
        "batch_rows": rows / products,
        "batch_requests": requests / products,
        "product_share": busy / (uptime - idle),
        "idle_share": idle / uptime,
        "resident_mib": after["resident"] / (1 << 20),
    }


@contextmanager
def _slowed(pids: Sequence[int]) -> Iterator[None]:
    """Context manager: let these processes run a quarter of the time."""
    ended = threading.Event()

    def stop_and_go() -> None:
        while pids and not ended.wait(_RUNS_S):
            for sent, pause in ((signal.SIGSTOP, 3 * _RUNS_S), (signal.SIGCONT, 0.0)):
                for pid in pids:
                    os.kill(pid, sent)
                ended.wait(pause)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def serve_load(load: Load) -> Iterator[Callable[[float], Result]]:
    """The work of a `Child`: the handler sends requests for some seconds; the first time, of one turn."""
    torch.set_num_threads(1)
    os.nice(_NICE)
    tenant = _Tenant(load)
    with contextlib.closing(tenant.channel):
        yield tenant.send


class _Tenant:
    def __init__(self, load: Load) -> None:
        federation = load_federation(load.federation)
        executor, identity = federation.executors[0], load.identity
        self._load, self._alone = load, list[Tensor]()
        self.channel = Channel(
            executor,
            context=client_context(certificate=identity.certificate, key=identity.key, pins=executor.pins),
            model_digest=federation.model_digest,
            deadline_s=_DEADLINE_S,
        )
        generator = torch.Generator().manual_seed(zlib.crc32(load.name.encode()))
        self._rows = {  # by their width
            width: torch.empty(load.rows, width, dtype=torch.int32, device="cpu").random_(
                -(1 << 31), 1 << 31, generator=generator
            )
            for width in sorted({width for shape in load.groups for width in shape})
        }

    def send(self, seconds: float) -> Result:
        turns, answers, wrong = list[float](), 0, 0
        end = time.monotonic() + seconds
        while (start := time.monotonic()) < end or not turns:
            found = list(self._turn())
            turns.append(time.monotonic() - start)
            self._alone = self._alone or found
            answers += len(found)
            wrong += sum(not torch.equal(*pair) for pair in zip(found, self._alone, strict=True))
        return Result(turns, answers, wrong)

    def _turn(self) -> Iterator[Tensor]:
        """Send the requests of a token or a step. Yields the answers."""
        places: list[tuple[int, Direction]] = [(index, FORWARD) for index in range(len(self._load.groups))]
        if self._load.kind == "training":
            places += [(index, BACKWARD) for index, _ in reversed(places)]
        for index, direction in places:
            inputs, outputs = self._load.groups[index][:: 1 if direction == FORWARD else -1]
            sent = mask(self._rows[inputs], UNMASKED_BY_CHOICE)
            request = wire.Execute(
                nonce=fresh_nonce(), group=index, direction=direction, arithmetic="ring", rows=self._load.rows
            )
            yield self.channel.request(request, sent, outputs=outputs)
