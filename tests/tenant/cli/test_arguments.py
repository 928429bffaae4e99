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
from symbiosis_priv.federation import federation_text
from tenant.cli.options import Remote
from tenant.options import Experts

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


FINETUNE = "tenant finetune -m model -f none.toml -t notes.txt"
SERVE = "tenant serve -m model -f none.toml --listen 127.0.0.1:0"
GENERATE = "tenant generate -m model -f none.toml -p words"


WRONG = (
    (FINETUNE.replace("model", "./absent"), "absent"),
    (FINETUNE.replace("notes.txt", "pairs.txt"), "JSON"),
    (f"{FINETUNE} -o used", "--output used"),
    (f"{FINETUNE} -o model/new", "model's folder"),
    (f"{FINETUNE} --seed -1", "--seed"),
    (f"{FINETUNE} --seed 4294967296", "--seed"),
    (f"{FINETUNE} --epochs inf", "--epochs"),
    (f"{FINETUNE} --resume", "--resume"),
    (FINETUNE, "none.toml"),
    (GENERATE.replace("-p words", ""), "--prompt"),
    (f"{GENERATE} -a absent", "absent does not exist"),
    (GENERATE, "none.toml"),
    (GENERATE.replace("-f none.toml", ""), "--federation"),
    (GENERATE.replace("none.toml", "alone.toml"), "role = 'helper'"),
    (f"{GENERATE} --masking pads", "simulate"),
    (f"{GENERATE} --experts some", "counts"),
    (f"{GENERATE} --seed -1", "--seed"),
    (f"{GENERATE} --deadline -1", "0.1"),
    (f"{GENERATE} --prompt-file notes.txt", "exclude each other"),
    (f"{GENERATE} --chat", "no chat template; leave out --chat"),
    ("tenant chat -m model -f none.toml", "no chat template; continue a text with `symbiosis-priv tenant generate`"),
    (FINETUNE.replace("notes.txt", "chats.jsonl"), "no chat template; write plain prompts"),
    ("tenant check -m model -t ratings.jsonl --show 2", "'label'"),
    ("tenant check -m model --show 2", "--show"),
    (f"{SERVE[:-1]}PORT", "PORT"),
    ("serve-demo --listen 127.0.0.1:PORT", "PORT"),
    (f"{SERVE} -a used", "NAME=FOLDER"),
    (f"{SERVE} -a x=absent", "absent does not exist"),
    (f"{SERVE} --api-key-file notes.txt", "one key per line"),
    (f"{SERVE} --allow-loading absent", "--allow-loading absent"),
    (f"{SERVE} --listen 0.0.0.0:0", "--public"),
    (f"{SERVE} --fixed-length --draft prompt", "--draft"),
    (SERVE, "none.toml"),
    ("tenant check -m model -t absent.txt", "absent.txt"),
    ("tenant prepare -m model -f none.toml", "none.toml"),
    ("federation check -f none.toml", "none.toml"),
    ("verify --federation none.toml", "none.toml"),
    ("demo --text pairs.txt", "JSON"),
    ("provider serve -c none.toml", "none.toml"),
)


def test_the_options_know_every_scheme_and_mode() -> None:
    """They are written out where torch must not be imported."""
    from tenant.masking.registry import registered, scheme_named

    hints = get_type_hints(Remote)
    assert set(get_args(hints["masking"])) == {scheme.name for scheme in registered()}
    assert set(get_args(get_args(hints["experts"])[0])) == set(get_args(Experts))
    for name in get_args(hints["masking"]):
        assert bool(scheme_named(name).roles) == (name != "simulate")
        assert ("helper" in scheme_named(name).roles) == (name == "pad")


def test_wrong_arguments_do_not_wait_for_torch(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        wrong = [(command.replace("PORT", port), word.replace("PORT", port)) for command, word in WRONG]
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
        usage = ("--masking pads", "--experts some", "--deadline -1", "--seed", "--epochs inf")
        assert status == (2 if any(words in command for words in usage) else 1), (command, shown)
        assert word in shown, command
        assert not heavy, command
