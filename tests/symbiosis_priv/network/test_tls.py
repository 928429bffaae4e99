"""Handshakes over loopback sockets: which certificates are accepted, and which side refuses the others."""

import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from symbiosis_priv.certificates import issuing, reading
from symbiosis_priv.certificates.naming import subject
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.errors import CertificateError, ConnectionLostError, SymbiosisError
from symbiosis_priv.network import tls
from symbiosis_priv.network.tls import TenantIdentity
from tests.cases import cases

TIMEOUT = 10.0


@dataclass(frozen=True)
class Keys:
    """A provider, its tenants, and certificates that must be refused."""

    directory: Path
    authority: Identity
    provider: Identity  # issued by the authority
    sibling: Identity  # another provider of the same authority and hosts
    lone: Identity  # self-signed provider
    elsewhere: Identity  # provider for another host
    tenant: Identity
    lone_tenant: Identity  # self-signed
    stranger: Identity  # tenant of an authority with the same name
    expired_tenant: Identity
    expired_provider: Identity

    def bundle(self, *identities: Identity) -> Path:
        """One file with the certificates of these identities, in this order."""
        path = self.directory / ("+".join(identity.certificate.stem for identity in identities) + ".bundle")
        path.write_bytes(b"".join(identity.certificate.read_bytes() for identity in identities))
        return path


@contextmanager
def last_month() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "now", lambda: datetime.now(UTC) - timedelta(days=30))
        yield


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    d = tmp_path_factory.mktemp("keys")
    with last_month():
        authority = issuing.create_authority(d)
        expired_tenant = issuing.issue(d, authority=authority, kind=Kind.TENANT, name="late", days=1)
        expired_provider = issuing.issue(d, authority=authority, kind=Kind.PROVIDER, name="old", days=1)
    return Keys(
        directory=d,
        authority=authority,
        provider=issuing.issue(d, authority=authority, kind=Kind.PROVIDER, name="provider"),
        sibling=issuing.issue(d, authority=authority, kind=Kind.PROVIDER, name="sibling"),
        lone=issuing.issue(d, authority=None, kind=Kind.PROVIDER, name="lone"),
        elsewhere=issuing.issue(d, authority=None, kind=Kind.PROVIDER, name="elsewhere", hosts=["a.example.org"]),
        tenant=issuing.issue(d, authority=authority, kind=Kind.TENANT, name="alice"),
        lone_tenant=issuing.issue(d, authority=None, kind=Kind.TENANT, name="mallory"),
        stranger=issuing.issue(d, authority=issuing.create_authority(d / "other"), kind=Kind.TENANT, name="stranger"),
        expired_tenant=expired_tenant,
        expired_provider=expired_provider,
    )


def signer(identity: Identity) -> str:
    return reading.key_fingerprint(reading.load_certificates(identity.certificate)[0])


def alice(keys: Keys) -> TenantIdentity:
    return TenantIdentity("alice", authority=signer(keys.authority))


def server(keys: Keys, identity: Identity | None = None, *, tenants: Path | None = None) -> ssl.SSLContext:
    identity = identity or keys.provider
    return tls.server_context(
        certificate=identity.certificate, key=identity.key, tenant_authority=tenants or keys.authority.certificate
    )


Pins = Path | list[Path]


def files(pins: Pins) -> list[Path]:
    return [pins] if isinstance(pins, Path) else pins


def client(keys: Keys, pins: Pins, identity: Identity | None = None) -> ssl.SSLContext:
    identity = identity or keys.tenant
    tls._client_context.cache_clear()  # some tests change their context
    return tls.client_context(certificate=identity.certificate, key=identity.key, pins=files(pins))


