/* One frame of every block, on its way through a plan; nothing here waits.
 *
 * Partial sums are received into memory that is posted at once.  Results are
 * received where this rank's own contribution lies, and so not before all of
 * that has left.
 */
#ifndef CHAINER_FP8PIPE_CHUNK_H
#define CHAINER_FP8PIPE_CHUNK_H
#include "workers.h"

/* Bytes of the frames, where they are in the chunk alone. */
static size_t wire_size(const Chunk *chunk)
{
    return chunk->job->keeps_wire ? 0
        : (size_t)chunk->lane->blocks * frame_room(chunk->share)
              * chunk->job->coding.itemsize;
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
        sums += (size_t)((part.stop - part.start) * chunk->job->coding.grain)
                * sizeof(f32);
    }
    size += aligned(sums) + aligned(wire_size(chunk));
    chunk->space = (Space){0};
    if (lane->spare_count)
        chunk->space = lane->spare[--lane->spare_count];
    chunk->taken = 0;
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
    chunk->total = (f32 *)((char *)chunk->space.memory.buf + chunk->taken);
    if (!makes_sums(chunk->job))
        return;
    for (int i = 0; i < lane->held_count; ++i) {
        Range part = part_of(chunk, lane->held[i]);
        chunk->places[lane->held[i]] = place;
        place += (part.stop - part.start) * chunk->job->coding.grain;
    }
    chunk->taken += aligned((size_t)place * sizeof(f32));
}

/* What neighbours have sent is not what the plan says. */
static int out_of_step(Shared *shared)
{
    shared->messages.error = OUT_OF_STEP;
    return FAILED;
}

/* The slot of a step's message between this rank and a neighbour. */
static Mail *mail_of(const Chunk *chunk, const Step *step)
{
    return step->mail + (ptrdiff_t)chunk->seat * step->stride;
}

/* Whether a message is there. */
static int has_come(Shared *shared, const Step *step, Receive *receive)
{
    if (!receive->mail)
        return receive->pending ? BLOCKED : DONE;
    if (!is_posted(receive->mail))
        return BLOCKED;
    return open_mail(step->near, receive) < 0 ? out_of_step(shared) : DONE;
}

/* Whether all that has been sent by steps of this kind has left. */
static int has_left(Chunk *chunk, int kind)
{
    const Lane *lane = chunk->lane;
    int *place = &chunk->used[kind == SEND_RESULT];
    for (; *place < chunk->position && *place < lane->steps_count; ++*place) {
        const Step *step = &lane->steps[*place];
        if (step->kind == kind && step->near
            && is_posted(mail_of(chunk, step)))
            return 0;
    }
    return !(kind == SEND_RESULT ? chunk->results : chunk->partials);
}

