"""Figures compared with their goals: a figure on its limit reaches the goal, and a figure beyond it does not."""

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, strategies as st

from tenant.bench import kernels, many_tenants, masked_linear, quality, startup
from tenant.bench.network import bytes_goals, network_goals
from tenant.bench.report import Goal, Row
from tenant.bench.steps_and_tokens import step_goals, token_goals
from threat_model.availability import abuse, ranks

BEYOND = 1.01


def step_rows(worse: float, width: int = 2048) -> list[Row]:
    limit = {2048: 0.3, 4096: 0.2}.get(width, 9.0)
    shape: Row = {"width": width, "layers": 2}
    return [
        {**shape, "variant": "whole, fp32", "tenant_cpu_over_whole": 1.0, "tenant_cpu_s": 4.0, "wall_s": 4.0},
        {**shape, "variant": "split, none", "tenant_cpu_over_whole": 0.1, "tenant_cpu_s": 1.0, "wall_s": 1.0},
        {
            **shape,
            "variant": "split, pad",
            "tenant_cpu_over_whole": limit * worse,
            "tenant_cpu_s": 1.2 * worse,
            "wall_s": 1.2 * worse,
        },
    ]


def token_rows(worse: float) -> list[Row]:
    return [
        {"width": 64, "layers": 2, "variant": "split, none", "token_ms": 10.0, "token_over_whole": worse},
        {"width": 64, "layers": 2, "variant": "split, pad", "token_ms": 11.5 * worse, "token_over_whole": None},
    ]


def linear_rows(worse: float) -> list[Row]:
    return [{"width": width, "rows": 1, "masked_over_floor": 1.3 * worse} for width in (2048, 8192)]


def kernel_rows(worse: float) -> list[Row]:
    def row(kernel: str, rows: int, ratio: float | None, *, chosen: bool) -> Row:
        return {"kernel": kernel, "rows": rows, "over_float32": ratio, "chosen": "yes" if chosen else ""}

    return [
        row("native-avx512", 1, 0.1, chosen=True),
        row("native-avx512", 8, 0.7 * worse, chosen=True),
        row("native-avx512", 64, 1.25 * worse, chosen=True),
        row("native-amx", 64, 0.5 * worse, chosen=True),
        row("native-avx2", 64, 2.2 * worse, chosen=True),
        row("limbs", 64, 9.0, chosen=False),
    ]


def start_rows(worse: float) -> list[Row]:
    return [
        {"what": "provider, warm cache", "wall_s": 2.0 * worse, "over_reading": 9.0},
        {"what": "tenant, verification keys", "wall_s": 9.0, "over_reading": 3.0 * worse},
    ]


def provider_rows(worse: float) -> list[Row]:
    def row(policy: str, generating: int, training: int, *, tokens: float, latency: float, share: float = 1.0) -> Row:
        return {
            "policy": policy,
            "generating": generating,
            "generating_rows": "1",
            "training": training,
            "ranks": 1,
            "sharding": None,
            "tokens_per_s": tokens,
            "token_mean_ms": latency,
            "token_p50_ms": latency,
            "product_share": share,
        }

    return [
        row("opportunistic", 8, 4, tokens=100 / worse, latency=10 * worse),
        row("none", 8, 4, tokens=100, latency=10),
        row("lockstep", 8, 4, tokens=100, latency=10),
        row("opportunistic", 1, 0, tokens=10, latency=10),
        row("opportunistic", 16, 0, tokens=40 / worse, latency=10, share=0.9 / worse),
        row("opportunistic", 6, 0, tokens=1, latency=10),
        row("opportunistic", 6, 2, tokens=1, latency=15 * worse),
    ]


def abuse_rows(worse: float) -> list[Row]:
    return [
        {"abuse": "a flood", "beside_over_alone": 1.5 * worse},
        {"abuse": "control: a process that only computes", "beside_over_alone": 99.0},
    ]


def rank_rows(worse: float) -> list[Row]:
    return [
        {"groups": 1, "lost": "a rank is killed", "meanwhile_over_before": 1000.0},
        {"groups": 2, "lost": "a rank is killed", "meanwhile_over_before": 1.5 * worse},
    ]


