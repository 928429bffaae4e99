"""The programs that a GPU runs for `TritonKernel`. Importing this imports Triton.

`split` divides rows into balanced limbs of 8 bits, and `tile` computes a tile of the result from a share of its terms:

    row = sum_i limb_i 2^(8 i),   result = sum_s 2^(8 s) sums_s   modulo 2^(8 LIMBS), so s < LIMBS

A weight of up to 8 bits is stored as it is. A wider one is a low byte and HIGH bits: weight = low + 256 high + OFFSET,
with low in [-128, 127], high in [0, 2^HIGH) and OFFSET = 128 - 2^(7 + HIGH).

int8 (CHUNK = 0). sums_s = limb_s . low + limb_(s-1) . high, and OFFSET times the sum of the row is added to the result:
seven products per weight for 32 bits, five for 24, and four and three for weights of 8 bits. Triton's int8 products
saturate on many GPUs (`mma...satfinite`) where all other int32 arithmetic wraps, so no accumulator may leave int32: a
term adds at most 2^7 * 2^7 from the low byte and 2^7 * (2^4 - 1) from the high bits, and a program takes at most 2^16
terms (`triton_kernel.MAX_TERMS`): (2^14 + 15 * 2^7) 2^16 < 2^31.

float16 (CHUNK > 0). Limbs, and whole weights of up to 12 bits, are integers that float16 holds: sums_s = limb_s .
weight. A float32 sum of integers is exact up to 2^24, whatever the order, also where a unit aligns the products with
the largest one and keeps 24 bits. So sums_s is added to int32 after every CHUNK terms (`triton_kernel.chunk`), and
starts again.

Programs of one tile add their partial sums with atomics; the order makes no difference modulo 2^32.
"""

import triton
import triton.language as tl

BALANCE = tl.constexpr(-0x7F7F7F80)  # 0x80808080: adding it and then xoring with it makes every byte a balanced limb
BLOCKS = tl.constexpr(16)  # of `sums` that are read at once


