/* The ring product, rows @ weight.T (forward) or rows @ weight (backward), modulo 2^32, from one packed copy.
 *
 * Theory of operation. A row entry x is two balanced int16 limbs, x = low + 2^16 * high (mod 2^32), a weight is one int16
 * (or int8). `pmaddwd` and `vpdpwssd` multiply pairs of int16 and add them up in int32 lanes that wrap, so two of
 * them, one per limb, give the product of two entries in every lane, and the limbs meet at the end:
 * sum = low sum + 2^16 * high sum. Nothing saturates: `pmaddwd`'s only overflow, 2 * 2^30, wraps to the right residue.
 *
 * Narrow products. Modulo 2^24, only 8 bits of the high limb and of its sum count, so they meet only the lowest 8 bits of the
 * weight, and one `vpdpbusd` multiplies four terms where `vpdpwssd` multiplies two. A quarter of the arithmetic is saved. The
 * low bytes of a block's weights are put into a small buffer, once for all rows.
 *
 * Packed layout: [panel of 64 outputs][pair of inputs][output in the panel][input in the pair]. Forward, 16 lanes
 * hold 16 outputs and a broadcast pair of row entries meets one vector of weights. Backward wants pairs of outputs
 * with inputs in the lanes: a tile of 64 x 64 is a square of 64-bit cells (2 outputs x 2 inputs), transposed as such
 * with the words inside each cell swapped. That is done DEPTH outputs at a time into a small buffer, from where all rows
 * use it. Both directions then run the same inner loop.
 *
 * Blocking: a block, the weights of one panel and DEPTH terms, stays in the cache while all rows pass, ROWS at a time
 * with their sums in registers. Only the first pass over a block would read memory, and the others would leave memory
 * idle. So all passes fetch even shares of the next block, and a product of a few rows takes as long as its reading or
 * its arithmetic, whichever is longer, and not their sum. Each pass also fetches the limbs of the next pass, which lie
 * far away if there are many rows. Up to FEW_ROWS rows, where reading takes most of the time, two blocks fit the
 * first-level cache. */
#ifndef SYMBIOSIS_PRODUCT_H
#define SYMBIOSIS_PRODUCT_H

#include "amx.h"
#include "common.h"

enum { ROWS = 3, DEPTH = 256, FEW_ROWS = 16, FEW_DEPTH = 128, FETCH = 256, NARROW_ROWS = 8 };
enum { TILE_PAIRS = PANEL / 2, PACK_STEP = 32 };

/* The next block's weights, fetched from memory while this block is multiplied: tiles of `tile` bytes with `gap` bytes
 * between them, `size` bytes still to be fetched, the first at weights + offset. To spread the fetches evenly over all
 * reads of this block, FETCH bytes are fetched after every `every` bytes read, the next ones after `countdown`. */
struct ahead {
    const char *weights;
    int64_t offset, size, tile, gap, every, countdown;
};

/* One block of the inner loop: `rows` (at most ROWS) rows, `pairs` pairs of terms, PANEL columns.
 * weights: [pairs][PANEL][2]; limbs: [rows][pairs][2] words of two int16, rows `width` words apart; next_limbs: those of
 * the pass after this one; narrow, bytes: [pairs / 2][PANEL][4], and limbs: [rows][pairs / 2][3] words (`split_narrow`). Sums
 * are stored in or added to `out`, rows `columns` words apart. */
struct block {
    const void *weights, *bytes;
    const int32_t *limbs, *next_limbs;
    int64_t pairs, width;
    int32_t *out;
    int64_t columns;
    int add;
    struct ahead *ahead;
};

typedef void block_product(const struct block *block, int rows, int weight_bytes);
/* From packed [TILE_PAIRS pairs of inputs][PANEL outputs][2] to int16 [TILE_PAIRS pairs of outputs][PANEL inputs][2]. */
typedef void tile_transpose(const void *packed, int16_t *turned, int weight_bytes, struct ahead *ahead);

static inline int16_t weight_at(const void *weights, int64_t i, int weight_bytes) {
    return weight_bytes == 1 ? ((const int8_t *)weights)[i] : ((const int16_t *)weights)[i];
}

/* ---- plain C ---- */

