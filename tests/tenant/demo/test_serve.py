"""`serve-demo` with a model that is there already: it starts, says its address, answers, and leaves nothing behind."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from symbiosis_priv import cli
from symbiosis_priv.display import terminal
from symbiosis_priv.harness.local import LocalFederation


def test_the_demo_serves_until_ctrl_c(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMBIOSIS_PRIV_CACHE", str(tmp_path / "cache"))
    federations: list[LocalFederation] = []
    found: list[Any] = []
    start, name = LocalFederation.start, tiny.name

    def started(self: LocalFederation) -> LocalFederation:
        federations.append(self)
        return start(self)

    def ask(text: str, **_: Any) -> None:
        if match := re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", text):
            threading.Thread(target=use, args=match.groups()).start()

    def use(url: str, key: str) -> None:
        try:
            with OpenAI(base_url=url, api_key=key) as client:
                found.append(client.completions.create(model=name, prompt="The weather", max_tokens=4, temperature=0))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LocalFederation, "start", started)
    monkeypatch.setattr(terminal, "say", ask)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        shown = CliRunner().invoke(cli.app, ["serve-demo", "--model", str(tiny), "--listen", "127.0.0.1:0"])
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, sigterm)
    assert found[0].usage.completion_tokens == 4, shown.output
    assert found[0].usage.model_extra["ledger"]["answers_verified"] > 0
    [local] = federations
    assert [local.pid(name) for name in local.names] == [None, None]
