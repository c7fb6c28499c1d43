/* bfloat16, which is the upper half of a float32. */

#include <stdint.h>

/* n numbers as float32. */
static inline void widen(const uint16_t *restrict from, int64_t n, float *restrict numbers) {
    uint32_t *restrict to = (uint32_t *)numbers;
    for (int64_t i = 0; i < n; i++) to[i] = (uint32_t)from[i] << 16;
}
