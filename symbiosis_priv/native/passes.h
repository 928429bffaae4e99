/* The tenant's passes over its rows: quantise and compute the expected check; subtract, check, dequantise and store.
 *
 * Both work row by row, so that a row stays in the cache between its steps; the bits are those of passes.py's torch
 * code, step for step (same float64 operations in the same order, round to nearest even, nothing contracted).
 * Loops are plain C that compilers vectorise; each pass is instantiated once per instruction set. */
#ifndef SYMBIOSIS_PASSES_H
#define SYMBIOSIS_PASSES_H

#include "common.h"
#include <math.h>
#include <stdlib.h>

/* Arithmetic modulo p = 2^61 - 1. A column of residues comes as three arrays of limbs, r0 + 2^21 r1 + 2^41 r2, so that
 * products with int32 are below 2^52 and CHECK_BLOCK of them sum up exactly in int64. */
#define P61 ((1ull << 61) - 1)
#define CHECK_BLOCK 1024
#define LIMB_1 21
#define LIMB_2 41

INLINE uint64_t p61_of(int64_t x) {
    uint64_t size = x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
    size = (size & P61) + (size >> 61);
    if (size >= P61) size -= P61;
    return x < 0 && size ? P61 - size : size;
}

INLINE uint64_t p61_add(uint64_t a, uint64_t b) {
    uint64_t sum = a + b;
    return sum >= P61 ? sum - P61 : sum;
}

INLINE uint64_t p61_shift(uint64_t x, int bits) { return ((x << bits) & P61) | (x >> (61 - bits)); }

INLINE uint64_t p61_join(int64_t low, int64_t middle, int64_t high) {
    uint64_t upper = p61_add(p61_shift(p61_of(middle), LIMB_1), p61_shift(p61_of(high), LIMB_2));
    return p61_add(p61_of(low), upper);
}

/* row . column mod p; `limbs` int32 [3, width] */
INLINE uint64_t p61_dot(const int32_t *row, const int32_t *limbs, int64_t width) {
    const int32_t *r0 = limbs, *r1 = limbs + width, *r2 = limbs + 2 * width;
    uint64_t total = 0;
    for (int64_t start = 0; start < width; start += CHECK_BLOCK) {
        int64_t stop = start + CHECK_BLOCK < width ? start + CHECK_BLOCK : width;
        int64_t low = 0, middle = 0, high = 0;
        for (int64_t i = start; i < stop; i++) {
            low += (int64_t)row[i] * r0[i];
            middle += (int64_t)row[i] * r1[i];
            high += (int64_t)row[i] * r2[i];
        }
        total = p61_add(total, p61_join(low, middle, high));
    }
    return total;
}

#if HAVE_X86
/* The same. `vpmuldq` takes every other entry, so the entries between are shifted to their places. */
INLINE TARGET_AVX512 uint64_t p61_dot_512(const int32_t *row, const int32_t *limbs, int64_t width) {
    uint64_t total = 0;
    for (int64_t start = 0; start < width; start += CHECK_BLOCK) {
        int64_t stop = least(start + CHECK_BLOCK, width);
        __m512i sums[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int64_t i = start; i < stop; i += 16) {
            __mmask16 present = (__mmask16)(stop - i < 16 ? (1 << (stop - i)) - 1 : 0xffff);
            __m512i x = _mm512_maskz_loadu_epi32(present, row + i), odd = _mm512_srli_epi64(x, 32);
            UNROLL for (int j = 0; j < 3; j++) {
                __m512i r = _mm512_maskz_loadu_epi32(present, limbs + j * width + i);
                __m512i both = _mm512_add_epi64(_mm512_mul_epi32(x, r), _mm512_mul_epi32(odd, _mm512_srli_epi64(r, 32)));
                sums[j] = _mm512_add_epi64(sums[j], both);
            }
        }
        int64_t low = _mm512_reduce_add_epi64(sums[0]), middle = _mm512_reduce_add_epi64(sums[1]);
        total = p61_add(total, p61_join(low, middle, _mm512_reduce_add_epi64(sums[2])));
    }
    return total;
}
#endif

typedef uint64_t dot_function(const int32_t *row, const int32_t *limbs, int64_t width);

/* Float formats, as passes.py numbers them. */
enum format { FORMAT_F32 = 0, FORMAT_F64 = 1, FORMAT_BF16 = 2 };

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* A matrix given as `count` column blocks of one format: the tensors of the group's linears. */
struct parts {
    int64_t format, count;
    struct part {
        int64_t data;   /* address */
        int64_t stride; /* entries from row to row */
        int64_t width;
    } part[];
};