@triton.jit(do_not_specialize=["rows", "count", "width"])
def split(
    rows,  # int32 [count, width]
    limbs,  # int8 or float16 [count, LIMBS, stride]; zeros beyond the width
    sums,  # int32 [count, blocks]: OFFSET times the sums of the row's blocks
    count,
    width,
    stride,
    LIMBS: tl.constexpr,
    OFFSET: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(rows + row * width + column, mask=(row < count) & (column < width), other=0)
    if OFFSET:
        total = OFFSET * tl.sum(x, axis=1, keep_dims=True)
        tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), total, mask=row < count)
    x = (x + BALANCE) ^ BALANCE
    there = (row < count) & (column < stride)
    for limb in tl.static_range(LIMBS):
        digit = (x >> 8 * limb).to(tl.int8)
        tl.store(limbs + (row * LIMBS + limb) * stride + column, digit.to(limbs.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["result", "count", "width", "columns", "share", "blocks"])
def tile(
    limbs,  # of `split`
    sums,  # of `split`
    weights,  # int8 [outputs, stride]; the high bits of an output begin at `high`
    result,  # int32 [count, columns]; must be zeros if a tile has several programs
    count,
    width,
    columns,
    limb_stride,
    high,
    stride,
    share,  # steps of one program
    blocks,
    FORWARD: tl.constexpr,
    HIGH: tl.constexpr,
    CHUNK: tl.constexpr,
    LIMBS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    PER: tl.constexpr = 8 // HIGH if HIGH else 1  # weights in a byte of high bits: byte r of a block has r, r + 16, ...
    SUM: tl.constexpr = tl.float32 if CHUNK else tl.int32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1).to(tl.int64) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    begin = tl.program_id(2) * share * TERMS
    end = tl.minimum(begin + share * TERMS, width)
    term = tl.arange(0, TERMS)[:, None]

    limb_at = limbs + row[:, None] * LIMBS * limb_stride + begin + tl.arange(0, TERMS)[None, :]
    if FORWARD:
        lines = weights + column[None, :] * stride
        low_at = lines + begin + term
        high_at = lines + high + begin // PER + tl.arange(0, TERMS // PER)[:, None]
        shifts = HIGH * tl.arange(0, PER)[None, :, None, None]
        step, high_step = TERMS, TERMS // PER
    else:
        lines = weights + (begin + term).to(tl.int64) * stride
        low_at = lines + column[None, :]
        high_at = lines + high + first_column // PER + tl.arange(0, COLUMNS // PER)[None, :]
        shifts = HIGH * tl.arange(0, PER)[None, None, :, None]
        step, high_step = TERMS * stride, TERMS * stride

    here = (row < count)[:, None]
    total = tl.full((ROWS, COLUMNS), 0, tl.int32)
    s0 = tl.full((ROWS, COLUMNS), 0, SUM)
    s1 = tl.full((ROWS, COLUMNS), 0, SUM)
    s2 = tl.full((ROWS, COLUMNS), 0, SUM)
    s3 = tl.full((ROWS, COLUMNS), 0, SUM)
    for start in range(begin, end, TERMS):
        # the mask is the same along memory, so that whole words are loaded; limbs beyond the width are zeros
        there = (column < columns)[None, :] if FORWARD else start + term < width
        w = tl.load(low_at, mask=there, other=0)
        if HIGH:
            high_bits = tl.load(high_at, mask=there, other=0)
            if FORWARD:
                high_bits = tl.reshape(high_bits, (TERMS // 16 // PER, 1, 16, COLUMNS))
            else:
                high_bits = tl.reshape(high_bits, (TERMS, COLUMNS // 16 // PER, 1, 16))
            h = tl.reshape((high_bits >> shifts) & ((1 << HIGH) - 1), (TERMS, COLUMNS)).to(tl.int8)
        if CHUNK:
            if HIGH:
                w = w.to(tl.int16) + (h.to(tl.int16) << 8) + (128 - (128 << HIGH))
            w = w.to(tl.float16)
        x0 = tl.load(limb_at, mask=here, other=0)
        x1 = tl.load(limb_at + limb_stride, mask=here, other=0)
        x2 = tl.load(limb_at + 2 * limb_stride, mask=here, other=0)
        s0 = tl.dot(x0, w, s0, out_dtype=SUM)
        s1 = tl.dot(x1, w, s1, out_dtype=SUM)
        s2 = tl.dot(x2, w, s2, out_dtype=SUM)
        if LIMBS == 4:
            s3 = tl.dot(tl.load(limb_at + 3 * limb_stride, mask=here, other=0), w, s3, out_dtype=SUM)
        if HIGH and CHUNK == 0:
            s1 = tl.dot(x0, h, s1, out_dtype=SUM)
            s2 = tl.dot(x1, h, s2, out_dtype=SUM)
            if LIMBS == 4:
                s3 = tl.dot(x2, h, s3, out_dtype=SUM)
        limb_at += TERMS
        low_at += step
        high_at += high_step
        if CHUNK:  # noqa: SIM102  (known when compiling)
            if (start - begin) % CHUNK == CHUNK - TERMS:
                total += s0.to(tl.int32) + (s1.to(tl.int32) << 8) + (s2.to(tl.int32) << 16) + (s3.to(tl.int32) << 24)
                s0 = tl.full((ROWS, COLUMNS), 0, SUM)
                s1 = tl.full((ROWS, COLUMNS), 0, SUM)
                s2 = tl.full((ROWS, COLUMNS), 0, SUM)
                s3 = tl.full((ROWS, COLUMNS), 0, SUM)
    total += s0.to(tl.int32) + (s1.to(tl.int32) << 8) + (s2.to(tl.int32) << 16) + (s3.to(tl.int32) << 24)
    if HIGH and CHUNK == 0:  # noqa: SIM102
        if tl.program_id(2) == 0:
            for first in range(0, blocks, BLOCKS):
                block = first + tl.arange(0, BLOCKS)[None, :]
                part = tl.load(sums + row[:, None] * blocks + block, mask=here & (block < blocks), other=0)
                total += tl.sum(part, axis=1)[:, None]
    result_at = result + row[:, None] * columns + column[None, :]
    inside = here & (column < columns)[None, :]
    if tl.num_programs(2) == 1:
        tl.store(result_at, total, mask=inside)
    else:
        tl.atomic_add(result_at, total, mask=inside, sem="relaxed")  # no fences: nobody reads it before the end
