/* One frame of every block, on its way through a plan; nothing here waits.
 *
 * Partial sums are received into memory that is posted at once.  Results are
 * received where this rank's own contribution lies, and so not before all of
 * that has left.
 */
#ifndef CHAINER_FP8PIPE_CHUNK_H
#define CHAINER_FP8PIPE_CHUNK_H
#include "work.h"

enum { FAILED = -1, BLOCKED, DONE };

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
           * (is_sum ? job->sum_size * (size_t)job->grain : job->itemsize);
}

static char *take(Chunk *chunk, size_t size)
{
    char *memory = (char *)chunk->space.memory.buf + chunk->used;
    chunk->used += aligned(size);
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
    return job->codec != IN_PYTHON && !job->in_place;
}

/* A sum that travels as it is need not be copied: nothing is added to it when
 * it has been sent. */
static int sends_total(const Chunk *chunk, const Step *step)
{
    return sends_sum(chunk, step) && makes_sums(chunk->job)
           && chunk->job->sum_size == sizeof(f32);
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
        return 1;
    return sends_sum(chunk, step) ? !sends_total(chunk, step)
                                  : !has_one_block(step);
}

/* Bytes of the frames, where they are in the chunk alone. */
static size_t wire_size(const Chunk *chunk)
{
    return chunk->job->keeps_wire ? 0
        : (size_t)chunk->lane->blocks * frame_room(chunk->share)
              * chunk->job->itemsize;
}

static int allocate(Shared *shared, Space *space, size_t size)
{
    PyEval_RestoreThread(shared->python);
    PyBuffer_Release(&space->memory);
    PyObject *array = PyObject_CallFunction(shared->allocate, "n",
                                            (Py_ssize_t)size);
    if (!array
        || PyObject_GetBuffer(array, &space->memory, PyBUF_WRITABLE) < 0)
        shared->failed = 1;
    Py_XDECREF(array);
    shared->python = PyEval_SaveThread();
    return shared->failed ? FAILED : DONE;
}

/* Gets memory for all messages and sums of a chunk. */
static int get_space(Shared *shared, Chunk *chunk)
{
    Lane *lane = chunk->lane;
    size_t size = CACHE_LINE, sums = 0;
    for (int i = 0; i < lane->steps_count; ++i)
        if (needs_space(chunk, &lane->steps[i]))
            size += aligned(message_size(chunk, &lane->steps[i]));
    for (int i = 0; i < lane->held_count && makes_sums(chunk->job); ++i) {
        Range part = part_of(chunk, lane->held[i]);
        sums += (size_t)((part.stop - part.start) * chunk->job->grain)
                * sizeof(f32);
    }
    size += aligned(sums) + aligned(wire_size(chunk));
    chunk->space = (Space){0};
    if (lane->spare_count)
        chunk->space = lane->spare[--lane->spare_count];
    chunk->used = 0;
    return (size_t)chunk->space.memory.len >= size
        ? DONE : allocate(shared, &chunk->space, size);
}

static void give_space_back(Chunk *chunk)
{
    chunk->lane->spare[chunk->lane->spare_count++] = chunk->space;
    chunk->space = (Space){0};
}

static void place_wire(Chunk *chunk)
{
    chunk->wire = take(chunk, wire_size(chunk));
}

/* Sums of blocks in a row lie side by side, as in messages. */
static void place_sums(Chunk *chunk)
{
    const Lane *lane = chunk->lane;
    int64_t place = 0;
    chunk->total = (f32 *)((char *)chunk->space.memory.buf + chunk->used);
    if (!makes_sums(chunk->job))
        return;
    for (int i = 0; i < lane->held_count; ++i) {
        Range part = part_of(chunk, lane->held[i]);
        chunk->places[lane->held[i]] = place;
        place += (part.stop - part.start) * chunk->job->grain;
    }
    chunk->used += aligned((size_t)place * sizeof(f32));
}

/* What neighbours have sent is not what the plan says. */
static int out_of_step(Shared *shared)
{
    shared->messages.error = OUT_OF_STEP;
    return FAILED;
}

