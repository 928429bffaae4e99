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

from torch import Tensor

from provider.config.schema import ProviderConfig, to_json
from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.hybrid import KeyOffer, Sealing
from tests.warm import Popen

TIMEOUT_S = 20.0


class Client:
    """A raw connection of one tenant. Every wait has a deadline, after which the test fails."""

    def __init__(self, address: str, context: ssl.SSLContext, *, source: str = "") -> None:
        host, port = parse_address(address)
        raw = socket.create_connection((host, port), timeout=TIMEOUT_S, source_address=(source, 0))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = context.wrap_socket(raw, server_hostname=host)
        self.sealing: Sealing | None = None  # with a helper, after the hello

    def send(self, message: wire.Message, payload: bytes | memoryview = b"", *, announced: int | None = None) -> None:
        size = len(payload) if announced is None else announced
        if isinstance(message, wire.Effect) and self.sealing is not None and len(message.seed) == SEED_BYTES:
            message = self.sealing.seal(message)
        self.socket.sendall(wire.encode(message, payload_bytes=size) + bytes(payload))

    def receive(self) -> tuple[wire.Reply, bytearray]:
        header, size = wire.decode_prefix(bytes(self._exactly(wire.PREFIX.size)), max_payload=wire.MAX_PAYLOAD)
        reply, payload = wire.decode_reply(bytes(self._exactly(header))), self._exactly(size)
        if self.sealing is not None and isinstance(reply, wire.Result):
            self.sealing.uncover(reply.nonce, payload)
        return reply, payload

    def ask(self, message: wire.Message, payload: bytes | memoryview = b"") -> wire.Reply:
        self.send(message, payload)
        return self.receive()[0]

    def hello(self, digest: str, role: wire.Role = "executor") -> wire.Reply:
        reply = self.ask(wire.Hello(version=wire.version_of(32, role=role), role=role, model_digest=digest))
        if role == "helper" and isinstance(reply, wire.Welcome):
            offer = KeyOffer()
            answer = self.ask(offer.message)
            assert isinstance(answer, wire.KeyAnswer), answer
            self.sealing = offer.sealing(answer, self.socket)
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
        self.socket.settimeout(within)
        deadline = time.monotonic() + within
        refusals = 0
        while True:
            self.send(request, wire.RING32.pack(rows))
            reply, product = self.receive()
            if isinstance(reply, wire.Result):
                return request.encoding.unpack(product, rows=request.rows), refusals
            assert isinstance(reply, wire.Failure)
            assert reply.code in wire.RETRYABLE, reply
            assert time.monotonic() < deadline
            refusals += 1
            time.sleep(0.1)  # as `tenant.connections.channel` does

    def at_end(self) -> bool:
        """Wait for the provider to close the connection; False if it sent something first."""
        try:
            return self.socket.recv(1) == b""
        except (ConnectionError, ssl.SSLError):
            return True

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise ConnectionResetError("closed by the provider")
            view = view[count:]
        return data


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
