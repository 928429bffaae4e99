"""The root command: every plug-in is listed, nothing is imported early, errors are one line."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from symbiosis_priv import cli, errors
from tests.sizes import options

OWN_COMMANDS = sorted(
    entry.name for entry in entry_points(group=cli.COMMAND_GROUP) if entry.dist and entry.dist.name == "symbiosis-priv"
)

Plug = Callable[[str, Any], None]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Plug:
    """`plug(...)` adds a command for one test, as another package would."""
    plugged: list[EntryPoint] = []

    def add(name: str, target: object) -> None:
        module = ModuleType(f"plugged_{name}")
        module.__dict__["target"] = target
        monkeypatch.setitem(sys.modules, module.__name__, module)
        plugged.append(EntryPoint(name, f"{module.__name__}:target", cli.COMMAND_GROUP))
        monkeypatch.setattr(cli, "_installed", lambda: EntryPoints(plugged).select(group=cli.COMMAND_GROUP))

    return add


def run(*args: str) -> int:
    """Runs the command line; returns the exit status."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(args)
    code = exit_info.value.code
    return code if isinstance(code, int) else 0


def test_help_lists_every_command_with_its_help() -> None:
    result = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert sorted(cli._SHORT_HELP) == OWN_COMMANDS
    for name, short_help in cli._SHORT_HELP.items():
        assert (name in result.output) == ("." not in name)
        assert (short_help in result.output) == ("." not in name)


