"""Certificates: content, refusals, and rotation."""

import base64
import contextlib
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import example, given, settings, strategies as st
from typer.testing import CliRunner

from symbiosis_priv.certificates import issuing, keys_cli, pem, reading, revocation
from symbiosis_priv.certificates.keys_cli import app
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.errors import CertificateError, ConfigError, SymbiosisError
from symbiosis_priv.network.tls import TenantIdentity, client_context, server_context
from symbiosis_priv.system.files import write_atomically
from tests.cases import cases

GOOD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@pytest.fixture
def authority(tmp_path: Path) -> Identity:
    return issuing.create_authority(tmp_path)


def leaf(path: Path) -> x509.Certificate:
    return reading.load_certificates(path)[0]


def test_authority_signs_only_leaves(authority: Identity) -> None:
    certificate = leaf(authority.certificate)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    assert reading.is_authority(certificate)
    assert reading.kind_of(certificate) is None


def test_provider_names_its_hosts(tmp_path: Path, authority: Identity) -> None:
    hosts = ["gpu.example.org", "10.0.0.7", "::1"]
    provider = issuing.issue(tmp_path, authority=authority, kind=Kind.PROVIDER, name="gpu", hosts=hosts)
    certificate = leaf(provider.certificate)
    certificate.verify_directly_issued_by(leaf(authority.certificate))
    assert reading.usages(certificate) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert reading.hosts_of(certificate) == ("gpu.example.org", "10.0.0.7", "::1")
    assert reading.kind_of(certificate) is Kind.PROVIDER
    assert reading.tenant_name(certificate) is None


def test_tenant_is_named_by_a_uri(tmp_path: Path, authority: Identity) -> None:
    tenant = issuing.issue(tmp_path, authority=authority, kind=Kind.TENANT, name="alice")
    certificate = leaf(tenant.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier("urn:symbiosis-priv:tenant:alice")]
    assert reading.usages(certificate) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert certificate.subject.rfc4514_string().startswith("CN=alice,")
    assert reading.tenant_name(certificate) == "alice"


def test_keys_are_p256_and_private_to_their_owner(tmp_path: Path, authority: Identity) -> None:
    for identity in (authority, issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")):
        assert stat.S_IMODE(identity.key.stat().st_mode) == 0o600
        key = identity.private_key()
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(key.curve, ec.SECP256R1)


def test_certificate_does_not_outlive_its_authority(tmp_path: Path) -> None:
    authority = issuing.create_authority(tmp_path, days=10)
    tenant = issuing.issue(tmp_path, authority=authority, kind=Kind.TENANT, name="alice", days=365)
    assert leaf(tenant.certificate).not_valid_after_utc == leaf(authority.certificate).not_valid_after_utc


# Names, hosts and lifetimes


@given(name=st.text(max_size=70) | st.from_regex(r"[A-Za-z0-9._/-]{0,66}", fullmatch=True))
@example(name="..")
@example(name="../escape")
@example(name="a/b")
@example(name="alice\n")
@example(name=".hidden")
@example(name="alice.previous")
@example(name="ünïcode")
@example(name="a" * 64)
@example(name="a" * 65)
def test_names(name: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root, "keys")
        if GOOD_NAME.fullmatch(name) and not name.endswith(".previous"):
            identity = issuing.issue(directory, authority=None, kind=Kind.TENANT, name=name)
            assert {identity.certificate, identity.key} == set(directory.iterdir())
            assert reading.tenant_name(leaf(identity.certificate)) == name
        else:
            with pytest.raises(ConfigError, match=r"name .*: "):
                issuing.issue(directory, authority=None, kind=Kind.TENANT, name=name)
            assert list(Path(root).rglob("*")) == []


UNSAFE = [
    *("A\u202e", "A\u3164", "A\u2800B", "A\U0001d159", "\U00016fe4A"),
    *("A\u00a0B", "\u0410lpha", "A\u034f", "A\u0301", "\uff21"),
]
# Invisible or blank characters, another script, or another way to write a letter.
HOSTS = ("", "*.example.org", "https://example.org", "example.org:443", "10.0.0.256", "-a.b", "a b", "a" * 64)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        *(("hosts", [host], "use a DNS name or an IP address") for host in HOSTS),
        *(("days", days, "choose a lifetime") for days in (-1, 0, 36_501)),
        *(("operator", name, "operator") for name in ("", " A", "A\n", "Symbiosis-Priv", "x" * 65, *UNSAFE)),
    ],
)
def test_bad_hosts_lifetimes_and_operators(
    tmp_path: Path, authority: Identity, option: str, value: Any, words: str
) -> None:
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=words):
        issuing.issue(tmp_path, authority=authority, kind=Kind.PROVIDER, name="p", **{option: value})
    assert set(tmp_path.iterdir()) == before


