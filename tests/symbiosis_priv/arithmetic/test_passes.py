"""The two passes, compiled and with torch: the same bits as their separate steps, on every build."""

import gc
import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic import modular, passes
from symbiosis_priv.arithmetic.keystream import StreamKey
from symbiosis_priv.arithmetic.passes import Buffers
from symbiosis_priv.arithmetic.quantise import Layer, quantise
from symbiosis_priv.arithmetic.ring import Bound, dequantise, quantise_rows
from symbiosis_priv.errors import NonFiniteError, RangeError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.limits import RingBits
from tests import drawn
from tests.builds import BUILDS, TORCH, build
from tests.warm import run

KEY = StreamKey(bytes(range(32)))


def bound_of(width: int) -> Bound:
    return Bound(inputs=width, weight_absmax=511, weight_norm=511 * math.sqrt(width) / 2)


def bits(tensor: Tensor) -> Tensor:
    """Floats as integers: nan equals nan, and -0 is not 0."""
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(size)


def cut(data: st.DataObject, width: int) -> list[int]:
    """Widths of siblings that make up `width`."""
    ends = sorted({*data.draw(st.lists(st.integers(1, width), max_size=2)), width})
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def scales(width: int, seed: int) -> Tensor:
    """float64 `[width]`, as weight scales are."""
    return torch.from_numpy(np.random.default_rng(seed).uniform(1e-6, 1e-2, width))


@given(data=st.data(), rows=testing.float_rows(width=drawn.widths(), largest=1e300))
def test_encode_equals_quantising_and_computing_the_check_value(data: st.DataObject, rows: Tensor) -> None:
    width = rows.shape[1]
    fold = data.draw(st.none() | st.builds(scales, st.just(width), st.integers(0, 9)))
    column = data.draw(st.none() | st.just(modular.uniform(KEY, width)))
    parts = rows.split(cut(data, width), dim=1)

    xq, scale = quantise_rows(rows if fold is None else rows.double() * fold, bound_of(width))
    for name in BUILDS:
        out, expected = torch.full_like(xq, 7), torch.full((len(xq),), 7)
        with build(name):
            got = passes.encode(parts, bound=bound_of(width), out=out, fold=fold, v=column, expected=expected)
        assert torch.equal(out, xq), name
        assert torch.equal(bits(got), bits(scale[:, 0])), name
        assert torch.equal(expected, torch.full((len(xq),), 7) if column is None else modular.dot(xq, column)), name


@given(
    data=st.data(),
    answer=testing.ring_rows(width=8) | drawn.widths().flatmap(lambda width: testing.ring_rows(width=width)),
    dtype=st.sampled_from(testing.FLOAT_DTYPES),
    helpers=st.integers(0, 3),
)
def test_decode_equals_subtracting_dequantising_and_storing(
    data: st.DataObject, answer: Tensor, dtype: torch.dtype, helpers: int
) -> None:
    count, width = answer.shape
    effects = [data.draw(testing.ring_rows(width=width, count=count)) for _ in range(helpers)]
    channel_scale = data.draw(st.none() | st.builds(scales, st.just(width), st.integers(0, 9)))
    bias = None if channel_scale is None else data.draw(st.none() | st.builds(scales, st.just(width), st.just(10)))
    scale = torch.from_numpy(10.0 ** np.random.default_rng(data.draw(st.integers(0, 9))).uniform(-320, 300, count))
    widths = cut(data, width)

    y = answer.clone()
    for effect in effects:
        y -= effect
    ring_bits: RingBits = data.draw(st.sampled_from([24, 32]))
    y = y << 32 - ring_bits >> 32 - ring_bits
    column = modular.uniform(KEY, width)
    floats = dequantise(y, scale=scale[:, None], channel_scale=channel_scale)
    floats = floats if bias is None else floats + bias
    want = [part.to(dtype) for part in floats.split(widths, dim=1)]
    for name in BUILDS:
        outputs = [torch.full_like(part, 7) for part in want]
        with build(name):
            wrong = passes.decode(
                answer,
                outputs,
                scale=scale,
                effects=effects,
                channel_scale=channel_scale,
                bias=bias,
                column=column,
                expected=modular.dot(y, column),
                ring_bits=ring_bits,
            )
        assert not wrong, name
        for got, part in zip(outputs, want, strict=True):
            assert torch.equal(bits(got), bits(part)), name


