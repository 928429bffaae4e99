"""Writes a federation.toml from the address, certificate and operator of each provider."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from symbiosis_priv.checkpoints.layers import DEFAULT_SCOPE, Scope
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import Company, Federation, federation_text, load_federation
from symbiosis_priv.limits import Role

_EXAMPLE = "alpha.example:7401,keys/alpha.pem,Alpha GmbH"


@dataclass(frozen=True)
class ProviderArgument:
    """One provider, as given on the command line. Its name in the federation is the name of its certificate file."""

    role: Role
    address: str
    certificate: Path
    operator: str

    @classmethod
    def parse(cls, text: str, *, role: Role) -> Self:
        """Parse `ADDRESS,CERTIFICATE,OPERATOR`. The operator may contain commas. Raises `ConfigError`."""
        parts = [part.strip() for part in text.split(",", 2)]
        if len(parts) < 3 or not all(parts):
            raise ConfigError(f"--{role} {text!r}: write ADDRESS,CERTIFICATE,OPERATOR, such as {_EXAMPLE!r}")
        address, certificate, operator = parts
        return cls(role, address, Path(certificate), operator)


def parse_company(text: str) -> Company:
    """Parse `NAME,MEMBER,MEMBER,...`, where members are names of providers. Raises `ConfigError`."""
    name, *members = [part.strip() for part in text.split(",")]
    if not members or not all((name, *members)):
        raise ConfigError(f"--company {text!r}: write NAME,MEMBER,MEMBER, such as 'Holding SE,alpha,gamma'")
    return Company(name, tuple(members))


def write_federation(
    path: Path,
    providers: Sequence[ProviderArgument],
    *,
    digest: str,
    weight_bits: int,
    scope: Scope = DEFAULT_SCOPE,
    tenant_certificate: Path,
    tenant_key: Path,
    pad_helpers: int | None = None,
    companies: Sequence[Company] = (),
) -> Federation:
    """Write a new federation.toml and read it back. Raises `ConfigError`, `RoleConflictError` or `CertificateError`,
    and leaves no file, if `load_federation` refuses it; `ConfigError` if `path` exists.

    Args:
        providers: the executors and helpers. Relative paths of certificates, and of the tenant's files, are relative to
            the working folder; the file gets paths relative to its own folder.
        scope: the optional layer groups that the providers serve.
        pad_helpers: number of helpers that share each pad; all helpers if None.
        companies: groups of providers that count as one party.
    """

    def beside(file: Path) -> Path:
        return file if file.is_absolute() else Path(os.path.relpath(file, path.parent))

    text = federation_text(
        (
            {
                "name": provider.certificate.stem,
                "operator": provider.operator,
                "role": provider.role,
                "address": provider.address,
                "certificate": beside(provider.certificate),
            }
            for provider in providers
        ),
        digest=digest,
        certificate=beside(tenant_certificate),
        key=beside(tenant_key),
        weight_bits=weight_bits,
        scope=scope,
        pads=None if pad_helpers is None else {"helpers": pad_helpers},
        companies={company.name: company.members for company in companies},
    )
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise ConfigError("a name or a path is not UTF-8: use a terminal with UTF-8, or rename the file") from None
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another name") from None
    try:
        return load_federation(path)
    except BaseException:
        path.unlink()
        raise
