"""Clients that can also send malformed data, providers in processes of their own, and requests."""

import json
import secrets
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from provider.config.schema import ExecutorConfig, Limits, ModelConfig, ProviderConfig, TlsConfig, to_json
from symbiosis_priv.arithmetic.keystream import Seed
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.dial import ClientConnection
from tests.warm import Popen

TIMEOUT_S = 20.0


def config_of(checkpoint: Path, *, cache: Path, own: Identity, authority: Identity, **options: Any) -> ProviderConfig:
    """A configuration for tests, at a free port. `options`: fields of `Limits`, `TlsConfig` and `ProviderConfig`."""
    limits, files = (
        {name: options.pop(name) for name in kind.__struct_fields__ if name in options} for kind in (Limits, TlsConfig)
    )
    tls = {"certificate": own.certificate, "key": own.key, "tenant_authority": authority.certificate}
    fields: dict[str, Any] = {
        "name": "alpha",
        "listen": "127.0.0.1:0",
        "roles": ("executor", "helper"),
        "log_level": "debug",
        "model": ModelConfig(checkpoint=str(checkpoint), cache=cache, layers=options.pop("layers", None)),
        "tls": TlsConfig(**tls | files),
        "limits": msgspec.structs.replace(Limits(), **limits),
        "executor": ExecutorConfig(threads=1),
    }
    return ProviderConfig(**fields | options)


class Client:
    """A connection of one tenant, which can also send malformed data. Every wait has a deadline, after which the test
    fails."""

    def __init__(self, address: str, context: ssl.SSLContext, *, source: str = "") -> None:
        host, port = parse_address(address)
        self.line = _Line(address, host=host, port=port, pins=None, context=context)
        self.line.source = source
        self.line.open(time.monotonic() + TIMEOUT_S)

    def send(self, message: wire.Message, payload: bytes | memoryview = b"", *, announced: int | None = None) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        if isinstance(message, wire.Effect) and self.line._sealing is None:  # a seed that is not sealed
            self.line.send_bytes(
                wire.encode(message, payload_bytes=len(payload)), memoryview(payload), deadline=deadline
            )
        else:
            self.line.send(message, payload, announced=announced, deadline=deadline)

    def send_bytes(self, data: bytes) -> None:
        self.line.send_bytes(data, deadline=time.monotonic() + TIMEOUT_S)

    def receive(self, *, within: float = TIMEOUT_S) -> tuple[wire.Reply, bytearray]:
        return self.line.read(max_payload=wire.MAX_PAYLOAD, deadline=time.monotonic() + within)

    def ask(self, message: wire.Message, payload: bytes | memoryview = b"") -> wire.Reply:
        self.send(message, payload)
        return self.receive()[0]

    def hello(self, digest: str, role: wire.Role = "executor") -> wire.Reply:
        reply = self.ask(wire.Hello(version=wire.version_of(32, role=role), role=role, model_digest=digest))
        if role == "helper" and isinstance(reply, wire.Welcome):
            self.line.agree(deadline=time.monotonic() + TIMEOUT_S)
        return reply

    def product(self, request: wire.Execute | wire.Effect, rows: Tensor | None = None) -> Tensor:
        """Request a product, and check that the answer is bound to the request."""
        self.send(request, b"" if rows is None else request.encoding.pack(rows))
        reply, payload = self.receive()
        assert isinstance(reply, wire.Result), reply
        bound = ("nonce", "group", "direction", "arithmetic", "rows", "ring_bits")
        assert all(getattr(reply, name) == getattr(request, name) for name in bound)
        return request.encoding.unpack(payload, rows=request.rows)

    def until_served(self, request: wire.Execute, rows: Tensor, *, within: float) -> tuple[Tensor, int]:
        """Request a product until the provider is no longer busy. Returns the product and the number of BUSY
        answers."""
        deadline = time.monotonic() + within
        refusals = 0
        while True:
            self.send(request, wire.RING32.pack(rows))
            reply, product = self.receive(within=within)
            if isinstance(reply, wire.Result):
                return request.encoding.unpack(product, rows=request.rows), refusals
            assert isinstance(reply, wire.Failure)
            assert reply.code in wire.RETRYABLE, reply
            assert time.monotonic() < deadline
            refusals += 1
            time.sleep(0.1)  # as `tenant.connections.channel` does

    def at_end(self, *, within: float = TIMEOUT_S) -> bool:
        """Wait for the provider to close the connection; False if it sent something first. Raises TimeoutError."""
        assert self.line.stream is not None
        try:
            return not self.line.stream.begin(deadline=time.monotonic() + within)
        except (ConnectionError, ssl.SSLError):
            return True

    def close(self) -> None:
        self.line.close()


class _Line(ClientConnection):
    source = ""

    def _dial(self, deadline: float) -> socket.socket:
        address = self.host, self.port
        self._socket = socket.create_connection(address, timeout=TIMEOUT_S, source_address=(self.source, 0))
        return self._socket


def failure(reply: wire.Message) -> wire.ErrorCode:
    """The code of a refusal."""
    assert isinstance(reply, wire.Failure), reply
    assert reply.detail
    return reply.code


def execute(
    group: int, rows: int, *, direction: Direction = "forward", arithmetic: wire.Arithmetic = "ring"
) -> wire.Execute:
    return wire.Execute(
        nonce=secrets.token_bytes(wire.NONCE_BYTES), group=group, direction=direction, arithmetic=arithmetic, rows=rows
    )


def effect(group: int, rows: int, *, seed: bytes, first_row: int = 0, direction: Direction = "forward") -> wire.Effect:
    return wire.Effect(
        nonce=secrets.token_bytes(wire.NONCE_BYTES),
        group=group,
        direction=direction,
        arithmetic="ring",
        rows=rows,
        seed=Seed(seed),
        first_row=first_row,
    )


class Service:
    """A provider in a separate process, started with `provider serve`."""

    def __init__(self, config: ProviderConfig, folder: Path) -> None:
        self.config_file = folder / "provider.toml"
        self.config_file.write_text(toml_of(config), encoding="utf-8")
        self.ready_file = folder / "address"
        self.log_file = folder / "log"
        python = [sys.executable, "-W", "error", "-m", "symbiosis_priv.cli"]
        command = [*python, "provider", "serve", "-c", str(self.config_file)]
        with self.log_file.open("wb") as log:
            self.process = Popen([*command, "--ready-file", str(self.ready_file)], stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log_file.read_text()
        self.ready: dict[str, str] = json.loads(line)
        self.address = self.ready["address"]
        self.model_digest = self.ready["model_digest"]

    def logged(self) -> list[dict[str, Any]]:
        """Every line of the log."""
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit status."""
        self.process.terminate()
        status = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def toml_of(config: ProviderConfig) -> str:
    """Write every value as JSON, which is valid TOML for these values."""
    return "\n".join(_tables("", json.loads(to_json(config)))) + "\n"


def _tables(name: str, values: dict[str, Any]) -> list[str]:
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {json.dumps(v)}" for key, v in values.items() if v is not None and not isinstance(v, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _tables(f"{name}.{key}" if name else key, value)
    return lines
