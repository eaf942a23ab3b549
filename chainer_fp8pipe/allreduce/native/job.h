/* What is known of a job, and what its codec does, where that is compiled.
 *
 * The tables are arrays of NumPy's, made by codecs/tensors.py: it says what
 * is in them.
 */
#ifndef CHAINER_FP8PIPE_JOB_H
#define CHAINER_FP8PIPE_JOB_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "../../block_formats/record_loops.h"
#include "../../fp8/half.h"
#include "../../fp8/means.h"

_Static_assert(sizeof(void *) == sizeof(int64_t), "addresses have 64 bits");

enum { IN_PYTHON, FLOAT32, FP8, RELAY, FLOAT16, RECORDS }; /* codecs */

typedef struct {
    int64_t start, stop; /* entries of the fused vector */
    const f32 *gradient, *parameter;
    f32 *out, *residual;
    int64_t elements;
} Tensor;

typedef struct {
    float encode, encode_inverse, scale, inverse;
    float bound; /* of fp8's residuals */
} Scales;

enum { BAD_GRADIENT = 1, BAD_VALUE = 2, BAD_WIRE = 4 };

/* Several threads add to them. */
typedef struct {
    int64_t clipped, encoded, blamed, nonfinite;
} Findings;

static void tally(int64_t *finding, int64_t more)
{
    if (more)
        __atomic_fetch_add(finding, more, __ATOMIC_RELAXED);
}

static void blame(Findings *findings, int64_t what)
{
    __atomic_fetch_or(&findings->blamed, what, __ATOMIC_RELAXED);
}

/* A job's part of one lane. */
typedef struct {
    const int64_t *bounds; /* of blocks */
    int64_t frame, chunks, let_in;
    int64_t longest; /* block */
    f32 *const *residuals; /* by site and tensor, of its first element */
    Py_buffer bounds_buffer, residuals_buffer;
} Share;

typedef struct {
    int64_t start, stop;
} Range;

typedef struct {
    int64_t count, room;
    Range *items;
} Ranges;

typedef struct {
    PyObject_HEAD
    PyObject *python; /* what to ask where nothing is compiled */
    PyObject *kept;   /* all whose addresses are in the tables */
    int is_held;      /* by an executor, until it is finished */
    Py_buffer wire_buffer, tensors_buffer, scales_buffer, findings_buffer;
    char *wire;
    size_t itemsize, sum_size; /* bytes of a wire's entry, of a sum's element */
    int64_t grain;             /* elements of an entry */
    int codec, rounding;
    int format; /* of RECORDS */
    int in_place; /* sums are made in the wire */
    int keeps_wire; /* or frames are in their chunks alone */
    int shares_wire; /* neighbours can read it */
    int encodes, decodes;
    float prescale, epsilon;
    float shrink; /* of sums that travel as halves */
    int64_t tensors_count;
    const Tensor *tensors;
    const Scales *scales;
    Findings *findings;
    int64_t unfinished; /* chunks */
    int shares_count;
    Share *shares;
    Ranges undecoded, decoded; /* whose means are there */
} Job;

/* -1: there is no memory. */
static int append(Ranges *ranges, Range range)
{
    if (ranges->count == ranges->room) {
        int64_t room = ranges->room ? 2 * ranges->room : 64;
        Range *items = realloc(ranges->items, (size_t)room * sizeof *items);
        if (items == NULL)
            return -1;
        ranges->items = items;
        ranges->room = room;
    }
    ranges->items[ranges->count++] = range;
    return 0;
}

static Tensor const *first_tensor(const Job *job, int64_t start)
{
    int64_t low = 0, high = job->tensors_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (job->tensors[middle].stop <= start)
            low = middle + 1;
        else
            high = middle;
    }
    return job->tensors + low;
}

/* For each tensor `t` that has a part in the range: it is `n` entries long,
 * and begins at entry `at` of the tensor and at `place` of the vector. */
