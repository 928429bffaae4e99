/* One call for the product of a few rows, from the bytes of a request's payload to those of the answer's. */
#ifndef SYMBIOSIS_FEW_H
#define SYMBIOSIS_FEW_H

#include "narrow.h"
#include "product.h"

/* isa (not AMX) to inputs: as for ring_product. payload and answer: matrices of `count` rows as wire.py encodes them,
 * little-endian, at any address. space: int32 [count * (padded width + width + columns)], overwritten. */
EXPORT void ring_answer(int32_t isa, int32_t ring_bits, int32_t backward, const void *panels, int32_t weight_bits,
                        int64_t outputs, int64_t inputs, int64_t count, int32_t *space, const uint8_t *payload,
                        uint8_t *answer) {
    int64_t width = backward ? outputs : inputs, columns = backward ? inputs : outputs;
    int32_t *rows = space + count * tiles_of(width) * PANEL, *out = rows + count * width;
    if (ring_bits == 32) memcpy(rows, payload, (size_t)(count * width) * sizeof *rows);
    else ring_unpack24(isa, payload, count * width, rows);
    ring_split(isa, ring_bits, weight_bits, rows, count, width, space);
    ring_product(isa, ring_bits, backward, panels, weight_bits, outputs, inputs, space, count, out, 0, tiles_of(columns));
    if (ring_bits == 32) memcpy(answer, out, (size_t)(count * columns) * sizeof *out);
    else ring_pack24(isa, out, count * columns, answer);
}

#endif