#define NO_MEMORY (-1)

/* Load one row as float64. Returns the bits of its largest absolute value, which order like the values, nan last. */
INLINE uint64_t load_row(const struct parts *in, int64_t row, const double *fold, double *restrict to) {
    int64_t peak = 0;
    for (const struct part *part = in->part; part < in->part + in->count; part++) {
        int64_t width = part->width, first = row * part->stride;
#define LOAD(type, convert)                                            \
    do {                                                               \
        const type *from = (const type *)(intptr_t)part->data + first; \
        for (int64_t i = 0; i < width; i++) {                          \
            double value = convert(from[i]);                           \
            if (fold) value *= fold[i];                                \
            int64_t bits;                                              \
            memcpy(&bits, &value, sizeof bits);                        \
            bits &= INT64_MAX;                                         \
            peak = peak > bits ? peak : bits;                          \
            to[i] = value;                                             \
        }                                                              \
    } while (0)
        if (in->format == FORMAT_F32)
            LOAD(float, (double));
        else if (in->format == FORMAT_F64)
            LOAD(double, (double));
        else
            LOAD(uint16_t, from_bf16);
#undef LOAD
        to += width;
        if (fold) fold += width;
    }
    return (uint64_t)peak;
}

/* ring.quantise_rows for one row, which `v` holds. Returns the row's scale. */
INLINE double quantise_row(double *restrict v, int64_t width, double peak, double l1, double l2, int32_t *restrict xq) {
    int64_t sum = 0, squares = 0;
    if (peak == 0) peak = 1.0;
    for (int64_t i = 0; i < width; i++) {
        v[i] /= peak;
        double size = fabs(v[i]) * 65536.0;
        int32_t u = (int32_t)size;
        u += u < size;
        sum += u;
        squares += (int64_t)u * u;
    }
    double s1 = (double)(sum > 1 ? sum : 1), s2 = sqrt((double)(squares > 1 ? squares : 1));
    double by_sum = 1.0 / s1 * l1, by_length = 1.0 / s2 * l2;
    double factor = (by_sum > by_length ? by_sum : by_length) * (65536.0 * (1.0 - 0x1p-40));
    for (int64_t i = 0; i < width; i++) xq[i] = (int32_t)rint(v[i] * factor);
    return peak / factor;
}

INLINE int64_t encode_rows(const struct parts *in, int64_t width, const double *fold, double l1, double l2,
                           const int32_t *limbs, const int64_t *masks, int64_t mask_count, int32_t *out,
                           double *scale, int64_t *expected, int64_t row, int64_t stop, dot_function *dot) {
    double *values = malloc((size_t)width * sizeof *values);
    if (!values) return NO_MEMORY;
    for (; row < stop; row++) {
        uint64_t bits = load_row(in, row, fold, values);
        double peak;
        memcpy(&peak, &bits, sizeof peak);
        if (bits >= 0x7ff0000000000000ull) break;
        int32_t *xq = out + row * width;
        scale[row] = quantise_row(values, width, peak, l1, l2, xq);
        if (limbs) expected[row] = (int64_t)dot(xq, limbs, width);
        for (int64_t k = 0; k < mask_count; k++) {
            const int32_t *mask = (const int32_t *)(intptr_t)masks[k] + row * width;
            for (int64_t i = 0; i < width; i++) xq[i] += mask[i];
        }
    }
    free(values);
    return row;
}

/* Store one row of integers as floats: times channel scale and row scale, plus bias, each rounded to float64. */
INLINE void store_row(const struct parts *out, int64_t row, const int32_t *y, double scale, const double *channel,
                      const double *bias) {
    for (const struct part *part = out->part; part < out->part + out->count; part++) {
        int64_t width = part->width, first = row * part->stride;
#define STORE(type, convert)                                                                                       \
    do {                                                                                                           \
        type *restrict to = (type *)(intptr_t)part->data + first;                                                  \
        if (channel && bias)                                                                                       \
            for (int64_t i = 0; i < width; i++) to[i] = convert((double)y[i] * channel[i] * scale + bias[i]);      \
        else if (channel)                                                                                          \
            for (int64_t i = 0; i < width; i++) to[i] = convert((double)y[i] * channel[i] * scale);                \
        else                                                                                                       \
            for (int64_t i = 0; i < width; i++) to[i] = convert((double)y[i] * scale);                             \
    } while (0)
        if (out->format == FORMAT_F32)
            STORE(float, (float));
        else if (out->format == FORMAT_F64)
            STORE(double, (double));
        else
            STORE(uint16_t, to_bf16);
#undef STORE
        y += width;
        if (channel) channel += width;
        if (bias) bias += width;
    }
}

