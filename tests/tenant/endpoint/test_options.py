"""The options of `tenant serve`."""

from pathlib import Path

from tenant.endpoint.options import Serving


def test_the_models_name_is_the_folders_or_the_hubs(tmp_path: Path) -> None:
    commit = tmp_path / "snapshots" / "0123456789abcdef"
    assert Serving().model_name(str(tmp_path), tmp_path) == tmp_path.name
    assert Serving().model_name("owner/llama", commit) == "llama"
    assert Serving(name="mine").model_name("owner/llama", commit) == "mine"
