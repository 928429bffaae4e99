"""Whether a provider is there, is who it should be and serves the pinned model, and how far away it is."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable

import torch

from symbiosis_priv import wire
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.keystream import SEED_BYTES
from symbiosis_priv.ring import FORWARD
from tenant.channel import Channel, fresh_nonce
from tenant.notices import Notices

_ROUND_TRIPS = 20


def probe(peer: Peer, federation: Federation, *, timeout: float) -> float:
    """A provider's median round trip in seconds, once the channel has checked pin, role and digest."""
    channel = Channel(
        peer,
        certificate=federation.tenant_certificate,
        key=federation.tenant_key,
        model_digest=federation.model_digest,
        deadline_s=timeout,
        notices=Notices(option="--timeout"),
    )
    try:
        channel.welcome()
        ask = _empty_execute if peer.role == "executor" else _empty_effect
        return statistics.median(_seconds(ask, channel) for _ in range(_ROUND_TRIPS))
    finally:
        channel.close()


def _empty_execute(channel: Channel) -> None:
    request = wire.Execute(nonce=fresh_nonce(), group=0, direction=FORWARD, arithmetic="ring", rows=0)
    channel.request(request, torch.empty((0, 1), dtype=torch.int32, device="cpu"), outputs=1)


def _empty_effect(channel: Channel) -> None:
    seed = secrets.token_bytes(SEED_BYTES)
    request = wire.Effect(
        nonce=fresh_nonce(), group=0, direction=FORWARD, arithmetic="ring", rows=0, seed=seed, first_row=0
    )
    channel.request(request, None, outputs=1)


def _seconds(ask: Callable[[Channel], None], channel: Channel) -> float:
    start = time.perf_counter()
    ask(channel)
    return time.perf_counter() - start
