"""The key under which a tenant's cache keeps its preparation, if it gets one from outside.

    systemd credentials   a credential `symbiosis-priv.cache-key`: LoadCredentialEncrypted=, with a TPM or without
    file descriptor       its number in SYMBIOSIS_PRIV_CACHE_KEY_FD: a file or pipe that the starter has opened

The key has 32 bytes and is read once. A cache that is copied without it is useless: files are under AES-256-GCM.
"""

import functools
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from symbiosis_priv.errors import CheckpointError, ConfigError

_CREDENTIAL, _BYTES, _NONCE = "symbiosis-priv.cache-key", 32, 12


@functools.cache
def cache_key() -> bytes | None:
    """The key of this process, or None if it was given none. Raises `ConfigError`: what was given is no key."""
    folder, descriptor = os.environ.get("CREDENTIALS_DIRECTORY"), os.environ.get("SYMBIOSIS_PRIV_CACHE_KEY_FD")
    try:
        if folder is not None and (path := Path(folder, _CREDENTIAL)).exists():
            key = path.read_bytes()
        elif descriptor is not None:
            with os.fdopen(int(descriptor), "rb") as file:
                key = file.read(_BYTES + 1)
        else:
            return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key of the cache cannot be read ({error}): see docs/enclave.md") from error
    if len(key) != _BYTES:
        raise ConfigError(f"the key of the cache has {_BYTES} bytes, and not {len(key)}: head -c 32 /dev/urandom > KEY")
    if not hasattr(os, "memfd_create"):
        raise ConfigError("a key of the cache needs Linux: decrypted files are opened in memory")
    return key


def encrypted(name: str, content: bytes) -> bytes:
    """The content of a file of the cache as it is stored."""
    if (key := cache_key()) is None:
        return content
    nonce = secrets.token_bytes(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, content, name.encode())


def decrypted(name: str, stored: bytes) -> bytes:
    """The content of a stored file. Raises `CheckpointError`: it was stored under another key, or has been changed."""
    if (key := cache_key()) is None:
        return stored
    try:
        return AESGCM(key).decrypt(stored[:_NONCE], stored[_NONCE:], name.encode())
    except (InvalidTag, ValueError) as error:
        raise CheckpointError(f"{name} is under another key than that of this process, or has been changed") from error
