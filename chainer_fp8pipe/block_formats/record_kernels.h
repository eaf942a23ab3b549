/* A GPU's kernels: eight neighbouring threads have a record.
 *
 * Thread j of them has elements j, j + 8, j + 16 and j + 24.  So the eight read
 * and write what lies side by side, at any address, and no byte of a record is
 * of two threads, except for INT5's fifth bits.
 *
 * Blocks have whole warps, all of whose threads meet at the shuffles, those
 * that have no record, too.  record_elements.h comes before this text.
 */
#ifndef CHAINER_FP8PIPE_RECORD_KERNELS_H
#define CHAINER_FP8PIPE_RECORD_KERNELS_H

#define THREADS 8             /* of a record */
#define EACH (RECORD / THREADS) /* elements of a thread */
#define ALL_THREADS 0xFFFFFFFFu

/* Where the eight's record begins, in elements. */
E5M2_FUNCTION long long own_record(void)
{
    return (blockIdx.x * (long long)blockDim.x + threadIdx.x) / THREADS
           * RECORD;
}

E5M2_FUNCTION int largest_of_threads(int x)
{
    for (int other = 1; other < THREADS; other *= 2)
        x = e5m2_max(x, __shfl_xor_sync(ALL_THREADS, x, other));
    return x;
}

E5M2_FUNCTION unsigned int bits_of_threads(unsigned int x)
{
    for (int other = 1; other < THREADS; other *= 2)
        x |= __shfl_xor_sync(ALL_THREADS, x, other);
    return x;
}

/* A thread's bytes of a record. */
E5M2_FUNCTION void store_record(const unsigned int *bits, unsigned int fifths,
                                int code, unsigned char *record, int format)
{
    int own = (int)(threadIdx.x % THREADS);
    record[own] = (unsigned char)two_elements(bits[0], bits[2]);
    record[own + THREADS] = (unsigned char)two_elements(bits[1], bits[3]);
    if (format == INT5 && own < 4)
        record[RECORD / 2 + own] = (unsigned char)(fifths >> 8 * own);
    if (own == THREADS - 1)
        record[record_bytes(format) - 1] = (unsigned char)code;
}

/* As encode_records in record_loops.h, which counts besides; `residual` is
 * read and written if there is `feedback`. */
E5M2_FUNCTION void encode_own(const float *values, float factor,
                              float *residual, unsigned char *wire,
                              long long n, int feedback, int format)
{
    long long begin = own_record();
    long long first = begin + threadIdx.x % THREADS;
    float v[EACH];
    unsigned int bits[EACH], fifths = 0;
    int largest = 0, second = 0;
    for (int k = 0; k < EACH; ++k) {
        long long i = first + k * THREADS;
        float value = i < n ? values[i] : 0.0f;
        float left = feedback && i < n ? residual[i] : 0.0f;
        v[k] = feedback ? value * factor + left : value * factor;
        largest = e5m2_max(largest, e5m2_magnitude(v[k]));
    }
    largest = largest_of_threads(largest);
    for (int k = 0; k < EACH; ++k)
        second = e5m2_max(second, magnitude_below(v[k], largest));
    int code = scale_code(largest, format);
    float scale = scale_value(code, format);
    float inverse = scale_inverse(code, scale);
    float limit = largest_left(code, largest_of_threads(second));
    for (int k = 0; k < EACH; ++k) {
        unsigned int known = code == UNKNOWN_SCALE ? 0u : ~0u;
        bits[k] = element_encode(&v[k], scale, inverse, limit, format)
                  & known;
        fifths |= (bits[k] >> 4 & 1u)
                  << (threadIdx.x % THREADS + (unsigned int)k * THREADS);
        long long i = first + k * THREADS;
        if (feedback && i < n)
            residual[i] = known ? v[k] : 0.0f;
    }
    if (format == INT5)
        fifths = bits_of_threads(fifths);
    if (begin < n)
        store_record(bits, fifths, code,
                     wire + begin / RECORD * record_bytes(format), format);
}

/* The bits of element i of a record. */
E5M2_FUNCTION unsigned int load_element(const unsigned char *record, int i,
                                        int format)
{
    unsigned int bits =
        (unsigned int)record[i % (RECORD / 2)] >> (i < RECORD / 2 ? 0 : 4)
        & 15u;
    if (format == INT5)
        bits |= ((unsigned int)record[RECORD / 2 + i / 8] >> i % 8 & 1u) << 4;
    return bits;
}

/* As decode_records in record_loops.h; there is one NaN only, as processors
 * make others. */
E5M2_FUNCTION void decode_own(const unsigned char *wire, float factor,
                              float *out, long long n, int adds, int format)
{
    long long begin = own_record();
    if (begin >= n)
        return;
    const unsigned char *record =
        wire + begin / RECORD * record_bytes(format);
    float scale =
        scale_value(record[record_bytes(format) - 1], format) * factor;
    for (int k = 0; k < EACH; ++k) {
        int i = (int)(threadIdx.x % THREADS) + k * THREADS;
        float value =
            element_value(load_element(record, i, format), format) * scale;
        if (begin + i < n)
            out[begin + i] = e5m2_one_nan(adds ? out[begin + i] + value
                                               : value);
    }
}

#define RECORD_KERNELS(FORMAT) \
    extern "C" __global__ void encode_alone_##FORMAT( \
        const float *values, float factor, unsigned char *wire, long long n) \
    { \
        encode_own(values, factor, 0, wire, n, 0, FORMAT); \
    } \
    extern "C" __global__ void encode_feedback_##FORMAT( \
        const float *values, float factor, float *residual, \
        unsigned char *wire, long long n) \
    { \
        encode_own(values, factor, residual, wire, n, 1, FORMAT); \
    } \
    extern "C" __global__ void decode_##FORMAT( \
        const unsigned char *wire, float factor, float *out, long long n) \
    { \
        decode_own(wire, factor, out, n, 0, FORMAT); \
    } \
    extern "C" __global__ void accumulate_##FORMAT( \
        const unsigned char *wire, float factor, float *out, long long n) \
    { \
        decode_own(wire, factor, out, n, 1, FORMAT); \
    }

RECORD_KERNELS(INT4)
RECORD_KERNELS(E2M1)
RECORD_KERNELS(INT5)

#endif
