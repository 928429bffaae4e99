"""`bench chaos`: kills providers with SIGKILL at random times while a tenant trains and generates, and compares every
bit with an undisturbed run.

Executors and helpers are separate processes. Every few seconds one of them is killed and started again. A start takes
time, so several may be down together. One executor and the helpers of one pad always stay up, so that the measured
pauses are those of failover. With `merciless`, these are killed too, and the tenant waits until a provider is up again.
The undisturbed run comes second. It is a simulation: the same arithmetic without any provider.
"""

import contextlib
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from typer import Option

from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.harness.wiretaps import AnswerTimes
from tenant.bench.measured_models import START_S, Llama, provide
from tenant.bench.options import Progress, benchmark
from tenant.bench.report import Row, where
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of
from tenant.model.loading import load_model
from tenant.session.tally import Ledger

_BATCH, _LENGTH, _PROMPT, _NEW_TOKENS = 4, 64, 4, 16
_SHAPE, _VOCABULARY = Llama(width=256, layers=2, inner=704), 4096


@dataclass(frozen=True, kw_only=True)
class TenantWork:
    """The tenant's work: optimizer steps of LoRA on all linears, and then greedy texts."""

    steps: Annotated[int, Option(min=1, help="Optimizer steps, at least.")] = 200
    kills: Annotated[int, Option(min=0, help="Continue training until this number of providers was killed.")] = 10
    generations: Annotated[int, Option(min=0, help="Texts to generate afterwards.")] = 10


@dataclass(frozen=True, kw_only=True)
class Killing:
    """Numbers of providers, and the schedule of kills. What a killed provider was doing depends on timing."""

    executors: Annotated[int, Option(min=1, help="Number of executors.")] = 3
    helpers: Annotated[int, Option(min=1, help="Number of helpers.")] = 2
    pad_helpers: Annotated[int, Option(min=1, help="Helpers that share a pad; the others are spares.")] = 1
    every: Annotated[float, Option(min=0.1, help="Seconds between two kills, on average.")] = 3.0
    merciless: Annotated[
        bool, Option("--merciless", help="Kill also the last provider of a role, and wait until it is back.")
    ] = False
    seed: Annotated[int, Option(help="Seed of the choice of providers and times.")] = 0


_WORK, _KILLING = TenantWork(), Killing()


def faults(rows: Sequence[Row]) -> Iterator[str]:
    if where(rows, bits="DIFFERENT"):
        yield "the disturbed run has ended with other bits than the undisturbed one"


@benchmark("chaos", faults=faults)
def chaos(folder: Path, progress: Progress, *, work: TenantWork = _WORK, killing: Killing = _KILLING) -> Iterator[Row]:
    """Kill random providers (SIGKILL) while a tenant trains and generates. Status 1 if one bit differs.

    Example: symbiosis-priv bench chaos --steps 50 --kills 4 --every 2
    """
    found = run_chaos(folder, work, killing, on_event=progress)
    return found.rows(generations=work.generations, every_s=killing.every)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. `bits`: losses, adapter tensors and token ids by name; `ledger`: zeros without a session."""

    steps: int
    bits: dict[str, Tensor]
    ledger: Ledger
    seconds: float


class Kill(NamedTuple):
    """The name of a killed provider, and the time by `time.monotonic`."""

    name: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """A disturbed run, compared with the undisturbed run. `identical`: both have the same bits. `pauses_s`: the longest
    time without an executor's answer around each kill; `usual_s`: the same before the first kill."""

    disturbed: RunResult
    identical: bool
    kills: Sequence[Kill]
    pauses_s: Sequence[float]
    usual_s: float

    def rows(self, *, generations: int, every_s: float) -> Iterator[Row]:
        """Yield a row of the report for each role of the killed providers."""
        kills = list(zip(self.kills, self.pauses_s, strict=True))
        for role in ("executor", "helper"):
            pauses = [pause for kill, pause in kills if kill.name.startswith(role)]
            yield {
                "steps": self.disturbed.steps,
                "generations": generations,
                "bits": "identical" if self.identical else "DIFFERENT",
                "one_killed_every_s": every_s,
                "disturbed_s": self.disturbed.seconds,
                "longest_pause_before_the_first_kill_s": self.usual_s,
                "killed": role,
                "kills": len(pauses),
                "pause_median_s": statistics.median(pauses) if pauses else None,
                "pause_longest_s": max(pauses, default=None),
            }


