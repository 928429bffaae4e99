/* Packed weights: panels of PANEL outputs, each a sequence of squares of PANEL inputs.
 *
 * A square of 16 bits is int16 [pair of inputs][output][input in the pair]. A square of 8 or 10 bits is the low bytes of all
 * weights; with 10 bits, the two high bits of all weights follow. A pair of inputs has 128 low bytes and 32 bytes of high bits:
 * byte i has the high bits that belong to the low bytes i, i + 32, i + 64 and i + 96. Vectors interleave bytes in lanes of 16.
 * So in each half of a pair, 8 of the first 32 weights and 8 of the last 32 alternate (`eight_of`), and low and high bytes
 * interleave to vectors of int16 weights that are in order.
 *
 * Products widen a block of squares to int16 in the first-level cache. That takes less time than to read more bits from memory,
 * and the inner loops are written for int16 only. */
#ifndef SYMBIOSIS_PACKED_H
#define SYMBIOSIS_PACKED_H

#include "common.h"

enum { SQUARE = PANEL * PANEL, TILE_PAIRS = PANEL / 2, PAIR = 2 * PANEL, FETCH = 256 };

/* The bytes of a square of weights of 8, 10 or 16 bits. */
INLINE int64_t square_bytes(int weight_bits) { return SQUARE / 8 * weight_bits; }

/* Which eight weights of a pair the low bytes 8 * eight to 8 * eight + 7 belong to. */
INLINE int eight_of(int eight) { return (eight & 8) | (eight & 1) << 2 | (eight & 6) >> 1; }

/* The next block's weights, fetched from memory while this block is multiplied: `squares` of `size` bytes with `gap` bytes
 * between them, the first with `left` bytes still to be fetched, from `at` on. To spread the fetches evenly over all passes
 * over this block, FETCH bytes are fetched after every `every` weights read, the next ones after `countdown`. */
struct ahead {
    const char *at;
    int64_t squares, size, left, gap, every, countdown;
};

/* Widens a square of 8 or 10 bits to int16. */
typedef void square_widen(const void *packed, int16_t *wide, int weight_bits, struct ahead *ahead);

static void square_widen_portable(const void *packed, int16_t *wide, int weight_bits, struct ahead *ahead) {
    (void)ahead;
    const uint8_t *low = packed, *high = low + SQUARE;
    for (int k = 0; k < TILE_PAIRS; k++, wide += PAIR, low += PAIR, high += PAIR / 4)
        for (int e = 0; e < PAIR / 8; e++)
            for (int i = 0; i < 8; i++) {
                int byte = low[e * 8 + i], bits = weight_bits == 10 ? high[e % 4 * 8 + i] >> e / 4 * 2 & 3 : byte >> 7 ? 3 : 0;
                wide[eight_of(e) * 8 + i] = (int16_t)(byte + ((bits ^ 2) - 2) * 256);
            }
}

#if HAVE_X86

/* Call for every read of `weights` weights of this block. */
INLINE void fetch_ahead(struct ahead *a, const int weights) {
    a->countdown -= weights;
    if (a->countdown > 0) return;
    UNROLL for (int i = 0; i < FETCH; i += 64) _mm_prefetch(a->at + i, _MM_HINT_T1);
    a->at += FETCH;
    a->countdown += a->every;
    if ((a->left -= FETCH) > 0) return;
    a->at += a->gap;
    a->left = a->size;
    if (--a->squares == 0) a->countdown = INT64_MAX;
}

/* A byte of high bits has four fields of two bits. For every value of its lower or upper half: the first field, and the second,
 * as signed bytes. */
#define FIRST_FIELD 0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1
#define SECOND_FIELD 0, 0, 0, 0, 1, 1, 1, 1, -2, -2, -2, -2, -1, -1, -1, -1

static TARGET_AVX2 void square_widen_avx2(const void *packed, int16_t *wide, int weight_bits, struct ahead *next) {
    const __m256i first = _mm256_setr_epi8(FIRST_FIELD, FIRST_FIELD), second = _mm256_setr_epi8(SECOND_FIELD, SECOND_FIELD);
    const __m256i half = _mm256_set1_epi8(15), *low = packed, *high = low + SQUARE / 32;
    struct ahead ahead = *next; /* in registers */
    for (int k = 0; k < TILE_PAIRS; k++, low += 4, high++, wide += PAIR) {
        fetch_ahead(&ahead, PAIR);
        __m256i fields = weight_bits == 10 ? _mm256_loadu_si256(high) : half;
        UNROLL for (int j = 0; j < 4; j++) {
            __m256i x = _mm256_loadu_si256(low + j), y = _mm256_cmpgt_epi8(_mm256_setzero_si256(), x);
            if (weight_bits == 10) {
                y = _mm256_and_si256(j / 2 ? _mm256_srli_epi16(fields, 4) : fields, half);
                y = _mm256_shuffle_epi8(j % 2 ? second : first, y);
            }
            __m256i *to = (__m256i *)(wide + j / 2 * PANEL) + j % 2;
            _mm256_store_si256(to, _mm256_unpacklo_epi8(x, y));
            _mm256_store_si256(to + 2, _mm256_unpackhi_epi8(x, y));
        }
    }
    *next = ahead;
}

