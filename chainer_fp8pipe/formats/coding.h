/* What a codec does with ranges of a fused vector: the one place where it is
 * done for arrays on the host, by Python (_formats.c) and by an all-reduce.
 *
 * A Coding is a codec's part in one update of one bucket.  It is data, which
 * codecs/tensors.py fills in, says what is in it, and keeps: the structs here
 * have the columns of its tables.  Nothing in it is changed while it works but
 * findings.
 *
 * A wire has one entry for `grain` elements of a tensor, whose last entry may
 * have fewer; ranges count entries.
 */
#ifndef CHAINER_FP8PIPE_CODING_H
#define CHAINER_FP8PIPE_CODING_H
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
    f32 *out;
    const f32 *residual; /* what the last encoding has left out, and where */
    f32 *left;           /* this one's goes; NULL: nothing is kept */
    int64_t elements;
} Tensor;

typedef struct {
    float encode, encode_inverse, scale, inverse;
    float bound; /* of fp8's residuals */
} Scales;

enum { BAD_GRADIENT = 1, BAD_VALUE = 2 };

typedef struct {
    int64_t clipped, encoded, blamed, nonfinite;
    int64_t largest; /* bits of the largest magnitude in a decoded wire */
} Findings;

/* As above, of the encoding of a tensor's mean: at the tensor's first element,
 * which may lie outside. */
typedef struct {
    const f32 *residual;
    f32 *left;
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
} Coding;

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
void encode_range(const Coding *coding, Range range, char *wire)
{
    FOR_EACH_PART(coding, range, p) {
        const Tensor *t = &coding->tensors[p.tensor];
        const Scales *scales = &coding->scales[p.tensor];
        Findings *findings = &coding->findings[p.tensor];
        const f32 *gradient = t->gradient + p.at;
        const f32 *residual = t->residual ? t->residual + p.at : NULL;
        f32 *left = residual ? t->left + p.at : NULL;
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
            finite = CHOOSE(encode_halves)(gradient, coding->prescale, to,
                                           p.n);
            break;
        case BFLOAT16:
            finite = CHOOSE(encode_bfloats)(gradient, coding->prescale, to,
                                            p.n);
            break;
        case RECORDS:
            finite = encode_records(gradient, scales->encode, residual, left,
                                    to, p.n);
            break;
        default:
            counts = residual
                ? encode_kept(GRADIENT, gradient, 1.0f, t->parameter + p.at,
                              residual, left, to, p.n, q)
                : encode_ratios(gradient, t->parameter + p.at, to, p.n, q,
                                coding->rounding);
            findings->clipped += (int64_t)counts.clipped;
            findings->encoded += (int64_t)p.n;
            if (counts.nonfinite)
                findings->blamed |= all_finite_floats(gradient, p.n)
                    ? BAD_VALUE : BAD_GRADIENT;
        }
        findings->blamed |= finite ? 0 : BAD_GRADIENT;
    }
}

/* Writes the values of a wire into gradients. */
void decode_range(const Coding *coding, Range range, const char *wire)
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
        case FLOAT32: finite = scale_floats(from, 1.0f, out, p.n); break;
        case FLOAT16: finite = CHOOSE(decode_halves)(from, out, p.n); break;
        case BFLOAT16: finite = CHOOSE(decode_bfloats)(from, out, p.n); break;
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
            finite = !CHOOSE(decode_ratios)(from, t->parameter + p.at, out,
                                            p.n, q, &largest);
        }
        findings->nonfinite |= !finite;
        if (largest > findings->largest)
            findings->largest = largest;
    }
}

/* Adds n entries to sums. */
void accumulate_wire(const Coding *coding, const void *wire, f32 *total,
                     size_t n)
{
    switch (coding->codec) {
    case FLOAT32: add_floats(wire, total, n); break;
    case FLOAT16: CHOOSE(accumulate_halves)(wire, 1.0f, total, n); break;
    case BFLOAT16: CHOOSE(accumulate_bfloats)(wire, 1.0f, total, n); break;
    case RECORDS: decode_records(wire, 1.0f, total, n * RECORD, 1); break;
    default: CHOOSE(accumulate_codes)(wire, 1.0f, total, n);
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

/* Makes sums of a range their mean, in the wire's format; `total` is where
 * the range begins, and may be overwritten.  `means`: one for each tensor, of
 * which floats know nothing here. */
void encode_mean(const Coding *coding, Range range, char *wire, f32 *total,
                 int count, const Mean *means)
{
    const float factor = 1.0f / (float)count;
    const size_t entries = (size_t)(range.stop - range.start);
    void *whole = wire;
    switch (coding->codec) {
    case FLOAT32: scale_floats(total, factor, whole, entries); return;
    case FLOAT16:
        CHOOSE(encode_halves)(total, factor, whole, entries);
        return;
    case BFLOAT16:
        CHOOSE(encode_bfloats)(total, factor, whole, entries);
        return;
    case RELAY:
        scale_floats(total, factor, total, entries);
        encode_codes(total, whole, entries, coding->rounding);
        return;
    default: break;
    }
    FOR_EACH_PART(coding, range, p) {
        const Tensor *t = &coding->tensors[p.tensor];
        const Scales *scales = &coding->scales[p.tensor];
        Findings *findings = &coding->findings[p.tensor];
        const Mean *mean = &means[p.tensor];
        const f32 *parameter = t->parameter + p.at;
        const f32 *residual = mean->residual ? mean->residual + p.at : NULL;
        f32 *left = residual ? mean->left + p.at : NULL;
        f32 *sum = total + p.entry * coding->grain;
        void *to = wire + (size_t)p.entry * coding->itemsize;
        Ratio q = {scales->scale, scales->inverse, coding->epsilon,
                   scales->bound};
        Counts counts;
        if (coding->codec == RECORDS) {
            encode_records(sum, factor, residual, left, to, p.n);
            continue;
        }
        if (residual)
            counts = encode_kept(SUM, sum, factor, parameter, residual, left,
                                 to, p.n, q);
        else {
            decode_sums(sum, factor, parameter, p.n, q);
            counts = encode_ratios(sum, parameter, to, p.n, q,
                                   coding->rounding);
        }
        findings->clipped += (int64_t)counts.clipped;
        if (counts.nonfinite && !all_finite_floats(parameter, p.n))
            findings->blamed |= BAD_VALUE;
    }
}

#endif
