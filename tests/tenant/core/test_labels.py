"""Known answers of every key that is derived from a secret: no two keys are one, and no change alters them unnoticed.

Keystreams are made by tenants and helpers of different releases, so these answers are part of the protocol.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tenant
from symbiosis_priv.arithmetic.keystream import Seed, mask_key
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.network.hybrid import Sealing, connection_key
from tenant.core.blame import BlameKeys
from tenant.core.pads import SessionSecret
from tenant.core.verifier import VerificationKeys
from tenant.preparation.keys import mac

SECRET = bytes(range(32))
FOURTH = GroupIndex(4)
ROOT = Path(tenant.__file__).parents[1]


def helper_seed() -> bytes:
    with mock.patch("secrets.token_bytes", lambda size: SECRET[:size]):
        return SessionSecret().seed_for("one", "its key")


def connection() -> bytes:
    share, answer = wire.KeyShare(share=bytes(1216)), wire.KeyAnswer(share=bytes(1120))
    return connection_key(SECRET, share, answer, bytes(12))


def sealed_seed() -> bytes:
    place: dict[str, Any] = {"nonce": bytes(16), "group": 3, "direction": "forward", "arithmetic": "ring", "rows": 5}
    return Sealing(SECRET).seal(wire.Effect(**place, seed=Seed(SECRET), first_row=7)).seed


def check_column() -> list[int]:
    """R, which the identity matrix does not change."""
    keys = VerificationKeys(SECRET)
    keys.add(FOURTH, torch.eye(2, dtype=torch.int16))
    column: list[int] = keys.products[FOURTH, FORWARD].tolist()
    return column


def column_of_experts() -> list[int]:
    """R of a dense product of two experts, whose matrices are numbers."""
    keys = VerificationKeys(SECRET)
    keys.add_stack(FOURTH, torch.ones(2, 1, dtype=torch.int16), experts=2, transposed=False)
    column: list[int] = keys[FOURTH, FORWARD][0].values.tolist()
    return column


def blame_column() -> list[int]:
    keys = BlameKeys(SECRET, columns=1)
    keys.add(FOURTH, torch.eye(2, dtype=torch.int16), weight_bits=10)
    column: list[int] = keys.products[FOURTH, FORWARD].flatten().tolist()
    return column


PLACE = {"group_name": "layer.0", "direction": "forward"}
KNOWN: dict[str, tuple[Callable[[], bytes | list[int]], str | list[int]]] = {
    "helper": (helper_seed, "e10440d981c50545e003b373124c297b025c4bc6a7cb00bc36264de46fb8d3e2"),
    "mask": (
        lambda: mask_key(Seed(SECRET), **PLACE),
        "0284992f81adc3fb73f4056edc25acd286ce56d3422b3dd03fa921be0ea0e9fc",
    ),
    "connection": (connection, "136abf4e3254d1f34a1afd529262a4958501ffd04b686c48de76c345a6adfd13"),
    "seeds": (
        sealed_seed,
        "a12975329d49815edcef929d1f03989290a355f18f1d7b42539b6deb0cbabec702f530bcdff2c691009874d816225b5a",
    ),
    "effects": (
        lambda: bytes(Sealing(SECRET).cover(bytes(16), memoryview(bytes(16)))),
        "91a0e9e8a0e1d2e3219293edd11bb0a5",
    ),
    "check": (check_column, [1220035414777612680, 1281815671437598392]),
    "check experts": (column_of_experts, [403268441053321065, 1037766461579365793]),
    "verify": (blame_column, [1152205593, 153042273]),
    "mac": (
        lambda: mac(VerificationKeys(SECRET), "seal", "a"),
        "37544a95920ff72f09b04230bbf4cb41a897fd1ed82671d2198edd769c207e35",
    ),
}
OF_LWE = {"lwe matrix", "lwe secret", "lwe error"}
"""Labels whose keys `tests/tenant/masking/test_lwe.py` compares."""


@pytest.mark.parametrize("label", KNOWN)
def test_a_key_has_its_known_answer(label: str) -> None:
    make, expected = KNOWN[label]
    key = make()
    assert (key.hex() if isinstance(key, bytes) else key) == expected


def test_every_label_has_a_known_answer() -> None:
    """A new key needs a row in `KNOWN`."""
    found = set()
    for path in (
        path for package in ("symbiosis_priv", "provider", "tenant") for path in (ROOT / package).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("derive", "stream"):
                found |= {arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)}
    assert found == KNOWN.keys() | OF_LWE