/* The high bytes of a pair's low bytes, from its high bits. */
INLINE TARGET_AVX512 void high_bytes(const void *high, __m512i bytes[2]) {
    const __m256i first = _mm256_setr_epi8(FIRST_FIELD, FIRST_FIELD), second = _mm256_setr_epi8(SECOND_FIELD, SECOND_FIELD);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), half = _mm512_set1_epi8(15);
    __m512i fields = _mm512_broadcast_i64x4(_mm256_loadu_si256(high));
    bytes[0] = _mm512_shuffle_epi8(both, _mm512_and_si512(fields, half));
    bytes[1] = _mm512_shuffle_epi8(both, _mm512_and_si512(_mm512_srli_epi16(fields, 4), half));
}

static TARGET_AVX512 void square_widen_avx512(const void *packed, int16_t *wide, int weight_bits, struct ahead *next) {
    const __m512i *low = packed;
    const char *high = (const char *)packed + SQUARE;
    struct ahead ahead = *next;
    for (int k = 0; k < TILE_PAIRS; k++, low += 2, high += PAIR / 4, wide += PAIR) {
        fetch_ahead(&ahead, PAIR);
        __m512i x[2] = {_mm512_loadu_si512(low), _mm512_loadu_si512(low + 1)}, y[2];
        if (weight_bits == 10) high_bytes(high, y);
        else UNROLL for (int j = 0; j < 2; j++) y[j] = _mm512_movm_epi8(_mm512_movepi8_mask(x[j]));
        UNROLL for (int j = 0; j < 2; j++) {
            _mm512_store_si512(wide + j * PANEL, _mm512_unpacklo_epi8(x[j], y[j]));
            _mm512_store_si512(wide + j * PANEL + 32, _mm512_unpackhi_epi8(x[j], y[j]));
        }
    }
    *next = ahead;
}

#endif

static square_widen *square_widen_of(int32_t isa) {
#if HAVE_X86
    if (isa == ISA_AVX512) return square_widen_avx512;
    if (isa >= ISA_AVX2) return square_widen_avx2;
#endif
    return square_widen_portable;
}

static void square_narrow(const int16_t *restrict square, uint8_t *restrict low, int weight_bits) {
    uint8_t *high = low + SQUARE;
    if (weight_bits == 10) memset(high, 0, SQUARE / 4);
    for (int k = 0; k < TILE_PAIRS; k++, square += PAIR, low += PAIR, high += PAIR / 4)
        for (int e = 0; e < PAIR / 8; e++) {
            const int16_t *weights = square + eight_of(e) * 8;
            for (int i = 0; i < 8; i++) low[e * 8 + i] = (uint8_t)weights[i];
            for (int i = 0; i < 8 && weight_bits == 10; i++) high[e % 4 * 8 + i] |= (weights[i] >> 8 & 3) << e / 4 * 2;
        }
}

/* Packs weight, int16 [outputs, inputs] in rows, into panels [ceil(outputs / PANEL)][ceil(inputs / PANEL)] of squares of 8, 10
 * or 16 bits, with zeros where there are no weights. */
EXPORT void ring_pack(const int16_t *weight, int64_t outputs, int64_t inputs, int32_t weight_bits, void *panels) {
    int16_t square[SQUARE];
    uint8_t *to = panels;
    for (int64_t first = 0; first < outputs; first += PANEL)
        for (int64_t start = 0; start < inputs; start += PANEL, to += square_bytes(weight_bits)) {
            int64_t height = least(PANEL, outputs - first), present = least(PANEL, inputs - start);
            if (height < PANEL || present < PANEL) memset(square, 0, sizeof square);
            for (int64_t o = 0; o < height; o++) {
                const int16_t *row = weight + (first + o) * inputs + start;
                for (int64_t i = 0; i + 1 < present; i += 2) memcpy(square + i * PANEL + 2 * o, row + i, 2 * sizeof *row);
                if (present % 2) square[(present - 1) * PANEL + 2 * o] = row[present - 1];
            }
            if (weight_bits == 16) memcpy(to, square, sizeof square);
            else square_narrow(square, to, weight_bits);
        }
}

#endif