def run_chaos(
    directory: Path, work: TenantWork, killing: Killing, *, on_event: Callable[[str], None] = lambda _: None
) -> Chaos:
    """Do the work once while providers are killed, and once undisturbed. Raises `SymbiosisError`: it did not finish."""
    model = _SHAPE.save(directory / "model")
    on_event("starting providers")
    numbers: dict[str, Any] = {
        "executors": killing.executors,
        "helpers": killing.helpers,
        "pad_helpers": killing.pad_helpers,
    }
    with provide(model, directory, threads=1, **numbers) as local:
        answers = AnswerTimes()
        remote = RemoteConfig(
            federation=local.federation, masking="pad", cache=directory / "cache", deadline_s=START_S, wiretap=answers
        )
        with _killed(local, killing, on_event) as kills:
            disturbed = _do(model, remote, work, goes_on=lambda step: step < work.steps or len(kills) < work.kills)
    on_event(f"the undisturbed run of {disturbed.steps} steps")
    simulated = RemoteConfig(masking="simulate", cache=directory / "cache")
    one = disturbed.bits
    other = _do(model, simulated, work, goes_on=lambda step: step < disturbed.steps).bits
    ends = [*(kill.at for kill in kills[1:]), math.inf][: len(kills)]
    pauses = [answers.longest_pause(since=kill.at, until=end) for kill, end in zip(kills, ends, strict=True)]
    return Chaos(
        disturbed=disturbed,
        identical=one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one),
        kills=kills,
        pauses_s=pauses,
        usual_s=answers.longest_pause(since=0.0, until=kills[0].at if kills else math.inf),
    )


def _do(model: Path, remote: RemoteConfig, work: TenantWork, *, goes_on: Callable[[int], bool]) -> RunResult:
    base = load_model(model, remote=remote, dtype=torch.float32)
    with contextlib.closing(backend_of(base)):
        torch.manual_seed(0)
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, init_lora_weights=False)
        peft: Any = get_peft_model(base, lora)
        began, losses = time.monotonic(), list[float]()
        optimizer = torch.optim.AdamW((p for p in peft.parameters() if p.requires_grad), lr=1e-3)
        peft.train()
        while goes_on(len(losses)):
            ids = _tokens(len(losses), _BATCH, _LENGTH)
            loss = peft(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        bits = {"losses": torch.tensor(losses, dtype=torch.float64, device="cpu")}
        bits |= {name: p.detach().clone() for name, p in peft.named_parameters() if p.requires_grad}
        peft.eval()
        for seed in range(work.generations):
            prompt = _tokens(seed, 1, _PROMPT)
            with torch.no_grad():
                bits[f"text {seed}"] = peft.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=_NEW_TOKENS,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
        return RunResult(
            steps=len(losses), bits=bits, ledger=ledger_of(peft) or Ledger(), seconds=time.monotonic() - began
        )


def _tokens(seed: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_VOCABULARY, (rows, columns), generator=generator, dtype=torch.long, device="cpu")


@contextmanager
def _killed(local: LocalFederation, killing: Killing, on_event: Callable[[str], None]) -> Iterator[list[Kill]]:
    """Kill a provider every few seconds and start it again; wait for all at the end. Raises the error of a start."""
    least = {"executor": 0, "helper": 0} if killing.merciless else {"executor": 1, "helper": killing.pad_helpers}
    rng = random.Random(killing.seed)
    kills: list[Kill] = []
    over = threading.Event()
    returning: dict[str, Future[None]] = {}

    def victims() -> list[str]:
        running = [name for name in local.names if name not in returning or returning[name].done()]
        of_role = {role: [name for name in running if name.startswith(role)] for role in least}
        return [name for role, names in of_role.items() if len(names) > least[role] for name in names]

    def strike() -> None:
        with ThreadPoolExecutor(len(local.names), thread_name_prefix="restart") as restarts:
            while not over.wait(rng.uniform(0.5, 1.5) * killing.every):
                if names := victims():
                    victim = rng.choice(names)
                    kills.append(Kill(victim, time.monotonic()))
                    local.kill(victim)
                    on_event(f"{victim} is killed, number {len(kills)}")
                    returning[victim] = restarts.submit(local.restart, victim)

    thread = threading.Thread(target=strike, name="kill")
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()
    for restart in returning.values():
        restart.result()
