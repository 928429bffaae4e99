"""Addresses as people write them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.network.addresses import parse_address

VISIBLE = st.characters(exclude_categories=["C", "Z"], exclude_characters="[]")


@given(host=st.text(VISIBLE, min_size=1), port=st.integers(0, (1 << 16) - 1))
def test_an_address_comes_apart_as_it_was_put_together(host: str, port: int) -> None:
    assert parse_address(f"{host}:{port}") == parse_address(f"[{host}]:{port}") == (host, port)


@example("[]:1")
@example("a:" + "1" * 5000)
@example("a\0:1")  # the resolver takes none
@example("\x1b[2J:1")  # nor should a terminal
@given(st.text() | st.from_regex(r"\A[a-z]*:-?[0-9]{5,7}\Z"))
def test_an_address_is_good_or_a_config_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ConfigError:
        return
    assert host.isprintable()
    assert host.split() == [host]
    assert 0 <= port < 1 << 16
