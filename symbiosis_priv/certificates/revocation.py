"""The list of revoked certificates: a text file with one mark per line; `#` begins a comment.

A provider reads the list of tenants' revoked certificates at start and whenever the file changes, and closes the
connections of revoked tenants. Registries and tenants read a list of providers' revoked certificates. Unlike a CRL, the
list needs no signature and does not expire. The list lies in the folder of the reader's private key, so an attacker
that can write the list could also replace the key.

A mark is the hash of the signed part of a certificate, not of the whole certificate. The whole certificate includes the
signature, and anyone can turn an ECDSA signature (r, s) into (r, n - s), which is valid too.
"""

import contextlib
import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from symbiosis_priv.certificates.pem import create_file
from symbiosis_priv.certificates.reading import load_certificates, provider_name, tenant_name
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.system.files import lock, read_limited, write_atomically

_MAX_BYTES = 64 << 20  # space for half a million marks
_PATIENCE_S = 10.0
_LINE = re.compile(r"\s*(tbs-sha256:[0-9a-f]{64})?\s*(#.*)?")


def mark_of(certificate: x509.Certificate) -> str:
    """The mark of a certificate: `tbs-sha256:<hex>` of the part that its issuer signs (X.509 TBSCertificate)."""
    return f"tbs-sha256:{hashlib.sha256(certificate.tbs_certificate_bytes).hexdigest()}"


def create_list(path: Path) -> None:
    """Create an empty list unless the file exists, so that programs can be configured with it before the first
    revocation. Raises `CertificateError` if the file cannot be written."""
    if not path.exists():
        create_file(path, b"# Revoked certificates: `symbiosis-priv keys revoke` adds to this file.\n", mode=0o644)


def load_revoked(path: Path | None, *, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """The marks in a file, and those that the reader has read before: they stay revoked until it restarts, since a list
    that is being written may be incomplete. Raises `CertificateError` if the file cannot be read, ends in the middle of
    a line, or has another line than a mark or a comment: that must not count as an empty list."""
    if path is None:
        return known
    try:
        text = read_limited(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(
            f"cannot read {path} ({error}): an empty file revokes nothing, `symbiosis-priv keys revoke` adds entries"
        ) from error
    if text and not text.endswith("\n"):
        raise CertificateError(
            f"{path} ends in the middle of a line: if it was cut short, copy it again; if not, end it with a line break"
        )
    found = set(known)
    for number, line in enumerate(re.split("\r?\n", text)[:-1], start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CertificateError(
                f"{path}, line {number}: expected tbs-sha256: and 64 digits, as `symbiosis-priv keys revoke` writes it"
            )
        if match[1]:
            found.add(match[1])
    return frozenset(found)


def revoke(path: Path, certificates: list[Path]) -> list[str]:
    """Add every certificate in some files to a list. Creates the list if it does not exist. Returns the marks that were
    added. Raises `CertificateError` for a certificate that is neither a tenant's nor a provider's, and for a file that
    cannot be read or written, or that another process writes for too long."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as alone:  # otherwise a revocation by another process could get lost
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        alone.callback(os.close, folder)
        with contextlib.suppress(OSError):  # a file system without locks
            if not lock(folder, patience_s=_PATIENCE_S):
                raise CertificateError(f"another process is writing {path}: end it, and run this again")
        known = load_revoked(path) if path.exists() else frozenset()
        text = read_limited(path, _MAX_BYTES).decode() if path.exists() else ""
        added = []
        for file, certificate in [(path, found) for path in certificates for found in load_certificates(path)]:
            name = tenant_name(certificate) or provider_name(certificate)
            if name is None:
                raise CertificateError(
                    f"{file} is neither a tenant's nor a provider's certificate: only those are revoked"
                )
            mark = mark_of(certificate)
            if mark not in known and mark not in added:
                text = text if not text or text.endswith("\n") else text + "\n"
                text += f"{mark}  # {name}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"
                added.append(mark)
        write_atomically(path, text.encode())
    return added
