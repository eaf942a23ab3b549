/* What a codec does with ranges of a fused vector: the one place where it is
 * done for arrays on the host, by Python (_formats.c) and by an all-reduce.
 *
 * A Coding is a codec's part in one update of one bucket.  It is data: a table
 * with a row for each tensor (addresses, scales) and one that is written (findings).  codecs/tensors.py fills them in and says
 * what is in them; the structs here have the same columns.  Nothing in it is
 * changed while it works but findings, which several threads add to, and
 * residuals, each element of which belongs to one range.
 *
 * A wire has one entry for `grain` elements of a tensor, whose last entry may
 * have fewer; ranges count entries.
 */
#ifndef CHAINER_FP8PIPE_CODING_H
#define CHAINER_FP8PIPE_CODING_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "loops.h"

_Static_assert(sizeof(void *) == sizeof(int64_t), "addresses have 64 bits");

/* Codecs.  RELAY is fp8 without parameters: means are encoded as they are. */
enum { FLOAT32, FLOAT16, BFLOAT16, FP8, RELAY, RECORDS };

/* Wires may be summed so many at a time. */
#define MOST_SUMMED 16

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

typedef struct {
    int64_t clipped, encoded, blamed, nonfinite;
    int64_t largest; /* bits of the largest magnitude in a decoded wire */
} Findings;

/* What the encoding of a tensor's mean keeps: at the tensor's first element,
 * which may lie outside; NULL: nothing. */
typedef struct {
    f32 *residual;
} Mean;

typedef struct {
    int64_t start, stop;
} Range;

typedef struct {
    int codec, rounding;
    size_t itemsize; /* bytes of a wire's entry */
    int64_t grain;
    float prescale, epsilon;
    int64_t tensors_count;
    const Tensor *tensors;
    const Scales *scales;
    Findings *findings;
    Py_buffer buffers[3];
} Coding;

static void coding_close(Coding *coding)
{
    for (int i = 0; i < 3; ++i) /* releasing one never filled does nothing */
        PyBuffer_Release(&coding->buffers[i]);
}

/* Fills a zeroed Coding from Tensors.tables of codecs/tensors.py, and holds
 * the tables; 0 and an exception if they are not as they should be. */
static int coding_open(PyObject *tables, Coding *coding)
{
    PyObject *parts[3];
    Py_ssize_t itemsize;
    long long grain;
    const size_t sizes[3] = {sizeof(Tensor), sizeof(Scales),
                             sizeof(Findings)};
    if (!PyArg_ParseTuple(tables, "iinLffOOO", &coding->codec,
                          &coding->rounding, &itemsize,
                          &grain, &coding->prescale, &coding->epsilon,
                          &parts[0], &parts[1], &parts[2]))
        return 0;
    for (int i = 0; i < 3; ++i) {
        if (PyObject_GetBuffer(parts[i], &coding->buffers[i],
                               i == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
            coding_close(coding);
            return 0;
        }
        if (i == 0)
            coding->tensors_count =
                coding->buffers[0].len / (Py_ssize_t)sizeof(Tensor);
        if ((size_t)coding->buffers[i].len
            != (size_t)coding->tensors_count * sizes[i]) {
            PyErr_SetString(PyExc_ValueError, "tables differ in length");
            coding_close(coding);
            return 0;
        }
    }
    coding->itemsize = (size_t)itemsize;
    coding->grain = grain;
    coding->tensors = coding->buffers[0].buf;
    coding->scales = coding->buffers[1].buf;
    coding->findings = coding->buffers[2].buf;
    return 1;
}

static void tally(int64_t *finding, int64_t more)
{
    if (more)
        __atomic_fetch_add(finding, more, __ATOMIC_RELAXED);
}

static void raise_to(int64_t *finding, int64_t value)
{
    int64_t old = __atomic_load_n(finding, __ATOMIC_RELAXED);
    while (value > old
           && !__atomic_compare_exchange_n(finding, &old, value, 1,
                                           __ATOMIC_RELAXED,
                                           __ATOMIC_RELAXED))
        ;
}

static void blame(Findings *findings, int64_t what)
{
    __atomic_fetch_or(&findings->blamed, what, __ATOMIC_RELAXED);
}

static const Tensor *first_tensor(const Coding *coding, int64_t start)
{
    int64_t low = 0, high = coding->tensors_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (coding->tensors[middle].stop <= start)
            low = middle + 1;
        else
            high = middle;
    }
    return coding->tensors + low;
}

