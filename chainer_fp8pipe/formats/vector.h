/* What loops in plain C need to become vector code, and the conversions that
 * a compiler does not find.
 *
 * -fno-trapping-math lets the compiler compute both sides of a choice.  GCC 12
 * and later on glibc make one copy of a loop for each generation of x86-64,
 * among which the loader picks (CLONES).
 *
 * Processors of x86-64-v3 convert halves, of which an fp8 code is the upper
 * byte, in one instruction, three to four times as fast as what GCC makes.  So
 * loops over what is converted come in two variants (VARIANTS, CHOOSE), with
 * the same bits but for the sign and payload of a NaN, which is for the loops
 * to settle.
 */
#ifndef CHAINER_FP8PIPE_VECTOR_H
#define CHAINER_FP8PIPE_VECTOR_H
#include <stddef.h>
#include <stdint.h>

#include "e5m2.h"

#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "float arithmetic with excess precision gives other bits than a GPU"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) \
    && defined(__GNUC__) && __GNUC__ >= 12
#define CLONES \
    __attribute__((target_clones("default", "arch=x86-64-v3", \
                                 "arch=x86-64-v4")))
#define IN_v3 __attribute__((target("arch=x86-64-v3")))
#define VARIANTS(LOOP) LOOP(v3) LOOP(any)
#define CHOOSE(loop) \
    (__builtin_cpu_supports("x86-64-v3") ? loop##_v3 : loop##_any)
#else
#define CLONES
#define VARIANTS(LOOP) LOOP(any)
#define CHOOSE(loop) loop##_any
#endif
#define IN_any

typedef uint16_t u16 __attribute__((aligned(1), may_alias));

/* Elements; a loop over fewer than 64 might be unrolled, and then not become
 * vector code. */
#define STRIP ((size_t)128)

/* Strips of codes, halves and bfloats to floats, and back. */
#define WIDEN(NAME, TYPE, DECODE) \
    E5M2_FUNCTION void widen_##NAME(const TYPE *wire, float *out) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < STRIP; ++i) \
            out[i] = DECODE(wire[i]); \
    }
#define NARROW(NAME, ENCODE) \
    E5M2_FUNCTION void narrow_##NAME(const float *values, u16 *wire) \
    { \
        INDEPENDENT \
        for (size_t i = 0; i < STRIP; ++i) \
            wire[i] = (u16)ENCODE(values[i]); \
    }
WIDEN(codes_any, u8, e5m2_decode)
WIDEN(halves_any, u16, half_decode)
NARROW(halves_any, half_encode)
WIDEN(bfloats_any, u16, bfloat_decode)
NARROW(bfloats_any, bfloat_encode)

#ifdef IN_v3
#include <immintrin.h>
#define widen_bfloats_v3 widen_bfloats_any
#define narrow_bfloats_v3 narrow_bfloats_any

IN_v3 static inline void widen_codes_v3(const u8 *codes, float *out)
{
    for (size_t i = 0; i < STRIP; i += 8) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i));
        /* A zero below each code makes a half of it. */
        __m128i halves = _mm_unpacklo_epi8(_mm_setzero_si128(), bytes);
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
}

IN_v3 static inline void widen_halves_v3(const u16 *halves, float *out)
{
    for (size_t i = 0; i < STRIP; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(
                                      (const __m128i *)(halves + i))));
}

IN_v3 static inline void narrow_halves_v3(const float *values, u16 *halves)
{
    for (size_t i = 0; i < STRIP; i += 8)
        _mm_storeu_si128(
            (__m128i *)(halves + i),
            _mm256_cvtps_ph(_mm256_loadu_ps(values + i),
                            _MM_FROUND_TO_NEAREST_INT));
}
#endif

/* As above, of n elements, at most a strip; there are no NaN but one in what
 * is narrowed. */
#define READ(V, KIND, TYPE) \
    IN_##V static inline void read_##KIND##_##V(const TYPE *wire, \
                                                float *out, size_t n) \
    { \
        TYPE last[STRIP]; \
        if (n < STRIP) { \
            memset(last, 0, sizeof last); \
            wire = memcpy(last, wire, n * sizeof *wire); \
        } \
        widen_##KIND##_##V(wire, out); \
    }
#define WRITE(V, KIND) \
    IN_##V static inline void write_##KIND##_##V(const float *values, \
                                                 u16 *wire, size_t n) \
    { \
        u16 last[STRIP]; \
        narrow_##KIND##_##V(values, n < STRIP ? last : wire); \
        if (n < STRIP) \
            memcpy(wire, last, n * sizeof *wire); \
    }
#define READ_AND_WRITE(V) \
    READ(V, codes, u8) \
    READ(V, halves, u16) READ(V, bfloats, u16) \
    WRITE(V, halves) WRITE(V, bfloats)
VARIANTS(READ_AND_WRITE)

#endif
