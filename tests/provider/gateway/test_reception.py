"""Handshakes take their share of one core at most, and no network can lock out another one."""

import contextlib
import logging
import math
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from provider import logs
from provider.config.schema import MetricsConfig
from provider.gateway.credentials import Credentials
from provider.gateway.reception import Reception
from provider.operations import top
from provider.serve import Provider
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from tests.provider.clients import execute
from tests.provider.conftest import Configure, Connect, Keys, Launch
from tests.waiting import until

SHARE = 0.02  # share for about twenty handshakes a second
# A step of a handshake starts while there is time left, and may exceed it by its own time: 5 ms, and some tens of
# milliseconds on a loaded machine. With a share of 1, the crowds below take half a second and more.
STEP_S = 0.1


@contextlib.contextmanager
def crowd(address: str, keys: Keys, *, source: str, threads: int) -> Iterator[None]:
    """Tenants that connect and disconnect repeatedly."""
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):  # the provider may close before the handshake has ended
                raw = socket.create_connection(parse_address(address), timeout=20, source_address=(source, 0))
                with raw, keys.context("bob").wrap_socket(raw, server_hostname="127.0.0.1"):
                    pass

    running = [threading.Thread(target=come_and_go) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join()


def test_many_handshakes_take_their_share_and_delay_no_other_network(
    configure: Configure, connect: Connect, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(handshake_share=SHARE, handshake_timeout_s=1.5)
    with caplog.at_level(logging.INFO, logger="provider"), Provider(config) as provider:
        begun = time.monotonic()
        with crowd(provider.address, keys, source="127.0.0.9", threads=36):
            while provider.status().handshakes.waiting < 10:
                assert time.monotonic() - begun < 20
                time.sleep(0.01)
            came = time.monotonic()
            # a client with another address waits for one step of the crowd's handshakes, twice
            client = connect(to=provider)
            assert time.monotonic() - came < 10.0
            assert isinstance(client.ask(wire.FetchHealth()), wire.HealthReport)
            neighbour = connect(to=provider, source="127.0.0.9")  # it waited in the queue for longer than its timeout
            assert isinstance(neighbour.ask(wire.FetchHealth()), wire.HealthReport)
            assert provider.status().handshakes.late == 0
        elapsed, status = time.monotonic() - begun, provider.status()
        assert status.handshakes.seconds <= SHARE * (elapsed + 1) + STEP_S
        assert status.handshakes.waited_s > 0
        assert next(count for name, count in status.visits.items() if name.startswith("bob@")) > 10
        named = [getattr(r, logs._FIELDS) for r in caplog.records if r.getMessage() == "handshakes_wait"]
        assert "127.0.0.9" in {fields["address"] for fields in named}


def test_handshakes_have_a_smaller_share_while_products_are_answered(
    configure: Configure, connect: Connect, keys: Keys
) -> None:
    row = torch.ones(1, 64, dtype=torch.int32)
    with Provider(configure(handshake_share=1.0, handshake_share_serving=SHARE)) as provider:
        client = connect(to=provider)
        client.product(execute(0, 1), row)

        def larger_share() -> bool:
            """More processor time than the smaller share allows since products are no longer answered."""
            seconds = provider.status().handshakes.seconds - serving.seconds
            return seconds > SHARE * (time.monotonic() - resting + 1) + STEP_S

        with crowd(provider.address, keys, source="127.0.0.9", threads=8):
            begun, before = time.monotonic(), provider.status().handshakes
            while time.monotonic() < begun + 1.5 or not provider.status().handshakes.waiting:
                assert time.monotonic() < begun + 20
                client.product(execute(0, 1), row)
            elapsed, serving = time.monotonic() - begun, provider.status().handshakes
            assert serving.seconds - before.seconds <= SHARE * (elapsed + 1) + STEP_S
            resting = time.monotonic()
            until(larger_share, within_s=60)


def test_a_new_share_applies_while_the_provider_runs(configure: Configure, launch: Launch, keys: Keys) -> None:
    config = configure(handshake_share=0.01)
    service = launch(msgspec.structs.replace(config, metrics=MetricsConfig(listen="127.0.0.1:0")))

    def accepted() -> int:
        return top.ask(service.ready["metrics"]).handshakes.accepted

    with crowd(service.address, keys, source="127.0.0.9", threads=8):
        text = service.config_file.read_text()
        text = text.replace("handshake_share_serving = 0.05", "handshake_share_serving = 0.2")
        service.config_file.write_text(text.replace("handshake_share = 0.01", "handshake_share = 1.0"))
        service.process.send_signal(signal.SIGHUP)
        before, deadline = accepted(), time.monotonic() + 20
        while accepted() < before + 200:  # the previous share would take twenty seconds
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (reloaded,) = (line for line in service.logged() if line["event"] == "reloaded")
    assert reloaded["needs_restart"] is None


def test_a_slow_handshake_has_one_deadline_and_no_thread(configure: Configure, connect: Connect, keys: Keys) -> None:
    """Each byte of a handshake comes in time, but its end never comes."""
    hello, nothing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        keys.context("alice").wrap_bio(nothing, hello, server_hostname="127.0.0.1").do_handshake()
    said = hello.read()
    with Provider(configure(handshake_timeout_s=1.0)) as provider, contextlib.ExitStack() as stack:
        threads, address = threading.active_count(), parse_address(provider.address)
        slow = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(20)]
        begun = time.monotonic()
        for byte in said:
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(bytes([byte]))
            assert threading.active_count() == threads
            if provider.status().handshakes.late == len(slow):
                break
            time.sleep(0.05)
        assert 1.0 <= time.monotonic() - begun < 10.0
        assert provider.status().handshakes.present == 0
        assert isinstance(connect(to=provider).ask(wire.FetchHealth()), wire.HealthReport)


def test_a_reception_whose_thread_has_ended_can_be_stopped(configure: Configure) -> None:
    """The reception's thread may end before it is woken."""
    config = configure()
    credentials = Credentials.load(config.tls)
    door = Reception(
        "127.0.0.1:0",
        limits=config.limits,
        credentials=credentials,
        welcome=lambda *_: None,
        last_request=lambda: -math.inf,
    )
    door.start()
    door.stop(10.0)
    door.stop(10.0)
