"""Serves a helper's connection: it carries blocks of relayed effects to the executor, and nothing else.

The checks of a block come in this order: the header is a `Deposit`; the tenant's permit names the helper; group, rows
and the announced payload fit the model and the limits; the tenant's quota allows the block; the tenant's share of the
memory has room. Only then is memory allocated and the payload read. The block is kept if the helper's key has signed
it.
"""

from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from provider import logs
from provider.gateway.admission import Slot, check_shape, refuse_bad
from provider.gateway.credentials import HelperIdentity
from provider.gateway.frames import FrameLoop, GatewayState
from provider.gateway.usage import UsageCounts
from provider.refusal import Refusal
from symbiosis_priv.certificates.reading import is_signed
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import statement
from symbiosis_priv.network.stream import FrameStream
from symbiosis_priv.network.tls import TenantIdentity

log = logs.EventLog(__name__)


class DepositConnection(FrameLoop[wire.Deposit]):
    """Serves one helper's connection, in its own thread.

    Args:
        helper, key: the helper, and the key of its certificate.
        executor: `fingerprint` of the certificate that this provider has shown on the connection.
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
        super().__init__(stream, decode=wire.decode_deposit, party=helper, state=state, slot=slot, refusal=refusal)
        self._helper, self._key, self._executor = helper, key, executor
        self._tenant: TenantIdentity | None = None  # has permitted the current block

    def _count_refusal(self, refusal: Refusal) -> None:
        log.often("block_refused", helper=str(self._helper), code=refusal.code, detail=refusal.detail)
        if self._tenant is not None:
            counts = UsageCounts(refused=1, bytes_received=self._frames.received)
            self._state.usage.count(self._tenant, "executor", counts)

    def _answer(self, deposit: wire.Deposit) -> None:
        state, self._tenant = self._state, None
        self._tenant = tenant = state.permits.tenant_of(deposit.permit, helper=self._helper.fingerprint)
        if deposit.arithmetic != "ring" or not deposit.rows:
            refuse_bad("a block has rows of a ring")
        _, outputs = check_shape(deposit, config=state.config, manifest=state.manifest, served=state.served)
        size = deposit.encoding.size(deposit.rows, outputs)
        self._frames.expect_payload(size)
        with (
            state.quotas.admitted(tenant, rows=deposit.rows, work=0, blocks_of=self._helper),
            state.blocks.arriving(tenant, deposit, helper=self._helper.fingerprint, size=size) as block,
        ):
            payload = np.empty(size, dtype=np.uint8).data
            self._frames.read(payload)
            message = statement(deposit, permit=deposit.permit, executor=self._executor, payload=payload)
            if not is_signed(self._key, message, deposit.signature):
                raise Refusal(wire.ErrorCode.REFUSED, "the block is not signed by the key of the helper's certificate")
            state.blocks.keep(tenant, block, payload)
        self._tenant = None
        state.usage.count(tenant, "executor", UsageCounts(bytes_received=size))
        self._frames.send(wire.encode(wire.Deposited(block=deposit.nonce)))
