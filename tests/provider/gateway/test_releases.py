"""Which releases understand each other (docs/federation.md): frames that `record_frames` has recorded of releases are
sent to this release's provider, and parsed as this release's tenant parses them.

A release adds its file `frames-X.Y.Z.json` when it is made. 0.5.0 is the first one. Frames that only relay of effects
used, which has left (docs/adr/8-relay.md), are not in its file; a tenant of 0.5.0 with relay falls back to an older
version of the protocol when its hello is refused.
"""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provider.config.schema import ProviderConfig
from provider.serve import Provider
from symbiosis_priv.network import wire
from tests.provider.gateway import record_frames

RELEASES = sorted(Path(__file__).parent.glob("frames-*.json"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Provider, Any]]:
    """A provider of the recorded checkpoint, and a tenant's context."""
    config, context = record_frames.config_of(tmp_path_factory.mktemp("recorded"))
    assert isinstance(config, ProviderConfig)
    with Provider(config) as provider:
        yield provider, context


@pytest.fixture(params=RELEASES, ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> Any:
    return json.loads(request.param.read_text(encoding="utf-8"))


def parsed(frame: bytes, decode: Any) -> Any:
    header, payload = wire.decode_prefix(frame[: wire.PREFIX.size], max_payload=1 << 20)
    message = decode(frame[wire.PREFIX.size :][:header])
    assert len(frame) == wire.PREFIX.size + header + payload
    assert wire.encode(message, payload_bytes=payload) == frame[: wire.PREFIX.size + header]
    return message


def test_every_frame_of_a_release_is_parsed_and_written_as_it_was(recorded: Any) -> None:
    """So an older party also understands what this release writes in an older version of the protocol."""
    for asked, answered in (pair for dialogue in recorded["dialogues"].values() for pair in dialogue):
        request = parsed(bytes.fromhex(asked), wire.decode_request)
        reply = parsed(bytes.fromhex(answered), wire.decode_reply)
        if isinstance(request, wire.Binding):
            assert isinstance(reply, wire.Result)
            assert reply.answers(request)
    for function, frame in recorded["others"]:
        parsed(bytes.fromhex(frame), getattr(wire, function))


def test_a_tenant_of_a_release_gets_its_answers_to_the_bit(recorded: Any, served: tuple[Provider, Any]) -> None:
    """As executor. As helper the provider refuses it with a message, because its seeds are under X25519 alone, and so
    it does with the version of relay."""
    why = {"helper": "ML-KEM-768", "executor, version 5": "speaks versions 3 and 4 and 6, not 5"}
    provider, context = served
    assert provider.model_digest == recorded["digest"]
    host, _, port = provider.address.rpartition(":")
    for name, dialogue in recorded["dialogues"].items():
        with (
            socket.create_connection((host, int(port)), timeout=60) as raw,
            context.wrap_socket(raw, server_hostname=host) as connection,
        ):
            answers = [record_frames.answer_to(connection, bytes.fromhex(asked)) for asked, _ in dialogue]
        if name in why:
            refused = parsed(answers[0], wire.decode_reply)
            assert refused.code == wire.ErrorCode.BAD_REQUEST
            assert why[name] in refused.detail
        else:
            assert answers == [bytes.fromhex(answered) for _, answered in dialogue], name
