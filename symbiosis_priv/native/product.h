/* The ring product, rows @ weight.T (forward) or rows @ weight (backward), modulo 2^32, from one packed copy.
 *
 * Theory of operation. A row entry x is two balanced int16 limbs, x = low + 2^16 * high (mod 2^32), a weight is one int16
 * (or int8). `pmaddwd` and `vpdpwssd` multiply pairs of int16 and add them up in int32 lanes that wrap, so two of
 * them, one per limb, give the product of two entries in every lane, and the limbs meet at the end:
 * sum = low sum + 2^16 * high sum. Nothing saturates: `pmaddwd`'s only overflow, 2 * 2^30, wraps to the right residue.
 *
 * Packed layout: [panel of 64 outputs][pair of inputs][output in the panel][input in the pair]. Forward, 16 lanes
 * hold 16 outputs and a broadcast pair of row entries meets one vector of weights. Backward wants pairs of outputs
 * with inputs in the lanes: a tile of 64 x 64 is a square of 64-bit cells (2 outputs x 2 inputs), transposed as such
 * with the words inside each cell swapped. That is done DEPTH outputs at a time into a small buffer, from where all rows
 * use it. Both directions then run the same inner loop.
 *
 * Blocking: the weights of one panel and DEPTH terms stay in the cache while all rows pass, ROWS at a time with their
 * sums in registers. */
#ifndef SYMBIOSIS_PRODUCT_H
#define SYMBIOSIS_PRODUCT_H

#include "common.h"

enum { PANEL = 64, ROWS = 3, DEPTH = 512, TILE_PAIRS = PANEL / 2, PACK_STEP = 32 };

/* One block of the inner loop: `rows` (at most ROWS) rows, `pairs` pairs of terms, PANEL columns.
 * weights: [pairs][PANEL][2]; limbs: [pairs][2 * rows] words of two int16; sums are stored in or added to `out`. */
struct block {
    const void *weights;
    const int32_t *limbs;
    int64_t pairs;
    int32_t *out;
    int64_t stride;
    int add;
};

typedef void block_product(const struct block *block, int rows, int weight_bytes);
/* From packed [TILE_PAIRS pairs of inputs][PANEL outputs][2] to int16 [TILE_PAIRS pairs of outputs][PANEL inputs][2].
 * `next` is the tile that will be wanted next: it is far away, where no hardware prefetcher expects it. */
typedef void tile_transpose(const void *packed, const void *next, int16_t *turned, int weight_bytes);

static inline int16_t weight_at(const void *weights, int64_t i, int weight_bytes) {
    return weight_bytes == 1 ? ((const int8_t *)weights)[i] : ((const int16_t *)weights)[i];
}

static inline const void *weight_address(const void *weights, int64_t i, int weight_bytes) {
    return (const char *)weights + i * weight_bytes;
}

/* ---- plain C ---- */

static void block_product_portable(const struct block *b, int rows, int weight_bytes) {
    for (int r = 0; r < rows; r++) {
        uint32_t sums[PANEL] = {0};
        for (int64_t k = 0; k < b->pairs; k++) {
            uint32_t low = (uint32_t)b->limbs[k * 2 * rows + r], high = (uint32_t)b->limbs[k * 2 * rows + rows + r];
            uint32_t first = (uint32_t)(int16_t)low + (high << 16);
            uint32_t second = (uint32_t)(int16_t)(low >> 16) + (high & 0xffff0000u);
            const void *w = weight_address(b->weights, k * PANEL * 2, weight_bytes);
            if (weight_bytes == 1) {
                const int8_t *narrow = w;
                for (int c = 0; c < PANEL; c++)
                    sums[c] += first * (uint32_t)narrow[2 * c] + second * (uint32_t)narrow[2 * c + 1];
            } else {
                const int16_t *wide = w;
                for (int c = 0; c < PANEL; c++)
                    sums[c] += first * (uint32_t)wide[2 * c] + second * (uint32_t)wide[2 * c + 1];
            }
        }
        uint32_t *out = (uint32_t *)b->out + r * b->stride;
        for (int c = 0; c < PANEL; c++) out[c] = sums[c] + (b->add ? out[c] : 0);
    }
}

static void tile_transpose_portable(const void *packed, const void *next, int16_t *turned, int weight_bytes) {
    (void)next;
    for (int i = 0; i < PANEL; i++)
        for (int o = 0; o < PANEL; o++)
            turned[((o / 2) * PANEL + i) * 2 + o % 2] = weight_at(packed, ((i / 2) * PANEL + o) * 2 + i % 2, weight_bytes);
}

#if HAVE_X86

/* `vectors` vectors of 64 bytes of int16 (32 of int8) from `first` on. */
INLINE void prefetch(const void *weights, int64_t first, int vectors, int weight_bytes) {
    const char *start = (const char *)weights + first * 32 * weight_bytes;
    UNROLL for (int i = 0; i < vectors * weight_bytes / 2; i++) _mm_prefetch(start + 64 * i, _MM_HINT_T0);
}

