/* Loops over contiguous buffers: fp8 codes, IEEE halves, floats, records.
 *
 * Each function at the end of its part takes a buffer of any length.  Before
 * it come the loops that it runs, in plain C, one for each constant (rounding,
 * format, variant of the processor) by macro: a compiler makes vector code of
 * a loop only where the choice is none at run time.
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
#include "records.h"
#include "vector.h"

typedef struct {
    unsigned int key0, key1;
    uint64_t first; /* index of the loop's first element in the whole array */
} Random;

typedef struct {
    float scale, inverse, epsilon;
    float bound; /* of residuals */
} Ratio;

typedef struct {
    uint64_t clipped, nonfinite;
} Counts;

#define CHUNK ((size_t)1 << 16)
#define CACHE_LINE 64

/* Length of the chunk at `start` of n elements.
 *
 * The first one ends where `floats` reaches a cache line, so that no vector
 * of the others lies across two; and none crosses a multiple of 2^32, because
 * the loops take the upper half of the index for constant. */
static inline size_t chunk_length(size_t start, size_t n, const f32 *floats,
                                  uint64_t first)
{
    uint64_t length = (UINT64_C(1) << 32) - ((first + start) & UINT32_MAX);
    if (start == 0 && (uintptr_t)floats % CACHE_LINE != 0
        && length > CACHE_LINE)
        length = (CACHE_LINE - (uintptr_t)floats % CACHE_LINE + 3) / 4;
    if (length > CHUNK)
        length = CHUNK;
    return length < n - start ? (size_t)length : n - start;
}

/* The first element has the index `first` where random bits depend on it. */
#define FOR_EACH_CHUNK(start, length, n, floats, first) \
    for (size_t start = 0, length; \
         start < (n) \
         && (length = chunk_length(start, (n), (floats), (first)), 1); \
         start += length)

/* One of three loops by the number of the rounding. */
#define BY_ROUNDING(LOOP, rounding) \
    ((rounding) == E5M2_NEAREST    ? LOOP##_nearest \
     : (rounding) == E5M2_TRUNCATE ? LOOP##_truncate \
                                   : LOOP##_stochastic)

#define FOR_EACH_ROUNDING(LOOP) \
    LOOP(nearest, E5M2_NEAREST) \
    LOOP(truncate, E5M2_TRUNCATE) \
    LOOP(stochastic, E5M2_STOCHASTIC)

static void count(Counts *sum, Counts more)
{
    sum->clipped += more.clipped;
    sum->nonfinite += more.nonfinite;
}

/* --- fp8 from floats, and sums of two codes ------------------------------ */

/* The upper half of the index is the same in the whole chunk. */
#define RANDOM_BITS(r, i) \
    e5m2_random((uint32_t)(r).first + (uint32_t)(i), \
                (uint32_t)((r).first >> 32), (r).key0, (r).key1)

CLONES static int all_finite(const u8 *codes, size_t n)
{
    u8 found = 0;
    for (size_t i = 0; i < n; ++i)
        found |= !e5m2_is_finite_code(codes[i]);
    return !found;
}

#define ENCODE_LOOP(NAME, ROUNDING) \
    CLONES static void encode_##NAME(const f32 *values, u8 *codes, size_t n, \
                                     Random random) \
    { \
        int largest = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            largest = e5m2_max(largest, e5m2_magnitude(values[i])); \
            codes[i] = (u8)e5m2_encode_finite(values[i], ROUNDING, \
                                              RANDOM_BITS(random, i)); \
        } \
        if (largest < E5M2_F32_INFINITY) \
            return; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            codes[i] = (u8)e5m2_encode(values[i], ROUNDING, \
                                       RANDOM_BITS(random, i)); \
    }

