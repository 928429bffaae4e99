"""Buffers are reused after their last reference is gone, and never before."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.passes import Buffers, large_tensor
from tests.warm import run

MIB = 1 << 20


def address(matrix: Tensor) -> int:
    return matrix.untyped_storage().data_ptr()


@given(shapes=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 700)), max_size=12), limit=st.integers(0, 4 * MIB))
def test_two_buffers_in_use_never_share_a_byte(shapes: list[tuple[int, int]], limit: int) -> None:
    buffers = Buffers(limit=limit)
    for _ in range(2):  # the second time in memory that was used before
        held = [buffers.matrix(rows, columns).fill_(number) for number, (rows, columns) in enumerate(shapes)]
        for number, (matrix, shape) in enumerate(zip(held, shapes, strict=True)):
            assert matrix.shape == shape
            assert matrix.dtype == torch.int32
            assert matrix.is_contiguous()
            assert bool((matrix == number).all())
        held, matrix = [], torch.empty(0)
        assert buffers.unused <= limit


@pytest.mark.parametrize("look", [lambda m: m[5:], lambda m: m.view(-1), lambda m: m.numpy(), lambda m: m.t()[3]])
def test_a_view_keeps_its_buffer_in_use(look: object) -> None:
    assert callable(look)
    buffers = Buffers(limit=64 * MIB)
    matrix = buffers.matrix(512, 1024)
    place, view = address(matrix), look(matrix)
    del matrix
    gc.collect()
    assert buffers.unused == 0
    assert address(buffers.matrix(512, 1024)) != place
    del view
    gc.collect()
    assert buffers.unused >= 2 * MIB


def test_a_free_buffer_is_used_again() -> None:
    buffers = Buffers(limit=64 * MIB)
    places = set()
    for rows in (512, 500, 512, 490):  # similar shapes share buffers
        matrix = buffers.matrix(rows, 1024)
        places.add(address(matrix))
        del matrix
    assert len(places) == 1


def test_unused_memory_is_limited() -> None:
    buffers = Buffers(limit=5 * MIB)
    held = [buffers.matrix(512, 1024) for _ in range(4)]
    assert buffers.unused == 0
    del held
    assert buffers.unused == 4 * MIB


def test_the_buffer_unused_for_longest_is_freed() -> None:
    """Sizes that occur once, as in a first step, do not displace sizes that occur repeatedly."""
    buffers = Buffers(limit=8 * MIB)
    once = [buffers.matrix(256, 1024) for _ in range(8)]
    del once
    often = buffers.matrix(512, 1024)
    place = address(often)
    del often
    assert buffers.unused == 8 * MIB
    again = buffers.matrix(512, 1024)
    assert address(again) == place
    assert buffers.unused == 6 * MIB


def test_a_buffer_larger_than_the_limit_frees_no_other() -> None:
    buffers = Buffers(limit=MIB)
    small, large = buffers.matrix(256, 512), buffers.matrix(1024, 1024)
    del small
    del large
    assert buffers.unused == MIB // 2


def test_a_forked_child_writes_into_its_own_pages() -> None:
    script = """if True:
        import os, sys
        from symbiosis_priv.arithmetic.passes import Buffers
        matrix = Buffers(limit=1 << 24).matrix(1024, 1024).zero_()
        if not (child := os.fork()):
            matrix.numpy().fill(7)
            os._exit(0)
        os.waitpid(child, 0)
        sys.exit(int((matrix.numpy() != 0).any()))
    """
    run([sys.executable, "-c", script], check=True, timeout=60)


def test_threads_may_take_and_return_at_once() -> None:
    buffers, start = Buffers(limit=16 * MIB), threading.Barrier(4)

    def work(number: int) -> bool:
        start.wait()
        for turn in range(200):
            matrix = buffers.matrix(300, 300 + turn % 3).fill_(number)
            if not bool((matrix == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert 0 < buffers.unused <= 16 * MIB


@pytest.mark.parametrize("shape", [(0, 7), (3, 5), (600, 3, 64, 2)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_a_large_tensor_is_not_part_of_the_pool(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    one, other = large_tensor(shape, dtype=dtype).fill_(1), large_tensor(shape, dtype=dtype).fill_(2)
    assert one.shape == shape
    assert one.dtype == dtype
    assert one.is_contiguous()
    assert bool((one == 1).all())
    assert bool((other == 2).all())