INLINE int64_t decode_rows(const int32_t *answer, const int64_t *effects, int64_t effect_count, int64_t width, int shift,
                           const int32_t *limbs, const int64_t *expected, const double *scale, const double *channel,
                           const double *bias, const struct parts *out, uint8_t *refused, int64_t row, int64_t stop,
                           dot_function *dot) {
    int32_t *y = malloc((size_t)width * sizeof *y);
    if (!y) return NO_MEMORY;
    for (; row < stop; row++) {
        const int32_t *from = answer + row * width;
        for (int64_t k = 0; k < effect_count; k++) {
            const int32_t *e = (const int32_t *)(intptr_t)effects[k] + row * width;
            for (int64_t i = 0; i < width; i++) y[i] = from[i] - e[i];
            from = y;
        }
        if (shift) {
            for (int64_t i = 0; i < width; i++) y[i] = (int32_t)((uint32_t)from[i] << shift) >> shift;
            from = y;
        }
        refused[row] = limbs && (int64_t)dot(from, limbs, width) != expected[row];
        if (!refused[row]) store_row(out, row, from, scale[row], channel, bias);
    }
    free(y);
    return row;
}

/* V = W^T R mod p, and V' = W R', for rows of an int16 matrix |w| < 2^15: products with limbs below 2^36.
 * `sums` int64 [3, inputs] gathers V's limbs; the caller joins at the end (2^27 rows fit). */
INLINE void weigh_rows(const int16_t *weight, int64_t outputs, int64_t inputs, const int32_t *r, int64_t r_stride,
                       const int32_t *back, int64_t *restrict sums, int64_t *restrict back_products) {
    for (int64_t o = 0; o < outputs; o++) {
        const int16_t *w = weight + o * inputs;
        int64_t low = 0, middle = 0, high = 0;
        for (int64_t i = 0; i < inputs; i++) {
            int32_t x = w[i];
            low += (int64_t)x * back[i];
            middle += (int64_t)x * back[inputs + i];
            high += (int64_t)x * back[2 * inputs + i];
        }
        back_products[o] = (int64_t)p61_join(low, middle, high);
    }
    int64_t o = 0;
    for (; o + 4 <= outputs; o += 4) {
        const int16_t *w = weight + o * inputs;
        for (int limb = 0; limb < 3; limb++) {
            const int32_t *s = r + limb * r_stride + o;
            int64_t *to = sums + limb * inputs;
            int32_t s0 = s[0], s1 = s[1], s2 = s[2], s3 = s[3];
            for (int64_t i = 0; i < inputs; i++)
                to[i] += (int64_t)(int32_t)w[i] * s0 + (int64_t)(int32_t)w[inputs + i] * s1 +
                         (int64_t)(int32_t)w[2 * inputs + i] * s2 + (int64_t)(int32_t)w[3 * inputs + i] * s3;
        }
    }
    for (; o < outputs; o++)
        for (int limb = 0; limb < 3; limb++)
            for (int64_t i = 0; i < inputs; i++)
                sums[limb * inputs + i] += (int64_t)(int32_t)weight[o * inputs + i] * r[limb * r_stride + o];
}

/* quantise.quantise for one member of a group: int16 [rows, width] and the channels' scales. */
INLINE int64_t quantise_channels(const struct parts *in, int64_t width, double levels, int16_t *restrict out,
                                 double *scale, int64_t row, int64_t stop) {
    double *values = malloc((size_t)width * sizeof *values);
    if (!values) return NO_MEMORY;
    for (; row < stop; row++) {
        uint64_t bits = load_row(in, row, NULL, values);
        double peak;
        memcpy(&peak, &bits, sizeof peak);
        if (bits >= 0x7ff0000000000000ull) break;
        double step = peak / levels;
        if (step < 0x1p-1022) step = 1.0;
        scale[row] = step;
        for (int64_t i = 0; i < width; i++) out[row * width + i] = (int16_t)(int32_t)rint(values[i] / step);
    }
    free(values);
    return row;
}