@pytest.mark.parametrize("name", BUILDS)
@given(data=st.data(), width=drawn.widths(), error=st.integers(1, 2**32 - 1))
def test_no_wrong_row_passes(name: str, data: st.DataObject, width: int, error: int) -> None:
    """A wrong row passes once in 2^60, for errors of every valuation and errors that wrap around."""
    answer = data.draw(testing.ring_rows(width=width, count=st.integers(1, 4)))
    column = modular.uniform(KEY, width)
    expected = modular.dot(answer, column)
    place = data.draw(st.integers(0, answer.numel() - 1))
    wrong = answer.to(torch.int64)
    wrong.view(-1)[place] += error
    lie = wrong.to(torch.int32)
    outputs = [torch.full(answer.shape, 7.0)]
    scale = torch.ones(len(answer), dtype=torch.float64)
    with build(name):
        rows = [place // width]
        assert passes.decode(lie, outputs, scale=scale, column=column, expected=expected) == rows
        assert passes.refused(lie, column, expected) == rows
        right = passes.unmask(answer + lie, [lie])
        assert passes.refused(right, column, expected) == []
    assert torch.equal(right, answer)


@pytest.mark.parametrize("name", BUILDS)
def test_an_error_of_the_modulus_of_a_smaller_prime_does_not_pass(name: str) -> None:
    """With p = 2^31 - 1, an error of exactly p would pass."""
    answer = torch.zeros(1, 5, dtype=torch.int32)
    column, expected = modular.uniform(KEY, 5), torch.zeros(1, dtype=torch.int64)
    answer[0, 3] = 2**31 - 1
    with build(name):
        assert passes.refused(answer, column, expected) == [0]


@pytest.mark.parametrize("name", BUILDS)
def test_every_bit_of_a_residue_is_compared(name: str) -> None:
    """Residues that differ in one of 61 bits, as the residue of a wrong row may."""
    rows = torch.ones(61, 3, dtype=torch.int32)
    column = modular.uniform(KEY, 3)
    residues = modular.dot(rows, column) ^ 1 << torch.arange(61)
    outputs, scale = [torch.empty(61, 3)], torch.ones(61, dtype=torch.float64)
    with build(name):
        assert passes.decode(rows, outputs, scale=scale, column=column, expected=residues) == list(range(61))
        assert passes.refused(rows, column, residues) == list(range(61))


@pytest.mark.parametrize("name", BUILDS)
@given(
    rows=testing.float_rows(width=drawn.widths(), count=st.integers(1, 4)),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    data=st.data(),
)
def test_non_finite_rows_are_refused(name: str, rows: Tensor, bad: float, data: st.DataObject) -> None:
    i, j = data.draw(st.integers(0, rows.shape[0] - 1)), data.draw(st.integers(0, rows.shape[1] - 1))
    rows[i, j] = bad
    out = torch.empty(rows.shape, dtype=torch.int32)
    with build(name), pytest.raises(NonFiniteError, match="nothing was sent"):
        passes.encode(rows.split(cut(data, rows.shape[1]), dim=1), bound=bound_of(rows.shape[1]), out=out)


@pytest.mark.parametrize("name", BUILDS)
def test_rows_that_overflow_after_folding_are_refused(name: str) -> None:
    rows, fold = torch.full((1, 3), 1e300, dtype=torch.float64), torch.full((3,), 1e10, dtype=torch.float64)
    with build(name), pytest.raises(NonFiniteError):
        passes.encode([rows], bound=bound_of(3), out=torch.empty(1, 3, dtype=torch.int32), fold=fold)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "complex64"])
