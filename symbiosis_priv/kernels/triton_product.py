"""The program that a GPU runs for `TritonKernel`. Importing this imports Triton.

One program computes a tile of the result from a share of its terms. With balanced int8 limbs of rows and balanced int8
digits of weights,

    row = sum_i limb_i 2^(8 i),  weight = sum_j digit_j 2^(8 j),  result = sum_s 2^(8 s) sum_(i+j=s) limb_i . digit_j

modulo 2^32, so s < 4. In each step, one product on the int8 tensor cores adds to the sums of all s. Row block s of its
first matrix belongs to the sum of s. Its terms are those of every digit: where the second matrix has digit j, block s
has limb s - j, or zeros if there is no such limb.

A step has only one product, because Triton 3.7 waits for every int8 product before it continues
(`dotCanBeProperlyAsync`). No operand is made in registers, so the loads of later steps run during the product.

Triton's int8 products saturate on many GPUs (`mma...satfinite`) where all other int32 arithmetic wraps, so no
accumulator may leave int32, and a program takes at most 2^16 terms (`triton_kernel.MAX_TERMS`). Each term adds at most
2^7 * 2^7 from the low digit to an accumulator, and at most 2^7 * 2^3 from the high digit, because the high digit of a
weight of 12 bits or fewer is at most 2^3: (2^14 + 2^10) 2^16 < 2^31. Programs of one tile add their partial sums with
atomics; the order makes no difference modulo 2^32.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def tile(
    limbs,  # int8 [4, count, row_stride]
    digits,  # int8; the high digits begin `plane` entries after the low digits
    result,  # int32 [count, columns]; must be zeros if a tile has several programs
    count,
    width,
    columns,
    row_stride,
    plane,
    stride,  # of an output channel in `digits`
    share,  # terms of one program
    FORWARD: tl.constexpr,
    DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, width)

    block, row = tl.arange(0, 4 * ROWS)[:, None] // ROWS, first_row + tl.arange(0, 4 * ROWS)[:, None] % ROWS
    digit, term = tl.arange(0, DIGITS * TERMS)[None, :] // TERMS, tl.arange(0, DIGITS * TERMS)[None, :] % TERMS
    limb_at = limbs + ((block - digit) * count + row) * row_stride + begin + term
    there = (block >= digit) & (row < count)

    if FORWARD:
        order, across = tl.arange(0, DIGITS * TERMS)[:, None], column[None, :]
        term_stride, column_stride = 1, stride
    else:
        # Tensor cores need the terms of a column side by side. A thread that has four of them stores them as one word.
        order = 4 * tl.arange(0, DIGITS * TERMS // 4)[None, :, None] + tl.arange(0, 4)[:, None, None]
        across = column[None, None, :]
        term_stride, column_stride = stride, 1
    from_begin = order % TERMS
    digit_at = digits + order // TERMS * plane + (begin + from_begin).to(tl.int64) * term_stride
    digit_at += across * column_stride

    sums = tl.zeros((4 * ROWS, COLUMNS), dtype=tl.int32)
    for start in range(begin, end, TERMS):
        x = tl.load(limb_at, mask=there & (start + term < end), other=0)
        w = tl.load(digit_at, mask=(across < columns) & (start + from_begin < end), other=0)
        if not FORWARD:
            w = tl.reshape(tl.permute(w, (1, 0, 2)), (DIGITS * TERMS, COLUMNS))
        sums = tl.dot(x, w, sums, out_dtype=tl.int32)
        limb_at += TERMS
        digit_at += TERMS * term_stride
    total = tl.sum(tl.reshape(sums << 8 * block, (4, ROWS, COLUMNS)), axis=0)

    out = first_row + tl.arange(0, ROWS)[:, None]
    result_at = result + out * columns + column[None, :]
    inside = (out < count) & (column < columns)[None, :]
    if tl.num_programs(2) == 1:
        tl.store(result_at, total, mask=inside)
    else:
        tl.atomic_add(result_at, total, mask=inside)
