/* Loops over contiguous buffers: fp8 codes, floats of 16 and 32 bits, records.
 *
 * Each function at the end of its part takes a buffer of any length.  Before
 * it come the loops that it runs, in plain C, one for each constant (rounding,
 * kind, variant of the processor) by macro: a compiler makes vector code of a
 * loop only where the choice is none at run time.
 *
 * A buffer is worked on in chunks of 2^16 elements, so that 32 bits are enough
 * to count and a loop that has to begin again finds its input in a cache; and,
 * where a loop's operations wait for each other, in strips of 128 or 256 that
 * stay in the nearest one.  Infinity and NaN are rare, and handling them takes
 * a fourth of the time: most loops first assume there are none, which they
 * find out on the way, or before if they may overwrite their input.
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

#define CHUNK ((size_t)1 << 16)
#define CACHE_LINE 64

/* Length of the chunk at `start` of n elements.  The first one ends where
 * `floats` reaches a cache line, so that no vector of the others lies across
 * two. */
static inline size_t chunk_length(size_t start, size_t n, const f32 *floats)
{
    size_t length = CHUNK;
    if (start == 0 && (uintptr_t)floats % CACHE_LINE != 0)
        length = (CACHE_LINE - (uintptr_t)floats % CACHE_LINE + 3) / 4;
    return length < n - start ? length : n - start;
}

#define FOR_EACH_CHUNK(start, length, n, floats) \
    for (size_t start = 0, length; \
         start < (n) && (length = chunk_length(start, (n), (floats)), 1); \
         start += length)

/* One of two loops by the number of the rounding. */
#define BY_ROUNDING(LOOP, rounding) \
    ((rounding) == E5M2_NEAREST ? LOOP##_nearest : LOOP##_truncate)

#define FOR_EACH_ROUNDING(LOOP) \
    LOOP(nearest, E5M2_NEAREST) \
    LOOP(truncate, E5M2_TRUNCATE)

static void count(Counts *sum, Counts more)
{
    sum->clipped += more.clipped;
    sum->nonfinite += more.nonfinite;
}

/* --- fp8 from floats, and sums of two codes ------------------------------ */

CLONES static int all_finite(const u8 *codes, size_t n)
{
    u8 found = 0;
    for (size_t i = 0; i < n; ++i)
        found |= !e5m2_is_finite_code(codes[i]);
    return !found;
}

#define CODE_LOOPS(NAME, ROUNDING) \
    CLONES static void encode_##NAME(const f32 *values, u8 *codes, size_t n) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            codes[i] = (u8)e5m2_encode(values[i], ROUNDING); \
    } \
    CLONES static void add_finite_##NAME(const u8 *a, u8 *sum, size_t n) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            sum[i] = (u8)e5m2_add_finite(a[i], sum[i], ROUNDING); \
    } \
    CLONES static void add_any_##NAME(const u8 *a, u8 *sum, size_t n) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            sum[i] = (u8)e5m2_add(a[i], sum[i], ROUNDING); \
    }

FOR_EACH_ROUNDING(CODE_LOOPS)

static inline void encode_codes(const f32 *values, u8 *codes, size_t n,
                                int rounding)
{
    BY_ROUNDING(encode, rounding)(values, codes, n);
}

static inline void add_codes(const u8 *a, u8 *sum, size_t n, int rounding)
{
    FOR_EACH_CHUNK(start, length, n, NULL)
        (all_finite(a + start, length) && all_finite(sum + start, length)
             ? BY_ROUNDING(add_finite, rounding)
             : BY_ROUNDING(add_any, rounding))(a + start, sum + start,
                                               length);
}

