"""Writes a federation.toml from what providers' operators hand out: address, certificate, operator."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import Federation, load_federation
from symbiosis_priv.limits import Role

_EXAMPLE = "alpha.example:7401,keys/alpha.pem,Alpha GmbH"


@dataclass(frozen=True)
class Descriptor:
    """One provider.

    Args:
        address: host:port.
        certificate: its pinned certificate; the file's name is the provider's name in the federation.
        operator: who runs it.
    """

    role: Role
    address: str
    certificate: Path
    operator: str

    @classmethod
    def parse(cls, text: str, *, role: Role) -> Descriptor:
        """`ADDRESS,CERTIFICATE,OPERATOR`; an operator's name may hold commas. ConfigError for less."""
        parts = [part.strip() for part in text.split(",", 2)]
        if len(parts) < 3 or not all(parts):
            raise ConfigError(f"--{role} {text!r}: write ADDRESS,CERTIFICATE,OPERATOR, such as {_EXAMPLE!r}")
        address, certificate, operator = parts
        return cls(role, address, Path(certificate), operator)


def write_federation(
    path: Path,
    descriptors: Sequence[Descriptor],
    *,
    digest: str,
    weight_bits: int,
    tenant_certificate: Path,
    tenant_key: Path,
) -> Federation:
    """Write a new federation.toml and read it back; what is not a good federation leaves no file.

    Args:
        path: must not exist. The other paths are relative to the working folder, and in the file to its own.

    Raises:
        ConfigError, RoleConflictError, CertificateError: as `load_federation` says, or the file exists.
    """

    def table(header: str, **entries: object) -> str:
        lines = (f"{key} = {json.dumps(value, default=str)}" for key, value in entries.items())  # such JSON is TOML
        return "\n".join([header, *lines, ""])

    def beside(file: Path) -> Path:
        return file if file.is_absolute() else Path(os.path.relpath(file, path.parent))

    tables = [
        table("[model]", digest=digest, weight_bits=weight_bits),
        table("[tenant]", certificate=beside(tenant_certificate), key=beside(tenant_key)),
    ]
    for provider in descriptors:
        tables.append(
            table(
                "[[provider]]",
                name=provider.certificate.stem,
                operator=provider.operator,
                role=provider.role,
                address=provider.address,
                certificate=beside(provider.certificate),
            )
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(tables))
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another name") from None
    try:
        return load_federation(path)
    except BaseException:
        path.unlink()
        raise
