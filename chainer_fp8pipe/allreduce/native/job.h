/* What is known of a job. */
#ifndef CHAINER_FP8PIPE_JOB_H
#define CHAINER_FP8PIPE_JOB_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "../../formats/coding.h"

/* A job's part of one lane. */
typedef struct {
    const int64_t *bounds; /* of blocks */
    int64_t frame, chunks, let_in;
    int64_t longest; /* block */
    const Mean *means; /* by site and tensor */
    Py_buffer bounds_buffer, means_buffer;
} Share;

typedef struct {
    int64_t count, room;
    Range *items;
} Ranges;

typedef struct {
    PyObject_HEAD
    PyObject *kept;   /* all whose addresses are in the tables */
    int is_held;      /* by an executor, until it is finished */
    Coding coding;
    Py_buffer wire_buffer;
    char *wire;
    size_t sum_size; /* bytes of a sum's element */
    int in_place; /* sums are made in the wire */
    int keeps_wire; /* or frames are in their chunks alone */
    int shares_wire; /* neighbours can read it */
    int encodes, decodes;
    float shrink; /* of sums that travel as halves */
    int64_t unfinished; /* chunks */
    int shares_count;
    Share *shares;
    Ranges undecoded, decoded; /* whose means are there */
} Job;

/* -1: there is no memory. */
static int append(Ranges *ranges, Range range)
{
    if (ranges->count == ranges->room) {
        int64_t room = ranges->room ? 2 * ranges->room : 64;
        Range *items = realloc(ranges->items, (size_t)room * sizeof *items);
        if (items == NULL)
            return -1;
        ranges->items = items;
        ranges->room = room;
    }
    ranges->items[ranges->count++] = range;
    return 0;
}

/* What lies at a place of the fused vector.  `wire` is where the range
 * begins. */
static void *wire_at(const Job *job, char *wire, Range range, int64_t place)
{
    return wire + (size_t)(place - range.start) * job->coding.itemsize;
}

static char *kept_wire(const Job *job, Range range)
{
    return job->wire + (size_t)range.start * job->coding.itemsize;
}

#endif