/* --- fp8 ratios with error feedback --------------------------------------- */

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
E5M2_FUNCTION Counts keep_any(const float *values, const f32 *parameter,
                              f32 *residual, u8 *codes, size_t n, Ratio q)
{
    uint32_t large = 0, nonfinite = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float ratio = e5m2_ratio(values[i], weight, q.scale);
        unsigned int code = e5m2_encode_ratio(ratio, values[i], E5M2_NEAREST);
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
    int kind, const f32 *source, float number, const f32 *parameter,
    f32 *residual, u8 *codes, size_t n, Ratio q)
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
        wide[i] = e5m2_nearest(ratios[i], &rounded);
        ratios[i] = rounded;
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float left = values[i] - ratios[i] * q.inverse * weight;
        residual[i] = e5m2_kept(left, q.bound);
        largest = e5m2_max(largest, e5m2_magnitude(left));
    }
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        codes[i] = (u8)wide[i];
    return largest < E5M2_F32_INFINITY
        ? (Counts){large, 0}
        : keep_any(values, parameter, residual, codes, n, q);
}

/* Over strips of a length that the compiler knows, and the rest. */
#define FEEDBACK_LOOP(NAME, KIND) \
    CLONES static Counts NAME( \
        const f32 *source, float number, const f32 *parameter, \
        f32 *residual, u8 *codes, size_t n, Ratio q) \
    { \
        Counts sum = {0, 0}; \
        size_t i = 0; \
        for (; n - i >= FEEDBACK_STRIP; i += FEEDBACK_STRIP) \
            count(&sum, feedback_strip( \
                KIND, source + i, number, parameter + i, residual + i, \
                codes + i, FEEDBACK_STRIP, q)); \
        count(&sum, feedback_strip( \
            KIND, source + i, number, parameter + i, residual + i, \
            codes + i, n - i, q)); \
        return sum; \
    }
FEEDBACK_LOOP(ratio_feedback, GRADIENT)
FEEDBACK_LOOP(ratio_mean, MEAN)
FEEDBACK_LOOP(ratio_mean_times, MEAN_TIMES)

#define RATIO_ENCODE_LOOP(NAME, ROUNDING) \
    CLONES static Counts ratio_encode_##NAME( \
        const f32 *gradient, const f32 *parameter, u8 *codes, size_t n, \
        Ratio q) \
    { \
        uint32_t large = 0, nonfinite = 0; \
        int largest = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float ratio = e5m2_ratio(gradient[i], weight, q.scale); \
            codes[i] = (u8)e5m2_encode_finite(ratio, ROUNDING); \
            large += (uint32_t)e5m2_is_large(ratio); \
            largest = e5m2_max(largest, e5m2_magnitude(ratio)); \
        } \
        if (largest < E5M2_F32_INFINITY) \
            return (Counts){large, 0}; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float ratio = e5m2_ratio(gradient[i], weight, q.scale); \
            codes[i] = (u8)e5m2_encode_ratio(ratio, gradient[i], ROUNDING); \
            nonfinite += (uint32_t)e5m2_is_nonfinite(ratio, gradient[i]); \
        } \
        return (Counts){large - nonfinite, nonfinite}; \
    }
FOR_EACH_ROUNDING(RATIO_ENCODE_LOOP)

/* Without error feedback if `residual` is NULL; with it, to the nearest. */
static inline Counts encode_ratios(const f32 *gradient, const f32 *parameter,
                                   f32 *residual, u8 *codes, size_t n,
                                   Ratio q, int rounding)
{
    Counts sum = {0, 0};
    FOR_EACH_CHUNK(start, length, n, gradient)
        count(&sum, residual == NULL
            ? BY_ROUNDING(ratio_encode, rounding)(
                  gradient + start, parameter + start, codes + start, length,
                  q)
            : ratio_feedback(gradient + start, 1, parameter + start,
                             residual + start, codes + start, length, q));
    return sum;
}

/* Sums of ratios: their mean is turned into a gradient, and encoded like one,
 * with error feedback, in one go; the bits are those of the separate steps. */
static inline Counts encode_ratio_means(
    const f32 *total, float ranks, const f32 *parameter, f32 *residual,
    u8 *codes, size_t n, Ratio q)
{
    Counts sum = {0, 0};
    /* From the start, wherever the parameter lies: sums come a few strips at a
     * time, and a chunk up to the next cache line would cost as much as one. */
    FOR_EACH_CHUNK(start, length, n, NULL)
        count(&sum, is_power_of_two(ranks) /* the same bits, no division */
            ? ratio_mean_times(total + start, 1 / ranks, parameter + start,
                               residual + start, codes + start, length, q)
            : ratio_mean(total + start, ranks, parameter + start,
                         residual + start, codes + start, length, q));
    return sum;
}

