/* Threads that do tasks of chunks while the thread that has called the
 * executor exchanges messages.  That one does tasks too when no message has
 * come, and none of these touches the interpreter.
 *
 * Executors of one communicator, one for each model, have the same threads.
 *
 * Numbers are IEEE's in all of them, whatever mode a library has put a thread
 * into: results must not depend on which thread, or which rank, does a task.
 */
#ifndef CHAINER_FP8PIPE_WORKERS_H
#define CHAINER_FP8PIPE_WORKERS_H
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include "tasks.h"

#define AWAKE 30e-6 /* seconds that a worker looks for tasks before it sleeps:
                     * as long as a task takes, or to wake a thread */

typedef struct Workers {
    pthread_t *threads;
    int count;
    int executors; /* that use them */
    pid_t owner; /* a fork of this process has no threads */
    pthread_mutex_t lock;
    pthread_cond_t more;
    int asleep;
    atomic_int stop;
    Chunk *first, *last; /* tasks, the oldest first */
    atomic_int waiting;  /* how many there are */
} Workers;

/* Denormal numbers are neither read nor written as 0; the mode before. */
static uint64_t begin_ieee(void)
{
#if defined(__SSE2__)
    unsigned int before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before & ~(UINT64_C(1) << 24)));
    return before;
#else
    return 0;
#endif
}

static void end_ieee(uint64_t before)
{
#if defined(__SSE2__)
    _mm_setcsr((unsigned int)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

/* The oldest task that nobody does yet; NULL: there is none. */
static Chunk *next_task(Workers *workers)
{
    pthread_mutex_lock(&workers->lock);
    Chunk *chunk = workers->first;
    if (chunk) {
        workers->first = chunk->next_task;
        atomic_fetch_sub(&workers->waiting, 1);
        atomic_fetch_add(&chunk->lane->shared->with_workers, 1);
    }
    pthread_mutex_unlock(&workers->lock);
    return chunk;
}

static void enqueue(Workers *workers, Chunk *chunk)
{
    chunk->next_task = NULL;
    pthread_mutex_lock(&workers->lock);
    if (workers->first)
        workers->last->next_task = chunk;
    else
        workers->first = chunk;
    workers->last = chunk;
    atomic_fetch_add(&workers->waiting, 1);
    if (workers->asleep)
        pthread_cond_signal(&workers->more);
    pthread_mutex_unlock(&workers->lock);
}

/* Does a task that no worker has begun; whether there was one. */
static int help(Workers *workers)
{
    Chunk *chunk = workers ? next_task(workers) : NULL;
    if (chunk == NULL)
        return 0;
    Shared *shared = chunk->lane->shared;
    perform_here(shared, chunk);
    atomic_fetch_sub(&shared->with_workers, 1);
    return 1;
}

/* Waits until there may be a task, or the end; at first without sleeping. */
static void wait_for_tasks(Workers *workers)
{
    for (double end = now() + AWAKE; now() < end; sched_yield())
        if (atomic_load(&workers->waiting))
            return;
    pthread_mutex_lock(&workers->lock);
    ++workers->asleep;
    while (!workers->stop && !atomic_load(&workers->waiting))
        pthread_cond_wait(&workers->more, &workers->lock);
    --workers->asleep;
    pthread_mutex_unlock(&workers->lock);
}

static void *work(void *argument)
{
    Workers *workers = argument;
    begin_ieee();
    while (!workers->stop) {
        wait_for_tasks(workers);
        Chunk *chunk = next_task(workers);
        if (chunk) {
            Shared *shared = chunk->lane->shared;
            perform(chunk);
            atomic_store_explicit(&chunk->working, 0, memory_order_release);
            atomic_fetch_sub(&shared->with_workers, 1);
        }
    }
    return NULL;
}

/* Drops what nobody has begun for an executor, and waits for the rest: its
 * memory and the arrays of its jobs may go. */
static void abandon(Workers *workers, Shared *shared)
{
    /* A fork does not know who held the lock. */
    if (workers == NULL || workers->owner != getpid())
        return;
    pthread_mutex_lock(&workers->lock);
    Chunk **place = &workers->first, *last = NULL;
    while (*place)
        if ((*place)->lane->shared == shared) {
            *place = (*place)->next_task;
            atomic_fetch_sub(&workers->waiting, 1);
        }
        else {
            last = *place;
            place = &last->next_task;
        }
    workers->last = last;
    pthread_mutex_unlock(&workers->lock);
    while (atomic_load(&shared->with_workers))
        sched_yield();
}

/* An executor needs them no longer. */
static void leave_workers(Workers *workers)
{
    if (workers == NULL || workers->owner != getpid()
        || --workers->executors)
        return;
    pthread_mutex_lock(&workers->lock);
    workers->stop = 1;
    pthread_cond_broadcast(&workers->more);
    pthread_mutex_unlock(&workers->lock);
    for (int i = 0; i < workers->count; ++i)
        pthread_join(workers->threads[i], NULL);
    pthread_cond_destroy(&workers->more);
    pthread_mutex_destroy(&workers->lock);
    free(workers->threads);
    free(workers);
}

/* Starts `count` threads for an executor; where the system has fewer to give
 * these do the work.  NULL: there is no memory. */
static Workers *make_workers(int count)
{
    Workers *workers = calloc(1, sizeof *workers);
    if (workers == NULL)
        return NULL;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->more, NULL);
    workers->owner = getpid();
    workers->executors = 1;
    workers->threads = calloc((size_t)count, sizeof *workers->threads);
    if (workers->threads == NULL) {
        leave_workers(workers);
        return NULL;
    }
    /* Signals are for Python's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (workers->count < count
           && pthread_create(&workers->threads[workers->count], NULL, work,
                             workers) == 0)
        ++workers->count;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return workers;
}

#endif