static int post_receives(Shared *shared, Chunk *chunk, int kind)
{
    const Lane *lane = chunk->lane;
    for (int i = 0; i < lane->steps_count; ++i) {
        const Step *step = &lane->steps[i];
        if (step->kind != kind)
            continue;
        Receive *receive = &chunk->receives[chunk->posted++];
        *receive = (Receive){.size = message_size(chunk, step)};
        if (step->near) {
            receive->mail = receive->size ? mail_of(chunk, step) : NULL;
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

static int start_chunk(Shared *shared, Chunk *chunk)
{
    chunk->since = now();
    SET(chunk->active, 1);
    SET(chunk->position, 0);
    chunk->site = chunk->phase = 0;
    chunk->working = 0;
    chunk->partials = chunk->results = 0;
    chunk->used[0] = chunk->used[1] = 0;
    chunk->next_receive = chunk->posted = 0;
    chunk->streamed = NULL;
    memset(chunk->progress, 0, (size_t)chunk->lane->blocks);
    if (get_space(shared, chunk) == FAILED)
        return FAILED;
    place_wire(chunk);
    place_sums(chunk);
    return post_receives(shared, chunk, RECEIVE_PARTIAL);
}

/* Has a task done, here or by a worker. */
static int begin(Shared *shared, Chunk *chunk, int task)
{
    chunk->task = task;
    atomic_store_explicit(&chunk->working, 1, memory_order_relaxed);
    if (shared->workers)
        enqueue(shared->workers, chunk);
    else
        perform_here(shared, chunk);
    return DONE;
}

/* This rank's part of a step's blocks is encoded. */
static int has_contributed(const Chunk *chunk, const Step *step)
{
    for (int block = step->start; block < step->stop; ++block)
        if (chunk->job->encodes && !chunk->progress[block])
            return 0;
    return 1;
}

/* Steps are done in phases.  A phase is done, has to be tried again, or was
 * the last; what one has begun is over before the next. */

static int send(Shared *shared, Chunk *chunk, const Step *step)
{
    size_t size = message_size(chunk, step);
    if (size == 0)
        return LAST;
    switch (chunk->phase) {
    case 0:
        return step->kind == SEND_RESULT || has_contributed(chunk, step)
            ? DONE : begin(shared, chunk, CONTRIBUTE);
    case 1:
        if (needs_space(chunk, step))
            return begin(shared, chunk, WRITE_MESSAGE);
        chunk->message = message_of(chunk, step, size);
        return DONE;
    }
    shared->bytes_sent += (int64_t)size;
    if (step->near) {
        post_mail(mail_of(chunk, step), chunk->message - shared->memory, size,
                  is_scattered(chunk, step));
        return LAST;
    }
    return transmit(&shared->messages, shared->messages.send, chunk->message,
                    size, step->peer, chunk->tag,
                    step->kind == SEND_PARTIAL ? &chunk->partials
                                               : &chunk->results) < 0
        ? FAILED : LAST;
}

static int receive_partial(Shared *shared, Chunk *chunk, const Step *step)
{
    Receive *receive = &chunk->receives[chunk->next_receive];
    const int waits = makes_sums(chunk->job) && is_gathered(chunk);
    int there = DONE;
    switch (chunk->phase) {
    case 0: /* while the message is on its way */
        return step->fresh && !has_contributed(chunk, step)
            ? begin(shared, chunk, CONTRIBUTE) : DONE;
    case 1:
        return step->fresh && makes_sums(chunk->job) && !waits
            ? begin(shared, chunk, BEGIN_SUMS) : DONE;
    case 2:
        there = has_come(shared, step, receive);
        return there == DONE && receive->size && !waits
            ? begin(shared, chunk, ADD_MESSAGE) : there;
    }
    ++chunk->next_receive;
    if (!waits)
        give_back(receive);
    return LAST;
}

static int encode(Shared *shared, Chunk *chunk, const Step *step)
{
    if (chunk->phase == 0)
        return begin(shared, chunk, MAKE_MEAN);
    if (step->fresh)
        return LAST;
    for (int i = 0; i < chunk->next_receive; ++i)
        give_back(&chunk->receives[i]);
    ++chunk->site;
    return LAST;
}

/* Notes that means are there, and whether they are decoded: if not, but they
 * are wanted by now, they are. */
static int arrive(Shared *shared, Job *job, Range range, int is_decoded,
                  char *wire)
{
    double since = now();
    if (job->decodes && !is_decoded) {
        decode_range(&job->coding, range, wire);
        shared->decoding += now() - since;
    }
    if (append(job->decodes ? &job->decoded : &job->undecoded, range) < 0) {
        shared->messages.error = NO_MEMORY;
        return FAILED;
    }
    return DONE;
}

static int receive_result(Shared *shared, Chunk *chunk, const Step *step)
{
    Receive *receive = &chunk->receives[chunk->next_receive];
    int there = DONE;
    switch (chunk->phase) {
    case 0: /* results come after all partial sums of the plan */
        if (chunk->posted > chunk->next_receive)
            return DONE;
        return has_left(chunk, SEND_PARTIAL)
            ? post_receives(shared, chunk, RECEIVE_RESULT) : BLOCKED;
    case 1:
        there = has_come(shared, step, receive);
        if (there != DONE)
            return there;
        chunk->decodes = chunk->job->decodes;
        return receive->size && (step->near || !has_one_block(step))
            ? begin(shared, chunk, TAKE_RESULT) : DONE;
    }
    ++chunk->next_receive;
    if (decodes_where_it_lies(chunk, step)) {
        chunk->progress[step->start] = DECODED;
        if (arrive(shared, chunk->job, part_of(chunk, step->start),
                   chunk->decodes, receive->data) == FAILED)
            return FAILED;
    }
    give_back(receive);
    return LAST;
}

/* After the last step. */
static int conclude(Shared *shared, Chunk *chunk)
{
    if (chunk->phase == 0) {
        chunk->decodes = chunk->job->decodes;
        return chunk->decodes ? begin(shared, chunk, DECODE_CHUNK) : DONE;
    }
    for (int block = 0; block < chunk->lane->blocks; ++block)
        if (chunk->progress[block] != DECODED
            && arrive(shared, chunk->job, part_of(chunk, block),
                      chunk->decodes, wire_of(chunk, block)) == FAILED)
            return FAILED;
    return LAST;
}

static int do_phase(Shared *shared, Chunk *chunk)
{
    const Lane *lane = chunk->lane;
    const Step *step = &lane->steps[chunk->position];
    if (chunk->position == lane->steps_count)
        return conclude(shared, chunk);
    switch (step->kind) {
    case RECEIVE_PARTIAL: return receive_partial(shared, chunk, step);
    case RECEIVE_RESULT: return receive_result(shared, chunk, step);
    case ENCODE: return encode(shared, chunk, step);
    default: return send(shared, chunk, step);
    }
}

/* Does what can be done now.  `moved` is set if that was anything; DONE: all
 * is done, and all that was sent has left. */
static int advance_chunk(Shared *shared, Chunk *chunk, int *moved)
{
    while (chunk->position <= chunk->lane->steps_count) {
        if (atomic_load_explicit(&chunk->working, memory_order_acquire))
            return BLOCKED;
        int result = do_phase(shared, chunk);
        if (result == BLOCKED || result == FAILED)
            return result;
        ++chunk->phase;
        *moved = 1;
        if (result == LAST) {
            SET(chunk->position, chunk->position + 1);
            chunk->phase = 0;
        }
    }
    if (!has_left(chunk, SEND_PARTIAL) || !has_left(chunk, SEND_RESULT))
        return BLOCKED;
    *moved = 1;
    SET(chunk->active, 0);
    give_space_back(chunk);
    return DONE;
}

#endif