/* The bits of the largest ratio, and of the largest gradient, of what is
 * finite; of ratios that overflow, infinity. */
CLONES static inline void largest_ratio(
    const f32 *gradient, const f32 *parameter, size_t n, float epsilon,
    int found[2])
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

/* --- wires to floats -------------------------------------------------------- */

/* Returns the largest magnitude. */
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

E5M2_FUNCTION void accumulate_strip(const float *values, float scale,
                                    f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] = e5m2_one_nan(total[i] + values[i] * scale);
}

/* Their values; returns whether all of them are finite.  Converted by the
 * processor, a NaN might keep its payload. */
#define DECODE_LOOP(V, KIND, TYPE) \
    IN_##V static inline int decode_##KIND##_##V(const TYPE *wire, f32 *out, \
                                                 size_t n) \
    { \
        float strip[STRIP]; \
        TYPE last[STRIP] = {0}; \
        int all = 0; \
        for (; n >= STRIP; n -= STRIP, wire += STRIP, out += STRIP) { \
            widen_##KIND##_##V(wire, strip); \
            int largest = copy_strip(strip, out, STRIP); \
            if (largest > E5M2_F32_INFINITY) { \
                widen_##KIND##_any(wire, strip); \
                copy_strip(strip, out, STRIP); \
            } \
            all = e5m2_max(all, largest); \
        } \
        memcpy(last, wire, n * sizeof *wire); \
        widen_##KIND##_any(last, strip); \
        return e5m2_max(all, copy_strip(strip, out, n)) \
               < E5M2_F32_INFINITY; \
    }

/* Adds their values, times a power of two, to sums. */
#define ACCUMULATE_LOOP(V, KIND, TYPE) \
    IN_##V static inline void accumulate_##KIND##_##V( \
        const TYPE *wire, float scale, f32 *total, size_t n) \
    { \
        float strip[STRIP]; \
        TYPE last[STRIP] = {0}; \
        for (; n >= STRIP; n -= STRIP, wire += STRIP, total += STRIP) { \
            widen_##KIND##_##V(wire, strip); \
            accumulate_strip(strip, scale, total, STRIP); \
        } \
        memcpy(last, wire, n * sizeof *wire); \
        widen_##KIND##_##V(last, strip); \
        accumulate_strip(strip, scale, total, n); \
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

#define RATIO_DECODE_LOOP(V) \
    IN_##V static inline uint64_t decode_ratios_##V( \
        const u8 *codes, const f32 *parameter, f32 *out, size_t n, Ratio q, \
        int *in_wire) \
    { \
        uint64_t nonfinite = 0; \
        float values[STRIP]; \
        u8 last[STRIP] = {0}; \
        for (; n >= STRIP; n -= STRIP, codes += STRIP, parameter += STRIP, \
                           out += STRIP) { \
            widen_codes_##V(codes, values); \
            nonfinite += ratio_decode_strip(values, parameter, out, STRIP, \
                                            q, in_wire); \
        } \
        memcpy(last, codes, n); \
        widen_codes_##V(last, values); \
        return nonfinite \
               + ratio_decode_strip(values, parameter, out, n, q, in_wire); \
    }

/* --- floats to 16 bits, and sums of two wires ------------------------------- */

enum { TIMES, OVER };

