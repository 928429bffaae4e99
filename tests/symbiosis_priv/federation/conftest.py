"""A valid federation.toml, and certificates for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from symbiosis_priv.certificates.issuing import issue, issue_to_key
from symbiosis_priv.certificates.pem import certificate_pem
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.system.toml import toml_table

Write = Callable[..., Path]


DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates of three providers, and a second one for the first one's key."""
    folder = tmp_path_factory.mktemp("federation") / "keys"
    alpha, *_ = (issue(folder, authority=None, kind=Kind.PROVIDER, name=name) for name in ("alpha", "beta", "gamma"))
    key = alpha.private_key()
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    again = issue_to_key(
        key.public_key(), signer=key, kind=Kind.PROVIDER, name="alpha", hosts=(), days=9, operator=None
    )
    (folder / "alpha-next.pem").write_bytes(certificate_pem(again))
    return folder


@pytest.fixture
def write(keys: Path) -> Write:
    """`write(...)` writes a valid federation.toml beside `keys`, with changes of its tables or its providers."""

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
