/* The inner loop and the transposition for 256-bit registers; included once per instruction set, with DOT, NAMED and
 * TARGET defined. The end of this file undefines them. */

/* Two vectors of 8 columns at a time: 4 * ROWS sums and what feeds them fill 16 registers. STEP pairs of terms share the
 * arithmetic of addresses, which would take the place of a quarter of the products. */
INLINE TARGET void NAMED(block)(const struct block *b, const int rows) {
    enum { VECTORS = 2, PER_PAIR = PANEL / 8, STEP = 4 };
    struct ahead ahead = *b->ahead;
    for (int column = 0; column < PER_PAIR; column += VECTORS) {
        const __m256i *weights = (const __m256i *)b->weights + column;
        const int32_t *limbs[ROWS];
        __m256i sums[2 * ROWS][VECTORS];
        UNROLL for (int r = 0; r < rows; r++) limbs[r] = b->limbs + r * b->width;
        UNROLL for (int i = 0; i < 2 * rows; i++)
            UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = _mm256_setzero_si256();
        for (int64_t k = 0; k < b->pairs; k += STEP) {
            fetch_ahead(&ahead, STEP * VECTORS * 16);
            UNROLL for (int r = 0; r < rows; r += 2) fetch_limbs(b, 2 * rows, k + r);
            UNROLL for (int s = 0; s < STEP; s++) {
                __m256i w = _mm256_loadu_si256(weights + s * PER_PAIR), v = _mm256_loadu_si256(weights + s * PER_PAIR + 1);
                UNROLL for (int i = 0; i < 2 * rows; i++) DOT(sums[i], limbs[i / 2] + 2 * s + i % 2, w, v);
            }
            weights += STEP * PER_PAIR;
            UNROLL for (int r = 0; r < rows; r++) limbs[r] += 2 * STEP;
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m256i *out = (__m256i *)(b->out + r * b->columns) + column;
            UNROLL for (int j = 0; j < VECTORS; j++) {
                __m256i sum = _mm256_add_epi32(sums[2 * r][j], _mm256_slli_epi32(sums[2 * r + 1][j], 16));
                if (b->add) sum = _mm256_add_epi32(sum, _mm256_loadu_si256(out + j));
                _mm256_storeu_si256(out + j, sum);
            }
        }
    }
    *b->ahead = ahead;
}

static TARGET void NAMED(block_product)(const struct block *b, int rows) {
    if (rows == 3) NAMED(block)(b, 3);
    else if (rows == 2) NAMED(block)(b, 2);
    else NAMED(block)(b, 1);
}

static TARGET void NAMED(tile_transpose)(const int16_t *square, int16_t *turned, struct ahead *next) {
    struct ahead ahead = *next;
    const __m256i swap_words =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    enum { CELLS = 4, VECTORS = TILE_PAIRS / CELLS }; /* cells of 64 bits in a vector, vectors in a line of the tile */
    for (int line = 0; line < VECTORS; line++) {
        for (int column = 0; column < VECTORS; column++) {
            fetch_ahead(&ahead, CELLS * 16);
            __m256i a[CELLS];
            for (int i = 0; i < CELLS; i++) {
                __m256i cells = _mm256_loadu_si256((const __m256i *)square + (line * CELLS + i) * VECTORS + column);
                a[i] = _mm256_shuffle_epi8(cells, swap_words);
            }
            __m256i *out = (__m256i *)turned + column * CELLS * VECTORS + line;
            for (int odd = 0; odd < 2; odd++) {
                __m256i upper = odd ? _mm256_unpackhi_epi64(a[0], a[1]) : _mm256_unpacklo_epi64(a[0], a[1]);
                __m256i lower = odd ? _mm256_unpackhi_epi64(a[2], a[3]) : _mm256_unpacklo_epi64(a[2], a[3]);
                _mm256_store_si256(out + (0 + odd) * VECTORS, _mm256_permute2x128_si256(upper, lower, 0x20));
                _mm256_store_si256(out + (2 + odd) * VECTORS, _mm256_permute2x128_si256(upper, lower, 0x31));
            }
        }
    }
    *next = ahead;
}

#undef DOT
#undef NAMED
#undef TARGET
