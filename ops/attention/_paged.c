/* Attention of one query per sequence over a paged KV cache, in float32, for CPUs.
 *
 * Keys and values are read in place, once for all query heads that share them. Gathering them first, as the PyTorch
 * backend does, moves each byte three times (read, write, read again), and a decode step on a CPU is bound by memory
 * traffic.
 *
 * Memory: keys and values [blocks, block_size, kv_heads, dim]; q and out [sequences, kv_heads * group, dim], rows of q
 * `q_stride` floats apart; tables [sequences, table_stride].
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

/* One build serves every x86-64 CPU: the loader picks the widest version the machine has. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FOR_EACH_CPU
#endif

typedef struct {
    int64_t kv_heads, group, dim, block_size;
    float scale, softcap; /* softcap 0: none */
} shape_t;

/* exp(x) for x <= 0, relative error below 1e-6: 2^n times the Taylor series of exp on [-ln2/2, ln2/2]. */
static inline __attribute__((always_inline)) float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = floorf(x * 1.44269504f + 0.5f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const float series =
        1.0f + r * (1.0f + r * (0.5f + r * (1.6666667e-1f + r * (4.1666668e-2f + r * (8.3333333e-3f + r * 1.3888889e-3f)))));
    union {
        int32_t bits;
        float value;
    } power = {((int32_t)n + 127) << 23};
    return series * power.value;
}

/* Prefetch a block while the previous one is processed: blocks are scattered, so the hardware cannot predict the next. */
static inline __attribute__((always_inline)) void prefetch(const float *block, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16)
        __builtin_prefetch(block + i);
}

/* Attend to positions start to end of one sequence, all heads. scores: room for kv_heads * group * (end - start). Within
 * a block, one head at a time: its query, and later its output, stays in registers. */
static inline __attribute__((always_inline)) void attend(const float *q, const float *keys, const float *values,
                                                         const int32_t *table, int64_t start, int64_t end,
                                                         const shape_t *shape, const int64_t dim, float *scores,
                                                         float *out) {
    const int64_t group = shape->group, block_size = shape->block_size;
    const int64_t heads = shape->kv_heads * group, row = shape->kv_heads * dim, count = end - start;

    for (int64_t first = start, next; first < end; first = next) {
        next = (first / block_size + 1) * block_size < end ? (first / block_size + 1) * block_size : end;
        const float *block = keys + ((int64_t)table[first / block_size] * block_size + first % block_size) * row;
        if (next < end)
            prefetch(keys + (int64_t)table[next / block_size] * block_size * row, block_size * row);
        for (int64_t h = 0; h < heads; h++) {
            const float *query = q + h * dim, *key = block + h / group * dim;
            float *score = scores + h * count + first - start;
            for (int64_t t = 0; t < next - first; t++, key += row) {
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < dim; d++)
                    dot += query[d] * key[d];
                score[t] = dot * shape->scale;
            }
        }
    }

    for (int64_t h = 0; h < heads; h++) {
        float *score = scores + h * count, max_score = -INFINITY, sum = 0.0f;
        if (shape->softcap > 0.0f)
            for (int64_t i = 0; i < count; i++)
                score[i] = shape->softcap * tanhf(score[i] / shape->softcap);
#pragma omp simd reduction(max : max_score)
        for (int64_t i = 0; i < count; i++)
            max_score = score[i] > max_score ? score[i] : max_score;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) {
            score[i] = exp_negative(score[i] - max_score);
            sum += score[i];
        }
        const float share = 1.0f / sum;
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            score[i] *= share;
    }

    for (int64_t i = 0; i < heads * dim; i++)
        out[i] = 0.0f;
    for (int64_t first = start, next; first < end; first = next) {
        next = (first / block_size + 1) * block_size < end ? (first / block_size + 1) * block_size : end;
        const float *block = values + ((int64_t)table[first / block_size] * block_size + first % block_size) * row;
        if (next < end)
            prefetch(values + (int64_t)table[next / block_size] * block_size * row, block_size * row);
        for (int64_t h = 0; h < heads; h++) {
            const float *weight = scores + h * count + first - start, *value = block + h / group * dim;
            float *restrict sum = out + h * dim;
            for (int64_t t = 0; t < next - first; t++, value += row)
#pragma omp simd
                for (int64_t d = 0; d < dim; d++)
                    sum[d] += weight[t] * value[d];
        }
    }
}

/* Common head sizes are compile-time constants, so that the compiler keeps a head in registers. */
FOR_EACH_CPU
static void attend_any(const float *q, const float *keys, const float *values, const int32_t *table, int64_t start,
                       int64_t end, const shape_t *shape, float *scores, float *out) {
    if (shape->dim == 64)
        attend(q, keys, values, table, start, end, shape, 64, scores, out);
    else if (shape->dim == 128)
        attend(q, keys, values, table, start, end, shape, 128, scores, out);
    else
        attend(q, keys, values, table, start, end, shape, shape->dim, scores, out);
}

/* All sequences. starts, ends: the range of positions per sequence. Returns 0, or -1 without memory for the scores. */
int paged_decode(const float *q, int64_t q_stride, const float *keys, const float *values, const int32_t *tables,
                 int64_t table_stride, const int64_t *starts, const int64_t *ends, int64_t sequences, int64_t kv_heads,
                 int64_t group, int64_t dim, int64_t block_size, float scale, float softcap, int threads, float *out) {
    const shape_t shape = {kv_heads, group, dim, block_size, scale, softcap};
    const int64_t heads = kv_heads * group;
    int64_t longest = 0, total = 0;
    int failed = 0;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t count = ends[s] - starts[s];
        longest = count > longest ? count : longest;
        total += count;
    }
#pragma omp parallel num_threads(threads) if (total > 512)
    {
        float *scores = malloc(sizeof(float) * heads * longest);
        if (scores == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t s = 0; s < sequences; s++)
            if (scores != NULL)
                attend_any(q + s * q_stride, keys, values, tables + s * table_stride, starts[s], ends[s], &shape, scores,
                       out + s * heads * dim);
        free(scores);
    }
    return failed ? -1 : 0;
}
