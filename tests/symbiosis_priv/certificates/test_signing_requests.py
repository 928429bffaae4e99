"""Certificate requests: a key stays on its machine, and a name belongs to one key."""

import base64
import re
import shlex
import shutil
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from typer.testing import CliRunner

from provider.config.provider_toml import template
from symbiosis_priv.certificates import issuing, reading
from symbiosis_priv.certificates.keys_cli import app
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError, ConfigError, SymbiosisError
from symbiosis_priv.network import tls
from tests.symbiosis_priv.certificates.test_certificates import UNSAFE
from tests.symbiosis_priv.network.test_tls import connect

PEM = serialization.Encoding.PEM


@pytest.fixture
def authority(tmp_path: Path) -> Identity:
    return issuing.create_authority(tmp_path / "operator")


def sign(authority: Identity, request: Path, *, renew: bool = False) -> Path:
    return issuing.sign_request(
        issuing.load_request(request), authority=authority, directory=authority.certificate.parent, renew=renew
    )


def foreign_request(path: Path, *, names: list[str], key: ec.EllipticCurvePrivateKey | None = None) -> Path:
    """A request by another program that asks to be an authority and a provider."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=3), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier("urn:symbiosis-priv:tenant:bob")]), critical=False
    )
    request = builder.sign(key or ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    path.write_bytes(request.public_bytes(PEM))
    return path


def test_a_provider_accepts_a_tenant_with_a_signed_request(tmp_path: Path, authority: Identity) -> None:
    tenant = tmp_path / "tenant"
    request = issuing.create_request(tenant, name="alice")
    assert stat.S_IMODE((tenant / "alice.key").stat().st_mode) == 0o600
    assert b"PRIVATE" not in request.read_bytes()
    assert not list(authority.certificate.parent.glob("alice*"))
    signed = sign(authority, request)
    assert not (authority.certificate.parent / "alice.key").exists()
    (tenant / "alice.pem").write_bytes(signed.read_bytes())

    provider = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")
    serving = tls.server_context(
        certificate=provider.certificate, key=provider.key, tenant_authority=authority.certificate
    )
    calling = tls.client_context(
        certificate=tenant / "alice.pem", key=tenant / "alice.key", pins=[provider.certificate]
    )
    signer = reading.key_fingerprint(reading.load_certificates(authority.certificate)[0])
    assert connect(serving, calling).server == tls.TenantIdentity("alice", authority=signer)


def test_requested_extensions_are_ignored(tmp_path: Path, authority: Identity) -> None:
    signed = reading.load_certificates(sign(authority, foreign_request(tmp_path / "r.csr", names=["alice"])))[0]
    assert reading.kind_of(signed) is Kind.TENANT
    assert reading.tenant_name(signed) == "alice"
    assert not reading.is_authority(signed)
    usage = signed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert signed.subject.rfc4514_string() == "CN=alice,OU=tenant,O=symbiosis-priv"


def broken_signature(path: Path) -> None:
    request = x509.load_pem_x509_csr(foreign_request(path, names=["alice"]).read_bytes())
    der = bytearray(request.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    body = base64.encodebytes(bytes(der)).decode()
    path.write_text(f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n")


def rsa_key(path: Path) -> None:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "alice")])
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path.write_bytes(
        x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256()).public_bytes(PEM)
    )


@pytest.mark.parametrize(
    ("write", "error", "words"),
    [
        (lambda path: path.write_bytes(b""), CertificateError, "not a certificate request"),
        (lambda path: path.write_bytes(b"x" * (2 << 20)), CertificateError, "larger than"),
        (lambda path: None, CertificateError, "cannot read"),
        (broken_signature, CertificateError, "not signed by the key|not a certificate request"),
        (rsa_key, CertificateError, "is not for an elliptic-curve key"),
        (lambda path: foreign_request(path, names=[]), CertificateError, "does not have exactly one common name"),
        (lambda path: foreign_request(path, names=["a", "b"]), CertificateError, "not have exactly one common name"),
        (lambda path: foreign_request(path, names=["../alice"]), ConfigError, "name '../alice'"),
        (lambda path: foreign_request(path, names=["alice.previous"]), ConfigError, "rotation uses"),
    ],
)
def test_bad_requests_are_refused(
    tmp_path: Path, write: Callable[[Path], object], error: type[SymbiosisError], words: str
) -> None:
    path = tmp_path / "bad.csr"
    write(path)
    with pytest.raises(error, match=words):
        issuing.load_request(path)


def test_a_name_belongs_to_its_key_unless_it_is_renewed(tmp_path: Path, authority: Identity) -> None:
    first = issuing.create_request(tmp_path / "one", name="alice")
    other = issuing.create_request(tmp_path / "two", name="alice")
    record = sign(authority, first)
    before = record.read_bytes()
    with pytest.raises(CertificateError, match=r"already gives the name alice to another key.*--renew"):
        sign(authority, other)
    assert record.read_bytes() == before
    sign(authority, first)  # the same key again: a renewal
    sign(authority, other, renew=True)
    assert reading.key_fingerprint(reading.load_certificates(record)[0]) == issuing.load_request(other).key_fingerprint
    assert (record.parent / "alice.previous.pem").exists()


@pytest.mark.parametrize("renew", [False, True])
@pytest.mark.parametrize("name", ["Alice", "authority", "alpha", "renamed"])
def test_no_request_replaces_another_tenants_certificate(
    tmp_path: Path, authority: Identity, name: str, renew: bool
) -> None:
    operator = authority.certificate.parent
    sign(authority, issuing.create_request(tmp_path / "one", name="alice"))
    issuing.issue(operator, authority=None, kind=Kind.PROVIDER, name="alpha")
    sign(authority, issuing.create_request(tmp_path / "one", name="renamed"))
    (operator / "renamed.pem").rename(operator / "elsewhere.pem")
    before = {path: path.read_bytes() for path in operator.iterdir()}
    with pytest.raises(CertificateError):
        sign(authority, issuing.create_request(tmp_path / "two", name=name), renew=renew and name != "renamed")
    assert {path: path.read_bytes() for path in operator.iterdir()} == before


def test_a_request_keeps_an_existing_key_but_never_a_providers_key(tmp_path: Path) -> None:
    path = issuing.create_request(tmp_path, name="alice")
    key, fingerprint = (tmp_path / "alice.key").read_bytes(), issuing.load_request(path).key_fingerprint
    issuing.create_request(tmp_path, name="alice")
    assert (tmp_path / "alice.key").read_bytes() == key
    assert issuing.load_request(path).key_fingerprint == fingerprint
    issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="alpha")
    with pytest.raises(CertificateError, match=r"alpha\.pem is not the certificate of a tenant alpha"):
        issuing.create_request(tmp_path, name="alpha")
    with pytest.raises(ConfigError, match=r"name '\.\./x'"):
        issuing.create_request(tmp_path, name="../x")


# The command line


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_request_and_sign_show_both_sides_the_same_fingerprint(tmp_path: Path, authority: Identity) -> None:
    operator, tenant = authority.certificate.parent, tmp_path / "tenant"
    (said,) = re.findall("sha256:[0-9a-f]{64}", run("request", "--name", "alice", "--directory", tenant))
    with pytest.raises(CertificateError, match="do not sign it"):
        run("sign", tenant / "alice.csr", "--directory", operator, "--key-fingerprint", "sha256:00")
    assert not (operator / "alice.pem").exists()
    assert said in run("sign", tenant / "alice.csr", "--directory", operator)
    signed = run("sign", tenant / "alice.csr", "--directory", operator, "--key-fingerprint", said)
    assert "another channel" not in signed
    assert re.findall("key fingerprint +(.*)", signed) == [said]
    assert {path.name for path in tenant.iterdir()} == {"alice.csr", "alice.key"}


@pytest.mark.parametrize("kind", [Kind.TENANT, Kind.PROVIDER])
def test_the_signers_copy_of_a_certificate_is_not_rotated(tmp_path: Path, authority: Identity, kind: Kind) -> None:
    """The key is elsewhere, and stays there: no new key here takes over the name."""
    request = issuing.create_request(tmp_path / "own", name="alice", kind=kind)
    signer: list[str | Path] = ["--directory", authority.certificate.parent]
    details = ["--operator", "Alpha GmbH", "--host", "a.example"] if kind is Kind.PROVIDER else []
    run("sign", request, *signer, *details)
    for prepare in ([], ["--prepare"]):
        with pytest.raises(CertificateError, match=f"keys request{' --provider' * bool(details)} --name alice"):
            run("rotate", "--name", "alice", *signer, *prepare)
    assert not list(authority.certificate.parent.glob("alice*.key"))


@pytest.mark.parametrize("signed_here", [True, False])
@pytest.mark.parametrize("kind", [Kind.TENANT, Kind.PROVIDER])
def test_the_command_that_an_expired_certificate_names_renews_it(
    tmp_path: Path, authority: Identity, monkeypatch: pytest.MonkeyPatch, kind: Kind, signed_here: bool
) -> None:
    """The authority's key is in the same folder, or on another machine."""
    folder, signed = authority.certificate.parent if signed_here else tmp_path / "own", authority.certificate.parent
    details: list[str] = ["--operator", "L", "--host", "l.example"] if kind is Kind.PROVIDER else []
    request: list[str | Path] = ["sign", folder / "late.csr", "--directory", signed, *details]
    issuing.create_request(folder, name="late", kind=kind)
    run(*request, "--days", "1")
    monkeypatch.setattr(reading, "now", lambda: datetime.now(UTC) + timedelta(days=2))
    late = Identity(folder / "late.pem", folder / "late.key")
    if not signed_here:
        shutil.copy(signed / "late.pem", folder)
    with pytest.raises(CertificateError, match="valid only") as caught:
        reading.require_identity(late, kind=kind)
    assert "EXPIRED" in run("show", late.certificate)
    (command,) = re.findall(r"`symbiosis-priv keys ([^`]+)`", str(caught.value))
    run(*shlex.split(command))
    run(*request)
    if not signed_here:
        shutil.copy(signed / "late.pem", folder)
    reading.require_identity(late, kind=kind)


