"""Checks the names of tenants, providers, authorities and operators."""

import re
import string
import unicodedata
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from symbiosis_priv.errors import ConfigError

NAME: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
TENANT_URN: Final = "urn:symbiosis-priv:tenant:"
PREVIOUS: Final = ".previous"
NEXT: Final = ".next"
PROJECT: Final = "symbiosis-priv"  # the organisation in a certificate that names no operator

_MAX_OPERATOR: Final = 64  # X.509's bound for an organisation
_PUNCTUATION: Final = ".,&'()+-/"
_OPERATOR: Final = frozenset(string.ascii_letters + string.digits + _PUNCTUATION + " ßæøœłđþðÆØŒŁĐÞÐ")


def check_name(name: str) -> None:
    """Raises `ConfigError` unless `name` can be the name of files and of a tenant, provider or authority."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"name {name!r}: use 1 to 64 of A-Z a-z 0-9 . _ and -, not starting with a dot")
    if name.endswith((PREVIOUS, NEXT)):
        raise ConfigError(f"name {name!r}: rotation uses that ending for other pairs, choose another name")


def is_operator(operator: str) -> bool:
    """Returns True if an authority may sign this operator's name: Latin letters with or without diacritics, digits and
    some punctuation. Rule 8 compares operators' names, so two different names must not look alike."""
    return (
        1 <= len(operator) <= _MAX_OPERATOR
        and operator == operator.strip() == unicodedata.normalize("NFKC", operator)
        and all(unicodedata.normalize("NFD", c)[0] in _OPERATOR for c in operator)
    )


def subject(name: str, *, unit: str, operator: str | None = None) -> x509.Name:
    """The subject of a certificate. Raises `ConfigError`: a bad name or operator."""
    # Without the unit, a certificate with the authority's name would have subject == issuer and look self-signed.
    check_name(name)
    if operator is not None and not is_operator(operator):
        raise ConfigError(
            f"operator {operator!a}: use 1 to {_MAX_OPERATOR} Latin letters, digits, spaces and "
            f"{_PUNCTUATION}, as in 'Alpha GmbH'"
        )
    if operator is not None and operator.casefold() == PROJECT:
        raise ConfigError(f"operator {operator!r}: name the company that runs the provider, as in 'Alpha GmbH'")
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, operator or PROJECT),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
