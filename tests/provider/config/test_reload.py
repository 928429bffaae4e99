"""Files that are read again while a provider runs: what is half written takes nothing back."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider.config.provider_toml import load, template
from provider.config.reload import Reloader
from provider.config.schema import MetricsConfig, ProviderConfig, TlsConfig
from provider.gateway.credentials import Credentials
from provider.products.model import open_store
from provider.serve import Provider
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.revocation import revoke
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CertificateError, SymbiosisError
from symbiosis_priv.network import wire
from symbiosis_priv.registry.trust import Trust
from tests.provider.operations.test_metrics import get

if TYPE_CHECKING:
    from tests.provider.conftest import Configure, Connect, Keys

FILES = ("certificate", "key", "tenant_authority", "revoked")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def tls(keys: Keys, tmp_path: Path) -> TlsConfig:
    """Files of this test's own: two authorities, and two tenants who are revoked."""
    other = issuing.create_authority(tmp_path, name="other")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(keys.authority.certificate.read_bytes() + other.certificate.read_bytes())
    listed = tmp_path / "revoked.txt"
    revoke(listed, [keys.tenants[name].certificate for name in ("bob", "carol")])
    own = [Path(shutil.copy(path, tmp_path)) for path in (keys.provider.certificate, keys.provider.key)]
    return TlsConfig(certificate=own[0], key=own[1], tenant_authority=authorities, revoked=listed)


def test_no_beginning_of_a_file_lets_anybody_in(tls: TlsConfig) -> None:
    """Cut anywhere, a file is refused or takes somebody away: it adds no authority and gives nobody back."""
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
    """Half a number is a number, and half a file may be one without a limit."""
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
def test_a_pipe_is_not_waited_for(tls: TlsConfig, name: str) -> None:
    """Nor is what it would bring kept; else nothing would be reloaded any more, and nobody could stop the provider."""
    path: Path = getattr(tls, name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CertificateError, match="not a file"):
        Credentials.load(tls)


def test_a_provider_stops_while_a_file_does_not_answer() -> None:
    begun, over = threading.Event(), threading.Event()

    def reload() -> None:
        begun.set()
        over.wait(20)

    reloader = Reloader(list, reload)
    reloader.start()
    reloader.now()
    assert begun.wait(20)
    reloader.close(0.01)
    assert not over.is_set()
    over.set()


def test_who_was_revoked_stays_out_until_a_restart(
    configure: Configure, connect: Connect, tls: TlsConfig, keys: Keys
) -> None:
    """A list that is being written again is shorter for a moment; one that is no list is said to be none."""
    config = msgspec.structs.replace(configure(), tls=tls, metrics=MetricsConfig(listen="127.0.0.1:0"))
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
            reply, _ = connect(name, role=None, to=provider).receive()
            assert isinstance(reply, wire.Failure)
            assert reply.code == wire.ErrorCode.REVOKED
        assert isinstance(connect("alice", role=None, to=provider).ask(wire.Health()), wire.HealthReport)
    with Provider(config) as provider:
        assert isinstance(connect("bob", role=None, to=provider).ask(wire.Health()), wire.HealthReport)
        tls.revoked.write_text(whole)
        provider.reload()


def test_who_is_revoked_while_a_provider_starts_is_out(
    configure: Configure, connect: Connect, tls: TlsConfig, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantising may take minutes."""
    listed = tls.revoked
    assert listed is not None

    def slow(config: ProviderConfig) -> WeightStore:
        revoke(listed, [keys.tenants["alice"].certificate])
        return open_store(config)

    monkeypatch.setattr("provider.serve.open_store", slow)
    with Provider(msgspec.structs.replace(configure(), tls=tls)) as provider:
        until(lambda: len(provider.status().tenants) == 0 and refused(connect, provider))


def refused(connect: Connect, provider: Provider) -> bool:
    client = connect("alice", role=None, to=provider)
    try:
        return isinstance(client.ask(wire.Health()), wire.Failure)
    except OSError:  # hung up on
        return True


def test_files_are_read_when_they_hold_still_and_whatever_happened_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writing, looks, read = True, 0, threading.Semaphore(0)
    errors = [RecursionError("nobody has thought of it")]

    def files() -> list[Path]:
        nonlocal looks
        looks += 1
        if writing:
            path.write_text("x" * looks)
        return [path]

    def reload() -> None:
        assert not writing
        read.release()
        if errors:
            raise errors.pop()

    reloader = Reloader(files, reload, interval_s=0.01)
    reloader.start()
    try:
        until(lambda: looks > 3)
        assert reloader.succeeded
        writing = False
        assert read.acquire(timeout=20)
        until(lambda: not reloader.succeeded)
        path.write_text("another one")
        assert read.acquire(timeout=20)
        until(lambda: reloader.succeeded)
    finally:
        reloader.close(20)
