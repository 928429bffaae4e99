"""A running registry: announcements that it accepts, its answers, and its limits."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from provider.registry import RegistryConfig
from provider.registry.cli import app
from provider.registry.server import RegistryServer
from symbiosis_priv import errors
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.certificates.revocation import revoke
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.tls import registry_client_context
from symbiosis_priv.registry import protocol
from symbiosis_priv.registry.descriptor import MAX_BYTES, Trust
from symbiosis_priv.registry.protocol import RegistryClient
from tests.provider.registry.conftest import Serve
from tests.registries import registry_config
from tests.vouching import DEADLINE_S, DIGEST, Vouching
from tests.waiting import until


def test_an_announced_executor_is_listed(serve: Serve, vouching: Vouching) -> None:
    server = serve()
    with vouching.client(server.address) as registry:
        assert registry.list(DIGEST) == []
        registry.announce(gamma := vouching.says("gamma"))
        registry.announce(delta := vouching.says("delta", after_ms=1, layers="4-7"))
        registry.announce(gamma)  # the same announcement again changes nothing
        assert registry.list(DIGEST) == registry.list() == [gamma, delta]
        assert registry.list("sha256:" + "8" * 64) == []
    with vouching.client(server.address) as registry:
        leaving = vouching.says("gamma", after_ms=2, draining=True)
        registry.announce(leaving)
        assert registry.list(DIGEST) == [delta, leaving]


def test_invalid_announcements_are_refused(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    server = serve()
    stranger = Vouching.in_folder(tmp_path)
    now = vouching.began
    refused = {
        "authority has issued": stranger.says("gamma"),
        "from the future": vouching.says("gamma", issued=now + 3_600_000),
        "has expired": vouching.says("gamma", issued=now - 3_600_000),
        "does not name": vouching.says("gamma", address=("elsewhere.example", 1)),
        "malformed": b"\x80",
        "newer": vouching.says("gamma", issued=now - 1),
    }
    with vouching.client(server.address) as registry:
        registry.announce(good := vouching.says("gamma"))
        for words, data in refused.items():
            with pytest.raises(errors.ProviderError, match=words) as caught:
                registry.announce(data)
            assert caught.value.code == wire.ErrorCode.REFUSED
        assert registry.list(DIGEST) == [good]


def test_a_revoked_executor_is_no_longer_listed(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    """The executor disappears when the registry has read the revocation list."""
    revoked = tmp_path / "revoked.txt"
    revoked.touch()
    server = serve(revoked=revoked)
    with vouching.client(server.address) as registry:
        registry.announce(gamma := vouching.says("gamma"))
        registry.announce(delta := vouching.says("delta", after_ms=1))
        assert registry.list(DIGEST) == [gamma, delta]
        revoke(revoked, [vouching.identity("gamma").certificate])
        until(lambda: registry.list(DIGEST) == [delta])
        with pytest.raises(errors.ProviderError, match="revoked"):
            registry.announce(gamma)


def test_a_descriptor_that_a_reload_drops_is_not_stored_again(serve: Serve) -> None:
    """A descriptor that is verified before a reload, and stored after it, is dropped."""
    with pytest.raises(errors.DescriptorError, match="again"):
        serve()._admit(Trust(()))


def test_show_prints_listed_and_refused_executors(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    server, revoked = serve(), tmp_path / "revoked.txt"
    revoke(revoked, [vouching.identity("delta").certificate])
    options = ["--authority", str(vouching.authority.certificate), "--revoked", str(revoked)]
    empty = CliRunner().invoke(app, ["show", server.address, *options])
    assert empty.output == "no executor is listed that a tenant would use\n"
    with vouching.client(server.address) as registry:
        for name in ("gamma", "delta"):
            registry.announce(vouching.says(name))
    result = CliRunner().invoke(app, ["show", server.address, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "gamma AG" in result.output
    assert "localhost:7401" in result.output
    assert "delta AG" not in result.output
    assert "1 of 2 descriptors are refused" in result.output


def test_announcements_of_one_executor_are_limited(
    serve: Serve, vouching: Vouching, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(announcements_per_h=12.0)  # three at once
    with vouching.client(server.address) as registry:
        for step in range(3):
            registry.announce(vouching.says("gamma", after_ms=step))
        registry.announce(vouching.says("delta", after_ms=9))
        monkeypatch.setattr(server, "_connect_back", None)
        with pytest.raises(errors.ProviderError, match="too often") as caught:
            registry.announce(vouching.says("gamma", after_ms=3))
        assert caught.value.code == wire.ErrorCode.BUSY
        for _ in range(4):  # repeating a known descriptor does not count against its executor
            registry.announce(registry.list(DIGEST)[0])
        assert len(registry.list(DIGEST)) == 2


def test_an_executor_is_listed_if_it_shows_its_certificate_at_its_address(
    serve: Serve, vouching: Vouching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the same whatever is found there. What is listed already, and an end, cause no connection."""
    monkeypatch.setattr("provider.registry.server._CONNECT_S", 0.5)
    there = parse_address(serve(name="gamma").address)[1]  # a registry with gamma's certificate in place of an executor
    server = serve(connects_back=True)
    with socket.create_server(("127.0.0.1", 0)) as silent, vouching.client(server.address) as registry:
        for step, (name, port) in enumerate((("gamma", silent.getsockname()[1]), ("gamma", 1), ("delta", there))):
            with pytest.raises(errors.ProviderError, match="answered unreachable: the registry does not find it at"):
                registry.announce(vouching.says(name, address=("localhost", port), after_ms=step))
        registry.announce(good := vouching.says("gamma", address=("localhost", there), after_ms=3))
        monkeypatch.setattr(server, "_connect_back", None)
        registry.announce(good)
        registry.announce(leaving := vouching.says("gamma", address=("localhost", 1), after_ms=4, draining=True))
        assert registry.list(DIGEST) == [leaving]


