"""Messages survive encoding and decoding, and all other data is refused."""

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import example, given, strategies as st
from hypothesis.strategies import SearchStrategy

from symbiosis_priv.arithmetic.keystream import Seed
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.errors import FrameTooLargeError, ProtocolError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.network import wire
from tests import drawn
from tests.builds import BUILDS, build
from tests.cases import cases, table
from threat_model.conformance.frames import MalformedFrame, good_requests, malformed_frames

counts = st.integers(0, 2**63 - 1)
texts = st.text(max_size=512).filter(lambda text: len(text.encode()) <= 2048)
seeds = st.binary(min_size=32, max_size=32)
bindings: dict[str, SearchStrategy[Any]] = {
    "nonce": st.binary(min_size=wire.NONCE_BYTES, max_size=wire.NONCE_BYTES),
    "group": st.integers(0, (1 << 20) - 1),
    "direction": st.sampled_from(DIRECTIONS),
    "arithmetic": st.sampled_from(get_args(wire.Arithmetic)),
    "rows": st.integers(0, wire.MAX_ROWS),
    "counts": st.none() | st.lists(st.integers(0, wire.MAX_ROWS), max_size=9).map(tuple),
}
executes = st.builds(wire.Execute, **bindings)
effects = st.builds(wire.Effect, **bindings, seed=seeds, first_row=st.integers(0, 2**62 - 1))
hellos = st.builds(wire.Hello, version=counts, role=st.sampled_from(get_args(wire.Role)), model_digest=texts)
requests: SearchStrategy[wire.Request] = (
    executes
    | effects
    | hellos
    | st.builds(wire.FetchHealth)
    | st.builds(wire.KeyShare, share=st.binary(min_size=1216, max_size=1216))
)
replies: SearchStrategy[wire.Reply] = (
    st.builds(wire.Result, **bindings)
    | st.builds(wire.KeyAnswer, share=st.binary(min_size=1120, max_size=1120))
    | st.builds(
        lambda groups, **fields: wire.Welcome(first_group=min(groups), end_group=max(groups), **fields),
        groups=st.lists(st.integers(0, wire.MAX_GROUPS), min_size=2, max_size=2, unique=True),
        version=counts,
        model_digest=texts,
        max_rows=bindings["rows"],
        max_payload=st.integers(4, wire.MAX_PAYLOAD),
    )
    | st.builds(
        wire.HealthReport,
        name=texts.map(lambda text: text[:64]),
        model_digest=texts.map(lambda text: text[:64]),
        time=st.floats(0, 1e12),
        uptime_s=st.floats(0, 1e12),
        groups=counts,
        groups_loaded=counts,
        requests=counts,
        connections=counts,
    )
    | st.builds(wire.Failure, code=st.sampled_from(wire.ErrorCode), detail=texts)
)

EXECUTE, EFFECT = good_requests().values()
BINDING = {name: value for name, value in EXECUTE.items() if name != "type"}


def split(frame: bytes, *, payload: int) -> bytes:
    """The header of a frame, after its prefix was checked."""
    header_bytes, payload_bytes = wire.decode_prefix(frame[: wire.PREFIX.size], max_payload=payload)
    header = frame[wire.PREFIX.size :]
    assert (header_bytes, payload_bytes) == (len(header), payload)
    return header


DECODED: dict[Callable[[bytes], wire.Message], SearchStrategy[Any]] = {
    wire.decode_request: requests,
    wire.decode_reply: replies,
}


@given(st.data(), st.sampled_from([*DECODED]), st.integers(0, wire.MAX_PAYLOAD))
def test_a_message_is_decoded_where_it_belongs_and_nowhere_else(
    data: st.DataObject, decode: Callable[[bytes | memoryview], wire.Message], payload: int
) -> None:
    message = data.draw(DECODED[decode])
    header = split(wire.encode(message, payload_bytes=payload), payload=payload)
    assert decode(header) == decode(memoryview(header)) == message
    for other in DECODED.keys() - {decode}:
        with pytest.raises(ProtocolError):
            other(header)


def test_the_most_counts_fit_a_header_and_more_are_refused() -> None:
    most: dict[str, Any] = {
        **{"nonce": bytes(16), "group": wire.MAX_GROUPS - 1, "direction": "backward", "arithmetic": "ring"},
        **{"rows": wire.MAX_ROWS, "counts": (wire.MAX_ROWS,) * wire.MAX_EXPERTS, "ring_bits": 24},
    }
    for request in (wire.Execute(**most), wire.Effect(**most, seed=Seed(bytes(32)), first_row=(1 << 62) - 1)):
        assert wire.decode_request(wire.encode(request)[wire.PREFIX.size :]) == request
    for counts in ([0] * (wire.MAX_EXPERTS + 1), [-1], [wire.MAX_ROWS + 1], [0.5]):
        with pytest.raises(ProtocolError, match="counts"):
            wire.decode_request(msgspec.msgpack.encode(EXECUTE | {"counts": counts}))


