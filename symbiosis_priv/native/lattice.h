/* Sparse products for masks c P + e: samplers of c and e, and c times a matrix.
 *
 * c has LATTICE_HALF entries +1 and as many -1 among LATTICE_HEIGHT. No branch depends on c or e. Addresses do depend on c:
 * that is what makes the product sparse, and why the machine must be the tenant's own. */
#ifndef SYMBIOSIS_LATTICE_H
#define SYMBIOSIS_LATTICE_H

#include "common.h"
#include "passes.h"

#define LATTICE_HEIGHT 2048
#define LATTICE_HALF 64
#define LATTICE_WEIGHT (2 * LATTICE_HALF)
#define LATTICE_WORDS (4 * (LATTICE_WEIGHT + LATTICE_HALF)) /* 128 random bits for each choice */
#define AHEAD 8         /* entries of c between a prefetch and its use: a single row finds nothing in the cache */
#define PANEL_BYTES 256 /* of a row: a panel has 512 KiB and stays in the second-level cache while all rows use it */

/* A number below `limit` < 2^31: the upper part of limit times 128 random bits. Each number's probability is 1 / limit with
 * a relative error below limit / 2^128. */
INLINE uint32_t below(const uint32_t *words, uint32_t limit) {
    uint64_t carry = 0;
    for (int k = 0; k < 4; k++) carry = (carry >> 32) + (uint64_t)words[k] * limit;
    return (uint32_t)(carry >> 32);
}

/* A uniform subset of `count` numbers below `limit` (Sendrier, eprint 2021/1631): chosen[i] is a number from i on, or i
 * itself if a later entry has that number already. Every entry is compared, so the time does not depend on the numbers. */
INLINE void choose_subset(uint16_t *chosen, int count, uint32_t limit, const uint32_t *words) {
    memset(chosen, 0xff, (size_t)count * sizeof *chosen);
    for (int i = count - 1; i >= 0; i--) {
        uint16_t number = (uint16_t)(i + below(words + 4 * i, limit - (uint32_t)i)), taken = 0;
        for (int j = 0; j < count; j++) taken |= (uint16_t)(chosen[j] == number);
        uint16_t all = (uint16_t)-taken;
        chosen[i] = (uint16_t)((i & all) | (number & ~all));
    }
}

INLINE void sample_secrets(const uint32_t *words, int64_t rows, uint16_t *out) {
    for (int64_t row = 0; row < rows; row++, words += LATTICE_WORDS, out += LATTICE_WEIGHT) {
        uint16_t support[LATTICE_WEIGHT], positive[LATTICE_HALF], sign[LATTICE_WEIGHT] = {0};
        choose_subset(support, LATTICE_WEIGHT, LATTICE_HEIGHT, words);
        choose_subset(positive, LATTICE_HALF, LATTICE_WEIGHT, words + 4 * LATTICE_WEIGHT);
        for (int j = 0; j < LATTICE_HALF; j++)
            for (int i = 0; i < LATTICE_WEIGHT; i++) sign[i] |= (uint16_t)(positive[j] == i);
        for (int i = 0, plus = 0, minus = LATTICE_HALF; i < LATTICE_WEIGHT; i++) {
            out[minus + sign[i] * (plus - minus)] = support[i];
            plus += sign[i];
            minus += 1 - sign[i];
        }
    }
}

INLINE void sample_noise(const uint64_t *words, int64_t count, int32_t *restrict out) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t x = words[i];
        x -= x >> 1 & 0x5555555555555555;
        x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
        x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f;
        x += x >> 8;
        x += x >> 16;
        x += x >> 32;
        out[i] = (int32_t)(x & 0x7f) - 32;
    }
}

/* Vectors of 64 bytes at any address; compilers split them for smaller registers. */
typedef uint32_t words_v __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t shorts_v __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint8_t bytes_v __attribute__((vector_size(32), aligned(1), may_alias));

/* Add c M 2^shift to rows of `out` modulo 2^32, for some panels of M: `columns` columns each, PANEL_BYTES of every row. All
 * sums of a panel are kept in registers. Sums of 16 bits are exact: of 16-bit entries modulo 2^16 with a shift of 16, and
 * of smaller unsigned entries, because |sum| <= 64 * 255. */
