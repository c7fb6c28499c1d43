/* What a pass over few tokens does to each row of numbers: norms and rotations, in float32, rounded once.
 *
 * In one thread: waking another takes longer than all there is to do.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bfloat16.h"

enum { MOST_DIM = 16384 };

/* n numbers as float32: where they lie, or a copy of narrow ones. */
static const float *as_floats(const void *data, int64_t start, int narrow, int64_t n, float *room) {
    if (!narrow) return (const float *)data + start;
    widen((const uint16_t *)data + start, n, room);
    return room;
}

/* Round n numbers to the nearest that bfloat16 has, ties to even. */
static void round_to_narrow(const float *restrict from, uint16_t *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

static void *place(void *data, int64_t start, int narrow) {
    return narrow ? (void *)((uint16_t *)data + start) : (void *)((float *)data + start);
}

/* out = x / rms(x) * weight for each of `rows` rows of `dim`. */
void kvpath_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t dim, double eps,
                 int narrow) {
    float x_room[MOST_DIM], gain_room[MOST_DIM], result[MOST_DIM];
    const float *gain = as_floats(weight, 0, narrow, dim, gain_room);
    for (int64_t row = 0; row < rows; row++) {
        const float *values = as_floats(x, row * dim, narrow, dim, x_room);
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t d = 0; d < dim; d++) squares += values[d] * values[d];
        float scale = 1.0f / sqrtf(squares / dim + (float)eps);
        float *to = narrow ? result : place(out, row * dim, 0);
        for (int64_t d = 0; d < dim; d++) to[d] = values[d] * scale * gain[d];
        if (narrow) round_to_narrow(result, place(out, row * dim, 1), dim);
    }
}

/* Pairs (i, i + dim / 2) of x (B, T, H, dim) turned by their token's angles, into a dense out. Steps are in numbers. */
void kvpath_rotate(const void *x, int64_t x_row, int64_t x_token, int64_t x_head, const float *cos, int64_t cos_row,
                   int64_t cos_token, const float *sin, int64_t sin_row, int64_t sin_token, void *out, int64_t rows,
                   int64_t tokens, int64_t heads, int64_t dim, int narrow) {
    float room[MOST_DIM], result[MOST_DIM];
    const int64_t half = dim / 2;
    for (int64_t b = 0; b < rows; b++)
        for (int64_t t = 0; t < tokens; t++) {
            const float *c = cos + b * cos_row + t * cos_token, *s = sin + b * sin_row + t * sin_token;
            for (int64_t h = 0; h < heads; h++) {
                const int64_t to = ((b * tokens + t) * heads + h) * dim;
                const float *first = as_floats(x, b * x_row + t * x_token + h * x_head, narrow, dim, room);
                const float *second = first + half;
                float *turned = narrow ? result : place(out, to, 0);
                for (int64_t d = 0; d < half; d++) {
                    turned[d] = first[d] * c[d] - second[d] * s[d];
                    turned[half + d] = second[d] * c[d] + first[d] * s[d];
                }
                if (narrow) round_to_narrow(result, place(out, to, 1), dim);
            }
        }
}