def careless(protocol: ssl._SSLMethod, identity: Identity | None) -> ssl.SSLContext:
    """A peer that checks nothing."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if identity is not None:
        context.load_cert_chain(identity.certificate, identity.key)
    return context


careless_server = partial(careless, ssl.PROTOCOL_TLS_SERVER)
careless_client = partial(careless, ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True)
class Outcome:
    """The result of one side: data it received, or its error."""

    server: TenantIdentity | SymbiosisError | None
    client: bytes | SymbiosisError
    client_finished_handshake: bool


def _serve(listener: socket.socket, context: ssl.SSLContext) -> TenantIdentity | SymbiosisError | None:
    connection, _ = listener.accept()
    connection.settimeout(TIMEOUT)
    try:
        with connection, context.wrap_socket(connection, server_side=True) as secured:
            assert secured.version() == "TLSv1.3"
            tenant = tls.tenant_identity(secured) if context.verify_mode else None
            secured.sendall(b"welcome")
            return tenant
    except SymbiosisError as error:
        return error
    except OSError as error:
        return tls.handshake_error(error, peer="the client")


def connect(
    serving: ssl.SSLContext, calling: ssl.SSLContext, *, pins: Pins | None = None, hostname: str = "localhost"
) -> Outcome:
    """One connection as the packages make it: handshake, pin, then the first read."""
    finished = False
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(TIMEOUT)
        serverside = pool.submit(_serve, listener, serving)
        answer: bytes | SymbiosisError
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=TIMEOUT) as plain,
                calling.wrap_socket(plain, server_hostname=hostname) as secured,
            ):
                finished = True
                if pins is not None:
                    tls.check_pin(secured, pins=files(pins))
                answer = secured.recv(64)
        except SymbiosisError as error:
            answer = error
        except OSError as error:
            answer = tls.handshake_error(error, peer="the provider", pins=None if pins is None else files(pins))
        return Outcome(serverside.result(timeout=TIMEOUT), answer, finished)


def assert_refused(result: object, error: type[SymbiosisError], message: str) -> None:
    assert isinstance(result, error)
    with pytest.raises(error, match=message):
        raise result


# Accepted


@pytest.mark.parametrize("hostname", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize("name", ["provider", "lone"])
def test_the_right_certificates(keys: Keys, name: str, hostname: str) -> None:
    provider: Identity = getattr(keys, name)
    pins = provider.certificate
    outcome = connect(server(keys, provider), client(keys, pins), pins=pins, hostname=hostname)
    assert outcome == Outcome(alice(keys), b"welcome", True)


def test_one_name_from_two_authorities_is_two_tenants(tmp_path: Path, keys: Keys) -> None:
    """Both authorities are listed, as while one replaces the other."""
    other = issuing.create_authority(tmp_path / "other")  # with the same name as keys.authority
    namesake = issuing.issue(tmp_path, authority=other, kind=Kind.TENANT, name="alice")
    tenants = keys.bundle(other, keys.authority)
    serving, pins = server(keys, tenants=tenants), keys.provider.certificate
    found = [connect(serving, client(keys, pins, who), pins=pins).server for who in (keys.tenant, namesake)]
    assert found == [TenantIdentity("alice", authority=signer(by)) for by in (keys.authority, other)]
    assert len({str(tenant) for tenant in found}) == 2
    assert all(str(tenant).startswith("alice@sha256:") for tenant in found)


def test_an_intermediate_authority_must_be_listed(tmp_path: Path, keys: Keys) -> None:
    """A tenant may add its issuer to its file; its name would then be worth only as much as that issuer."""

    def authority(name: str, *, path_length: int, signer: Identity | None = None) -> Identity:
        key, owner = ec.generate_private_key(ec.SECP256R1()), subject(name, unit="authority")
        extensions = [x509.BasicConstraints(ca=True, path_length=path_length), issuing._key_usage("key_cert_sign")]
        made = issuing._sign(owner, public_key=key.public_key(), extensions=extensions, days=9, signer=signer or key)
        return issuing._write_pair(tmp_path, name=name, certificate=made, key=key)

    root = authority("root", path_length=1)
    between = authority("between", path_length=0, signer=root)
    tenant = issuing.issue(tmp_path, authority=between, kind=Kind.TENANT, name="alice")
    tenant.certificate.write_bytes(tenant.certificate.read_bytes() + between.certificate.read_bytes())
    pins = keys.provider.certificate
    refused = connect(server(keys, tenants=root.certificate), client(keys, pins, tenant))
    assert_refused(refused.server, CertificateError, "not in tenant_authority itself: append it")
    listed = connect(server(keys, tenants=keys.bundle(root, between)), client(keys, pins, tenant))
    assert listed.server == TenantIdentity("alice", authority=signer(between))


@pytest.mark.parametrize("old_first", [True, False])
def test_rotation_with_both_pins(tmp_path: Path, keys: Keys, old_first: bool) -> None:
    provider = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")
    old_pin = tmp_path / "old.pem"
    old_pin.write_bytes(provider.certificate.read_bytes())
    before = server(keys, provider)
    issuing.rotate(provider.certificate)
    after = server(keys, provider)

    pins = [old_pin, provider.certificate] if old_first else [provider.certificate, old_pin]
    for serving in (before, after):
        assert connect(serving, client(keys, pins), pins=pins) == Outcome(alice(keys), b"welcome", True)

    outcome = connect(after, client(keys, old_pin), pins=old_pin)
    assert_refused(outcome.client, CertificateError, "refused")


def test_sessions_are_not_resumed(keys: Keys) -> None:
    pins = keys.provider.certificate
    calling = client(keys, pins)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(TIMEOUT)
        serverside = pool.submit(_serve, listener, server(keys))
        with (
            socket.create_connection(listener.getsockname(), timeout=TIMEOUT) as plain,
            calling.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            assert secured.recv(64) == b"welcome"
            assert secured.session is not None
            assert not secured.session.has_ticket
            assert secured.compression() is None
        assert serverside.result(timeout=TIMEOUT) == alice(keys)


# Refused by the server


@cases(__file__, "server_refuses")
def test_the_server_refuses(keys: Keys, name: str | None, message: str) -> None:
    identity = None if name is None else getattr(keys, name)
    outcome = connect(server(keys), careless_client(identity))
    assert_refused(outcome.server, CertificateError, message)
    # The client's handshake was complete before the server had checked: the refusal comes with its first read.
    assert outcome.client_finished_handshake
    assert_refused(outcome.client, CertificateError, "without a valid certificate")


def test_a_providers_certificate_names_no_tenant(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not connect. One of release 0.5.0 may, and the authority that signs tenants has issued it."""
    outcome = connect(server(keys), careless_client(keys.provider))
    assert_refused(outcome.server, CertificateError, "unsuitable certificate purpose")
    both = [*issuing._USAGES[Kind.PROVIDER], *issuing._USAGES[Kind.TENANT]]
    monkeypatch.setitem(issuing._USAGES, Kind.PROVIDER, both)
    older = issuing.issue(tmp_path, authority=keys.authority, kind=Kind.PROVIDER, name="older")
    outcome = connect(server(keys), careless_client(older))
    assert_refused(outcome.server, CertificateError, "no verified tenant certificate")
    assert outcome.client == b""


