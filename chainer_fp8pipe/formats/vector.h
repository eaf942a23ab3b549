/* What loops in plain C need to become vector code, and the conversions that
 * a compiler does not find.
 *
 * -fno-trapping-math lets the compiler compute both sides of a choice.  GCC 12
 * and later on glibc make one copy of a loop for each generation of x86-64,
 * among which the loader picks (CLONES).
 *
 * Processors of x86-64-v3 and later convert halves, of which an fp8 code is
 * the upper byte, in one instruction; GCC 12 does not find it.  So loops over
 * what is converted come in three variants (VARIANTS, CHOOSE), each of which
 * first converts a strip that stays in the nearest cache, and is plain C from
 * there on.  All give the same bits but for the sign and payload of a NaN,
 * which is for the loops to settle: converted here, it may keep its own or
 * have none.
 */
#ifndef CHAINER_FP8PIPE_VECTOR_H
#define CHAINER_FP8PIPE_VECTOR_H
#include <stddef.h>
#include <stdint.h>

#include "e5m2.h"

#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "float arithmetic with excess precision gives other bits than a GPU"
#endif

#if defined(CLONES)
/* Given on the command line: tests build one variant alone. */
#define ONE_VARIANT
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) \
    && defined(__GNUC__) && __GNUC__ >= 12
#define CLONES \
    __attribute__((target_clones("default", "arch=x86-64-v3", \
                                 "arch=x86-64-v4")))
#else
#define CLONES
#endif

typedef uint16_t u16 __attribute__((aligned(1), may_alias));

#define HALF_NAN 0x7E00
#define HALF_BEYOND 0x47800000 /* 65536, whose half would be infinite */

/* Elements; a loop over fewer than 64 might be unrolled, and then not become
 * vector code. */
#define STRIP ((size_t)128)

/* Codes from so many places may be summed in one go. */
#define MOST_SUMMED 16

/* The half next to x, ties to even; from 65520 on it is infinite. */
E5M2_FUNCTION unsigned int half_encode(float x)
{
    int magnitude = e5m2_magnitude(x);
    unsigned int half =
        e5m2_round(e5m2_min(magnitude, HALF_BEYOND), 10) >> 16;
    half = magnitude > E5M2_F32_INFINITY ? HALF_NAN : half;
    return half | (e5m2_bits(x) & E5M2_F32_SIGN) >> 16;
}

/* The value of a half; every NaN becomes the quiet one of its sign. */
E5M2_FUNCTION float half_decode(unsigned int half)
{
    int shifted = (int)(half & 0x7FFF) << 13;
    int bits = e5m2_value_bits(shifted);
    bits = shifted < (31 << 23) ? bits : E5M2_F32_INFINITY;
    bits = shifted > (31 << 23) ? E5M2_F32_NAN : bits;
    return e5m2_float((unsigned int)bits | (half & 0x8000u) << 16);
}

/* VARIANTS(LOOP) defines the variants of a loop, and CHOOSE(loop) is the one
 * for this processor. */
#if defined(ONE_VARIANT)
#define IN_v3
#define IN_v4
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VARIANTS(LOOP) LOOP(v4)
#define CHOOSE(loop) loop##_v4
#elif defined(__AVX2__) && defined(__F16C__)
#define VARIANTS(LOOP) LOOP(v3)
#define CHOOSE(loop) loop##_v3
#endif
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) \
    && defined(__GNUC__) && __GNUC__ >= 12
#define IN_v3 __attribute__((target("arch=x86-64-v3")))
#define IN_v4 __attribute__((target("arch=x86-64-v4")))
#define VARIANTS(LOOP) LOOP(v4) LOOP(v3) LOOP(any)
#define CHOOSE(loop) \
    (__builtin_cpu_supports("x86-64-v4")   ? loop##_v4 \
     : __builtin_cpu_supports("x86-64-v3") ? loop##_v3 \
                                           : loop##_any)
#endif
#define IN_any
#if !defined(VARIANTS)
#define VARIANTS(LOOP) LOOP(any)
#define CHOOSE(loop) loop##_any
#else
#include <immintrin.h>

/* Where one shuffle puts 16 codes: above a zero each, which makes halves of
 * them. */
#define ABOVE_ZEROS \
    _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, \
                     -1, 4, -1, 5, -1, 6, -1, 7, \
                     -1, 8, -1, 9, -1, 10, -1, 11, \
                     -1, 12, -1, 13, -1, 14, -1, 15)

/* The values of 16 codes; a function would return what SSE2 has not. */
#define WIDEN_16_CODES(codes) \
    _mm512_cvtph_ps(_mm256_shuffle_epi8( \
        _mm256_broadcastsi128_si256( \
            _mm_loadu_si128((const __m128i *)(codes))), \
        ABOVE_ZEROS))