def test_requests_of_one_network_are_limited(serve: Serve, vouching: Vouching) -> None:
    server = serve(requests_per_s=0.5)  # five at once
    with vouching.client(server.address) as registry:
        for _ in range(5):
            registry.list(DIGEST)
        with pytest.raises(errors.ProviderError, match="too many requests"):
            registry.list(DIGEST)
        with pytest.raises(errors.TransportError):  # later frames are not answered one by one
            registry.list(DIGEST)


def test_threads_never_exceed_the_connection_limit(serve: Serve, vouching: Vouching) -> None:
    """The dropped connection has ended before another one is accepted, also during a handshake."""
    others = set(threading.enumerate())  # servers of other tests
    server = serve(max_connections=4)
    with contextlib.ExitStack() as crowd:
        for _ in range(100):
            connection = crowd.enter_context(
                socket.create_connection(parse_address(server.address), timeout=20, source_address=("127.0.0.9", 0))
            )
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a handshake
        with vouching.client(server.address) as registry:  # the last connection: the registry has seen all earlier ones
            assert registry.list(DIGEST) == []
            # a thread that has closed its connection may take a moment to end; one that waits for bytes does not end
            until(lambda: sum(t.name == "connection" for t in {*threading.enumerate()} - others) <= 4, within_s=5)


def test_slow_and_silent_connections_end(serve: Serve, vouching: Vouching) -> None:
    server = serve(frame_timeout_s=0.3, connection_s=0.6, requests_per_s=1e6)
    with socket.create_connection(parse_address(server.address), timeout=20) as silent:
        assert silent.recv(1) == b""
    context = registry_client_context(vouching.trust.authorities)
    raw = socket.create_connection(parse_address(server.address), timeout=20)
    with context.wrap_socket(raw, server_hostname="127.0.0.1") as slow:
        slow.send(wire.PREFIX.pack(wire.MAGIC, 100, 0))  # and nothing more
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert slow.recv(1) == b""
    with vouching.client(server.address) as registry, pytest.raises(errors.TransportError):
        keep_asking(registry)


def keep_asking(registry: RegistryClient) -> None:
    """Send requests until the client's deadline, which is much longer than a connection may last."""
    while True:
        registry.list(DIGEST)


@pytest.fixture(scope="module")
def running(vouching: Vouching) -> Iterator[RegistryServer]:
    """One registry for all examples."""
    with RegistryServer(registry_config(vouching, name="running")) as server:
        yield server


@given(data=st.binary(max_size=200), framed=st.booleans())
def test_any_bytes_leave_the_registry_running(
    running: RegistryServer, vouching: Vouching, data: bytes, framed: bool
) -> None:
    context = registry_client_context(vouching.trust.authorities)
    raw = socket.create_connection(parse_address(running.address), timeout=20)
    with context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
        connection.sendall(wire.PREFIX.pack(wire.MAGIC, len(data) or 1, 0) + data if framed else data)
        socket.socket.shutdown(connection, socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while connection.recv(4096):
                pass
    with vouching.client(running.address) as registry:
        assert registry.list(DIGEST) == []


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.binary(max_size=8), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(-1, 1), max_size=2),
)