static void block_product_portable(const struct block *b, int rows, int weight_bytes) {
    for (int r = 0; r < rows; r++) {
        uint32_t sums[PANEL] = {0};
        for (int64_t k = 0; k < b->pairs; k++) {
            const uint32_t *limbs = (const uint32_t *)b->limbs + r * b->width + 2 * k;
            uint32_t low = limbs[0], high = limbs[1];
            uint32_t first = (uint32_t)(int16_t)low + (high << 16);
            uint32_t second = (uint32_t)(int16_t)(low >> 16) + (high & 0xffff0000u);
            const void *w = (const char *)b->weights + k * PANEL * 2 * weight_bytes;
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
        uint32_t *out = (uint32_t *)b->out + r * b->columns;
        for (int c = 0; c < PANEL; c++) out[c] = sums[c] + (b->add ? out[c] : 0);
    }
}

static void tile_transpose_portable(const void *packed, int16_t *turned, int weight_bytes, struct ahead *ahead) {
    (void)ahead;
    for (int i = 0; i < PANEL; i++)
        for (int o = 0; o < PANEL; o++)
            turned[((o / 2) * PANEL + i) * 2 + o % 2] = weight_at(packed, ((i / 2) * PANEL + o) * 2 + i % 2, weight_bytes);
}

#if HAVE_X86

/* Call for every read of `bytes` bytes of this block. */
INLINE void fetch_ahead(struct ahead *a, const int bytes) {
    a->countdown -= bytes;
    if (a->countdown > 0 || a->size == 0) return;
    a->countdown += a->every;
    UNROLL for (int i = 0; i < FETCH; i += 64) _mm_prefetch(a->weights + a->offset + i, _MM_HINT_T0);
    a->offset += FETCH;
    a->size -= FETCH;
    if ((a->size & (a->tile - 1)) == 0) a->offset += a->gap;
}

/* Call for every step k, which reads `words` words of limbs: fetches as many limbs of the next pass. The next pass may have
 * fewer rows or terms, so this is an address and no pointer; a prefetch from beyond the end does nothing. */
INLINE void fetch_limbs(const struct block *b, const int words, int64_t k) {
    uintptr_t address = (uintptr_t)b->next_limbs + (uintptr_t)k * words * sizeof *b->limbs;
    _mm_prefetch((const char *)address, _MM_HINT_T0);
}

/* ---- 256 bit: AVX2 and AVX-VNNI differ in one operation ---- */

/* Where an instruction takes its weights from: gcc chooses well, clang takes memory wherever it may. */
#ifdef __clang__
#define REGISTER_OR_MEMORY(registers) registers
#else
#define REGISTER_OR_MEMORY(registers) registers "m"
#endif

/* As the intrinsics, around which gcc spills and copies sums (here and below). */
INLINE TARGET_AVX2 __m256i add_pairs_avx2(__m256i sum, __m256i x, __m256i w) {
    __m256i pair;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(pair) : "x"(x), REGISTER_OR_MEMORY("x")(w));
    return sum;
}

#define DOT(sum, x, w) add_pairs_avx2(sum, x, w)
#define NAMED(name) name##_avx2
#define TARGET TARGET_AVX2
#include "product_256.h"

#if HAVE_AVXVNNI
INLINE TARGET_AVXVNNI __m256i add_pairs_avxvnni(__m256i sum, __m256i x, __m256i w) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), REGISTER_OR_MEMORY("x")(w));
    return sum;
}

#define DOT(sum, x, w) add_pairs_avxvnni(sum, x, w)
#define NAMED(name) name##_avxvnni
#define TARGET TARGET_AVXVNNI
#include "product_256.h"
#endif

/* ---- 512 bit ---- */

INLINE TARGET_AVX512 __m512i add_pairs_512(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), REGISTER_OR_MEMORY("v")(w));
    return sum;
}

INLINE TARGET_AVX512 __m512i add_fours_512(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), REGISTER_OR_MEMORY("v")(w));
    return sum;
}

INLINE TARGET_AVX512 __m512i load_512(const void *weights, int64_t vector, int weight_bytes) {
    if (weight_bytes == 1) return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)weights + vector));
    return _mm512_loadu_si512((const __m512i *)weights + vector);
}

enum { VECTORS = PANEL / 16 };