def test_tls_1_2_is_refused(keys: Keys) -> None:
    old = careless_client(keys.tenant)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    outcome = connect(server(keys), old)
    assert_refused(outcome.server, ConnectionLostError, "UNSUPPORTED_PROTOCOL")
    assert_refused(outcome.client, ConnectionLostError, "PROTOCOL_VERSION")

    old_server = careless_server(keys.provider)
    old_server.maximum_version = ssl.TLSVersion.TLSv1_2
    outcome = connect(old_server, client(keys, keys.provider.certificate))
    assert_refused(outcome.client, ConnectionLostError, "PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL")


# Refused by the client


@cases(__file__, "client_refuses")
def test_the_client_refuses_in_the_handshake(keys: Keys, shown: str, pinned: list[str], message: str) -> None:
    pins = [getattr(keys, name).certificate for name in pinned]
    outcome = connect(careless_server(getattr(keys, shown)), client(keys, pins), pins=pins)
    assert not outcome.client_finished_handshake
    assert_refused(outcome.client, CertificateError, message)


def test_a_tenants_certificate_is_not_accepted_as_a_providers(keys: Keys) -> None:
    """Even if its certificate were trusted."""
    calling = client(keys, keys.provider.certificate)
    calling.load_verify_locations(keys.tenant.certificate)
    outcome = connect(careless_server(keys.tenant), calling)
    assert not outcome.client_finished_handshake
    assert_refused(outcome.client, CertificateError, "purpose")


def test_the_pin_refuses_a_sibling_that_the_handshake_accepts(keys: Keys) -> None:
    """Possible only if the context trusts more than pins; no pinned file makes it do so."""
    pins = keys.provider.certificate
    calling = client(keys, pins)
    calling.load_verify_locations(keys.authority.certificate)
    assert connect(server(keys, keys.sibling), calling).client == b"welcome"
    outcome = connect(server(keys, keys.sibling), calling, pins=pins)
    assert outcome.client_finished_handshake
    assert_refused(
        outcome.client,
        CertificateError,
        r"sha256:[0-9a-f]{64}, which is not pinned in .*provider\.pem.*next_certificate",
    )
    assert connect(server(keys), calling, pins=pins).client == b"welcome"