#define ADD_LOOP(NAME, ROUNDING) \
    CLONES static void add_finite_##NAME(const u8 *a, const u8 *b, u8 *out, \
                                         size_t n, Random random) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            out[i] = (u8)e5m2_add_finite(a[i], b[i], ROUNDING, \
                                         RANDOM_BITS(random, i)); \
    } \
    CLONES static void add_any_##NAME(const u8 *a, const u8 *b, u8 *out, \
                                      size_t n, Random random) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) \
            out[i] = (u8)e5m2_add(a[i], b[i], ROUNDING, \
                                  RANDOM_BITS(random, i)); \
    } \
    static void add_##NAME(const u8 *a, const u8 *b, u8 *out, size_t n, \
                           Random random) \
    { \
        if (all_finite(a, n) && all_finite(b, n)) \
            add_finite_##NAME(a, b, out, n, random); \
        else \
            add_any_##NAME(a, b, out, n, random); \
    }

FOR_EACH_ROUNDING(ENCODE_LOOP)
FOR_EACH_ROUNDING(ADD_LOOP)

static inline void encode_codes(const f32 *values, u8 *codes, size_t n,
                                int rounding, Random random)
{
    const uint64_t first = random.first;
    FOR_EACH_CHUNK(start, length, n, values, first) {
        random.first = first + start;
        BY_ROUNDING(encode, rounding)(values + start, codes + start, length,
                                      random);
    }
}

static inline void add_codes(const u8 *a, const u8 *b, u8 *out, size_t n,
                             int rounding, Random random)
{
    const uint64_t first = random.first;
    FOR_EACH_CHUNK(start, length, n, NULL, first) {
        random.first = first + start;
        BY_ROUNDING(add, rounding)(a + start, b + start, out + start, length,
                                   random);
    }
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
E5M2_FUNCTION Counts keep_any(int rounding, const float *values,
                              const f32 *parameter, f32 *residual, u8 *codes,
                              size_t n, Ratio q, Random random)
{
    uint32_t large = 0, nonfinite = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float ratio = e5m2_ratio(values[i], weight, q.scale);
        unsigned int code = e5m2_encode_ratio(ratio, values[i], rounding,
                                              RANDOM_BITS(random, i));
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
    int kind, int rounding, const f32 *source, float number,
    const f32 *parameter, f32 *residual, u8 *codes, size_t n, Ratio q,
    Random random)
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
        wide[i] = e5m2_encode_to(ratios[i], rounding, RANDOM_BITS(random, i),
                                 &rounded);
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
        : keep_any(rounding, values, parameter, residual, codes, n, q,
                   random);
}

/* Over strips of a length that the compiler knows, and the rest. */
#define FEEDBACK_LOOP(NAME, KIND, ROUNDING) \
    CLONES static Counts NAME( \
        const f32 *source, float number, const f32 *parameter, \
        f32 *residual, u8 *codes, size_t n, Ratio q, Random random) \
    { \
        Counts sum = {0, 0}; \
        size_t i = 0; \
        for (; n - i >= FEEDBACK_STRIP; i += FEEDBACK_STRIP) { \
            count(&sum, feedback_strip( \
                KIND, ROUNDING, source + i, number, parameter + i, \
                residual + i, codes + i, FEEDBACK_STRIP, q, random)); \
            random.first += FEEDBACK_STRIP; \
        } \
        count(&sum, feedback_strip( \
            KIND, ROUNDING, source + i, number, parameter + i, residual + i, \
            codes + i, n - i, q, random)); \
        return sum; \
    }

