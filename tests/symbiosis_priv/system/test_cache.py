"""`symbiosis-priv cache` shows and removes what the program has stored, and nothing else."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from symbiosis_priv.system.cache import app


def test_only_the_programs_own_parts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMBIOSIS_PRIV_CACHE", str(tmp_path))
    (tmp_path / "tenant").mkdir()
    (tmp_path / "tenant" / "keys").write_bytes(bytes(1 << 20))
    (tmp_path / "thesis").touch()
    shown = CliRunner().invoke(app, ["show"]).output
    assert "1.0 MiB" in shown
    assert "SECRET" in shown
    assert CliRunner().invoke(app, ["clear"], input="n\n").exit_code == 0
    assert (tmp_path / "tenant").is_dir()
    assert "removed" in CliRunner().invoke(app, ["clear", "--yes"]).output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
