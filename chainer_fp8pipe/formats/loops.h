/* Loops over contiguous buffers: fp8 codes, floats of 16 and 32 bits, records.
 *
 * A compiler makes vector code of a loop only where the choice (rounding,
 * kind, variant of the processor) is none at run time: so loops are inlined
 * into functions that choose, once for each choice.
 *
 * They work in strips, which stay in the nearest cache, where operations wait
 * for each other.  Infinity and NaN, which are rare, would take a fourth of
 * the time: what is encoded is so first as if there were none.
 */
#ifndef CHAINER_FP8PIPE_LOOPS_H
#define CHAINER_FP8PIPE_LOOPS_H
#include "int4.h"
#include "vector.h"

typedef struct {
    float scale, inverse, epsilon;
    float bound; /* of residuals */
} Ratio;

typedef struct {
    uint64_t clipped, nonfinite;
} Counts;

#define CACHE_LINE 64

/* Elements of a strip of ratios: enough to make little of the beginning and
 * end of a loop. */
#define LONG_STRIP ((size_t)256)

/* Runs a statement for strips of n elements, `length` of them from `i` on.
 * All but the first and last have `most`, which the compiler knows.  The first
 * ends where `floats` reaches a cache line, so that no vector of the others
 * lies across two. */
#define IN_STRIPS(i, length, n, most, floats, statement) \
    for (size_t i = 0, end_; i < (n); i = end_) { \
        end_ = i ? i + (most) : (most) - (uintptr_t)(floats) / 4 % 16; \
        end_ = end_ < (n) ? end_ : (n); \
        if (end_ - i == (most)) { \
            const size_t length = (most); \
            statement; \
        } \
        else { \
            const size_t length = end_ - i; \
            statement; \
        } \
    }

static inline void count(Counts *sum, Counts more)
{
    sum->clipped += more.clipped;
    sum->nonfinite += more.nonfinite;
}

/* Floats to fp8 codes. */
CLONES void encode_codes(const f32 *values, u8 *codes, size_t n, int rounding)
{
    if (rounding == E5M2_NEAREST) {
        INDEPENDENT
        for (size_t i = 0; i < n; ++i)
            codes[i] = (u8)e5m2_encode(values[i], E5M2_NEAREST);
    }
    else {
        INDEPENDENT
        for (size_t i = 0; i < n; ++i)
            codes[i] = (u8)e5m2_encode(values[i], E5M2_TRUNCATE);
    }
}

/* --- fp8 ratios ------------------------------------------------------------ */

/* What is encoded with error feedback: gradients, or sums of ratios, whose
 * mean is turned into gradients. */
enum { GRADIENT, SUM };

/* Encodes values and keeps what their codes leave out, if any is infinite or
 * NaN, or its ratio. */
E5M2_FUNCTION Counts keep_any(const float *values, const f32 *parameter,
                              f32 *left, u8 *codes, size_t n, Ratio q)
{
    uint32_t large = 0, nonfinite = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float ratio = e5m2_ratio(values[i], weight, q.scale);
        unsigned int code = e5m2_encode_ratio(ratio, values[i], E5M2_NEAREST);
        codes[i] = (u8)code;
        left[i] = e5m2_residual(values[i], code, weight, q.inverse, q.bound);
        large += (uint32_t)e5m2_is_large(ratio);
        nonfinite += (uint32_t)e5m2_is_nonfinite(ratio, values[i]);
    }
    return (Counts){large - nonfinite, nonfinite};
}

/* Three short loops take less time than a long one: an element's operations
 * wait for each other, and the more of them a loop has, the fewer elements a
 * processor works on at a time.
 *
 * What is left is infinite or NaN wherever a value or its weight is.  If all
 * of it is finite, no code can be an infinity or NaN; otherwise this begins
 * again.  Codes of 32 bits until the end need fewer registers at a time. */
