"""Certificates for mutual TLS.

A tenant pins its provider's certificate, so a provider needs no authority and its certificate may be self-signed. A
provider accepts tenants whose certificates its tenant authority has issued. The certificate contains its kind and name:
a provider's certificate has the usage `serverAuth` and the provider's hosts, a tenant's certificate has the usage
`clientAuth` and the URI `urn:symbiosis-priv:tenant:<name>`. So neither is accepted in place of the other.

    reading      reads certificates and keys: kind, names, validity
    issuing      creates certificates of authorities, providers and tenants, and rotates them
    requests     creates and signs certificate requests
    revocation   reads and writes the list of revoked certificates
    alerts       logs warnings about readable key files and certificates that expire soon

The functions that other packages use are imported here.
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
