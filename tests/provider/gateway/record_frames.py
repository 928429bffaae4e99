"""Records frames of a release, for `test_releases`: what its tenants send, and what its provider answers.

Run it in a checkout of the release, with this file copied there and an environment of the release:

    git worktree add /tmp/release 0.5.0 && cp tests/provider/gateway/record_frames.py /tmp/release
    cd /tmp/release && PYTHONPATH=. python record_frames.py > frames-0.5.0.json

The checkpoint is made by a formula, so that every release multiplies by the same weights.
"""

import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from provider.config import schema
from provider.serve import Provider
from symbiosis_priv import __version__
from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context

WIDTH, INNER = 16, 24
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def formula(rows: int, columns: int, salt: int) -> torch.Tensor:
    """Numbers between -0.1 and 0.1."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    return (((i * 31 + j * 17 + i * j * 7 + salt * 13) % 201 - 100) / 1000).to(torch.float32)


def write_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"embed_tokens": (40, WIDTH), "layers.0.mlp.down_proj": (WIDTH, INNER)}
    shapes |= {f"layers.0.self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {f"layers.0.mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")}
    tensors = {f"model.{name}.weight": formula(*shape, salt) for salt, (name, shape) in enumerate(shapes.items())}
    norms = ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    tensors |= {f"model.{name}.weight": torch.ones(WIDTH) for name in norms}
    save_file(tensors | {"lm_head.weight": formula(40, WIDTH, 99)}, folder / "model.safetensors")


def config_of(folder: Path) -> tuple[schema.ProviderConfig, Any]:
    """A provider's configuration in a folder with a checkpoint and fresh keys, and a tenant's context."""
    write_checkpoint(folder / "model")
    keys = folder / "keys"
    authority = create_authority(keys)
    tenant = issue(keys, authority=authority, kind=Kind.TENANT, name="alice")
    own = issue(keys, authority=None, kind=Kind.PROVIDER, name="provider")
    config = schema.ProviderConfig(
        name="provider",
        listen="localhost:0",
        roles=("executor", "helper"),
        log_level="warning",
        model=schema.ModelConfig(checkpoint=str(folder / "model"), cache=folder / "cache"),
        tls=schema.TlsConfig(certificate=own.certificate, key=own.key, tenant_authority=authority.certificate),
    )
    return config, client_context(certificate=tenant.certificate, key=tenant.key, pins=[own.certificate])


def exactly(connection: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the provider closed the connection"
        data += part
    return data


def answer_to(connection: Any, frame: bytes) -> bytes:
    connection.sendall(frame)
    prefix = exactly(connection, wire.PREFIX.size)
    header, payload = wire.decode_prefix(prefix, max_payload=1 << 20)
    return prefix + exactly(connection, header + payload)


def dialogues(digest: str) -> dict[str, list[bytes]]:
    """What tenants of the release send on one connection each."""
    nonces = (bytes([n]) * 16 for n in range(1, 100))
    seed: Any = bytes(range(32))

    def hello(version: int, role: Any = "executor") -> bytes:
        return wire.encode(wire.Hello(version=version, role=role, model_digest=digest))

    def rows(count: int, width: int, bits: Any = 32, **fields: Any) -> bytes:
        binding: dict[str, Any] = {"nonce": next(nonces), "arithmetic": "ring", "rows": count, "ring_bits": bits}
        words = (formula(count, width, 5) * 1000).to(torch.int32) * 40_000 + 7
        payload = bytes(wire.encoding_of("ring", bits).pack(words)) if count else b""
        return wire.encode(wire.Execute(**binding | fields), payload_bytes=len(payload)) + payload

    forward, backward = {"group": 0, "direction": "forward"}, {"group": 1, "direction": "backward"}
    effect = wire.Effect(
        nonce=next(nonces), group=0, direction="forward", arithmetic="ring", rows=2, seed=seed, first_row=3
    )
    return {
        "executor, version 3": [hello(3), rows(2, WIDTH, **forward), rows(1, WIDTH, **backward), rows(0, 1, **forward)],
        "executor, version 4": [hello(4), rows(2, WIDTH, 24, **forward)],
        "helper": [hello(5, "helper"), wire.encode(effect)],
    }


def others() -> list[tuple[str, bytes]]:
    """One frame of each further message, by the function that parses it."""
    named: dict[str, Any] = {"nonce": bytes(16), "group": 1, "direction": "forward", "arithmetic": "ring", "rows": 3}
    seed: Any = bytes(range(32))
    limit = wire.QuotaLimit(amount=3.5, unit="rows/s")
    report: dict[str, Any] = {"name": "p", "model_digest": "sha256:0", "time": 1.5, "uptime_s": 2.0}
    counts: dict[str, Any] = {"groups": 1, "groups_loaded": 1, "requests": 7, "connections": 1}
    requests = [
        wire.FetchHealth(),
        wire.Execute(**named, counts=(1, 2)),
        wire.Effect(**named, seed=seed, first_row=0),
    ]
    replies = [
        wire.HealthReport(**report, **counts),
        wire.Failure(code=wire.ErrorCode.BUSY, detail="busy", limit=limit),
        wire.Result(**named),
    ]
    return [
        *(("decode_request", wire.encode(message)) for message in requests),
        *(("decode_reply", wire.encode(message)) for message in replies),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config, context = config_of(Path(folder))
        found: dict[str, Any] = {}
        with Provider(config) as provider:
            host, _, port = provider.address.rpartition(":")
            for name, frames in dialogues(provider.model_digest).items():
                with (
                    socket.create_connection((host, int(port)), timeout=60) as raw,
                    context.wrap_socket(raw, server_hostname=host) as connection,
                ):
                    found[name] = [[frame.hex(), answer_to(connection, frame).hex()] for frame in frames]
            document: dict[str, Any] = {"release": __version__, "dialogues": found, "digest": provider.model_digest}
    document["others"] = [[function, frame.hex()] for function, frame in others()]
    json.dump(document, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
