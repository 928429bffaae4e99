"""Addresses as people write them; the resolved address is checked when a connection is made."""

import socket
import ssl
import time
from ipaddress import IPv4Address, IPv6Address, ip_address
from random import Random

import pytest
from hypothesis import example, given, strategies as st

from symbiosis_priv.errors import ConfigError, ConnectionLostError
from symbiosis_priv.network import dial
from symbiosis_priv.network.addresses import is_internal, local_address, names_host, parse_address, shown, ways_back
from symbiosis_priv.network.dial import ClientConnection
from tests.cases import cases

METADATA = ["fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"]
"""IPv6 addresses of the metadata services of AWS, Google, Oracle and Scaleway."""
VISIBLE = st.characters(exclude_categories=["C", "Z"], exclude_characters="[]")


@given(host=st.text(VISIBLE, min_size=1).filter(lambda host: "://" not in host), port=st.integers(0, (1 << 16) - 1))
@example(host="fd00::1", port=7401)
def test_an_address_survives_formatting_and_parsing(host: str, port: int) -> None:
    assert parse_address(shown(host, port)) == parse_address(f"[{host}]:{port}") == (host, port)


@pytest.mark.parametrize(
    "text", ["fd00::1:7401", "::1:7401", "[::1:7401", "::1]:7401", "https://alpha.example:7401", "tcp://[::1]:1"]
)
def test_what_could_be_read_in_two_ways_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[::1\]:7401|leave out everything but host:port"):
        parse_address(text)


@cases(__file__, "dialled")
def test_a_listener_on_all_addresses_is_dialled_at_loopback(listen: str, dialled: str) -> None:
    assert local_address(listen) == dialled


@example("[]:1")
@example("a:" + "1" * 5000)
@example("a\0:1")  # the resolver does not accept it
@example("\x1b[2J:1")  # a terminal should not show it
@given(st.text() | st.from_regex(r"\A[a-z]*:-?[0-9]{5,7}\Z"))
def test_an_address_is_parsed_or_a_config_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ConfigError:
        return
    assert host.isprintable()
    assert host.split() == [host]
    assert 0 <= port < 1 << 16


@given(st.ip_addresses(v=4, network="10.0.0.0/8") | st.sampled_from(["93.184.216.34", "2606:4700::1111", "fd12::1"]))
def test_private_and_public_addresses_may_be_dialled(address: object) -> None:
    assert not is_internal(str(address))
    assert not is_internal("alpha.example")


@given(
    st.ip_addresses(network="127.0.0.0/8")
    | st.ip_addresses(network="169.254.0.0/16")
    | st.ip_addresses(network="224.0.0.0/4")
    | st.sampled_from([*map(IPv4Address, ("0.0.0.0", "255.255.255.255", "168.63.129.16"))])
)
def test_internal_addresses_are_recognised_in_every_form(address: IPv4Address) -> None:
    assert is_internal(str(address))
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        assert is_internal(str(IPv6Address(int(IPv6Address(prefix)) + int(address))))
    assert is_internal(str(IPv6Address((0x2002 << 112) + (int(address) << 80))))  # 6to4


@pytest.mark.parametrize("address", ["::1", "::", "fe80::1", "fe80::1%lo", "ff02::1", *METADATA])
def test_internal_addresses_of_ipv6(address: str) -> None:
    assert is_internal(address)


PRIVATE = st.ip_addresses(network="10.0.0.0/8").map(str) | st.sampled_from(["fd12::1", "64:ff9b::a00:1"])
PUBLIC = st.ip_addresses(network="93.184.216.0/24").map(str) | st.just("2606:4700::1111")
HIDDEN = st.ip_addresses(network="127.0.0.0/8").map(str) | st.sampled_from(["169.254.169.254", "fe80::1", *METADATA])


@given(peer=PRIVATE | PUBLIC | st.just("127.0.0.1"), names=st.tuples(PRIVATE, PUBLIC, HIDDEN), order=st.randoms())
def test_a_registry_connects_back_only_to_the_network_of_who_announces(
    peer: str, names: tuple[str, str, str], order: Random
) -> None:
    """Once for each family, and to its own machine only for a client of this machine."""
    families = {name: socket.AF_INET6 if ":" in name else socket.AF_INET for name in names}
    ways = ways_back(
        [(families[name], socket.SOCK_STREAM, 6, "", (name, 1)) for name in order.sample(names, 3)], peer=peer
    )
    chosen, (private, _, hidden) = [one[4][0] for one in ways], names
    assert 1 <= len({families[name] for name in chosen}) == len(chosen)
    assert hidden not in chosen or (peer, hidden[:4]) == ("127.0.0.1", "127.")
    assert private not in chosen or not ip_address(peer).is_global or peer == "64:ff9b::a00:1"


def test_a_host_header_is_a_host_and_a_port_and_nothing_else() -> None:
    for good in ("127.0.0.1:42047", "127.0.0.1", "[::1]:80", "[::1]", "LOCALHOST:1", "proxy.example"):
        assert names_host([good], {"localhost", "proxy.example"}), good
    bad = ["127.0.0.1:42047,evil", "[::1]evil", "me@127.0.0.1", "me:you@localhost", "127.0.0.1:", "127.0.0.1:x", "::1"]
    for header in (*bad, "localhost/x", "localhost\n", "[localhost]", "[127.0.0.1]", "evil.example", ""):
        assert not names_host([header], {"localhost"}), header
    assert not names_host(["localhost", "localhost"], {"localhost"})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "rebound.example", "interface.example"])
def test_a_remote_only_connection_does_not_reach_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """No byte arrives, even if a name resolves to this machine only when the connection is made."""
    if host == "interface.example":  # the address of a network interface is this machine's, and not internal
        monkeypatch.setattr(dial, "is_internal", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
        service.setblocking(False)
        for remote_only in (True, False):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            line = ClientConnection("gamma", host=host, port=port, pins=None, context=context, remote_only=remote_only)
            expected = "not an address" if remote_only else "TLS"
            with pytest.raises(Exception, match=expected) as caught:
                line.open(time.monotonic() + 0.3)
            line.close()
            if remote_only:
                assert isinstance(caught.value, ConnectionLostError)
                with pytest.raises(BlockingIOError):
                    service.accept()
        service.accept()[0].close()