/* A tensor's part of a range. */
typedef struct {
    int64_t tensor;
    int64_t entry; /* counted from the range's start */
    size_t at, n;  /* elements of the tensor */
} Part;

/* The next part; 0: there is none.  `t` begins as first_tensor(). */
static int next_part(const Coding *coding, Range range, const Tensor **t,
                     Part *part)
{
    for (; *t < coding->tensors + coding->tensors_count
           && (*t)->start < range.stop; ++*t) {
        int64_t start = (*t)->start > range.start ? (*t)->start : range.start;
        int64_t stop = (*t)->stop < range.stop ? (*t)->stop : range.stop;
        int64_t end = (stop - (*t)->start) * coding->grain;
        if (start >= stop)
            continue;
        part->tensor = *t - coding->tensors;
        part->entry = start - range.start;
        part->at = (size_t)((start - (*t)->start) * coding->grain);
        part->n = (size_t)(end < (*t)->elements ? end : (*t)->elements)
                  - part->at;
        ++*t;
        return 1;
    }
    return 0;
}

#define FOR_EACH_PART(coding, range, part) \
    for (const Tensor *next_ = first_tensor((coding), (range).start), \
                      *once_ = next_; once_; once_ = NULL) \
        for (Part part; next_part((coding), (range), &next_, &part);)

/* Writes gradients, times the codec's factor, to where the range begins. */
static void encode_range(const Coding *coding, Range range, char *wire)
{
    FOR_EACH_PART(coding, range, p) {
        const Tensor *t = &coding->tensors[p.tensor];
        const Scales *scales = &coding->scales[p.tensor];
        Findings *findings = &coding->findings[p.tensor];
        const f32 *gradient = t->gradient + p.at;
        f32 *residual = t->residual ? t->residual + p.at : NULL;
        void *to = wire + (size_t)p.entry * coding->itemsize;
        Ratio q = {scales->encode, scales->encode_inverse, coding->epsilon,
                   scales->bound};
        Counts counts;
        int finite = 1;
        switch (coding->codec) {
        case FLOAT32:
            finite = scale_floats(gradient, coding->prescale, to, p.n);
            break;
        case FLOAT16:
            finite = encode_halves(gradient, coding->prescale, to, p.n);
            break;
        case BFLOAT16:
            finite = encode_bfloats(gradient, coding->prescale, to, p.n);
            break;
        case RECORDS:
            finite = !encode_records(gradient, scales->encode, residual, to,
                                     p.n);
            break;
        default:
            counts = encode_ratios(gradient, t->parameter + p.at, residual,
                                   to, p.n, q, coding->rounding);
            tally(&findings->clipped, (int64_t)counts.clipped);
            tally(&findings->encoded, (int64_t)p.n);
            if (counts.nonfinite)
                blame(findings, all_finite_floats(gradient, p.n)
                                    ? BAD_VALUE : BAD_GRADIENT);
        }
        if (!finite)
            blame(findings, BAD_GRADIENT);
    }
}

/* Writes the values of a wire into gradients. */
static void decode_range(const Coding *coding, Range range, const char *wire)
{
    FOR_EACH_PART(coding, range, p) {
        const Tensor *t = &coding->tensors[p.tensor];
        const Scales *scales = &coding->scales[p.tensor];
        Findings *findings = &coding->findings[p.tensor];
        f32 *out = t->out + p.at;
        const void *from = wire + (size_t)p.entry * coding->itemsize;
        Ratio q = {0, scales->inverse, coding->epsilon, 0};
        int finite = 1, largest = 0;
        switch (coding->codec) {
        case FLOAT32: finite = copy_floats(from, out, p.n); break;
        case FLOAT16: finite = decode_halves(from, out, p.n); break;
        case BFLOAT16: finite = decode_bfloats(from, out, p.n); break;
        case RECORDS:
            largest = e5m2_magnitude(scale_value(
                decode_records(from, scales->scale, out, p.n, 0)));
            /* Times 2^power it may overflow. */
            finite = largest < E5M2_F32_INFINITY
                     && (e5m2_is_finite(e5m2_float((unsigned int)largest)
                                        * TOP * scales->scale)
                         || all_finite_floats(out, p.n));
            break;
        default:
            finite = !decode_ratios(from, t->parameter + p.at, out, p.n, q,
                                    &largest);
        }
        raise_to(&findings->largest, largest);
        tally(&findings->nonfinite, !finite);
        /* Or, of a ratio, a parameter is not. */
        if (!finite && (coding->codec != FP8 || largest >= E5M2_F32_INFINITY))
            blame(findings, BAD_WIRE);
    }
}

