"""TLS 1.3 with both sides authenticated: contexts, pins, and the tenant's name.

Theory of operation. The order of a TLS 1.3 handshake decides where a refusal shows up:

1. The client says hello; the server answers with its certificate and is finished on its side of the key
   exchange.
2. The client checks that certificate: chain to the pinned file, lifetime, `serverAuth`, host name. A failure
   is raised by the client's `do_handshake`; nothing but the alert is sent.
3. The client sends its own certificate and Finished. *Its handshake is now over*, before the server has
   looked at what it sent. `check_pin` belongs here, before the first byte of the protocol.
4. The server checks the client's certificate: chain to the tenant authority, lifetime, `clientAuth`. A
   failure is raised by the server's `do_handshake`.

So a refused tenant connects without an error and may even write; it learns of the refusal from its *first
read*, as an alert, or as a bare connection reset if it had bytes in flight. Map both with
`handshake_error`, around the handshake and around the first read alike.

Contexts are built from named files only. The system's trust store is never loaded, and neither is
`SSLKEYLOGFILE`, which `ssl.create_default_context` would honour.
"""

import functools
import hmac
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import reading
from symbiosis_priv.certificates.pem import read_file
from symbiosis_priv.certificates.reading import Identity, Kind, Pin, fingerprint
from symbiosis_priv.errors import CertificateError, ConnectionLostError

TlsConnection = ssl.SSLSocket | ssl.SSLObject

# OpenSSL's names for errors caused by a certificate, on either side: CERTIFICATE_REQUIRED,
# PEER_DID_NOT_RETURN_A_CERTIFICATE, BAD_CERTIFICATE, CERTIFICATE_EXPIRED, UNKNOWN_CA, ...
_CERTIFICATE_REASONS: Final = ("CERTIFICATE", "UNKNOWN_CA")
_AUTHORITY: Final = (
    "an executor's operator creates it with `symbiosis-priv keys authority`, a helper's uses a copy of the executor's"
)
# X509_V_ERR_*
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_HOST: Final = (62, 64)  # host, address
_UNKNOWN: Final = (2, 7, 18, 19, 20, 21)  # no issuer, bad signature, self-signed, no chain


class TenantIdentity(msgspec.Struct, frozen=True):  # hashing a Struct takes a quarter of the time of a dataclass
    """The identity of a tenant: its name, and `key_fingerprint` of the authority that has signed its certificate. The
    fingerprint stays when an authority's certificate is renewed with the same key. Two authorities may sign one name:
    compare and count whole identities. `str()` is a short form for people, `alice@sha256:0123456789abcdef`."""

    name: str
    authority: str

    def __str__(self) -> str:
        return f"{self.name}@{self.authority[: reading.SHOWN]}"


def server_context(*, certificate: Path, key: Path, tenant_authority: Path) -> ssl.SSLContext:
    """The provider's context: TLS 1.3 only, and every client must be a tenant. `tenant_authority` has the authorities
    that issue tenant certificates (several while one is replaced). Raises `CertificateError` if a file is missing,
    expired, of the wrong kind, or the key does not fit."""
    own = _checked(certificate, key, kind=Kind.PROVIDER)
    if not tenant_authority.exists():
        raise CertificateError(f"{tenant_authority} does not exist, and says which tenants to serve: {_AUTHORITY}")
    trusted = [c for c in reading.load_certificates(tenant_authority) if reading.is_authority(c)]
    if not any(map(reading.is_current, trusted)):
        raise CertificateError(f"{tenant_authority} holds no current tenant authority: {_AUTHORITY}")
    reading.warn_of_expiry(
        tenant_authority, fix=lambda: "add the one that follows it (`symbiosis-priv keys authority`)"
    )
    context = _context(ssl.PROTOCOL_TLS_SERVER, trusted=trusted, own=own)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(*, certificate: Path, key: Path, pins: Sequence[Pin]) -> ssl.SSLContext:
    """A tenant's context: TLS 1.3 only, host name checked, and nothing trusted but the pinned
    certificates. The checks are made at every call; calls for the same certificates share one context, which must not
    be changed. Call `check_pin` after the handshake. `pins`: the provider's certificate, self-signed or not; two during
    a rotation. Raises `CertificateError` if a file is missing, expired, of
    the wrong kind, or the key does not fit."""
    own = _checked(certificate, key, kind=Kind.TENANT)
    for path in (pin for pin in pins if isinstance(pin, Path)):
        reading.warn_of_expiry(path, fix=lambda: "ask its operator for the next one, and name that as next_certificate")
    pinned = tuple(reading.load_pin(pin) for pin in pins)
    if not any(map(reading.is_current, pinned)):
        raise CertificateError(
            f"{_listed(pins)} has expired or is not valid yet: check the clock, or ask the provider's operator for "
            f"the new one (`symbiosis-priv keys rotate` on their side) and compare its fingerprint"
        )
    # only one key fits a certificate, so the contents of the key file need not be compared
    return _client_context(pinned, own, read_file(certificate))