def test_all_certificates_of_several_rotations_are_revoked(tmp_path: Path, authority: Identity) -> None:
    """The prepared pair is revoked too, and the certificates of earlier requests."""
    folder, given = authority.certificate.parent, list[bytes]()
    for number in range(3):
        request = issuing.create_request(tmp_path / f"{number}", name="alice")
        given.append(sign(authority, request, renew=True).read_bytes())
    alpha = issuing.issue(folder, authority=None, kind=Kind.PROVIDER, name="alpha")
    given.append(alpha.certificate.read_bytes())
    given += [issuing.rotate(alpha.certificate).certificate.read_bytes() for _ in range(3)]
    given.append(issuing.prepare_rotation(alpha.certificate).certificate.read_bytes())
    assert "helpers" in run("revoke", "--name", "alice", "--directory", folder)
    assert "alpha.next.pem is revoked too" in " ".join(run("revoke", "--name", "alpha", "--directory", folder).split())
    marks = {mark_of(x509.load_pem_x509_certificate(data)) for data in given}
    assert len(marks) == 8
    assert load_revoked(folder / "revoked.txt") == marks


def test_printed_commands_and_settings_work_as_printed(tmp_path: Path) -> None:
    """`keys sign` names the authority, no section header is repeated, and the list exists."""
    folder = tmp_path / "keys"
    output = run("authority", "--name", "federation", "--directory", folder)
    assert load_revoked(folder / "revoked.txt") == frozenset()
    issuing.create_request(tmp_path, name="alice")
    (line,) = [line for line in output.splitlines() if line.startswith("symbiosis-priv keys sign")]
    words = shlex.split(line.replace("NAME.csr", str(tmp_path / "alice.csr")))[2:]
    run(*words)
    assert (folder / "alice.pem").exists()
    toml = template()
    pasted = [line for line in output.splitlines() if re.match(r"\w+ = ", line)]
    sections = re.findall(r"under \[(\w+)\]:", output)
    assert (sections, len(pasted)) == (["tls", "registry"], 4)
    assert not re.search(r"^\[", output, re.MULTILINE)
    for section in sections:
        assert toml.count(f"\n[{section}]") == 1
    run("authority", "--name", "second", "--directory", folder)  # an existing list is unchanged


