/* Loops of the fp8 format over contiguous buffers, in plain C. */
#ifndef CHAINER_FP8PIPE_LOOPS_H
#define CHAINER_FP8PIPE_LOOPS_H
#include "convert.h"

typedef struct {
    unsigned int key0, key1;
    uint64_t first; /* index of the loop's first element in the whole array */
} Random;

typedef struct {
    float scale, inverse, epsilon;
    float bound; /* of residuals */
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

/* What is encoded with error feedback: gradients, or the means of sums of
 * ratios, whose number is the ranks or, if TIMES, its inverse. */
enum { GRADIENT, MEAN, MEAN_TIMES };

/* A NaN may be any: its code, and what is left of it, are always the same. */
E5M2_FUNCTION float feedback_value(float x, int kind, float number,
                                   float weight, float inverse)
{
    if (kind == GRADIENT)
        return x;
    return (kind == MEAN ? x / number : x * number) * inverse * weight;
}

/* Encodes values and keeps what their codes leave out, if any is infinite or
 * NaN, or its ratio. */
E5M2_FUNCTION Counts keep_any(int rounding, const float *values,
                              const f32 *parameter, f32 *residual, u8 *codes,
                              size_t n, Ratio q, Random random)
{
    uint32_t large = 0, nonfinite = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float ratio = e5m2_ratio(values[i], weight, q.scale);
        unsigned int code = e5m2_encode_ratio(ratio, values[i], rounding,
                                              RANDOM_BITS(random, i));
        codes[i] = (u8)code;
        residual[i] = e5m2_residual(values[i], code, weight, q.inverse,
                                    q.bound);
        large += (uint32_t)e5m2_is_large(ratio);
        nonfinite += (uint32_t)e5m2_is_nonfinite(ratio, values[i]);
    }
    return (Counts){large - nonfinite, nonfinite};
}

/* Elements encoded with error feedback at a time: enough to make little of
 * the beginning and end of a loop, few enough for the nearest cache. */
#define FEEDBACK_STRIP ((size_t)256)

/* Three short loops take less time than a long one: an element's operations
 * wait for each other, and the more of them a loop has, the fewer elements a
 * processor works on at a time.
 *
 * What is left is infinite or NaN wherever a value or its weight is.  If all
 * of it is finite, no code can be an infinity or NaN; otherwise this begins
 * again.  Codes of 32 bits until the end need fewer registers at a time. */
E5M2_FUNCTION Counts feedback_strip(
    int kind, int rounding, const f32 *source, float number,
    const f32 *parameter, f32 *residual, u8 *codes, size_t n, Ratio q,
    Random random)
{
    float values[FEEDBACK_STRIP], ratios[FEEDBACK_STRIP];
    uint32_t wide[FEEDBACK_STRIP], large = 0;
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        values[i] = feedback_value(source[i], kind, number, weight,
                                   q.inverse) + residual[i];
        ratios[i] = e5m2_ratio(values[i], weight, q.scale);
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float rounded;
        large += (uint32_t)e5m2_is_large(ratios[i]);
        wide[i] = e5m2_encode_to(ratios[i], rounding, RANDOM_BITS(random, i),
                                 &rounded);
        ratios[i] = rounded;
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float left = values[i] - ratios[i] * q.inverse * weight;
        residual[i] = e5m2_limited(left, q.bound);
        largest = e5m2_max(largest, e5m2_magnitude(left));
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        codes[i] = (u8)wide[i];
    return largest < E5M2_F32_INFINITY
        ? (Counts){large, 0}
        : keep_any(rounding, values, parameter, residual, codes, n, q,
                   random);
}

