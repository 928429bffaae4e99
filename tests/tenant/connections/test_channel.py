"""One connection: identical bytes until an answer comes, and no answer to another request is accepted."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis_priv import errors
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tenant.connections.channel import Channel, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, MaskedRows, mask
from tests.tenant.conftest import Identities, NewProvider
from tests.tenant.scripted import Heard, ScriptedProvider, frame, silent
from tests.waiting import until

WIDTH, OUTPUTS = 64, 128
NewChannel = Callable[..., Channel]


pytestmark = pytest.mark.usefixtures("sockets")


@pytest.fixture
def connect(identities: Identities, store: WeightStore) -> Iterator[NewChannel]:
    opened = []

    def make(provider: ScriptedProvider | Peer, *, deadline_s: float = 20.0, **options: Any) -> Channel:
        identity: Identity = options.pop("identity", identities.tenant)
        peer = provider if isinstance(provider, Peer) else provider.peer("executor")
        channel = Channel(
            peer,
            context=client_context(certificate=identity.certificate, key=identity.key, pins=peer.pins),
            model_digest=options.pop("digest", store.manifest().digest),
            deadline_s=deadline_s,
            **options,
        )
        opened.append(channel)
        return channel

    yield make
    for channel in opened:
        channel.close()


def execute(rows: int = 2) -> tuple[wire.Execute, MaskedRows]:
    request = wire.Execute(nonce=fresh_nonce(), group=0, direction="forward", arithmetic="ring", rows=rows)
    words = torch.randint(-(2**31), 2**31, (rows, WIDTH), dtype=torch.int32)
    return request, mask(words, UNMASKED_BY_CHOICE)


def ask(channel: Channel, rows: int = 2) -> Tensor:
    request, payload = execute(rows)
    return channel.request(request, payload, outputs=OUTPUTS)


def test_a_broken_connection_gets_identical_bytes_again(executor: ScriptedProvider, connect: NewChannel) -> None:
    """Before an answer, within its header, within its matrix: the tenant cannot know if the product was computed."""

    def leave_early(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes | None:
        whole = frame(reply, answer)
        cuts = [b"", whole[:5], whole[:40], whole[:-1]]
        attempt = len(executor.heard) - 1
        if attempt == len(cuts):
            return whole
        executor.say(cuts[attempt])
        return None

    executor.behaviour = leave_early
    channel = connect(executor)
    request, payload = execute()
    answer = channel.request(request, payload, outputs=OUTPUTS)
    assert torch.equal(answer, executor.product(executor.heard[-1]))
    assert len(executor.heard) == 5
    assert len({heard.header + heard.payload for heard in executor.heard}) == 1
    assert channel.traffic.round_trips == 1


@pytest.mark.parametrize("code", sorted(set(wire.ErrorCode) - wire.RETRYABLE))
def test_a_refusal_is_final(executor: ScriptedProvider, connect: NewChannel, code: wire.ErrorCode) -> None:
    executor.behaviour = lambda *heard: frame(wire.Failure(code=code, detail="no"))
    with pytest.raises(errors.ProviderError, match=f"answered {code}: no") as error:
        ask(connect(executor))
    assert error.value.code == code
    assert len(executor.heard) == 1


def damaged(reply: wire.Result, answer: Tensor) -> dict[str, tuple[bytes, type[Exception]]]:
    header = wire.encode(reply, payload_bytes=4 * answer.numel())
    body = bytes(wire.RING32.pack(answer))
    prefix = wire.PREFIX.size
    return {
        "magic": (b"HTTP" + header[4:] + body, errors.ProtocolError),
        "huge payload": (wire.PREFIX.pack(wire.MAGIC, 10, (1 << 32) - 1), errors.FrameTooLargeError),
        "garbage": (wire.PREFIX.pack(wire.MAGIC, 10, 0) + bytes(10), errors.ProtocolError),
        "a request": (wire.encode(wire.FetchHealth()), errors.ProtocolError),
        "short": (wire.encode(reply, payload_bytes=len(body) - 4) + body[:-4], errors.ProtocolError),
        "long": (wire.encode(reply, payload_bytes=len(body) + 4) + body + bytes(4), errors.FrameTooLargeError),
        "payload on a failure": (
            wire.encode(wire.Failure(code=wire.ErrorCode.INTERNAL, detail=""), payload_bytes=4) + bytes(4),
            errors.ProtocolError,
        ),
        "flipped header": (header[:prefix] + bytes(b ^ 0x55 for b in header[prefix:]) + body, errors.ProtocolError),
    }


RESULT = wire.Result(nonce=bytes(wire.NONCE_BYTES), group=0, direction="forward", arithmetic="ring", rows=2)


@pytest.mark.parametrize("how", damaged(RESULT, torch.zeros(2, OUTPUTS, dtype=torch.int32)))
def test_a_damaged_frame_is_refused_and_the_next_request_works(
    executor: ScriptedProvider, connect: NewChannel, how: str
) -> None:
    expected: list[type[Exception]] = []

    def once(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        if expected:
            return frame(reply, answer)
        data, error = damaged(reply, answer)[how]
        expected.append(error)
        return data

    executor.behaviour = once
    channel = connect(executor)
    with pytest.raises(errors.ProtocolError) as error:
        ask(channel)
    assert isinstance(error.value, expected[0])
    assert ask(channel).shape == (2, OUTPUTS)
    assert len(executor.hellos) == 2  # the start of the next frame is unknown


@pytest.mark.parametrize("fate", ["silent", "gone", "mute"])
def test_a_provider_that_does_not_answer_is_named_during_the_wait(
    executor: ScriptedProvider,
    connect: NewChannel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fate: str,
) -> None:
    """Silent after the request, absent, or accepting connections and sending nothing."""
    monkeypatch.setattr("tenant.connections.notices.FIRST_S", 0.1)
    monkeypatch.setattr("symbiosis_priv.network.stream.SLICE_S", 0.1)
    executor.behaviour = silent()
    peer = executor.peer("executor")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        if fate == "gone":
            executor.close()
        elif fate == "mute":
            peer = replace(peer, port=mute.getsockname()[1])
        channel = connect(peer, deadline_s=0.6)
        with pytest.raises(errors.DeadlineExceededError, match=r"deadline_s=\.\.\.\) waits longer"):
            ask(channel)
    why = {"silent": "it has not answered yet", "gone": "cannot reach", "mute": "it has not finished the TLS handshake"}
    (message,) = caplog.messages
    assert f"waiting for executor '{peer.name}' at 127.0.0.1:{peer.port} since " in message
    assert why[fate] in message


def test_closing_wakes_a_request_of_another_thread(executor: ScriptedProvider, connect: NewChannel) -> None:
    asked = threading.Event()
    executor.behaviour = silent(asked)
    channel = connect(executor, deadline_s=60.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ask, channel)
        assert asked.wait(20)
        channel.close()
        error = waiting.exception(20)
    assert isinstance(error, errors.ConnectionLostError)
    assert "closed on this side" in str(error)
    with pytest.raises(errors.ConnectionLostError, match="closed on this side"):
        ask(channel)
    assert len(executor.hellos) == 1


def test_an_attempt_is_not_made_at_a_provider_that_may_have_other_limits_now(
    executor: ScriptedProvider, connect: NewChannel
) -> None:
    """The size of a request is that of the limits which the provider announced for the open connection."""
    channel, (request, payload) = connect(executor), execute()
    channel.connect(deadline=time.monotonic() + 20)
    executor.hang_up()
    until(lambda: channel.probe() is None)
    with pytest.raises(errors.ConnectionLostError):
        channel.attempt(request, payload, outputs=OUTPUTS, deadline=time.monotonic() + 20)
    assert executor.heard == []


def test_nothing_is_sent_to_a_provider_that_is_quarantined_while_it_is_waited_for(
    executor: ScriptedProvider, connect: NewChannel
) -> None:
    def permit(peer: Peer, rows: MaskedRows | None) -> None:
        if executor.hellos:
            raise errors.QuarantinedError("quarantined while a connection was made")

    with pytest.raises(errors.QuarantinedError):
        ask(connect(executor, permit=permit))
    assert executor.heard == []


def test_a_certificate_that_is_not_pinned_is_refused_at_once(new_provider: NewProvider, connect: NewChannel) -> None:
    """A wrong certificate at the right address. Waiting would not help, so nothing is tried again."""
    impostor, real = new_provider(), new_provider()
    peer = impostor.peer("executor")
    pinned = Peer(peer.name, peer.operator, peer.role, peer.host, peer.port, real.certificate)
    with pytest.raises(errors.CertificateError, match="refused"):
        ask(connect(pinned))
    assert impostor.hellos == []


def test_an_executor_from_a_registry_is_not_reached_on_this_machine(
    executor: ScriptedProvider, connect: NewChannel
) -> None:
    with pytest.raises(errors.TransportError, match="not an address"):
        ask(connect(replace(executor.peer("executor"), remote_only=True), deadline_s=0.5))
    assert executor.hellos == []


def test_an_unknown_tenant_gets_a_clear_error(
    executor: ScriptedProvider, connect: NewChannel, identities: Identities, tmp_path: Any
) -> None:
    stranger = type(identities)(tmp_path).tenant
    with pytest.raises(errors.CertificateError, match="without a valid certificate"):
        ask(connect(executor, identity=stranger))
    assert executor.hellos == []


def test_an_endless_name_lookup_ends_at_the_deadline(
    executor: ScriptedProvider, connect: NewChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name server may belong to the name's owner, so the wait for its answer needs a deadline."""
    over = threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        over.wait(30)
        raise OSError("nobody knows")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    began = time.monotonic()
    try:
        with pytest.raises(errors.ConnectionLostError, match="its name is being looked up"):
            connect(executor).connect(deadline=began + 0.2)
        assert time.monotonic() - began < 20
    finally:
        over.set()
