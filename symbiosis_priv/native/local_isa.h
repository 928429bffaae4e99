/* The loops of local.h; included once per instruction set, with NAMED, TARGET, WIDTH (floats of a register) and VECTORS
 * (registers for each of SHARE rows' sums) defined. The end of this file undefines them. */

typedef float NAMED(floats) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t NAMED(ints) __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint32_t NAMED(words) __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint16_t NAMED(shorts) __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
#define FLOATS NAMED(floats)
#define INTS NAMED(ints)
#define AT(address) (*(FLOATS *)(address))

INLINE TARGET FLOATS NAMED(load)(const void *from, int64_t i, const int format) {
    if (format == FORMAT_F32) return *(const FLOATS *)((const float *)from + i);
    return (FLOATS)(__builtin_convertvector(*(const NAMED(shorts) *)((const uint16_t *)from + i), NAMED(words)) << 16);
}

INLINE TARGET float NAMED(load_one)(const void *from, int64_t i, const int format) {
    return format == FORMAT_F32 ? ((const float *)from)[i] : from_bf16(((const uint16_t *)from)[i]);
}

INLINE TARGET FLOATS NAMED(choose)(INTS condition, FLOATS yes, FLOATS no) {
    return (FLOATS)((condition & (INTS)yes) | (~condition & (INTS)no));
}

