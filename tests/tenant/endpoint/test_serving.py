"""The process of an endpoint, and its options."""

import gc
import shutil
from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError
from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tenant.model.hf import RemoteConfig


def test_modules_are_not_examined_again_while_an_endpoint_serves(tiny: Path) -> None:
    gc.unfreeze()
    with serving.opened(tiny, RemoteConfig(masking="simulate"), name="tiny", adapters={}, options=Serving()):
        assert gc.get_freeze_count() > len(gc.get_objects())  # most of torch's and transformers' objects
    assert not gc.get_freeze_count()


def test_the_base_model_is_named_with_its_commit_on_the_hub(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "models--owner--tiny" / "snapshots" / "0123abc")
    remote, options = RemoteConfig(masking="simulate"), Serving()
    with serving.opened(folder, remote, name="tiny", adapters={}, options=options) as service:
        assert [one["root"] for one in service.models()] == ["owner/tiny@0123abc"]


def test_the_models_name_is_the_folders_or_the_hubs(tmp_path: Path) -> None:
    commit = tmp_path / "snapshots" / "0123456789abcdef"
    assert Serving().model_name(str(tmp_path), tmp_path) == tmp_path.name
    assert Serving().model_name("owner/llama", commit) == "llama"
    assert Serving(name="mine").model_name("owner/llama", commit) == "mine"


@pytest.mark.parametrize("end", ["\n", "\r\n", *"\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"])
def test_keys_are_divided_at_ends_of_lines_only(tmp_path: Path, end: str) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-0123456789abcdef" + end + "sk-fedcba9876543210", encoding="utf-8", newline="")
    path.chmod(0o600)
    if end.strip("\r\n"):
        with pytest.raises(ConfigError, match="one key per line"):
            Serving(api_key_file=path).keys()
    else:
        assert Serving(api_key_file=path).keys() == ("sk-0123456789abcdef", "sk-fedcba9876543210")
