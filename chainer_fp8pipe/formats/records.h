/* The formats of records: 32 elements of a few bits each, and one scale of 8
 * bits.
 *
 * INT4: -7..7 times a scale with 6 bits of exponent and 2 of mantissa, which
 *     is rounded up, so that nothing is clipped.  Byte j holds element j, and
 *     in its upper half element j + 16, as two's complements; byte 16 is the
 *     scale.
 * E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, times a power of two, so that
 *     what lies above 6 is clipped (the MX formats of the Open Compute
 *     Project, version 1.0, section 6.3).  The same places.
 * INT5: -15..15, with INT4's scale.  Four bits as above; then the fifth bits
 *     of all elements as a little-endian word; byte 20 is the scale.
 *
 * Scale 0: all elements are zeros.  Scale 255: an element was NaN or infinite,
 * or too large for all other scales, and all of them are NaN.  A record of
 * zero bytes is one of zeros, and every record stands alone, so that a wire
 * may be cut between any two.
 *
 * The C compiler includes this for the CPU's loops, and the GPU's kernels begin
 * with it.  No a * b + c may be contracted (-ffp-contract=off, --fmad=false):
 * all processors are to give the same bits.
 */
#ifndef CHAINER_FP8PIPE_RECORDS_H
#define CHAINER_FP8PIPE_RECORDS_H
#ifndef CHAINER_FP8PIPE_E5M2_H /* a GPU's kernels have it before this text */
#include "e5m2.h"
#endif

enum { INT4, E2M1, INT5 };

/* A GPU's NaNs have another payload. */
#ifdef __CUDACC__
#define RECORD_NAN(x) e5m2_one_nan(x)
#else
#define RECORD_NAN(x) (x)
#endif

#define RECORD 32 /* elements */
#define UNKNOWN_SCALE 255
/* Added to a small number, this leaves the next integer, ties to even, in the
 * lower bits. */
#define TO_INTEGER 12582912.0f /* 1.5 2^23 */
/* The bits of 2^-49, without the mantissa's 21 lower ones. */
#define LEAST_E6M2 ((127 - 49) << 2)
/* As many powers of two lie between E2M1's 1 and 4, whose exponent is the
 * largest. */
#define E2M1_EXPONENTS 2

E5M2_FUNCTION int record_bytes(int format)
{
    return format == INT5 ? 21 : 17;
}

E5M2_FUNCTION int top_of(int format)
{
    return format == INT5 ? 15 : format == E2M1 ? 6 : 7;
}

/* The scale of a record by the bits of its largest magnitude. */
E5M2_FUNCTION int scale_code(int largest, int format)
{
    int code;
    if (format == E2M1)
        code = (largest >> 23) - E2M1_EXPONENTS;
    else
        code = (int)((e5m2_bits(e5m2_float((unsigned int)largest)
                                * (1.0f / (float)top_of(format)))
                      + 0x1FFFFF) >> 21) - LEAST_E6M2;
    code = e5m2_min(e5m2_max(code, 0), UNKNOWN_SCALE);
    return largest >= E5M2_F32_INFINITY ? UNKNOWN_SCALE : code;
}

E5M2_FUNCTION float scale_value(int code, int format)
{
    unsigned int bits = format == E2M1
        ? (unsigned int)code << 23
        : (unsigned int)(code + LEAST_E6M2) << 21;
    float scale = code > 0 ? e5m2_float(bits) : 0.0f;
    return code == UNKNOWN_SCALE ? e5m2_float(E5M2_F32_NAN) : scale;
}

