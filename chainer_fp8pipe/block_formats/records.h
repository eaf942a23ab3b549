/* One record, on the CPU: all of its elements in vectors. */
#ifndef CHAINER_FP8PIPE_RECORDS_H
#define CHAINER_FP8PIPE_RECORDS_H
#include "../fp8/vector.h"
#include "record_elements.h"

/* Writes a record of values, which become what it leaves out (no more than
 * largest_left() allows): 0 where it holds a NaN or an infinity.  Returns
 * whether it does. */
E5M2_FUNCTION int record_encode(float *values, u8 *record, int format)
{
    unsigned int bits[RECORD], fifths = 0;
    int largest = 0, second = 0;
    for (int i = 0; i < RECORD; ++i)
        largest = e5m2_max(largest, e5m2_magnitude(values[i]));
    for (int i = 0; i < RECORD; ++i)
        second = e5m2_max(second, magnitude_below(values[i], largest));
    int code = scale_code(largest, format);
    float scale = scale_value(code, format);
    float inverse = scale_inverse(code, scale);
    float limit = largest_left(code, second);
    INDEPENDENT
    for (int i = 0; i < RECORD; ++i)
        bits[i] = element_encode(&values[i], scale, inverse, limit, format);
    if (code == UNKNOWN_SCALE)
        for (int i = 0; i < RECORD; ++i) {
            values[i] = 0.0f;
            bits[i] = 0;
        }
    INDEPENDENT
    for (int j = 0; j < RECORD / 2; ++j)
        record[j] = (u8)two_elements(bits[j], bits[j + RECORD / 2]);
    if (format == INT5) {
        for (int i = 0; i < RECORD; ++i)
            fifths |= (bits[i] >> 4 & 1u) << i;
        for (int k = 0; k < 4; ++k)
            record[RECORD / 2 + k] = (u8)(fifths >> 8 * k);
    }
    record[record_bytes(format) - 1] = (u8)code;
    return code == UNKNOWN_SCALE;
}

/* The values of a record, times a factor, added to `out` or in its place.
 * Returns whether they are NaN. */
E5M2_FUNCTION int record_decode(const u8 *record, float factor, f32 *out,
                                int adds, int format)
{
    int code = record[record_bytes(format) - 1];
    float scale = scale_value(code, format) * factor;
    unsigned int fifths = 0;
    u8 bytes[RECORD / 2]; /* or each store might change what is read next */
    for (int j = 0; j < RECORD / 2; ++j)
        bytes[j] = record[j];
    if (format == INT5)
        for (int k = 0; k < 4; ++k)
            fifths |= (unsigned int)record[RECORD / 2 + k] << 8 * k;
    for (int half = 0; half < 2; ++half) {
        INDEPENDENT
        for (int j = 0; j < RECORD / 2; ++j) {
            int i = half * (RECORD / 2) + j;
            unsigned int bits = (unsigned int)bytes[j] >> 4 * half & 15u;
            if (format == INT5)
                bits |= (fifths >> i & 1u) << 4;
            float value = element_value(bits, format) * scale;
            out[i] = adds ? out[i] + value : value;
        }
    }
    return code == UNKNOWN_SCALE;
}

#endif
