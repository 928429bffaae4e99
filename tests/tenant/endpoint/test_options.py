"""The options of `tenant serve`."""

from pathlib import Path

import pytest

from symbiosis_priv.errors import ConfigError
from tenant.endpoint.options import Serving


def test_the_models_name_is_the_folders_or_the_hubs(tmp_path: Path) -> None:
    commit = tmp_path / "snapshots" / "0123456789abcdef"
    assert Serving().model_name(str(tmp_path), tmp_path) == tmp_path.name
    assert Serving().model_name("owner/llama", commit) == "llama"
    assert Serving(name="mine").model_name("owner/llama", commit) == "mine"


@pytest.mark.parametrize(
    "end", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
)
def test_keys_are_divided_at_ends_of_lines_only(tmp_path: Path, end: str) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-0123456789abcdef" + end + "sk-fedcba9876543210", encoding="utf-8", newline="")
    path.chmod(0o600)
    if end.strip("\r\n"):
        with pytest.raises(ConfigError, match="one key per line"):
            Serving(api_key_file=path).keys()
    else:
        assert Serving(api_key_file=path).keys() == ("sk-0123456789abcdef", "sk-fedcba9876543210")