E5M2_FUNCTION Counts keep(
    int kind, const f32 *source, float factor, const f32 *parameter,
    const f32 *residual, f32 *left, u8 *codes, size_t n, Ratio q)
{
    float values[LONG_STRIP], ratios[LONG_STRIP];
    uint32_t wide[LONG_STRIP], large = 0;
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        /* A NaN may be any: its code, and what is left of it, are the same. */
        values[i] = (kind == GRADIENT ? source[i]
                     : source[i] * factor * q.inverse * weight) + residual[i];
        ratios[i] = e5m2_ratio(values[i], weight, q.scale);
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float rounded;
        large += (uint32_t)e5m2_is_large(ratios[i]);
        wide[i] = e5m2_nearest(ratios[i], &rounded);
        ratios[i] = rounded;
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float rest = values[i] - ratios[i] * q.inverse * weight;
        left[i] = e5m2_kept(rest, q.bound);
        largest = e5m2_max(largest, e5m2_magnitude(rest));
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        codes[i] = (u8)wide[i];
    return largest < E5M2_F32_INFINITY
        ? (Counts){large, 0}
        : keep_any(values, parameter, left, codes, n, q);
}

/* Without error feedback; returns whether all is finite, as codes are right
 * only then, but with `any`. */
E5M2_FUNCTION int encode_plain(const f32 *gradient, const f32 *parameter,
                               u8 *codes, size_t n, Ratio q, int rounding,
                               int any, Counts *found)
{
    uint32_t large = 0, nonfinite = 0;
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float ratio = e5m2_ratio(gradient[i], weight, q.scale);
        codes[i] = (u8)(any ? e5m2_encode_ratio(ratio, gradient[i], rounding)
                            : e5m2_encode_finite(ratio, rounding));
        large += (uint32_t)e5m2_is_large(ratio);
        nonfinite += any ? (uint32_t)e5m2_is_nonfinite(ratio, gradient[i]) : 0;
        largest = e5m2_max(largest, e5m2_magnitude(ratio));
    }
    *found = (Counts){large - nonfinite, nonfinite};
    return largest < E5M2_F32_INFINITY;
}

/* Gradients, or sums times a factor, whose encoding leaves `left`; it adds
 * `residual`, which may be the same memory. */
CLONES static Counts encode_kept(
    int kind, const f32 *source, float factor, const f32 *parameter,
    const f32 *residual, f32 *left, u8 *codes, size_t n, Ratio q)
{
    Counts sum = {0, 0};
#define KEEP(KIND, FLOATS) \
    IN_STRIPS(i, length, n, LONG_STRIP, FLOATS, count(&sum, keep( \
        KIND, source + i, factor, parameter + i, residual + i, left + i, \
        codes + i, length, q)))
    if (kind == GRADIENT)
        KEEP(GRADIENT, parameter)
    else /* they come a few strips at a time */
        KEEP(SUM, NULL)
#undef KEEP
    return sum;
}

CLONES static Counts encode_ratios(const f32 *gradient, const f32 *parameter,
                                   u8 *codes, size_t n, Ratio q, int rounding)
{
    Counts sum = {0, 0}, found;
#define PLAIN(ROUNDING, ANY) \
    encode_plain(gradient + i, parameter + i, codes + i, length, q, \
                 ROUNDING, ANY, &found)
#define STRIPS(ROUNDING) \
    IN_STRIPS(i, length, n, 4 * LONG_STRIP, parameter, ( \
        (void)(PLAIN(ROUNDING, 0) || PLAIN(ROUNDING, 1)), count(&sum, found)))
    if (rounding == E5M2_NEAREST)
        STRIPS(E5M2_NEAREST)
    else
        STRIPS(E5M2_TRUNCATE)
#undef PLAIN
#undef STRIPS
    return sum;
}

/* Sums of ratios to means of gradients, in place. */
CLONES static void decode_sums(f32 *ratios, float factor,
                               const f32 *parameter, size_t n, Ratio q)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        ratios[i] = e5m2_from_ratio(
            ratios[i] * factor, e5m2_weight(parameter[i], q.epsilon),
            q.inverse);
}

