/* Integers modulo 2^24 as 3 bytes per item, little-endian, in payloads. */
#ifndef SYMBIOSIS_NARROW_H
#define SYMBIOSIS_NARROW_H

#include "common.h"

INLINE void pack24_items(const int32_t *from, int64_t first, int64_t count, uint8_t *to) {
    for (int64_t i = first; i < count; i++) {
        uint32_t item = (uint32_t)from[i];
        to[3 * i] = (uint8_t)item;
        to[3 * i + 1] = (uint8_t)(item >> 8);
        to[3 * i + 2] = (uint8_t)(item >> 16);
    }
}

INLINE void unpack24_items(const uint8_t *from, int64_t first, int64_t count, int32_t *to) {
    for (int64_t i = first; i < count; i++) {
        uint32_t item = (uint32_t)from[3 * i] << 8 | (uint32_t)from[3 * i + 1] << 16 | (uint32_t)from[3 * i + 2] << 24;
        to[i] = (int32_t)item >> 8;
    }
}

#if HAVE_X86
/* Writes 16 bytes for 4 items. The next items overwrite the last 4 bytes. */
TARGET_AVX2 static void pack24_avx2(const int32_t *from, int64_t count, uint8_t *to) {
    const __m128i low = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int64_t i = 0;
    for (; i + 6 <= count; i += 4)
        _mm_storeu_si128((__m128i *)(to + 3 * i), _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(from + i)), low));
    pack24_items(from, i, count, to);
}

/* Reads 16 bytes for 4 items. */
TARGET_AVX2 static inline __m128i four24_avx2(const uint8_t *from) {
    const __m128i high = _mm_setr_epi8(-1, 0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11);
    return _mm_srai_epi32(_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)from), high), 8);
}

TARGET_AVX2 static void unpack24_avx2(const uint8_t *from, int64_t count, int32_t *to) {
    int64_t i = 0;
    for (; i + 6 <= count; i += 4)
        _mm_storeu_si128((__m128i *)(to + i), four24_avx2(from + 3 * i));
    unpack24_items(from, i, count, to);
}

#define NARROW(isa, pass, from, count, to) \
    ((isa) >= ISA_AVX2 ? pass##_avx2(from, count, to) : pass##_items(from, 0, count, to))
#else
#define NARROW(isa, pass, from, count, to) ((void)(isa), pass##_items(from, 0, count, to))
#endif

/* The low 24 bits of int32 [count], as uint8 [3 count]. */
EXPORT void ring_pack24(int32_t isa, const int32_t *from, int64_t count, uint8_t *to) {
    NARROW(isa, pack24, from, count, to);
}

/* uint8 [3 count] to int32 [count] in -2^23 .. 2^23 - 1. `from` may be the last 3 count bytes of `to`: no byte is
 * written before it is read. */
EXPORT void ring_unpack24(int32_t isa, const uint8_t *from, int64_t count, int32_t *to) {
    NARROW(isa, unpack24, from, count, to);
}

#endif
