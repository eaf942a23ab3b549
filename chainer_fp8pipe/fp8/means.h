/* Loops that make sums their mean and encode it, in one go.
 *
 * They give the bits of the separate steps; a sum is read once.
 */
#ifndef CHAINER_FP8PIPE_MEANS_H
#define CHAINER_FP8PIPE_MEANS_H
#include "long_loops.h"

/* Sums of values, with error feedback in the values' own unit. */
#define MEAN_LOOP(NAME, ROUNDING) \
    CLONES static void mean_##NAME(const f32 *total, float count, \
                                   f32 *residual, u8 *codes, size_t n, \
                                   float bound) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float value = total[i] / count + residual[i]; \
            unsigned int code = e5m2_encode(value, ROUNDING, 0); \
            float left = value - e5m2_decode_finite(code); \
            codes[i] = (u8)code; \
            residual[i] = e5m2_is_finite(left) ? e5m2_limited(left, bound) \
                                               : 0.0f; \
        } \
    }

/* Sums of ratios: their mean is turned into a gradient, and encoded like one,
 * with error feedback. */
FEEDBACK_LOOP(ratio_mean_nearest, MEAN, E5M2_NEAREST)
FEEDBACK_LOOP(ratio_mean_truncate, MEAN, E5M2_TRUNCATE)
FEEDBACK_LOOP(ratio_mean_times_nearest, MEAN_TIMES, E5M2_NEAREST)
FEEDBACK_LOOP(ratio_mean_times_truncate, MEAN_TIMES, E5M2_TRUNCATE)
MEAN_LOOP(nearest, E5M2_NEAREST)
MEAN_LOOP(truncate, E5M2_TRUNCATE)

static inline Counts long_ratio_mean(const f32 *total, float count,
                                     const f32 *parameter, f32 *residual,
                                     u8 *codes, size_t n, Ratio q,
                                     int rounding)
{
    const Random none = {0};
    const int nearest = rounding == E5M2_NEAREST;
    Counts sum = {0, 0};
    Counts (*loop)(const f32 *, float, const f32 *, f32 *, u8 *, size_t,
                   Ratio, Random) = nearest ? ratio_mean_nearest
                                            : ratio_mean_truncate;
    if (is_power_of_two(count)) { /* the same bits, and no division */
        loop = nearest ? ratio_mean_times_nearest : ratio_mean_times_truncate;
        count = 1 / count;
    }
    /* From the start, wherever the parameter lies: sums come a few strips at a
     * time, and a chunk up to the next cache line would cost as much as one. */
    FOR_EACH_CHUNK(start, length, n, NULL) {
        Counts counts = loop(total + start, count, parameter + start,
                             residual + start, codes + start, length, q,
                             none);
        sum.clipped += counts.clipped;
        sum.nonfinite += counts.nonfinite;
    }
    return sum;
}

static inline void long_mean(const f32 *total, float count, f32 *residual,
                             u8 *codes, size_t n, int rounding, float bound)
{
    (rounding == E5M2_NEAREST ? mean_nearest : mean_truncate)(
        total, count, residual, codes, n, bound);
}

#endif