@functools.lru_cache(maxsize=64)  # OpenSSL takes two milliseconds to make a context
def _client_context(pinned: tuple[x509.Certificate, ...], own: Identity, _: bytes) -> ssl.SSLContext:
    """Make a client's context. The last argument is the contents of its certificate, so that a renewed one is read."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, trusted=pinned, own=own, leaves=True)


def registry_server_context(*, certificate: Path, key: Path) -> ssl.SSLContext:
    """A registry's context: TLS 1.3 only. Clients show no certificate: their descriptors are signed, and other requests
    only read. The federation's authority has issued the certificate for the registry's hosts. Raises `CertificateError`
    if a file is missing, expired, of the wrong kind, or the key does not fit."""
    return _context(ssl.PROTOCOL_TLS_SERVER, own=_checked(certificate, key, kind=Kind.PROVIDER))


@functools.lru_cache(maxsize=8)
def registry_client_context(authorities: tuple[x509.Certificate, ...]) -> ssl.SSLContext:
    """The context of a registry's client: TLS 1.3 only, host name checked, no client certificate, and no trust in any
    certificate except these authorities. Calls for the same authorities share one context, which must not be changed.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, trusted=authorities)


for _shared in (_client_context, registry_client_context):
    os.register_at_fork(after_in_child=_shared.cache_clear)


def check_pin(connection: TlsConnection, *, pins: Sequence[Pin]) -> None:
    """Raises `CertificateError` unless the peer's own certificate is pinned. The handshake alone would also accept a
    certificate that a pinned authority issued to another party."""
    peer = connection.getpeercert(binary_form=True)
    pinned = [reading.load_pin(pin).public_bytes(Encoding.DER) for pin in pins]
    if peer is None or not any(hmac.compare_digest(peer, pin) for pin in pinned):
        shown = "no certificate" if peer is None else fingerprint(peer)
        raise CertificateError(
            f"the provider showed {shown}, which is not pinned in {_listed(pins)}: if its operator confirms that "
            f"fingerprint, name the new certificate's file as next_certificate in federation.toml"
        )


def tenant_identity(connection: TlsConnection) -> TenantIdentity:
    """The identity of the client, from the certificate that the handshake has verified. Issuers choose their names
    freely, so the issuer is found by its signature. Raises `CertificateError`: there is no verified certificate of a
    tenant, or its issuer is an intermediate authority that is not in the list."""
    peer = connection.getpeercert(binary_form=True)
    verified = connection.context.verify_mode == ssl.CERT_REQUIRED
    certificate = x509.load_der_x509_certificate(peer) if peer is not None and verified else None
    name = None if certificate is None else reading.tenant_name(certificate)
    if certificate is None or name is None:
        raise CertificateError(
            "the client showed no verified tenant certificate: sign its request with `symbiosis-priv keys sign`"
        )
    for issuer in map(x509.load_der_x509_certificate, connection.context.get_ca_certs(binary_form=True)):
        if reading.is_issued_by(certificate, issuer):
            return TenantIdentity(name, authority=reading.key_fingerprint(issuer))
    raise CertificateError(
        f"the authority that issued the certificate of tenant {name} is not in tenant_authority itself: append it"
    )


