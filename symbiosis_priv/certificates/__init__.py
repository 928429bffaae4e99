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

from symbiosis_priv.certificates.alerts import warn_of_expiry as warn_of_expiry
from symbiosis_priv.certificates.alerts import warn_of_exposed_key as warn_of_exposed_key
from symbiosis_priv.certificates.issuing import DEFAULT_HOSTS as DEFAULT_HOSTS
from symbiosis_priv.certificates.issuing import LeafKey as LeafKey
from symbiosis_priv.certificates.issuing import create_authority as create_authority
from symbiosis_priv.certificates.issuing import create_self_signed as create_self_signed
from symbiosis_priv.certificates.issuing import issue as issue
from symbiosis_priv.certificates.issuing import issue_to_key as issue_to_key
from symbiosis_priv.certificates.issuing import prepare_rotation as prepare_rotation
from symbiosis_priv.certificates.issuing import rotate as rotate
from symbiosis_priv.certificates.naming import check_name as check_name
from symbiosis_priv.certificates.naming import subject as subject
from symbiosis_priv.certificates.reading import Description as Description
from symbiosis_priv.certificates.reading import Identity as Identity
from symbiosis_priv.certificates.reading import Kind as Kind
from symbiosis_priv.certificates.reading import Pin as Pin
from symbiosis_priv.certificates.reading import describe as describe
from symbiosis_priv.certificates.reading import fingerprint as fingerprint
from symbiosis_priv.certificates.reading import hosts_of as hosts_of
from symbiosis_priv.certificates.reading import how_to_renew as how_to_renew
from symbiosis_priv.certificates.reading import is_authority as is_authority
from symbiosis_priv.certificates.reading import is_current as is_current
from symbiosis_priv.certificates.reading import is_issued_by as is_issued_by
from symbiosis_priv.certificates.reading import key_fingerprint as key_fingerprint
from symbiosis_priv.certificates.reading import kind_of as kind_of
from symbiosis_priv.certificates.reading import load_certificates as load_certificates
from symbiosis_priv.certificates.reading import load_pin as load_pin
from symbiosis_priv.certificates.reading import operator_of as operator_of
from symbiosis_priv.certificates.reading import pair as pair
from symbiosis_priv.certificates.reading import provider_name as provider_name
from symbiosis_priv.certificates.reading import require_identity as require_identity
from symbiosis_priv.certificates.reading import tenant_name as tenant_name
from symbiosis_priv.certificates.requests import Request as Request
from symbiosis_priv.certificates.requests import create_request as create_request
from symbiosis_priv.certificates.requests import load_request as load_request
from symbiosis_priv.certificates.requests import sign_request as sign_request
