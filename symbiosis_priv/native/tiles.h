/* The tile instructions of AMX. With RING_EMULATE_TILES they are plain C instead, with the semantics of Intel's manual and a
 * trap where the processor would raise an exception, so that tests find faults on processors without AMX.
 *
 * The instructions are written here and not taken from the compiler's intrinsics: those of gcc 12 declare that `ldtilecfg`
 * reads 8 of its 64 bytes and that loads read no memory, and the optimiser removes or delays the stores before them. */
#ifndef SYMBIOSIS_TILES_H
#define SYMBIOSIS_TILES_H

#include "common.h"

enum { TILES = 8, TILE_ROWS = 16, TILE_WIDTH = 64, TILE_BYTES = TILE_ROWS * TILE_WIDTH };

/* The operand of `ldtilecfg`, with palette 1: 8 tiles of up to 16 rows of 64 bytes. Unused entries are zero. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#ifndef RING_EMULATE_TILES

/* The configuration belongs to the thread. Until TILES_RELEASE, every context switch saves the tiles. */
#define TILES_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(config)) : "memory")
#define TILES_RELEASE() __asm__ volatile("tilerelease" : : : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile :)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
/* sums += rows (unsigned bytes) * weights (signed bytes, four terms of a column side by side) */
#define TILE_DOT(sums, rows, weights) __asm__ volatile("tdpbusd %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sums :)

#else

static _Thread_local struct {
    struct tile_config config;
    uint8_t tiles[TILES][TILE_ROWS][TILE_WIDTH];
} emulated;

static void emulate_require(int holds) {
    if (!holds) __builtin_trap();
}
/* Rows of a tile that is used. */
static int emulate_rows(int tile) {
    emulate_require(emulated.config.palette == 1 && emulated.config.rows[tile] > 0);
    return emulated.config.rows[tile];
}
static void emulate_release(void) { memset(&emulated, 0, sizeof emulated); }
static void emulate_configure(const struct tile_config *config) {
    emulate_release();
    emulate_require(config->palette == 1 && config->start_row == 0);
    for (int i = 0; i < 14; i++) emulate_require(config->reserved[i] == 0);
    for (int i = 0; i < 16; i++) {
        emulate_require(config->rows[i] <= (i < TILES ? TILE_ROWS : 0) && config->row_bytes[i] <= TILE_WIDTH);
        emulate_require((config->rows[i] == 0) == (config->row_bytes[i] == 0));
    }
    emulated.config = *config;
}
static void emulate_zero(int tile) {
    (void)emulate_rows(tile);
    memset(emulated.tiles[tile], 0, TILE_BYTES);
}
static void emulate_load(int tile, const void *from, int64_t stride) {
    int rows = emulate_rows(tile);
    emulate_zero(tile); /* what lies beyond the configured rows and bytes is zero afterwards */
    for (int r = 0; r < rows; r++)
        memcpy(emulated.tiles[tile][r], (const char *)from + r * stride, emulated.config.row_bytes[tile]);
}
static void emulate_store(int tile, void *to, int64_t stride) {
    for (int r = 0, rows = emulate_rows(tile); r < rows; r++)
        memcpy((char *)to + r * stride, emulated.tiles[tile][r], emulated.config.row_bytes[tile]);
}
static void emulate_dot(int sums, int rows, int weights) {
    const uint16_t *bytes = emulated.config.row_bytes;
    int height = emulate_rows(sums), words = bytes[rows] / 4, columns = bytes[sums] / 4;
    emulate_require(sums != rows && sums != weights && rows != weights);
    emulate_require(emulate_rows(rows) == height && emulate_rows(weights) == words && bytes[weights] == bytes[sums]);
    emulate_require(bytes[sums] % 4 == 0 && bytes[rows] % 4 == 0);
    uint32_t result[TILE_ROWS][TILE_WIDTH / 4] = {0};
    for (int r = 0; r < height; r++)
        for (int c = 0; c < columns; c++) {
            memcpy(&result[r][c], &emulated.tiles[sums][r][4 * c], 4);
            for (int k = 0; k < 4 * words; k++)
                result[r][c] += (uint32_t)(emulated.tiles[rows][r][k] * (int8_t)emulated.tiles[weights][k / 4][4 * c + k % 4]);
        }
    memcpy(emulated.tiles[sums], result, TILE_BYTES);
}

#define TILES_CONFIGURE(config) emulate_configure(config)
#define TILES_RELEASE() emulate_release()
#define TILE_ZERO(tile) emulate_zero(tile)
#define TILE_LOAD(tile, from, stride) emulate_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulate_store(tile, to, stride)
#define TILE_DOT(sums, rows, weights) emulate_dot(sums, rows, weights)

#endif
#endif
