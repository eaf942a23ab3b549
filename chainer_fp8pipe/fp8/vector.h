/* What loops in plain C need to become vector code.
 *
 * -fno-trapping-math lets the compiler compute both sides of a choice.  GCC 12
 * and later on glibc make one copy of a loop for each generation of x86-64,
 * among which the loader picks.
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

/* Input and output are either the same buffer or do not overlap. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

typedef uint8_t u8;
/* A buffer may start at any address. */
typedef float f32 __attribute__((aligned(1), may_alias));

/* Whether dividing by a number of ranks is multiplying by its inverse. */
static inline int is_power_of_two(float count)
{
    return (e5m2_bits(count) & 0x7FFFFFu) == 0;
}

#endif