@pytest.mark.parametrize("document", [EXECUTE, EFFECT], ids=["execute", "effect"])
def test_a_request_without_options_has_the_bytes_of_the_older_protocol(document: dict[str, Any]) -> None:
    request = wire.decode_request(msgspec.msgpack.encode(document))
    assert isinstance(request, wire.Binding)
    assert wire.encode(request)[wire.PREFIX.size :] == msgspec.msgpack.encode(document)
    answer = wire.encode(wire.Result.answering(request))[wire.PREFIX.size :]
    assert answer == msgspec.msgpack.encode({"type": "result", **BINDING})


def test_the_version_of_a_hello_is_the_lowest_that_has_what_the_tenant_uses() -> None:
    assert wire.version_of(32) == wire.VERSION
    assert wire.version_of(24) == wire.NARROW_VERSION
    assert {wire.version_of(bits, role="helper") for bits in (24, 32)} == {wire.HYBRID_VERSION}


def test_a_reply_with_other_counts_does_not_match_the_request() -> None:
    request = wire.Execute(**BINDING, counts=(1, 2))
    assert wire.Result.answering(request).answers(request)
    for counts in (None, (2, 1), (1, 2, 0)):
        assert not wire.Result(**BINDING, counts=counts).answers(request)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
documents = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
fields = st.sampled_from(sorted(EFFECT)) | st.text(max_size=4)
mutants = st.builds(lambda a, b: a | b, st.sampled_from([EXECUTE, EFFECT, {}]), st.dictionaries(fields, documents))


@given(st.binary(max_size=200) | documents.map(msgspec.msgpack.encode) | mutants.map(msgspec.msgpack.encode))
@example(b"")
@example(b"\x82\xa1x" + b"\x91" * 4000)  # deep nesting in an unknown field
@example(b"\x84\xa4type\xa5hello\xa7version\x01\xa4role\xa8executor\xacmodel_digest\xa2\xff\xff")  # no UTF-8
def test_a_header_is_a_message_or_a_protocol_error(header: bytes) -> None:
    for decode in DECODED:
        try:
            message = decode(header)
        except ProtocolError:
            continue
        assert decode(wire.encode(message)[wire.PREFIX.size :]) == message