class Talker(RegistryServer):
    """A registry with a valid certificate that sends prepared answers."""

    answer: tuple[protocol.Reply, bytes] = protocol.Listed(), b""

    def _reply(self, request: protocol.Request, payload: bytes, peer: str) -> tuple[protocol.Reply, bytes]:
        return self.answer


def test_any_answer_of_a_registry_is_parsed_or_an_error_of_the_tree(vouching: Vouching) -> None:
    """Lists of any values, and bytes that are not lists; messages print only text on a terminal."""
    with Talker(registry_config(vouching)) as talker:
        messages: list[protocol.Reply] = [
            protocol.Listed(),
            protocol.Accepted(),
            wire.Failure(code=wire.ErrorCode.BUSY, detail="\x1b[2J"),
        ]
        with vouching.client(talker.address) as registry:
            talker.answer = protocol.Listed(), msgspec.msgpack.encode([b"1"])
            assert registry.list(DIGEST) == [b"1"]  # otherwise this test would prove nothing

            @given(
                message=st.sampled_from(messages),
                body=st.one_of(
                    st.binary(max_size=64),
                    JUNK.map(msgspec.msgpack.encode),
                    st.sampled_from([b"\x91" * 100_000, msgspec.msgpack.encode({"\x1b[2J": 1})]),
                ),
            )
            def ask(message: protocol.Reply, body: bytes) -> None:
                talker.answer = message, body
                for question in (lambda: registry.list(DIGEST), lambda: registry.announce(b"")):
                    said = ""
                    try:
                        question()
                    except errors.SymbiosisError as error:
                        said = str(error)
                    assert said.isprintable()

            ask()


def test_an_announced_size_is_checked_before_memory_is_taken(serve: Serve, vouching: Vouching) -> None:
    server = serve()
    context = registry_client_context(vouching.trust.authorities)
    raw = socket.create_connection(parse_address(server.address), timeout=20)
    with context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
        header = wire.encode(protocol.Announce())[wire.PREFIX.size :]
        connection.sendall(wire.PREFIX.pack(wire.MAGIC, len(header), MAX_BYTES + 1) + header)
        with contextlib.suppress(OSError):
            assert connection.recv(1) == b""


def test_a_client_refuses_registries_of_other_federations(serve: Serve, vouching: Vouching, tmp_path: Path) -> None:
    server = serve()
    stranger = Vouching.in_folder(tmp_path)
    with pytest.raises(errors.CertificateError, match="was refused"), stranger.client(server.address):
        pass
    elsewhere = issuing.issue(
        tmp_path, authority=vouching.authority, kind=Kind.PROVIDER, name="far", hosts=["far.example"], operator="F"
    )
    other = serve(name="far", certificate=elsewhere.certificate, key=elsewhere.key)
    with pytest.raises(errors.CertificateError, match="was refused"), vouching.client(other.address):
        pass


def test_a_client_refuses_a_registry_whose_certificate_was_revoked(
    serve: Serve, vouching: Vouching, tmp_path: Path
) -> None:
    revoked = tmp_path / "revoked.txt"
    revoke(revoked, [vouching.identity("registry").certificate])
    address = serve().address
    trust = Trust.load(vouching.authority.certificate, revoked)
    with pytest.raises(errors.CertificateError, match="revoked"), RegistryClient(address, trust, deadline_s=DEADLINE_S):
        pass
    arguments = ["show", address, "--authority", str(vouching.authority.certificate), "--revoked", str(revoked)]
    assert "revoked" in str(CliRunner().invoke(app, arguments).exception)


def test_a_client_keeps_its_deadline(vouching: Vouching) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(errors.TransportError), RegistryClient(address, vouching.trust, deadline_s=0.3):
            pass
        assert time.monotonic() - began < 10


def test_a_registry_needs_a_certificate_of_the_authority(vouching: Vouching, tmp_path: Path) -> None:
    own = issuing.issue(tmp_path, authority=None, kind=Kind.PROVIDER, name="registry")
    config = RegistryConfig(
        listen="127.0.0.1:0", certificate=own.certificate, key=own.key, authority=vouching.authority.certificate
    )
    with pytest.raises(errors.CertificateError, match="keys request --provider"):
        RegistryServer(config)