static int post_receives(Shared *shared, Chunk *chunk, int kind)
{
    const Lane *lane = chunk->lane;
    for (int i = 0; i < lane->steps_count; ++i) {
        const Step *step = &lane->steps[i];
        if (step->kind != kind)
            continue;
        Receive *receive = &chunk->receives[chunk->posted++];
        *receive = (Receive){.size = message_size(chunk, step),
                             .tag = chunk->tag};
        if (step->near) {
            if (receive->size > 0
                && expect_mail(step->near, receive) < 0)
                return out_of_step(shared);
            continue;
        }
        if (needs_space(chunk, step))
            receive->data = take(chunk, receive->size);
        else
            receive->data = wire_of(chunk, step->start);
        if (receive->size > 0
            && transmit(&shared->messages, shared->messages.receive,
                        receive->data, receive->size, step->peer, chunk->tag,
                        &receive->pending) < 0)
            return FAILED;
    }
    return DONE;
}

/* Encodes this rank's contribution to blocks, unless that has been done. */
static int encode_blocks(Shared *shared, Chunk *chunk, int start, int stop)
{
    for (int block = start; block < stop && chunk->job->encodes; ++block)
        if (!chunk->progress[block]) {
            chunk->progress[block] = CONTRIBUTED;
            if (encode_part(shared, chunk->job, part_of(chunk, block),
                            wire_of(chunk, block)) < 0)
                return FAILED;
        }
    return DONE;
}

static int start_chunk(Shared *shared, Chunk *chunk)
{
    chunk->since = now();
    chunk->active = 1;
    chunk->position = chunk->site = chunk->prepared = chunk->decoded = 0;
    chunk->partials = chunk->results = 0;
    chunk->next_receive = chunk->posted = 0;
    chunk->streamed = NULL;
    memset(chunk->progress, 0, (size_t)chunk->lane->blocks);
    if (get_space(shared, chunk) == FAILED)
        return FAILED;
    place_wire(chunk);
    place_sums(chunk);
    return post_receives(shared, chunk, RECEIVE_PARTIAL);
}

/* All neighbours read the same copy of a result. */
static int gets_the_same(const Step *before, const Step *step)
{
    return before && step->near && step->kind == SEND_RESULT
           && before->start == step->start && before->stop == step->stop;
}

/* What is sent of a step's blocks; NULL: Python has raised an exception. */
static char *message_of(Shared *shared, Chunk *chunk, const Step *step,
                        size_t size)
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
        return write_sums(shared, chunk, step, message, size) < 0 ? NULL
                                                                  : message;
    else
        copy_blocks(chunk, step, message, 0);
    if (step->near && step->kind == SEND_RESULT) {
        chunk->streamed = step;
        chunk->streamed_to = message;
    }
    return message;
}

static int send(Shared *shared, Chunk *chunk, const Step *step)
{
    size_t size = message_size(chunk, step);
    if (size == 0)
        return DONE;
    if (step->kind == SEND_PARTIAL
        && encode_blocks(shared, chunk, step->start, step->stop) == FAILED)
        return FAILED;
    char *data = message_of(shared, chunk, step, size);
    int *pending = step->kind == SEND_PARTIAL ? &chunk->partials
                                              : &chunk->results;
    shared->bytes_sent += (int64_t)size;
    if (data == NULL)
        return FAILED;
    if (step->near)
        return post_mail(step->near, data - shared->memory, size, chunk->tag,
                         pending) < 0 ? out_of_step(shared) : DONE;
    return transmit(&shared->messages, shared->messages.send, data, size,
                    step->peer, chunk->tag, pending) < 0 ? FAILED : DONE;
}

static int receive_partial(Shared *shared, Chunk *chunk, const Step *step)
{
    /* While the message is on its way. */
    if (step->fresh && !chunk->prepared) {
        if (encode_blocks(shared, chunk, step->start, step->stop) == FAILED)
            return FAILED;
        double since = now();
        if (makes_sums(chunk->job))
            begin_sums(chunk, step);
        shared->decoding += now() - since;
        chunk->prepared = 1;
    }
    Receive *receive = &chunk->receives[chunk->next_receive];
    if (receive->pending)
        return BLOCKED;
    ++chunk->next_receive;
    chunk->prepared = 0;
    if (add_message(shared, chunk, step, receive->data, receive->size) < 0)
        return FAILED;
    if (!makes_sums(chunk->job) || !is_gathered(chunk))
        give_back(receive);
    return DONE;
}

