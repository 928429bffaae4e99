"""The commands of `symbiosis-priv bench` with small models: the meaning of the figures, not the speed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.cli import app
from symbiosis_priv.errors import ConfigError
from tenant.bench import network, steps_and_tokens
from tenant.bench.measured_models import (
    LLAMAS,
    Effort,
    Generate,
    Llama,
    MaskingVariant,
    Step,
    parse_maskings,
    provide,
    remote_config,
    serve_tenant,
)
from tenant.bench.report import Row, Value, read
from tenant.bench.steps_and_tokens import Comparison, comparison
from tenant.session import tally
from tenant.session.traffic import of_step, of_token
from tests.cases import table


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparison]:
    shape, pad = Llama(width=64, layers=1, inner=64), MaskingVariant.parse("pad")
    effort = Effort(threads=1)
    with comparison(tmp_path_factory.mktemp("comparison"), shape, [pad], effort) as running:
        yield running


@pytest.fixture
def shared(running: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the running tenants and providers."""

    @contextmanager
    def already(folder: Path, shape: Llama, maskings: Any, effort: Effort, **_: int) -> Iterator[Comparison]:
        assert (shape.width, shape.layers, [one.name for one in maskings]) == (64, 1, ["pad"])
        yield running

    monkeypatch.setattr(steps_and_tokens, "comparison", already)


def number(value: Value) -> float:
    assert isinstance(value, int | float)
    return value


def check_step(rows: list[Row], shown: str) -> None:
    assert [(row["targets"], row["rank"]) for row in rows[::2]] == [("q", 8), ("q", 64), ("qkvo", 8), ("qkvo", 64)]
    assert all(f"rank {row['rank']} on {row['targets']}: " in shown for row in rows)
    whole, split = rows[:2]
    assert (whole["variant"], split["variant"]) == ("whole, fp32", "split, pad")
    assert all(number(row[figure]) > 0 for row in rows for figure in ("wall_s", "tenant_peak_mib"))
    assert whole["helper_peak_mib"] is whole["executor_cpu_over_float32"] is None
    assert number(split["helper_peak_mib"]) > 0


def check_token(rows: list[Row], shown: str) -> None:
    assert [row["variant"] for row in rows] == ["whole, fp32", "split, pad"]
    assert all(number(row["token_ms"]) > 0 for row in rows)
    assert rows[0]["token_over_whole"] == 1.0


def check_linear(rows: list[Row], shown: str) -> None:
    assert [row["rows"] for row in rows] == [1, 4]
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        assert numbers["bytes_both_ways"] > 2 * 4 * 64 * numbers["rows"]
        assert 0 < sum(numbers[f"{span}_us"] for span in tally.SPANS) <= numbers["masked_p99_us"]
        exchange = numbers["masked_p50_us"] / numbers["network + product_us"]
        assert numbers["masked_over_exchange"] == pytest.approx(exchange)
        assert all(numbers[f"{name}_p50_us"] > 0 for name in ("product", "float32", "pad"))


def check_bytes(rows: list[Row], shown: str) -> None:
    """DESIGN: 23,296 words up and 42,496 words of answers and of effects for a token and a layer of Llama-2-7B."""
    today, narrow = rows[:2]
    assert number(today["up_mb"]) == pytest.approx(32 * 4 * 23_296 / 1e6, rel=0.01)
    assert number(today["effects_mb"]) == 32 * 4 * 42_496 / 1e6
    assert number(narrow["over_first_masking"]) == pytest.approx(0.75, abs=0.01)
    assert len(rows) == 2 * 2 * 3


def check_provider(rows: list[Row], shown: str) -> None:
    """Five tenants in separate processes: every answer equals the answer that the tenant got alone."""
    assert [(row["generating"], row["training"], row["slow"]) for row in rows] == [(3, 1, 1)]
    assert all(row["wrong"] == 0 and number(row["answers"]) > 0 for row in rows)
    assert all(0 < number(row["product_share"]) <= 1 for row in rows)
    assert all(number(row["tokens_per_s"]) > 0 and number(row["trained_rows_per_s"]) > 0 for row in rows)


