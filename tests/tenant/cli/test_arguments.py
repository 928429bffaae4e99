"""Wrong arguments of a command are errors before torch is imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    return tmp_path


FINETUNE = "tenant finetune -m model -f none.toml -t notes.txt"
SERVE = "tenant serve -m model -f none.toml --listen 127.0.0.1:0"
GENERATE = "tenant generate -m model -f none.toml -p words"


WRONG = (
    (FINETUNE.replace("model", "./absent"), "absent"),
    (FINETUNE.replace("notes.txt", "pairs.txt"), "JSON"),
    (f"{FINETUNE} -o used", "--output used"),
    (f"{FINETUNE} --resume", "--resume"),
    (FINETUNE, "none.toml"),
    (GENERATE.replace("-p words", ""), "--prompt"),
    (f"{GENERATE} -a absent", "absent does not exist"),
    (GENERATE, "none.toml"),
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


def test_wrong_arguments_do_not_wait_for_torch(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([command for command, _ in WRONG]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for (command, word), line in zip(WRONG, done.stdout.splitlines(), strict=True):
        status, shown, heavy = json.loads(line)
        assert status == 1, (command, shown)
        assert word in shown, command
        assert not heavy, command