#define RATIO_ENCODE_LOOP(NAME, ROUNDING) \
    CLONES static Counts ratio_encode_##NAME( \
        const f32 *gradient, const f32 *parameter, u8 *codes, size_t n, \
        Ratio q, Random random) \
    { \
        uint32_t large = 0, nonfinite = 0; \
        int largest = 0; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float ratio = e5m2_ratio(gradient[i], weight, q.scale); \
            codes[i] = (u8)e5m2_encode_finite(ratio, ROUNDING, \
                                              RANDOM_BITS(random, i)); \
            large += (uint32_t)e5m2_is_large(ratio); \
            largest = e5m2_max(largest, e5m2_magnitude(ratio)); \
        } \
        if (largest < E5M2_F32_INFINITY) \
            return (Counts){large, 0}; \
        INDEPENDENT \
        for (size_t i = 0; i < n; ++i) { \
            float weight = e5m2_weight(parameter[i], q.epsilon); \
            float ratio = e5m2_ratio(gradient[i], weight, q.scale); \
            codes[i] = (u8)e5m2_encode_ratio(ratio, gradient[i], ROUNDING, \
                                             RANDOM_BITS(random, i)); \
            nonfinite += (uint32_t)e5m2_is_nonfinite(ratio, gradient[i]); \
        } \
        return (Counts){large - nonfinite, nonfinite}; \
    } \
    FEEDBACK_LOOP(ratio_feedback_##NAME, GRADIENT, ROUNDING) \
    FEEDBACK_LOOP(ratio_mean_##NAME, MEAN, ROUNDING) \
    FEEDBACK_LOOP(ratio_mean_times_##NAME, MEAN_TIMES, ROUNDING)

FOR_EACH_ROUNDING(RATIO_ENCODE_LOOP)

/* Without error feedback if `residual` is NULL. */
static inline Counts encode_ratios(const f32 *gradient, const f32 *parameter,
                                   f32 *residual, u8 *codes, size_t n,
                                   Ratio q, int rounding, Random random)
{
    const uint64_t first = random.first;
    Counts sum = {0, 0};
    FOR_EACH_CHUNK(start, length, n, gradient, first) {
        random.first = first + start;
        count(&sum, residual == NULL
            ? BY_ROUNDING(ratio_encode, rounding)(
                  gradient + start, parameter + start, codes + start, length,
                  q, random)
            : BY_ROUNDING(ratio_feedback, rounding)(
                  gradient + start, 1, parameter + start, residual + start,
                  codes + start, length, q, random));
    }
    return sum;
}

/* Sums of ratios: their mean is turned into a gradient, and encoded like one,
 * with error feedback, in one go; the bits are those of the separate steps. */
static inline Counts encode_ratio_means(
    const f32 *total, float ranks, const f32 *parameter, f32 *residual,
    u8 *codes, size_t n, Ratio q, int rounding, Random random)
{
    const uint64_t first = random.first;
    Counts sum = {0, 0};
    Counts (*loop)(const f32 *, float, const f32 *, f32 *, u8 *, size_t,
                   Ratio, Random) = BY_ROUNDING(ratio_mean, rounding);
    if (is_power_of_two(ranks)) { /* the same bits, and no division */
        loop = BY_ROUNDING(ratio_mean_times, rounding);
        ranks = 1 / ranks;
    }
    /* From the start, wherever the parameter lies: sums come a few strips at a
     * time, and a chunk up to the next cache line would cost as much as one. */
    FOR_EACH_CHUNK(start, length, n, NULL, first) {
        random.first = first + start;
        count(&sum, loop(total + start, ranks, parameter + start,
                         residual + start, codes + start, length, q, random));
    }
    return sum;
}

/* --- codes and halves to floats ------------------------------------------ */

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
#define ACCUMULATE_LOOP(V, KIND, TYPE, SCALE) \
    IN_##V static inline void accumulate_##KIND##_##V( \
        const TYPE *wire, float scale, f32 *total, size_t n) \
    { \
        float strip[STRIP]; \
        TYPE last[STRIP] = {0}; \
        for (; n >= STRIP; n -= STRIP, wire += STRIP, total += STRIP) { \
            widen_##KIND##_##V(wire, strip); \
            accumulate_strip(strip, SCALE, total, STRIP); \
        } \
        memcpy(last, wire, n * sizeof *wire); \
        widen_##KIND##_##V(last, strip); \
        (void)scale; \
        accumulate_strip(strip, SCALE, total, n); \
    }

#define WIDENING_LOOPS(V) \
    DECODE_LOOP(V, codes, u8) \
    DECODE_LOOP(V, halves, u16) \
    ACCUMULATE_LOOP(V, codes, u8, 1.0f) \
    ACCUMULATE_LOOP(V, halves, u16, scale)
VARIANTS(WIDENING_LOOPS)

static inline int decode_codes(const u8 *codes, f32 *out, size_t n)
{
    return CHOOSE(decode_codes)(codes, out, n);
}

static inline int decode_halves(const u16 *halves, f32 *out, size_t n)
{
    return CHOOSE(decode_halves)(halves, out, n);
}

static inline void accumulate_codes(const u8 *codes, f32 *total, size_t n)
{
    CHOOSE(accumulate_codes)(codes, 1.0f, total, n);
}

static inline void accumulate_halves(const u16 *halves, float scale,
                                     f32 *total, size_t n)
{
    CHOOSE(accumulate_halves)(halves, scale, total, n);
}

/* Sums of codes from several places. */
#define SUM_LOOP(V) \
    IN_##V static inline void sum_all_##V( \
        const u8 *const *codes, int count, f32 *total, size_t n) \
    { \
        const u8 *rests[MOST_SUMMED]; \
        u8 last[MOST_SUMMED][STRIP]; \
        f32 sums[STRIP]; \
        size_t i = 0; \
        for (; n - i >= STRIP; i += STRIP) \
            sum_strip_##V(codes, count, i, total + i); \
        if (i == n) \
            return; \
        for (int k = 0; k < count; ++k) { \
            memset(last[k], 0, STRIP); \
            memcpy(last[k], codes[k] + i, n - i); \
            rests[k] = last[k]; \
        } \
        sum_strip_##V(rests, count, 0, sums); \
        memcpy(total + i, sums, (n - i) * sizeof *sums); \
    }
VARIANTS(SUM_LOOP)

/* Sums of codes from `count` places, MOST_SUMMED at most, added in this order
 * to zeros. */
static inline void sum_codes(const u8 *const *codes, int count, f32 *total,
                             size_t n)
{
    CHOOSE(sum_all)(codes, count, total, n);
}

/* Returns how many results are infinite or NaN; there are few. */
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
    IN_##V static uint32_t ratio_decode_codes_##V( \
        const u8 *codes, const f32 *parameter, f32 *out, size_t n, Ratio q, \
        int *in_wire) \
    { \
        uint32_t nonfinite = 0; \
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
VARIANTS(RATIO_DECODE_LOOP)

CLONES static uint32_t ratio_decode_means(const f32 *ratios,
                                           const f32 *parameter, f32 *out,
                                           size_t n, Ratio q)
{
    uint32_t nonfinite = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float weight = e5m2_weight(parameter[i], q.epsilon);
        float x = e5m2_from_ratio(ratios[i], weight, q.inverse);
        out[i] = x;
        nonfinite += !e5m2_is_finite(x);
    }
    return nonfinite;
}