INLINE TARGET_AVX512 void store_512(const struct block *b, const int rows, __m512i sums[][VECTORS]) {
    UNROLL for (int r = 0; r < rows; r++) {
        __m512i *out = (__m512i *)(b->out + r * b->columns);
        UNROLL for (int j = 0; j < VECTORS; j++) {
            __m512i sum = _mm512_add_epi32(sums[2 * r][j], _mm512_slli_epi32(sums[2 * r + 1][j], 16));
            if (b->add) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(out + j));
            _mm512_storeu_si512(out + j, sum);
        }
    }
}

INLINE TARGET_AVX512 void block_512(const struct block *b, const int rows, const int weight_bytes) {
    __m512i sums[2 * ROWS][VECTORS];
    UNROLL for (int i = 0; i < 2 * rows; i++)
        UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = _mm512_setzero_si512();
    struct ahead ahead = *b->ahead;
    for (int64_t k = 0; k < b->pairs; k++) {
        const int32_t *limbs = b->limbs + 2 * k;
        fetch_ahead(&ahead, VECTORS * 32 * weight_bytes);
        fetch_limbs(b, 2 * rows, k);
        __m512i w[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; j++) w[j] = load_512(b->weights, k * VECTORS + j, weight_bytes);
        UNROLL for (int i = 0; i < 2 * rows; i++) {
            __m512i x = _mm512_set1_epi32(limbs[i / 2 * b->width + i % 2]);
            UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = add_pairs_512(sums[i][j], x, w[j]);
        }
    }
    store_512(b, rows, sums);
    *b->ahead = ahead;
}

/* The same for narrow products, four terms at a time. */
INLINE TARGET_AVX512 void narrow_block_512(const struct block *b, const int rows) {
    __m512i sums[2 * ROWS][VECTORS], w[VECTORS];
    UNROLL for (int i = 0; i < 2 * rows; i++)
        UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = _mm512_setzero_si512();
    struct ahead ahead = *b->ahead;
    for (int64_t k = 0; k < b->pairs / 2; k++) {
        const int32_t *limbs = b->limbs + 3 * k;
        fetch_ahead(&ahead, VECTORS * 2 * 64);
        fetch_limbs(b, 3 * rows, k);
        UNROLL for (int pair = 0; pair < 2; pair++) {
            UNROLL for (int j = 0; j < VECTORS; j++) {
                w[j] = load_512(b->weights, (2 * k + pair) * VECTORS + j, 2);
                __asm__("" : "+v"(w[j])); /* keeps the compiler from loading it again for every row */
            }
            UNROLL for (int i = 0; i < rows; i++) {
                __m512i x = _mm512_set1_epi32(limbs[i * b->width + pair]);
                UNROLL for (int j = 0; j < VECTORS; j++) sums[2 * i][j] = add_pairs_512(sums[2 * i][j], x, w[j]);
            }
        }
        UNROLL for (int j = 0; j < VECTORS; j++) w[j] = load_512(b->bytes, k * VECTORS + j, 2);
        UNROLL for (int i = 0; i < rows; i++) {
            __m512i x = _mm512_set1_epi32(limbs[i * b->width + 2]);
            UNROLL for (int j = 0; j < VECTORS; j++) sums[2 * i + 1][j] = add_fours_512(sums[2 * i + 1][j], x, w[j]);
        }
    }
    store_512(b, rows, sums);
    *b->ahead = ahead;
}

/* Prepares a block's weights for narrow products: their lowest bytes, [pair / 2][PANEL][4] with every four in the order 0, 2,
 * 1, 3, in `bytes`. Returns them as int16, which are in `wide` if they were not before. */
static TARGET_AVX512 const void *prepare_narrow(const void *weights, int weight_bytes, int64_t pairs, int16_t *wide,
                                                int8_t *bytes) {
    __m512i low = _mm512_set1_epi16(0xff);
    for (int64_t k = 0; k < pairs / 2; k++)
        for (int64_t j = 0; j < VECTORS; j++) {
            int64_t i = 2 * k * VECTORS + j;
            __m512i a = load_512(weights, i, weight_bytes), b = load_512(weights, i + VECTORS, weight_bytes);
            if (weight_bytes == 1) {
                _mm512_store_si512((__m512i *)wide + i, a);
                _mm512_store_si512((__m512i *)wide + i + VECTORS, b);
            }
            a = _mm512_ternarylogic_epi32(low, a, _mm512_slli_epi16(b, 8), 0xca); /* the low bytes of a, then those of b */
            _mm512_store_si512((__m512i *)bytes + k * VECTORS + j, a);
        }
    return weight_bytes == 1 ? wide : weights;
}