def test_an_unverified_certificate_names_no_tenant(keys: Keys) -> None:
    class Unverified:
        context = careless_server(keys.provider)

        def getpeercert(self, *, binary_form: bool) -> bytes:
            return ssl.PEM_cert_to_DER_cert(keys.tenant.certificate.read_text())

    with pytest.raises(CertificateError, match="no verified tenant certificate"):
        tls.tenant_identity(Unverified())  # type: ignore[arg-type]


# Refused before any connection


Build = Callable[[Keys], ssl.SSLContext]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda k: server(k, k.expired_provider), r"old\.pem is valid only .*keys request --provider"),
        (lambda k: server(k, k.tenant), r"alice\.pem is a tenant certificate, not a"),
        (lambda k: server(k, k.authority), r"authority\.pem is not a provider certificate"),
        (lambda k: server(k, tenants=k.sibling.certificate), r"sibling\.pem holds no current tenant"),
        (lambda k: server(k, tenants=k.lone_tenant.certificate), r"mallory\.pem holds no current tenant"),
        (lambda k: server(k, tenants=k.directory / "none.pem"), r"none\.pem does not exist.*copy of the executor's"),
        (lambda k: server(k, Identity(k.provider.certificate, k.tenant.key)), r"alice\.key is not the"),
        (lambda k: server(k, Identity(k.provider.certificate, k.directory / "no")), r"cannot read .*no"),
        (lambda k: client(k, k.provider.certificate, k.expired_tenant), r"late\.pem is valid only from"),
        (lambda k: client(k, k.provider.certificate, k.provider), r"is a provider certificate, not a tenant"),
        (lambda k: client(k, k.directory / "none.pem"), r"cannot read .*none\.pem"),
        (lambda k: client(k, k.expired_provider.certificate), r"old\.pem has expired"),
        (lambda k: client(k, k.authority.certificate), r"authority\.pem is not a provider certificate"),
        (lambda k: client(k, k.tenant.certificate), r"alice\.pem is not a provider certificate"),
        (lambda k: client(k, k.bundle(k.provider, k.sibling)), r"holds 2 certificates.*next_certificate"),
    ],
)
def test_contexts_refuse_bad_files(keys: Keys, build: Build, message: str) -> None:
    with pytest.raises(CertificateError, match=message):
        build(keys)


def test_context_settings(keys: Keys) -> None:
    serving, calling = server(keys), client(keys, keys.provider.certificate)
    for context in (serving, calling):
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.options & ssl.OP_NO_COMPRESSION
        assert context.verify_flags & ssl.VERIFY_X509_STRICT
        assert context.cert_store_stats()["x509"] == 1, "nothing is trusted but the named file"
        assert context.keylog_filename is None
    assert calling.check_hostname
    assert serving.num_tickets == 0


def test_calls_for_the_same_certificates_share_a_context(keys: Keys, tmp_path: Path) -> None:
    own = reading.pair(tmp_path, "alice")
    shutil.copy(keys.tenant.certificate, own.certificate)
    shutil.copy(keys.tenant.key, own.key)

    def context(*pins: Path) -> ssl.SSLContext:
        return tls.client_context(certificate=own.certificate, key=own.key, pins=pins)

    first = context(keys.provider.certificate)
    assert context(keys.provider.certificate) is first
    assert context(keys.sibling.certificate) is not first
    renewed = issuing.issue(tmp_path / "new", authority=keys.authority, kind=Kind.TENANT, name="alice")
    shutil.copy(renewed.certificate, own.certificate)
    shutil.copy(renewed.key, own.key)
    assert context(keys.provider.certificate) is not first
    shutil.copy(keys.tenant.key, own.key)
    with pytest.raises(CertificateError, match=r"alice\.key is not the"):
        context(keys.provider.certificate)


def test_no_trust_store_and_no_key_log(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment variable changes this. With SSLKEYLOGFILE, Python's default context would write session keys."""
    keylog = tmp_path / "keylog"
    monkeypatch.setenv("SSLKEYLOGFILE", str(keylog))
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, str(keys.sibling.certificate))
    assert ssl.create_default_context().keylog_filename == str(keylog)  # otherwise this test would prove nothing
    keylog.unlink(missing_ok=True)
    tls.registry_client_context.cache_clear()
    context = tls.registry_client_context(tuple(reading.load_certificates(keys.authority.certificate)))
    assert context.cert_store_stats()["x509"] == 1
    assert context.keylog_filename is None
    test_context_settings(keys)
    test_the_right_certificates(keys, "provider", "localhost")
    assert not keylog.exists()