# Providers that an authority vouches for


def test_the_signer_determines_a_providers_operator_and_hosts(tmp_path: Path, authority: Identity) -> None:
    federation = authority.certificate.parent
    request = issuing.create_request(tmp_path / "gamma", name="gamma", kind=Kind.PROVIDER)
    with pytest.raises(ConfigError, match=r"--operator 'Alpha GmbH' --host alpha\.example"):
        run("sign", request, "--directory", federation)
    run("sign", request, "--directory", federation, "--operator", "Gamma AG", "--host", "gamma.example")
    signed = reading.load_certificates(federation / "gamma.pem")[0]
    assert reading.kind_of(signed) is Kind.PROVIDER
    assert (reading.provider_name(signed), reading.operator_of(signed)) == ("gamma", "Gamma AG")
    assert reading.hosts_of(signed) == ("gamma.example",)
    other = issuing.create_request(tmp_path / "other", name="gamma", kind=Kind.PROVIDER)
    with pytest.raises(CertificateError, match="already gives the name gamma to another key"):
        run("sign", other, "--directory", federation, "--operator", "Other", "--host", "other.example")
    tenant = issuing.create_request(tmp_path / "tenant", name="gamma")
    with pytest.raises(CertificateError, match="another case of it"):
        run("sign", tenant, "--directory", federation)