IN_v4 static inline void widen_codes_v4(const u8 *codes, float *out)
{
    for (size_t i = 0; i < STRIP; i += 16)
        _mm512_storeu_ps(out + i, WIDEN_16_CODES(codes + i));
}

/* A strip of sums of codes, from place `at` on, with one NaN; they begin as
 * zeros, as 0 plus -0 is 0.  Four vectors at a time do not wait for each
 * other's additions. */
IN_v4 static inline void sum_strip_v4(const u8 *const *codes, int count,
                                      size_t at, f32 *out)
{
    const __m512 nan = _mm512_set1_ps(e5m2_float(E5M2_F32_NAN));
    for (size_t i = 0; i < STRIP; i += 64) {
        __m512 sums[4];
        for (int j = 0; j < 4; ++j)
            sums[j] = _mm512_setzero_ps();
        for (int k = 0; k < count; ++k)
            for (int j = 0; j < 4; ++j)
                sums[j] = _mm512_add_ps(
                    sums[j], WIDEN_16_CODES(codes[k] + at + i + 16 * j));
        for (int j = 0; j < 4; ++j)
            _mm512_storeu_ps(
                out + i + 16 * j,
                _mm512_mask_mov_ps(
                    sums[j],
                    _mm512_cmp_ps_mask(sums[j], sums[j], _CMP_UNORD_Q),
                    nan));
    }
}

IN_v4 static inline void widen_halves_v4(const u16 *halves, float *out)
{
    for (size_t i = 0; i < STRIP; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(
                                      (const __m256i *)(halves + i))));
}

IN_v4 static inline void narrow_v4(const float *values, u16 *halves)
{
    for (size_t i = 0; i < STRIP; i += 16)
        _mm256_storeu_si256(
            (__m256i *)(halves + i),
            _mm512_cvtps_ph(_mm512_loadu_ps(values + i),
                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

IN_v3 static inline void widen_codes_v3(const u8 *codes, float *out)
{
    for (size_t i = 0; i < STRIP; i += 8) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i));
        /* A zero below each code makes a half of it. */
        __m128i halves = _mm_unpacklo_epi8(_mm_setzero_si128(), bytes);
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
}

IN_v3 static inline void sum_strip_v3(const u8 *const *codes, int count,
                                      size_t at, f32 *out)
{
    const __m256 nan = _mm256_set1_ps(e5m2_float(E5M2_F32_NAN));
    for (size_t i = 0; i < STRIP; i += 8) {
        __m256 sum = _mm256_setzero_ps();
        for (int k = 0; k < count; ++k) {
            __m128i bytes = _mm_loadl_epi64(
                (const __m128i *)(codes[k] + at + i));
            __m128i halves = _mm_unpacklo_epi8(_mm_setzero_si128(), bytes);
            sum = _mm256_add_ps(sum, _mm256_cvtph_ps(halves));
        }
        __m256 is_nan = _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q);
        _mm256_storeu_ps(out + i, _mm256_blendv_ps(sum, nan, is_nan));
    }
}

IN_v3 static inline void widen_halves_v3(const u16 *halves, float *out)
{
    for (size_t i = 0; i < STRIP; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(
                                      (const __m128i *)(halves + i))));
}

IN_v3 static inline void narrow_v3(const float *values, u16 *halves)
{
    for (size_t i = 0; i < STRIP; i += 8)
        _mm_storeu_si128(
            (__m128i *)(halves + i),
            _mm256_cvtps_ph(_mm256_loadu_ps(values + i),
                            _MM_FROUND_TO_NEAREST_INT));
}
#endif

static inline void widen_codes_any(const u8 *codes, float *out)
{
    INDEPENDENT
    for (size_t i = 0; i < STRIP; ++i)
        out[i] = e5m2_decode(codes[i]);
}

static inline void sum_strip_any(const u8 *const *codes, int count, size_t at,
                                 f32 *out)
{
    float sums[STRIP] = {0};
    for (int k = 0; k < count; ++k) {
        const u8 *these = codes[k] + at;
        INDEPENDENT
        for (size_t i = 0; i < STRIP; ++i)
            sums[i] += e5m2_decode(these[i]);
    }
    INDEPENDENT
    for (size_t i = 0; i < STRIP; ++i)
        out[i] = e5m2_one_nan(sums[i]);
}

static inline void widen_halves_any(const u16 *halves, float *out)
{
    INDEPENDENT
    for (size_t i = 0; i < STRIP; ++i)
        out[i] = half_decode(halves[i]);
}

static inline void narrow_any(const float *values, u16 *halves)
{
    INDEPENDENT
    for (size_t i = 0; i < STRIP; ++i)
        halves[i] = (u16)half_encode(values[i]);
}

/* Whether dividing by a number of ranks is multiplying by its inverse. */
static inline int is_power_of_two(float count)
{
    return (e5m2_bits(count) & 0x7FFFFFu) == 0;
}

#endif
