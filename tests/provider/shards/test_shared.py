"""Columns of a result in shared memory. `test_sharded.py` shares memory among processes."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from provider.shards import shared
from provider.shards.shared import SharedRows
from tests.memory import OnGPU


def copy_2d(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int, stream: int
) -> int:
    """What `cudaMemcpy2DAsync` does."""
    assert (kind, stream) == (4, 7)
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
    return 0


def rows_of(entries: int, device: str = "cpu") -> SharedRows:
    file = os.memfd_create("test")
    os.ftruncate(file, 8 * entries)
    try:
        return SharedRows(file, entries, torch.device(device))
    finally:
        os.close(file)


@given(
    rows=st.integers(0, 5),
    widths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    copies=st.sampled_from([None, copy_2d]),
)
def test_ranks_write_their_columns(rows: int, widths: list[int], copies: object) -> None:
    memory, total, first, waits = rows_of(100), sum(widths), 0, list[int]()
    whole = torch.arange(rows * total, dtype=torch.int32).view(rows, total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_copy_2d", lambda: copies)
        stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: waits.append(1))
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        for place, width in enumerate(widths):
            columns = slice(first, first + width)
            product = whole[:, columns].contiguous()
            memory.write(product.as_subclass(OnGPU) if place else product, columns, width=total)
            first += width
    assert torch.equal(memory.result(rows, total), whole)
    assert len(waits) == (sum(1 for width in widths[1:] if width) if copies and rows else 0)


@given(rows=st.integers(1, 5), widths=st.lists(st.integers(0, 4), min_size=1, max_size=4), pitch=st.integers(0, 3))
def test_ranks_take_their_columns(rows: int, widths: list[int], pitch: int) -> None:
    """A card reads its columns where they lie, with one copy."""
    memory, total, first = rows_of(100), sum(widths), 0
    memory.put(whole := torch.arange(rows * total, dtype=torch.int32).view(rows, total))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_copy_2d", lambda: copy_2d)
        stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        for width in widths:
            columns = slice(first, first + width)
            near = torch.zeros((rows, width), dtype=torch.int32)
            shared._copy(near.as_subclass(OnGPU), memory.rows(rows, total)[:, columns], torch.device("cuda:1"))
            assert torch.equal(near, whole[:, columns])
            assert torch.equal(memory.take(rows, total, columns), whole[:, columns])
            first += width


def test_a_copy_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_copy_2d", lambda: lambda *_: 700)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    product = torch.ones(2, 2, dtype=torch.int32).as_subclass(OnGPU)
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync returns 700"):
        rows_of(8).write(product, slice(0, 2), width=4)


@pytest.mark.parametrize("status", [0, 801])
def test_memory_that_cannot_be_locked_is_used_all_the_same(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the error until torch starts a program and raises it."""
    kept = [status]

    def ones(*_: object, **__: object) -> None:
        if kept.pop():
            raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: status))
    monkeypatch.setattr(torch, "ones", ones)
    rows_of(8, "cuda:1")
    assert kept == ([] if status else [0])


def test_rows_are_put_in_chunks_that_fit() -> None:
    memory = rows_of(100)
    assert [memory.chunk(*widths) for widths in ((10, 3), (3, 50), (100, 100))] == [10, 2, 1]
    rows = torch.arange(20, dtype=torch.int32).view(2, 10)
    memory.put(rows)
    assert torch.equal(memory.rows(2, 10), rows)