def test_a_tenants_certificate_never_names_an_operator_or_a_host(tmp_path: Path, authority: Identity) -> None:
    request = issuing.create_request(tmp_path / "tenant", name="alice")
    for option in (("--operator", "Alice AG"), ("--host", "alice.example")):
        with pytest.raises(ConfigError, match="leave"):
            run("sign", request, "--directory", authority.certificate.parent, *option)
    assert not (authority.certificate.parent / "alice.pem").exists()


def test_a_listed_provider_keeps_its_operator_and_can_be_revoked(tmp_path: Path, authority: Identity) -> None:
    folder = authority.certificate.parent
    request = issuing.create_request(tmp_path, name="p", kind=Kind.PROVIDER)
    for _ in range(2):
        run("sign", request, "--directory", folder, "--operator", "Ünïcode & Söhne", "--host", "p.example")
        assert reading.operator_of(reading.load_certificates(folder / "p.pem")[0]) == "Ünïcode & Söhne"
    assert "[registry]" in run("revoke", "--name", "p", "--directory", folder)
    assert load_revoked(folder / "revoked.txt") == {
        mark_of(reading.load_certificates(path)[0]) for path in (folder / "p.pem", folder / "p.previous.pem")
    }


@pytest.mark.parametrize(
    "operators", [[], ["A", "B"], ["A\nB"], [" A"], ["SYMBIOSIS-PRIV"], *([name] for name in UNSAFE)]
)
def test_an_operator_from_another_program_is_one_plain_name_or_none(tmp_path: Path, operators: list[str]) -> None:
    """The operator's name is logged, and compared with helpers' operators to separate companies."""
    key = ec.generate_private_key(ec.SECP256R1())
    issued = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="p")
    like = reading.load_certificates(issued.certificate)[0]
    names = [x509.NameAttribute(NameOID.COMMON_NAME, "p")]
    subject = x509.Name([*names, *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, operator) for operator in operators)])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(like.not_valid_before_utc).not_valid_after(like.not_valid_after_utc)
    for extension in like.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    assert reading.operator_of(builder.sign(key, hashes.SHA256())) is None
