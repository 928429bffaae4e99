"""The tenant's commands against real provider processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from symbiosis_priv import cli as root_cli
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CertificateError, CheckpointError, ConfigError
from symbiosis_priv.harness.base_model import private_text
from symbiosis_priv.harness.local import LocalFederation
from tenant.cli import app as cli
from tenant.cli.generate import generate as generate_command
from tenant.model.hf import RemoteConfig
from tenant.model.loading import load_tokenizer
from tenant.training.generate import generate, open_model
from tenant.training.options import Decoding
from tenant.training.output import last_checkpoint
from tests.compatibility.families import build
from tests.warm import Popen


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny, tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    path = model.parent / "notes.txt"
    path.write_text("\n\n".join(private_text(seed=0, records=40)))
    return path


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[LocalFederation]:
    with LocalFederation(model, model.parent / "federation") as local:
        yield local


@pytest.fixture(scope="module")
def adapter(model: Path, text: Path, local: LocalFederation) -> Path:
    """Two steps with a checkpoint after each."""
    output = model.parent / "adapter"
    shown = tenant("finetune", *finetuning(model, text, local, output), "--steps", "2")
    for figure in ("loss on", "tokens per second", "round trips to executors", "answer rows verified"):
        assert figure in shown
    line = r"^step (\d) of 2, loss [\d.]+, [\d,]+ tokens/s, 0:00:\d\d left, [\d.]+ [KM]iB sent and received$"
    assert re.findall(line, shown, re.MULTILINE) == ["1", "2"]  # without a terminal
    return output


def finetuning(model: Path, text: Path, local: LocalFederation, output: Path) -> tuple[str, ...]:
    where = ("--model", str(model), "--federation", str(local.federation), "--text", str(text))
    return (*where, "--output", str(output), "--sequence-length", "32", "--batch-size", "2", "--save-every", "1")


def tenant(*arguments: str, stdin: str | None = None) -> str:
    """Run a command in a terminal of 120 columns."""
    return str(checked(CliRunner().invoke(cli.app, arguments, input=stdin, env={"COLUMNS": "120"})).output)


def checked(result: Any) -> Any:
    if result.exception is not None:
        raise result.exception
    return result


def test_finetune_writes_a_peft_folder_and_resumes(
    model: Path, text: Path, local: LocalFederation, adapter: Path
) -> None:
    assert (adapter / "adapter_config.json").is_file()
    assert (adapter / "adapter_model.safetensors").is_file()
    again = finetuning(model, text, local, adapter)
    with pytest.raises(ConfigError, match="choose another folder, or pass --resume"):
        tenant("finetune", *again, "--steps", "3")
    resumed = tenant("finetune", *again, "--steps", "3", "--resume", "--gradient-checkpointing")
    assert "steps" in resumed
    assert (adapter / "checkpoint-3").is_dir()
    assert tenant("finetune", *again, "--steps", "3", "--resume").count("\nfinished: ") == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_an_interrupted_run_prints_what_is_saved(
    model: Path, text: Path, local: LocalFederation, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    output = tmp_path / "adapter"
    arguments = ["tenant", "finetune", *finetuning(model, text, local, output), "--steps", "9999"]
    program = f"""