static inline uint64_t decode_ratios(const u8 *codes, const f32 *parameter,
                                     f32 *out, size_t n, Ratio q,
                                     int *largest)
{
    uint64_t nonfinite = 0;
    FOR_EACH_CHUNK(start, length, n, parameter, 0)
        nonfinite += CHOOSE(ratio_decode_codes)(
            codes + start, parameter + start, out + start, length, q,
            largest);
    return nonfinite;
}

/* The bits of the largest ratio, and of the largest gradient, of what is
 * finite; of ratios that overflow, infinity. */
CLONES static inline void largest_ratio(const f32 *gradient, const f32 *parameter,
                                 size_t n, float epsilon, int found[2])
{
    int ratios = 0, sizes = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        int size = e5m2_magnitude(gradient[i]);
        int ratio = e5m2_magnitude(
            gradient[i] / e5m2_weight(parameter[i], epsilon));
        size = size < E5M2_F32_INFINITY ? size : 0;
        ratio = size > 0 && ratio <= E5M2_F32_INFINITY ? ratio : 0;
        ratios = e5m2_max(ratios, ratio);
        sizes = e5m2_max(sizes, size);
    }
    found[0] = ratios;
    found[1] = sizes;
}

/* As above, of ratios that are float32; `out` may be `ratios`. */
static inline uint64_t decode_float_ratios(const f32 *ratios,
                                           const f32 *parameter, f32 *out,
                                           size_t n, Ratio q)
{
    uint64_t nonfinite = 0;
    FOR_EACH_CHUNK(start, length, n, parameter, 0)
        nonfinite += ratio_decode_means(ratios + start, parameter + start,
                                        out + start, length, q);
    return nonfinite;
}