def quality_rows(worse: float) -> list[Row]:
    figures: Row = {"ring_bits": 24, "error_over_bfloat16": worse, "repeated_per_million": worse}
    return [{**figures, "weight_bits": 8}, {**figures, "weight_bits": 10}]


def network_rows(worse: float) -> list[Row]:
    def row(condition: str, masking: str, ratio: float) -> Row:
        return {"condition": condition, "work": "step, 2 parts overlapped", "masking": masking, "over_first": ratio}

    slow, fast = "100 Mbit/s, 10 ms", "1 Gbit/s, 10 ms"
    return [row(slow, "pad", 1.0), row(slow, "pad/24/relay", 0.5 * worse), row(fast, "pad/24/relay", 9.0)]


def bytes_rows(worse: float) -> list[Row]:
    figures: Row = {"model": "m", "over_first_masking": 0.46 * worse, "over_float16_unmasked": 1.55 * worse}
    rows: list[Row] = [{**figures, "work": work, "masking": "pad/24/relay"} for work in ("token", "its forward pass")]
    return [{**figures, "work": "token", "masking": "pad", "over_first_masking": 1.0}, *rows]


Goals = Callable[[Sequence[Row]], Iterator[Goal]]
CASES: list[tuple[Goals, Callable[[float], Sequence[Row]], int]] = [
    (step_goals, step_rows, 3),
    (token_goals, token_rows, 2),
    (masked_linear.goals, linear_rows, 2),
    (kernels.goals, kernel_rows, 4),
    (startup.goals, start_rows, 2),
    (many_tenants.goals, provider_rows, 7),
    (abuse.goals, abuse_rows, 1),
    (ranks.goals, rank_rows, 1),
    (quality.goals, quality_rows, 3),
    (network_goals, network_rows, 1),
    (bytes_goals, bytes_rows, 2),
]
of_each_benchmark = pytest.mark.parametrize(("goals", "rows", "count"), CASES, ids=[case[1].__name__ for case in CASES])


@of_each_benchmark
def test_a_figure_on_its_limit_reaches_it_and_one_beyond_does_not(
    goals: Goals, rows: Callable[[float], Sequence[Row]], count: int
) -> None:
    good, bad = list(goals(rows(0.999))), list(goals(rows(BEYOND)))
    assert len(good) == len(bad) == count
    assert all(goal.reached for goal in good)
    assert not any(goal.reached for goal in bad)
    assert len({goal.what for goal in good}) == count


def test_a_wider_step_has_a_lower_limit_and_a_narrow_one_none() -> None:
    assert [goal.at_most for goal in step_goals(step_rows(1.0, width=4096))] == [0.2, 1.2, 1.2]
    assert [goal.at_most for goal in step_goals(step_rows(1.0, width=1024))] == [1.2, 1.2]


@of_each_benchmark
def test_absent_rows_have_no_goal_and_failed_ones_reach_none(
    goals: Goals, rows: Callable[[float], Sequence[Row]], count: int
) -> None:
    assert list(goals([])) == []
    words = {"variant", "kernel", "chosen", "what", "policy", "generating_rows", "sharding", "abuse", "lost"}
    words |= {"condition", "work", "masking", "model"}
    counts = {"width", "layers", "rows", "generating", "training", "ranks", "groups", "ring_bits", "weight_bits"}
    blank = [{name: row[name] if name in words | counts else None for name in row} for row in rows(1.0)]
    found = list(goals(blank))
    assert len(found) == count
    assert not any(goal.reached for goal in found)


@given(measured=st.floats(allow_nan=True), limit=st.floats(0.01, 100))
def test_at_most_and_at_least_are_symmetric(measured: float, limit: float) -> None:
    most = Goal(what="it", measured=measured, at_most=limit)
    least = Goal(what="it", measured=measured, at_least=limit)
    if math.isnan(measured):
        assert not most.reached
        assert not least.reached
    else:
        assert most.reached or least.reached
        assert (most.reached and least.reached) == (measured == limit)
    assert most.wanted.startswith("at most")
    assert least.wanted.startswith("at least")
