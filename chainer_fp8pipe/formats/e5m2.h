/* E5M2: one sign, five exponent and two mantissa bits; and floats of 16 bits.
 *
 * This is the only place that knows the formats.  The C compiler includes it
 * for the CPU loops, and its text is the preamble of the GPU kernels, so both
 * give the same bits.  That holds as long as no a * b + c is contracted
 * (-ffp-contract=off, --fmad=false).
 *
 * An E5M2 code is the upper byte of an IEEE half: bias 15, largest finite
 * value 57344 (0x7B), infinity 0x7C, smallest positive value 2^-16 (0x01).
 *
 * Every function works on one element without branches and without tables, so
 * that a compiler turns a loop over it into vector code.  A float32 subnormal
 * is only ever added to a number that is far larger: encoding and decoding do
 * not depend on flush-to-zero modes and take no slow path of the processor.
 */
#ifndef CHAINER_FP8PIPE_E5M2_H
#define CHAINER_FP8PIPE_E5M2_H

#define E5M2_NEAREST 0
#define E5M2_TRUNCATE 1

/* Input and output of an INDEPENDENT loop are either the same buffer or do
 * not overlap.  On the CPU a buffer may start at any address. */
#ifdef __CUDACC__
#define E5M2_FUNCTION static __device__ __forceinline__
#define INDEPENDENT _Pragma("unroll")
#define UNROLLED _Pragma("unroll")
typedef float f32;
#else
#include <string.h>
#define E5M2_FUNCTION static inline __attribute__((always_inline))
#define UNROLLED
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
typedef float f32 __attribute__((aligned(1), may_alias));
#endif
typedef unsigned char u8;

/* Bit patterns of float32 values; those of magnitudes are signed because
 * vector units compare signed integers best. */
#define E5M2_F32_SIGN 0x80000000u
#define E5M2_F32_INFINITY 0x7F800000 /* also the mask of the exponent */
#define E5M2_F32_NAN 0x7FC00000
#define E5M2_F32_MAX 0x47600000      /* 57344 */
#define E5M2_LARGEST 3.4028234e38f   /* a float32 can be */
#define E5M2_F32_NORMAL 0x38800000   /* 2^-14, the least with a normal code */

