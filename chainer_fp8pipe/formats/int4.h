/* int4: records of 32 elements of 4 bits and one scale of 8 bits.
 *
 * An element is -7..7 times the scale, which has 6 bits of exponent and 2 of
 * mantissa, and is rounded up, so that nothing is clipped.  Byte j holds
 * element j, and in its upper half element j + 16, as two's complements; byte
 * 16 is the scale.
 *
 * Scale 0: all elements are zeros.  Scale 254, the largest: 24576; elements
 * beyond 7 times that are clipped.  Scale 255: an element was NaN or infinite,
 * and all of them are NaN.  A record of zero bytes is one of zeros, and every
 * record stands alone, so that a wire may be cut between any two.
 *
 * The C compiler includes this for the CPU's loops, and the GPU's kernels begin
 * with it.  No a * b + c may be contracted (-ffp-contract=off, --fmad=false):
 * all processors are to give the same bits.
 */
#ifndef CHAINER_FP8PIPE_INT4_H
#define CHAINER_FP8PIPE_INT4_H
#ifndef CHAINER_FP8PIPE_E5M2_H /* a GPU's kernels have it before this text */
#include "e5m2.h"
#endif

/* A GPU's NaNs have another payload. */
#ifdef __CUDACC__
#define RECORD_NAN(x) e5m2_one_nan(x)
#else
#define RECORD_NAN(x) (x)
#endif

#define RECORD 32       /* elements */
#define RECORD_BYTES 17
#define LARGEST_SCALE 254
#define UNKNOWN_SCALE 255
#define TOP 7.0f
/* Added to a small number, this leaves the next integer, ties to even, in the
 * lower bits. */
#define TO_INTEGER 12582912.0f /* 1.5 2^23 */
/* The bits of 2^-49, without the mantissa's 21 lower ones. */
#define LEAST_E6M2 ((127 - 49) << 2)

/* The scale of a record by the bits of its largest magnitude; above
 * LARGEST_SCALE if that is too large. */
E5M2_FUNCTION int wanted_scale(int largest)
{
    int code = (int)((e5m2_bits(e5m2_float((unsigned int)largest)
                                * (1.0f / TOP)) + 0x1FFFFF) >> 21)
               - LEAST_E6M2;
    return e5m2_max(code, 0);
}

E5M2_FUNCTION float scale_value(int code)
{
    unsigned int bits = (unsigned int)(code + LEAST_E6M2) << 21;
    float scale = code > 0 ? e5m2_float(bits) : 0.0f;
    return code == UNKNOWN_SCALE ? e5m2_float(E5M2_F32_NAN) : scale;
}

/* What encoding multiplies with. */
E5M2_FUNCTION float scale_inverse(int code, float scale)
{
    return code > 0 ? 1.0f / scale : 0.0f;
}

/* The bits of |x| if they are below others, or 0. */
E5M2_FUNCTION int magnitude_below(float x, int largest)
{
    int magnitude = e5m2_magnitude(x);
    return magnitude < largest ? magnitude : 0;
}

/* The largest magnitude worth keeping of what a record leaves out.
 *
 * An element is never rounded by more than itself, nor by more than an
 * eighth or so of the record's largest: so only where that is ten times as
 * large as all others, an outlier, something is cut off, and that of itself
 * alone.  Otherwise it would come back at several updates, smaller by a
 * power of ten each time, and keep others out of their records.  `second` has
 * the bits of the largest magnitude but one.  Of a record that was clipped
 * nothing is kept. */
E5M2_FUNCTION float largest_left(int wanted, int second)
{
    unsigned int bits = wanted > 0 && second > 0
                            ? (unsigned int)second
                            : (unsigned int)E5M2_F32_INFINITY;
    return e5m2_float(wanted > LARGEST_SCALE ? 0u : bits);
}

/* An element's bits, of a value that becomes what they leave out. */
E5M2_FUNCTION unsigned int element_encode(float *value, float scale,
                                          float inverse, float limit)
{
    float ratio = e5m2_limited(*value * inverse, TOP) + TO_INTEGER;
    float units = ratio - TO_INTEGER;
    *value = e5m2_limited(*value - units * scale, limit);
    return e5m2_bits(ratio);
}

/* The byte of elements j and j + 16. */
E5M2_FUNCTION unsigned int two_elements(unsigned int low, unsigned int high)
{
    return (low & 15u) | (high & 15u) << 4;
}

/* Writes a record of `count` values times a factor (RECORD of them, or the
 * fewer of a tensor's last record) and of what the last encoding has left
 * out, unless `residual` is NULL.  What this one leaves out goes to `left` (no
 * more than largest_left() allows), 0 where the record holds a NaN or an
 * infinity.  Returns whether it does. */
E5M2_FUNCTION int encode_record(const f32 *values, float factor,
                                const f32 *residual, f32 *left, u8 *record,
                                int count)
{
    float v[RECORD];
    unsigned int bits[RECORD];
    int largest = 0, second = 0;
    INDEPENDENT
    for (int i = 0; i < RECORD; ++i)
        v[i] = i >= count ? 0.0f
               : residual ? values[i] * factor + residual[i]
                          : values[i] * factor;
    UNROLLED
    for (int i = 0; i < RECORD; ++i)
        largest = e5m2_max(largest, e5m2_magnitude(v[i]));
    UNROLLED
    for (int i = 0; i < RECORD; ++i)
        second = e5m2_max(second, magnitude_below(v[i], largest));
    int wanted = wanted_scale(largest);
    int is_unknown = largest >= E5M2_F32_INFINITY;
    int code = is_unknown ? UNKNOWN_SCALE : e5m2_min(wanted, LARGEST_SCALE);
    float scale = scale_value(code);
    float inverse = scale_inverse(code, scale);
    float limit = largest_left(wanted, second);
    INDEPENDENT
    for (int i = 0; i < RECORD; ++i)
        bits[i] = element_encode(&v[i], scale, inverse, limit);
    if (is_unknown) {
        UNROLLED
        for (int i = 0; i < RECORD; ++i) {
            v[i] = 0.0f;
            bits[i] = 0;
        }
    }
    INDEPENDENT
    for (int j = 0; j < RECORD / 2; ++j)
        record[j] = (u8)two_elements(bits[j], bits[j + RECORD / 2]);
    record[RECORD_BYTES - 1] = (u8)code;
    UNROLLED
    for (int i = 0; i < RECORD; ++i)
        if (residual && i < count)
            left[i] = v[i];
    return is_unknown;
}

/* The first `count` values of a record, times a factor, added to `out` or in
 * its place.  Returns the code of the scale. */
E5M2_FUNCTION int decode_record(const u8 *record, float factor, f32 *out,
                                int count, int adds)
{
    int code = record[RECORD_BYTES - 1];
    float scale = scale_value(code) * factor;
    u8 bytes[RECORD / 2]; /* or each store might change what is read next */
    UNROLLED
    for (int j = 0; j < RECORD / 2; ++j)
        bytes[j] = record[j];
    UNROLLED
    for (int half = 0; half < 2; ++half) {
        INDEPENDENT
        for (int j = 0; j < RECORD / 2; ++j) {
            int i = half * (RECORD / 2) + j;
            unsigned int bits = (unsigned int)bytes[j] >> 4 * half & 15u;
            float value = (float)((int)(bits ^ 8u) - 8) * scale;
            if (i < count)
                out[i] = RECORD_NAN(adds ? out[i] + value : value);
        }
    }
    return code;
}

#endif
