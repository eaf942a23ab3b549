/* A plan's chunks: what is waiting, what is under way, what each must know. */
#ifndef CHAINER_FP8PIPE_LANE_H
#define CHAINER_FP8PIPE_LANE_H
#include <stdatomic.h>
#include <time.h>

#include "job.h"
#include "messages.h"
#include "neighbours.h"

enum { SEND_PARTIAL, RECEIVE_PARTIAL, ENCODE, SEND_RESULT, RECEIVE_RESULT };

typedef struct {
    int kind;
    int peer;        /* the other rank; of ENCODE, how many were summed */
    int start, stop; /* blocks */
    int summed, fresh;
    Neighbour *near; /* the peer, if it is one */
    Mail *mail;      /* there, the slot of the chunk in seat 0 */
    int stride;      /* slots to that of the next seat's */
    int is_last;     /* what is received is not sent on */
} Step;

struct Lane;

/* What has become of a block. */
enum { CONTRIBUTED = 1, DECODED = 2 };

/* For a chunk's messages and sums. */
typedef struct {
    Py_buffer memory; /* that neighbours can read */
} Space;

/* A place for a chunk. */
typedef struct Chunk {
    struct Lane *lane;
    struct Chunk *next_task; /* in the queue of tasks */
    int seat;
    Job *job;
    Share *share;
    int64_t frame;  /* which one of each block */
    int tag;
    double since; /* seconds */
    int active;
    int position, site;        /* what is to be done next */
    int phase;                 /* of the step */
    int task;                  /* the last one of the step, see tasks.h */
    atomic_int working;        /* the task is to be done still */
    int decodes;               /* as the job did when the task began */
    char *message;             /* that is to be sent */
    int partials, results;     /* sends of MPI's that are under way */
    int used[2];               /* steps before it have nothing under way for
                                * neighbours: of partial sums, of results */
    int next_receive, posted;  /* of the steps' receives; results, too */
    Receive *receives;
    char *progress;            /* by block, see below */
    int64_t *places;           /* by block, of its sum in `total` */
    f32 *total;
    char *wire;                /* of all blocks, if it is not kept */
    const Step *streamed;      /* result that one neighbour got, and where */
    char *streamed_to;
    Space space;
    size_t taken;              /* bytes of it */
} Chunk;

/* Chunks that have not been started. */
typedef struct {
    Job *job;
    Share *share;
    int64_t next, stop;
} Waiting;

typedef struct Lane {
    struct Shared *shared;
    int number, lanes;
    int steps_count, blocks, contributes, held_count;
    Step *steps;
    int *held;
    int in_flight;
    Chunk *seats; /* chunk c is in seat c modulo in_flight */
    Space *spare; /* the last one given back is warm, and taken first */
    int spare_count;
    int64_t started, oldest;
    double duration; /* seconds that a chunk takes, a moving average */
    Waiting *waiting;
    int64_t waiting_count, waiting_room;
} Lane;

struct Workers;

/* What all lanes of an executor share. */
typedef struct Shared {
    Messages messages;
    struct Workers *workers; /* NULL: the calling thread does all */
    atomic_int with_workers; /* tasks that they are doing */
    Neighbour *neighbours;
    int neighbours_count;
    char *memory;       /* that neighbours can read */
    PyObject *allocate; /* makes arrays of it */
    PyThreadState *python; /* that has given up the interpreter */
    int failed;            /* a Python exception is set */
    int broken;            /* something has failed: a step is half done */
    int finished;          /* some job has been finished */
    int64_t bytes_sent;
    double encoding, decoding; /* seconds */
} Shared;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Any thread may ask what chunks wait for. */
#define SET(number, value) \
    __atomic_store_n(&(number), (value), __ATOMIC_RELAXED)
#define SEEN(number) __atomic_load_n(&(number), __ATOMIC_RELAXED)

/* Entries of the longest frame. */
static size_t frame_room(const Share *share)
{
    return (size_t)(share->frame < share->longest ? share->frame
                                                  : share->longest);
}

/* As Frames.part. */
static Range part_of(const Chunk *chunk, int block)
{
    const Share *share = chunk->share;
    int64_t start = share->bounds[block] + chunk->frame * share->frame;
    int64_t stop = share->bounds[block + 1];
    if (start > stop)
        start = stop;
    return (Range){start,
                   stop - start < share->frame ? stop : start + share->frame};
}

/* Where a block's frame lies. */
static char *wire_of(const Chunk *chunk, int block)
{
    const Job *job = chunk->job;
    if (job->keeps_wire)
        return kept_wire(job, part_of(chunk, block));
    return chunk->wire
           + (size_t)block * frame_room(chunk->share) * job->coding.itemsize;
}

static int64_t length_of(const Chunk *chunk, const Step *step)
{
    int64_t length = 0;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        length += part.stop - part.start;
    }
    return length;
}

#endif
