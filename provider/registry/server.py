"""A registry's server: TLS 1.3, a thread for each place, and a bound for everything that a client can make it hold.

Clients are not authenticated, so connections and requests are bounded by network (`provider.gateway.strangers`):
a crowd from one network costs other networks nothing. A descriptor is stored only if the federation's authority vouches
for its executor, if its host is the executor's own, and if it is newer than the one before; each key may announce so
often and no oftener, and what has expired is forgotten after some days. So the log is bounded by the executors that the
authority has vouched for, whoever else comes.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from types import TracebackType
from typing import Final, Self

from provider import logs
from provider.config.reload import Reloader
from provider.gateway.link import Link, bound_address, hang_up, listen
from provider.gateway.strangers import Stranger, Strangers
from provider.registry.config import DAY_S, RegistryConfig
from provider.registry.credentials import RegistryCredentials
from provider.registry.rates import Rates
from provider.registry.storage import Log
from symbiosis_priv.errors import ConfigError, DescriptorError, ProtocolError, StorageError, TransportError
from symbiosis_priv.network import wire
from symbiosis_priv.registry import protocol
from symbiosis_priv.registry.descriptor import verify
from symbiosis_priv.registry.history import Head, sign_head, verify_head
from symbiosis_priv.registry.statements import MAX_BYTES, MS, Trust

log = logs.EventLog(__name__)

_BACKLOG: Final = 256
_ACCEPT_S: Final = 0.5  # how long a stop may go unnoticed
_TIDY_S: Final = 600.0
_TOO_MANY: Final = wire.Failure(code=wire.ErrorCode.BUSY, detail="too many requests from this network")


class RegistryServer:
    """Listens, and answers until stopped.

        with RegistryServer(config) as registry:
            connect_to(registry.address)

    Args:
        config: whose it is, and its limits.
        replica_of: the name of the registry whose log this one passes on; then it takes no announcements.

    Raises:
        CertificateError, ConfigError: as they say.
    """

    def __init__(self, config: RegistryConfig, *, replica_of: str | None = None) -> None:
        self.config = config
        self.replica_of = replica_of
        files = (config.certificate, config.key, config.authority, config.revoked)
        self._reloader = Reloader(lambda: filter(None, files), self._reload)
        self._credentials = RegistryCredentials.load(config)
        self.log = Log(config.database, name=replica_of or self._credentials.name, max_bytes=config.max_log_mib << 20)
        self._visits = Rates(per_s=config.requests_per_s, burst=10 * config.requests_per_s)
        per_h = config.announcements_per_h
        self._announcements = Rates(per_s=per_h / 3600, burst=max(1.0, per_h / 4))
        self._present = Strangers(config.max_connections)
        self._stopping = threading.Event()
        self._threads: dict[Stranger, threading.Thread] = {}
        self._lock = threading.Lock()
        try:
            self._listener = listen(config.listen, backlog=_BACKLOG)
        except BaseException:
            self.log.close()
            raise
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._tidier = threading.Thread(target=self._tidy, name="tidy", daemon=True)

    @property
    def name(self) -> str:
        """As its certificate says."""
        return self._credentials.name

    @property
    def trust(self) -> Trust:
        """Who vouches for executors and registries, as the files say now."""
        return self._credentials.trust

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return bound_address(self._listener)

    def start(self) -> Self:
        """Begin to accept."""
        for thread in (self._acceptor, self._tidier):
            thread.start()
        self._reloader.start()
        log.info("registry_started", registry=self.name, address=self.address, entries=self.log.position[0])
        return self

    def stop(self) -> None:
        """Close connections and the log; returns within twice `frame_timeout_s`."""
        self._stopping.set()
        self._reloader.close(self.config.frame_timeout_s)
        hang_up(self._listener, socket.SHUT_RDWR)  # wakes `accept` where the system does so
        self._acceptor.join()
        self._listener.close()
        for stranger in self._present.all():
            hang_up(stranger.socket, socket.SHUT_RDWR)
        deadline = time.monotonic() + self.config.frame_timeout_s
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._tidier.join()
        self.log.close()
        log.info("registry_stopped", registry=self.name)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _reload(self) -> None:
        credentials = RegistryCredentials.load(self.config, revoked=self.trust.revoked)
        if credentials.name != self.name:
            raise ConfigError(f"{self.config.certificate} names another registry: start one anew for it")
        self._credentials = credentials
        log.info("reloaded")

    def _tidy(self) -> None:
        while not self._stopping.wait(_TIDY_S):
            try:
                forgotten = self.log.forget(expired_before=time.time() - DAY_S * self.config.retain_days)
            except StorageError as error:
                log.failure("tidying_failed", error)
            else:
                log.info("tidied", forgotten=forgotten)

    # The accept loop

    def _accept(self) -> None:
        self._listener.settimeout(_ACCEPT_S)
        while not self._stopping.is_set():
            try:
                raw, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # out of descriptors
                if self._stopping.is_set():
                    return
                log.often("accept_failed", error=type(error).__name__)
                self._stopping.wait(_ACCEPT_S)
                continue
            stranger = Stranger(raw, peer[0], deadline=time.monotonic() + self.config.connection_s)
            if (crowded_out := self._present.come(stranger)) is not None:
                self._see_off(crowded_out)
            if crowded_out is stranger:
                raw.close()
            else:
                self._begin(stranger)

    def _see_off(self, crowded_out: Stranger) -> None:
        """Nobody else comes in until its thread has ended, so that there is never one more than there are places."""
        log.often("connection_dropped", address=crowded_out.network)
        self._present.leave(crowded_out)
        hang_up(crowded_out.socket, socket.SHUT_RDWR)  # its thread closes it
        with self._lock:
            thread = self._threads.get(crowded_out)
        if thread is not None:
            thread.join(self.config.frame_timeout_s)

    def _begin(self, stranger: Stranger) -> None:
        thread = threading.Thread(target=self._run, args=(stranger,), name="connection", daemon=True)
        with self._lock:
            self._threads[stranger] = thread
        try:
            thread.start()
        except RuntimeError as error:  # out of threads
            log.often("accept_failed", error=type(error).__name__)
            self._forget(stranger)

    # A connection's thread

    def _run(self, stranger: Stranger) -> None:
        try:
            with contextlib.suppress(OSError, TransportError, ProtocolError):
                self._serve(stranger)
        except Exception as error:  # a bug must not take the registry with it
            log.failure("connection_failed", error)
        finally:
            self._forget(stranger)

    def _forget(self, stranger: Stranger) -> None:
        stranger.socket.close()
        with self._lock:
            del self._threads[stranger]
        self._present.leave(stranger)

    def _serve(self, stranger: Stranger) -> None:
        raw = stranger.socket
        raw.settimeout(self.config.frame_timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._credentials.context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        if not self._present.speak(stranger, connection):
            return
        connection.do_handshake()  # the socket's timeout covers all of it
        link = Link(connection)
        try:
            while not self._stopping.is_set() and self._answer_next(link, stranger):
                pass
        finally:
            link.close()

    def _answer_next(self, link: Link, stranger: Stranger) -> bool:
        prefix = memoryview(bytearray(wire.PREFIX.size))
        left = min(self.config.frame_timeout_s, stranger.deadline - time.monotonic())
        if left <= 0 or not (begun := link.begin(prefix, timeout=left)):
            return False
        deadline = time.monotonic() + self.config.frame_timeout_s
        link.receive(prefix[begun:], deadline=deadline)
        length, size = wire.decode_prefix(prefix, max_payload=MAX_BYTES)
        header, payload = bytearray(length), bytearray(size)
        for part in (header, payload):
            link.receive(memoryview(part), deadline=deadline)
        welcome = self._visits.take(stranger.network, now=time.monotonic())
        reply, body = self._reply(protocol.decode_request(header), bytes(payload)) if welcome else (_TOO_MANY, b"")
        link.send(wire.encode(reply, payload_bytes=len(body)), memoryview(body), deadline=deadline)
        return welcome  # else whoever asks on is answered as fast as this process can, and others wait

    # Requests

    def _reply(self, request: protocol.Request, payload: bytes) -> tuple[protocol.Reply, bytes]:
        match request:
            case protocol.Announce():
                return self._take(payload), b""
            case protocol.List():
                vouches = self._credentials.vouches
                listed = self.log.listed(request.model_digest, now=time.time(), vouched=vouches)
                return protocol.Listed(), protocol.encode_listing(listed)
            case protocol.History():
                return self._recorded(request)

    def _take(self, data: bytes) -> protocol.Reply:
        try:
            if self.replica_of is not None:
                raise DescriptorError(f"this registry passes on the log of {self.replica_of}: announce it there")
            announced = verify(data, self.trust, now=time.time())
            number = self.log.append(announced, admit=functools.partial(self._admit, announced.key))
        except (DescriptorError, _TooOftenError) as error:
            log.often("announcement_refused", reason=str(error))
            code = wire.ErrorCode.BUSY if isinstance(error, _TooOftenError) else wire.ErrorCode.REFUSED
            return wire.Failure(code=code, detail=str(error))
        except StorageError as error:
            log.failure("announcement_lost", error)
            return wire.Failure(code=wire.ErrorCode.INTERNAL, detail="the log cannot be written")
        log.often("announced", provider=announced.name, layers=str(announced.said.layers), entry=number)
        return protocol.Accepted(entry=number)

    def _admit(self, key: str) -> None:
        if not self._announcements.take(key, now=time.monotonic()):
            raise _TooOftenError("this executor announces itself too often")

    def _recorded(self, request: protocol.History) -> tuple[protocol.Reply, bytes]:
        span = self.log.span(request.after)  # before the head: it counts these entries, and perhaps later ones
        head, entries = self.log.head if self.replica_of is not None else self._sign_head(), list(span.entries)
        if self.replica_of is not None:  # while it catches up, it has entries that the registry's head does not count
            counted = verify_head(head, self.trust.of_the_past, now=None).said.entries if head else 0
            if not head or counted < span.after:
                return wire.Failure(code=wire.ErrorCode.BUSY, detail="this replica has not reached its registry"), b""
            entries = entries[: counted - span.after]
        record = protocol.Record(after=span.after, before=span.before, entries=entries, head=head)
        return protocol.Recorded(), protocol.encode_record(record)

    def _sign_head(self) -> bytes:
        credentials = self._credentials
        entries, found = self.log.position
        head = Head(issued=round(MS * time.time()), certificate=credentials.certificate, entries=entries, hash=found)
        return sign_head(head, credentials.key)


class _TooOftenError(Exception):
    """Of one executor's announcements."""
