/* The loops of loops.h over buffers of any length, chunk by chunk. */
#ifndef CHAINER_FP8PIPE_LONG_LOOPS_H
#define CHAINER_FP8PIPE_LONG_LOOPS_H
#include "loops.h"

#define CACHE_LINE 64

/* Length of the chunk at `start` of n elements.
 *
 * The first one ends where `floats` reaches a cache line, so that no vector
 * of the others lies across two; and none crosses a multiple of 2^32, because
 * the loops take the upper half of the index for constant. */
static inline size_t chunk_length(size_t start, size_t n, const f32 *floats)
{
    uint64_t length = (UINT64_C(1) << 32) - (start & UINT32_MAX);
    if (start == 0 && (uintptr_t)floats % CACHE_LINE != 0)
        length = (CACHE_LINE - (uintptr_t)floats % CACHE_LINE + 3) / 4;
    if (length > CHUNK)
        length = CHUNK;
    return length < n - start ? (size_t)length : n - start;
}

#define FOR_EACH_CHUNK(start, length, n, floats) \
    for (size_t start = 0, length; \
         start < (n) && (length = chunk_length(start, (n), (floats)), 1); \
         start += length)

/* One of three loops by the number of the rounding. */
#define BY_ROUNDING(LOOP, rounding) \
    ((rounding) == E5M2_NEAREST    ? LOOP##_nearest \
     : (rounding) == E5M2_TRUNCATE ? LOOP##_truncate \
                                   : LOOP##_stochastic)

static inline void long_encode(const f32 *values, u8 *codes, size_t n,
                               int rounding, Random random)
{
    FOR_EACH_CHUNK(start, length, n, values) {
        random.first = start;
        BY_ROUNDING(encode, rounding)(values + start, codes + start, length,
                                      random);
    }
}

static inline void long_decode(const u8 *codes, f32 *out, size_t n)
{
    FOR_EACH_CHUNK(start, length, n, out)
        decode_loop(codes + start, out + start, length);
}

static inline void long_add(const u8 *a, const u8 *b, u8 *out, size_t n,
                            int rounding, Random random)
{
    FOR_EACH_CHUNK(start, length, n, NULL) {
        random.first = start;
        BY_ROUNDING(add, rounding)(a + start, b + start, out + start, length,
                                   random);
    }
}

static inline void long_accumulate(const u8 *codes, f32 *total, size_t n)
{
    CHOOSE(accumulate_loop)(codes, total, n);
}

/* Sums of codes from `count` places, MOST_SUMMED at most, added in this order
 * to zeros. */
static inline void long_sum(const u8 *const *codes, int count, f32 *total,
                            size_t n)
{
    CHOOSE(sum_loop)(codes, count, total, n);
}

/* Without error feedback if `residual` is NULL. */
static inline Counts long_ratio_encode(const f32 *gradient,
                                       const f32 *parameter, f32 *residual,
                                       u8 *codes, size_t n, Ratio q,
                                       int rounding, Random random)
{
    Counts total = {0, 0};
    FOR_EACH_CHUNK(start, length, n, gradient) {
        random.first = start;
        Counts counts = residual == NULL
            ? BY_ROUNDING(ratio_encode, rounding)(
                  gradient + start, parameter + start, codes + start, length,
                  q, random)
            : BY_ROUNDING(ratio_feedback, rounding)(
                  gradient + start, 1, parameter + start, residual + start,
                  codes + start, length, q, random);
        total.clipped += counts.clipped;
        total.nonfinite += counts.nonfinite;
    }
    return total;
}

static inline uint64_t long_ratio_decode(const u8 *codes,
                                         const f32 *parameter, f32 *out,
                                         size_t n, Ratio q)
{
    uint64_t nonfinite = 0;
    FOR_EACH_CHUNK(start, length, n, parameter)
        nonfinite += CHOOSE(ratio_decode_codes)(
            codes + start, parameter + start, out + start, length, q);
    return nonfinite;
}

/* As above, of ratios that are float32; `out` may be `ratios`. */
static inline uint64_t long_ratio_decode_floats(const f32 *ratios,
                                                const f32 *parameter,
                                                f32 *out, size_t n, Ratio q)
{
    uint64_t nonfinite = 0;
    FOR_EACH_CHUNK(start, length, n, parameter)
        nonfinite += ratio_decode_floats(ratios + start, parameter + start,
                                         out + start, length, q);
    return nonfinite;
}

#endif
