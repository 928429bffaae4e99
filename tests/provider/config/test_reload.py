"""Files that are read again while a provider runs: a file that is being written never withdraws a revocation."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from provider.config.provider_toml import load, template
from provider.config.reload import Reloader
from provider.config.schema import MetricsConfig, ProviderConfig, TlsConfig
from provider.gateway.credentials import Credentials
from provider.products.model import open_store
from provider.serve import Provider
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.revocation import load_revoked, revoke
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CertificateError, SymbiosisError
from symbiosis_priv.network import wire
from symbiosis_priv.registry.descriptor import Trust
from tests.provider.clients import failure
from tests.provider.conftest import Configure, Connect, Keys
from tests.provider.operations.test_metrics import get
from tests.waiting import until

FILES = ("certificate", "key", "tenant_authority", "revoked")


@pytest.fixture
def tls(keys: Keys, tmp_path: Path) -> TlsConfig:
    """Files for each test: two authorities, and two revoked tenants."""
    other = issuing.create_authority(tmp_path, name="other")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(keys.authority.certificate.read_bytes() + other.certificate.read_bytes())
    listed = tmp_path / "revoked.txt"
    revoke(listed, [keys.tenants[name].certificate for name in ("bob", "carol")])
    own = [Path(shutil.copy(path, tmp_path)) for path in (keys.provider.certificate, keys.provider.key)]
    return TlsConfig(certificate=own[0], key=own[1], tenant_authority=authorities, revoked=listed)


def test_a_truncated_file_admits_no_additional_tenant(tls: TlsConfig) -> None:
    """A file that is cut at any place is refused or removes rights: it adds no authority and withdraws no
    revocation."""
    before = Credentials.load(tls)
    assert len(before.authorities) == len(before.revoked) == 2

    @given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
    def cut(name: str, share: float) -> None:
        path: Path = getattr(tls, name)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        try:
            after = Credentials.load(tls, before=before)
            trust = Trust.load(tls.tenant_authority, tls.revoked, known=before.revoked)
        except SymbiosisError:
            return
        finally:
            path.write_bytes(whole)
        assert after.revoked == trust.revoked == before.revoked
        assert after.authorities.keys() <= before.authorities.keys()

    cut()


def test_a_provider_toml_that_ends_within_a_line_is_refused(tmp_path: Path) -> None:
    """Half a number is a valid number, and half a file may be a valid file without a limit."""
    path = tmp_path / "provider.toml"
    whole = template() + "\n[tenants.alice]\nrequests_per_s = 1000.0\n"
    path.write_text(whole)
    assert load(path, whole=True) == load(path)
    lines = {0, *(place + 1 for place, letter in enumerate(whole) if letter == "\n")}
    for size in range(len(whole) - 100, len(whole)):
        path.write_text(whole[:size])
        if size not in lines:
            with pytest.raises(SymbiosisError):
                load(path, whole=True)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_does_not_block(tls: TlsConfig, name: str) -> None:
    """A pipe does not block the reload, and its content is not used. Otherwise the provider could not be stopped."""
    path: Path = getattr(tls, name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CertificateError, match="not a file"):
        Credentials.load(tls)


def test_a_revoked_tenant_stays_revoked_until_a_restart(configure: Configure, connect: Connect, tls: TlsConfig) -> None:
    """A list that is being rewritten is shorter for a moment. A file that is not a list is reported."""
    config = configure(tls=tls, metrics=MetricsConfig(listen="127.0.0.1:0"))
    assert tls.revoked is not None
    whole = tls.revoked.read_text()
    with Provider(config) as provider:
        address = provider.metrics_address
        assert address is not None

        def says(value: int) -> bool:
            return f"last_reload_successful {value}.0" in get(address, "/metrics")[1]

        assert provider.status().reloaded
        tls.revoked.write_text("everybody\n")
        provider.reload()
        until(lambda: says(0))
        tls.revoked.write_text("")
        provider.reload()
        until(lambda: says(1))
        for name in ("bob", "carol"):
            assert failure(connect(name, role=None, to=provider).receive()[0]) == wire.ErrorCode.REVOKED
        assert isinstance(connect("alice", role=None, to=provider).ask(wire.FetchHealth()), wire.HealthReport)
    with Provider(config) as provider:
        assert isinstance(connect("bob", role=None, to=provider).ask(wire.FetchHealth()), wire.HealthReport)
        tls.revoked.write_text(whole)
        provider.reload()


def test_a_mistake_in_another_file_holds_no_revocation_back(
    configure: Configure, connect: Connect, tls: TlsConfig, keys: Keys, tmp_path: Path
) -> None:
    """The list is read on its own and first; what cannot be read is tried again at every look, without a change."""
    source, whole = tmp_path / "provider.toml", tls.tenant_authority.read_bytes()
    source.write_text("this is no TOML")
    assert tls.revoked is not None
    with Provider(configure(tls=tls), source=source) as provider:
        tls.tenant_authority.write_bytes(whole[:-40])
        until(lambda: not provider.status().reloaded)
        revoke(tls.revoked, [keys.tenants["alice"].certificate])
        until(lambda: refused(connect, provider))
        assert not provider.status().reloaded


@pytest.mark.parametrize("separator", ["\u2028", "\x0b", "\x0c", "\x85"])
def test_only_a_line_break_ends_a_line_of_the_list(tmp_path: Path, separator: str) -> None:
    """A comment is not cut at other separators: what follows one would be read as an entry, or as an error."""
    path = tmp_path / "revoked.txt"
    path.write_text(f"# a name{separator}tbs-sha256:{'0' * 64}\r\ntbs-sha256:{'1' * 64}\n", newline="")
    assert load_revoked(path) == {f"tbs-sha256:{'1' * 64}"}


def test_a_revocation_while_a_provider_starts_counts(
    configure: Configure, connect: Connect, tls: TlsConfig, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revocation during the start counts; quantising may take minutes."""
    listed = tls.revoked
    assert listed is not None

    def slow(config: ProviderConfig) -> WeightStore:
        revoke(listed, [keys.tenants["alice"].certificate])
        return open_store(config)

    monkeypatch.setattr("provider.serve.open_store", slow)
    with Provider(configure(tls=tls)) as provider:
        until(lambda: len(provider.status().tenants) == 0 and refused(connect, provider))


def refused(connect: Connect, provider: Provider) -> bool:
    client = connect("alice", role=None, to=provider)
    try:
        reply = client.ask(wire.FetchHealth())
        client.close()
        return isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.REVOKED
    except SymbiosisError:  # the connection is closed
        return True


def test_files_are_read_once_they_are_stable_and_also_after_errors(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writing, broken, looks, read = True, True, 0, threading.Semaphore(0)

    def files() -> list[Path]:
        nonlocal looks
        looks += 1
        if writing:
            path.write_text("x" * looks)
        return [path]

    def reload() -> None:
        assert not writing
        read.release()
        if broken:
            raise RecursionError("nobody has thought of it")

    reloader = Reloader(files, reload, interval_s=0.01)
    reloader.periodic.start()
    try:
        until(lambda: looks > 3)
        assert reloader.succeeded
        writing = False
        assert read.acquire(timeout=20)
        until(lambda: not reloader.succeeded)
        broken = False
        until(lambda: reloader.succeeded)
        while read.acquire(blocking=False):
            pass
        path.write_text("another one")
        assert read.acquire(timeout=20)
    finally:
        reloader.periodic.close(20)