/* ---- 256 bit: AVX2 and AVX-VNNI differ in one operation ---- */

/* As the intrinsics, around which gcc spills and copies sums (here and below). */
INLINE TARGET_AVX2 __m256i add_pairs_avx2(__m256i sum, __m256i x, __m256i w) {
    __m256i pair;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(pair) : "x"(x), "xm"(w));
    return sum;
}

#define DOT(sum, x, w) add_pairs_avx2(sum, x, w)
#define NAMED(name) name##_avx2
#define TARGET TARGET_AVX2
#include "product_256.h"
#undef DOT
#undef NAMED
#undef TARGET

#if HAVE_AVXVNNI
INLINE TARGET_AVXVNNI __m256i add_pairs_avxvnni(__m256i sum, __m256i x, __m256i w) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), "xm"(w));
    return sum;
}

#define DOT(sum, x, w) add_pairs_avxvnni(sum, x, w)
#define NAMED(name) name##_avxvnni
#define TARGET TARGET_AVXVNNI
#include "product_256.h"
#undef DOT
#undef NAMED
#undef TARGET
#endif

/* ---- 512 bit ---- */

INLINE TARGET_AVX512 __m512i add_pairs_512(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "vm"(w));
    return sum;
}

INLINE TARGET_AVX512 __m512i load_512(const void *weights, int64_t vector, int weight_bytes) {
    if (weight_bytes == 1) return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)weights + vector));
    return _mm512_loadu_si512((const __m512i *)weights + vector);
}

