"""Rule 10: a folder overrides none of the user's choices, runs no code, and causes no request to the hub."""

import ast
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoConfig

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.skeleton import discover, load_config
from symbiosis_priv.checkpoints.vetting import QUANT_METHOD, on_this_machine, read_json, vet, vet_adapter
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.cases import cases

ROOT = Path(__file__).parents[3]
OURS = {"quant_method": QUANT_METHOD, "masking": "none", "federation": "evil.toml"}


@pytest.fixture
def folder(llama_path: Path, tmp_path: Path) -> Callable[..., Path]:
    """`folder(**entries)`: a copy of the Llama with further entries in config.json."""

    def write(**entries: Any) -> Path:
        path = tmp_path / "checkpoint"
        shutil.copytree(llama_path, path)
        config = json.loads((path / "config.json").read_bytes())
        (path / "config.json").write_text(json.dumps(config | entries))
        return path

    return write


@cases(__file__, "overrides")
def test_overrides_are_refused_by_name_by_every_function(
    folder: Callable[..., Path], entries: dict[str, Any], tmp_path: Path
) -> None:
    path = folder(**entries)
    ways: list[Callable[[], Any]] = [
        lambda: resolve(path),
        lambda: discover(path),
        lambda: load_config(path),
        lambda: WeightStore(path, cache=tmp_path / "cache").manifest(),
    ]
    for way in ways:
        with pytest.raises((CheckpointError, UnsupportedModelError), match=str(path)):
            way()


def test_harmless_entries_are_accepted(folder: Callable[..., Path]) -> None:
    """`null`, attention by a plain name, and code that is not run."""
    harmless = {"quantization_config": None, "attn_implementation": "sdpa", "auto_map": {"AutoConfig": "evil--code.C"}}
    path = folder(**harmless)
    assert resolve(path) == path
    assert len(discover(path).groups) == 9


def test_a_cached_manifest_does_not_bypass_the_checks(folder: Callable[..., Path], llama_path: Path) -> None:
    """A manifest is found by the checkpoint's files, and config.json is one of them."""
    WeightStore(llama_path).manifest()
    with pytest.raises(CheckpointError, match="does not decide"):
        WeightStore(folder(quantization_config=OURS)).manifest()


@pytest.mark.parametrize(("name", "says"), [("adapter_config.json", "adapter next to"), (".metadata", "unpickled")])
def test_files_that_transformers_loads_unasked_are_refused(folder: Callable[..., Path], name: str, says: str) -> None:
    path = folder()
    (path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=says):
        resolve(path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": ' * 100_000, "\0", '"text"', "nan"])
def test_anything_but_a_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        vet(tmp_path)


def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(CheckpointError, match="larger"):
        read_json(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path)


# Adapters

ADAPTER = {"peft_type": "LORA", "r": 4}


@cases(__file__, "adapters")
def test_an_adapter_that_would_load_or_run_more_is_refused(
    tmp_path: Path, entries: dict[str, Any] | None, names: dict[str, int] | None
) -> None:
    """`names`: entries that are lists of so many names."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    vet_adapter(tmp_path)
    lists = {name: [f"m{number}" for number in range(count)] for name, count in (names or {}).items()}
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER | (entries or {}) | lists))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        vet_adapter(tmp_path)


def test_an_adapter_is_never_unpickled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a PEFT folder"):
        vet_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="unpickled"):
        vet_adapter(tmp_path)


# The hub


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Allow the hub, and record the names that are requested."""
    names: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        names.append(host)
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return names


def test_no_request_to_the_hub_is_sent_for_a_local_folder(asked: list[str], tmp_path: Path, llama_path: Path) -> None:
    """A config.json may name a repository, which plain transformers would request."""
    backbone = {"model_type": "dpt", "backbone": "evil/backbone", "architectures": ["DPTForDepthEstimation"]}
    (tmp_path / "config.json").write_text(json.dumps(backbone))
    with pytest.raises(Exception, match="no network"):
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=False, local_files_only=True)
    assert asked
    asked.clear()
    assert resolve(tmp_path) == tmp_path
    for way in (discover, load_config):
        with pytest.raises(UnsupportedModelError, match="offline mode"):
            way(tmp_path)
    assert len(discover(llama_path).groups) == 9
    assert asked == []


def test_the_offline_switch_is_restored(asked: list[str]) -> None:
    with on_this_machine(), on_this_machine():
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()


# Code


def loading_calls(source: str) -> list[ast.Call]:
    """Calls of `Auto*.from_pretrained`, and of every other `from_pretrained` except PEFT's."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and ast.unparse(node.func.value) not in ("PeftConfig", "PeftModel")
    ]


def test_no_code_of_a_checkpoint_is_run() -> None:
    """Every loading call passes `trust_remote_code=False`; otherwise transformers would ask `[y/N]`."""
    folders = ("symbiosis_priv", "provider", "tenant", "threat_model", "examples")
    calls = [
        (path, call)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for call in loading_calls(path.read_text("utf-8"))
    ]
    assert len(calls) >= 5
    for path, call in calls:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert said.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
