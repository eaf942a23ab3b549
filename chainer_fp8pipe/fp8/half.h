/* IEEE halves, in which gradients, and sums of fp8 values, may travel.
 *
 * Not every processor has halves, or vector code for them: convert.h.
 */
#ifndef CHAINER_FP8PIPE_HALF_H
#define CHAINER_FP8PIPE_HALF_H
#include "loops.h"

#define HALF_OVERFLOWS 0x477FF000 /* 65520: halves are infinite from there */

enum { TIMES, OVER };

/* Values times or over a number; returns the largest magnitude of a strip. */
E5M2_FUNCTION int scale_strip(const f32 *values, int operation, float number,
                              float *out, size_t n)
{
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        out[i] = operation == TIMES ? values[i] * number : values[i] / number;
        largest = e5m2_max(largest, e5m2_magnitude(out[i]));
    }
    return largest;
}

E5M2_FUNCTION void scale_halves_strip(const float *values, float scale,
                                      f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] = e5m2_one_nan(total[i] + values[i] * scale);
}

E5M2_FUNCTION int copy_strip(const float *values, f32 *out, size_t n)
{
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        out[i] = values[i];
        largest = e5m2_max(largest, e5m2_magnitude(values[i]));
    }
    return largest;
}

E5M2_FUNCTION int add_strips(const float *values, float *total)
{
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < STRIP; ++i) {
        total[i] += values[i];
        largest = e5m2_max(largest, e5m2_magnitude(total[i]));
    }
    return largest;
}

/* The halves of a strip; where it has a NaN, of that the processor might keep
 * the payload. */
#define NARROW(V, strip, largest, halves) \
    ((largest) > E5M2_F32_INFINITY ? narrow_any((strip), (halves)) \
                                   : narrow_##V((strip), (halves)))

/* Returns whether all halves are finite. */
#define HALF_ENCODE_LOOP(V, NAME, OPERATION) \
    IN_##V static inline int NAME##_##V(const f32 *values, float number, \
                                        u16 *halves, size_t n) \
    { \
        float strip[STRIP] = {0}; \
        u16 last[STRIP]; \
        int largest, all = 0; \
        for (; n >= STRIP; n -= STRIP, values += STRIP, halves += STRIP) { \
            largest = scale_strip(values, OPERATION, number, strip, STRIP); \
            NARROW(V, strip, largest, halves); \
            all = e5m2_max(all, largest); \
        } \
        largest = scale_strip(values, OPERATION, number, strip, n); \
        NARROW(V, strip, largest, last); \
        memcpy(halves, last, n * sizeof *halves); \
        return e5m2_max(all, largest) < HALF_OVERFLOWS; \
    }

#define HALF_DECODE_LOOP(V) \
    IN_##V static inline int half_decode_all_##V(const u16 *halves, \
                                                 f32 *out, size_t n) \
    { \
        float strip[STRIP]; \
        u16 last[STRIP] = {0}; \
        int all = 0; \
        for (; n >= STRIP; n -= STRIP, halves += STRIP, out += STRIP) { \
            widen_halves_##V(halves, strip); \
            int largest = copy_strip(strip, out, STRIP); \
            if (largest > E5M2_F32_INFINITY) { \
                widen_halves_any(halves, strip); \
                copy_strip(strip, out, STRIP); \
            } \
            all = e5m2_max(all, largest); \
        } \
        memcpy(last, halves, n * sizeof *halves); \
        widen_halves_any(last, strip); \
        return e5m2_max(all, copy_strip(strip, out, n)) \
               < E5M2_F32_INFINITY; \
    }

#define HALF_ACCUMULATE_LOOP(V) \
    IN_##V static inline void half_accumulate_##V( \
        const u16 *halves, float scale, f32 *total, size_t n) \
    { \
        float strip[STRIP]; \
        u16 last[STRIP] = {0}; \
        for (; n >= STRIP; n -= STRIP, halves += STRIP, total += STRIP) { \
            widen_halves_##V(halves, strip); \
            scale_halves_strip(strip, scale, total, STRIP); \
        } \
        memcpy(last, halves, n * sizeof *halves); \
        widen_halves_##V(last, strip); \
        scale_halves_strip(strip, scale, total, n); \
    }

#define HALF_ADD_LOOP(V) \
    IN_##V static inline void half_add_##V(const u16 *halves, u16 *total, \
                                           size_t n) \
    { \
        float a[STRIP], b[STRIP]; \
        u16 last[2][STRIP] = {{0}}; \
        for (; n >= STRIP; n -= STRIP, halves += STRIP, total += STRIP) { \
            widen_halves_##V(halves, a); \
            widen_halves_##V(total, b); \
            int largest = add_strips(a, b); \
            NARROW(V, b, largest, total); \
        } \
        memcpy(last[0], halves, n * sizeof *halves); \
        memcpy(last[1], total, n * sizeof *halves); \
        widen_halves_##V(last[0], a); \
        widen_halves_##V(last[1], b); \
        int largest = add_strips(a, b); \
        NARROW(V, b, largest, last[1]); \
        memcpy(total, last[1], n * sizeof *halves); \
    }

#define HALF_LOOPS(V) \
    HALF_ENCODE_LOOP(V, half_times, TIMES) \
    HALF_ENCODE_LOOP(V, half_over, OVER) \
    HALF_DECODE_LOOP(V) \
    HALF_ACCUMULATE_LOOP(V) \
    HALF_ADD_LOOP(V)
VARIANTS(HALF_LOOPS)

/* The halves of floats times a power of two.  Returns whether all of them are
 * finite, as do the next two. */
static inline int half_encode_scaled(const f32 *values, float scale,
                                     u16 *halves, size_t n)
{
    return CHOOSE(half_times)(values, scale, halves, n);
}

/* Means of sums, rounded to halves. */
static inline int half_mean(const f32 *total, float count, u16 *halves,
                            size_t n)
{
    return is_power_of_two(count)
        ? CHOOSE(half_times)(total, 1 / count, halves, n)
        : CHOOSE(half_over)(total, count, halves, n);
}

/* Halves as floats. */
static inline int half_decode_all(const u16 *halves, f32 *out, size_t n)
{
    return CHOOSE(half_decode_all)(halves, out, n);
}

/* Adds halves times a power of two to floats. */
static inline void half_accumulate_scaled(const u16 *halves, float scale,
                                          f32 *total, size_t n)
{
    CHOOSE(half_accumulate)(halves, scale, total, n);
}

/* Sums of halves, rounded to halves. */
static inline void half_add(const u16 *halves, u16 *total, size_t n)
{
    CHOOSE(half_add)(halves, total, n);
}

#endif
