"""The program that a GPU runs for `TritonKernel`. Importing this imports Triton.

One program computes a tile of the result from a share of its terms. Step by step it reads a tile of int32 rows, splits
it into balanced int8 limbs in registers, reads a tile of weight digits, and multiplies on the int8 tensor cores:

    row = sum_i limb_i 2^(8 i),  weight = sum_j digit_j 2^(8 j),  result = sum_s 2^(8 s) sum_(i+j=s) limb_i . digit_j

modulo 2^32, so s < 4: seven products for two digits, four for one. Products of one s share an accumulator.

Triton's int8 products saturate on many GPUs (`mma...satfinite`) where all other int32 arithmetic wraps, so no
accumulator may leave int32, and a program takes at most 2^16 terms (`triton_kernel.MAX_TERMS`). Each term adds at most
2^7 * 2^7 from the low digit to an accumulator, and at most 2^7 * 2^3 from the high digit, because the high digit of a
weight of 12 bits or fewer is at most 2^3: (2^14 + 2^10) 2^16 < 2^31. Programs of one tile add their partial sums with
atomics; the order makes no difference modulo 2^32.
"""

import triton
import triton.language as tl

# 0x80808080 as int32: adding it and then xoring with it makes every byte a balanced digit
_BALANCE = tl.constexpr(-0x7F7F7F80)


@triton.jit(do_not_specialize=["count"])
def tile(
    rows,  # int32 [count, width]
    digits,  # int8; the high digits begin `plane` entries after the low digits
    result,  # int32 [count, columns]; must be zeros if a tile has several programs
    count,
    width,
    columns,
    plane,
    term_stride,
    column_stride,
    share,  # terms of one program
    TWO_DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    across, down = tl.arange(0, TERMS)[None, :], tl.arange(0, TERMS)[:, None]
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, width)
    row_at = rows + row * width + begin + across
    digit_at = digits + (begin + down).to(tl.int64) * term_stride + column * column_stride
    sum_0 = tl.full((ROWS, COLUMNS), 0, dtype=tl.int32)
    sum_1 = tl.full((ROWS, COLUMNS), 0, dtype=tl.int32)
    sum_2 = tl.full((ROWS, COLUMNS), 0, dtype=tl.int32)
    sum_3 = tl.full((ROWS, COLUMNS), 0, dtype=tl.int32)
    for start in range(begin, end, TERMS):
        x = tl.load(row_at, mask=(row < count) & (start + across < end), other=0)
        x = (x + _BALANCE) ^ _BALANCE
        limb_0, limb_1 = x.to(tl.int8), (x >> 8).to(tl.int8)
        limb_2, limb_3 = (x >> 16).to(tl.int8), (x >> 24).to(tl.int8)
        inside = (start + down < end) & (column < columns)
        low = tl.load(digit_at, mask=inside, other=0)
        sum_0 = tl.dot(limb_0, low, sum_0, out_dtype=tl.int32)
        sum_1 = tl.dot(limb_1, low, sum_1, out_dtype=tl.int32)
        sum_2 = tl.dot(limb_2, low, sum_2, out_dtype=tl.int32)
        sum_3 = tl.dot(limb_3, low, sum_3, out_dtype=tl.int32)
        if TWO_DIGITS:
            high = tl.load(digit_at + plane, mask=inside, other=0)
            sum_1 = tl.dot(limb_0, high, sum_1, out_dtype=tl.int32)
            sum_2 = tl.dot(limb_1, high, sum_2, out_dtype=tl.int32)
            sum_3 = tl.dot(limb_2, high, sum_3, out_dtype=tl.int32)
        row_at += TERMS
        digit_at += TERMS * term_stride
    total = sum_0 + (sum_1 << 8) + (sum_2 << 16) + (sum_3 << 24)
    result_at = result + row * columns + column
    inside = (row < count) & (column < columns)
    if tl.num_programs(2) == 1:
        tl.store(result_at, total, mask=inside)
    else:
        tl.atomic_add(result_at, total, mask=inside)