/* The largest |w|, and the largest sums of squares along a row and down a column; `columns` int64 [inputs], zeros. */
INLINE void norms_of(const int16_t *weight, int64_t outputs, int64_t inputs, int64_t *restrict columns,
                     int64_t *largest) {
    int32_t low = 0, high = 0;
    int64_t longest_row = 0, longest_column = 0;
    for (int64_t o = 0; o < outputs; o++) {
        const int16_t *w = weight + o * inputs;
        int64_t row = 0;
        for (int64_t i = 0; i < inputs; i++) {
            int32_t x = w[i], square = x * x;
            low = x < low ? x : low;
            high = x > high ? x : high;
            row += square;
            columns[i] += square;
        }
        longest_row = row > longest_row ? row : longest_row;
    }
    for (int64_t i = 0; i < inputs; i++) longest_column = columns[i] > longest_column ? columns[i] : longest_column;
    largest[0] = -low > high ? -low : high;
    largest[1] = longest_row;
    largest[2] = longest_column;
}

/* One copy of each pass per instruction set. */
#define PASSES(suffix, TARGET, DOT)                                                                                   \
    TARGET static uint64_t dot_##suffix(const int32_t *row, const int32_t *limbs, int64_t width) {                    \
        return DOT(row, limbs, width);                                                                                \
    }                                                                                                                 \
    TARGET static int64_t encode_##suffix(const struct parts *in, int64_t width, const double *fold, double l1,       \
                                          double l2, const int32_t *limbs, const int64_t *masks, int64_t mask_count,  \
                                          int32_t *out, double *scale, int64_t *expected, int64_t start,              \
                                          int64_t stop) {                                                             \
        return encode_rows(in, width, fold, l1, l2, limbs, masks, mask_count, out, scale, expected, start, stop,      \
                           dot_##suffix);                                                                             \
    }                                                                                                                 \
    TARGET static int64_t decode_##suffix(const int32_t *answer, const int64_t *effects, int64_t effect_count,        \
                                          int64_t width, int shift, const int32_t *limbs, const int64_t *expected,    \
                                          const double *scale, const double *channel, const double *bias,             \
                                          const struct parts *out, uint8_t *refused, int64_t start, int64_t stop) {   \
        return decode_rows(answer, effects, effect_count, width, shift, limbs, expected, scale, channel, bias, out,   \
                           refused, start, stop, dot_##suffix);                                                       \
    }                                                                                                                 \
    TARGET static void weigh_##suffix(const int16_t *weight, int64_t outputs, int64_t inputs, const int32_t *r,       \
                                      int64_t r_stride, const int32_t *back, int64_t *sums, int64_t *back_products) { \
        weigh_rows(weight, outputs, inputs, r, r_stride, back, sums, back_products);                                  \
    }                                                                                                                 \
    TARGET static int64_t quantise_##suffix(const struct parts *in, int64_t width, double levels, int16_t *out,       \
                                            double *scale, int64_t start, int64_t stop) {                             \
        return quantise_channels(in, width, levels, out, scale, start, stop);                                         \
    }                                                                                                                 \
    TARGET static void norms_##suffix(const int16_t *weight, int64_t outputs, int64_t inputs, int64_t *columns,       \
                                      int64_t *largest) {                                                             \
        norms_of(weight, outputs, inputs, columns, largest);                                                          \
    }                                                                                                                 \
    TARGET static void dots_##suffix(const int32_t *rows, int64_t count, int64_t width, const int32_t *limbs,         \
                                     int64_t *products) {                                                             \
        for (int64_t row = 0; row < count; row++)                                                                     \
            products[row] = (int64_t)DOT(rows + row * width, limbs, width);                                           \
    }