/* The bits of the largest ratio, and of the largest gradient, of what is
 * finite; of ratios that overflow, infinity. */
CLONES void largest_ratio(const f32 *gradient, const f32 *parameter,
                          size_t n, float epsilon, int found[2])
{
    int ratios = 0, sizes = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        int size = e5m2_finite_size(gradient[i]);
        ratios = e5m2_max(ratios, e5m2_ratio_size(
            gradient[i], e5m2_weight(parameter[i], epsilon), size));
        sizes = e5m2_max(sizes, size);
    }
    found[0] = ratios;
    found[1] = sizes;
}

/* --- wires of codes and of 16 bits ------------------------------------------ */

/* Values times a number; returns the largest magnitude. */
E5M2_FUNCTION int scale_strip(const f32 *values, float number, f32 *out,
                              size_t n)
{
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        out[i] = e5m2_one_nan(values[i] * number);
        largest = e5m2_max(largest, e5m2_magnitude(out[i]));
    }
    return largest;
}

E5M2_FUNCTION void accumulate_strip(const float *values, float scale,
                                    f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] = e5m2_one_nan(total[i] + values[i] * scale);
}

/* Returns how many results are infinite or NaN, of which there are few;
 * raises *in_wire to the bits of the largest ratio. */
E5M2_FUNCTION uint32_t ratio_decode_strip(const float *ratios,
                                          const f32 *parameter, f32 *out,
                                          size_t n, Ratio q, int *in_wire)
{
    uint32_t nonfinite = 0;
    int largest = 0, wire = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float x = e5m2_from_ratio(ratios[i], weight, q.inverse);
        out[i] = x;
        largest = e5m2_max(largest, e5m2_magnitude(x));
        wire = e5m2_max(wire, e5m2_magnitude(ratios[i]));
    }
    *in_wire = e5m2_max(*in_wire, wire);
    for (size_t i = 0; largest >= E5M2_F32_INFINITY && i < n; ++i)
        nonfinite += !e5m2_is_finite(out[i]);
    return nonfinite;
}

/* A wire's values, times a power of two, added to sums. */
#define ACCUMULATE_LOOP(V, KIND, TYPE) \
    IN_##V static inline void accumulate_##KIND##_##V( \
        const TYPE *wire, float scale, f32 *total, size_t n) \
    { \
        float strip[STRIP]; \
        IN_STRIPS(i, length, n, STRIP, NULL, ( \
            read_##KIND##_##V(wire + i, strip, length), \
            accumulate_strip(strip, scale, total + i, length))) \
    }

/* A wire's values; and floats times a number to a wire.  Both return whether
 * all of them are finite. */
#define LOOPS_16(V, KIND, OVERFLOWS) \
    ACCUMULATE_LOOP(V, KIND, u16) \
    IN_##V static inline int decode_##KIND##_##V(const u16 *wire, f32 *out, \
                                                 size_t n) \
    { \
        float strip[STRIP]; \
        int largest = 0; \
        IN_STRIPS(i, length, n, STRIP, NULL, ( \
            read_##KIND##_##V(wire + i, strip, length), \
            largest = e5m2_max(largest, scale_strip( \
                strip, 1.0f, out + i, length)))) \
        return largest < E5M2_F32_INFINITY; \
    } \
    IN_##V static inline int encode_##KIND##_##V( \
        const f32 *values, float number, u16 *wire, size_t n) \
    { \
        float strip[STRIP] = {0}; \
        int largest = 0; \
        IN_STRIPS(i, length, n, STRIP, NULL, ( \
            largest = e5m2_max(largest, scale_strip( \
                values + i, number, strip, length)), \
            write_##KIND##_##V(strip, wire + i, length))) \
        return largest < (OVERFLOWS); \
    }

#define CONVERTING_LOOPS(V) \
    ACCUMULATE_LOOP(V, codes, u8) \
    IN_##V static inline uint64_t decode_ratios_##V( \
        const u8 *codes, const f32 *parameter, f32 *out, size_t n, Ratio q, \
        int *in_wire) \
    { \
        uint64_t nonfinite = 0; \
        float strip[STRIP]; \
        IN_STRIPS(i, length, n, STRIP, NULL, ( \
            read_codes_##V(codes + i, strip, length), \
            nonfinite += ratio_decode_strip(strip, parameter + i, out + i, \
                                            length, q, in_wire))) \
        return nonfinite; \
    } \
    LOOPS_16(V, halves, HALF_OVERFLOWS) \
    LOOPS_16(V, bfloats, BFLOAT_OVERFLOWS)
VARIANTS(CONVERTING_LOOPS)

/* --- floats ---------------------------------------------------------------- */

/* Returns whether all of `out` is finite. */
CLONES static int scale_floats(const f32 *values, float scale, f32 *out,
                               size_t n)
{
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        out[i] = values[i] * scale;
        largest = e5m2_max(largest, e5m2_magnitude(out[i]));
    }
    return largest < E5M2_F32_INFINITY;
}

