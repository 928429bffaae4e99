"""A thousand tenants and a hundred executors, simulated: `python -m tests.provider.scheduler.swarm` prints a table.

Every executor runs the real scheduler on a simulated clock. The model is a Llama-2-7B of 32 layers; each executor
serves 8 of them. Tenants generate one token after the other, one row per layer group, and a share of them trains. What
a product, a request and the network cost is assumed (`Hardware`).
"""

import argparse
import random
import statistics
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from provider.scheduler.scheduler import Scheduler
from tests.provider.scheduler.rehearsal import GROUPS, ONE_CORE, Executor, Hardware, Tenant, play

LAYERS, SERVED = 32, 8
WARM_UP_S = 1.0

HARDWARE = {
    "one core (measured)": ONE_CORE,
    # assumed: two bytes a weight at 8 x 3.35 TB/s, 8 x 1979 TOP/s in int8, 7 limb products; half of each is reached
    "8 GPUs (assumed)": Hardware(weight_s=0.15e-12, row_s=0.9e-15, product_s=0.1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`fairness` is Jain's index of the generating tenants' tokens: 1 if all have equally many."""

    tokens_per_s: float
    median_s: float
    slowest_s: float
    fairness: float
    rows_per_s: list[float]
    busy: list[float]


def simulate(
    hardware: Hardware, *, tenants: int, executors: int, training: float, seconds: float, seed: int = 0
) -> Outcome:
    """Let all tenants work; the figures begin after `WARM_UP_S`."""
    rng = random.Random(seed)
    fleet = [Executor(hardware, Scheduler()) for _ in range(executors)]
    served = [range(first, first + SERVED) for first in (SERVED * i % LAYERS for i in range(executors))]
    count: Counter[int] = Counter()
    people: list[Tenant] = []
    routes: dict[str, list[int]] = {}
    for number in range(tenants):
        trains = number < training * tenants
        people.append(Tenant(f"{number:04}", 256 if trains else 1, trains=trains, layers=LAYERS, warm_up=WARM_UP_S))
        route = routes[people[-1].name] = list[int]()
        for layer in range(LAYERS):  # the less used one of two that have the layer, and the same one while it has them
            if not route or layer not in served[route[-1]]:
                able = [i for i, layers in enumerate(served) if layer in layers]
                chosen = min(rng.sample(able, min(2, len(able))), key=count.__getitem__)
                count[chosen] += 1
                route.append(chosen)
            else:
                route.append(route[-1])

    def think(tenant: Tenant, now: float) -> float:
        tenant.hear(now)
        return now + (hardware.tenant_s * rng.uniform(0.7, 1.4) + hardware.trip_s)

    play(
        [(rng.uniform(0, 0.5), tenant) for tenant in people],
        at=lambda job: fleet[routes[str(job.tenant)][job.key.group // len(GROUPS)]],
        think=think,
        warm_up=WARM_UP_S,
        seconds=seconds,
    )
    generating = [tenant for tenant in people if not tenant.trains]
    turns = sorted(turn for tenant in generating for turn in tenant.turns)
    tokens = [len(tenant.turns) for tenant in generating]
    return Outcome(
        tokens_per_s=sum(tokens) / seconds,
        median_s=turns[len(turns) // 2],
        slowest_s=turns[int(0.99 * len(turns))],
        fairness=sum(tokens) ** 2 / (len(tokens) * sum(n * n for n in tokens)),
        rows_per_s=[executor.rows / seconds for executor in fleet],
        busy=[executor.busy_s / seconds for executor in fleet],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--executors", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    table = Table("hardware", "train", "tokens/s", "token p50", "p99", "fairness", "rows/s per executor", "busiest")
    for name, hardware in HARDWARE.items():
        for training in (0.0, 0.1):
            found = simulate(
                hardware,
                tenants=arguments.tenants,
                executors=arguments.executors,
                training=training,
                seconds=arguments.seconds,
            )
            table.add_row(
                name,
                f"{training:.0%}",
                f"{found.tokens_per_s:,.0f}",
                f"{found.median_s:.2f} s",
                f"{found.slowest_s:.2f} s",
                f"{found.fairness:.2f}",
                f"{statistics.fmean(found.rows_per_s):,.0f}",
                f"{max(found.busy):.0%}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
