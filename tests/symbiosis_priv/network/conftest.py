"""Fixture with TLS contexts for the tests of this folder."""

import ssl
from typing import Any

import pytest

from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.network import tls
from tests.symbiosis_priv.network.pairs import Contexts


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    keys = tmp_path_factory.mktemp("keys")
    authority = create_authority(keys)
    server, other = (
        issue(keys, authority=authority, kind=Kind.PROVIDER, name=name, hosts=["localhost"])
        for name in ("server", "other")
    )
    tenant = issue(keys, authority=authority, kind=Kind.TENANT, name="tenant")

    def client(pin: Any) -> ssl.SSLContext:
        return tls.client_context(certificate=tenant.certificate, key=tenant.key, pins=[pin.certificate])

    return Contexts(
        tls.server_context(certificate=server.certificate, key=server.key, tenant_authority=authority.certificate),
        client(server),
        client(other),
    )