CLONES static int all_finite_floats(const f32 *values, size_t n)
{
    int largest = 0;
    for (size_t i = 0; i < n; ++i)
        largest = e5m2_max(largest, e5m2_magnitude(values[i]));
    return largest < E5M2_F32_INFINITY;
}

CLONES static void add_floats(const f32 *values, f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] += values[i];
}

/* --- records --------------------------------------------------------------- */

/* These two are over whole records. */
CLONES static int encode_whole(const f32 *values, float factor,
                               const f32 *residual, f32 *left, u8 *wire,
                               size_t n)
{
    int nonfinite = 0;
    if (residual)
        for (size_t r = 0; r < n; ++r)
            nonfinite |= encode_record(
                values + r * RECORD, factor, residual + r * RECORD,
                left + r * RECORD, wire + r * RECORD_BYTES, RECORD);
    else
        for (size_t r = 0; r < n; ++r)
            nonfinite |= encode_record(
                values + r * RECORD, factor, NULL, NULL,
                wire + r * RECORD_BYTES, RECORD);
    return nonfinite;
}

CLONES static int decode_whole(const u8 *wire, float factor, f32 *out,
                               size_t n, int adds)
{
    int largest = 0;
    if (adds)
        for (size_t r = 0; r < n; ++r)
            largest = e5m2_max(largest, decode_record(
                wire + r * RECORD_BYTES, factor, out + r * RECORD, RECORD, 1));
    else
        for (size_t r = 0; r < n; ++r)
            largest = e5m2_max(largest, decode_record(
                wire + r * RECORD_BYTES, factor, out + r * RECORD, RECORD, 0));
    return largest;
}

/* n elements, to as many records as they need; `residual` may be NULL.
 * Returns whether all of them are finite. */
static int encode_records(const f32 *values, float factor,
                          const f32 *residual, f32 *left, u8 *wire, size_t n)
{
    const size_t whole = n / RECORD, at = whole * RECORD;
    int nonfinite = encode_whole(values, factor, residual, left, wire, whole);
    if (n > at)
        nonfinite |= encode_record(
            values + at, factor, residual ? residual + at : NULL,
            residual ? left + at : NULL, wire + whole * RECORD_BYTES,
            (int)(n - at));
    return !nonfinite;
}

/* n elements, out of as many records as they need.  Returns the code of the
 * largest scale, UNKNOWN_SCALE if a record is not finite. */
static int decode_records(const u8 *wire, float factor, f32 *out, size_t n,
                          int adds)
{
    const size_t whole = n / RECORD, at = whole * RECORD;
    int largest = decode_whole(wire, factor, out, whole, adds);
    return n == at ? largest : e5m2_max(largest, decode_record(
        wire + whole * RECORD_BYTES, factor, out + at, (int)(n - at), adds));
}

#endif
