"""`symbiosis-priv demo` on a user's own checkpoint and text, through the command line, with claims that can fail."""

import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from symbiosis_priv.cli import app
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.base_model import private_text
from symbiosis_priv.network.addresses import parse_address
from tenant.demo.claims import Measurements, claims, show
from tenant.session.tally import Ledger
from tenant.training.quantisation_error import Quality
from tests.warm import Popen


@pytest.fixture(scope="module")
def arguments(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A user's own model and text."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text.txt").write_text("\n".join(private_text(seed=3, records=60)), encoding="utf-8")
    return ["demo", "--model", str(trained), "--text", str(folder / "text.txt")]


@pytest.fixture(scope="module")
def report(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo-run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenant.demo.run._NEW_TOKENS", 12)
        result = CliRunner().invoke(app, [*arguments, "--steps", "2", "--json", str(folder / "figures.json")])
    assert result.exit_code == 0, result.output
    assert "all 10 claims hold" in result.output
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


def test_every_claim_holds_on_a_users_own_model(report: dict[str, Any]) -> None:
    assert report["passed"]
    assert all(claim["holds"] for claim in report["claims"])
    assert len(report["figures"]["losses"]) == 2


def _figures(report: dict[str, Any], **changes: Any) -> Measurements:
    plain = dict(report["figures"])
    for name in ("losses", "simulated_losses", "tokens_before", "tokens_after", "tokens_simulated"):
        plain[name] = tuple(plain[name])
    plain["quality"] = Quality(**plain["quality"])
    plain["ledger"], plain["generation"] = Ledger(**plain["ledger"]), Ledger(**plain["generation"])
    return replace(Measurements(**plain), **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"simulated_losses": (1.0, 2.0)},
        {"adapter_tensors_equal": 1},
        {"tokens_simulated": (1, 2, 3)},
        {"tokens_after": ()},
        {"killed": None},
        {"successor": None},
        {"successor": "executor-1", "killed": "executor-1"},
        {"tampered_rejected": 47},
        {"offloaded_bytes": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_figure_fails_exactly_its_claim(report: dict[str, Any], change: dict[str, Any]) -> None:
    assert all(claim.holds for claim in claims(_figures(report)))
    assert sum(not claim.holds for claim in claims(_figures(report, **change))) == 1


def test_poor_quality_and_an_unverified_answer_fail(report: dict[str, Any]) -> None:
    good = _figures(report)
    poor = replace(good.quality, top1=0.98, perplexity=1.02 * good.quality.reference_perplexity)
    assert sum(not claim.holds for claim in claims(replace(good, quality=poor))) == 2
    unverified = replace(good.ledger, answers_verified=good.ledger.rows - 1)
    assert sum(not claim.holds for claim in claims(replace(good, ledger=unverified))) == 1


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("steps", [1, 3, 40, 1000])
def test_the_screen_fits(report: dict[str, Any], width: int, encoding: str, steps: int) -> None:
    losses = tuple(float(5 + math.cos(step)) for step in range(steps))
    figures = _figures(report, losses=losses, simulated_losses=losses, text_after="long \x1b[2J words\n" * 50)
    printed = io.BytesIO()
    with io.TextIOWrapper(printed, encoding=encoding, errors="replace") as file:
        assert show(Console(file=file, width=width), figures)
        file.flush()
        lines = printed.getvalue().decode(encoding).splitlines()
    assert max(map(len, lines)) <= min(width, 80)
    assert width < 80 or len(lines) <= 45
    assert not any("\x1b" in line for line in lines)
    assert all(claim.sentence.split()[-1] in "\n".join(lines) for claim in claims(figures))


@pytest.mark.parametrize("text", [b"", b" \n\n", b"caf\xe9"], ids=["empty", "blank", "latin-1"])
def test_an_unsuitable_text_is_refused_before_training(
    tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("tenant.demo.run.cached_base_model", trains)
    (tmp_path / "text.txt").write_bytes(text)
    result = CliRunner().invoke(app, ["demo", "--text", str(tmp_path / "text.txt")])
    assert isinstance(result.exception, ConfigError), result.exception


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_an_interrupted_demo_leaves_nothing_behind(
    arguments: list[str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """No keys, no adapter, no provider, and the usual exit status."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = f"""
import signal
from symbiosis_priv.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
main({[*arguments, "--steps", "2"]})
"""
    with Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while len(ready := list(tmp_path.glob("symbiosis-priv-demo-*/federation/*.ready"))) < 3:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.02)
            ports = [parse_address(path.read_text().strip()) for path in ready]
            process.send_signal(number)
            assert process.wait(60) == status
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert not list(tmp_path.glob("symbiosis-priv-demo-*"))
    for address in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=10)