# Files


@pytest.mark.parametrize("taken", ["alice.pem", "alice.key"])
def test_existing_files_are_never_overwritten_and_links_are_not_followed(tmp_path: Path, taken: str) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "keys"
    folder.mkdir()
    for link in (False, True):
        if link:
            (folder / taken).symlink_to(elsewhere)
        else:
            (folder / taken).write_bytes(b"precious")
        with pytest.raises(CertificateError, match=rf"{taken} exists and is never overwritten"):
            issuing.issue(folder, authority=None, kind=Kind.TENANT, name="alice")
        assert [path.name for path in folder.iterdir()] == [taken]
        assert not elsewhere.exists()
        assert link or (folder / taken).read_bytes() == b"precious"
        (folder / taken).unlink()


def _encrypt(identity: Identity) -> None:
    identity.key.write_bytes(
        identity.private_key().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


def _swap(identity: Identity) -> None:
    other = issuing.create_authority(identity.key.parent / "other")
    identity.key.write_bytes(other.key.read_bytes())


def _replace(identity: Identity) -> None:
    alice = issuing.issue(identity.key.parent, authority=identity, kind=Kind.TENANT, name="other")
    for own, others in zip((identity.certificate, identity.key), (alice.certificate, alice.key), strict=True):
        own.write_bytes(others.read_bytes())


@pytest.mark.parametrize(
    ("damage", "days", "message"),
    [
        (lambda identity: identity.key.unlink(), 0, r"cannot read .*authority\.key"),
        (lambda identity: identity.key.write_bytes(b"no key"), 0, r"authority\.key is not an unencrypted PEM private"),
        (_encrypt, 0, r"authority\.key is not an unencrypted PEM private key"),
        (_swap, 0, r"authority\.key is not the key of .*authority\.pem"),
        (_replace, 0, "is not a CA certificate"),
        (lambda identity: None, 3651, r"authority\.pem is valid only from"),
    ],
)
def test_a_damaged_or_expired_authority_and_a_leaf_issue_nothing(
    tmp_path: Path,
    authority: Identity,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Identity], object],
    days: int,
    message: str,
) -> None:
    damage(authority)
    monkeypatch.setattr(reading, "now", lambda: datetime.now(UTC) + timedelta(days=days))
    with pytest.raises(CertificateError, match=message):
        issuing.issue(tmp_path, authority=authority, kind=Kind.TENANT, name="alice")
    assert not (tmp_path / "alice.pem").exists()


# Rotation


def pair_bytes(identity: Identity) -> tuple[bytes, bytes]:
    return identity.certificate.read_bytes(), identity.key.read_bytes()


def test_rotation_changes_only_the_key(tmp_path: Path) -> None:
    hosts = ["a.example.org", "10.0.0.7"]
    identity = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="node.1", hosts=hosts)
    old, old_bytes = leaf(identity.certificate), pair_bytes(identity)

    rotated = issuing.rotate(identity.certificate)

    new = leaf(rotated.certificate)
    assert rotated == identity
    reading.require_identity(rotated, kind=Kind.PROVIDER)
    assert new.public_key() != old.public_key()
    assert new.subject == new.issuer == old.subject
    for kept in (x509.SubjectAlternativeName, x509.ExtendedKeyUsage, x509.KeyUsage, x509.BasicConstraints):
        assert new.extensions.get_extension_for_class(kept) == old.extensions.get_extension_for_class(kept)
    previous = Identity(tmp_path / "node.1.previous.pem", tmp_path / "node.1.previous.key")
    assert pair_bytes(previous) == old_bytes
    assert stat.S_IMODE(rotated.key.stat().st_mode) == stat.S_IMODE(previous.key.stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".*")), "temporary files were left behind"