E5M2_FUNCTION unsigned int e5m2_bits(float x)
{
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    unsigned int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

E5M2_FUNCTION float e5m2_float(unsigned int bits)
{
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

E5M2_FUNCTION int e5m2_max(int a, int b)
{
    return a > b ? a : b;
}

E5M2_FUNCTION int e5m2_min(int a, int b)
{
    return a < b ? a : b;
}

/* The bits of |x|. */
E5M2_FUNCTION int e5m2_magnitude(float x)
{
    return (int)(e5m2_bits(x) & ~E5M2_F32_SIGN);
}

E5M2_FUNCTION int e5m2_is_finite(float x)
{
    return e5m2_magnitude(x) < E5M2_F32_INFINITY;
}

/* Processors disagree about the sign and payload of a NaN that arithmetic
 * makes; with one NaN for all of them results can be compared bit for bit. */
E5M2_FUNCTION float e5m2_one_nan(float x)
{
    int magnitude = e5m2_magnitude(x);
    return e5m2_float(magnitude > E5M2_F32_INFINITY ? E5M2_F32_NAN
                                                    : e5m2_bits(x));
}

/* The two roundings turn the bits of a magnitude of at most 57344 into its
 * code.  They return it in the top byte of a word, the rest of which is
 * below the last place and means nothing: so the loops stay in 32-bit lanes
 * up to the last shift, and narrow once. */

/* Rounds to `bits` mantissa bits, ties to even, in one step; `*value` is what
 * that makes of the magnitude.
 *
 * Adding 2^(23 - bits) times its own power of two to a value leaves that many
 * mantissa bits and lets the floating-point unit round.  Below 2^-14 the
 * power stays that of 2^-14, which is how subnormal codes are spaced.  The low
 * bits of the sum then count steps inside the binade, to which the code of
 * the binade is added; its constant part already hides in the low bits of
 * the large number. */
E5M2_FUNCTION unsigned int e5m2_round_to(int magnitude, int bits,
                                         float *value)
{
    int power = e5m2_max(magnitude & E5M2_F32_INFINITY, E5M2_F32_NORMAL);
    int offset = -(113 << bits) & ((1 << (bits + 6)) - 1);
    float large = e5m2_float(power + ((23 - bits) << 23) + offset);
    float sum = e5m2_float(magnitude) + large;
    *value = sum - large;
    return (e5m2_bits(sum) << (26 - bits)) + ((unsigned int)power << 3);
}

E5M2_FUNCTION unsigned int e5m2_round(int magnitude, int bits)
{
    float value;
    return e5m2_round_to(magnitude, bits, &value);
}

/* As above, for any magnitude that is finite: it saturates.  `rounding` must
 * be a constant.  Truncation takes the upper byte of the nearest IEEE half,
 * which has ten mantissa bits. */
E5M2_FUNCTION unsigned int e5m2_saturate(int magnitude, int rounding)
{
    return e5m2_round(e5m2_min(magnitude, E5M2_F32_MAX),
                      rounding == E5M2_NEAREST ? 2 : 10);
}

/* Codes are 32-bit numbers here, so that only storing them narrows. */

/* The code of x, if x is finite. */
E5M2_FUNCTION unsigned int e5m2_encode_finite(float x, int rounding)
{
    unsigned int word = e5m2_saturate(e5m2_magnitude(x), rounding);
    return (word | (e5m2_bits(x) & E5M2_F32_SIGN)) >> 24;
}

/* The code of x. */
E5M2_FUNCTION unsigned int e5m2_encode(float x, int rounding)
{
    int magnitude = e5m2_magnitude(x);
    unsigned int word = e5m2_saturate(magnitude, rounding);
    /* Infinity is one more than the 0x7B it saturates at, the NaN three. */
    word += magnitude >= E5M2_F32_INFINITY ? 1u << 24 : 0u;
    word += magnitude > E5M2_F32_INFINITY ? 2u << 24 : 0u;
    return (word | (e5m2_bits(x) & E5M2_F32_SIGN)) >> 24;
}

/* The bits of a finite, positive value, given those of its code shifted to
 * where a float has them. */
E5M2_FUNCTION int e5m2_value_bits(int shifted)
{
    int normal = shifted + (112 << 23);
    /* For a code without leading one: 2^-14 plus the value, less 2^-14. */
    float sum = e5m2_float(shifted + E5M2_F32_NORMAL);
    int subnormal = (int)e5m2_bits(sum - e5m2_float(E5M2_F32_NORMAL));
    return shifted < (1 << 23) ? subnormal : normal;
}

/* The value of a code; every NaN code gives the quiet NaN of its sign. */
E5M2_FUNCTION float e5m2_decode(unsigned int code)
{
    int shifted = (int)(code & 0x7F) << 21;
    int bits = e5m2_value_bits(shifted);
    bits = shifted < (31 << 23) ? bits : E5M2_F32_INFINITY;
    bits = shifted > (31 << 23) ? E5M2_F32_NAN : bits;
    return e5m2_float((unsigned int)bits | (code & 0x80u) << 24);
}

/* The nearest code of x, if x is finite, and its value, which rounding finds on
 * the way. */
E5M2_FUNCTION unsigned int e5m2_nearest(float x, float *value)
{
    unsigned int sign = e5m2_bits(x) & E5M2_F32_SIGN;
    float magnitude;
    unsigned int word = e5m2_round_to(
        e5m2_min(e5m2_magnitude(x), E5M2_F32_MAX), 2, &magnitude);
    *value = e5m2_float(e5m2_bits(magnitude) | sign);
    return (word | sign) >> 24;
}

/* What the ratio of gradient and parameter is divided by: |w| + epsilon. */
E5M2_FUNCTION float e5m2_weight(float parameter, float epsilon)
{
    return e5m2_float(e5m2_magnitude(parameter)) + epsilon;
}

/* The ratio of a gradient to its weight, times scale. */
E5M2_FUNCTION float e5m2_ratio(float gradient, float weight, float scale)
{
    return gradient / weight * scale;
}

/* The bits of a gradient's magnitude, 0 if it is not finite; and of its
 * ratio's, of which infinity is one that overflows, and NaN none. */
E5M2_FUNCTION int e5m2_finite_size(float gradient)
{
    int size = e5m2_magnitude(gradient);
    return size < E5M2_F32_INFINITY ? size : 0;
}

E5M2_FUNCTION int e5m2_ratio_size(float gradient, float weight, int size)
{
    int ratio = e5m2_magnitude(gradient / weight);
    return size > 0 && ratio <= E5M2_F32_INFINITY ? ratio : 0;
}

/* Whether a ratio is beyond 57344, infinite or NaN. */
E5M2_FUNCTION int e5m2_is_large(float ratio)
{
    return e5m2_magnitude(ratio) > E5M2_F32_MAX;
}

/* Whether a ratio's code is an infinity or NaN: a finite gradient saturates
 * even where its ratio overflows float32. */
E5M2_FUNCTION int e5m2_is_nonfinite(float ratio, float gradient)
{
    return (e5m2_magnitude(ratio) > E5M2_F32_INFINITY)
           | (e5m2_magnitude(gradient) == E5M2_F32_INFINITY);
}

/* The code of a gradient's ratio. */
E5M2_FUNCTION unsigned int e5m2_encode_ratio(float ratio, float gradient,
                                             int rounding)
{
    int magnitude = e5m2_magnitude(ratio);
    unsigned int word = e5m2_saturate(magnitude, rounding);
    word += e5m2_magnitude(gradient) == E5M2_F32_INFINITY ? 1u << 24 : 0u;
    word |= e5m2_bits(ratio) & E5M2_F32_SIGN;
    word = magnitude > E5M2_F32_INFINITY ? 0x7Eu << 24 : word;
    return word >> 24;
}

/* The gradient of a ratio; `inverse` is that of the scale. */
E5M2_FUNCTION float e5m2_from_ratio(float ratio, float weight, float inverse)
{
    return e5m2_one_nan(ratio * inverse * weight);
}

/* A finite x, or the nearest number of at most this magnitude. */
E5M2_FUNCTION float e5m2_limited(float x, float limit)
{
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

/* What is left out, if it is worth keeping: more than `bound` is of an
 * outlier, and what saturation has cut off that would come at all updates
 * that follow.  0 for a NaN, too. */
E5M2_FUNCTION float e5m2_kept(float left, float bound)
{
    float size = e5m2_float((unsigned int)e5m2_magnitude(left));
    return size <= bound ? left : 0.0f;
}

/* What `code` leaves out of the gradient, as far as it is worth keeping. */
E5M2_FUNCTION float e5m2_residual(float gradient, unsigned int code,
                                  float weight, float inverse, float bound)
{
    float left = gradient - e5m2_decode(code) * inverse * weight;
    return e5m2_kept(left, e5m2_limited(bound, E5M2_LARGEST));
}

/* --- IEEE halves and bfloat16 ------------------------------------------------ */

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