static int encode(Shared *shared, Chunk *chunk, const Step *step)
{
    if (step->fresh) /* one contribution only */
        return encode_blocks(shared, chunk, step->start, step->stop);
    if (encode_sums(shared, chunk, step) < 0)
        return FAILED;
    for (int i = 0; i < chunk->next_receive; ++i)
        give_back(&chunk->receives[i]);
    ++chunk->site;
    return DONE;
}

/* Decodes means, or notes that they are still to be decoded. */
static int decode_range(Shared *shared, Job *job, Range range, char *wire)
{
    if (job->decodes && decode_part(shared, job, range, wire) < 0)
        return FAILED;
    if (append(job->decodes ? &job->decoded : &job->undecoded, range) < 0) {
        shared->messages.error = -1;
        return FAILED;
    }
    return DONE;
}

/* A result in a neighbour's memory that nobody else is to get from here. */
static int decodes_where_it_lies(const Chunk *chunk, const Step *step)
{
    return step->near && step->is_last && has_one_block(step)
           && !chunk->job->keeps_wire;
}

static int receive_result(Shared *shared, Chunk *chunk, const Step *step)
{
    /* Results come after all partial sums of the plan. */
    if (chunk->posted == chunk->next_receive) {
        if (chunk->partials)
            return BLOCKED;
        if (post_receives(shared, chunk, RECEIVE_RESULT) == FAILED)
            return FAILED;
    }
    Receive *receive = &chunk->receives[chunk->next_receive];
    if (receive->pending)
        return BLOCKED;
    ++chunk->next_receive;
    if (decodes_where_it_lies(chunk, step)) {
        chunk->progress[step->start] = DECODED;
        if (decode_range(shared, chunk->job, part_of(chunk, step->start),
                         receive->data) == FAILED)
            return FAILED;
    }
    else if (step->near || !has_one_block(step))
        copy_blocks(chunk, step, receive->data, 1);
    give_back(receive);
    return DONE;
}

static int do_step(Shared *shared, Chunk *chunk, const Step *step)
{
    switch (step->kind) {
    case RECEIVE_PARTIAL: return receive_partial(shared, chunk, step);
    case RECEIVE_RESULT: return receive_result(shared, chunk, step);
    case ENCODE: return encode(shared, chunk, step);
    default: return send(shared, chunk, step);
    }
}

static int decode_blocks(Shared *shared, Chunk *chunk)
{
    for (int block = 0; block < chunk->lane->blocks; ++block)
        if (chunk->progress[block] != DECODED
            && decode_range(shared, chunk->job, part_of(chunk, block),
                         wire_of(chunk, block)) == FAILED)
            return FAILED;
    return DONE;
}

/* Does what can be done now.  `moved` is set if that was anything; DONE: all
 * is done, and all that was sent has left. */
static int advance_chunk(Shared *shared, Chunk *chunk, int *moved)
{
    const Lane *lane = chunk->lane;
    while (chunk->position < lane->steps_count) {
        int result = do_step(shared, chunk, &lane->steps[chunk->position]);
        if (result != DONE)
            return result;
        ++chunk->position;
        *moved = 1;
    }
    if (!chunk->decoded) {
        if (decode_blocks(shared, chunk) == FAILED)
            return FAILED;
        chunk->decoded = 1;
    }
    if (chunk->partials || chunk->results)
        return BLOCKED;
    if (chunk->job->codec == IN_PYTHON
        && in_python(shared, chunk->job, "forget", "(iL)", lane->number,
                     (long long)chunk->frame) < 0)
        return FAILED;
    *moved = 1;
    chunk->active = 0;
    give_space_back(chunk);
    return DONE;
}

#endif