#define GATHER(NAME, VECTOR, LANE, COLUMNS, LOAD)                                                                       \
    INLINE void NAME(const uint8_t *matrix, const uint16_t *secrets, int64_t rows, int shift, uint32_t *out,            \
                     int64_t width, int64_t panel, int64_t end) {                                                       \
        enum { LANES = sizeof(VECTOR) / sizeof(LANE), VECTORS = COLUMNS / LANES };                                      \
        for (; panel < end; panel++) {                                                                                  \
            const uint8_t *from = matrix + panel * LATTICE_HEIGHT * PANEL_BYTES;                                        \
            int64_t columns = least(COLUMNS, width - panel * COLUMNS);                                                  \
            for (int64_t row = 0; row < rows; row++) {                                                                  \
                const uint16_t *plus = secrets + row * LATTICE_WEIGHT, *minus = plus + LATTICE_HALF;                    \
                VECTOR sums[VECTORS] = {{0}};                                                                           \
                for (int i = 0; i < LATTICE_HALF; i++) {                                                                \
                    const uint8_t *add = from + plus[i] * PANEL_BYTES, *subtract = from + minus[i] * PANEL_BYTES;       \
                    const uint16_t next[] = {plus[(i + AHEAD) % LATTICE_HALF], minus[(i + AHEAD) % LATTICE_HALF]};      \
                    for (int z = 0; z < PANEL_BYTES; z += 64) {                                                         \
                        __builtin_prefetch(from + next[0] * PANEL_BYTES + z);                                           \
                        __builtin_prefetch(from + next[1] * PANEL_BYTES + z);                                           \
                    }                                                                                                   \
                    UNROLL_16 for (int k = 0; k < VECTORS; k++) sums[k] += LOAD(add) - LOAD(subtract);                  \
                }                                                                                                       \
                LANE stored[COLUMNS];                                                                                   \
                memcpy(stored, sums, sizeof stored);                                                                    \
                uint32_t *to = out + row * width + panel * COLUMNS;                                                     \
                for (int64_t k = 0; k < columns; k++) to[k] += (uint32_t)(int32_t)stored[k] << shift;                   \
            }                                                                                                           \
        }                                                                                                               \
    }
#define UNROLL_16 _Pragma("GCC unroll 16")
#define WORD(row) (*(const words_v *)((row) + 64 * k))
#define SHORT(row) (*(const shorts_v *)((row) + 64 * k))
#define BYTE(row) __builtin_convertvector(*(const bytes_v *)((row) + 32 * k), shorts_v)
#define NIBBLE(row) __builtin_convertvector(*(const bytes_v *)((row) + 32 * (k & 7)) >> 4 * (k >> 3) & 15, shorts_v)
GATHER(gather_words, words_v, uint32_t, PANEL_BYTES / 4, WORD)
GATHER(gather_shorts, shorts_v, int16_t, PANEL_BYTES / 2, SHORT)
GATHER(gather_bytes, shorts_v, int16_t, PANEL_BYTES, BYTE)
GATHER(gather_nibbles, shorts_v, int16_t, PANEL_BYTES * 2, NIBBLE)
#undef GATHER
#undef UNROLL_16
#undef WORD
#undef SHORT
#undef BYTE
#undef NIBBLE

/* The kinds of a matrix's entries, as lattice.py numbers them. */
enum entries { WORDS = 0, SHORTS = 1, BYTES = 2, NIBBLES = 3 };

#define LATTICE(suffix, TARGET)                                                                                         \
    TARGET static void secrets_##suffix(const uint32_t *words, int64_t rows, uint16_t *out) {                           \
        sample_secrets(words, rows, out);                                                                               \
    }                                                                                                                   \
    TARGET static void noise_##suffix(const uint64_t *words, int64_t count, int32_t *out) {                             \
        sample_noise(words, count, out);                                                                                \
    }                                                                                                                   \
    TARGET static void gather_##suffix(int32_t entries, const uint8_t *matrix, const uint16_t *secrets, int64_t rows,   \
                                       int shift, uint32_t *out, int64_t width, int64_t panel, int64_t end) {           \
        if (entries == WORDS) gather_words(matrix, secrets, rows, shift, out, width, panel, end);                       \
        if (entries == SHORTS) gather_shorts(matrix, secrets, rows, shift, out, width, panel, end);                     \
        if (entries == BYTES) gather_bytes(matrix, secrets, rows, shift, out, width, panel, end);                       \
        if (entries == NIBBLES) gather_nibbles(matrix, secrets, rows, shift, out, width, panel, end);                   \
    }

LATTICE(portable, )
#if HAVE_X86
LATTICE(avx2, TARGET_AVX2)
LATTICE(avx512, TARGET_AVX512)
#endif
#undef LATTICE

/* Positions of +1, then of -1: words uint32 [rows, LATTICE_WORDS], out uint16 [rows, LATTICE_WEIGHT]. */
EXPORT void lattice_secrets(int32_t isa, const uint32_t *words, int64_t rows, uint16_t *out) {
    BY_ISA(isa, secrets, words, rows, out);
}

/* Number of ones of each word, less 32: words uint64 [count], out int32 [count]. */
EXPORT void lattice_noise(int32_t isa, const uint64_t *words, int64_t count, int32_t *out) {
    BY_ISA(isa, noise, words, count, out);
}

/* Add c M 2^shift to out, uint32 [rows, width], for panels panel .. end of M. secrets: as lattice_secrets makes them. */
EXPORT void lattice_gather(int32_t isa, int32_t entries, const uint8_t *matrix, const uint16_t *secrets, int64_t rows,
                           int32_t shift, uint32_t *out, int64_t width, int64_t panel, int64_t end) {
    BY_ISA(isa, gather, entries, matrix, secrets, rows, shift, out, width, panel, end);
}

#endif
