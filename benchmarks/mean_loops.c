/* Sums and means of four contributions in fp8, by the package's loops alone.
 *
 * mean_loops.py compiles and runs it.  It calls the loops as an exchange does
 * (encode_gathered in allreduce/native/work.h), and prints rounds of seconds:
 * of a copy of float32, of sums and means in memory, and in the cache.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include "half.h"
#include "means.h"

enum { RANKS = 4, SUMS = 1024, CACHED = 1 << 14, AGAIN = 200, ROUNDS = 15 };
static const size_t elements = 1 << 22;
static const Ratio ratio = {300.0f, 1 / 300.0f, 1e-5f};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void *array(size_t size, int huge)
{
    const size_t page = 2 << 20;
    size = (size + page - 1) / page * page;
    void *memory = aligned_alloc(page, size);
    if (memory == NULL)
        exit(1);
    if (huge)
        madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 0, size);
    return memory;
}

static void make_means(const u8 *const *wires, const f32 *parameter,
                       f32 *residual, u8 *codes, size_t n)
{
    f32 sums[SUMS] __attribute__((aligned(64)));
    for (size_t start = 0; start < n; start += SUMS) {
        const u8 *from[RANKS];
        for (int rank = 0; rank < RANKS; ++rank)
            from[rank] = wires[rank] + start;
        long_sum(from, RANKS, sums, SUMS);
        long_ratio_mean(sums, RANKS, parameter + start, residual + start,
                        codes + start, SUMS, ratio, E5M2_NEAREST);
    }
}

int main(int count, char **arguments)
{
    const int huge = count > 1 && arguments[1][0] == 'h';
    u8 *wires[RANKS], *codes = array(elements, huge);
    f32 *parameter = array(4 * elements, huge);
    f32 *residual = array(4 * elements, huge);
    f32 *copy = array(4 * elements, huge);
    for (size_t i = 0; i < elements; ++i)
        parameter[i] = 0.1f * ((float)random() / (float)RAND_MAX - 0.5f);
    for (int rank = 0; rank < RANKS; ++rank) {
        wires[rank] = array(elements, huge);
        for (size_t i = 0; i < elements; ++i)
            wires[rank][i] = (u8)e5m2_encode(
                120.0f * ((float)random() / (float)RAND_MAX - 0.5f), 0, 0);
    }
    for (int round = 0; round < ROUNDS; ++round) {
        double start = now();
        memcpy(copy, parameter, 4 * elements);
        __asm__ volatile("" : : "r"(copy) : "memory"); /* it is read */
        const double copied = now() - start;
        start = now();
        make_means((const u8 *const *)wires, parameter, residual, codes,
                   elements);
        const double cold = now() - start;
        start = now();
        for (int time = 0; time < AGAIN; ++time)
            make_means((const u8 *const *)wires, parameter, residual, codes,
                       CACHED);
        printf("%.9f %.9f %.9f\n", copied / (double)elements,
               cold / (double)elements, (now() - start) / AGAIN / CACHED);
    }
    return 0;
}
