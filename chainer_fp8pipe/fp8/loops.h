/* Loops of the fp8 format over contiguous buffers, in plain C. */
#ifndef CHAINER_FP8PIPE_LOOPS_H
#define CHAINER_FP8PIPE_LOOPS_H
#include "vector.h"

typedef struct {
    unsigned int key0, key1;
    uint64_t first; /* index of the loop's first element in the whole array */
} Random;

typedef struct {
    float scale, inverse, epsilon;
} Ratio;

typedef struct {
    uint64_t clipped, nonfinite;
} Counts;

/* A multiple of any vector; within it 32 bits are enough to count. */
#define CHUNK ((size_t)1 << 16)

/* The upper half of the index is the same in the whole chunk. */
#define RANDOM_BITS(r, i) \
    e5m2_random((uint32_t)(r).first + (uint32_t)(i), \
                (uint32_t)((r).first >> 32), (r).key0, (r).key1)

/* Infinity and NaN are rare, and handling them takes a fourth of the time:
 * most loops first assume there are none in the chunk, which they find out
 * on the way, or before if they may overwrite their input. */

CLONES static int all_finite(const u8 *codes, size_t n)
{
    u8 found = 0;
    for (size_t i = 0; i < n; ++i)
        found |= !e5m2_is_finite_code(codes[i]);
    return !found;
}

#define ENCODE_LOOP(NAME, ROUNDING) \
    CLONES static void encode_##NAME(const f32 *values, u8 *codes, size_t n, \
                                     Random random) \
    { \
        int largest = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            largest = e5m2_max(largest, e5m2_magnitude(values[i])); \
            codes[i] = (u8)e5m2_encode_finite(values[i], ROUNDING, \
                                              RANDOM_BITS(random, i)); \
        } \
        if (largest < E5M2_F32_INFINITY) \
            return; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            codes[i] = (u8)e5m2_encode(values[i], ROUNDING, \
                                       RANDOM_BITS(random, i)); \
    }

#define ADD_LOOP(NAME, ROUNDING) \
    CLONES static void add_finite_##NAME(const u8 *a, const u8 *b, u8 *out, \
                                         size_t n, Random random) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            out[i] = (u8)e5m2_add_finite(a[i], b[i], ROUNDING, \
                                         RANDOM_BITS(random, i)); \
    } \
    CLONES static void add_any_##NAME(const u8 *a, const u8 *b, u8 *out, \
                                      size_t n, Random random) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            out[i] = (u8)e5m2_add(a[i], b[i], ROUNDING, \
                                  RANDOM_BITS(random, i)); \
    } \
    static void add_##NAME(const u8 *a, const u8 *b, u8 *out, size_t n, \
                           Random random) \
    { \
        if (all_finite(a, n) && all_finite(b, n)) \
            add_finite_##NAME(a, b, out, n, random); \
        else \
            add_any_##NAME(a, b, out, n, random); \
    }

/* What a loop does with a value of element i and its weight, with error
 * feedback. */
#define ENCODE_AND_KEEP(VALUE, WEIGHT, ROUNDING, BITS) \
    { \
        float value = VALUE; \
        float ratio = e5m2_ratio(value, WEIGHT, q.scale); \
        unsigned int code = e5m2_encode_ratio(ratio, value, ROUNDING, BITS); \
        codes[i] = (u8)code; \
        residual[i] = e5m2_residual(value, code, WEIGHT, q.inverse); \
        large += (uint32_t)e5m2_is_large(ratio); \
        nonfinite += (uint32_t)e5m2_is_nonfinite(ratio, value); \
    }

#define RATIO_ENCODE_LOOP(NAME, ROUNDING) \
    CLONES static Counts ratio_encode_##NAME( \
        const f32 *gradient, const f32 *parameter, u8 *codes, size_t n, \
        Ratio q, Random random) \
    { \
        uint32_t large = 0, nonfinite = 0; \
        int largest = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float ratio = e5m2_ratio(gradient[i], weight, q.scale); \
            codes[i] = (u8)e5m2_encode_finite(ratio, ROUNDING, \
                                              RANDOM_BITS(random, i)); \
            large += (uint32_t)e5m2_is_large(ratio); \
            largest = e5m2_max(largest, e5m2_magnitude(ratio)); \
        } \
        if (largest < E5M2_F32_INFINITY) \
            return (Counts){large, 0}; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float ratio = e5m2_ratio(gradient[i], weight, q.scale); \
            codes[i] = (u8)e5m2_encode_ratio(ratio, gradient[i], ROUNDING, \
                                             RANDOM_BITS(random, i)); \
            nonfinite += (uint32_t)e5m2_is_nonfinite(ratio, gradient[i]); \
        } \
        return (Counts){large - nonfinite, nonfinite}; \
    } \
    CLONES static Counts ratio_feedback_##NAME( \
        const f32 *gradient, const f32 *parameter, f32 *residual, u8 *codes, \
        size_t n, Ratio q, Random random) \
    { \
        uint32_t large = 0, nonfinite = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            ENCODE_AND_KEEP(gradient[i] + residual[i], weight, ROUNDING, \
                            RANDOM_BITS(random, i)) \
        } \
        return (Counts){large - nonfinite, nonfinite}; \
    }

#define FOR_EACH_ROUNDING(LOOP) \
    LOOP(nearest, E5M2_NEAREST) \
    LOOP(truncate, E5M2_TRUNCATE) \
    LOOP(stochastic, E5M2_STOCHASTIC)

FOR_EACH_ROUNDING(ENCODE_LOOP)
FOR_EACH_ROUNDING(ADD_LOOP)
FOR_EACH_ROUNDING(RATIO_ENCODE_LOOP)

CLONES static void decode_finite(const u8 *codes, f32 *out, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        out[i] = e5m2_decode_finite(codes[i]);
}

CLONES static void decode_any(const u8 *codes, f32 *out, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        out[i] = e5m2_decode(codes[i]);
}

static void decode_loop(const u8 *codes, f32 *out, size_t n)
{
    if (all_finite(codes, n))
        decode_finite(codes, out, n);
    else
        decode_any(codes, out, n);
}

CLONES static void accumulate_loop(const u8 *codes, f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] = e5m2_accumulate(total[i], codes[i]);
}

#define RATIO_DECODE_LOOP(NAME, WIRE, VALUE) \
    CLONES static uint32_t ratio_decode_##NAME( \
        const WIRE *wire, const f32 *parameter, f32 *out, size_t n, Ratio q) \
    { \
        uint32_t nonfinite = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float x = e5m2_from_ratio(VALUE(wire[i]), weight, q.inverse); \
            out[i] = x; \
            nonfinite += !e5m2_is_finite(x); \
        } \
        return nonfinite; \
    }

#define ITSELF(x) (x)
RATIO_DECODE_LOOP(codes, u8, e5m2_decode)
RATIO_DECODE_LOOP(floats, f32, ITSELF)

#endif
