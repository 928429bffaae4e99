"""Names on the Hugging Face hub, with its own client and a server on loopback that speaks its protocol."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from peft import LoraConfig

from symbiosis_priv.checkpoints.checkpoint import hub_name, resolve, resolve_adapter
from symbiosis_priv.errors import CheckpointError, ConfigError
from tenant import RemoteConfig
from tenant.model.loading import load_language_model
from tenant.training.finetune import finetune
from tenant.training.options import FineTuning
from tests.adapters import write_adapter
from tests.cases import cases

COMMIT = "1" * 40
ERRORS = {"gated": (403, "GatedRepo"), "gone": (404, "RepoNotFound"), "ill": (500, "")}


class Hub(BaseHTTPRequestHandler):
    """Repositories `owner/NAME` of the folders in `folders`, with one commit, a branch and a tag."""

    folders: dict[str, Path]
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        name = parts[3] if parts[0] == "api" else parts[1]
        if name not in self.folders:
            return self.answer(*ERRORS[name])
        folder = self.folders[name]
        if parts[0] != "api":
            return self.answer(200, body=(folder / parts[-1]).read_bytes())
        if parts[-1] not in ("main", "v1", COMMIT):
            return self.answer(404, "RevisionNotFound")
        found: Any = {"id": f"owner/{name}", "sha": COMMIT, "siblings": [], "tags": []}
        if parts[4] == "tree":
            files = [(one.name, one.stat().st_size) for one in folder.iterdir()]
            found = [{"type": "file", "path": path, "size": size, "oid": path} for path, size in files]
        return self.answer(200, body=json.dumps(found).encode())

    do_HEAD = do_GET

    def answer(self, status: int, error: str = "", body: bytes = b"{}") -> None:
        self.send_response(status)
        headers = {"X-Error-Code": error, "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for key, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """The hub, with the tiny Llama, an adapter, and a file of code."""
    adapter = tmp_path / "adapter"
    write_adapter(load_language_model(tiny), adapter, LoraConfig(target_modules="all-linear"), seed=0, scale=0.2)
    (adapter / "modeling_evil.py").write_text("raise SystemExit")
    hub = type("ThisHub", (Hub,), {"folders": {"tiny": tiny, "lora": adapter}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_names_become_folders_of_one_commit_and_the_cache_is_asked_first(hub: type[Hub], tiny: Path) -> None:
    folder = resolve("owner/tiny@v1")
    assert hub_name(folder) == ("owner/tiny", COMMIT)
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    adapter = resolve_adapter("owner/lora")
    assert hub_name(adapter) == ("owner/lora", COMMIT)
    assert not list(adapter.glob("*.py"))  # code is not even fetched
    asked = len(hub.asked)
    for name in ("owner/tiny@v1", f"owner/tiny@{COMMIT}"):
        assert resolve(name) == folder
    assert resolve_adapter("owner/lora") == adapter
    assert len(hub.asked) == asked


@cases(__file__, "errors")
def test_an_error_says_what_to_do(hub: type[Hub], name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        resolve(name)


def test_without_a_network_the_cache_is_used_or_the_error_says_why(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve("owner/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("owner/tiny") == folder
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set, and the local cache lacks it; unset"):
        resolve_adapter("owner/lora")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match="cannot be reached from here, and the local cache lacks it"):
        resolve_adapter("owner/lora")


def test_a_name_without_an_owner_is_no_adapter_of_the_hub(hub: type[Hub]) -> None:
    """A mistyped folder's name is not sent anywhere."""
    for name in ("my-adapter", "./runs/my-adapter", "../x/y", "/x/y", "a/b/c"):
        with pytest.raises(ConfigError, match="does not exist"):
            resolve_adapter(name)
    assert not hub.asked


def test_an_adapter_names_its_base_model_and_the_commit(hub: type[Hub], tmp_path: Path) -> None:
    """In PEFT's own entries, so that `AutoPeftModelForCausalLM.from_pretrained(folder)` loads this commit."""
    (tmp_path / "text.txt").write_text("One sentence is enough here.\n\n" * 8)
    options = FineTuning(steps=1, sequence_length=8, batch_size=1)
    remote = RemoteConfig(masking="simulate")
    finetune("owner/tiny@v1", tmp_path / "text.txt", tmp_path / "output", remote=remote, options=options)
    written = json.loads((tmp_path / "output" / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("owner/tiny", COMMIT)
