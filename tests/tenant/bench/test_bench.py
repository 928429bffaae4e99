"""The benchmarks, over real processes and small enough to be quick: what they report, not how fast it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from symbiosis_priv.errors import ConfigError, SymbiosisError
from tenant.bench import cli as bench_cli
from tenant.bench import contest as contests
from tenant.bench import scale
from tenant.bench.contest import Contest, Shape, contest
from tenant.bench.report import Report, read
from tenant.bench.worker import Generate, Setup
from tenant.session import spans
from threat_model.availability.ranks import measure_ranks

TINY = Shape(width=64, layers=1, inner=64)


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(bench_cli.app, arguments, env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


def measured(path: Path, *arguments: str) -> Report:
    shown = bench(*arguments, "--repeat", "1", "--threads", "1", "--json", str(path))
    assert shown.strip()
    return read(path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contest]:
    folder = tmp_path_factory.mktemp("contest")
    with contest(folder, TINY, ["pad"], threads=1, pool_memory_mib=16) as running:
        yield running


@pytest.fixture
def shared(running: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands find everybody started already."""

    @contextmanager
    def already(folder: Path, shape: Shape, maskings: Any, **options: Any) -> Iterator[Contest]:
        assert (shape.width, shape.layers, maskings) == (64, 1, ["pad"])
        yield running

    for module in (contests, scale):
        monkeypatch.setattr(module, "contest", already)


MODEL = ("--width", "64", "--layers", "1", "--inner", "64", "--masking", "pad")


@pytest.mark.usefixtures("shared")
def test_a_step_is_measured_whole_and_split(tmp_path: Path) -> None:
    found = measured(tmp_path / "b.json", "step", *MODEL, "--batch", "2", "--tokens", "8")
    assert found.benchmark == "step"
    whole, split = found.rows
    assert (whole["variant"], split["variant"]) == ("whole, fp32", "split, pad")
    assert all(scale.number(row[figure]) > 0 for row in found.rows for figure in ("wall_s", "tenant_peak_mib"))
    assert whole["helper_peak_mib"] is None
    assert scale.number(split["helper_peak_mib"]) > 0


@pytest.mark.usefixtures("shared")
def test_a_token_is_measured_whole_and_split(tmp_path: Path) -> None:
    found = measured(tmp_path / "b.json", "token", *MODEL, "--prompt", "2", "--tokens", "3")
    assert [row["variant"] for row in found.rows] == ["whole, fp32", "split, pad"]
    assert all(scale.number(row["token_ms"]) > 0 for row in found.rows)
    assert found.rows[0]["token_over_whole"] == 1.0


def test_a_turn_ends_when_everybody_is_idle(running: Contest) -> None:
    turn = running.turn("pad", Generate(prompt=1, tokens=4))
    assert len(turn.seconds) == 4
    assert min(turn.tenant_cpu_s, turn.executor_cpu_s, turn.helper_cpu_s) >= 0


def test_starts_are_measured_beside_reading(tmp_path: Path) -> None:
    report = measured(tmp_path / "start.json", "start", "--width", "64", "--layers", "1", "--inner", "64")
    figures = {row["what"]: row["over_reading"] for row in report.rows}
    assert figures["read the checkpoint"] == 1
    assert {"provider, first start", "provider, warm cache", "tenant, verification keys"} < set(figures)


def test_a_tenant_that_ends_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(SymbiosisError, match=r"(?s)'nobody' has ended: .*no config\.json"):
        contests.Tenant(
            "nobody",
            Setup(model=str(tmp_path), masking=None, federation="", cache="", threads=1, pool_memory_mib=0),
            tmp_path,
        ).__enter__()


@pytest.mark.usefixtures("shared")
def test_scale_draws_what_it_has_measured(tmp_path: Path) -> None:
    figures = ("--rows", "4,16", "--width", "64", "--layers", "1", "--masking", "pad", "--svg", str(tmp_path))
    found = measured(tmp_path / "b.json", "scale", *figures)
    assert [(row["axis"], row["at"]) for row in found.rows[::2]] == [
        ("rows", 4),
        ("rows", 16),
        ("width", 64),
        ("layers", 1),
    ]
    assert found.rows[0]["slope"] is not None
    assert found.rows[-1]["slope"] is None
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        "scale-layers.svg",
        "scale-rows.svg",
        "scale-width.svg",
    ]


