"""Liars of a relay: a helper that signs a wrong block, and an executor that subtracts something else than it hands out.

In each case the tenant must refuse the product, and must attribute the fault to the liar alone. The lies are planted in
providers of this process.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from provider.refusal import Refusal
from provider.relay.blocks import BlockStore, KeptBlock
from provider.relay.links import _block_of
from provider.relay.matrices import make_block, without_blocks
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import VerificationError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from threat_model.lab import Lab

_PATIENCE_S: Final = 60.0  # a busy executor misses a block, and then nothing is relayed for some seconds
_GATEWAY: Final = "provider.gateway.connection"
_fetch = BlockStore.fetch


def attack_relays(lab: Lab, preparation: Preparation) -> dict[str, bool]:
    """Tell every lie. Returns, for each, True if the product was refused and only the liar was named."""
    found = {}
    for name, (liar, lies) in _lies().items():
        with ExitStack() as stack:
            for target, lie in lies.items():
                stack.enter_context(mock.patch(target, lie))
            found[name] = _blamed(lab, preparation) == liar
    return found


def _blamed(lab: Lab, preparation: Preparation) -> str | None:
    """The providers that a refused product names; None if a relayed product was accepted."""
    options = SessionOptions(masking="pad", deadline_s=20, pool_memory=0)
    session = Session(load_federation(lab.relayed), preparation, options=options)
    rows = torch.arange(3 * preparation.facts[0].inputs(FORWARD), dtype=torch.int32).view(3, -1) % 97 - 48
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while not session.ledger().rows_relayed and time.monotonic() < deadline:
            session.product(GroupIndex(0), FORWARD, rows)
    except VerificationError as error:
        return error.provider
    finally:
        session.close()
    return None


def _lies() -> Mapping[str, tuple[str, Mapping[str, Callable[..., Any]]]]:
    """For each lie: the lying provider, and the functions that replace its code."""
    subtracts: dict[str, Callable[..., Any]] = {f"{_GATEWAY}.without_blocks": _subtracts_other_rows}
    fetch = "provider.relay.blocks.BlockStore.fetch"
    return {
        "a helper signs a wrong block": ("helper", {f"{_GATEWAY}.make_block": _wrong_block}),
        "a helper signs more rows than were ordered": (
            "helper",
            {f"{_GATEWAY}.make_block": _longer_block, "provider.relay.links._block_of": _longer_binding},
        ),
        "an executor subtracts other rows": ("executor", subtracts),
        "an executor withholds the block": ("executor", {**subtracts, fetch: _withholds}),
        "an executor's block is not signed": ("executor", {**subtracts, fetch: _changed(signature=bytes(64))}),
        "an executor's block is another one": ("executor", {**subtracts, fetch: _changed(nonce=bytes(16))}),
        "an executor changes the block": ("executor", {**subtracts, fetch: _changed()}),
    }


def _wrong_block(effect: memoryview, request: wire.Effect, entry: GroupEntry) -> memoryview:
    block = bytearray(make_block(effect, request, entry))
    block[0] ^= 1
    return memoryview(block)


def _longer_block(effect: memoryview, request: wire.Effect, entry: GroupEntry) -> memoryview:
    block = _wrong_block(effect, request, entry)
    return memoryview(bytes(block) + bytes(len(block) // request.rows))


def _longer_binding(request: wire.Effect) -> wire.Binding:
    block = _block_of(request)
    return msgspec.structs.replace(block, rows=block.rows + 1)


def _subtracts_other_rows(
    answer: memoryview, parts: Iterable[tuple[wire.BlockRows, memoryview]], request: wire.Execute
) -> NDArray[np.int32]:
    return np.ascontiguousarray(without_blocks(answer, parts, request)[::-1])


def _withholds(*_: object) -> KeptBlock:
    raise Refusal(wire.ErrorCode.REFUSED, "there is no such block")


def _changed(**fields: bytes) -> Callable[..., KeptBlock]:
    """Returns a `fetch` that changes fields of the block's header, or the payload if no field is named."""

    def fetch(store: BlockStore, tenant: Any, block: bytes) -> KeptBlock:
        kept = _fetch(store, tenant, block)
        header = msgspec.structs.replace(kept.header, **fields)
        assert kept.payload is not None
        payload = kept.payload if fields else memoryview(bytes(kept.payload)[::-1])
        return KeptBlock(header, kept.helper, kept.size, payload)

    return fetch
