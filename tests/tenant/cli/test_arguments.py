"""Wrong arguments of a command are errors before torch is imported, which takes seconds."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from symbiosis_priv.certificates.issuing import issue
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import federation_text
from tenant.cli.options import Remote, takes
from tenant.options import Experts
from tests.cases import table

PROGRAM = """
import contextlib, io, json, sys
from symbiosis_priv.cli import main

for words in json.load(sys.stdin):
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        try:
            main(words.split())
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, shown.getvalue(), list({"torch", "transformers", "peft"} & sys.modules.keys())]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "notes.txt").write_text("one\n\ntwo\n")
    (tmp_path / "pairs.txt").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "chats.jsonl").write_text('\n{"messages": [{"role": "assistant", "content": "a"}]}\n')
    (tmp_path / "ratings.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    identity = issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="alpha")
    alpha = {"name": "alpha", "operator": "Alpha GmbH", "role": "executor", "address": "127.0.0.1:1"}
    written = federation_text(
        [{**alpha, "certificate": identity.certificate}],
        digest=f"sha256:{'0' * 64}",
        certificate=tmp_path / "alice.pem",
        key=tmp_path / "alice.key",
    )
    (tmp_path / "alone.toml").write_text(written)
    return tmp_path


def test_the_options_know_every_mode_of_experts() -> None:
    """They are written out where torch must not be imported. (`test_the_command_line_names_them_all`: masking.)"""
    assert set(get_args(get_args(get_type_hints(Remote)["experts"])[0])) == set(get_args(Experts))


def test_wrong_arguments_do_not_wait_for_torch(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        wrong = [
            (command.replace("PORT", port), word.replace("PORT", port))
            for command, word in table(__file__, "wrong").items()
        ]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps([command for command, _ in wrong]),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    for (command, word), line in zip(wrong, done.stdout.splitlines(), strict=True):
        status, shown, heavy = json.loads(line)
        usage = ("--masking pads", "--experts counts", "--deadline -1", "--seed", "--epochs inf")
        assert status == (2 if any(words in command for words in usage) else 1), (command, shown)
        assert word in shown, command
        assert not heavy, command


def test_the_flag_of_an_argument_that_a_message_names_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    @takes
    def command(*, remote: Remote) -> None:
        raise ConfigError("RemoteConfig(deadline_s=...), RemoteConfig(tied_head=False), RemoteConfig(ring_bits=32)")

    with pytest.raises(ConfigError):
        command(masking="simulate")
    shown = "RemoteConfig(deadline_s=...) is --deadline here\nRemoteConfig(tied_head=...) is --tied-head here\n"
    assert capsys.readouterr().err == shown