#define FOR_EACH_PART(job, range, t, place, at, n) \
    for (const Tensor *t = first_tensor((job), (range).start); \
         t < (job)->tensors + (job)->tensors_count \
         && t->start < (range).stop; ++t) \
        for (int64_t place = t->start > (range).start ? t->start \
                                                      : (range).start, \
             at = place - t->start, \
             n = (t->stop < (range).stop ? t->stop : (range).stop) - place; \
             n > 0; n = 0)

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
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float x = values[i] * scale;
        out[i] = x;
        largest = e5m2_max(largest, e5m2_magnitude(x));
    }
    return largest < E5M2_F32_INFINITY;
}

CLONES static int copy_floats(const f32 *values, f32 *out, size_t n)
{
    int largest = 0;
    INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        float x = values[i];
        out[i] = x;
        largest = e5m2_max(largest, e5m2_magnitude(x));
    }
    return largest < E5M2_F32_INFINITY;
}

/* What lies at a place of the fused vector.  `wire` is where the range
 * begins. */
static void *wire_at(const Job *job, char *wire, Range range, int64_t place)
{
    return wire + (size_t)(place - range.start) * job->itemsize;
}

static char *kept_wire(const Job *job, Range range)
{
    return job->wire + (size_t)range.start * job->itemsize;
}

/* Notes what a part's decoding has found. */
static void note(const Job *job, int64_t tensor, int in_wire,
                 int64_t nonfinite)
{
    tally(&job->findings[tensor].nonfinite, nonfinite);
    if (nonfinite && in_wire)
        blame(&job->findings[tensor], BAD_WIRE);
}

/* Elements of n records of a tensor from record `at` on. */
static size_t elements_of(const Tensor *t, int64_t at, int64_t n)
{
    int64_t left = t->elements - at * RECORD;
    return (size_t)(n * RECORD < left ? n * RECORD : left);
}

static void encode_into_records(const Job *job, Range range, char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n) {
        int64_t index = t - job->tensors, first = at * RECORD;
        if (encode_records(t->gradient + first, job->scales[index].encode,
                           t->residual ? t->residual + first : NULL,
                           wire_at(job, wire, range, place),
                           elements_of(t, at, n), job->format))
            blame(&job->findings[index], BAD_GRADIENT);
    }
}

static void decode_from_records(const Job *job, Range range, char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n) {
        int64_t index = t - job->tensors;
        note(job, index, 1, (int64_t)decode_records(
            wire_at(job, wire, range, place), job->scales[index].scale,
            t->out + at * RECORD, elements_of(t, at, n), 0, job->format));
    }
}

static void encode_mean_records(const Job *job, const f32 *total, Range range,
                                int count, f32 *const *residuals,
                                char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n) {
        f32 *residual = residuals[t - job->tensors];
        encode_records(total + (place - range.start) * RECORD,
                       1.0f / (float)count,
                       residual ? residual + at * RECORD : NULL,
                       wire_at(job, wire, range, place),
                       elements_of(t, at, n), job->format);
    }
}

static void encode_ratios(const Job *job, Range range, char *wire)
{
    const Random none = {0};
    FOR_EACH_PART(job, range, t, place, at, n) {
        int64_t index = t - job->tensors;
        const Scales *scales = &job->scales[index];
        Findings *findings = &job->findings[index];
        Ratio q = {scales->encode, scales->encode_inverse, job->epsilon,
                   scales->bound};
        Counts counts = long_ratio_encode(
            t->gradient + at, t->parameter + at,
            t->residual ? t->residual + at : NULL,
            wire_at(job, wire, range, place), (size_t)n, q, job->rounding, none);
        tally(&findings->clipped, (int64_t)counts.clipped);
        tally(&findings->encoded, n);
        if (counts.nonfinite)
            blame(findings, all_finite_floats(t->gradient + at, (size_t)n)
                                ? BAD_VALUE : BAD_GRADIENT);
    }
}

static void encode_floats(const Job *job, Range range, char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n)
        if (!scale_floats(t->gradient + at, job->prescale,
                          wire_at(job, wire, range, place), (size_t)n))
            blame(&job->findings[t - job->tensors], BAD_GRADIENT);
}