@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_every_command_loads(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = name.split(".")
    assert run(*words, "--help") == 0
    assert f"symbiosis-priv {' '.join(words)}" in capsys.readouterr().out


def test_a_group_lists_and_runs_commands_of_another_package(plug: Plug, capsys: pytest.CaptureFixture[str]) -> None:
    """The group's own commands stay, a command of another package runs, and other modules are not imported."""
    app = typer.Typer()
    app.command("own")(lambda: typer.echo("own ran"))
    plug("group", app)
    plug("group.added", lambda: typer.echo("added ran"))
    plug("group.own", lambda: typer.echo("replaced"))
    plug("group.gone", None)
    del sys.modules["plugged_group.gone"]
    assert run("group", "--help") == 0
    shown = capsys.readouterr().out
    assert "added" in shown
    assert "Added by another package." in shown
    for name in ("own", "added"):
        assert run("group", name) == 0
        assert capsys.readouterr().out == f"{name} ran\n"
    assert run("group", "gone") == 1
    assert run("--help") == 0
    assert "added" not in capsys.readouterr().out


def test_help_and_configuration_commands_do_not_import_torch(tmp_path: Path) -> None:
    program = """
import contextlib, io, shlex, sys
from typer.main import get_command
from symbiosis_priv import cli

def run(*words):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main(words)
    heavy = {"torch", "transformers", "peft", "numpy"} & sys.modules.keys()
    sys.exit(f"{words} imported {heavy}") if heavy else None
    return shown.getvalue()

def walk(path, command):
    shown = run(*path, "--help")
    assert "--help" in shown and "<bool>" not in shown, path
    if not hasattr(command, "commands"):
        assert "Example: symbiosis-priv " + " ".join(path) in " ".join(shown.split()), path
        words = shlex.split(cli._EXAMPLES.get(" ".join(path), ""))
        with command.make_context(path[-1], words) as context:
            assert not context.args, path
    # a benchmark's command stands beside its measurement, whose modules need torch
    for name in getattr(command, "commands", {}) if path != ["bench"] else []:
        context = command.make_context(name, [], resilient_parsing=True)
        walk([*path, name], command.resolve_command(context, [name])[1])

run("--version")
walk([], get_command(cli.app))
run("provider", "init", sys.argv[1])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "provider.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_typo_is_wrong_usage_and_names_the_nearest_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("threat-modle") == 2
    assert "Did you mean 'threat-model'?" in capsys.readouterr().err


def test_a_word_of_another_program_leads_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tenant", "train") == 2
    assert "Did you mean 'finetune'?" in " ".join(capsys.readouterr().err.split())


EXAMPLES = [
    errors.ConfigError("port: not a number; write 1 to 65535"),
    errors.ProviderError(code="busy", provider="p", detail="\x1b[2J\nforged line\r\u202e"),
    errors.VerificationError(provider="p", group_name="g", direction="forward", what="the answer"),
    errors.DeadlineExceededError("no answer in 5 s; raise `deadline`"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_is_one_clean_line(error: errors.SymbiosisError, plug: Plug, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    plug("fail", fail)
    assert run("fail") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable()


def test_an_unusable_file_is_a_one_line_error(plug: Plug, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    plug("prepare", lambda: (tmp_path / "cache" / "weights").mkdir())
    assert run("prepare") == 1
    assert capsys.readouterr().err.startswith(f"error: cannot use {tmp_path / 'cache' / 'weights'}: Not a directory; ")


REPORTS = [("bench", name, "--json") for name in ("linear", "step", "provider", "abuse")] + [
    ("demo", "--json"),
    ("threat-model", "--html"),
]


@pytest.mark.parametrize("words", REPORTS, ids=" ".join)
def test_a_report_that_cannot_be_written_is_an_early_error(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run(*words, str(file / "report")) == 1
    assert capsys.readouterr().err.startswith(f"error: cannot write {file / 'report'}: ")


def test_a_full_disk_is_a_one_line_error(plug: Plug, capsys: pytest.CaptureFixture[str]) -> None:
    def fill() -> None:
        with Path("/dev/full").open("w") as file:
            file.write("figures")

    plug("fill", fill)
    assert run("fill") == 1
    assert capsys.readouterr().err.startswith("error: cannot write: No space left on device; make room")


def test_a_letter_that_the_terminal_lacks_is_replaced(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", write_through=True))
    plug("say", lambda: print("déjà vu"))
    assert run("say") == 0
    assert printed.getvalue() == b"d?j? vu\n"


def test_traceback_only_on_request(
    plug: Plug, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise errors.ConfigError("wrong")

    plug("fail", fail)
    monkeypatch.setenv("SYMBIOSIS_PRIV_TRACEBACK", "1")
    assert run("fail") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: wrong\n")


def test_interrupt_is_status_130(plug: Plug) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    plug("interrupted", interrupted)
    assert run("interrupted") == 130


def test_a_bug_keeps_its_traceback(plug: Plug) -> None:
    def bug() -> None:
        raise ZeroDivisionError

    plug("bug", bug)
    with pytest.raises(ZeroDivisionError):
        cli.main(["bug"])


PROVIDER = """
import sys, time
from symbiosis_priv import cli
try:
    cli.main(["--version"])
except SystemExit:
    pass
import provider.serve, torch
if "transformers" in sys.modules:
    sys.exit("transformers is imported")
torch.set_num_threads(2)
numbers = torch.ones(400_000)
numbers.add_(1)
before = time.process_time()
for _ in range(100):
    numbers.add_(1)
    time.sleep(0.005)
if (spent := time.process_time() - before) > 0.3:
    sys.exit(f"{spent} s of CPU time while threads wait")
"""


def test_a_provider_imports_no_transformers_and_torchs_threads_do_not_spin() -> None:
    """Importing transformers takes longer than all else, and is needed only for a checkpoint without a cached manifest.
    A command's process shares its cores: with spinning, the loop takes about 1 s of CPU time instead of 0.02 s."""
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    subprocess.run([sys.executable, "-c", PROVIDER], check=True, timeout=120, env=clean)


def test_a_letter_stands_for_one_option_in_all_commands() -> None:
    """`-a` was an authority in one command, and an adapter in another one."""
    meanings: dict[str, set[str]] = {}
    for words, _ in options():
        name, *others = words.split()
        for letter in (other for other in (name, *others) if len(other) == len("-a")):
            meanings.setdefault(letter, set()).add(name)
    assert "-f" in meanings
    assert {letter: names for letter, names in meanings.items() if len(names) > 1} == {}