def handshake_error(
    error: OSError, *, peer: str, pins: Sequence[Pin] | None = None
) -> CertificateError | ConnectionLostError:
    """The error of this project for a failed handshake or first read with `peer`. Raise it from the `ssl` module's
    `error`. `pins` are the certificates that were expected; None if authorities were."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return CertificateError(f"the certificate of {peer} was refused: {_refusal(error, pins)}")
    reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or str(error)
    if isinstance(error, ssl.SSLError) and any(word in reason for word in _CERTIFICATE_REASONS):
        return CertificateError(
            f"no connection with {peer} without a valid certificate ({reason}): check that the tenant's "
            f"certificate is current and issued by the provider's tenant authority"
        )
    return ConnectionLostError(
        f"no TLS 1.3 connection with {peer} ({reason}): check the address, and that both sides run symbiosis-priv"
    )


def _refusal(error: ssl.SSLCertVerificationError, pins: Sequence[Pin] | None) -> str:
    code = error.verify_code
    if code == _EXPIRED:
        return "it has expired. Its operator has to renew it (`symbiosis-priv keys rotate` or `keys request`)"
    if code == _NOT_YET_VALID:
        return "it is not valid yet. Compare the clocks of both sides"
    if code in _OTHER_HOST:
        return (
            "it does not name the host in the address. Use one of the hosts that `symbiosis-priv keys show FILE` "
            "prints, or ask its operator for a certificate with this --host"
        )
    if code not in _UNKNOWN:
        return error.verify_message
    if pins is None:
        return "none of the authorities that are trusted here has issued it. Check the address and the authority"
    return (
        f"it is not the one pinned in {_listed(pins)}. Check the address; ask its operator for the certificate "
        f"in use, compare its fingerprint by another channel (`symbiosis-priv keys show FILE`), and name its "
        f"file as certificate or next_certificate in federation.toml"
    )


def _listed(pins: Sequence[Pin]) -> str:
    return " and ".join(str(pin) if isinstance(pin, Path) else fingerprint(pin) for pin in pins)


def _checked(certificate: Path, key: Path, *, kind: Kind) -> Identity:
    """This side's pair. Raises `CertificateError` unless it can be used, and warns of what will make it unusable."""
    identity = Identity(certificate, key)
    reading.require_identity(identity, kind=kind)
    reading.warn_of_exposed_key(key)
    reading.warn_of_expiry(certificate, fix=lambda: reading.how_to_renew(identity, prepare=True))
    return identity


def _context(
    protocol: ssl._SSLMethod,
    *,
    trusted: Sequence[x509.Certificate] = (),
    own: Identity | None = None,
    leaves: bool = False,
) -> ssl.SSLContext:
    """A context that shows its `own` certificate. `leaves`: some trusted certificates are leaves that an authority may
    have issued, and are trusted without their issuer."""
    context = ssl.SSLContext(protocol)  # a client's has CERT_REQUIRED and check_hostname
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would skip the certificate check
    else:
        context.hostname_checks_common_name = False
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if leaves:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if trusted:
        context.load_verify_locations(cadata=b"".join(c.public_bytes(Encoding.DER) for c in trusted))
    if own is None:
        return context
    try:
        # An empty password makes an encrypted key an error; without one OpenSSL would prompt on the terminal.
        context.load_cert_chain(own.certificate, own.key, password="")
    except OSError as error:  # ssl.SSLError included: the files have changed since they were checked
        raise CertificateError(
            f"cannot use {own.certificate} with {own.key} ({error}): if they are being rotated, try again; if not, "
            f"make a new pair with `symbiosis-priv keys`"
        ) from error
    return context