static void encode_halves(const Job *job, Range range, char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n)
        if (!half_encode_scaled(t->gradient + at, job->prescale,
                                wire_at(job, wire, range, place), (size_t)n))
            blame(&job->findings[t - job->tensors], BAD_GRADIENT);
}

static void decode_ratios(const Job *job, Range range, char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n) {
        int64_t index = t - job->tensors;
        const u8 *codes = wire_at(job, wire, range, place);
        Ratio q = {0, job->scales[index].inverse, job->epsilon, 0};
        int64_t nonfinite = (int64_t)long_ratio_decode(
            codes, t->parameter + at, t->out + at, (size_t)n, q);
        if (nonfinite)      /* or a parameter is not finite */
            note(job, index, !all_finite(codes, (size_t)n), nonfinite);
    }
}

static void decode_floats(const Job *job, Range range, char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n)
        note(job, t - job->tensors, 1,
             !copy_floats(wire_at(job, wire, range, place), t->out + at,
                          (size_t)n));
}

static void decode_halves(const Job *job, Range range, char *wire)
{
    FOR_EACH_PART(job, range, t, place, at, n)
        note(job, t - job->tensors, 1,
             !half_decode_all(wire_at(job, wire, range, place), t->out + at,
                              (size_t)n));
}

CLONES static void divide(f32 *values, float divisor, int64_t n)
{
    for (int64_t i = 0; i < n; ++i)
        values[i] /= divisor;
}

CLONES static void add_floats(const f32 *values, f32 *total, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        total[i] += values[i];
}

/* Means of ratios to parameters. */
static void encode_ratio_mean(const Job *job, f32 *total, Range range,
                              int count, f32 *const *residuals,
                                char *wire)
{
    const Random none = {0};
    FOR_EACH_PART(job, range, t, place, at, n) {
        int64_t index = t - job->tensors;
        const Scales *scales = &job->scales[index];
        Ratio q = {scales->scale, scales->inverse, job->epsilon,
                   scales->bound};
        f32 *sum = total + (place - range.start);
        const f32 *parameter = t->parameter + at;
        u8 *codes = wire_at(job, wire, range, place);
        Counts counts;
        if (residuals[index])
            counts = long_ratio_mean(sum, (float)count, parameter,
                                     residuals[index] + at, codes, (size_t)n,
                                     q, job->rounding);
        else {
            divide(sum, (float)count, n);
            long_ratio_decode_floats(sum, parameter, sum, (size_t)n, q);
            counts = long_ratio_encode(sum, parameter, NULL, codes,
                                       (size_t)n, q, job->rounding, none);
        }
        tally(&job->findings[index].clipped, (int64_t)counts.clipped);
        if (counts.nonfinite && !all_finite_floats(parameter, (size_t)n))
            blame(&job->findings[index], BAD_VALUE);
    }
}

/* Means as they are, on a rank that has no parameters. */
static void encode_plain_mean(const Job *job, f32 *total, Range range,
                              int count, f32 *const *residuals,
                                char *wire)
{
    const Random none = {0};
    FOR_EACH_PART(job, range, t, place, at, n) {
        f32 *sum = total + (place - range.start);
        f32 *residual = residuals[t - job->tensors];
        u8 *codes = wire_at(job, wire, range, place);
        if (residual)
            long_mean(sum, (float)count, residual + at, codes, (size_t)n,
                      job->rounding, job->scales[t - job->tensors].bound);
        else {
            divide(sum, (float)count, n);
            long_encode(sum, codes, (size_t)n, job->rounding, none);
        }
    }
}

/* Sums become their mean, in the wire's format; they may be overwritten. */
static void encode_mean(const Job *job, f32 *total, Range range, int count,
                        f32 *const *residuals, char *wire)
{
    if (job->codec == FLOAT16)
        half_mean(total, (float)count, (u16 *)(void *)wire,
                  (size_t)(range.stop - range.start));
    else if (job->codec == RECORDS)
        encode_mean_records(job, total, range, count, residuals, wire);
    else
        (job->codec == FP8 ? encode_ratio_mean : encode_plain_mean)(
            job, total, range, count, residuals, wire);
}

#endif