/* Adds n entries to sums. */
static void accumulate_wire(const Coding *coding, const void *wire,
                            f32 *total, size_t n)
{
    switch (coding->codec) {
    case FLOAT32: add_floats(wire, total, n); break;
    case FLOAT16: accumulate_halves(wire, 1.0f, total, n); break;
    case BFLOAT16: accumulate_bfloats(wire, 1.0f, total, n); break;
    case RECORDS: decode_records(wire, 1.0f, total, n * RECORD, 1); break;
    default: accumulate_codes(wire, total, n);
    }
}

/* Makes sums of n entries of each of some wires, MOST_SUMMED at most. */
static inline void sum_wires(const Coding *coding, const void *const *wires,
                      int count, f32 *total, size_t n)
{
    memset(total, 0, n * (size_t)coding->grain * sizeof *total);
    for (int i = 0; i < count; ++i)
        accumulate_wire(coding, wires[i], total, n);
}

/* Adds n entries to others, in the wire's own format. */
static inline void add_wires(const Coding *coding, const void *wire,
                             void *total, size_t n)
{
    switch (coding->codec) {
    case FLOAT32: add_floats(wire, total, n); break;
    case FLOAT16: add_halves(wire, total, n); break;
    case BFLOAT16: add_bfloats(wire, total, n); break;
    default: add_codes(wire, total, n, coding->rounding);
    }
}

/* The mean of a tensor's part, whose codec knows tensors. */
static void encode_mean_of_part(const Coding *coding, f32 *sum, Part p,
                                float ranks, f32 *residual, void *to)
{
    const Scales *scales = &coding->scales[p.tensor];
    const f32 *parameter = coding->tensors[p.tensor].parameter + p.at;
    Ratio q = {scales->scale, scales->inverse, coding->epsilon,
               scales->bound};
    Counts counts;
    if (coding->codec == RECORDS) {
        encode_records(sum, 1.0f / ranks, residual, to, p.n);
        return;
    }
    if (!residual)
        divide_floats(sum, ranks, p.n);
    if (coding->codec == RELAY) {
        encode_codes(sum, to, p.n, coding->rounding);
        return;
    }
    if (residual)
        counts = encode_ratio_means(sum, ranks, parameter, residual, to, p.n,
                                    q);
    else {
        decode_float_ratios(sum, parameter, p.n, q);
        counts = encode_ratios(sum, parameter, NULL, to, p.n, q,
                               coding->rounding);
    }
    tally(&coding->findings[p.tensor].clipped, (int64_t)counts.clipped);
    if (counts.nonfinite && !all_finite_floats(parameter, p.n))
        blame(&coding->findings[p.tensor], BAD_VALUE);
}

/* Makes sums of a range their mean, in the wire's format; `total` is where
 * the range begins, and may be overwritten.  `means`: one for each tensor, of
 * which floats know nothing here. */
static void encode_mean(const Coding *coding, f32 *total, Range range,
                        int count, const Mean *means, char *wire)
{
    const float ranks = (float)count;
    const size_t entries = (size_t)(range.stop - range.start);
    if (coding->codec == FLOAT16)
        mean_halves(total, ranks, (u16 *)(void *)wire, entries);
    else if (coding->codec == BFLOAT16)
        mean_bfloats(total, ranks, (u16 *)(void *)wire, entries);
    else if (coding->codec == FLOAT32) {
        divide_floats(total, ranks, entries);
        copy_floats(total, (f32 *)(void *)wire, entries);
    }
    else FOR_EACH_PART(coding, range, p) {
        f32 *residual = means[p.tensor].residual;
        encode_mean_of_part(coding, total + p.entry * coding->grain, p, ranks,
                            residual ? residual + p.at : NULL,
                            wire + (size_t)p.entry * coding->itemsize);
    }
}

#endif