@given(requests, st.data())
def test_damaged_headers_are_messages_or_protocol_errors(message: wire.Request, data: st.DataObject) -> None:
    header = bytearray(wire.encode(message)[wire.PREFIX.size :])
    with pytest.raises(ProtocolError):
        wire.decode_request(bytes(header[: data.draw(st.integers(0, len(header) - 1))]))  # truncated
    with pytest.raises(ProtocolError):
        wire.decode_request(bytes(header) + data.draw(st.binary(min_size=1, max_size=8)))  # trailing
    header[data.draw(st.integers(0, len(header) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        changed = wire.decode_request(bytes(header))
    except ProtocolError:
        return
    assert changed != message


@given(
    st.binary(max_size=24) | st.builds(wire.PREFIX.pack, st.just(wire.MAGIC), *[st.integers(0, 2**32 - 1)] * 2),
    st.integers(0, wire.MAX_PAYLOAD),
)
@example(wire.PREFIX.pack(wire.MAGIC, 0, 0), 0)
@example(wire.PREFIX.pack(wire.MAGIC, 1, 1001), 1000)
@example(wire.PREFIX.pack(wire.MAGIC, wire.MAX_HEADER, 1000), 1000)
@example(wire.PREFIX.pack(wire.MAGIC, wire.MAX_HEADER + 1, 1000), 1000)
def test_a_prefix_is_lengths_within_the_limits_or_a_protocol_error(prefix: bytes, limit: int) -> None:
    error: type[ProtocolError] = ProtocolError
    if len(prefix) == wire.PREFIX.size and prefix[:4] == wire.MAGIC:
        _, header, payload = wire.PREFIX.unpack(prefix)
        if 0 < header <= wire.MAX_HEADER and payload <= limit:
            assert wire.decode_prefix(prefix, max_payload=limit) == (header, payload)
            return
        error = FrameTooLargeError
    with pytest.raises(error):
        wire.decode_prefix(prefix, max_payload=limit)


def test_the_layout_of_a_frame() -> None:
    """Twelve bytes, little-endian: the format for other implementations."""
    frame = wire.encode(wire.FetchHealth(), payload_bytes=0x01020304)
    header = msgspec.msgpack.encode({"type": "health"})
    assert frame == b"SYM1" + bytes([len(header), 0, 0, 0]) + bytes([4, 3, 2, 1]) + header


@pytest.mark.parametrize("frame", malformed_frames(), ids=lambda frame: frame.name)
def test_unknown_fields_types_and_values_are_refused(frame: MalformedFrame) -> None:
    for good in (EXECUTE, EFFECT):
        assert wire.decode_request(msgspec.msgpack.encode(good))
    header = frame.data[wire.PREFIX.size :]

    def parse() -> wire.Request:
        size, _ = wire.decode_prefix(frame.data[: wire.PREFIX.size], max_payload=wire.MAX_PAYLOAD)
        return wire.decode_request(header[:size])

    with pytest.raises(ProtocolError):
        parse()


@given(effects)
def test_a_seed_is_not_shown(effect: wire.Effect) -> None:
    shown = f"{effect} {effect!r} {[effect]}"
    assert repr(effect.seed)[2:-1] not in shown


@cases(__file__, "refused_replies")
def test_replies_with_values_that_make_no_sense_are_refused(reply: str, changes: dict[str, Any]) -> None:
    good = table(__file__, "replies")[reply]
    assert wire.decode_reply(msgspec.msgpack.encode(good))
    with pytest.raises(ProtocolError):
        wire.decode_reply(msgspec.msgpack.encode(good | changes))


def test_no_message_has_a_field_for_a_secret() -> None:
    """Rule 5. A new field must be justified here."""
    binding = {"nonce", "group", "direction", "arithmetic", "rows", "counts", "ring_bits"}
    fields = {m.__name__: set(m.__struct_fields__) for m in (*get_args(wire.Request), *get_args(wire.Reply))}
    assert fields == {
        "Hello": {"version", "role", "model_digest"},
        "KeyShare": {"share"},  # public keys
        "KeyAnswer": {"share"},  # a ciphertext and a public key
        "Execute": binding,
        "Effect": binding | {"seed", "first_row"},
        "FetchHealth": set(),
        "Welcome": {"version", "model_digest", "first_group", "end_group", "max_rows", "max_payload"},
        "Result": binding | {"limit"},
        "HealthReport": {
            "name", "model_digest", "time", "uptime_s", "groups", "groups_loaded", "requests", "connections",
        },
        "Failure": {"code", "detail", "limit"},
    }  # fmt: skip


def test_a_frame_beyond_the_limits_is_not_written() -> None:
    with pytest.raises(FrameTooLargeError):
        wire.encode(wire.Failure(code=wire.ErrorCode.INTERNAL, detail="x" * wire.MAX_HEADER))
    with pytest.raises(FrameTooLargeError):
        wire.encode(wire.FetchHealth(), payload_bytes=wire.MAX_PAYLOAD + 1)


@given(st.data(), drawn.widths(), testing.row_counts())
def test_matrices_round_trip_without_a_copy(data: st.DataObject, width: int, count: int) -> None:
    encoding = wire.encoding_of(data.draw(st.sampled_from(get_args(wire.Arithmetic))))
    if encoding == wire.RING32:
        matrix = data.draw(testing.ring_rows(width=width, count=count))
    else:
        matrix = data.draw(testing.float_rows(width=width, count=count, dtypes=[torch.float32]))
    assert matrix.dtype == encoding.dtype

    sent = encoding.pack(matrix)
    assert sent.format == "B"
    assert sent.nbytes == encoding.size(count, width) == 4 * matrix.numel()
    received = bytearray(sent)
    got = encoding.unpack(received, rows=count)
    assert got.dtype == matrix.dtype
    assert len(got) == count
    if not count:
        return
    assert torch.equal(got, matrix)
    matrix[0, 0] = 77  # the bytes are the tensor's own,
    assert int.from_bytes(sent[:4], "little") == matrix.view(torch.int32)[0, 0]
    received[:4] = sent[:4]  # and so are those of the received buffer
    assert got[0, 0] == 77
    assert encoding.unpack(memoryview(received), rows=count).data_ptr() == got.data_ptr()
    again = torch.frombuffer(sent, dtype=matrix.dtype)
    assert again.data_ptr() == matrix.data_ptr()


@given(st.data(), drawn.widths(), testing.row_counts())
def test_narrow_payloads_hold_the_low_24_bits(data: st.DataObject, width: int, count: int) -> None:
    """Payloads can also be unpacked in place, in the memory of the matrix."""
    matrix = data.draw(testing.ring_rows(width=width, count=count))
    expected = b"".join((item & 0xFFFFFF).to_bytes(3, "little") for item in matrix.view(-1).tolist())
    assert len(expected) == wire.RING24.size(count, width)
    for name in BUILDS:
        into = torch.empty_like(matrix)
        with build(name):
            sent = wire.RING24.pack(matrix)
            got = wire.RING24.unpack(bytearray(sent), rows=count)
            wire.RING24.payload_space(into.numpy())[:] = sent
            wire.RING24.unpack_in_place(into.numpy())
        assert bytes(sent) == expected
        assert torch.equal(into, matrix << 8 >> 8)
        assert torch.equal(got.view(-1), into.view(-1))


def test_payloads_are_little_endian_and_row_major() -> None:
    matrix = torch.tensor([[1, -2], [3, 1 << 30]], dtype=torch.int32)
    assert bytes(wire.RING32.pack(matrix)).hex() == "01000000feffffff0300000000000040"
    assert bytes(wire.RING32.pack(matrix.t())) == bytes(wire.RING32.pack(matrix.t().contiguous()))
