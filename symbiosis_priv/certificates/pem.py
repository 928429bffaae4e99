"""Reads and writes PEM files of certificates and keys."""

import os
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from symbiosis_priv.errors import CertificateError
from symbiosis_priv.system.files import read_limited, write_new

MAX_BYTES = 1 << 20  # size limit of a file, far above the size of any bundle of certificates


def certificate_pem(certificate: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private key as unencrypted PKCS #8 PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_file(path: Path) -> bytes:
    """The file's bytes, at most `MAX_BYTES`. Raises `CertificateError`."""
    try:
        return read_limited(path, MAX_BYTES)
    except OSError as error:
        other = f"let user {os.geteuid()} read it (chown), " if isinstance(error, PermissionError) else ""
        raise CertificateError(
            f"cannot read {path}: {error.strerror}; {other}check the path, or create it with `symbiosis-priv keys`"
        ) from error


def create_file(path: Path, content: bytes, *, mode: int) -> None:
    """Writes a new file, in a folder that is made with mode 0700 unless it exists. O_EXCL also refuses to follow a
    symbolic link at the path. Raises `CertificateError` if the file exists or cannot be written."""
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(mode=0o700, parents=True)
        write_new(path, content, mode=mode)
    except FileExistsError:
        raise CertificateError(
            f"{path} exists and is never overwritten: use it, or choose another name or directory"
        ) from None
    except OSError as error:
        raise CertificateError(f"cannot write {path}: {error.strerror}; choose another directory") from error