/* --- floats to halves, and sums of two halves ---------------------------- */

#define HALF_OVERFLOWS 0x477FF000 /* 65520, whose half is infinite */

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
    HALF_ADD_LOOP(V)
VARIANTS(HALF_LOOPS)

/* The halves of floats times a power of two.  Returns whether all of them are
 * finite, as does the next. */
static inline int encode_halves(const f32 *values, float scale,
                                     u16 *halves, size_t n)
{
    return CHOOSE(half_times)(values, scale, halves, n);
}

/* Means of sums, rounded to halves. */
static inline int encode_half_means(const f32 *total, float count, u16 *halves,
                            size_t n)
{
    return is_power_of_two(count)
        ? CHOOSE(half_times)(total, 1 / count, halves, n)
        : CHOOSE(half_over)(total, count, halves, n);
}

/* Sums of halves, rounded to halves. */
static inline void add_halves(const u16 *halves, u16 *total, size_t n)
{
    CHOOSE(half_add)(halves, total, n);
}

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

/* --- records --------------------------------------------------------------- */

#define RECORD_LOOPS(FORMAT) \
    CLONES static uint64_t encode_alone_##FORMAT( \
        const f32 *values, float factor, f32 *residual, u8 *wire, size_t n) \
    { \
        uint64_t nonfinite = 0; \
        (void)residual; \
        for (size_t r = 0; r < n; ++r) \
            nonfinite += (uint64_t)encode_record( \
                values + r * RECORD, factor, NULL, \
                wire + r * (size_t)record_bytes(FORMAT), RECORD, FORMAT); \
        return nonfinite; \
    } \
    CLONES static uint64_t encode_feedback_##FORMAT( \
        const f32 *values, float factor, f32 *residual, u8 *wire, size_t n) \
    { \
        uint64_t nonfinite = 0; \
        for (size_t r = 0; r < n; ++r) \
            nonfinite += (uint64_t)encode_record( \
                values + r * RECORD, factor, residual + r * RECORD, \
                wire + r * (size_t)record_bytes(FORMAT), RECORD, FORMAT); \
        return nonfinite; \
    } \
    CLONES static uint64_t decode_##FORMAT(const u8 *wire, float factor, \
                                           f32 *out, size_t n) \
    { \
        uint64_t nonfinite = 0; \
        for (size_t r = 0; r < n; ++r) \
            nonfinite += (uint64_t)decode_record( \
                wire + r * (size_t)record_bytes(FORMAT), factor, \
                out + r * RECORD, RECORD, 0, FORMAT); \
        return nonfinite; \
    } \
    CLONES static uint64_t accumulate_##FORMAT(const u8 *wire, float factor, \
                                               f32 *out, size_t n) \
    { \
        uint64_t nonfinite = 0; \
        for (size_t r = 0; r < n; ++r) \
            nonfinite += (uint64_t)decode_record( \
                wire + r * (size_t)record_bytes(FORMAT), factor, \
                out + r * RECORD, RECORD, 1, FORMAT); \
        return nonfinite; \
    }

RECORD_LOOPS(INT4)
RECORD_LOOPS(E2M1)
RECORD_LOOPS(INT5)

#define BY_FORMAT(LOOP, format) \
    ((format) == INT4 ? LOOP##_INT4 : (format) == E2M1 ? LOOP##_E2M1 \
                                                       : LOOP##_INT5)

/* n elements, to as many records as they need; `residual` may be NULL.
 * Returns how many records hold a NaN or an infinity. */
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