INLINE TARGET float NAMED(sum)(const float *parts) {
    const fours *p = (const fours *)parts, sum = (p[0] + p[2]) + (p[1] + p[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* e^x for x <= 0, within 2 ulp: 2^n e^f, with |f| <= ln 2 / 2 and a polynomial for e^f (Cephes' expf). 0 for x < -87. */
INLINE TARGET FLOATS NAMED(exp)(FLOATS x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    FLOATS n = (x * 1.44269504f + magic) - magic;
    FLOATS f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    FLOATS p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = (p * (f * f) + f) + 1.0f;
    FLOATS shifted = n + (magic + 127.0f); /* its low bits are n + 127 */
    return NAMED(choose)(x < -87.0f, (FLOATS){0}, p * (FLOATS)((INTS)shifted << 23));
}

/* Cephes' tanhf: an odd polynomial near 0, where 1 - e^-2x would cancel. */
INLINE TARGET FLOATS NAMED(tanh)(FLOATS x) {
    FLOATS size = NAMED(choose)(x < 0.0f, -x, x), square = x * x;
    FLOATS t = NAMED(exp)(-2.0f * size), far = (1.0f - t) / (1.0f + t);
    FLOATS p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    return NAMED(choose)(size < 0.625f, (p * square) * x + x, NAMED(choose)(x < 0.0f, -far, far));
}

/* ---- linear ---- */

INLINE TARGET void NAMED(linear_tile)(const float *rows, const int count, int64_t inputs, const void *weight,
                                      const int columns, const int format, float *out, int64_t outputs) {
    enum { PARTS = LANES / WIDTH };
    /* The next columns' weights are fetched while these are multiplied. An address and no pointer: it may lie beyond the
     * end. */
    const int64_t size = format == FORMAT_F32 ? 4 : 2;
    const uintptr_t next = (uintptr_t)weight + (uintptr_t)(COLUMNS * inputs * size);
    FLOATS sums[SHARE][COLUMNS][PARTS];
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int c = 0; c < columns; c++)
            UNROLL for (int p = 0; p < PARTS; p++) sums[r][c][p] = (FLOATS){0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES)
        UNROLL for (int p = 0; p < PARTS; p++)
            UNROLL for (int c = 0; c < columns; c++) {
                if (p == 0) __builtin_prefetch((const void *)(next + (uintptr_t)((c * inputs + k) * size)));
                FLOATS w = NAMED(load)(weight, c * inputs + k + p * WIDTH, format);
                UNROLL for (int r = 0; r < count; r++)
                    sums[r][c][p] += AT(rows + r * inputs + k + p * WIDTH) * w;
            }
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int c = 0; c < columns; c++) {
            float parts[LANES];
            UNROLL for (int p = 0; p < PARTS; p++) AT(parts + p * WIDTH) = sums[r][c][p];
            float total = NAMED(sum)(parts);
            for (int64_t i = k; i < inputs; i++)
                total += rows[r * inputs + i] * NAMED(load_one)(weight, c * inputs + i, format);
            out[r * outputs + c] = total;
        }
}

INLINE TARGET void NAMED(linear)(const float *rows, int64_t count, int64_t inputs, const void *weight, const int format,
                                 float *out, int64_t outputs, int64_t begin, int64_t end) {
    enum { TILE = VECTORS * WIDTH < LANES ? 1 : VECTORS * WIDTH / LANES };
    const int64_t size = format == FORMAT_F32 ? 4 : 2;
    for (int64_t o = begin, step; o < end; o += step) {
        const char *w = (const char *)weight + size * o * inputs;
        step = end - o < COLUMNS ? 1 : COLUMNS;
        for (int64_t r = 0; r < count;) {
            const float *x = rows + r * inputs;
            float *to = out + r * outputs + o;
            if (step == 1) {
                NAMED(linear_tile)(x, 1, inputs, w, 1, format, to, outputs);
                r++;
            } else if (count - r < SHARE) {
                NAMED(linear_tile)(x, 1, inputs, w, COLUMNS, format, to, outputs);
                r++;
            } else {
                for (int c = 0; c < COLUMNS; c += TILE)
                    NAMED(linear_tile)(x, SHARE, inputs, w + size * c * inputs, TILE, format, to + c, outputs);
                r += SHARE;
            }
        }
    }
}

static TARGET void NAMED(linear_f32)(const float *rows, int64_t count, int64_t inputs, const void *weight, float *out,
                                     int64_t outputs, int64_t begin, int64_t end) {
    NAMED(linear)(rows, count, inputs, weight, FORMAT_F32, out, outputs, begin, end);
}

static TARGET void NAMED(linear_bf16)(const float *rows, int64_t count, int64_t inputs, const void *weight, float *out,
                                      int64_t outputs, int64_t begin, int64_t end) {
    NAMED(linear)(rows, count, inputs, weight, FORMAT_BF16, out, outputs, begin, end);
}

/* ---- attention: a running softmax over blocks (arXiv 1805.02867) ---- */

/* scores = queries @ keys, for the keys begin..end of a block. */
INLINE TARGET void NAMED(scores)(const struct queries *q, const char *keys, int64_t width, const int format, int begin,
                                 int end, float (*scores)[KV_BLOCK]) {
    for (int start = begin; start < end; start += VECTORS * WIDTH) {
        FLOATS sums[SHARE][VECTORS];
        UNROLL for (int r = 0; r < SHARE; r++) UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = (FLOATS){0};
        for (int64_t w = 0; w < width; w++)
            UNROLL for (int j = 0; j < VECTORS; j++) {
                FLOATS key = NAMED(load)(keys, w * KV_BLOCK + start + j * WIDTH, format);
                UNROLL for (int r = 0; r < SHARE; r++) sums[r][j] += q->query[r][w] * key;
            }
        UNROLL for (int r = 0; r < SHARE; r++)
            UNROLL for (int j = 0; j < VECTORS; j++) AT(scores[r] + start + j * WIDTH) = sums[r][j];
    }
}

/* out = out * shrink + weights @ values, for `vectors` registers of columns. */
INLINE TARGET void NAMED(weigh)(const struct queries *q, float (*weights)[KV_BLOCK], const float *shrink,
                                const char *values, int64_t width, int64_t column, const int vectors, const int format,
                                int begin, int end) {
    FLOATS sums[SHARE][VECTORS];
    UNROLL for (int r = 0; r < SHARE; r++)
        UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = AT(q->out[r] + column + j * WIDTH) * shrink[r];
    for (int k = begin; k < end; k++)
        UNROLL for (int j = 0; j < vectors; j++) {
            FLOATS value = NAMED(load)(values, k * width + column + j * WIDTH, format);
            UNROLL for (int r = 0; r < SHARE; r++) sums[r][j] += weights[r][k] * value;
        }
    UNROLL for (int r = 0; r < SHARE; r++)
        UNROLL for (int j = 0; j < vectors; j++) AT(q->out[r] + column + j * WIDTH) = sums[r][j];
}

/* Turn the scores of a row's keys low..high (of begin..end) into weights; returns the factor of what came before. */
static TARGET float NAMED(softmax)(const struct attention *a, float *scores, int begin, int end, int low, int high,
                                   float *highest, float *total) {
    const float scaling = (float)a->scaling, cap = (float)a->softcap;
    for (int i = begin; i < end; i += WIDTH) {
        FLOATS s = AT(scores + i) * scaling;
        if (cap != 0) s = NAMED(tanh)(s / cap) * cap;
        AT(scores + i) = s;
    }
    for (int i = begin; i < low; i++) scores[i] = -INFINITY;
    for (int i = high; i < end; i++) scores[i] = -INFINITY;
    FLOATS most = (FLOATS){0} + *highest;
    for (int i = begin; i < end; i += WIDTH) {
        FLOATS s = AT(scores + i);
        most = NAMED(choose)(s > most, s, most);
    }
    float top = *highest, sums[LANES] = {0};
    for (int i = 0; i < WIDTH; i++) top = most[i] > top ? most[i] : top;
    for (int i = begin; i < end; i += WIDTH) {
        FLOATS weight = NAMED(exp)(AT(scores + i) - top);
        AT(scores + i) = weight;
        AT(sums + i % LANES) += weight;
    }
    float shrink = NAMED(exp)((FLOATS){0} + (*highest - top))[0];
    *highest = top;
    *total = *total * shrink + NAMED(sum)(sums);
    return shrink;
}

INLINE TARGET void NAMED(add_block)(const struct attention *a, struct queries *q, const char *keys, const char *values,
                                    int64_t start, const int format) {
    enum { STEP = VECTORS * WIDTH };
    float scores[SHARE][KV_BLOCK], shrink[SHARE];
    int low[SHARE], high[SHARE], begin = KV_BLOCK, end = 0;
    for (int r = 0; r < SHARE; r++) {
        int64_t last = q->position[r] - start, first = a->window ? last - a->window + 1 : 0;
        high[r] = last < 0 ? 0 : last + 1 < KV_BLOCK ? (int)last + 1 : KV_BLOCK;
        low[r] = first < 0 ? 0 : first < high[r] ? (int)first : high[r];
        begin = low[r] < begin ? low[r] : begin;
        end = high[r] > end ? high[r] : end;
    }
    begin -= begin % STEP;
    end += (STEP - end % STEP) % STEP;
    if (begin >= end) return;
    NAMED(scores)(q, keys, a->key_width, format, begin, end, scores);
    for (int r = 0; r < SHARE; r++)
        shrink[r] = NAMED(softmax)(a, scores[r], begin, end, low[r], high[r], &q->highest[r], &q->total[r]);
    int64_t width = a->value_width, column = 0;
    for (; column + STEP <= width; column += STEP)
        NAMED(weigh)(q, scores, shrink, values, width, column, VECTORS, format, begin, end);
    for (; column + WIDTH <= width; column += WIDTH)
        NAMED(weigh)(q, scores, shrink, values, width, column, 1, format, begin, end);
    for (; column < width; column++)
        for (int r = 0; r < SHARE; r++) {
            float sum = q->out[r][column] * shrink[r];
            for (int k = begin; k < end; k++) sum += scores[r][k] * NAMED(load_one)(values, k * width + column, format);
            q->out[r][column] = sum;
        }
}

INLINE TARGET void NAMED(attend)(const struct attention *a, const struct sequence *s, int64_t head, const float *queries,
                                 float *out, const int format) {
    const int64_t group = a->heads / a->heads_kv, rows = s->tokens * group, size = format == FORMAT_F32 ? 4 : 2;
    const int64_t entries = (a->layer * a->heads_kv + head) * KV_BLOCK * size, width = a->value_width;
    float nowhere[MOST_WIDTH];
    struct queries tiles[QUERIES / SHARE];
    for (int64_t done = 0; done < rows; done += QUERIES) {
        int64_t left = least(rows - done, QUERIES), count = (left + SHARE - 1) / SHARE;
        for (int64_t i = 0; i < count * SHARE; i++) {
            struct queries *q = tiles + i / SHARE;
            int64_t number = done + least(i, left - 1), r = i % SHARE; /* the last row again, to fill up a tile */
            int64_t h = head * group + number % group, row = (s->row + number / group) * a->heads + h;
            q->query[r] = queries + row * a->key_width;
            q->out[r] = i < left ? out + row * width : nowhere;
            q->position[r] = s->first + number / group;
            q->highest[r] = a->sinks ? a->sinks[h] : -1e30f; /* finite, so that the difference of two is 0 */
            q->total[r] = a->sinks ? 1.0f : 0.0f;
            memset(q->out[r], 0, sizeof(float) * (size_t)width);
        }
        int64_t from = s->first + done / group, to = s->first + (done + left - 1) / group;
        for (int64_t b = a->window && from >= a->window ? (from - a->window + 1) / KV_BLOCK : 0; b <= to / KV_BLOCK; b++)
            for (int64_t i = 0; i < count; i++)
                NAMED(add_block)(a, tiles + i, (const char *)s->blocks[2 * b] + entries * a->key_width,
                                 (const char *)s->blocks[2 * b + 1] + entries * width, b * KV_BLOCK, format);
        for (int64_t i = 0; i < left; i++)
            for (int64_t c = 0; c < width; c++) tiles[i / SHARE].out[i % SHARE][c] /= tiles[i / SHARE].total[i % SHARE];
    }
}

static TARGET void NAMED(attend_f32)(const struct attention *a, const struct sequence *s, int64_t head,
                                     const float *queries, float *out) {
    NAMED(attend)(a, s, head, queries, out, FORMAT_F32);
}

static TARGET void NAMED(attend_bf16)(const struct attention *a, const struct sequence *s, int64_t head,
                                      const float *queries, float *out) {
    NAMED(attend)(a, s, head, queries, out, FORMAT_BF16);
}

#undef FLOATS
#undef INTS
#undef AT
#undef NAMED
#undef TARGET
#undef WIDTH
#undef VECTORS