def test_a_prepared_pair_is_the_one_that_comes_next(tmp_path: Path) -> None:
    """Tenants can pin it before."""
    identity = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")
    present = pair_bytes(identity)
    upcoming = issuing.prepare_rotation(identity.certificate)
    promised = pair_bytes(upcoming)
    assert pair_bytes(identity) == present
    assert reading.load_pin(upcoming.certificate).public_key() != leaf(identity.certificate).public_key()
    with pytest.raises(CertificateError, match="exists"):
        issuing.prepare_rotation(identity.certificate)
    assert issuing.rotate(identity.certificate) == identity
    assert pair_bytes(identity) == promised
    assert stat.S_IMODE(identity.key.stat().st_mode) == 0o600
    assert pair_bytes(Identity(tmp_path / "p.previous.pem", tmp_path / "p.previous.key")) == present
    assert not list(tmp_path.glob("*.next.*"))


def test_rotation_repairs_an_interrupted_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")
    original = pair_bytes(identity)

    def power_cut(path: Path, *content: bytes, **options: int) -> None:
        if path == identity.certificate:
            raise OSError("power cut")
        write_atomically(path, *content, **options)

    monkeypatch.setattr(issuing, "write_atomically", power_cut)
    with pytest.raises(OSError, match="power cut"):
        issuing.rotate(identity.certificate)
    monkeypatch.undo()
    with pytest.raises(CertificateError, match="is not the key of"):
        reading.require_identity(identity, kind=Kind.PROVIDER)

    issuing.rotate(identity.certificate)
    reading.require_identity(identity, kind=Kind.PROVIDER)
    assert pair_bytes(Identity(tmp_path / "p.previous.pem", tmp_path / "p.previous.key")) == original


def test_rotation_refusals(tmp_path: Path, authority: Identity) -> None:
    alice = issuing.issue(tmp_path, authority=authority, kind=Kind.TENANT, name="alice")
    issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")
    issuing.rotate(tmp_path / "p.pem")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for certificate, words in (
        (alice.certificate, "issued by an authority: where its key is, run `symbiosis-priv keys request --name alice"),
        (authority.certificate, "create a second one"),
        (tmp_path / "p.previous.pem", "rotation uses that ending"),
    ):
        with pytest.raises((CertificateError, ConfigError), match=words):
            issuing.rotate(certificate)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# Reading


def test_fingerprint_is_that_of_the_der(authority: Identity) -> None:
    certificate = leaf(authority.certificate)
    expected = f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"
    der = certificate.public_bytes(serialization.Encoding.DER)
    assert reading.fingerprint(authority.certificate) == reading.fingerprint(der) == expected