/* An element's bits, and its value over the scale in *units. */
E5M2_FUNCTION unsigned int element_bits(float ratio, float *units, int format)
{
    float top = (float)top_of(format);
    ratio = ratio > top ? top : ratio;
    ratio = ratio < -top ? -top : ratio;
    if (format != E2M1) {
        ratio += TO_INTEGER;
        *units = ratio - TO_INTEGER;
        return e5m2_bits(ratio);
    }
    unsigned int sign = e5m2_bits(ratio) & E5M2_F32_SIGN;
    float magnitude = e5m2_float((unsigned int)e5m2_magnitude(ratio));
    /* The power of two below it, 1 or more, decides the distance between
     * neighbours; so far up, floats are as far from each other. */
    int power = e5m2_max(e5m2_magnitude(ratio) & E5M2_F32_INFINITY,
                         127 << 23);
    float far = e5m2_float((unsigned int)power + (22u << 23));
    float sum = magnitude + far;
    *units = e5m2_float(e5m2_bits(sum - far) | sign);
    return ((e5m2_bits(sum) + (unsigned int)(power >> 22) - 254u) & 7u)
           | sign >> 28;
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
 * the bits of the largest magnitude but one. */
E5M2_FUNCTION float largest_left(int code, int second)
{
    return e5m2_float(code > 0 && second > 0
                          ? (unsigned int)second
                          : (unsigned int)E5M2_F32_INFINITY);
}

/* An element's bits, of a value that becomes what they leave out. */
E5M2_FUNCTION unsigned int element_encode(float *value, float scale,
                                          float inverse, float limit,
                                          int format)
{
    float units;
    unsigned int bits = element_bits(*value * inverse, &units, format);
    *value = e5m2_limited(*value - units * scale, limit);
    return bits;
}

/* The byte of elements j and j + 16. */
E5M2_FUNCTION unsigned int two_elements(unsigned int low, unsigned int high)
{
    return (low & 15u) | (high & 15u) << 4;
}

/* The value over the scale of an element's bits. */
E5M2_FUNCTION float element_value(unsigned int bits, int format)
{
    if (format == INT5)
        return (float)((int)(bits ^ 16u) - 16);
    if (format == INT4)
        return (float)((int)(bits ^ 8u) - 8);
    unsigned int magnitude = bits & 7u;
    unsigned int value = magnitude < 2 ? magnitude * 0x3F000000u
                                       : (magnitude + 252u) << 22;
    return e5m2_float(value | (bits & 8u) << 28);
}

/* Writes a record of `count` values times a factor (RECORD of them, or the
 * fewer of a tensor's last record) and of what the last encoding has left
 * out, unless `residual` is NULL; that becomes what this one leaves out (no
 * more than largest_left() allows), 0 where the record holds a NaN or an
 * infinity.  Returns whether it does. */
E5M2_FUNCTION int encode_record(const f32 *values, float factor,
                                f32 *residual, u8 *record, int count,
                                int format)
{
    float v[RECORD];
    unsigned int bits[RECORD], fifths = 0;
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
    int code = scale_code(largest, format);
    float scale = scale_value(code, format);
    float inverse = scale_inverse(code, scale);
    float limit = largest_left(code, second);
    INDEPENDENT
    for (int i = 0; i < RECORD; ++i)
        bits[i] = element_encode(&v[i], scale, inverse, limit, format);
    if (code == UNKNOWN_SCALE) {
        UNROLLED
        for (int i = 0; i < RECORD; ++i) {
            v[i] = 0.0f;
            bits[i] = 0;
        }
    }
    INDEPENDENT
    for (int j = 0; j < RECORD / 2; ++j)
        record[j] = (u8)two_elements(bits[j], bits[j + RECORD / 2]);
    if (format == INT5) {
        UNROLLED
        for (int i = 0; i < RECORD; ++i)
            fifths |= (bits[i] >> 4 & 1u) << i;
        for (int k = 0; k < 4; ++k)
            record[RECORD / 2 + k] = (u8)(fifths >> 8 * k);
    }
    record[record_bytes(format) - 1] = (u8)code;
    UNROLLED
    for (int i = 0; i < RECORD; ++i)
        if (residual && i < count)
            residual[i] = v[i];
    return code == UNKNOWN_SCALE;
}

/* The first `count` values of a record, times a factor, added to `out` or in
 * its place.  Returns whether they are NaN. */
E5M2_FUNCTION int decode_record(const u8 *record, float factor, f32 *out,
                                int count, int adds, int format)
{
    int code = record[record_bytes(format) - 1];
    float scale = scale_value(code, format) * factor;
    unsigned int fifths = 0;
    u8 bytes[RECORD / 2]; /* or each store might change what is read next */
    UNROLLED
    for (int j = 0; j < RECORD / 2; ++j)
        bytes[j] = record[j];
    if (format == INT5)
        for (int k = 0; k < 4; ++k)
            fifths |= (unsigned int)record[RECORD / 2 + k] << 8 * k;
    UNROLLED
    for (int half = 0; half < 2; ++half) {
        INDEPENDENT
        for (int j = 0; j < RECORD / 2; ++j) {
            int i = half * (RECORD / 2) + j;
            unsigned int bits = (unsigned int)bytes[j] >> 4 * half & 15u;
            if (format == INT5)
                bits |= (fifths >> i & 1u) << 4;
            float value = element_value(bits, format) * scale;
            if (i < count)
                out[i] = RECORD_NAN(adds ? out[i] + value : value);
        }
    }
    return code == UNKNOWN_SCALE;
}

#endif