@pytest.mark.parametrize("name", BUILDS)
def test_wrong_shapes_and_dtypes_are_refused(name: str, dtype: str) -> None:
    wrong: list[list[tuple[int, ...]]] = [[(2, 5)], [(4,)], [(1, 4)], [(2, 2), (2, 3)], [(2, 2), (3, 2)], [(1, 2, 4)]]
    for shapes in wrong if dtype == "float32" else [[(2, 4)]]:
        inputs = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in shapes]
        with build(name), pytest.raises(RangeError):
            passes.encode(inputs, bound=bound_of(4), out=torch.empty(2, 4, dtype=torch.int32))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda rows: rows.t().contiguous().t(),
    "part of a wider one": lambda rows: torch.nn.functional.pad(rows, (3, 2))[:, 3:-2],
    "every other column": lambda rows: torch.stack([rows, rows], dim=-1)[:, :, 1],
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("dtype", testing.FLOAT_DTYPES)
def test_layout_and_threads_change_nothing(
    name: str, dtype: torch.dtype, set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix has enough rows for several threads."""
    monkeypatch.setattr(native, "_SHARE", 1 << 15)
    width = 4099
    generator = np.random.default_rng(0)
    rows = torch.from_numpy(generator.standard_normal((65, width))).to(dtype)
    mask = torch.from_numpy(generator.integers(-(2**31), 2**31, rows.shape, dtype=np.int32))
    column = modular.uniform(KEY, width)
    channel_scale = scales(width, 0)

    def both(inputs: Tensor, y: Tensor) -> list[Tensor]:
        out = torch.empty(rows.shape, dtype=torch.int32)
        expected = torch.empty(len(rows), dtype=torch.int64)
        scale = passes.encode([inputs], bound=bound_of(width), out=out, v=column, expected=expected)
        out += mask
        assert not passes.decode(
            out, [y], scale=scale, effects=[mask], channel_scale=channel_scale, column=column, expected=expected
        )
        return [out, bits(scale), expected, bits(y)]

    with build(TORCH):
        want = both(rows, torch.empty_like(rows))
        assert torch.equal(want[2], modular.dot(want[0] - mask, column))  # a "layer" whose product equals its input
    with build(name):
        for threads in (1, 2, 5):
            set_threads(threads)
            for got, part in zip(both(rows, torch.empty_like(rows)), want, strict=True):
                assert torch.equal(got, part)
        for layout, arranged in LAYOUTS.items():
            others = both(arranged(rows), arranged(torch.empty_like(rows)))
            assert all(torch.equal(a, b) for a, b in zip(others, want, strict=True)), layout
        first = both(rows[:1].expand_as(rows), torch.empty_like(rows))
        assert torch.equal(first[1], want[1][:1].expand(len(rows)))


@pytest.mark.parametrize("name", BUILDS)
def test_a_wrong_row_is_found_by_any_thread_and_not_stored(name: str, set_threads: Callable[[int], None]) -> None:
    set_threads(4)
    width = 4096
    column = modular.uniform(KEY, width)
    answer = torch.zeros(400, width, dtype=torch.int32)
    expected, scale = torch.zeros(400, dtype=torch.int64), torch.ones(400, dtype=torch.float64)
    with build(name):
        for row in (0, 199, 399):
            outputs = [torch.full((400, width), 7.0)]
            answer[row, row] = -(2**31)
            assert passes.decode(answer, outputs, scale=scale, column=column, expected=expected) == [row]
            assert name == TORCH or bool((outputs[0][row] == 7.0).all())
            answer[row, row] = 0
        assert not passes.decode(answer, outputs, scale=scale, column=column, expected=expected)


@pytest.mark.parametrize("name", [name for name in BUILDS if name != TORCH])
def test_bits_do_not_depend_on_the_threads_floating_point_mode(name: str) -> None:
    """torch.set_flush_denormal, or a library compiled with -ffast-math, changes the mode of some threads."""
    rows = torch.cat([torch.full((2, 32), 1e-41), torch.linspace(-1, 1, 64).view(2, 32)], dim=1)

    def outcome() -> list[Tensor]:
        xq, y = torch.empty((2, 64), dtype=torch.int32), torch.empty((2, 64), dtype=torch.float64)
        scale = passes.encode([rows], bound=bound_of(64), out=xq)
        passes.decode(xq, [y], scale=1e-320 * scale)
        quantised = quantise([Layer("weight", rows[:, :32], None)])
        return [xq, bits(scale), bits(y), quantised.weight, bits(quantised.channel_scale)]

    def flushed() -> list[Tensor]:
        try:
            if not torch.set_flush_denormal(True):
                pytest.skip("torch cannot set the mode on this machine")
            assert not torch.full((1,), 1e-41).any()
            return outcome()
        finally:
            torch.set_flush_denormal(False)

    with build(name), ThreadPoolExecutor(1) as pool:
        for got, want in zip(pool.submit(flushed).result(), outcome(), strict=True):
            assert torch.equal(got, want)


# Buffers are reused after their last reference is gone, and never before


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