def check_tasks(rows: list[Row], shown: str) -> None:
    gains = {(row["measurement"], row["variant"]): number(row["gain"]) for row in rows}
    assert len(gains) == 2 + 3 + 3 + 3
    assert all(number(rows[1][name]) > 0 for name in ("memory_mib", "task_kib", "load_ms", "unload_ms"))
    assert gains["batch, split model", "mixed batch"] == 4  # one request per layer group, whatever the methods
    assert shown.count("at least") == 4
    assert shown.count("at most") == 2


def check_endpoint(rows: list[Row], shown: str) -> None:
    one, together = rows
    assert (one["variant"], together["variant"]) == ("one after another", "all together")
    # 4 layer groups; the prompts are read in one step or, if a request came a step late, in two
    assert number(one["round_trips"]) == 8 * 3 * 4
    assert number(together["round_trips"]) <= 5 * 4
    assert all(number(row["tokens_per_s"]) > 0 for row in rows)
    assert all(number(row["first_token_p50_s"]) <= number(row["first_token_p99_s"]) for row in rows)


def check_adapters(rows: list[Row], shown: str) -> None:
    variants = [f"whole, {dtype}" for dtype in ("float32", "bfloat16")] + [
        f"split, {masking}" for masking in ("none", "pad", "pad/24")
    ]
    assert [(row["variant"], row["jobs"]) for row in rows] == [(name, count) for name in variants for count in (1, 2)]
    assert all(number(row[name]) > 0 for row in rows for name in ("memory_mib", "steps_per_s", "over_whole", "step_s"))
    assert all(row["fit"] is None or number(row["fit"]) > 2 for row in rows)
    assert [row["executor_peak_mib"] is None for row in rows] == [True] * 4 + [False] * 6
    assert [row["helper_peak_mib"] is None for row in rows] == [True] * 6 + [False] * 4
    assert shown.count("executor's peak memory with 2 jobs over 1") == 3


