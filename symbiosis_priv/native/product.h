/* The ring product, rows @ weight.T (forward) or rows @ weight (backward), modulo 2^32, from one packed copy.
 *
 * Theory of operation. A row entry x is two balanced int16 limbs, x = low + 2^16 * high (mod 2^32), a weight is one int16.
 * `pmaddwd` and `vpdpwssd` multiply pairs of int16 and add them up in int32 lanes that wrap, so two of
 * them, one per limb, give the product of two entries in every lane, and the limbs meet at the end:
 * sum = low sum + 2^16 * high sum. Nothing saturates: `pmaddwd`'s only overflow, 2 * 2^30, wraps to the right residue.
 *
 * Narrow products. Modulo 2^24, only 8 bits of the high limb and of its sum count, so they meet only the lowest 8 bits of the
 * weight, and one `vpdpbusd` multiplies four terms where `vpdpwssd` multiplies two. A quarter of the arithmetic is saved. The
 * low bytes of a block's weights are put into a small buffer, once for all rows.
 *
 * Weights are packed as packed.h says. Forward, 16 lanes hold 16 outputs and a broadcast pair of row entries meets one vector
 * of weights. Backward wants pairs of outputs with inputs in the lanes: a tile of 64 x 64 is a square of 64-bit cells (2
 * outputs x 2 inputs), transposed as such with the words inside each cell swapped. Narrower weights are widened to int16. Both
 * are done DEPTH terms at a time into a small buffer, from where all rows use it. So one inner loop serves both directions.
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
#include "packed.h"

enum { ROWS = 3, DEPTH = 256, FEW_ROWS = 16, FEW_DEPTH = 128, NARROW_ROWS = 8 };

/* One block of the inner loop: `rows` (at most ROWS) rows, `pairs` pairs of terms, PANEL columns.
 * weights: [pairs][PANEL][2]; limbs: [rows][pairs][2] words of two int16, rows `width` words apart; next_limbs: those of
 * the pass after this one; narrow, bytes: [pairs / 2][PANEL][4], and limbs: [rows][pairs / 2][3] words (`split_narrow`). Sums
 * are stored in or added to `out`, rows `columns` words apart. */
struct block {
    const int16_t *weights;
    const int8_t *bytes;
    const int32_t *limbs, *next_limbs;
    int64_t pairs, width;
    int32_t *out;
    int64_t columns;
    int add;
    struct ahead *ahead;
};

typedef void block_product(const struct block *block, int rows);
/* From [TILE_PAIRS pairs of inputs][PANEL outputs][2] to [TILE_PAIRS pairs of outputs][PANEL inputs][2]. */
typedef void tile_transpose(const int16_t *square, int16_t *turned, struct ahead *ahead);

/* ---- plain C ---- */

static void block_product_portable(const struct block *b, int rows) {
    for (int r = 0; r < rows; r++) {
        uint32_t sums[PANEL] = {0};
        for (int64_t k = 0; k < b->pairs; k++) {
            const uint32_t *limbs = (const uint32_t *)b->limbs + r * b->width + 2 * k;
            uint32_t low = limbs[0], high = limbs[1];
            uint32_t first = (uint32_t)(int16_t)low + (high << 16);
            uint32_t second = (uint32_t)(int16_t)(low >> 16) + (high & 0xffff0000u);
            const int16_t *w = b->weights + k * PAIR;
            for (int c = 0; c < PANEL; c++) sums[c] += first * (uint32_t)w[2 * c] + second * (uint32_t)w[2 * c + 1];
        }
        uint32_t *out = (uint32_t *)b->out + r * b->columns;
        for (int c = 0; c < PANEL; c++) out[c] = sums[c] + (b->add ? out[c] : 0);
    }
}

static void tile_transpose_portable(const int16_t *square, int16_t *turned, struct ahead *ahead) {
    (void)ahead;
    for (int i = 0; i < PANEL; i++)
        for (int o = 0; o < PANEL; o++)
            turned[((o / 2) * PANEL + i) * 2 + o % 2] = square[((i / 2) * PANEL + o) * 2 + i % 2];
}

#if HAVE_X86

/* Call for every step k, which reads `words` words of limbs: fetches as many limbs of the next pass. The next pass may have
 * fewer rows or terms, so this is an address and no pointer; a prefetch from beyond the end does nothing. */
INLINE void fetch_limbs(const struct block *b, const int words, int64_t k) {
    uintptr_t address = (uintptr_t)b->next_limbs + (uintptr_t)k * words * sizeof *b->limbs;
    _mm_prefetch((const char *)address, _MM_HINT_T0);
}

/* ---- 256 bit: AVX2 and AVX-VNNI differ in one operation: sums += the products of a limb of two terms with two vectors ---- */

