/* Threads that do tasks of chunks while the thread that has called the
 * executor exchanges messages.  That one does tasks too when no message has
 * come, and none of these touches the interpreter.
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
    Shared *shared;
    pthread_t *threads;
    int count;
    pid_t owner; /* a fork of this process has no threads */
    pthread_mutex_t lock;
    pthread_cond_t more;
    int asleep;
    atomic_int stop;
    Chunk **tasks; /* a ring; each chunk is there at most once */
    unsigned int room; /* a power of two */
    atomic_uint first, last; /* the oldest one, and where the next goes */
    atomic_int busy; /* workers that have a task */
} Workers;

static int has_tasks(Workers *workers)
{
    return atomic_load(&workers->first) != atomic_load(&workers->last);
}

/* The oldest task that nobody does yet; NULL: there is none. */
static Chunk *next_task(Workers *workers)
{
    Chunk *chunk = NULL;
    pthread_mutex_lock(&workers->lock);
    if (has_tasks(workers)) {
        chunk = workers->tasks[atomic_fetch_add(&workers->first, 1)
                               & (workers->room - 1)];
        atomic_fetch_add(&workers->busy, 1);
    }
    pthread_mutex_unlock(&workers->lock);
    return chunk;
}

static void enqueue(Workers *workers, Chunk *chunk)
{
    pthread_mutex_lock(&workers->lock);
    workers->tasks[atomic_load(&workers->last) & (workers->room - 1)] = chunk;
    atomic_fetch_add(&workers->last, 1);
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
    perform_here(workers->shared, chunk);
    atomic_fetch_sub(&workers->busy, 1);
    return 1;
}

/* Waits until there may be a task, or the end; at first without sleeping. */
static void wait_for_tasks(Workers *workers)
{
    for (double end = now() + AWAKE; now() < end; sched_yield())
        if (has_tasks(workers))
            return;
    pthread_mutex_lock(&workers->lock);
    ++workers->asleep;
    while (!workers->stop && !has_tasks(workers))
        pthread_cond_wait(&workers->more, &workers->lock);
    --workers->asleep;
    pthread_mutex_unlock(&workers->lock);
}

static void *work(void *argument)
{
    Workers *workers = argument;
    while (!workers->stop) {
        wait_for_tasks(workers);
        Chunk *chunk = next_task(workers);
        if (chunk) {
            chunk->result = perform(workers->shared, chunk);
            atomic_store_explicit(&chunk->working, 0, memory_order_release);
            atomic_fetch_sub(&workers->busy, 1);
        }
    }
    return NULL;
}

/* Drops what nobody has begun, and waits for the rest: after an error the
 * arrays of a job may go. */
static void abandon(Workers *workers)
{
    pthread_mutex_lock(&workers->lock);
    atomic_store(&workers->first, atomic_load(&workers->last));
    pthread_mutex_unlock(&workers->lock);
    while (atomic_load(&workers->busy))
        sched_yield();
}

static void free_workers(Workers *workers)
{
    /* A fork does not know who held the lock. */
    if (workers == NULL || workers->owner != getpid())
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
    free(workers->tasks);
    free(workers);
}

/* Starts `count` threads for as many chunks at most; where the system has
 * fewer threads to give these do the work.  NULL: there is no memory. */
static Workers *make_workers(Shared *shared, int count, int chunks)
{
    Workers *workers = calloc(1, sizeof *workers);
    if (workers == NULL)
        return NULL;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->more, NULL);
    workers->shared = shared;
    workers->owner = getpid();
    for (workers->room = 1; workers->room < (unsigned int)chunks;)
        workers->room *= 2;
    workers->threads = calloc((size_t)count, sizeof *workers->threads);
    workers->tasks = calloc(workers->room, sizeof *workers->tasks);
    if (workers->threads == NULL || workers->tasks == NULL) {
        free_workers(workers);
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
