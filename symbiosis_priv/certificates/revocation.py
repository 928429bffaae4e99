"""Certificates that are not good any more: a text file with a mark of each, one a line, `#` begins a comment.

A provider reads it at its start and again when it changes, and hangs up on whoever shows a certificate in it;
registries and their clients read one of providers that an authority does not vouch for any more. A list of marks
needs no authority's signature, does not expire, and covers self-signed tenants too; it lies beside the
reader's own key, and whoever may write there needs no forged list.

A mark is the hash of what the issuer has signed, not the fingerprint of the whole certificate: the signature is part of
that, and whoever has an ECDSA signature (r, s) can write (r, n - s), which is as good, in its place.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from symbiosis_priv.certificates import load_certificates, provider_name, tenant_name
from symbiosis_priv.certificates.pem import create_file
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.system.files import read_limited, write_atomically

_MAX_BYTES = 64 << 20  # half a million marks
_LINE = re.compile(r"\s*(tbs-sha256:[0-9a-f]{64})?\s*(#.*)?")


def mark_of(certificate: x509.Certificate) -> str:
    """How a list names a certificate: `tbs-sha256:<hex>` of what its issuer has signed (X.509's TBSCertificate)."""
    return f"tbs-sha256:{hashlib.sha256(certificate.tbs_certificate_bytes).hexdigest()}"


def create_list(path: Path) -> None:
    """Create an empty list unless the file exists: what names it in a configuration can start before anything is
    revoked. Raises `CertificateError` if it cannot be written."""
    if not path.exists():
        create_file(path, b"# Revoked certificates: `symbiosis-priv keys revoke` adds to this file.\n", mode=0o644)


def load_revoked(path: Path | None, *, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """The marks in a file, and those that are known already.

    Args:
        path: None for no list.
        known: what the reader has found in the list before. It stays revoked until the reader starts again: a list that
            somebody is in the middle of writing is a shorter one for a while.

    Raises `CertificateError` if it cannot be read, ends in the middle of a line, or a line is neither a mark nor a
    comment: a list that is not understood must not be taken for an empty one.
    """
    if path is None:
        return known
    try:
        text = read_limited(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(
            f"cannot read {path} ({error}): an empty file revokes nobody, `symbiosis-priv keys revoke` adds to it"
        ) from error
    if text and not text.endswith("\n"):
        raise CertificateError(
            f"{path} ends in the middle of a line: if it was cut short, copy it again; if not, end it with a line break"
        )
    found = set(known)
    for number, line in enumerate(text.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CertificateError(
                f"{path}, line {number}: expected tbs-sha256: and 64 digits, as `symbiosis-priv keys revoke` writes it"
            )
        if match[1]:
            found.add(match[1])
    return frozenset(found)


def revoke(path: Path, certificates: list[Path]) -> list[str]:
    """Add every certificate in some files to a list, which is made if there is none.

    Returns the marks that were added.

    Raises `CertificateError` for a certificate that is neither a tenant's nor a provider's, and for a file that cannot
    be read or written.
    """
    known = load_revoked(path) if path.exists() else frozenset()
    text = read_limited(path, _MAX_BYTES).decode() if path.exists() else ""
    added = []
    listed = [(file, certificate) for file in certificates for certificate in load_certificates(file)]
    for file, certificate in listed:
        name = tenant_name(certificate) or provider_name(certificate)
        if name is None:
            raise CertificateError(f"{file} is neither a tenant's nor a provider's certificate: only those are revoked")
        mark = mark_of(certificate)
        if mark not in known and mark not in added:
            text = text if not text or text.endswith("\n") else text + "\n"
            text += f"{mark}  # {name}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"
            added.append(mark)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise CertificateError(f"cannot write {path}: {error.strerror}; choose another file with --file") from error
    return added