/* Over strips of a length that the compiler knows, and the rest. */
#define FEEDBACK_LOOP(NAME, KIND, ROUNDING) \
    CLONES static Counts NAME( \
        const f32 *source, float number, const f32 *parameter, \
        f32 *residual, u8 *codes, size_t n, Ratio q, Random random) \
    { \
        Counts counts, sum = {0, 0}; \
        size_t i = 0; \
        for (; n - i >= FEEDBACK_STRIP; i += FEEDBACK_STRIP) { \
            counts = feedback_strip(KIND, ROUNDING, source + i, number, \
                                    parameter + i, residual + i, codes + i, \
                                    FEEDBACK_STRIP, q, random); \
            sum.clipped += counts.clipped; \
            sum.nonfinite += counts.nonfinite; \
            random.first += FEEDBACK_STRIP; \
        } \
        counts = feedback_strip(KIND, ROUNDING, source + i, number, \
                                parameter + i, residual + i, codes + i, \
                                n - i, q, random); \
        sum.clipped += counts.clipped; \
        sum.nonfinite += counts.nonfinite; \
        return sum; \
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
    FEEDBACK_LOOP(ratio_feedback_##NAME, GRADIENT, ROUNDING)

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

E5M2_FUNCTION void accumulate_strip(const float *values, f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] = e5m2_one_nan(total[i] + values[i]);
}

/* Adds codes to sums. */
#define ACCUMULATE_LOOP(V) \
    IN_##V static inline void accumulate_loop_##V(const u8 *codes, \
                                                  f32 *total, size_t n) \
    { \
        float values[STRIP]; \
        u8 last[STRIP] = {0}; \
        for (; n >= STRIP; n -= STRIP, codes += STRIP, total += STRIP) { \
            widen_codes_##V(codes, values); \
            accumulate_strip(values, total, STRIP); \
        } \
        memcpy(last, codes, n); \
        widen_codes_##V(last, values); \
        accumulate_strip(values, total, n); \
    }
VARIANTS(ACCUMULATE_LOOP)

/* Sums of codes from several places. */
#define SUM_LOOP(V) \
    IN_##V static inline void sum_loop_##V( \
        const u8 *const *codes, int count, f32 *total, size_t n) \
    { \
        const u8 *rests[MOST_SUMMED]; \
        u8 last[MOST_SUMMED][STRIP]; \
        f32 sums[STRIP]; \
        size_t i = 0; \
        for (; n - i >= STRIP; i += STRIP) \
            sum_codes_##V(codes, count, i, total + i); \
        if (i == n) \
            return; \
        for (int k = 0; k < count; ++k) { \
            memset(last[k], 0, STRIP); \
            memcpy(last[k], codes[k] + i, n - i); \
            rests[k] = last[k]; \
        } \
        sum_codes_##V(rests, count, 0, sums); \
        memcpy(total + i, sums, (n - i) * sizeof *sums); \
    }
VARIANTS(SUM_LOOP)

/* Returns how many results are infinite or NaN; there are few. */
E5M2_FUNCTION uint32_t ratio_decode_strip(const float *ratios,
                                          const f32 *parameter, f32 *out,
                                          size_t n, Ratio q)
{
    uint32_t nonfinite = 0;
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float x = e5m2_from_ratio(ratios[i], weight, q.inverse);
        out[i] = x;
        largest = e5m2_max(largest, e5m2_magnitude(x));
    }
    for (size_t i = 0; largest >= E5M2_F32_INFINITY && i < n; ++i)
        nonfinite += !e5m2_is_finite(out[i]);
    return nonfinite;
}

#define RATIO_DECODE_LOOP(V) \
    IN_##V static uint32_t ratio_decode_codes_##V( \
        const u8 *codes, const f32 *parameter, f32 *out, size_t n, Ratio q) \
    { \
        uint32_t nonfinite = 0; \
        float values[STRIP]; \
        u8 last[STRIP] = {0}; \
        for (; n >= STRIP; n -= STRIP, codes += STRIP, parameter += STRIP, \
                           out += STRIP) { \
            widen_codes_##V(codes, values); \
            nonfinite += ratio_decode_strip(values, parameter, out, STRIP, \
                                            q); \
        } \
        memcpy(last, codes, n); \
        widen_codes_##V(last, values); \
        return nonfinite \
               + ratio_decode_strip(values, parameter, out, n, q); \
    }
VARIANTS(RATIO_DECODE_LOOP)

CLONES static uint32_t ratio_decode_floats(const f32 *ratios,
                                           const f32 *parameter, f32 *out,
                                           size_t n, Ratio q)
{
    uint32_t nonfinite = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float x = e5m2_from_ratio(ratios[i], weight, q.inverse);
        out[i] = x;
        nonfinite += !e5m2_is_finite(x);
    }
    return nonfinite;
}

#endif
