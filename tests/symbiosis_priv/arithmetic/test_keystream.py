"""Masks: the right AES stream, addressed by row, never repeated; secrets that end with their process."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray

from symbiosis_priv.arithmetic.keystream import MAX_ROW, Keystream, Seed, StreamKey, derive, expand, mask_key
from symbiosis_priv.errors import RangeError
from tests import drawn

KEY = StreamKey(bytes(range(32)))
keys = st.binary(min_size=32, max_size=32).map(StreamKey)
first_rows = st.integers(0, 100) | st.integers(0, 2**62) | st.integers(2**31 - 5, 2**33)


def by_hand(key: bytes, *, row: int, width: int) -> list[int]:
    """One row, block by block: AES-256 of the counter, read as little-endian signed words."""
    blocks = (width + 3) // 4
    aes = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    stream = b"".join(aes.update((row * blocks + i).to_bytes(16, "big")) for i in range(blocks))
    return [int.from_bytes(stream[4 * i : 4 * i + 4], "little", signed=True) for i in range(width)]


@given(keys, st.lists(st.text(), max_size=4))
def test_derive_is_hkdf_over_length_prefixed_labels(secret: bytes, labels: list[str]) -> None:
    parts = [b"symbiosis-priv v1", *(label.encode() for label in labels)]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    assert derive(secret, *labels) == HKDF(SHA256(), 32, salt=None, info=info).derive(secret)


def test_moving_characters_between_labels_changes_the_key() -> None:
    assert derive(KEY, "ab", "c") != derive(KEY, "a", "bc")
    seed = Seed(KEY)
    assert mask_key(seed, group_name="a", direction="bforward") != mask_key(seed, group_name="ab", direction="forward")


@given(key=keys, first_row=first_rows, rows=st.integers(0, 4), width=drawn.widths())
def test_expand_is_aes_ctr(key: StreamKey, first_row: int, rows: int, width: int) -> None:
    got = expand(key, first_row=first_row, rows=rows, width=width)
    assert (got.dtype, got.shape, got.is_contiguous()) == (torch.int32, (rows, width), True)
    assert got.tolist() == [by_hand(key, row=first_row + i, width=width) for i in range(rows)]


STEPS = st.tuples(st.integers(0, 3) | first_rows, st.integers(0, 4), st.sampled_from(["expand", "add", "make ahead"]))


@example(key=KEY, width=5, steps=[(0, 1, "make ahead"), (1, 1, "add")])
@given(key=keys, width=drawn.widths(), steps=st.lists(STEPS, max_size=20))
def test_a_keystream_gives_the_requested_rows_whatever_was_made_before(
    key: StreamKey, width: int, steps: list[tuple[int, int, str]]
) -> None:
    keystream = Keystream(key, width=width)
    for first_row, rows, step in steps:
        if step == "make ahead":
            keystream.make_ahead(first_row, rows)
            continue
        got = torch.full((rows, width), 7, dtype=torch.int32)
        if step == "add":
            keystream.add_to(got, first_row=first_row)
            got -= 7
        else:
            got = keystream.expand(first_row, rows)
        assert got.tolist() == [by_hand(key, row=first_row + i, width=width) for i in range(rows)]


def test_threads_share_a_keystream() -> None:
    keystream, width = Keystream(KEY, width=5000), 5000
    want = expand(KEY, first_row=0, rows=64, width=width)

    def masked(first_row: int) -> bool:
        rows = torch.zeros(16, width, dtype=torch.int32)
        keystream.make_ahead(first_row, 4)
        keystream.add_to(rows[:4], first_row=first_row)
        keystream.add_to(rows[4:], first_row=first_row + 4)
        return torch.equal(rows, want[first_row : first_row + 16])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(masked, [16 * (i % 4) for i in range(400)]))


@pytest.mark.parametrize("width", [4096, 4097, 1 << 17, (1 << 17) + 3])
def test_pieces_are_one_stream(width: int) -> None:
    """Rows that span several encryption blocks, and end inside one."""
    rows = (1 << 18) // width + 2
    got = expand(KEY, first_row=5, rows=rows, width=width)
    assert got[0].tolist() == by_hand(KEY, row=5, width=width)
    assert got[-1].tolist() == by_hand(KEY, row=5 + rows - 1, width=width)
    added = torch.ones(rows, width, dtype=torch.int32)
    Keystream(KEY, width=width).add_to(added, first_row=5)
    assert torch.equal(added, got + 1)


@pytest.mark.parametrize("width", [4096, 1 << 17])
def test_threads_fill_the_memory_that_is_given(width: int) -> None:
    """Each writes no further than its own rows, also where a cipher asks for room after them."""
    rows, taken, before = (1 << 20) // width, list[NDArray[np.int32]](), torch.get_num_threads()

    def memory(entries: int) -> NDArray[np.int32]:
        taken.append(np.full(entries, 77, dtype=np.int32))
        return taken[0]

    torch.set_num_threads(4)
    try:
        got = Keystream(KEY, width=width).expanded(5, rows, memory)
    finally:
        torch.set_num_threads(before)
    assert got.ctypes.data == taken[0].ctypes.data
    assert set(taken[0][rows * width :]) == {77}
    for row in range(rows):
        assert (got[row] == expand(KEY, first_row=5 + row, rows=1, width=width)[0].numpy()).all()


@pytest.mark.parametrize(
    ("first_row", "rows", "width"),
    [*((-1, 1, 4), (0, -1, 4), (0, 1, 0), (MAX_ROW, 1, 4)), *((MAX_ROW - 1, 2, 4), (0, 1 << 40, 4), (0, 1, 1 << 40))],
)
def test_impossible_requests_take_no_memory(first_row: int, rows: int, width: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RangeError):
            expand(KEY, first_row=first_row, rows=rows, width=width)
        for key in (bytes(16), bytes(33)):
            with pytest.raises(RangeError):
                Keystream(StreamKey(key), width=4)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
