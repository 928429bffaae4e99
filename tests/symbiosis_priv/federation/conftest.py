"""A valid federation.toml, and certificates for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from symbiosis_priv.certificates.issuing import issue
from symbiosis_priv.certificates.reading import Identity, Kind, load_certificates
from symbiosis_priv.system.toml import toml_table

Write = Callable[..., Path]


DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates of three providers, and a second one for the first one's key."""
    folder = tmp_path_factory.mktemp("federation") / "keys"
    for name in ("alpha", "beta", "gamma"):
        issue(folder, authority=None, kind=Kind.PROVIDER, name=name)
    (folder / "alpha-next.pem").write_bytes(renewed(folder / "alpha"))
    return folder


def renewed(pair: Path) -> bytes:
    """Another certificate for a provider's own key, as PEM."""
    key = Identity(pair.with_suffix(".pem"), pair.with_suffix(".key")).private_key()
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    old = load_certificates(pair.with_suffix(".pem"))[0]
    builder = x509.CertificateBuilder(old.issuer, old.subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def write(keys: Path) -> Write:
    """`write(...)` writes a valid federation.toml beside `keys`, with changed tables or changed entries of its
    providers."""

    def write(
        *,
        model: Any = None,
        alpha: Any = None,
        beta: Any = None,
        gamma: Any = None,
        pads: Any = None,
        companies: Sequence[Any] = (),
    ) -> Path:
        one = {"name": "alpha", "operator": "A", "role": "executor", "address": "a:1", "certificate": "keys/alpha.pem"}
        two = {"name": "beta", "operator": "B", "role": "helper", "address": "b:1", "certificate": "keys/beta.pem"}
        three = {"name": "gamma", "operator": "C", "role": "helper", "address": "c:1", "certificate": "keys/gamma.pem"}
        path = keys.parent / "federation.toml"
        sections = [
            toml_table("[model]", **({"digest": DIGEST} | (model or {}))),
            toml_table("[tenant]", certificate="keys/alice.pem", key="~/alice.key"),
            toml_table("[[provider]]", **(one | (alpha or {}))),
            toml_table("[[provider]]", **(two | (beta or {}))),
        ]
        if gamma is not None:
            sections.append(toml_table("[[provider]]", **(three | gamma)))
        if pads is not None:
            sections.append(toml_table("[pads]", **pads))
        sections += [toml_table("[[company]]", **company) for company in companies]
        path.write_text("\n".join(sections), encoding="utf-8")
        return path

    return write