PASSES(portable, , p61_dot)
#if HAVE_X86
PASSES(avx2, TARGET_AVX2, p61_dot)
PASSES(avx512, TARGET_AVX512, p61_dot_512)
#define BY_ISA(isa, pass, ...)                                     \
    ((isa) >= ISA_AVX512 ? pass##_avx512(__VA_ARGS__)              \
     : (isa) >= ISA_AVX2 ? pass##_avx2(__VA_ARGS__)                \
                         : pass##_portable(__VA_ARGS__))
#else
#define BY_ISA(isa, pass, ...) ((void)(isa), pass##_portable(__VA_ARGS__))
#endif

/* Quantise rows start .. stop, compute the expected value of their check, and add masks modulo 2^32.
 *
 * in: [rows, columns] in all. fold: float64 [columns] that columns are multiplied by first, or NULL.
 * limbs: int32 [3, columns] of V, or NULL. masks[0..mask_count) by address, and out: int32 [rows, columns].
 * scale: float64 [rows]; expected: int64 [rows].
 * Returns the first row that is not finite, `stop` if all are, or NO_MEMORY. */
EXPORT int64_t ring_encode(int32_t isa, const struct parts *in, int64_t columns, const double *fold, double l1,
                           double l2, const int32_t *limbs, const int64_t *masks, int64_t mask_count, int32_t *out,
                           double *scale, int64_t *expected, int64_t start, int64_t stop) {
    uint64_t mode = set_default_mode();
    int64_t end =
        BY_ISA(isa, encode, in, columns, fold, l1, l2, limbs, masks, mask_count, out, scale, expected, start, stop);
    restore_mode(mode);
    return end;
}

/* Subtract masks' effects from rows start .. stop modulo 2^(32 - shift), check the rows, and store them as floats.
 *
 * answer, and effects[0..effect_count) by address: int32 [rows, columns], and so is out. limbs: int32 [3, columns] of
 * R, or NULL for no check. scale: float64 [rows]; channel, bias: float64 [columns] or NULL (no bias without channel).
 * refused: uint8 [rows], set to 1 for rows that fail the check, which are not stored, and to 0 for the others.
 * Returns `stop`, or NO_MEMORY. */
EXPORT int64_t ring_decode(int32_t isa, const int32_t *answer, const int64_t *effects, int64_t effect_count,
                           int64_t columns, int32_t shift, const int32_t *limbs, const int64_t *expected,
                           const double *scale, const double *channel, const double *bias, const struct parts *out,
                           uint8_t *refused, int64_t start, int64_t stop) {
    uint64_t mode = set_default_mode();
    int64_t end = BY_ISA(isa, decode, answer, effects, effect_count, columns, shift, limbs, expected, scale, channel,
                         bias, out, refused, start, stop);
    restore_mode(mode);
    return end;
}

/* Rows . column mod p: rows int32 [count, width], limbs int32 [3, width], products int64 [count]. */
EXPORT void ring_dot(int32_t isa, const int32_t *rows, int64_t count, int64_t width, const int32_t *limbs,
                     int64_t *products) {
    BY_ISA(isa, dots, rows, count, width, limbs, products);
}

/* Some rows of a weight matrix, for V = W^T r and V' = W r' mod p.
 *
 * weight: int16 [outputs, inputs]. r: limbs of these rows' entries, r_stride entries from limb to limb.
 * back: int32 [3, inputs], limbs of r'. sums: int64 [3, inputs], added to. back_products: int64 [outputs], set. */
EXPORT void ring_weigh(int32_t isa, const int16_t *weight, int64_t outputs, int64_t inputs, const int32_t *r,
                       int64_t r_stride, const int32_t *back, int64_t *sums, int64_t *back_products) {
    BY_ISA(isa, weigh, weight, outputs, inputs, r, r_stride, back, sums, back_products);
}

/* Quantise channels start .. stop of a weight matrix: out int16 [rows, columns], scale float64 [rows]; levels is
 * 2^(b-1) - 1. Returns the first row that is not finite, `stop` if all are, or NO_MEMORY. */
EXPORT int64_t ring_quantise(int32_t isa, const struct parts *in, int64_t columns, double levels, int16_t *out,
                             double *scale, int64_t start, int64_t stop) {
    uint64_t mode = set_default_mode();
    int64_t end = BY_ISA(isa, quantise, in, columns, levels, out, scale, start, stop);
    restore_mode(mode);
    return end;
}

/* Of int16 [outputs, inputs]: largest[0..3) are max |w|, and the largest sums of squares of a row and of a column.
 * columns: int64 [inputs], zeros. */
EXPORT void ring_norms(int32_t isa, const int16_t *weight, int64_t outputs, int64_t inputs, int64_t *columns,
                       int64_t *largest) {
    BY_ISA(isa, norms, weight, outputs, inputs, columns, largest);
}

/* Join the sums of ring_weigh, int64 [3, inputs], to residues int64 [inputs]. */
EXPORT void ring_join(const int64_t *sums, int64_t inputs, int64_t *residues) {
    for (int64_t i = 0; i < inputs; i++)
        residues[i] = (int64_t)p61_join(sums[i], sums[inputs + i], sums[2 * inputs + i]);
}

#endif