@pytest.mark.parametrize("content", [b"", b"no pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_unreadable_certificates(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broken.pem"
    path.write_bytes(content)
    with pytest.raises(CertificateError, match=r"broken\.pem holds no PEM certificate"):
        reading.fingerprint(path)
    with pytest.raises(CertificateError, match=r"cannot read .*missing\.pem.*symbiosis-priv keys"):
        reading.fingerprint(tmp_path / "missing.pem")

    def denied(*_: object) -> bytes:  # root can read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pem, "read_limited", denied)
    with pytest.raises(CertificateError, match=rf"Permission denied; let user {os.geteuid()} read it"):
        reading.fingerprint(path)


# Warnings


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """`warned()` returns the warnings since the last call."""
    monkeypatch.setattr(reading, "_warned", set())

    def take() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name == reading.__name__]
        caplog.clear()
        return messages

    return take


def use_both_sides(provider: Identity, tenant: Identity, authority: Identity) -> None:
    server_context(certificate=provider.certificate, key=provider.key, tenant_authority=authority.certificate)
    client_context(certificate=tenant.certificate, key=tenant.key, pins=[provider.certificate])


def test_readable_keys_are_warned_about_once(
    tmp_path: Path, authority: Identity, warned: Callable[[], list[str]]
) -> None:
    provider = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")
    tenant = issuing.issue(tmp_path, authority=authority, kind=Kind.TENANT, name="alice")
    use_both_sides(provider, tenant, authority)
    assert warned() == []
    provider.key.chmod(0o644)
    tenant.key.chmod(0o620)
    for _ in range(2):
        use_both_sides(provider, tenant, authority)
    first, second = warned()
    assert first.endswith(f"(mode 644): chmod 600 {provider.key}")
    assert second.endswith(f"(mode 620): chmod 600 {tenant.key}")


def test_certificates_that_expire_soon_are_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    authority = issuing.create_authority(tmp_path, days=20)
    provider = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p", days=20)
    tenant = issuing.issue(tmp_path, authority=authority, kind=Kind.TENANT, name="alice", days=20)
    use_both_sides(provider, tenant, authority)
    assert warned() == []
    later = datetime.now(UTC) + timedelta(days=10)
    monkeypatch.setattr(reading, "now", lambda: later)
    for _ in range(2):
        use_both_sides(provider, tenant, authority)
    messages = warned()
    assert all("expires in 9 days" in message for message in messages)
    fixes = {message.split(": ", 1)[1] for message in messages}
    assert len(messages) == len(fixes) == 4  # for the provider, once on each side
    assert any("keys rotate --prepare" in fix for fix in fixes)
    assert any("keys request --name alice" in fix for fix in fixes)
    assert any("next_certificate" in fix for fix in fixes)
    assert any("keys authority" in fix for fix in fixes)
    end = reading.expiry(authority.certificate)
    newer = issuing.create_authority(tmp_path, name="newer").certificate.read_bytes()
    both = tmp_path / "both.pem"
    both.write_bytes(newer + authority.certificate.read_bytes())
    assert reading.expiry(both) == end  # the tenants of the first one to expire are the first to be refused
    later = end + timedelta(days=1, hours=1)
    assert reading.expiry(both) > later
    reading.warn_of_expiry(authority.certificate, fix=lambda: "make another")
    (message,) = warned()
    assert "authority.pem expired 2 days ago" in message


# The command line


def test_keys_commands(tmp_path: Path) -> None:
    runner = CliRunner()

    def keys(*arguments: str) -> str:
        directory = str(tmp_path / "keys")
        result = runner.invoke(app, [*arguments, "--directory", directory], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert "tenant_authority = " in keys("authority")
    assert "[[provider]]" in keys("provider", "--name", "gpu", "--host", "gpu.example.org")
    assert "10.0.0.7" in keys("provider", "--name", "cpu", "--host", "10.0.0.7")
    assert 'next_certificate = "keys/gpu.next.pem"' in keys("rotate", "--name", "gpu", "--prepare")
    old = reading.fingerprint(tmp_path / "keys/gpu.pem")
    upcoming = reading.fingerprint(tmp_path / "keys/gpu.next.pem")
    for name in ("gpu", "cpu"):
        assert f"{name}.pem" in keys("rotate", "--name", name)
    assert reading.fingerprint(tmp_path / "keys/gpu.previous.pem") == old
    assert reading.fingerprint(tmp_path / "keys/gpu.pem") == upcoming


def test_a_folder_is_listed_and_an_authority_is_named_as_in_logs_and_quotas(tmp_path: Path) -> None:
    authority = issuing.create_authority(tmp_path)
    issuing.issue(tmp_path, authority=authority, kind=Kind.TENANT, name="alice")
    request = issuing.load_request(issuing.create_request(tmp_path, name="bob"))
    both = authority.certificate.read_bytes() + issuing.create_authority(tmp_path, name="next").certificate.read_bytes()
    (tmp_path / "both.pem").write_bytes(both)
    (tmp_path / "damaged.pem").write_bytes(both[:100])

    def shown(*words: str | Path) -> str:
        result = CliRunner().invoke(app, ["show", *map(str, words)], env={"COLUMNS": "140"}, catch_exceptions=False)
        return str(result.output)

    listed = shown(tmp_path)
    rows = {
        cells[0]: cells[1:] for line in listed.splitlines() if len(cells := re.findall(r"[^│┃\s][^│┃]*\b", line)) > 1
    }
    assert {name: cells[0] for name, cells in rows.items() if name != "file"} == {
        "alice.pem": "tenant",
        "authority.pem": "authority",
        "next.pem": "authority",
        "both.pem": "authority",
        "bob.csr": "request",
        "damaged.pem": "unreadable",
    }
    found = reading.load_certificates(authority.certificate)[0]
    logged = str(TenantIdentity("alice", reading.key_fingerprint(found))).removeprefix("alice@")
    until = f"{found.not_valid_after_utc:%Y-%m-%d %H:%M}"
    assert rows["authority.pem"] == ["authority", until, reading.fingerprint(found)[: len(logged)], logged]
    assert rows["bob.csr"] == ["request", request.key_fingerprint[: len(logged)]]
    assert listed.count(logged) == 2  # in both.pem too, which has two rows
    whole = shown(authority.certificate)
    assert re.findall(" fingerprint +(.*)", whole) == [reading.fingerprint(found), reading.key_fingerprint(found)]
    assert shown(tmp_path / "both.pem").count("key fingerprint") == 2


def test_names_in_a_certificate_cannot_control_the_terminal(tmp_path: Path) -> None:
    """The creator of a certificate chooses its names: they must not imitate a fingerprint or hide following lines."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a\n  fingerprint  sha256:0\x1b[8m")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, reading.now(), reading.now() + timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("a.example\r\x1b[2K")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "a.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    output = CliRunner().invoke(app, ["show", str(path)]).output
    assert output.replace("\n", "").isprintable()
    assert re.findall(r"(?m)^  fingerprint +(.*)$", output) == [reading.fingerprint(path)]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_an_altered_certificate_or_request_is_parsed_or_a_certificate_error(
    parsed: tuple[Path, bytes, bytes], data: st.DataObject
) -> None:
    folder, certificate, request = parsed
    which = data.draw(st.sampled_from((certificate, request)))
    altered = bytearray(which)
    for _ in range(data.draw(st.integers(1, 3))):
        altered[data.draw(st.integers(0, len(which) - 1))] = data.draw(st.integers(0, 255))
    path = folder / "altered.pem"
    label = "CERTIFICATE" if which is certificate else "CERTIFICATE REQUEST"
    path.write_text(f"-----BEGIN {label}-----\n{base64.encodebytes(bytes(altered)).decode()}-----END {label}-----\n")
    with contextlib.suppress(CertificateError, ConfigError):
        if which is request:
            issuing.load_request(path)
            return
        (found,) = reading.load_certificates(path)
        keys_cli.show([path])
        reading.key_fingerprint(found)
        reading.operator_of(found)
        reading.load_pin(path)


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes]:
    """A folder, and the DER of a certificate and of a request."""
    folder = tmp_path_factory.mktemp("parsed")
    identity = issuing.issue(folder, authority=None, kind=Kind.PROVIDER, name="gpu")
    request = issuing.create_request(folder, name="alice")
    der = serialization.Encoding.DER
    return (
        folder,
        leaf(identity.certificate).public_bytes(der),
        x509.load_pem_x509_csr(request.read_bytes()).public_bytes(der),
    )


@cases(__file__, "errors")
def test_keys_errors_propagate_to_the_root_command(tmp_path: Path, arguments: list[str]) -> None:
    where = [str(tmp_path)] if arguments == ["show"] else ["--directory", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, *where])
    assert isinstance(result.exception, SymbiosisError)
    for word, advice in (("zoe", "has no certificate"), ("nobody.csr", "keys request --name nobody")):
        assert advice in str(result.exception) or word not in arguments
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(app, ["provider", "--name", "alpha", "--days", "-5"]).exit_code == 2


def test_revocations_at_the_same_time_are_all_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one reads the list, adds to it and replaces it: the first one's marks got lost."""
    names = ("alice", "bob")
    alice, bob = (issuing.issue(tmp_path / name, authority=None, kind=Kind.TENANT, name=name) for name in names)
    path = tmp_path / "revoked.txt"
    second = threading.Thread(target=lambda: revocation.revoke(path, [bob.certificate]))
    write = write_atomically

    def write_late(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is not second:
            second.start()
            second.join(0.3)  # ends only without a lock
        write(*arguments, **options)

    monkeypatch.setattr(revocation, "write_atomically", write_late)
    revocation.revoke(path, [alice.certificate])
    second.join()
    assert len(revocation.load_revoked(path)) == len(names)