/* As the intrinsics, around which gcc spills and copies sums (here and below). */
INLINE TARGET_AVX2 void add_pairs_avx2(__m256i sums[2], const int32_t *limb, __m256i w, __m256i v) {
    __m256i x, pairs;
    __asm__("vpbroadcastd %4, %2\n\tvpmaddwd %5, %2, %3\n\tvpmaddwd %6, %2, %2\n\tvpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
            : "+x"(sums[0]), "+x"(sums[1]), "=&x"(x), "=&x"(pairs)
            : "m"(*limb), "x"(w), "x"(v));
}

#define DOT add_pairs_avx2
#define NAMED(name) name##_avx2
#define TARGET TARGET_AVX2
#include "product_256.h"

#if HAVE_AVXVNNI
INLINE TARGET_AVXVNNI void add_pairs_avxvnni(__m256i sums[2], const int32_t *limb, __m256i w, __m256i v) {
    __m256i x;
    __asm__("vpbroadcastd %3, %2\n\t%{vex%} vpdpwssd %4, %2, %0\n\t%{vex%} vpdpwssd %5, %2, %1"
            : "+x"(sums[0]), "+x"(sums[1]), "=&x"(x)
            : "m"(*limb), "x"(w), "x"(v));
}

#define DOT add_pairs_avxvnni
#define NAMED(name) name##_avxvnni
#define TARGET TARGET_AVXVNNI
#include "product_256.h"
#endif

/* ---- 512 bit ---- */

/* Where an instruction takes its weights from: gcc chooses well, clang takes memory wherever it may. */
#ifdef __clang__
#define REGISTER_OR_MEMORY(registers) registers
#else
#define REGISTER_OR_MEMORY(registers) registers "m"
#endif

INLINE TARGET_AVX512 __m512i add_pairs_512(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), REGISTER_OR_MEMORY("v")(w));
    return sum;
}

INLINE TARGET_AVX512 __m512i add_fours_512(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), REGISTER_OR_MEMORY("v")(w));
    return sum;
}