def test_a_linear_is_measured_beside_its_floor(tmp_path: Path) -> None:
    found = measured(tmp_path / "b.json", "linear", "--rows", "1,4", "--width", "64")
    assert [row["rows"] for row in found.rows] == [1, 4]
    for row in found.rows:
        numbers: dict[str, float] = {name: value for name, value in row.items() if isinstance(value, int | float)}
        assert numbers["bytes_both_ways"] > 2 * 4 * 64 * numbers["rows"]
        parts = [numbers[f"{part}_us"] for part in spans.PARTS]
        assert 0 < sum(parts) <= numbers["masked_p99_us"]
        floor = numbers["echo_p50_us"] + numbers["product_p50_us"]
        assert numbers["masked_over_floor"] == pytest.approx(numbers["masked_p50_us"] / floor)


def test_provider_compares_policies_bit_by_bit(tmp_path: Path) -> None:
    """Eight tenants in processes of their own, generating and training: every answer is the one that they get alone."""
    figures, picture = tmp_path / "provider.json", tmp_path / "provider.svg"
    size = [
        "--tenants",
        "6+2",
        "--generating-rows",
        "1/2,4",
        "--hidden",
        "64",
        "--layers",
        "1",
        "--seconds",
        "0.3",
        "--threads",
        "1",
    ]
    files = ["--json", str(figures), "--picture", str(picture)]
    assert bench("provider", *size, *files).strip()
    results = read(figures).rows
    assert [(r["generating_rows"], r["policy"], r["generating"], r["training"]) for r in results] == [
        (rows, policy, 6, 2) for rows in ("1", "2, 4") for policy in ("none", "lockstep", "opportunistic")
    ]
    assert all(r["wrong"] == 0 and scale.number(r["answers"]) > 100 for r in results)
    assert all(0 < scale.number(r["product_share"]) <= 1 for r in results)
    assert all(scale.number(r["tokens_per_s"]) > 0 for r in results)
    assert all(scale.number(r["trained_rows_per_s"]) > 0 for r in results)
    assert all(r["batch_requests"] == 1 for r in results if r["policy"] == "none")
    assert picture.read_text().count("<rect") == 2 * 6


def test_bits_are_compared_over_kinds_of_providers(tmp_path: Path) -> None:
    """A small part of the matrix that `bench bits` goes through: one process and two ranks."""
    figures = tmp_path / "bits.json"
    size = ["--tenants", "2+1", "--ranks", "1,2", "--shardings", "columns", "--seconds", "0.3"]
    assert bench("bits", *size, "--policies", "opportunistic", "--json", str(figures)).strip()
    results = read(figures).rows
    assert [(r["ranks"], r["tenants"]) for r in results] == [(1, 3), (2, 3)]
    assert all(r["wrong"] == r["tenants_with_other_answers_alone"] == 0 for r in results)
    assert all(scale.number(r["answers"]) > 10 for r in results)


def test_a_lost_rank_keeps_nobody_waiting_who_has_another_executor(tmp_path: Path) -> None:
    """A small one of `bench ranks`."""
    (row,) = measure_ranks(
        tmp_path,
        TINY,
        groups=[2],
        losses=["a rank is killed"],
        ranks=2,
        tenants=1,
        rows=1,
        masking="none",
        seconds=0.5,
        pause_s=0.02,
        apart=False,
    )
    assert row["wrong"] == row["left_processes"] == 0
    assert row["named"] == "yes"
    assert scale.number(row["longest_s"]) < scale.number(row["back_after_s"])


def test_kernels_shows_the_choice(tmp_path: Path) -> None:
    found = measured(tmp_path / "b.json", "kernels", "--rows", "1,32", "--shape", "32x64")
    assert {row["rows"] for row in found.rows} == {1, 32}
    assert [row["chosen"] for row in found.rows].count("yes") >= 2
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:kernels:begin -->\n<!-- bench:kernels:end -->\n")
    bench("report", str(tmp_path / "b.json"), "--markdown", str(page))
    assert bench("report", str(tmp_path / "b.json")) in page.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["linear", "--rows", "none"],
        ["linear", "--width", "30"],
        ["kernels", "--shape", "32"],
        ["scale", "--layers", "0"],
        ["step", "--width", "100"],
    ],
)
def test_wrong_numbers_are_explained(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"{arguments[1]} '?{arguments[2]}'?: "):
        bench(*arguments)


@pytest.mark.parametrize("arguments", [["step", "--masking", "pad,nobody"], ["linear", "--masking", "nobody"]])
def test_wrong_schemes_are_told_which_there_are(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"'nobody' is unknown; choose one of .*pad"):
        bench(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("arguments", [["kernels", "--device", "cuda"], ["gpu"]])
def test_without_a_gpu_its_benchmarks_refuse(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="there is no device 'cuda' here; there are cpu"):
        bench(*arguments)


def test_a_device_that_does_not_exist_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no device 'tpu9' here; there are cpu"):
        bench("kernels", "--device", "tpu9")
