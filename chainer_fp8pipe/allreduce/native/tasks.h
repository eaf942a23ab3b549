/* The parts of a plan's steps that take the processor: they touch one chunk
 * and what its job keeps of the chunk's elements, so that those of several
 * chunks may run at the same time, in any thread.
 */
#ifndef CHAINER_FP8PIPE_TASKS_H
#define CHAINER_FP8PIPE_TASKS_H
#include "work.h"

enum { FAILED = -1, BLOCKED, DONE, LAST };

enum {
    CONTRIBUTE,    /* encode this rank's contribution */
    WRITE_MESSAGE,
    BEGIN_SUMS,    /* with this rank's contribution */
    ADD_MESSAGE,
    MAKE_MEAN,
    TAKE_RESULT,   /* decode it where it lies, or copy it into the wire */
    DECODE_CHUNK,
};

static size_t aligned(size_t size)
{
    return (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

/* Bytes of a step's message. */
static size_t message_size(const Chunk *chunk, const Step *step)
{
    const Job *job = chunk->job;
    int is_sum = step->summed && (step->kind == RECEIVE_PARTIAL
                                  || step->kind == SEND_PARTIAL);
    return (size_t)length_of(chunk, step)
           * (is_sum ? job->sum_size * (size_t)job->coding.grain : job->coding.itemsize);
}

static char *take(Chunk *chunk, size_t size)
{
    char *memory = (char *)chunk->space.memory.buf + chunk->taken;
    chunk->taken += aligned(size);
    return memory;
}

static int has_one_block(const Step *step)
{
    return step->stop == step->start + 1;
}

/* What is sent is a sum that does not lie in the wire. */
static int sends_sum(const Chunk *chunk, const Step *step)
{
    return step->kind == SEND_PARTIAL && step->summed
           && !chunk->job->in_place;
}

/* Sums are made here, in float32. */
static int makes_sums(const Job *job)
{
    return !job->in_place;
}

/* A sum that travels as it is need not be copied: nothing is added to it when
 * it has been sent. */
static int sends_total(const Chunk *chunk, const Step *step)
{
    return sends_sum(chunk, step) && makes_sums(chunk->job)
           && chunk->job->sum_size == sizeof(f32);
}

/* Neighbours read what is sent from the wire. */
static int lies_in_shared_wire(const Chunk *chunk, const Step *step)
{
    return chunk->job->shares_wire && !sends_sum(chunk, step);
}

/* What neighbours read is not in one piece. */
static int is_scattered(const Chunk *chunk, const Step *step)
{
    return lies_in_shared_wire(chunk, step) && !has_one_block(step);
}

/* Whether a step's message lies neither in the wire nor in the sums. */
static int needs_space(const Chunk *chunk, const Step *step)
{
    if (step->kind == ENCODE)
        return 0;
    if (step->kind == RECEIVE_PARTIAL || step->kind == RECEIVE_RESULT)
        return !step->near && (step->kind == RECEIVE_PARTIAL
                               || !has_one_block(step));
    if (step->near)
        return !lies_in_shared_wire(chunk, step);
    return sends_sum(chunk, step) ? !sends_total(chunk, step)
                                  : !has_one_block(step);
}

/* Encodes this rank's contribution to blocks, unless that has been done. */
static void encode_blocks(Chunk *chunk, int start, int stop)
{
    for (int block = start; block < stop && chunk->job->encodes; ++block)
        if (!chunk->progress[block]) {
            chunk->progress[block] = CONTRIBUTED;
            encode_range(&chunk->job->coding, part_of(chunk, block),
                         wire_of(chunk, block));
        }
}

/* All neighbours read the same copy of a result. */
static int gets_the_same(const Step *before, const Step *step)
{
    return before && step->near && step->kind == SEND_RESULT
           && before->start == step->start && before->stop == step->stop;
}

/* What is sent of a step's blocks. */
static char *message_of(Chunk *chunk, const Step *step, size_t size)
{
    char *total = sends_total(chunk, step)
        ? (char *)total_of(chunk, step->start) : NULL;
    if (!needs_space(chunk, step))
        return total ? total : wire_of(chunk, step->start);
    if (gets_the_same(chunk->streamed, step))
        return chunk->streamed_to;
    char *message = take(chunk, size);
    if (total)
        stream(message, total, size);
    else if (sends_sum(chunk, step))
        write_sums(chunk, step, message, size);
    else
        write_blocks(chunk, step, message);
    if (step->near && step->kind == SEND_RESULT) {
        chunk->streamed = step;
        chunk->streamed_to = message;
    }
    return message;
}

static void make_mean(Chunk *chunk, const Step *step)
{
    if (step->fresh) /* one contribution only */
        encode_blocks(chunk, step->start, step->stop);
    else
        encode_sums(chunk, step);
}

/* A result in a neighbour's memory that nobody else is to get from here. */
static int decodes_where_it_lies(const Chunk *chunk, const Step *step)
{
    return step->near && step->is_last && has_one_block(step)
           && !chunk->job->keeps_wire;
}

static void take_result(Chunk *chunk, const Step *step)
{
    const Receive *receive = &chunk->receives[chunk->next_receive];
    if (!decodes_where_it_lies(chunk, step))
        take_blocks(chunk, step, receive);
    else if (chunk->decodes)
        decode_range(&chunk->job->coding, part_of(chunk, step->start),
                     receive->data);
}

static void decode_blocks(Chunk *chunk)
{
    for (int block = 0; block < chunk->lane->blocks; ++block)
        if (chunk->progress[block] != DECODED)
            decode_range(&chunk->job->coding, part_of(chunk, block),
                         wire_of(chunk, block));
}

/* Does what chunk->task says. */
static void perform(Chunk *chunk)
{
    const Step *step = &chunk->lane->steps[chunk->position];
    switch (chunk->task) {
    case CONTRIBUTE: encode_blocks(chunk, step->start, step->stop); break;
    case WRITE_MESSAGE:
        chunk->message = message_of(chunk, step, message_size(chunk, step));
        break;
    case BEGIN_SUMS: begin_sums(chunk, step); break;
    case ADD_MESSAGE:
        add_message(chunk, step, &chunk->receives[chunk->next_receive]);
        break;
    case MAKE_MEAN: make_mean(chunk, step); break;
    case TAKE_RESULT: take_result(chunk, step); break;
    default: decode_blocks(chunk);
    }
}

/* What the time of a task counts as; NULL: as the exchange. */
static double *seconds_of(Shared *shared, const Chunk *chunk)
{
    const Step *step = &chunk->lane->steps[chunk->position];
    switch (chunk->task) {
    case CONTRIBUTE: case MAKE_MEAN: return &shared->encoding;
    case WRITE_MESSAGE:
        return sends_sum(chunk, step) && !sends_total(chunk, step)
            ? &shared->encoding : NULL;
    case TAKE_RESULT:
        return decodes_where_it_lies(chunk, step) ? &shared->decoding : NULL;
    default: return &shared->decoding;
    }
}

/* Does it in the thread that has called the executor. */
static void perform_here(Shared *shared, Chunk *chunk)
{
    double since = now(), *seconds = seconds_of(shared, chunk);
    perform(chunk);
    if (seconds)
        *seconds += now() - since;
    atomic_store_explicit(&chunk->working, 0, memory_order_release);
}

#endif
