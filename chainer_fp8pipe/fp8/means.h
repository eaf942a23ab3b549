/* Loops that make sums their mean and encode it, in one go.
 *
 * They give the bits of the separate steps; a sum is read once.
 */
#ifndef CHAINER_FP8PIPE_MEANS_H
#define CHAINER_FP8PIPE_MEANS_H
#include "long_loops.h"

/* Sums of ratios: their mean is turned into a gradient, and encoded like one,
 * with error feedback. */
#define RATIO_MEAN_LOOP(NAME, ROUNDING) \
    CLONES static Counts ratio_mean_##NAME( \
        const f32 *total, float count, const f32 *parameter, f32 *residual, \
        u8 *codes, size_t n, Ratio q) \
    { \
        uint32_t large = 0, nonfinite = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float mean = e5m2_from_ratio(total[i] / count, weight, \
                                         q.inverse); \
            ENCODE_AND_KEEP(mean + residual[i], weight, ROUNDING, 0) \
        } \
        return (Counts){large - nonfinite, nonfinite}; \
    }

/* Sums of values, with error feedback in the values' own unit. */
#define MEAN_LOOP(NAME, ROUNDING) \
    CLONES static void mean_##NAME(const f32 *total, float count, \
                                   f32 *residual, u8 *codes, size_t n) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float value = total[i] / count + residual[i]; \
            unsigned int code = e5m2_encode(value, ROUNDING, 0); \
            float left = value - e5m2_decode_finite(code); \
            codes[i] = (u8)code; \
            residual[i] = e5m2_is_finite(left) ? left : 0.0f; \
        } \
    }

RATIO_MEAN_LOOP(nearest, E5M2_NEAREST)
RATIO_MEAN_LOOP(truncate, E5M2_TRUNCATE)
MEAN_LOOP(nearest, E5M2_NEAREST)
MEAN_LOOP(truncate, E5M2_TRUNCATE)

static inline Counts long_ratio_mean(const f32 *total, float count,
                                     const f32 *parameter, f32 *residual,
                                     u8 *codes, size_t n, Ratio q,
                                     int rounding)
{
    Counts sum = {0, 0};
    FOR_EACH_CHUNK(start, length, n, parameter) {
        Counts counts = (rounding == E5M2_NEAREST ? ratio_mean_nearest
                                                  : ratio_mean_truncate)(
            total + start, count, parameter + start, residual + start,
            codes + start, length, q);
        sum.clipped += counts.clipped;
        sum.nonfinite += counts.nonfinite;
    }
    return sum;
}

static inline void long_mean(const f32 *total, float count, f32 *residual,
                             u8 *codes, size_t n, int rounding)
{
    (rounding == E5M2_NEAREST ? mean_nearest : mean_truncate)(
        total, count, residual, codes, n);
}

#endif
