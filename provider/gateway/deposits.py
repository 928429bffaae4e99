"""Serves a helper's connection: it carries blocks of relayed effects to the executor, and nothing else.

The checks of a block come in this order: the header is a `Deposit`; the tenant's permit names the helper; group, rows
and the announced payload fit the model and the limits; the tenant's share of the memory has room. Only then is memory
allocated and the payload read. The block is kept if the helper's key has signed it.
"""

from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from provider import logs
from provider.gateway.connection import GatewayState
from provider.gateway.credentials import HelperIdentity
from provider.gateway.frames import Frames, refusal_of
from provider.gateway.shapes import bad, check_shape
from provider.gateway.slots import Slot
from provider.gateway.usage import Counts
from provider.refusal import Refusal
from symbiosis_priv.certificates.signing import is_signed
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.network import wire
from symbiosis_priv.network.blocks import statement
from symbiosis_priv.network.stream import FrameStream

log = logs.EventLog(__name__)


class DepositConnection:
    """Serves one helper's connection, in its own thread.

    Args:
        stream: the connection.
        helper, key: the helper, and the key of its certificate.
        executor: `fingerprint` of the certificate that this provider has shown on the connection.
        state: the state that all connections share.
        slot: the slot of the connection; records when the connection is idle.
        refusal: called for every block; returns a refusal once the helper's certificate is not accepted any more.
    """

    def __init__(
        self,
        stream: FrameStream,
        *,
        helper: HelperIdentity,
        key: PublicKeyTypes,
        executor: str,
        state: GatewayState,
        slot: Slot,
        refusal: Callable[[], Refusal | None],
    ) -> None:
        self._helper, self._key, self._executor = helper, key, executor
        self._state = state
        self._frames = Frames(stream, state.config.limits)
        self._slot = slot
        self._refusal = refusal

    def serve(self) -> None:
        """Take blocks until the helper leaves or the provider stops.

        Raises:
            ProtocolError: a frame was broken, or not a block; the helper has received a `Failure`.
            OSError, TransportError: the connection was lost, or the helper is too slow.
        """
        while not self._state.stopping.is_set() and self._next_frame():
            self._slot.end_request()

    def _next_frame(self) -> bool:
        if not self._frames.wait():
            return False
        self._slot.begin_request()
        try:
            deposit = wire.decode_deposit(self._frames.read_header())
        except ProtocolError as error:
            self._frames.refuse(refusal_of(error))
            raise
        try:
            if refused := self._refusal():
                raise refused
            self._keep(deposit)
        except Refusal as refusal:
            log.often("block_refused", helper=str(self._helper), code=refusal.code, detail=refusal.detail)
            self._frames.discard()
            self._frames.refuse(refusal)
            self._state.stopping.wait(self._state.quotas.pause(self._helper, size=self._frames.unread))
            return refusal.code != wire.ErrorCode.REVOKED
        return True

    def _keep(self, deposit: wire.Deposit) -> None:
        state = self._state
        tenant = state.permits.tenant_of(deposit.permit, helper=self._helper.fingerprint)
        if deposit.arithmetic != "ring" or not deposit.rows:
            bad("a block has rows of a ring")
        _, outputs = check_shape(deposit, config=state.config, manifest=state.manifest, served=state.served)
        size = deposit.encoding.size(deposit.rows, outputs)
        self._frames.expect_payload(size)
        with state.blocks.arriving(tenant, deposit, helper=self._helper.fingerprint, size=size) as block:
            payload = np.empty(size, dtype=np.uint8).data
            self._frames.read(payload)
            message = statement(deposit, permit=deposit.permit, executor=self._executor, payload=payload)
            if not is_signed(self._key, message, deposit.signature):
                raise Refusal(wire.ErrorCode.REFUSED, "the block is not signed by the key of the helper's certificate")
            state.blocks.keep(tenant, block, payload)
        state.usage.count(tenant, "executor", Counts(bytes_received=size))
        state.usage.settle()
        self._frames.send(wire.encode(wire.Deposited(block=deposit.nonce)))
