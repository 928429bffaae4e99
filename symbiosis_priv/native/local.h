/* Functions of float rows that the tenant computes itself: a linear, and attention with keys and values in blocks.
 *
 * The bits of a row of the result do not depend on the other rows: each of its sums has one order, whatever the number
 * of rows. Rows share loads only: SHARE rows use the same weights, keys or values while these are in registers. A sum
 * along a row is kept in LANES parts, and products are rounded before they are added (nothing is contracted), so all
 * instruction sets give the same bits. Weights, keys and values are float32 or bfloat16, everything else is float32. */
#ifndef SYMBIOSIS_LOCAL_H
#define SYMBIOSIS_LOCAL_H

#include "common.h"
#include "passes.h" /* enum format */

enum { LANES = 16, SHARE = 4, COLUMNS = 4, KV_BLOCK = 256, QUERIES = 96, MOST_WIDTH = 1024 };

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi" /* all functions that take vectors are inlined, so no ABI is involved */

typedef float fours __attribute__((vector_size(16), aligned(4), may_alias));

/* The tokens of one sequence in a step. Block b holds keys [layer][head][key_width][KV_BLOCK] at blocks[2 b] and values
 * [layer][head][KV_BLOCK][value_width] at blocks[2 b + 1]. Mirrored by `attention.Attention`. */
struct sequence {
    int64_t row, tokens, first; /* the first row and its position */
    const int64_t *blocks;
};

/* What all sequences share. `window` is 0 for none, `softcap` is 0 for none, `sinks` may be NULL. */
struct attention {
    int64_t layer, heads, heads_kv, key_width, value_width, format, window;
    double scaling, softcap;
    const float *sinks;
};

/* SHARE queries of one head of keys, and the state of their softmax. */
struct queries {
    const float *query[SHARE];
    float *out[SHARE];
    int64_t position[SHARE];
    float highest[SHARE], total[SHARE];
};

#define NAMED(name) local_##name##_portable
#define TARGET
#define WIDTH 4
#define VECTORS 2
#include "local_isa.h"

#if HAVE_X86
#define NAMED(name) local_##name##_avx2
#define TARGET TARGET_AVX2
#define WIDTH 8
#define VECTORS 2
#include "local_isa.h"

#define NAMED(name) local_##name##_avx512
#define TARGET TARGET_AVX512
#define WIDTH 16
#define VECTORS 4
#include "local_isa.h"
#define LOCAL(isa, name, ...)                                        \
    ((isa) >= ISA_AVX512 ? local_##name##_avx512(__VA_ARGS__)        \
     : (isa) >= ISA_AVX2 ? local_##name##_avx2(__VA_ARGS__)          \
                         : local_##name##_portable(__VA_ARGS__))
#else
#define LOCAL(isa, name, ...) local_##name##_portable(__VA_ARGS__)
#endif

/* Columns begin..end of rows [count][inputs] @ weight [outputs][inputs]^T, to out [count][outputs]. */
EXPORT void local_linear(int32_t isa, const float *rows, int64_t count, int64_t inputs, const void *weight, int32_t format,
                         float *out, int64_t outputs, int64_t begin, int64_t end) {
    if (format == FORMAT_BF16) LOCAL(isa, linear_bf16, rows, count, inputs, weight, out, outputs, begin, end);
    else LOCAL(isa, linear_f32, rows, count, inputs, weight, out, outputs, begin, end);
}

/* Attention of queries [rows][heads][key_width] to out [rows][heads][value_width], for the pairs begin..end of a
 * sequence and a head of keys (sequence * heads_kv + head). `local_append` has stored their keys and values. */
EXPORT void local_attend(int32_t isa, const struct attention *a, const struct sequence *sequences, const float *queries,
                         float *out, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        const struct sequence *s = sequences + i / a->heads_kv;
        if (a->format == FORMAT_BF16) LOCAL(isa, attend_bf16, a, s, i % a->heads_kv, queries, out);
        else LOCAL(isa, attend_f32, a, s, i % a->heads_kv, queries, out);
    }
}

/* Copy the keys and values of a step's rows, [rows][heads_kv][width] in the blocks' format, into the blocks. */
EXPORT void local_append(const struct attention *a, const struct sequence *sequences, int64_t count, const void *keys,
                         const void *values) {
    int64_t kw = a->key_width, vw = a->value_width, heads = a->heads_kv;
    int64_t size = a->format == FORMAT_BF16 ? 2 : 4;
    for (int64_t i = 0; i < count; i++)
        for (int64_t t = 0; t < sequences[i].tokens; t++) {
            int64_t row = sequences[i].row + t, position = sequences[i].first + t, place = position % KV_BLOCK;
            const int64_t *block = sequences[i].blocks + 2 * (position / KV_BLOCK);
            for (int64_t h = 0; h < heads; h++) {
                int64_t head = a->layer * heads + h;
                char *to = (char *)block[0] + size * (head * kw * KV_BLOCK + place);
                const char *from = (const char *)keys + size * (row * heads + h) * kw;
                if (size == 2) for (int64_t w = 0; w < kw; w++) ((uint16_t *)to)[w * KV_BLOCK] = ((const uint16_t *)from)[w];
                else for (int64_t w = 0; w < kw; w++) ((uint32_t *)to)[w * KV_BLOCK] = ((const uint32_t *)from)[w];
                memcpy((char *)block[1] + size * (head * KV_BLOCK + place) * vw,
                       (const char *)values + size * (row * heads + h) * vw, (size_t)(size * vw));
            }
        }
}

#pragma GCC diagnostic pop
#endif
