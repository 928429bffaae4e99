/* The ring product on AMX, the matrix units of some x86 processors, from the packed layout of product.h.
 *
 * Theory of operation. `tdpbusd` multiplies 16 rows of 64 unsigned bytes by 64 x 16 signed bytes and adds the products to
 * 16 x 16 sums in int32, which wrap. A row entry is 4 unsigned bytes, its limbs (the lowest 3 suffice for a result modulo
 * 2^24). A weight is one signed byte, or two signed digits: w = low + 2^8 * high. The product of limb i and digit j counts
 * 2^(8 (i + j)) times, so it vanishes where i + j is at least the number of limbs. What remains takes, per 16 x 16 x 64
 * products, 7 instructions (modulo 2^24: 5) with two digits and 4 (3) with one. There is one tile of sums per shift, and
 * `combine` shifts the sums and adds them up. Nothing saturates or is rounded.
 *
 * Tiles: an instruction starts every 16 cycles, also if it adds to the same sums as the one before, and loads of other tiles
 * take no time beside it. While both threads of a core use AMX (the other one may belong to another virtual machine), the
 * number of tiles in use decides, probably because the threads share the physical tiles for renaming: an instruction takes
 * some 55 cycles with 8 tiles, 32 with 6, and 26 with 4. So there is one tile for limbs and one for digits. (Two
 * passes with the sums of two shifts each need 4 tiles, and more time for everything else.)
 *
 * Blocking: digit tiles of 256 terms (512 with one digit) x WIDE * 64 columns are made in a buffer that stays in the
 * second-level cache, once for all rows. The limbs of up to 16 rows and these terms stay in the first-level cache while all
 * columns of the block pass; with twice as many terms, the passing tiles displace them. Meanwhile the weights of the next
 * block are fetched evenly, and the previous sums are combined between tile instructions. Blocks of rows are of about equal
 * height: 17 rows are 9 and 8, because the time of an instruction decreases down to 8 rows.
 *
 * In a packed layout of 16 bits, a vector holds pairs of terms, and the digits of two vectors are interleaved. That puts
 * every four terms in the order 0, 2, 1, 3, and `amx_split` puts the limbs in the same order. */
#ifndef SYMBIOSIS_AMX_H
#define SYMBIOSIS_AMX_H

#include "common.h"
#include "packed.h"

#if HAVE_AMX
#include "tiles.h"

#define TARGET_AMX __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")))

enum { DIGIT_TILES = 8, WIDE = 8, QUARTER = PANEL / 4 }; /* QUARTER: the columns of a tile, and the words of its rows */

INLINE int digits_of(int weight_bits) { return weight_bits == 8 ? 1 : 2; }

/* Steps of 64 terms in a block. */
INLINE int64_t steps_of(int digits) { return DIGIT_TILES / digits; }

static int64_t height_of(int64_t count) {
    int64_t blocks = (count + TILE_ROWS - 1) / TILE_ROWS;
    return (count + blocks - 1) / blocks;
}

/* ---- rows ---- */