import signal
from symbiosis_priv.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
main({arguments})
"""
    with Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("loading torch")
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("step"):
                    break
            assert "loading and evaluating the model ...\n" in lines
            assert re.match(r"step 1 of 9999, loss \d", lines[-1])
            process.send_signal(number)
            assert process.wait(60) == status
            shown = process.stderr.read()
        finally:
            process.kill()
    saved = re.search(r"^saved: .*adapter, after step (\d+) of 9999; .* --resume continues$", shown, re.MULTILINE)
    assert saved, shown
    assert "Traceback" not in shown
    assert (output / "adapter_model.safetensors").is_file()
    assert last_checkpoint(output).name == f"checkpoint-{saved[1]}"


def test_a_prompt_can_be_read_from_stdin(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a simulation needs no federation."""
    where = ["--model", str(model), "--max-new-tokens", "4", "--masking", "simulate"]
    (tmp_path / "prompt").write_bytes("The weather\r\n".encode("utf-8-sig"))  # some editors write it like this
    given = tenant("generate", *where, "--prompt", "The weather")
    assert tenant("generate", *where, "--prompt-file", str(tmp_path / "prompt")) == given
    assert tenant("generate", *where, "--prompt-file", "-", stdin="The weather\n") == given
    with pytest.raises(ConfigError, match="--prompt is not UTF-8 text"):
        tenant("generate", *where, "--prompt", os.fsdecode(b"M\xfcller"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="stdin is closed"):
        generate_command(model=str(model), masking="simulate", prompt_file=Path("-"), prompt=None)
    with pytest.raises(ConfigError, match="--prompt-file FILE"):
        tenant("generate", *where)
    shown = CliRunner().invoke(cli.app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    assert "process list" in shown


def test_a_chat_uses_the_models_template(model: Path, local: LocalFederation, adapter: Path) -> None:
    """An adapter's template does not decide how many rows a message becomes."""
    folder = Path(shutil.copytree(model, model.parent / "chatting"))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ignore = shutil.ignore_patterns("checkpoint-*")
    other = Path(shutil.copytree(adapter, model.parent / "other template", ignore=ignore))
    (other / "chat_template.jinja").write_text("{{ messages * 2 }}")

    def printed(folder: Path, *options: str) -> str:
        where = ["generate", "--model", str(folder), "--federation", str(local.federation), "--adapter", str(other)]
        where += ["--masking", "simulate", "--max-new-tokens", "4", "--prompt"]
        return str(checked(CliRunner().invoke(cli.app, [*where, *options])).stdout)

    assert printed(folder, "Hello", "--chat") == printed(folder, "user: Hello\nassistant: ")
    with pytest.raises(ConfigError, match="no chat template"):
        printed(model, "Hello", "--chat")


def test_prepare_writes_a_slim_checkpoint_that_generates_the_same(
    model: Path, text: Path, local: LocalFederation, adapter: Path, tmp_path: Path
) -> None:
    slim = tmp_path / "slim"
    shown = tenant("prepare", "--model", str(model), "--federation", str(local.federation), "--slim", str(slim))
    assert "prepared 8 layer groups" in shown
    with safe_open(slim / "model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if "_proj" in name]  # noqa: SIM118  # not a dict
    with pytest.raises(CheckpointError, match="full base checkpoint"):
        tenant("check", "--model", str(slim), "--text", str(text))

    def generate(folder: Path, *options: str) -> str:
        where = ("--model", str(folder), "--federation", str(local.federation), "--adapter", str(adapter))
        return tenant("generate", *where, "--prompt", "The weather", "--max-new-tokens", "4", *options)

    full = generate(model)
    assert "round trips" in full
    assert "0 answers rejected" in full
    assert generate(slim).splitlines()[0] == full.splitlines()[0]
    assert "round trips" in generate(slim, "--beams", "2")
    assert "round trips" in generate(slim, "--temperature", "0.7", "--top-p", "0.9")


def test_hints_are_shown_made_and_used(
    model: Path, local: LocalFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYMBIOSIS_PRIV_CACHE", str(tmp_path / "cache"))
    where = ("--model", str(model), "--federation", str(local.federation))
    shown = tenant("check", *where, "--masking", "lwe")
    forecast = re.search(r"hints, on disk and in memory\W+([\d.]+) GB\W+([\d.]+) GB", shown)
    assert forecast
    assert "does not pay here" in shown
    assert not (tmp_path / "cache").exists()
    made = tenant("prepare", *where, "--masking", "lwe", "--training")
    size = sum(file.stat().st_size for file in tmp_path.glob("cache/tenant/v*/lwe-16/*"))
    assert float(forecast[2]) == pytest.approx(size / 1e9, rel=0.05, abs=0.005)
    assert "of hints in" in made
    shown = tenant("generate", *where, "--masking", "lwe", "--prompt", "The weather", "--max-new-tokens", "3")
    assert "0 answers rejected" in shown
    wrong = CliRunner().invoke(cli.app, ["prepare", *where, "--masking", "lwe", "--hint-bits", "17"])
    assert wrong.exit_code == 2
    assert "'17' is not one of" in wrong.output


def test_check_shows_the_split_without_reading_weights(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    shown = tenant("check", "--model", str(tmp_path))
    assert "at providers" in shown
    assert "here: norms, biases and others" in shown
    assert "round trips of a token" in shown
    assert "the LM head, with --tied-head" in shown
    config = json.loads((model / "config.json").read_text())
    products = config["vocab_size"] * config["hidden_size"]
    assert re.search(rf"multiply-adds for a row of logits.* {products:,} ", shown)
    assert "the tied LM head, at providers" in tenant("check", "--model", str(tmp_path), "--tied-head")


def test_check_measures_quality_without_a_provider_and_shows_its_progress(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []

    @contextmanager
    def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: seen.append((label, done, total))

    monkeypatch.setattr(terminal, "progress_bar", progress_bar)
    sizes = ("--sequence-length", "32", "--blocks", "2", "--round-trips", "2")
    shown = tenant("check", "--model", str(model), "--text", str(text), *sizes)
    for figure in ("same first choice", "perplexity", "smallest cosine", "round_trips"):
        assert figure in shown
    for label in ("ring, 10 bits", "ring_bits = 24", "bf16"):
        assert [(done, total) for name, done, total in seen if name == label] == [(1, 2), (2, 2)]


def changed(local: LocalFederation, path: Path, pattern: str, replacement: str) -> Path:
    """A copy of the federation file with one change."""
    text, count = re.subn(pattern, replacement, local.federation.read_text())
    assert count == 1
    path.write_text(text)
    return path


def test_a_missing_certificate_of_the_tenant_is_not_a_providers_failure(local: LocalFederation, model: Path) -> None:
    path = changed(local, local.directory / "without.toml", r"tenant\.pem", "no.pem")
    for command in (["federation", "check"], ["verify", "--model", str(model)]):
        result = CliRunner().invoke(root_cli.app, [*command, "--federation", str(path)])
        assert isinstance(result.exception, CertificateError)
        assert "no.pem" in str(result.exception)
        assert "failed" not in result.output


def test_rule_9_a_fixed_length_hides_the_end(model: Path) -> None:
    """With a fixed length, the text is the same, and the number of forward passes does not depend on its end."""
    split, tokenizer = open_model(model, remote=RemoteConfig(masking="simulate"))
    passes = 0

    def count(*args: Any) -> None:
        nonlocal passes
        passes += 1

    split.register_forward_pre_hook(count)
    prompt = tokenizer("The weather", return_tensors="pt", return_token_type_ids=False)
    new = split.generate(**prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, -6:].tolist()
    end = new.index(new[2])  # the end of the text if its third token were the end token
    split.generation_config.eos_token_id = [tokenizer.eos_token_id, new[2]]  # the tokenizer has one of the two
    passes = 0
    short = generate(split, tokenizer, "The weather", decoding=Decoding(max_new_tokens=6))
    assert passes == end + 1
    passes = 0
    fixed = generate(split, tokenizer, "The weather", decoding=Decoding(max_new_tokens=6, fixed_length=True))
    assert passes == 6
    assert fixed == tokenizer.decode(new[:end])
    assert short.startswith(fixed)


def test_rule_10_a_folder_does_not_decide_how_many_rows_are_sent(model: Path, tmp_path: Path) -> None:
    """With prompt lookup, an executor would see repetitions of the text in the number of rows, also at a fixed length.

    An early exit would send every layer's rows several times, and a time limit would end the generation.
    """
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    own = json.loads(path.read_bytes()) if path.exists() else {}
    sent: list[int] = []

    def count(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        sent.append(inputs["input_ids"].shape[1])

    texts = set()
    changes: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"max_time": 1e-9}]
    for change in ({}, *changes, {"use_cache": False}, {"stop_strings": ["e"]}):
        path.write_text(json.dumps(own | change))
        split, tokenizer = open_model(folder, remote=RemoteConfig(masking="simulate"))
        split.register_forward_pre_hook(count, with_kwargs=True)
        sent.clear()
        decoding = Decoding(max_new_tokens=6, fixed_length=True)
        texts.add(generate(split, tokenizer, "The weather the weather the weather", decoding=decoding))
        assert sent == [sent[0], *[1] * 5]
    assert len(texts) == 1


def test_no_more_tokens_than_the_models_context(model: Path) -> None:
    """Rotary positions have no table, and a text beyond the context is of no use either."""
    tokenizer, decoding = load_tokenizer(model), Decoding(max_new_tokens=40)
    for name, positions in (("GPT2LMHeadModel", "n_positions"), ("LlamaForCausalLM", "max_position_embeddings")):
        loaded = build(name, vocab_size=len(tokenizer), **{positions: 32})
        with pytest.raises(ConfigError, match=r"2 tokens of prompt and 40 new tokens .* context of 32; shorten"):
            generate(loaded, tokenizer, "a", decoding=decoding)
