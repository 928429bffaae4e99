"""Certificates for mutual TLS.

A tenant pins its provider's certificate, so a provider needs no authority and its certificate may be self-signed. A
provider accepts tenants whose certificates its tenant authority has issued. The certificate contains its kind and name.
A provider's certificate has the usages `serverAuth` and `clientAuth` (a helper connects to executors) and the
provider's hosts. A tenant's certificate has the usage `clientAuth` and the URI `urn:symbiosis-priv:tenant:<name>`. So
neither is accepted in place of the other.

    naming      checks the names of parties
    pem         reads and writes files of certificates and keys
    reading     reads certificates and keys: kind, names, validity, signatures; warns of what expires
    issuing     creates certificates of authorities, providers and tenants, rotates them, and signs requests
    revocation  reads and writes the list of revoked certificates
    keys_cli    `symbiosis-priv keys`
"""