INLINE __mmask16 first_lanes(int64_t count) {
    return (__mmask16)(count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
}

/* Limbs of rows: [block of `steps_of` steps][block of rows][step of 64 terms][limb][row][64 terms], zeros where there are
 * none. */
static TARGET_AMX void amx_split(const int32_t *rows, int64_t count, int64_t width, int limbs, int weight_bits, uint8_t *to) {
    const int digits = digits_of(weight_bits);
    uint8_t gather[64]; /* byte l of word i, at 16 l + i or where its term belongs */
    for (int i = 0; i < 64; i++)
        gather[i] = (uint8_t)(4 * (weight_bits < 16 || i % 4 % 3 == 0 ? i % 16 : i % 16 ^ 3) + i / 16);
    __m512i order = _mm512_loadu_si512(gather);
    int64_t height = height_of(count), blocks = (count + height - 1) / height, steps = tiles_of(width), most = steps_of(digits);
    for (int64_t first = 0; first < steps; first += most) {
        int64_t here = least(most, steps - first);
        for (int64_t r = 0; r < blocks * height; r++) {
            uint8_t *out = to + ((first * blocks + r / height * here) * limbs * height + r % height) * TILE_WIDTH;
            for (int64_t s = 0; s < here; s++, out += limbs * height * TILE_WIDTH) {
                __m512i q[4];
                for (int j = 0; j < 4; j++) {
                    int64_t at = (first + s) * TILE_WIDTH + j * 16;
                    __mmask16 present = first_lanes(r < count ? width - at : 0);
                    const int32_t *from = rows + (present ? r * width + at : 0);
                    q[j] = _mm512_permutexvar_epi8(order, _mm512_maskz_loadu_epi32(present, from));
                }
                __m512i ab = _mm512_shuffle_i32x4(q[0], q[1], 0x88), cd = _mm512_shuffle_i32x4(q[2], q[3], 0x88);
                __m512i ef = _mm512_shuffle_i32x4(q[0], q[1], 0xdd), gh = _mm512_shuffle_i32x4(q[2], q[3], 0xdd);
                _mm512_storeu_si512(out, _mm512_shuffle_i32x4(ab, cd, 0x88));
                _mm512_storeu_si512(out + height * TILE_WIDTH, _mm512_shuffle_i32x4(ef, gh, 0x88));
                _mm512_storeu_si512(out + 2 * height * TILE_WIDTH, _mm512_shuffle_i32x4(ab, cd, 0xdd));
                if (limbs == 4) _mm512_storeu_si512(out + 3 * height * TILE_WIDTH, _mm512_shuffle_i32x4(ef, gh, 0xdd));
            }
        }
    }
}

/* ---- weights ---- */

/* A packed square of 64 inputs x 64 outputs to digit tiles of 64 inputs x 16 outputs, [input / 4][output][input % 4]: those of
 * 16 outputs at `to`, one per digit, those of the next 16 outputs `gap` bytes on. */
INLINE TARGET_AMX void forward_tiles(const char *square, char *to, int64_t gap, const int weight_bits) {
    for (int k = 0; k < QUARTER; k++, to += 64) {
        const char *x = square + k * 2 * PAIR, *y = x + PAIR; /* low bytes of two pairs of inputs */
        if (weight_bits < 16) {
            __m512i one = _mm512_set1_epi8(1), high_x[2], high_y[2];
            if (weight_bits == 10) {
                high_bytes(square + SQUARE + k * PAIR / 2, high_x);
                high_bytes(square + SQUARE + k * PAIR / 2 + PAIR / 4, high_y);
            }
            for (int c = 0; c < 4; c += 2) {
                __m512i a = _mm512_loadu_si512(x + c * 32), b = _mm512_loadu_si512(y + c * 32);
                _mm512_storeu_si512(to + c * gap, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(to + (c + 1) * gap, _mm512_unpackhi_epi16(a, b));
                if (weight_bits == 8) continue; /* a negative low digit borrows from the high one */
                a = _mm512_mask_add_epi8(high_x[c / 2], _mm512_movepi8_mask(a), high_x[c / 2], one);
                b = _mm512_mask_add_epi8(high_y[c / 2], _mm512_movepi8_mask(b), high_y[c / 2], one);
                _mm512_storeu_si512(to + c * gap + TILE_BYTES, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(to + (c + 1) * gap + TILE_BYTES, _mm512_unpackhi_epi16(a, b));
            }
            continue;
        }
        __m512i half = _mm512_set1_epi16(0x80), low = _mm512_set1_epi16(0xff);
        for (int c = 0; c < 4; c++) {
            __m512i a = _mm512_loadu_si512(square + k * 4 * PAIR + c * 64);
            __m512i b = _mm512_loadu_si512(square + k * 4 * PAIR + 2 * PAIR + c * 64);
            /* 0xca: the first operand's bits choose between the second and the third */
            __m512i lows = _mm512_ternarylogic_epi32(low, a, _mm512_slli_epi16(b, 8), 0xca);
            a = _mm512_srli_epi16(_mm512_add_epi16(a, half), 8);
            __m512i highs = _mm512_ternarylogic_epi32(low, a, _mm512_add_epi16(b, half), 0xca);
            _mm512_storeu_si512(to + c * gap, lows);
            _mm512_storeu_si512(to + c * gap + TILE_BYTES, highs);
        }
    }
}

/* The same square to digit tiles of 64 outputs x 16 inputs, [output / 4][input][output % 4]. */
INLINE TARGET_AMX void backward_tiles(const char *square, char *to, int64_t gap, const int weight_bits) {
    const int digits = digits_of(weight_bits);
    _Alignas(64) char forward[4 * 2 * TILE_BYTES];
    forward_tiles(square, forward, digits * TILE_BYTES, weight_bits);
    __m128i in_order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i exchanged = _mm_setr_epi8(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
    __m512i turn = _mm512_broadcast_i32x4(weight_bits < 16 ? in_order : exchanged);
    for (int p = 0; p < 4 * digits; p++) /* 16 outputs, one digit */
        for (int t = 0; t < 4; t++) {    /* 16 inputs */
            const char *from = forward + p * TILE_BYTES + t * 256;
            __m512i a = _mm512_shuffle_epi8(_mm512_load_si512(from), turn); /* 4 inputs: a lane has 4 outputs of each */
            __m512i b = _mm512_shuffle_epi8(_mm512_load_si512(from + 64), turn);
            __m512i c = _mm512_shuffle_epi8(_mm512_load_si512(from + 128), turn);
            __m512i d = _mm512_shuffle_epi8(_mm512_load_si512(from + 192), turn);
            __m512i ab = _mm512_shuffle_i32x4(a, b, 0x88), cd = _mm512_shuffle_i32x4(c, d, 0x88); /* lanes 0 and 2 */
            __m512i ef = _mm512_shuffle_i32x4(a, b, 0xdd), gh = _mm512_shuffle_i32x4(c, d, 0xdd); /* lanes 1 and 3 */
            char *out = to + t * gap + p % digits * TILE_BYTES + p / digits * 256;
            _mm512_storeu_si512(out, _mm512_shuffle_i32x4(ab, cd, 0x88));
            _mm512_storeu_si512(out + 64, _mm512_shuffle_i32x4(ef, gh, 0x88));
            _mm512_storeu_si512(out + 128, _mm512_shuffle_i32x4(ab, cd, 0xdd));
            _mm512_storeu_si512(out + 192, _mm512_shuffle_i32x4(ef, gh, 0xdd));
        }
}

/* ---- the product ---- */

/* The sums of up to 16 rows and 16 columns, one tile per limb, and where they are to be stored or added; `done` rows are. */
struct finished {
    _Alignas(64) int32_t sums[4][TILE_ROWS * QUARTER];
    int32_t *out;
    int64_t columns;
    __mmask16 present;
    int add, rows, done;
};

INLINE TARGET_AMX void combine(struct finished *f, int stop, const int limbs) {
    for (; f->done < stop; f->done++) {
        int32_t *out = f->out + f->done * f->columns;
        __m512i total = f->add ? _mm512_maskz_loadu_epi32(f->present, out) : _mm512_setzero_si512();
        UNROLL for (int i = 0; i < limbs; i++) {
            __m512i sum = _mm512_load_si512(f->sums[i] + f->done * QUARTER);
            total = _mm512_add_epi32(total, _mm512_sllv_epi32(sum, _mm512_set1_epi32(8 * i)));
        }
        _mm512_mask_storeu_epi32(out, f->present, total);
    }
}

/* Weights of the next block that are fetched: `lines` cache lines each time, runs of `run` lines with `gap` bytes between. */
struct next_block {
    const char *at;
    int64_t left, run, in_run, gap, lines;
};

INLINE void fetch_lines(struct next_block *n) {
    for (int64_t i = 0; i < n->lines && n->left > 0; i++, n->left--) {
        _mm_prefetch(n->at, _MM_HINT_T1);
        n->at += 64;
        if (--n->in_run == 0) n->at += n->gap, n->in_run = n->run;
    }
}

/* Store the sums of the previous call, and begin with zeros. */
#define TILE_NEXT(tile) \
    if (k == 0) { \
        TILE_STORE(tile, f->sums[tile], 64); \
        TILE_ZERO(tile); \
    }

enum { LIMB = 4, DIGIT, USED_TILES }; /* after the sums; the macros take literal numbers */

/* Multiplies `height` rows and 16 columns over `steps` times 64 terms. a: limbs [step][limb][row][64]; b: tiles [step][digit].
 * One operand changes between two products. The sums stay in their tiles until the next call. The first step stores those of
 * the previous call, each just before its tile is needed, so that no instruction waits for the last ones; all steps combine
 * them. */
INLINE TARGET_AMX void multiply_tiles(const uint8_t *a, const char *b, int64_t steps, int64_t height, struct finished *f,
                                      struct next_block *next, const int limbs, const int digits) {
    int64_t limb = height * TILE_WIDTH;
    for (int64_t k = 0; k < steps; k++, a += limbs * limb, b += digits * TILE_BYTES) {
        TILE_LOAD(5, b, 64);
        if (limbs == 4) {
            TILE_LOAD(4, a + 3 * limb, 64);
            TILE_NEXT(3)
            TILE_DOT(3, 4, 5);
        }
        TILE_LOAD(4, a + 2 * limb, 64);
        TILE_NEXT(2)
        TILE_DOT(2, 4, 5);
        if (limbs == 4 && digits == 2) {
            TILE_LOAD(5, b + TILE_BYTES, 64);
            TILE_DOT(3, 4, 5);
        }
        TILE_LOAD(4, a + limb, 64);
        if (digits == 2) {
            if (limbs == 3) TILE_LOAD(5, b + TILE_BYTES, 64);
            TILE_DOT(2, 4, 5);
            TILE_LOAD(5, b, 64);
        }
        TILE_NEXT(1)
        TILE_DOT(1, 4, 5);
        TILE_LOAD(4, a, 64);
        TILE_NEXT(0)
        TILE_DOT(0, 4, 5);
        if (digits == 2) {
            TILE_LOAD(5, b + TILE_BYTES, 64);
            TILE_DOT(1, 4, 5);
        }
        fetch_lines(next);
        combine(f, (int)least(f->rows, f->done + TILE_ROWS / steps_of(digits)), limbs);
    }
    combine(f, f->rows, limbs);
}

/* What `ring_product` is asked for. */
struct order {
    int backward;
    const char *panels;
    int64_t outputs, inputs;
    const uint8_t *limbs;
    int64_t count;
    int32_t *out;
    int64_t begin, end;
};

INLINE TARGET_AMX void amx_columns(const struct order *o, const int limbs, const int weight_bits) {
    const int digits = digits_of(weight_bits);
    _Alignas(64) char tiles[WIDE * DIGIT_TILES * PANEL * PANEL]; /* 256 KB; threads have at least 1 MB */
    int64_t columns = o->backward ? o->inputs : o->outputs, steps = tiles_of(o->backward ? o->outputs : o->inputs);
    int64_t square = square_bytes(weight_bits), panel = square * tiles_of(o->inputs);
    int64_t along = o->backward ? panel : square, across = o->backward ? square : panel;
    int64_t height = height_of(o->count), blocks = (o->count + height - 1) / height, most = steps_of(digits);
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < USED_TILES; i++) { /* digits have 16 rows, limbs and sums as many as there are */
        config.rows[i] = (uint8_t)(i == DIGIT ? TILE_ROWS : height);
        config.row_bytes[i] = TILE_WIDTH;
    }
    TILES_CONFIGURE(&config);
    struct finished finished = {.rows = 0}; /* the first call stores zeros: `ldtilecfg` has cleared the tiles */
    for (int64_t column = o->begin; column < o->end; column += WIDE) {
        int64_t wide = least(WIDE, o->end - column);
        for (int64_t first = 0; first < steps; first += most) {
            int64_t here = least(most, steps - first), block = here * digits * TILE_BYTES; /* bytes of 16 columns */
            for (int64_t j = 0; j < wide; j++)
                for (int64_t k = 0; k < here; k++) {
                    const char *from = o->panels + (column + j) * across + (first + k) * along;
                    char *to = tiles + j * 4 * block + k * digits * TILE_BYTES;
                    if (o->backward) backward_tiles(from, to, block, weight_bits);
                    else forward_tiles(from, to, block, weight_bits);
                }
            struct next_block next = {0};
            int64_t next_first = first + most < steps ? first + most : 0, next_column = column + (next_first ? 0 : WIDE);
            if (next_column < o->end) {
                int64_t deep = least(most, steps - next_first), broad = least(WIDE, o->end - next_column);
                int64_t passes = blocks * wide * 4 * here;
                next.at = o->panels + next_column * across + next_first * along;
                next.left = deep * broad * square / 64;
                next.run = next.in_run = (o->backward ? broad : deep) * square / 64;
                next.gap = panel - next.run * 64;
                next.lines = (next.left + passes - 1) / passes;
            }
            for (int64_t r = 0; r < blocks; r++)
                for (int64_t j = 0; j < wide * 4 && (column * 4 + j) * QUARTER < columns; j++) {
                    int64_t at = (column * 4 + j) * QUARTER;
                    const uint8_t *a = o->limbs + (first * blocks + r * here) * limbs * height * TILE_WIDTH;
                    multiply_tiles(a, tiles + j * block, here, height, &finished, &next, limbs, digits);
                    finished.out = o->out + r * height * columns + at;
                    finished.columns = columns;
                    finished.present = first_lanes(columns - at);
                    finished.add = first > 0;
                    finished.rows = (int)least(height, o->count - r * height);
                    finished.done = 0;
                }
        }
    }
    TILE_STORE(0, finished.sums[0], 64);
    TILE_STORE(1, finished.sums[1], 64);
    TILE_STORE(2, finished.sums[2], 64);
    if (limbs == 4) TILE_STORE(3, finished.sums[3], 64);
    combine(&finished, finished.rows, limbs);
    TILES_RELEASE();
}

static TARGET_AMX void amx_columns_4_8(const struct order *o) { amx_columns(o, 4, 8); }
static TARGET_AMX void amx_columns_4_10(const struct order *o) { amx_columns(o, 4, 10); }
static TARGET_AMX void amx_columns_4_16(const struct order *o) { amx_columns(o, 4, 16); }
static TARGET_AMX void amx_columns_3_8(const struct order *o) { amx_columns(o, 3, 8); }
static TARGET_AMX void amx_columns_3_10(const struct order *o) { amx_columns(o, 3, 10); }
static TARGET_AMX void amx_columns_3_16(const struct order *o) { amx_columns(o, 3, 16); }

static void amx_product(const struct order *o, int limbs, int weight_bits) {
    if (weight_bits == 8) limbs == 4 ? amx_columns_4_8(o) : amx_columns_3_8(o);
    else if (weight_bits == 10) limbs == 4 ? amx_columns_4_10(o) : amx_columns_3_10(o);
    else limbs == 4 ? amx_columns_4_16(o) : amx_columns_3_16(o);
}

#endif
#endif
