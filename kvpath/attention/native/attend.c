/* softmax(Q K^T) V on a CPU for a few queries of each row, over keys and values in parts over features.
 *
 * Entries are read once, where they lie, and widened to float32 in a core's cache. The keys of a row and head are cut
 * into ranges, each with a running softmax of its own; the ranges depend on the number of keys alone, so results do not
 * depend on the number of threads.
 *
 * Letters: B rows, T tokens, H query heads, G key/value heads, R = T H / G queries that share one of these heads, S keys,
 * D and V features of keys and values, all parts together.
 */

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bfloat16.h"

#ifdef __AVX512F__
#define LANES 16
#define EACH(F, w) EACH_OF_8(F, 0, w), EACH_OF_8(F, 8, w)
#else
#define LANES 8
#define EACH(F, w) EACH_OF_8(F, 0, w)
#endif
#define EACH_OF_8(F, j, w) F(j, w), F(j + 1, w), F(j + 2, w), F(j + 3, w), F(j + 4, w), F(j + 5, w), F(j + 6, w), F(j + 7, w)

enum { BLOCK = 64, LINE = 64, FEWEST_KEYS = 256, MOST_RANGES = 16, MOST_PARTS = 16 };

typedef struct {
    const void *data;
    int64_t row, token, head; /* strides in elements; features lie side by side */
    int32_t heads, dim;       /* a part with fewer heads than G is shared by the others' heads */
} Part;

typedef struct {
    int32_t batch, groups, tokens, heads, key_parts, value_parts, narrow, q_narrow, threads;
    float scale;             /* of scores */
    int64_t keys;
    const Part *k, *v;
    const void *q;           /* (B, T, H, D) */
    int64_t q_row, q_token, q_head;
    const uint8_t *mask;     /* (B or 1, T, S), 0 where a query sees nothing; NULL if all see all */
    int64_t mask_row;        /* bytes from one row's mask to the next, 0 if all rows share one */
    float *out;              /* (B, T, H, V) */
} Problem;

/* Queries that share a head. */
static int64_t sharing(const Problem *p) { return (int64_t)p->tokens * p->heads / p->groups; }

/* Where query r of a row and group stands: its token and its head. */
static void stands(const Problem *p, int64_t group, int64_t r, int64_t *token, int64_t *head) {
    int64_t each = p->heads / p->groups;
    *token = r / each, *head = group * each + r % each;
}

static int64_t width(const Part *parts, int count) {
    int64_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].dim;
    return total;
}

static int is_same(const Part *a, const Part *b) {
    return a->data == b->data && a->row == b->row && a->token == b->token && a->head == b->head &&
           a->heads == b->heads && a->dim == b->dim;
}

/* exp(x) for x <= 0, to a few units in the last place: 2^n by the exponent's bits, the rest by its series. */
static inline float exp_of_negative(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    float n = rintf(bounded * 1.44269504f);
    float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : series * power;
}

/* Ask memory for what is wanted a block later. What lies past the end does no harm. */
static inline void fetch(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const char *)from + at);
}

/* One head's entries of n tokens as float32, the next token `step` floats on: a copy if they are narrow. */
static const float *widened(const Part *part, int narrow, int64_t row, int64_t group, int64_t groups, int64_t first,
                            int n, float *room, int64_t *step) {
    int64_t start = row * part->row + first * part->token + group / (groups / part->heads) * part->head;
    const int dim = part->dim;
    if (!narrow) {
        const float *entries = (const float *)part->data + start;
        for (int s = 0; s < n; s++) fetch(entries + (s + BLOCK) * part->token, dim * sizeof *entries);
        *step = part->token;
        return entries;
    }
    for (int s = 0; s < n; s++) { /* between which there is time to fetch */
        const uint16_t *restrict from = (const uint16_t *)part->data + start + s * part->token;
        fetch(from + BLOCK * part->token, dim * sizeof *from);
        widen(from, dim, room + (int64_t)s * dim);
    }
    *step = dim;
    return room;
}

/* Several floats that are worked on at once. */
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

static inline Lanes load(const float *from) {
    Lanes lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

static inline void store(Lanes lanes, float *to) { memcpy(to, &lanes, sizeof lanes); }

/* Neighbours, `w` lanes each, of x and y in turn: added, the sums of x's and of y's stand side by side. */
#define LOW(j, w) ((j) / (2 * (w)) * 2 * (w) + (j) % (w) + ((j) % (2 * (w)) < (w) ? 0 : LANES))
#define HIGH(j, w) (LOW(j, w) + (w))
#define ADDED(x, y, w) (__builtin_shufflevector(x, y, EACH(LOW, w)) + __builtin_shufflevector(x, y, EACH(HIGH, w)))

/* The sum of each vector's lanes, in their order. */
static inline Lanes sums_of(Lanes *a) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; i++) a[i] = ADDED(a[2 * i], a[2 * i + 1], 1);
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 4; i++) a[i] = ADDED(a[2 * i], a[2 * i + 1], 2);
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 8; i++) a[i] = ADDED(a[2 * i], a[2 * i + 1], 4);
#if LANES == 16
    a[0] = ADDED(a[0], a[1], 8);