/* Values times or over a number; returns the largest magnitude of a strip. */
E5M2_FUNCTION int scale_strip(const f32 *values, int operation, float number,
                              f32 *out, size_t n)
{
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        out[i] = operation == TIMES ? values[i] * number : values[i] / number;
        largest = e5m2_max(largest, e5m2_magnitude(out[i]));
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

/* A strip in 16 bits; where it has a NaN, of that the processor might keep
 * the payload. */
#define NARROW_STRIP(V, KIND, strip, largest, wire) \
    ((largest) > E5M2_F32_INFINITY ? narrow_##KIND##_any((strip), (wire)) \
                                   : narrow_##KIND##_##V((strip), (wire)))

/* Returns whether all of the wire is finite. */
#define ENCODE_16_LOOP(V, KIND, NAME, OPERATION, OVERFLOWS) \
    IN_##V static inline int NAME##_##KIND##_##V( \
        const f32 *values, float number, u16 *wire, size_t n) \
    { \
        float strip[STRIP] = {0}; \
        u16 last[STRIP]; \
        int largest, all = 0; \
        for (; n >= STRIP; n -= STRIP, values += STRIP, wire += STRIP) { \
            largest = scale_strip(values, OPERATION, number, strip, STRIP); \
            NARROW_STRIP(V, KIND, strip, largest, wire); \
            all = e5m2_max(all, largest); \
        } \
        largest = scale_strip(values, OPERATION, number, strip, n); \
        NARROW_STRIP(V, KIND, strip, largest, last); \
        memcpy(wire, last, n * sizeof *wire); \
        return e5m2_max(all, largest) < OVERFLOWS; \
    }

#define ADD_16_LOOP(V, KIND) \
    IN_##V static inline void add_##KIND##_##V(const u16 *wire, u16 *total, \
                                               size_t n) \
    { \
        float a[STRIP], b[STRIP]; \
        u16 last[2][STRIP] = {{0}}; \
        for (; n >= STRIP; n -= STRIP, wire += STRIP, total += STRIP) { \
            widen_##KIND##_##V(wire, a); \
            widen_##KIND##_##V(total, b); \
            int largest = add_strips(a, b); \
            NARROW_STRIP(V, KIND, b, largest, total); \
        } \
        memcpy(last[0], wire, n * sizeof *wire); \
        memcpy(last[1], total, n * sizeof *wire); \
        widen_##KIND##_##V(last[0], a); \
        widen_##KIND##_##V(last[1], b); \
        int largest = add_strips(a, b); \
        NARROW_STRIP(V, KIND, b, largest, last[1]); \
        memcpy(total, last[1], n * sizeof *wire); \
    }

#define LOOPS_16(V, KIND, OVERFLOWS) \
    DECODE_LOOP(V, KIND, u16) \
    ACCUMULATE_LOOP(V, KIND, u16) \
    ENCODE_16_LOOP(V, KIND, times, TIMES, OVERFLOWS) \
    ENCODE_16_LOOP(V, KIND, over, OVER, OVERFLOWS) \
    ADD_16_LOOP(V, KIND)
#define CONVERTING_LOOPS(V) \
    DECODE_LOOP(V, codes, u8) \
    ACCUMULATE_LOOP(V, codes, u8) \
    RATIO_DECODE_LOOP(V) \
    LOOPS_16(V, halves, HALF_OVERFLOWS) \
    LOOPS_16(V, bfloats, BFLOAT_OVERFLOWS)
VARIANTS(CONVERTING_LOOPS)

static inline void decode_codes(const u8 *codes, f32 *out, size_t n)
{
    CHOOSE(decode_codes)(codes, out, n);
}

static inline void accumulate_codes(const u8 *codes, f32 *total, size_t n)
{
    CHOOSE(accumulate_codes)(codes, 1.0f, total, n);
}

static inline uint64_t decode_ratios(const u8 *codes, const f32 *parameter,
                                     f32 *out, size_t n, Ratio q,
                                     int *largest)
{
    return CHOOSE(decode_ratios)(codes, parameter, out, n, q, largest);
}

/* Of halves and bfloats: their values (whether all are finite), their values
 * times a power of two added to sums, floats times that (whether all of the
 * wire is finite), means of sums, and sums of two wires. */
