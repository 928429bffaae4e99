"""Certificates that are not good any more: a text file of SHA-256 fingerprints, one a line, `#` begins a comment.

A provider reads it at its start and again when it changes, and hangs up on whoever shows a certificate in it;
registries and their clients read one of providers that an authority does not vouch for any more. A list of fingerprints
needs no authority's signature, does not expire, and covers self-signed tenants too; it lies beside the
reader's own key, and whoever may write there needs no forged list.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import fingerprint, load_certificates, provider_name, tenant_name
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.files import write_atomically

__all__ = ["load_revoked", "revoke"]

_LINE = re.compile(r"\s*(sha256:[0-9a-f]{64})?\s*(#.*)?")


def load_revoked(path: Path) -> frozenset[str]:
    """The fingerprints in a file.

    Raises `CertificateError` if it cannot be read or a line is neither a fingerprint nor a comment: a list that is not
    understood must not be taken for an empty one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(
            f"cannot read {path} ({error}): an empty file revokes nobody, `symbiosis-priv keys revoke` adds to it"
        ) from error
    found = set()
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CertificateError(f"{path}, line {number}: expected sha256: and 64 digits, as `keys show` prints it")
        if match[1]:
            found.add(match[1])
    return frozenset(found)


def revoke(path: Path, certificates: list[Path]) -> list[str]:
    """Add every certificate in some files to a list, which is made if there is none.

    Returns the fingerprints that were added.

    Raises `CertificateError` for a certificate that is neither a tenant's nor a provider's, and for a file that cannot
    be read or written.
    """
    known = load_revoked(path) if path.exists() else frozenset()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    added = []
    listed = [(file, certificate) for file in certificates for certificate in load_certificates(file)]
    for file, certificate in listed:
        name = tenant_name(certificate) or provider_name(certificate)
        if name is None:
            raise CertificateError(f"{file} is neither a tenant's nor a provider's certificate: only those are revoked")
        shown = fingerprint(certificate.public_bytes(Encoding.DER))
        if shown not in known and shown not in added:
            text = text if not text or text.endswith("\n") else text + "\n"
            text += f"{shown}  # {name}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"
            added.append(shown)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise CertificateError(f"cannot write {path}: {error.strerror}; choose another file with --file") from error
    return added
