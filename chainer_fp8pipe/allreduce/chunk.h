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
           * (is_sum ? job->sum_size : job->itemsize);
}

static char *take(Chunk *chunk, size_t size)
{
    char *memory = chunk->memory + chunk->used;
    chunk->used += aligned(size);
    return memory;
}

/* Memory for all messages and sums of a chunk; more than is needed. */
static int get_memory(Shared *shared, Chunk *chunk)
{
    const Lane *lane = chunk->lane;
    size_t size = CACHE_LINE;
    for (int i = 0; i < lane->steps_count; ++i)
        size += aligned(message_size(chunk, &lane->steps[i]));
    for (int i = 0; i < lane->held_count; ++i) {
        Range part = part_of(chunk, lane->held[i]);
        size += aligned((size_t)(part.stop - part.start) * sizeof(f32));
    }
    if (size > chunk->room) {
        free(chunk->memory);
        chunk->memory = aligned_alloc(CACHE_LINE, aligned(size));
        chunk->room = chunk->memory ? size : 0;
        if (chunk->memory == NULL) {
            shared->messages.error = -1;
            return FAILED;
        }
    }
    chunk->used = 0;
    return DONE;
}

/* Sums of blocks in a row lie side by side, as in messages. */
static void place_sums(Chunk *chunk)
{
    const Lane *lane = chunk->lane;
    int64_t place = 0;
    chunk->total = (f32 *)(chunk->memory + chunk->used);
    for (int i = 0; i < lane->held_count; ++i) {
        Range part = part_of(chunk, lane->held[i]);
        chunk->places[lane->held[i]] = place;
        place += part.stop - part.start;
    }
    chunk->used += aligned((size_t)place * sizeof(f32));
}

static int post_receives(Shared *shared, Chunk *chunk, int kind)
{
    const Lane *lane = chunk->lane;
    const Job *job = chunk->job;
    for (int i = 0; i < lane->steps_count; ++i) {
        const Step *step = &lane->steps[i];
        if (step->kind != kind)
            continue;
        Receive *receive = &chunk->receives[chunk->posted++];
        receive->size = message_size(chunk, step);
        receive->pending = 0;
        if (kind == RECEIVE_RESULT && step->stop == step->start + 1)
            receive->data = job->wire
                + (size_t)part_of(chunk, step->start).start * job->itemsize;
        else
            receive->data = take(chunk, receive->size);
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
        if (!chunk->encoded[block]) {
            chunk->encoded[block] = 1;
            if (encode_part(shared, chunk->job, part_of(chunk, block)) < 0)
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
    memset(chunk->encoded, 0, (size_t)chunk->lane->blocks);
    if (get_memory(shared, chunk) == FAILED)
        return FAILED;
    place_sums(chunk);
    return post_receives(shared, chunk, RECEIVE_PARTIAL);
}

/* What is sent of a step's blocks; NULL: Python has raised an exception. */
static char *message_of(Shared *shared, Chunk *chunk, const Step *step,
                        size_t size)
{
    const Job *job = chunk->job;
    int is_sum = step->kind == SEND_PARTIAL && step->summed && !job->in_place;
    /* Nothing is added to a sum that has been sent: it need not be copied. */
    if (is_sum && job->codec != IN_PYTHON && job->sum_size == sizeof(f32))
        return (char *)total_of(chunk, step->start);
    if (!is_sum && step->stop == step->start + 1)
        return job->wire
               + (size_t)part_of(chunk, step->start).start * job->itemsize;
    char *message = take(chunk, size);
    if (is_sum)
        return write_sums(shared, chunk, step, message, size) < 0 ? NULL
                                                                  : message;
    copy_blocks(chunk, step, message, 0);
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
    shared->bytes_sent += (int64_t)size;
    return data == NULL || transmit(
        &shared->messages, shared->messages.send, data, size, step->peer,
        chunk->tag, step->kind == SEND_PARTIAL ? &chunk->partials
                                               : &chunk->results) < 0
        ? FAILED : DONE;
}

static int receive_partial(Shared *shared, Chunk *chunk, const Step *step)
{
    /* While the message is on its way. */
    if (step->fresh && !chunk->prepared) {
        if (encode_blocks(shared, chunk, step->start, step->stop) == FAILED)
            return FAILED;
        double since = now();
        if (chunk->job->codec != IN_PYTHON && !chunk->job->in_place)
            begin_sums(chunk, step);
        shared->decoding += now() - since;
        chunk->prepared = 1;
    }
    Receive *receive = &chunk->receives[chunk->next_receive];
    if (receive->pending)
        return BLOCKED;
    ++chunk->next_receive;
    chunk->prepared = 0;
    return add_message(shared, chunk, step, receive->data, receive->size) < 0
        ? FAILED : DONE;
}

static int encode(Shared *shared, Chunk *chunk, const Step *step)
{
    if (step->fresh) /* one contribution only */
        return encode_blocks(shared, chunk, step->start, step->stop);
    if (encode_sums(shared, chunk, step) < 0)
        return FAILED;
    ++chunk->site;
    return DONE;
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
    if (step->stop > step->start + 1)
        copy_blocks(chunk, step, receive->data, 1);
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

/* Notes that means are still to be decoded. */
static int decode_later(Shared *shared, Job *job, Range part)
{
    if (job->undecoded_count == job->undecoded_room) {
        int64_t room = job->undecoded_room ? 2 * job->undecoded_room : 64;
        Range *parts = realloc(job->undecoded,
                               (size_t)room * sizeof *parts);
        if (parts == NULL) {
            shared->messages.error = -1;
            return FAILED;
        }
        job->undecoded = parts;
        job->undecoded_room = room;
    }
    job->undecoded[job->undecoded_count++] = part;
    return DONE;
}

static int decode_blocks(Shared *shared, Chunk *chunk)
{
    Job *job = chunk->job;
    for (int block = 0; block < chunk->lane->blocks; ++block) {
        Range part = part_of(chunk, block);
        if (job->decodes ? decode_part(shared, job, part) < 0
                         : decode_later(shared, job, part) == FAILED)
            return FAILED;
    }
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
    return DONE;
}

#endif
