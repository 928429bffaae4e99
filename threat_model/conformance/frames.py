"""Malformed frames, as data in `frames.toml`."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from symbiosis_priv.network import wire


class MalformedFrame(NamedTuple):
    """What is wrong with a frame, its bytes, and the code with which it is refused."""

    name: str
    data: bytes
    code: wire.ErrorCode


def good_requests() -> dict[str, dict[str, Any]]:
    """The good requests that the malformed ones are made from, by type."""
    return {kind: _decoded(fields) for kind, fields in _document()["good"].items()}


def malformed_frames() -> list[MalformedFrame]:
    """All malformed frames."""
    document = _document()
    found = [
        MalformedFrame(name, _decoded(whole)["bytes"], wire.ErrorCode(whole["code"]))
        for name, whole in document["whole"].items()
    ]
    for kind, good in good_requests().items():
        wrong = {str(change): good | _decoded(change) for change in document["changed"][kind]}
        wrong |= {f"no {name}": {key: good[key] for key in good if key != name} for name in good}
        for name, fields in wrong.items():
            header = msgspec.msgpack.encode(fields)
            data = wire.PREFIX.pack(wire.MAGIC, len(header), 0) + header
            found.append(MalformedFrame(f"{kind}: {name}", data, wire.ErrorCode.BAD_FRAME))
    return found


def _document() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("frames.toml").read_text(encoding="utf-8"))


def _decoded(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: bytes.fromhex(value[4:]) if isinstance(value, str) and value.startswith("hex:") else value
        for name, value in fields.items()
    }
