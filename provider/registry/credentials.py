"""Who a registry is, and who vouches for the executors that it lists."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding

from provider.registry.config import RegistryConfig
from symbiosis_priv.certificates import Identity, load_certificates, provider_name
from symbiosis_priv.errors import CertificateError, DescriptorError
from symbiosis_priv.network.tls import registry_server_context
from symbiosis_priv.registry import protocol
from symbiosis_priv.registry.descriptor import verify
from symbiosis_priv.registry.statements import Trust


@dataclass(frozen=True)
class RegistryCredentials:
    """As the files were when they were read.

    Args:
        context: that clients shake hands with.
        trust: who vouches for executors, and for this registry.
        name: the registry's, from its certificate.
        certificate: DER.
        key: of the certificate; signs the log's heads.
        vouches: whether a descriptor of the log's would still be taken; remembers what it has looked at.
    """

    context: ssl.SSLContext
    trust: Trust
    name: str
    certificate: bytes
    key: PrivateKeyTypes
    vouches: Callable[[bytes], bool]

    @classmethod
    def load(cls, config: RegistryConfig, *, revoked: frozenset[str] = frozenset()) -> Self:
        """Read the files.

        Args:
            config: names them.
            revoked: who was revoked before, and stays so.

        Raises:
            CertificateError: one of them cannot be read, or the authority does not vouch for the certificate.
        """
        context = registry_server_context(certificate=config.certificate, key=config.key)
        certificate = load_certificates(config.certificate)[0]
        trust = Trust.load(config.authority, config.revoked, known=revoked)
        try:
            trust.check(certificate, at=datetime.now(UTC))
        except DescriptorError as error:
            raise CertificateError(
                f"{config.certificate} cannot be a registry's: {error}. Ask for one with `symbiosis-priv keys request "
                f"--provider`, and have it signed by {config.authority}"
            ) from error
        return cls(
            context,
            trust=trust,
            name=provider_name(certificate) or "",
            certificate=certificate.public_bytes(Encoding.DER),
            key=Identity(config.certificate, config.key).private_key(),
            vouches=functools.lru_cache(2 * protocol.MAX_LISTED)(functools.partial(_is_vouched, trust)),
        )


def _is_vouched(trust: Trust, data: bytes) -> bool:
    """Whether a descriptor of the log's would still be taken: its executor may have been revoked since."""
    try:
        verify(data, trust, now=None)
    except DescriptorError:
        return False
    return True
