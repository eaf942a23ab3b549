/* Lets chunks in and runs them, over all lanes. */
#ifndef CHAINER_FP8PIPE_RUNNING_H
#define CHAINER_FP8PIPE_RUNNING_H
#include "chunk.h"

#define NEWEST 0.125    /* weight of the newest chunk in their mean time */
#define LONGEST 10e-3   /* seconds; a rank that is late makes no chunk slow */
#define SHARE 0.25      /* of a chunk's time that is slept at most */
#define PAUSE 50e-6     /* seconds; Linux makes about 100 us of it */

typedef struct {
    PyObject_HEAD
    PyObject *error; /* makes an exception of an error code and statuses */
    Shared shared;
    PyObject *jobs; /* list: those whose memory is in use */
    int is_used;    /* a thread is in a call */
    int lanes_count;
    Lane *lanes;
    double moved; /* seconds: when anything did */
    atomic_int interrupted;
} Executor;

/* Whether MPI or a neighbour may be using what chunks have. */
static int is_under_way(const Executor *self)
{
    for (int i = 0; i < self->lanes_count; ++i)
        if (self->lanes[i].oldest < self->lanes[i].started)
            return 1;
    return self->shared.messages.count > 0;
}

static int is_busy(const Executor *self)
{
    for (int i = 0; i < self->lanes_count; ++i)
        if (self->lanes[i].waiting_count
            || self->lanes[i].oldest < self->lanes[i].started)
            return 1;
    return 0;
}

/* Starts chunks while there is room for them.
 *
 * Chunks start in one order on all ranks, and messages find theirs by its
 * tag.  One that is finished here was started everywhere, and the oldest one
 * under way is less than in_flight behind the newest: ranks are less than 2
 * in_flight apart, and tags may come again soon. */
static int start_chunks(Shared *shared, Lane *lane, int *moved)
{
    while (lane->waiting_count
           && lane->started - lane->oldest < lane->in_flight) {
        Waiting *first = &lane->waiting[0];
        int64_t number = lane->started++;
        Chunk *chunk = &lane->seats[number % lane->in_flight];
        SET(chunk->job, first->job);
        chunk->share = first->share;
        SET(chunk->frame, first->next);
        chunk->tag = (int)(number % (4 * lane->in_flight)) * lane->lanes
                     + lane->number;
        if (++first->next == first->stop)
            memmove(first, first + 1, (size_t)--lane->waiting_count
                                          * sizeof *first);
        *moved = 1;
        /* It sends before the next one encodes. */
        if (start_chunk(shared, chunk) == FAILED
            || advance_chunk(shared, chunk, moved) == FAILED)
            return FAILED;
    }
    return DONE;
}

static void finish_chunk(Shared *shared, Lane *lane, Chunk *chunk)
{
    double taken = now() - chunk->since;
    if (taken > LONGEST)
        taken = LONGEST;
    lane->duration += (taken - lane->duration) * NEWEST;
    shared->finished |= --chunk->job->unfinished == 0;
    SET(chunk->job, NULL);
}

static int advance_lane(Shared *shared, Lane *lane, int *moved)
{
    if (start_chunks(shared, lane, moved) == FAILED)
        return FAILED;
    for (int64_t number = lane->oldest; number < lane->started; ++number) {
        Chunk *chunk = &lane->seats[number % lane->in_flight];
        if (chunk->active
            && advance_chunk(shared, chunk, moved) == FAILED)
            return FAILED;
        if (!chunk->active && chunk->job)
            finish_chunk(shared, lane, chunk);
    }
    while (lane->oldest < lane->started
           && !lane->seats[lane->oldest % lane->in_flight].active)
        ++lane->oldest;
    return DONE;
}

/* Does what can be done without waiting. */
static int sweep(Executor *self, int *moved)
{
    Shared *shared = &self->shared;
    if (look(&shared->messages) < 0)
        return FAILED;
    for (int i = 0; i < self->lanes_count; ++i)
        if (advance_lane(shared, &self->lanes[i], moved) == FAILED)
            return FAILED;
    if (!*moved)
        *moved = help(shared->workers);
    return DONE;
}

static double patience(const Executor *self)
{
    double least = LONGEST;
    for (int i = 0; i < self->lanes_count; ++i)
        if (self->lanes[i].duration < least)
            least = self->lanes[i].duration;
    return least * SHARE;
}

/* A look takes a few microseconds, so one each 100 leaves the processor to
 * others; ranks of one node are through before the first sleep. */
static void pause_a_little(Executor *self, double brief)
{
    if (now() - self->moved < brief || (brief > 0 && patience(self) < PAUSE))
        sched_yield();
    else
        nanosleep(&(struct timespec){0, (long)(PAUSE * 1e9)}, NULL);
}

#endif
