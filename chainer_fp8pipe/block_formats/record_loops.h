/* Loops over records, in plain C: the compiler makes vector code of them, for
 * each generation of x86-64 (loops.h).
 *
 * The last record of a tensor may have fewer elements; the others are zeros.
 */
#ifndef CHAINER_FP8PIPE_RECORD_LOOPS_H
#define CHAINER_FP8PIPE_RECORD_LOOPS_H
#include <string.h>

#include "records.h"

/* Values times a factor, and what the last encoding has left out unless
 * `residual` is NULL, which is overwritten.  All return how many records hold
 * a NaN or an infinity. */
E5M2_FUNCTION uint64_t encode_whole_records(const f32 *values, float factor,
                                            f32 *residual, u8 *wire,
                                            size_t records, int format)
{
    uint64_t nonfinite = 0;
    for (size_t r = 0; r < records; ++r) {
        float v[RECORD];
        INDEPENDENT
        for (int i = 0; i < RECORD; ++i)
            v[i] = residual ? values[i] * factor + residual[i]
                            : values[i] * factor;
        nonfinite += (uint64_t)record_encode(v, wire, format);
        if (residual) {
            memcpy(residual, v, sizeof v);
            residual += RECORD;
        }
        values += RECORD;
        wire += record_bytes(format);
    }
    return nonfinite;
}

E5M2_FUNCTION uint64_t decode_whole_records(const u8 *wire, float factor,
                                            f32 *out, size_t records,
                                            int adds, int format)
{
    uint64_t nonfinite = 0;
    for (size_t r = 0; r < records; ++r)
        nonfinite += (uint64_t)record_decode(
            wire + r * (size_t)record_bytes(format), factor, out + r * RECORD,
            adds, format);
    return nonfinite;
}

#define RECORD_LOOPS(FORMAT) \
    CLONES static uint64_t encode_alone_##FORMAT( \
        const f32 *values, float factor, f32 *residual, u8 *wire, size_t n) \
    { \
        (void)residual; \
        return encode_whole_records(values, factor, NULL, wire, n, FORMAT); \
    } \
    CLONES static uint64_t encode_feedback_##FORMAT( \
        const f32 *values, float factor, f32 *residual, u8 *wire, size_t n) \
    { \
        return encode_whole_records(values, factor, residual, wire, n, \
                                    FORMAT); \
    } \
    CLONES static uint64_t decode_##FORMAT(const u8 *wire, float factor, \
                                           f32 *out, size_t n) \
    { \
        return decode_whole_records(wire, factor, out, n, 0, FORMAT); \
    } \
    CLONES static uint64_t accumulate_##FORMAT(const u8 *wire, float factor, \
                                               f32 *out, size_t n) \
    { \
        return decode_whole_records(wire, factor, out, n, 1, FORMAT); \
    }

RECORD_LOOPS(INT4)
RECORD_LOOPS(E2M1)
RECORD_LOOPS(INT5)

#define BY_FORMAT(LOOP, format) \
    ((format) == INT4 ? LOOP##_INT4 : (format) == E2M1 ? LOOP##_E2M1 \
                                                       : LOOP##_INT5)

/* n elements, to as many records as they need. */
static uint64_t encode_records(const f32 *values, float factor, f32 *residual,
                               u8 *wire, size_t n, int format)
{
    size_t whole = n / RECORD, rest = n % RECORD;
    uint64_t (*loop)(const f32 *, float, f32 *, u8 *, size_t) = residual
        ? BY_FORMAT(encode_feedback, format) : BY_FORMAT(encode_alone, format);
    uint64_t nonfinite = loop(values, factor, residual, wire, whole);
    if (rest) {
        float v[RECORD] = {0}, left[RECORD] = {0};
        memcpy(v, values + whole * RECORD, rest * sizeof *v);
        if (residual)
            memcpy(left, residual + whole * RECORD, rest * sizeof *v);
        nonfinite += loop(v, factor, left,
                          wire + whole * (size_t)record_bytes(format), 1);
        if (residual)
            memcpy(residual + whole * RECORD, left, rest * sizeof *v);
    }
    return nonfinite;
}

/* n elements, out of as many records as they need. */
static uint64_t decode_records(const u8 *wire, float factor, f32 *out,
                               size_t n, int adds, int format)
{
    size_t whole = n / RECORD, rest = n % RECORD;
    uint64_t (*loop)(const u8 *, float, f32 *, size_t) = adds
        ? BY_FORMAT(accumulate, format) : BY_FORMAT(decode, format);
    uint64_t nonfinite = loop(wire, factor, out, whole);
    if (rest) {
        float v[RECORD];
        memcpy(v, out + whole * RECORD, rest * sizeof *v);
        nonfinite += loop(wire + whole * (size_t)record_bytes(format), factor,
                          v, 1);
        memcpy(out + whole * RECORD, v, rest * sizeof *v);
    }
    return nonfinite;
}

#endif