#endif
    return a[0];
}

/* scores[s] += q . k_s */
static void add_products(const float *q, const float *k, int64_t step, int n, int dim, float *scores) {
    int s = 0;
    const int whole = dim - dim % LANES;
    for (; s + LANES <= n; s += LANES) {
        Lanes a[LANES] = {0};
        for (int d = 0; d < whole; d += LANES) {
            const Lanes part = load(q + d);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) a[i] += part * load(k + (s + i) * step + d);
        }
        store(load(scores + s) + sums_of(a), scores + s);
        for (int d = whole; d < dim; d++)
            for (int i = 0; i < LANES; i++) scores[s + i] += q[d] * k[(s + i) * step + d];
    }
    for (; s < n; s++) {
        float a = 0;
#pragma omp simd reduction(+ : a)
        for (int d = 0; d < dim; d++) a += q[d] * k[s * step + d];
        scores[s] += a;
    }
}

/* sums[d] += sum_s shares[s] v_s[d] */
static void add_weighted(const float *shares, const float *v, int64_t step, int n, int dim, float *restrict sums) {
    int d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) { /* four sums at once: each addition waits for the one before */
        Lanes a0 = load(sums + d), a1 = load(sums + d + LANES), b0 = {0}, b1 = {0};
        const float *at = v + d;
        int s = 0;
        for (; s + 2 <= n; s += 2, at += 2 * step) {
            a0 += shares[s] * load(at), a1 += shares[s] * load(at + LANES);
            b0 += shares[s + 1] * load(at + step), b1 += shares[s + 1] * load(at + step + LANES);
        }
        if (s < n) a0 += shares[s] * load(at), a1 += shares[s] * load(at + LANES);
        store(a0 + b0, sums + d), store(a1 + b1, sums + d + LANES);
    }
    for (int s = 0; s < n; s++)
        for (int rest = d; rest < dim; rest++) sums[rest] += shares[s] * v[s * step + rest];
}

/* Scores of a block become shares of its running softmax; gives what earlier sums fade by. */
static float to_shares(float *scores, const uint8_t *seen, int n, float *peak, float *total) {
    float top = *peak, sum = 0;
    if (seen)
        for (int s = 0; s < n; s++) scores[s] = seen[s] ? scores[s] : -INFINITY;
#pragma omp simd reduction(max : top)
    for (int s = 0; s < n; s++) top = scores[s] > top ? scores[s] : top;
    if (top == -INFINITY) {
        memset(scores, 0, n * sizeof *scores);
        return 1;
    }
#pragma omp simd reduction(+ : sum)
    for (int s = 0; s < n; s++) {
        scores[s] = exp_of_negative(scores[s] - top);
        sum += scores[s];
    }
    float fade = *peak == -INFINITY ? 0.0f : exp_of_negative(*peak - top);
    *total = *total * fade + sum;
    *peak = top;
    return fade;
}

/* All queries as (B, G, R, D) in float32, scaled. */
static void take_queries(const Problem *p, float *to) {
    int64_t D = width(p->k, p->key_parts), R = sharing(p), token, head;
    for (int64_t row = 0; row < p->batch; row++)
        for (int64_t group = 0; group < p->groups; group++)
            for (int64_t r = 0; r < R; r++, to += D) {
                stands(p, group, r, &token, &head);
                int64_t start = row * p->q_row + token * p->q_token + head * p->q_head;
                if (p->q_narrow)
                    widen((const uint16_t *)p->q + start, D, to);
                else
                    memcpy(to, (const float *)p->q + start, D * sizeof *to);
                for (int64_t d = 0; d < D; d++) to[d] *= p->scale;
            }
}

