/* IEEE halves and bfloat16: floats of 16 bits, element by element.
 *
 * As e5m2.h, this is C for the CPU's loops and the preamble of a GPU's
 * kernels, and has neither branches nor tables.
 */
#ifndef CHAINER_FP8PIPE_FLOATS_H
#define CHAINER_FP8PIPE_FLOATS_H
#ifndef CHAINER_FP8PIPE_E5M2_H /* a GPU's kernels have it before this text */
#include "e5m2.h"
#endif

#define HALF_NAN 0x7E00
#define HALF_BEYOND 0x47800000    /* 65536, whose half would be infinite */
#define HALF_OVERFLOWS 0x477FF000 /* 65520, whose half is infinite */
#define BFLOAT_OVERFLOWS 0x7F7F8000

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

/* The bfloat16 next to x, ties to even: the upper half of a float. */
E5M2_FUNCTION unsigned int bfloat_encode(float x)
{
    unsigned int bits = e5m2_bits(x);
    unsigned int rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    unsigned int nan = 0x7FC0u | (bits & E5M2_F32_SIGN) >> 16;
    return e5m2_magnitude(x) > E5M2_F32_INFINITY ? nan : rounded;
}

E5M2_FUNCTION float bfloat_decode(unsigned int bfloat)
{
    return e5m2_float(bfloat << 16);
}

#endif