static TARGET_AVX512 void narrow_product_avx512(const struct block *b, int rows, int weight_bytes) {
    (void)weight_bytes;
    if (rows == 3) narrow_block_512(b, 3);
    else if (rows == 2) narrow_block_512(b, 2);
    else narrow_block_512(b, 1);
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
    int64_t pairs = tiles_of(inputs) * TILE_PAIRS, panel_bytes = pairs * PANEL * 2 * weight_bytes;
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

/* True if a product is narrow: in a ring of 24 bits, with so many rows that preparing weights for them pays. */
static int is_narrow(int32_t isa, int32_t ring_bits, int64_t count) {
    return HAVE_X86 && isa == ISA_AVX512 && ring_bits <= 24 && count > NARROW_ROWS;
}

/* Narrow limbs of `present` entries, and zeros up to `length`: of every four entries the low limbs in two words, and the lowest
 * bytes of the high limbs in one, in the order 0, 2, 1, 3. */
static void split_narrow(const uint32_t *restrict row, int64_t present, int64_t length, uint32_t *restrict to) {
    for (int64_t i = 0; i < length; i += 4, to += 3) {
        uint32_t x[4] = {0};
        if (i + 4 <= present) memcpy(x, row + i, sizeof x);
        else if (i < present) memcpy(x, row + i, (size_t)(present - i) * sizeof *x);
        to[0] = (x[0] & 0xffffu) | (x[1] << 16);
        to[1] = (x[2] & 0xffffu) | (x[3] << 16);
        for (int j = 0; j < 4; j++) x[j] = (x[j] + 0x8000u) >> 16 & 0xffu;
        to[2] = x[0] | x[2] << 8 | x[1] << 16 | x[3] << 24;
    }
}

/* The number of terms of a block. */
INLINE int64_t depth_of(int64_t count, int narrow) { return narrow || count <= FEW_ROWS ? FEW_DEPTH : DEPTH; }

/* Splits rows, int32 [count, width], into limbs: [block of depth_of(...) columns][row][pair of columns][low words,
 * high words], width padded with zeros to a multiple of PANEL: count * that many int32 in all; narrow, three quarters. For AMX,
 * those of amx.h, and count is padded to a multiple of 16. The other arguments are those of the product. */
EXPORT void ring_split(int32_t isa, int32_t ring_bits, int32_t weight_bytes, const int32_t *rows, int64_t count, int64_t width,
                       int32_t *limbs) {
#if HAVE_AMX
    if (isa == ISA_AMX) {
        amx_split(rows, count, width, ring_bits <= 24 ? 3 : 4, weight_bytes, (uint8_t *)limbs);
        return;
    }
#endif
    int64_t padded = tiles_of(width) * PANEL;
    int narrow = is_narrow(isa, ring_bits, count);
    int64_t depth = depth_of(count, narrow);
    uint32_t *restrict to = (uint32_t *)limbs;
    for (int64_t first = 0; first < padded; first += depth) {
        int64_t length = least(depth, padded - first), present = least(length, width - first);
        for (int64_t r = 0; r < count; r++, to += narrow ? length / 4 * 3 : length) {
            const uint32_t *restrict row = (const uint32_t *)rows + r * width + first;
            int64_t i = 0;
            if (narrow) {
                split_narrow(row, present, length, to);
                continue;
            }
            for (; i + 1 < present; i += 2) { /* a negative low limb borrows from the high one */
                to[i] = (row[i] & 0xffffu) | (row[i + 1] << 16);
                to[i + 1] = ((row[i] + 0x8000u) >> 16) | ((row[i + 1] + 0x8000u) & 0xffff0000u);
            }
            if (i < present) {
                to[i] = row[i] & 0xffffu;
                to[i + 1] = (row[i] + 0x8000u) >> 16;
                i += 2;
            }
            memset(to + i, 0, (size_t)(length - i) * sizeof *to);
        }
    }
}

/* Columns [begin, end) of PANEL each of a product, for all rows, modulo 2^ring_bits: higher bits are arbitrary.
 *
 * panels: from ring_pack; limbs: from ring_split of `count` rows; out: int32 [count, columns], rows `columns` apart,
 * columns = outputs forward, inputs backward. Slices of one product may run at the same time. */
EXPORT void ring_product(int32_t isa, int32_t ring_bits, int32_t backward, const void *panels, int32_t weight_bytes,
                         int64_t outputs, int64_t inputs, const int32_t *limbs, int64_t count, int32_t *out, int64_t begin,
                         int64_t end) {
#if HAVE_AMX
    if (isa == ISA_AMX) {
        struct order order = {backward, panels, outputs, inputs, (const uint8_t *)limbs, count, out, begin, end};
        amx_product(&order, ring_bits <= 24 ? 3 : 4, weight_bytes);
        return;
    }
#endif
    block_product *multiply = block_product_of(isa);
    tile_transpose *transpose = tile_transpose_of(isa);
    _Alignas(64) int16_t turned[DEPTH * PANEL];
    _Alignas(64) int8_t bytes[FEW_DEPTH * PANEL];
    int32_t edge[ROWS * PANEL];
    int64_t columns = backward ? inputs : outputs, tiles = tiles_of(backward ? outputs : inputs); /* of terms */
    int64_t tile_bytes = PANEL * PANEL * weight_bytes, panel_bytes = tiles_of(inputs) * tile_bytes;
    int64_t along = backward ? panel_bytes : tile_bytes, across = backward ? tile_bytes : panel_bytes;
    int narrow = is_narrow(isa, ring_bits, count), block_bytes = backward || narrow ? 2 : weight_bytes;
    int64_t step = depth_of(count, narrow) / PANEL;
    int64_t words = narrow ? PANEL / 4 * 3 : PANEL; /* of limbs of a row, per tile */
#if HAVE_X86
    if (narrow) multiply = narrow_product_avx512;
#endif
    int64_t reads = (count + ROWS - 1) / ROWS * block_bytes / weight_bytes + (backward ? 1 : 0); /* of each byte */
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t column = panel * PANEL, width = least(PANEL, columns - column);
        for (int64_t tile = 0; tile < tiles; tile += step) {
            const char *weights = (const char *)panels + panel * across + tile * along;
            int64_t here = least(step, tiles - tile);
            int64_t next_tile = tile + step < tiles ? tile + step : 0, next_panel = next_tile ? panel : panel + 1;
            struct ahead ahead = {
                .weights = panels,
                .offset = next_panel * across + next_tile * along,
                .size = next_panel < end ? least(step, tiles - next_tile) * tile_bytes : 0,
                .tile = tile_bytes,
                .gap = along - tile_bytes,
                .every = FETCH * reads,
                .countdown = FETCH * reads,
            };
            struct block b = {.weights = weights, .pairs = here * TILE_PAIRS, .width = here * words, .ahead = &ahead};
            b.bytes = bytes;
            if (backward) {
                for (int64_t i = 0; i < here; i++)
                    transpose(weights + i * along, turned + i * PANEL * PANEL, weight_bytes, &ahead);
                b.weights = turned;
            }
#if HAVE_X86
            if (narrow) b.weights = prepare_narrow(b.weights, backward ? 2 : weight_bytes, b.pairs, turned, bytes);
#endif
            for (int64_t row = 0, rows; row < count; row += rows) {
                rows = count - row == ROWS + 1 ? 2 : least(ROWS, count - row); /* one alone has too few sums to be fast */
                int32_t *target = out + row * columns + column;
                b.limbs = limbs + tile * words * count + row * b.width;
                b.next_limbs = row + rows < count ? b.limbs + rows * b.width : limbs + next_tile * words * count;
                b.out = width == PANEL ? target : edge;
                b.columns = width == PANEL ? columns : PANEL;
                b.add = width == PANEL && tile > 0;
                multiply(&b, (int)rows, block_bytes);
                if (width == PANEL) continue;
                for (int r = 0; r < rows; r++)
                    for (int64_t c = 0; c < width; c++) {
                        uint32_t before = tile > 0 ? (uint32_t)target[r * columns + c] : 0;
                        target[r * columns + c] = (int32_t)(before + (uint32_t)edge[r * PANEL + c]);
                    }
            }
        }
    }
}

#endif