MODEL = "--width 64 --layers 1 --inner 64 --repeat 1 --threads 1"
CHECKS: dict[str, Callable[[list[Row], str], None]] = {
    f"step {MODEL} --masking pad --batch 2 --tokens 8 --rank 8,64 --targets q,qkvo": check_step,
    f"token {MODEL} --masking pad --prompt 2 --tokens 3": check_token,
    "linear --rows 1,4 --width 64 --repeat 1 --threads 1": check_linear,
    "adapters --width 64 --layers 1 --inner 64 --jobs 1,2": check_adapters,
    "bytes": check_bytes,
    "provider --tenants 3+1+1 --hidden 64 --seconds 0.1 --threads 1": (check_provider),
    "tasks --tasks 4 --width 64 --layers 1 --inner 64 --requests 8 --repeat 1 --threads 1": (check_tasks),
    f"endpoint {MODEL} --streams 8 --prompt 4 --tokens 3": check_endpoint,
}


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("command", CHECKS, ids=lambda command: command.split()[0])
def test_each_benchmark_gives_its_figures(command: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    shown = bench(*command.split(), "--json", str(file))
    found = read(file)
    assert found.benchmark == command.split()[0]
    CHECKS[command](found.rows, shown)
    assert bench("report", str(file)).startswith(f"## {found.benchmark}\n")


@pytest.mark.parametrize("command", table(__file__, "wrong"))
def test_wrong_options_are_explained(command: str) -> None:
    with pytest.raises(ConfigError, match=table(__file__, "wrong")[command]):
        bench(*command.split())


def test_size_writes_packs_and_uses_a_model_layer_by_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = Llama(width=64, layers=2, inner=112, heads=2, vocabulary=512, tied=False)
    monkeypatch.setitem(LLAMAS, "tiny", tiny)
    bench("size", "--shape", "tiny", "--layers", "2", "--tokens", "2", "--json", str(tmp_path / "size.json"))
    report = read(tmp_path / "size.json")
    assert [row["part"] for row in report.rows][-3:] == ["a token", "the first LoRA step", "a LoRA step"]
    token, first, step = report.rows[-3:]
    for who in ("tenant", "executor", "helper"):
        assert number(step[f"{who}_peak_mib"]) >= number(token[f"{who}_peak_mib"]) > 0
    assert number(first["moved_mib"]) > number(step["moved_mib"]) > number(token["moved_mib"]) > 0
    assert number(step["moved_forecast_mib"]) == pytest.approx(number(step["moved_mib"]), rel=0.05)
    for who in ("executor", "helper"):  # of which the weights of this model take next to nothing
        assert 300 < number(step[f"{who}_plan_mib"]) < 600
    assert len(report.goals) == 7
    with pytest.raises(ConfigError, match=r"--shape 'gpt-9' is not one of llama-2-7b"):
        bench("size", "--shape", "gpt-9")


def test_network_measures_each_way_over_each_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A link delays every round trip as its condition says."""
    for name, value in {"_TENANTS": 2, "_LENGTHS": (8, 20), "_BATCHES": (1, 2)}.items():
        monkeypatch.setattr(network, name, value)
    small, link = "--width 64 --layers 1 --inner 64 --tokens 4", "--condition 200mbit/5ms"
    bench("network", *small.split(), *link.split(), "--json", str(tmp_path / "network.json"))
    report = read(tmp_path / "network.json")
    alone, guessed, two, offloaded = report.rows
    for name in ("length_128_per_s", "length_2048_per_s"):
        assert 0 < number(alone[name]) < 1 / (4 * 0.005)
        assert 0 < number(guessed[name]) < 4 / (3 * 0.005)  # a pass has one token at least, and all four at most
    assert alone["tokens_per_pass"] == 1 <= number(guessed["tokens_per_pass"])
    assert 0 < number(alone["batch_64_per_s"]) < 1 / (4 * 0.005)
    assert 0 < number(two["length_128_per_s"]) < 1 / (4 * 0.005)
    assert offloaded["condition"] is None
    assert all(number(offloaded[name]) > 0 for name in network._FIGURES)
    measured = {goal.what: goal.measured for goal in report.goals}
    assert len(measured) == 5
    for rate in ("length 128", "length 2048", "batch 1", "batch 64"):
        name = f"{rate.replace(' ', '_')}_per_s"
        best = max(number(way[name] or 0) for way in (alone, guessed))
        over = measured[f"rate, {rate}, over offloading's, 200 Mbit/s, 5 ms"]
        assert over == pytest.approx(best / number(offloaded[name]))


def test_a_sessions_traffic_is_the_predicted_one_to_the_byte(tmp_path: Path) -> None:
    maskings = parse_maskings("pad/24,pad/24/two")
    model = Llama(width=64, layers=1, inner=64).save(tmp_path / "model")
    with provide(model, tmp_path, threads=1, maskings=maskings) as local:
        groups = WeightStore(model, cache=local.cache, scope=local.scope).manifest().groups
        for masking in maskings:
            with serve_tenant(model, remote_config(local, masking), 1) as do:
                *_, token = do(Generate(prompt=8, tokens=3))
                *_, step = do(Step(batch=2, tokens=8, steps=3))
            predicted = {of_token(groups, masking.transport): token}
            if masking.transport.round_trips == 4:
                predicted[of_step(groups, 16, masking.transport)] = step
            for traffic, cost in predicted.items():
                assert cost.counted.executor_round_trips == traffic.round_trips
                assert cost.counted.bytes_to_executors == traffic.up
                assert cost.counted.bytes_from_executors == traffic.down