#define FUNCTIONS_16(KIND) \
    static inline int decode_##KIND(const u16 *wire, f32 *out, size_t n) \
    { \
        return CHOOSE(decode_##KIND)(wire, out, n); \
    } \
    static inline void accumulate_##KIND(const u16 *wire, float scale, \
                                         f32 *total, size_t n) \
    { \
        CHOOSE(accumulate_##KIND)(wire, scale, total, n); \
    } \
    static inline int encode_##KIND(const f32 *values, float scale, \
                                    u16 *wire, size_t n) \
    { \
        return CHOOSE(times_##KIND)(values, scale, wire, n); \
    } \
    static inline void mean_##KIND(const f32 *total, float count, u16 *wire, \
                                   size_t n) \
    { \
        if (is_power_of_two(count)) \
            CHOOSE(times_##KIND)(total, 1 / count, wire, n); \
        else \
            CHOOSE(over_##KIND)(total, count, wire, n); \
    } \
    static inline void add_##KIND(const u16 *wire, u16 *total, size_t n) \
    { \
        CHOOSE(add_##KIND)(wire, total, n); \
    }
FUNCTIONS_16(halves)
FUNCTIONS_16(bfloats)

/* --- floats ---------------------------------------------------------------- */

CLONES static int all_finite_floats(const f32 *values, size_t n)
{
    int largest = 0;
    for (size_t i = 0; i < n; ++i)
        largest = e5m2_max(largest, e5m2_magnitude(values[i]));
    return largest < E5M2_F32_INFINITY;
}

/* Returns whether all of `out` is finite. */
CLONES static int scale_floats(const f32 *values, float scale, f32 *out,
                               size_t n)
{
    return scale_strip(values, TIMES, scale, out, n) < E5M2_F32_INFINITY;
}

CLONES static int copy_floats(const f32 *values, f32 *out, size_t n)
{
    return copy_strip(values, out, n) < E5M2_F32_INFINITY;
}

CLONES static void divide_floats(f32 *values, float divisor, size_t n)
{
    for (size_t i = 0; i < n; ++i)
        values[i] /= divisor;
}

CLONES static void add_floats(const f32 *values, f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] += values[i];
}

/* Ratios that are floats to gradients, in place. */
CLONES static void decode_float_ratios(f32 *ratios, const f32 *parameter,
                                       size_t n, Ratio q)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        ratios[i] = e5m2_from_ratio(
            ratios[i], e5m2_weight(parameter[i], q.epsilon), q.inverse);
}

/* --- records --------------------------------------------------------------- */

/* These two are over whole records. */
CLONES static uint64_t encode_whole(const f32 *values, float factor,
                                    f32 *residual, u8 *wire, size_t n)
{
    uint64_t nonfinite = 0;
    if (residual)
        for (size_t r = 0; r < n; ++r)
            nonfinite += (uint64_t)encode_record(
                values + r * RECORD, factor, residual + r * RECORD,
                wire + r * RECORD_BYTES, RECORD);
    else
        for (size_t r = 0; r < n; ++r)
            nonfinite += (uint64_t)encode_record(
                values + r * RECORD, factor, NULL, wire + r * RECORD_BYTES,
                RECORD);
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
 * Returns how many records hold a NaN or an infinity. */
static uint64_t encode_records(const f32 *values, float factor, f32 *residual,
                               u8 *wire, size_t n)
{
    size_t whole = n / RECORD, rest = n % RECORD;
    uint64_t nonfinite = encode_whole(values, factor, residual, wire, whole);
    if (rest) {
        float v[RECORD] = {0}, left[RECORD] = {0};
        memcpy(v, values + whole * RECORD, rest * sizeof *v);
        if (residual)
            memcpy(left, residual + whole * RECORD, rest * sizeof *v);
        nonfinite += encode_whole(v, factor, residual ? left : NULL,
                                  wire + whole * RECORD_BYTES, 1);
        if (residual)
            memcpy(residual + whole * RECORD, left, rest * sizeof *v);
    }
    return nonfinite;
}

/* n elements, out of as many records as they need.  Returns the code of the
 * largest scale, UNKNOWN_SCALE if a record is not finite. */
static int decode_records(const u8 *wire, float factor, f32 *out, size_t n,
                          int adds)
{
    size_t whole = n / RECORD, rest = n % RECORD;
    int largest = decode_whole(wire, factor, out, whole, adds);
    if (rest) {
        float v[RECORD];
        memcpy(v, out + whole * RECORD, rest * sizeof *v);
        largest = e5m2_max(largest, decode_whole(
            wire + whole * RECORD_BYTES, factor, v, 1, adds));
        memcpy(out + whole * RECORD, v, rest * sizeof *v);
    }
    return largest;
}

#endif
