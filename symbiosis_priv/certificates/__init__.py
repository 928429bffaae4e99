"""Certificates for mutual TLS.

A tenant pins its provider's certificate itself, so a provider needs no authority and may be self-signed.
A provider knows its tenants by the authority that issued their certificates. Kind and name live in the
certificate: a provider carries `serverAuth` and its hosts, a tenant `clientAuth` and
`urn:symbiosis-priv:tenant:<name>`, so neither can stand in for the other.

    reading     what a certificate is, whose, and whether it is good
    issuing     an authority, providers, tenants, and their rotation
    requests    a tenant makes its own key, the executor's operator signs a request
    alerts      warnings about keys that others can read and certificates that expire soon
"""

from symbiosis_priv.certificates.alerts import warn_of_expiry, warn_of_exposed_key
from symbiosis_priv.certificates.issuing import (
    DEFAULT_HOSTS,
    LeafKey,
    create_authority,
    create_self_signed,
    issue,
    issue_to_key,
    prepare_rotation,
    rotate,
)
from symbiosis_priv.certificates.naming import check_name, subject
from symbiosis_priv.certificates.reading import (
    Description,
    Identity,
    Kind,
    Pin,
    describe,
    fingerprint,
    hosts_of,
    how_to_renew,
    is_authority,
    is_current,
    is_issued_by,
    key_fingerprint,
    kind_of,
    load_certificates,
    load_pin,
    operator_of,
    pair,
    provider_name,
    require_identity,
    tenant_name,
)
from symbiosis_priv.certificates.requests import Request, create_request, load_request, sign_request

__all__ = [
    "DEFAULT_HOSTS",
    "Description",
    "Identity",
    "Kind",
    "LeafKey",
    "Pin",
    "Request",
    "check_name",
    "create_authority",
    "create_request",
    "create_self_signed",
    "describe",
    "fingerprint",
    "hosts_of",
    "how_to_renew",
    "is_authority",
    "is_current",
    "is_issued_by",
    "issue",
    "issue_to_key",
    "key_fingerprint",
    "kind_of",
    "load_certificates",
    "load_pin",
    "load_request",
    "operator_of",
    "pair",
    "prepare_rotation",
    "provider_name",
    "require_identity",
    "rotate",
    "sign_request",
    "subject",
    "tenant_name",
    "warn_of_expiry",
    "warn_of_exposed_key",
]