INLINE TARGET_AVX512 __m512i load_512(const void *weights, int64_t vector) {
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

INLINE TARGET_AVX512 void block_512(const struct block *b, const int rows) {
    __m512i sums[2 * ROWS][VECTORS];
    UNROLL for (int i = 0; i < 2 * rows; i++)
        UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = _mm512_setzero_si512();
    struct ahead ahead = *b->ahead;
    for (int64_t k = 0; k < b->pairs; k++) {
        const int32_t *limbs = b->limbs + 2 * k;
        fetch_ahead(&ahead, VECTORS * 32);
        fetch_limbs(b, 2 * rows, k);
        __m512i w[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; j++) w[j] = load_512(b->weights, k * VECTORS + j);
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
        fetch_ahead(&ahead, VECTORS * 64);
        fetch_limbs(b, 3 * rows, k);
        UNROLL for (int pair = 0; pair < 2; pair++) {
            UNROLL for (int j = 0; j < VECTORS; j++) {
                w[j] = load_512(b->weights, (2 * k + pair) * VECTORS + j);
                __asm__("" : "+v"(w[j])); /* keeps the compiler from loading it again for every row */
            }
            UNROLL for (int i = 0; i < rows; i++) {
                __m512i x = _mm512_set1_epi32(limbs[i * b->width + pair]);
                UNROLL for (int j = 0; j < VECTORS; j++) sums[2 * i][j] = add_pairs_512(sums[2 * i][j], x, w[j]);
            }
        }
        UNROLL for (int j = 0; j < VECTORS; j++) w[j] = load_512(b->bytes, k * VECTORS + j);
        UNROLL for (int i = 0; i < rows; i++) {
            __m512i x = _mm512_set1_epi32(limbs[i * b->width + 2]);
            UNROLL for (int j = 0; j < VECTORS; j++) sums[2 * i + 1][j] = add_fours_512(sums[2 * i + 1][j], x, w[j]);
        }
    }
    store_512(b, rows, sums);
    *b->ahead = ahead;
}

/* The lowest bytes of a block's weights for narrow products, [pair / 2][PANEL][4] with every four in the order 0, 2, 1, 3. */
static TARGET_AVX512 void prepare_narrow(const int16_t *weights, int64_t pairs, int8_t *bytes) {
    __m512i low = _mm512_set1_epi16(0xff);
    for (int64_t k = 0; k < pairs / 2; k++)
        for (int64_t j = 0; j < VECTORS; j++) {
            int64_t i = 2 * k * VECTORS + j;
            __m512i a = load_512(weights, i), b = load_512(weights, i + VECTORS);
            a = _mm512_ternarylogic_epi32(low, a, _mm512_slli_epi16(b, 8), 0xca); /* the low bytes of a, then those of b */
            _mm512_store_si512((__m512i *)bytes + k * VECTORS + j, a);
        }
}

static TARGET_AVX512 void narrow_product_avx512(const struct block *b, int rows) {
    if (rows == 3) narrow_block_512(b, 3);
    else if (rows == 2) narrow_block_512(b, 2);
    else narrow_block_512(b, 1);
}

static TARGET_AVX512 void block_product_avx512(const struct block *b, int rows) {
    if (rows == 3) block_512(b, 3);
    else if (rows == 2) block_512(b, 2);
    else block_512(b, 1);
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
EXPORT void ring_split(int32_t isa, int32_t ring_bits, int32_t weight_bits, const int32_t *rows, int64_t count, int64_t width,
                       int32_t *limbs) {
#if HAVE_AMX
    if (isa == ISA_AMX) {
        amx_split(rows, count, width, ring_bits <= 24 ? 3 : 4, weight_bits, (uint8_t *)limbs);
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
EXPORT void ring_product(int32_t isa, int32_t ring_bits, int32_t backward, const void *panels, int32_t weight_bits,
                         int64_t outputs, int64_t inputs, const int32_t *limbs, int64_t count, int32_t *out, int64_t begin,
                         int64_t end) {
#if HAVE_AMX
    if (isa == ISA_AMX) {
        struct order order = {backward, panels, outputs, inputs, (const uint8_t *)limbs, count, out, begin, end};
        amx_product(&order, ring_bits <= 24 ? 3 : 4, weight_bits);
        return;
    }
#endif
    block_product *multiply = block_product_of(isa);
    tile_transpose *transpose = tile_transpose_of(isa);
    square_widen *widen = square_widen_of(isa);
    _Alignas(64) int16_t ready[DEPTH * PANEL], square[SQUARE];
    _Alignas(64) int8_t bytes[FEW_DEPTH * PANEL];
    int32_t edge[ROWS * PANEL];
    int64_t columns = backward ? inputs : outputs, tiles = tiles_of(backward ? outputs : inputs); /* of terms */
    int64_t tile_bytes = square_bytes(weight_bits), panel_bytes = tiles_of(inputs) * tile_bytes;
    int64_t along = backward ? panel_bytes : tile_bytes, across = backward ? tile_bytes : panel_bytes;
    int narrow = is_narrow(isa, ring_bits, count), widens = weight_bits < 16;
    int64_t step = depth_of(count, narrow) / PANEL;
    int64_t words = narrow ? PANEL / 4 * 3 : PANEL; /* of limbs of a row, per tile */
#if HAVE_X86
    if (narrow) multiply = narrow_product_avx512;
#endif
    int64_t reads = (count + ROWS - 1) / ROWS + (backward ? 1 : 0) + widens; /* of each weight */
    int64_t every = FETCH * 8 * reads / weight_bits;
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t column = panel * PANEL, width = least(PANEL, columns - column);
        for (int64_t tile = 0; tile < tiles; tile += step) {
            const char *weights = (const char *)panels + panel * across + tile * along;
            int64_t here = least(step, tiles - tile);
            int64_t next_tile = tile + step < tiles ? tile + step : 0, next_panel = next_tile ? panel : panel + 1;
            int64_t following = next_panel < end ? least(step, tiles - next_tile) : 0;
            struct ahead ahead = {
                .at = (const char *)panels + next_panel * across + next_tile * along,
                .squares = following,
                .size = tile_bytes,
                .left = tile_bytes,
                .gap = along - tile_bytes,
                .every = every,
                .countdown = following ? every : INT64_MAX,
            };
            for (int64_t i = 0; i < here && (widens || backward); i++) {
                const void *from = weights + i * along;
                int16_t *to = ready + i * SQUARE;
                if (widens) widen(from, backward ? square : to, weight_bits, &ahead);
                if (backward) transpose(widens ? square : from, to, &ahead);
            }
            struct block b = {.pairs = here * TILE_PAIRS, .width = here * words, .ahead = &ahead};
            b.weights = widens || backward ? ready : (const int16_t *)weights;
            b.bytes = bytes;
#if HAVE_X86
            if (narrow) prepare_narrow(b.weights, b.pairs, bytes);
#endif
            for (int64_t row = 0, rows; row < count; row += rows) {
                rows = count - row == ROWS + 1 ? 2 : least(ROWS, count - row); /* one alone has too few sums to be fast */
                int32_t *target = out + row * columns + column;
                b.limbs = limbs + tile * words * count + row * b.width;
                b.next_limbs = row + rows < count ? b.limbs + rows * b.width : limbs + next_tile * words * count;
                b.out = width == PANEL ? target : edge;
                b.columns = width == PANEL ? columns : PANEL;
                b.add = width == PANEL && tile > 0;
                multiply(&b, (int)rows);
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
