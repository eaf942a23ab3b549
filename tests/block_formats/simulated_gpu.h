/* As much of CUDA as the kernels of records use, for a CPU.
 *
 * The 32 threads of a warp are contexts that take turns; a thread's turn ends
 * where it meets the others, at a shuffle.  Two sets of values in turn, as a
 * thread may be at the next shuffle while others have not read those of this.
 */
#include <ucontext.h>

#define __global__ static
#define WARP 32

struct Index {
    unsigned int x;
};
static Index blockIdx, blockDim, threadIdx;

static ucontext_t scheduler, contexts[WARP];
static char stacks[WARP][1 << 16];
static unsigned int shuffled[2][WARP];
static int meetings[WARP], running, ended;
static void (*of_thread)(void *);
static void *arguments;

static inline void next_thread()
{
    int before = running;
    running = (running + 1) % WARP;
    threadIdx.x = threadIdx.x / WARP * WARP + (unsigned int)running;
    swapcontext(&contexts[before], &contexts[running]);
}

template <typename T> static T __shfl_xor_sync(unsigned int, T value, int other)
{
    int mine = running, set = meetings[mine]++ % 2;
    shuffled[set][mine] = (unsigned int)value;
    next_thread();
    return (T)shuffled[set][mine ^ other];
}

static void begin_thread()
{
    int mine = running;
    of_thread(arguments);
    ++ended;
    if (mine + 1 < WARP)    /* all end in the same turn */
        next_thread();
}

static void run_warp()
{
    ended = running = 0;
    for (int i = 0; i < WARP; ++i) {
        meetings[i] = 0;
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks[i];
        contexts[i].uc_stack.ss_size = sizeof stacks[i];
        contexts[i].uc_link = &scheduler;
        makecontext(&contexts[i], begin_thread, 0);
    }
    swapcontext(&scheduler, &contexts[0]);
}

/* Runs a kernel; returns whether all threads of each warp have met as often. */
static int run_grid(unsigned int blocks, unsigned int threads,
                    void (*kernel)(void *), void *of_kernel)
{
    of_thread = kernel;
    arguments = of_kernel;
    blockDim.x = threads;
    int good = threads % WARP == 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (unsigned int first = 0; first < threads; first += WARP) {
            threadIdx.x = first;
            run_warp();
            for (int i = 0; i < WARP; ++i)
                good &= ended == WARP && meetings[i] == meetings[0];
        }
    return good;
}