INLINE TARGET_AVX512 void block_512(const struct block *b, const int rows, const int weight_bytes) {
    enum { VECTORS = PANEL / 16 };
    __m512i sums[2 * ROWS][VECTORS];
    UNROLL for (int i = 0; i < 2 * rows; i++)
        UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = _mm512_setzero_si512();
    const int32_t *limbs = b->limbs;
    for (int64_t k = 0; k < b->pairs; k++, limbs += 2 * rows) {
        __m512i w[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; j++) w[j] = load_512(b->weights, k * VECTORS + j, weight_bytes);
        UNROLL for (int i = 0; i < 2 * rows; i++) {
            __m512i x = _mm512_set1_epi32(limbs[i]);
            UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = add_pairs_512(sums[i][j], x, w[j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        __m512i *out = (__m512i *)(b->out + r * b->stride);
        UNROLL for (int j = 0; j < VECTORS; j++) {
            __m512i sum = _mm512_add_epi32(sums[r][j], _mm512_slli_epi32(sums[rows + r][j], 16));
            if (b->add) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(out + j));
            _mm512_storeu_si512(out + j, sum);
        }
    }
}

static TARGET_AVX512 void block_product_avx512(const struct block *b, int rows, int weight_bytes) {
    if (weight_bytes == 1) {
        if (rows == 3) block_512(b, 3, 1);
        else if (rows == 2) block_512(b, 2, 1);
        else block_512(b, 1, 1);
    } else {
        if (rows == 3) block_512(b, 3, 2);
        else if (rows == 2) block_512(b, 2, 2);
        else block_512(b, 1, 2);
    }
}

#endif /* HAVE_X86 */

/* ---- the same for every instruction set ---- */

static block_product *block_product_of(int32_t isa) {
    switch (isa) {
#if HAVE_X86
    case ISA_AVX2: return block_product_avx2;
#if HAVE_AVXVNNI
    case ISA_AVXVNNI: return block_product_avxvnni;
#endif
    case ISA_AVX512: return block_product_avx512;
#endif
    default: return block_product_portable;
    }
}

static tile_transpose *tile_transpose_of(int32_t isa) {
    switch (isa) {
#if HAVE_X86
    case ISA_AVX2: return tile_transpose_avx2;
#if HAVE_AVXVNNI
    case ISA_AVXVNNI: return tile_transpose_avxvnni;
#endif
    case ISA_AVX512: return tile_transpose_avx2; /* 4 x 4 cells at a time are faster than 8 x 8 */
#endif
    default: return tile_transpose_portable;
    }
}

/* Packs weight, int16 [outputs, inputs] in rows, into panels [ceil(outputs / PANEL)][pairs][PANEL][2] with
 * pairs = ceil(inputs / PANEL) * PANEL / 2, as int16 or int8, zeros where there are no weights. */
EXPORT void ring_pack(const int16_t *weight, int64_t outputs, int64_t inputs, int32_t weight_bytes, void *panels) {
    int64_t pairs = (inputs + PANEL - 1) / PANEL * TILE_PAIRS, panel_bytes = pairs * PANEL * 2 * weight_bytes;
    for (int64_t first = 0; first < outputs; first += PANEL) {
        char *panel = (char *)panels + first / PANEL * panel_bytes;
        int64_t height = outputs - first < PANEL ? outputs - first : PANEL;
        memset(panel, 0, (size_t)panel_bytes);
        for (int64_t start = 0; start < inputs; start += PACK_STEP) { /* so much of the panel stays in the cache */
            int64_t stop = inputs - start < PACK_STEP ? inputs : start + PACK_STEP;
            for (int64_t o = 0; o < height; o++) {
                const int16_t *row = weight + (first + o) * inputs;
                if (weight_bytes == 2 && stop - start == PACK_STEP) {
                    char *to = panel + (start / 2 * PANEL + o) * 4;
                    for (int64_t k = 0; k < PACK_STEP / 2; k++) memcpy(to + k * PANEL * 4, row + start + 2 * k, 4);
                    continue;
                }
                for (int64_t i = start; i < stop; i++) {
                    int64_t at = (i / 2 * PANEL + o) * 2 + i % 2;
                    if (weight_bytes == 1) ((int8_t *)panel)[at] = (int8_t)row[i];
                    else ((int16_t *)panel)[at] = row[i];
                }
            }
        }
    }
}

/* Splits rows, int32 [count, width], into limbs: [block of ROWS rows][pair of columns][row's low words, then its high
 * words]; width is padded with zeros to a multiple of PANEL: count * that many int32 in all. */
EXPORT void ring_split(const int32_t *rows, int64_t count, int64_t width, int32_t *limbs) {
    int64_t pairs = (width + PANEL - 1) / PANEL * PANEL / 2;
    for (int64_t first = 0; first < count; first += ROWS) {
        int64_t block = count - first < ROWS ? count - first : ROWS;
        for (int64_t r = 0; r < block; r++) {
            const int32_t *row = rows + (first + r) * width;
            int32_t *to = limbs + first * pairs * 2 + r;
            for (int64_t k = 0; k < pairs; k++, to += 2 * block) {
                uint32_t a = 2 * k < width ? (uint32_t)row[2 * k] : 0, b = 2 * k + 1 < width ? (uint32_t)row[2 * k + 1] : 0;
                uint32_t a_high = a + 0x8000u, b_high = b + 0x8000u; /* a negative low limb borrows from the high one */
                to[0] = (int32_t)((a & 0xffffu) | (b << 16));
                to[block] = (int32_t)((a_high >> 16) | (b_high & 0xffff0000u));
            }
        }
    }
}

/* Columns [begin, end) of PANEL each of a product, for all rows.
 *
 * panels: from ring_pack; limbs: from ring_split of `count` rows; out: int32 [count, columns], rows `columns` apart,
 * columns = outputs forward, inputs backward. Slices of one product may run at the same time. */
EXPORT void ring_product(int32_t isa, int32_t backward, const void *panels, int32_t weight_bytes, int64_t outputs,
                         int64_t inputs, const int32_t *limbs, int64_t count, int32_t *out, int64_t begin, int64_t end) {
    block_product *multiply = block_product_of(isa);
    tile_transpose *transpose = tile_transpose_of(isa);
    _Alignas(64) int16_t turned[DEPTH * PANEL];
    int32_t edge[ROWS * PANEL];
    int64_t panel_pairs = (inputs + PANEL - 1) / PANEL * TILE_PAIRS;
    int64_t pairs = backward ? (outputs + PANEL - 1) / PANEL * TILE_PAIRS : panel_pairs;
    int64_t columns = backward ? inputs : outputs;
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t column = panel * PANEL, width = columns - column < PANEL ? columns - column : PANEL;
        for (int64_t k = 0; k < pairs; k += DEPTH / 2) {
            struct block b = {.pairs = pairs - k < DEPTH / 2 ? pairs - k : DEPTH / 2};
            int block_bytes = weight_bytes;
            if (backward) {
                for (int64_t tile = 0; tile < b.pairs / TILE_PAIRS; tile++) {
                    int64_t start = ((k / TILE_PAIRS + tile) * panel_pairs + panel * TILE_PAIRS) * PANEL * 2;
                    int64_t next = k + (tile + 1) * TILE_PAIRS < pairs ? start + panel_pairs * PANEL * 2 : start;
                    transpose(weight_address(panels, start, weight_bytes), weight_address(panels, next, weight_bytes),
                              turned + tile * PANEL * PANEL, weight_bytes);
                }
                b.weights = turned;
                block_bytes = 2;
            } else {
                b.weights = weight_address(panels, (panel * pairs + k) * PANEL * 2, weight_bytes);
            }
            for (int64_t row = 0; row < count; row += ROWS) {
                int rows = (int)(count - row < ROWS ? count - row : ROWS);
                int32_t *target = out + row * columns + column;
                b.limbs = limbs + row * pairs * 2 + k * 2 * rows;
                b.add = k > 0;
                b.out = target;
                b.stride = columns;
                if (width == PANEL) {
                    multiply(&b, rows, block_bytes);
                    continue;
                }
                b.out = edge;
                b.stride = PANEL;
                b.add = 0;
                multiply(&b, rows, block_bytes);
                for (int r = 0; r < rows; r++)
                    for (int64_t c = 0; c < width; c++) {
                        uint32_t before = k > 0 ? (uint32_t)target[r * columns + c] : 0;
                        target[r * columns + c] = (int32_t)(before + (uint32_t)edge[r * PANEL + c]);
                    }
            }
        }
    }
}

#endif