/* One range of keys of one row and head: sums (R, V), and peak and total of each query's softmax. */
static void attend_range(const Problem *p, const float *queries, int64_t row, int64_t group, int64_t first,
                         int64_t last, float *room, float *sums, float *peaks, float *totals) {
    int64_t D = width(p->k, p->key_parts), V = width(p->v, p->value_parts), R = sharing(p), token, head;
    const float *q = queries + (row * p->groups + group) * R * D;
    const float *k[MOST_PARTS], *v[MOST_PARTS];
    int64_t k_step[MOST_PARTS], v_step[MOST_PARTS];
    float scores[BLOCK];
    memset(sums, 0, R * V * sizeof *sums);
    for (int64_t r = 0; r < R; r++) peaks[r] = -INFINITY, totals[r] = 0;
    for (int64_t at = first; at < last; at += BLOCK) {
        int n = last - at < BLOCK ? (int)(last - at) : BLOCK;
        float *free_room = room;
        for (int i = 0; i < p->key_parts; i++) {
            k[i] = widened(&p->k[i], p->narrow, row, group, p->groups, at, n, free_room, &k_step[i]);
            free_room += BLOCK * p->k[i].dim;
        }
        for (int j = 0; j < p->value_parts; j++) {
            int same = 0; /* a latent serves as key and as value */
            while (same < p->key_parts && !is_same(&p->k[same], &p->v[j])) same++;
            if (same < p->key_parts) {
                v[j] = k[same], v_step[j] = k_step[same];
                continue;
            }
            v[j] = widened(&p->v[j], p->narrow, row, group, p->groups, at, n, free_room, &v_step[j]);
            free_room += BLOCK * p->v[j].dim;
        }
        for (int64_t r = 0; r < R; r++) {
            memset(scores, 0, sizeof scores);
            const float *part = q + r * D;
            for (int i = 0; i < p->key_parts; part += p->k[i++].dim)
                add_products(part, k[i], k_step[i], n, p->k[i].dim, scores);
            stands(p, group, r, &token, &head);
            const uint8_t *seen = p->mask ? p->mask + row * p->mask_row + token * p->keys + at : NULL;
            float fade = to_shares(scores, seen, n, &peaks[r], &totals[r]);
            float *sum = sums + r * V;
            if (fade != 1)
                for (int64_t d = 0; d < V; d++) sum[d] *= fade;
            for (int j = 0; j < p->value_parts; sum += p->v[j++].dim)
                add_weighted(scores, v[j], v_step[j], n, p->v[j].dim, sum);
        }
    }
}

/* The softmax over all ranges of one row and head. */
static void join_ranges(const Problem *p, int64_t row, int64_t group, int ranges, const float *sums,
                        const float *peaks, const float *totals) {
    int64_t V = width(p->v, p->value_parts), R = sharing(p), token, head;
    for (int64_t r = 0; r < R; r++) {
        stands(p, group, r, &token, &head);
        float *out = p->out + ((row * p->tokens + token) * p->heads + head) * V;
        memset(out, 0, V * sizeof *out);
        float top = -INFINITY, total = 0;
        for (int i = 0; i < ranges; i++) top = peaks[i * R + r] > top ? peaks[i * R + r] : top;
        if (top == -INFINITY) continue; /* it sees nothing */
        for (int i = 0; i < ranges; i++) {
            if (peaks[i * R + r] == -INFINITY) continue;
            float share = exp_of_negative(peaks[i * R + r] - top);
            total += totals[i * R + r] * share;
            for (int64_t d = 0; d < V; d++) out[d] += share * sums[(i * R + r) * V + d];
        }
        for (int64_t d = 0; d < V; d++) out[d] /= total;
    }
}

/* Returns 0, or 1 if there is no memory for what it needs beside its arguments. */
int kvpath_attend(const Problem *p) {
    int64_t D = width(p->k, p->key_parts), V = width(p->v, p->value_parts), R = sharing(p);
    int64_t wanted = (p->keys + FEWEST_KEYS - 1) / FEWEST_KEYS;
    int ranges = wanted > MOST_RANGES ? MOST_RANGES : (int)wanted;
    int64_t length = (p->keys + ranges - 1) / ranges, heads = (int64_t)p->batch * p->groups;
    float *queries = malloc(heads * R * D * sizeof *queries);
    float *sums = malloc(heads * ranges * R * (V + 2) * sizeof *sums);
    float *rooms = malloc((int64_t)p->threads * BLOCK * (D + V) * sizeof *rooms);
    if (!queries || !sums || !rooms) {
        free(queries), free(sums), free(rooms);
        return 1;
    }
    take_queries(p, queries);
    float *peaks = sums + heads * ranges * R * V, *totals = peaks + heads * ranges * R;
#pragma omp parallel num_threads(p->threads)
    {
        float *room = rooms;
#ifdef _OPENMP
        room += omp_get_thread_num() * BLOCK * (D + V);
#endif
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < heads * ranges; item++) {
            int64_t head = item / ranges, first = item % ranges * length;
            int64_t last = first + length < p->keys ? first + length : p->keys;
            attend_range(p, queries, head / p->groups, head % p->groups, first, last, room, sums + item * R * V,
                         peaks + item * R, totals + item * R);
        }
#pragma omp for
        for (int64_t head = 0; head < heads; head++)
            join_ranges(p, head / p->groups, head % p->groups, ranges, sums + head * ranges * R * V,
                        peaks + head * ranges * R, totals + head * ranges * R);
    }
    free(queries), free(sums), free(rooms);
    return 0;
}
