"""`federation init` writes a file from the operators' data, or names the missing data and writes no file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symbiosis_priv import errors
from symbiosis_priv.certificates.issuing import create_request, issue
from symbiosis_priv.certificates.reading import Kind, fingerprint
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from tenant.federation.cli import _preparation, app
from tests.cases import cases

DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tenant's folder, with two pinned certificates and the tenant's key."""
    for name in ("alpha", "beta"):
        issue(tmp_path / "keys", authority=None, kind=Kind.PROVIDER, name=name)
    create_request(tmp_path / "keys", name="alice")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["init", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


ALPHA = ("--executor", "alpha.example:7401,keys/alpha.pem,Alpha, Inc.")
BETA = ("--helper", '[2001:db8::1]:7402, keys/beta.pem , Beta "Two" \N{ROCKET} Ltd')


def test_the_file_has_the_given_values(folder: Path) -> None:
    options = ("--digest", DIGEST, "--weight-bits", "8", "--pad-helpers", "1")
    shown = init(*ALPHA, *BETA, "--tenant", "alice", *options)
    federation = load_federation(folder / "federation.toml")
    assert (federation.model_digest, federation.weight_bits, federation.pad_helpers) == (DIGEST, 8, 1)
    assert [(p.name, p.operator, p.role, p.host, p.port) for p in federation.peers] == [
        ("alpha", "Alpha, Inc.", "executor", "alpha.example", 7401),
        ("beta", 'Beta "Two" \N{ROCKET} Ltd', "helper", "2001:db8::1", 7402),
    ]
    assert federation.tenant_key.samefile(folder / "keys/alice.key")
    for name in ("alpha", "beta"):
        assert fingerprint(folder / "keys" / f"{name}.pem") in shown
    assert "operator sign alice.csr" in shown
    assert "put the alice.pem that you receive into keys" in shown
    assert "federation check --federation federation.toml" in shown


def test_paths_in_the_file_are_relative_to_it(folder: Path) -> None:
    (folder / "runs").mkdir()
    init("runs/mine.toml", *ALPHA, *BETA, "--tenant", "alice", "--digest", DIGEST)
    assert str(folder) not in (folder / "runs/mine.toml").read_text()
    assert all(Path(str(p.certificate)).is_file() for p in load_federation(folder / "runs/mine.toml").peers)


def test_digest_and_verification_keys_come_from_the_tenants_checkpoint(
    folder: Path, save_llama: Callable[..., Path]
) -> None:
    """`federation check` checks products with these keys, without the checkpoint."""
    model = save_llama()
    init(*ALPHA, *BETA, "--tenant", "alice", "--model", str(model))
    loaded = load_federation(folder / "federation.toml")
    assert loaded.model_digest == WeightStore(model).manifest().digest
    prepared = _preparation(loaded, None)
    assert prepared is not None
    assert prepared.manifest.digest == loaded.model_digest


GIVEN = {"ALPHA": ALPHA, "BETA": BETA, "DIGEST": ("--digest", DIGEST)}


@cases(__file__, "mistakes")
def test_mistakes_are_named_and_leave_no_file(folder: Path, arguments: list[str], error: str, words: str) -> None:
    with pytest.raises(getattr(errors, error), match=words):
        init(*(word for name in arguments for word in GIVEN.get(name, (name,))), "--tenant", "alice")
    assert not (folder / "federation.toml").exists()


def test_a_file_is_not_overwritten_and_a_key_must_exist(folder: Path) -> None:
    (folder / "federation.toml").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        init(*ALPHA, *BETA, "--tenant", "alice", "--digest", DIGEST)
    assert (folder / "federation.toml").read_text() == "mine"
    with pytest.raises(ConfigError, match="keys request --name bob"):
        init("other.toml", *ALPHA, *BETA, "--tenant", "bob", "--digest", DIGEST)
