/* IEEE halves, in which gradients, and sums of fp8 values, may travel.
 *
 * Plain C, like e5m2.h: not every compiler has halves, or vector code for
 * them.  A half is an E5M2 number with 8 more bits of mantissa.
 */
#ifndef CHAINER_FP8PIPE_HALF_H
#define CHAINER_FP8PIPE_HALF_H
#include "loops.h"

typedef uint16_t u16 __attribute__((aligned(1), may_alias));

#define HALF_INFINITY 0x7C00 /* also the mask of the exponent */
#define HALF_NAN 0x7E00
#define HALF_BEYOND 0x47800000 /* 65536, whose half would be infinite */

/* The half next to x, ties to even; from 65520 on it is infinite. */
E5M2_FUNCTION unsigned int half_encode(float x)
{
    int magnitude = e5m2_magnitude(x);
    unsigned int half =
        e5m2_round(e5m2_min(magnitude, HALF_BEYOND), 10) >> 16;
    half = magnitude > E5M2_F32_INFINITY ? HALF_NAN : half;
    return half | (e5m2_bits(x) & E5M2_F32_SIGN) >> 16;
}

/* The value of a half; every NaN becomes the quiet one of its sign. */
E5M2_FUNCTION float half_decode(unsigned int half)
{
    int shifted = (int)(half & 0x7FFF) << 13;
    int bits = e5m2_value_bits(shifted);
    bits = shifted < (31 << 23) ? bits : E5M2_F32_INFINITY;
    bits = shifted > (31 << 23) ? E5M2_F32_NAN : bits;
    return e5m2_float((unsigned int)bits | (half & 0x8000u) << 16);
}

/* The halves of floats times a power of two. */
CLONES static void half_encode_scaled(const f32 *values, float scale,
                                      u16 *halves, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        halves[i] = (u16)half_encode(values[i] * scale);
}

/* Adds halves times a power of two to floats. */
CLONES static void half_accumulate_scaled(const u16 *halves, float scale,
                                          f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] = e5m2_one_nan(total[i] + half_decode(halves[i]) * scale);
}

/* Halves as floats. */
CLONES static void half_decode_all(const u16 *halves, f32 *out, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        out[i] = half_decode(halves[i]);
}

/* Sums of halves, rounded to halves. */
CLONES static void half_add(const u16 *halves, u16 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] = (u16)half_encode(half_decode(total[i])
                                    + half_decode(halves[i]));
}

/* Means of sums, rounded to halves. */
CLONES static void half_mean(const f32 *total, float count, u16 *halves,
                             size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        halves[i] = (u16)half_encode(total[i] / count);
}

CLONES static int all_finite_halves(const u16 *halves, size_t n)
{
    u16 found = 0;
    for (size_t i = 0; i < n; ++i)
        found |= (u16)((halves[i] & HALF_INFINITY) == HALF_INFINITY);
    return !found;
}

#endif
