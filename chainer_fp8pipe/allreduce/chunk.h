/* A chunk: one frame of every block, on its way through a rank's steps.
 *
 * A plan arrives here as a list of steps (see plan.py): send a partial sum,
 * receive one and add it, encode the mean, send it, receive others'.  Each
 * chunk goes through all of it by itself, so the first means are on their way
 * back while the last contributions are still to be sent, and both directions
 * of a link are busy.  A step is done in phases; none of them waits.  What
 * takes the processor is a task: it touches one chunk and what its job keeps
 * of the chunk's elements, so that tasks of several chunks may run at the same
 * time, in any thread, and none needs the interpreter.
 *
 * Partial sums are received into memory that is posted at once.  Means are
 * received where this rank's own contribution lies, and so not before all of
 * that has left.  If gradients are encoded, and means decoded, frame by frame,
 * frames are in the chunk's space alone and never leave the processor's
 * caches; otherwise they lie in the job's wire.
 *
 * Contributions that meet on the rank that makes their mean stay where they
 * have come, until it makes sums and mean in one pass: that takes half the
 * time of adding one after the other.
 */
#ifndef CHAINER_FP8PIPE_CHUNK_H
#define CHAINER_FP8PIPE_CHUNK_H
#include "../formats/coding.h"
#include <time.h>

#include "messages.h"

enum { SEND_PARTIAL, RECEIVE_PARTIAL, ENCODE, SEND_RESULT, RECEIVE_RESULT };
enum { FAILED = -1, BLOCKED, DONE, LAST };

typedef struct {
    int kind;
    int peer;        /* the other rank; of ENCODE, how many were summed */
    int start, stop; /* blocks */
    int summed;      /* the message is a sum of several ranks */
    int fresh;       /* nothing has been added to the blocks before */
    int is_last;     /* what is received is not sent on */
    int gathered;    /* of ENCODE: how many messages before it stay where they
                      * are; of a receive: 1 if its message does */
    Neighbour *near; /* the peer, if it shares memory */
    Mail *mail;      /* of the chunk in seat 0 */
    int stride;      /* Mails to that of the next seat's */
} Step;

/* A job's part of one plan. */
typedef struct {
    int64_t *bounds; /* of blocks */
    int64_t frame, chunks, let_in;
    const Mean *means; /* by site and tensor */
    char *space;
    size_t room; /* bytes of it for each slot */
    Py_buffer means_buffer, space_buffer;
} Share;

typedef struct {
    int64_t count, room;
    Range *items;
} Ranges;

/* A bucket's part in compiled code, whose base it is. */
typedef struct {
    PyObject_HEAD
    Coding coding;
    Py_buffer wire_buffer;
    char *wire;
    size_t sum_size;  /* bytes of an element of a sum that travels */
    float shrink;     /* of sums that travel as halves */
    int in_place;     /* sums are made in the wire */
    int uses_wire;    /* or frames are in their chunks alone */
    int shares_wire;  /* neighbours can read it */
    int encodes, decodes;
    int is_held;      /* by an engine, until it is finished */
    int64_t unfinished; /* chunks */
    int shares_count;
    Share *shares;
    Ranges undecoded, decoded; /* whose means are there */
} Job;

struct Lane;

/* What has become of a block. */
enum { CONTRIBUTED = 1, DECODED = 2 };

typedef struct Chunk {
    struct Lane *lane;
    struct Chunk *next_task; /* in the queue of tasks */
    int seat;
    Job *job;
    Share *share;
    int64_t frame;         /* which one of each block */
    int tag;
    double since;          /* seconds */
    int active;
    int position, site;    /* what is to be done next */
    int phase;             /* of the step */
    int task;
    atomic_int working;    /* the task is to be done still */
    int decodes;           /* as the job did when the task began */
    char *message;         /* that is to be sent */
    int partials, results; /* sends of MPI's that are under way */
    int used[2];           /* steps before it have nothing under way for
                            * neighbours: of partial sums, of results */
    int next_receive, posted;
    Receive *receives;
    char *progress;        /* by block */
    int64_t *places;       /* by block, of its sum in `total` */
    f32 *total;
    char *wire;            /* of all blocks, if the job's is not used */
    const Step *streamed;  /* result that one neighbour got, and where */
    char *streamed_to;
    int slot;              /* of the lane's space */
    char *space;
    size_t taken;          /* bytes of it */
} Chunk;

/* Chunks of a job that have not been started. */
typedef struct {
    Job *job;
    Share *share;
    int64_t next, stop;
} Waiting;

/* A plan, and its chunks under way. */
typedef struct Lane {
    struct Shared *shared;
    int number, lanes;
    int steps_count, blocks, contributes;
    Step *steps;
    char *held; /* by block: this rank adds something to it */
    int in_flight;
    Chunk *seats; /* chunk c is in seat c modulo in_flight */
    PyObject *space; /* of new jobs' chunks: in_flight slots */
    size_t room;     /* bytes of a slot */
    int *slots;      /* that are free; the last one is warm, and taken first */
    int slots_count;
    int64_t started, oldest;
    double duration; /* seconds that a chunk takes, a moving average */
    Waiting *waiting;
    int64_t waiting_count, waiting_room;
} Lane;

/* What all lanes of an engine share. */
typedef struct Shared {
    Messages messages;
    int uses_workers;
    atomic_int with_workers; /* tasks that they are doing */
    char *memory;       /* that neighbours can read */
    int broken;         /* something has failed: a step is half done */
    int64_t bytes_sent;
    double encoding, decoding; /* seconds */
} Shared;

/* Any thread may ask what chunks wait for. */
#define SET(number, value) \
    __atomic_store_n(&(number), (value), __ATOMIC_RELAXED)
#define SEEN(number) __atomic_load_n(&(number), __ATOMIC_RELAXED)

static void enqueue(Chunk *chunk);

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static size_t aligned(size_t size)
{
    return (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

/* --- where things lie --------------------------------------------------- */

/* A chunk's frame of a block. */
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

static char *wire_of(const Chunk *chunk, int block)
{
    const Job *job = chunk->job;
    int64_t entry = job->uses_wire ? part_of(chunk, block).start
                                   : block * chunk->share->frame;
    return (job->uses_wire ? job->wire : chunk->wire)
           + (size_t)entry * job->coding.itemsize;
}

static f32 *total_of(const Chunk *chunk, int block)
{
    return chunk->total + chunk->places[block];
}

/* A block of a step, and where it lies in messages that are no sums. */
typedef struct {
    int number;
    Range part;
    size_t entries, size; /* size and places are bytes */
    size_t place, scattered_place;
    char *wire;
} Block;

static Block block_at(const Chunk *chunk, const Step *step, int number,
                      size_t place)
{
    const size_t itemsize = chunk->job->coding.itemsize;
    Block block = {.number = number, .place = place};
    if (number < step->stop) {
        block.part = part_of(chunk, number);
        block.entries = (size_t)(block.part.stop - block.part.start);
        block.size = block.entries * itemsize;
        block.scattered_place = (size_t)(
            block.part.start - part_of(chunk, step->start).start) * itemsize;
        block.wire = wire_of(chunk, number);
    }
    return block;
}

#define FOR_EACH_BLOCK(chunk, step, b) \
    for (Block b = block_at((chunk), (step), (step)->start, 0); \
         b.number < (step)->stop; \
         b = block_at((chunk), (step), b.number + 1, b.place + b.size))

static char *data_of(const Receive *receive, const Block *block)
{
    return receive->data + (receive->scattered ? block->scattered_place
                                               : block->place);
}

static int is_receive(const Step *step)
{
    return step->kind == RECEIVE_PARTIAL || step->kind == RECEIVE_RESULT;
}

static int has_one_block(const Step *step)
{
    return step->stop == step->start + 1;
}

/* Bytes of an entry of a step's message. */
static size_t entry_size(const Job *job, const Step *step)
{
    int is_sum = step->summed && (step->kind == RECEIVE_PARTIAL
                                  || step->kind == SEND_PARTIAL);
    return is_sum ? job->sum_size * (size_t)job->coding.grain
                  : job->coding.itemsize;
}

static size_t message_size(const Chunk *chunk, const Step *step)
{
    size_t entries = 0;
    FOR_EACH_BLOCK(chunk, step, block)
        entries += block.entries;
    return entries * entry_size(chunk->job, step);
}

/* What is sent is a sum that does not lie in the wire. */
static int sends_sum(const Job *job, const Step *step)
{
    return step->kind == SEND_PARTIAL && step->summed && !job->in_place;
}

/* A sum that travels as it is need not be copied: nothing is added to it when
 * it has been sent. */
static int sends_total(const Job *job, const Step *step)
{
    return sends_sum(job, step) && job->sum_size == sizeof(f32);
}

/* Whether a step's message lies neither in the wire nor in the sums. */
static int needs_space(const Job *job, const Step *step)
{
    if (step->kind == ENCODE)
        return 0;
    if (is_receive(step))
        return !step->near && (step->kind == RECEIVE_PARTIAL
                               || !has_one_block(step));
    if (step->near)
        return sends_sum(job, step) || !job->shares_wire;
    return sends_sum(job, step) ? !sends_total(job, step)
                                : !has_one_block(step);
}

/* Bytes that a chunk of a job needs for messages, sums and frames. */
static size_t room_for(const Job *job, const Lane *lane, int64_t frame)
{
    size_t entries = (size_t)frame, size = 0, sums = 0;
    for (int i = 0; i < lane->steps_count; ++i) {
        const Step *step = &lane->steps[i];
        if (needs_space(job, step))
            size += aligned((size_t)(step->stop - step->start) * entries
                            * entry_size(job, step));
    }
    for (int block = 0; block < lane->blocks && !job->in_place; ++block)
        sums += lane->held[block] ? entries * (size_t)job->coding.grain
                                        * sizeof(f32) : 0;
    return size + aligned(sums) + (job->uses_wire ? 0 : aligned(
        (size_t)lane->blocks * entries * job->coding.itemsize));
}

static char *take(Chunk *chunk, size_t size)
{
    char *memory = chunk->space + chunk->taken;
    chunk->taken += aligned(size);
    return memory;
}

/* Sums of blocks in a row lie side by side, as in messages. */
static void place_sums(Chunk *chunk)
{
    const Lane *lane = chunk->lane;
    int64_t place = 0;
    for (int block = 0; block < lane->blocks && !chunk->job->in_place; ++block)
        if (lane->held[block]) {
            Range part = part_of(chunk, block);
            chunk->places[block] = place;
            place += (part.stop - part.start) * chunk->job->coding.grain;
        }
    chunk->total = (f32 *)(void *)take(chunk, (size_t)place * sizeof(f32));
}

/* --- tasks -------------------------------------------------------------- */

enum {
    CONTRIBUTE,    /* encode this rank's contribution */
    WRITE_MESSAGE,
    BEGIN_SUMS,    /* with this rank's contribution */
    ADD_MESSAGE,
    MAKE_MEAN,
    TAKE_RESULT,   /* decode it where it lies, or copy it into the wire */
    DECODE_CHUNK,
};

/* Encodes this rank's contribution to blocks, unless that has been done. */
static void contribute(Chunk *chunk, const Step *step)
{
    for (int block = step->start; block < step->stop; ++block)
        if (chunk->job->encodes && !chunk->progress[block]) {
            chunk->progress[block] = CONTRIBUTED;
            encode_range(&chunk->job->coding, part_of(chunk, block),
                         wire_of(chunk, block));
        }
}

static int has_contributed(const Chunk *chunk, const Step *step)
{
    for (int block = step->start; block < step->stop; ++block)
        if (chunk->job->encodes && !chunk->progress[block])
            return 0;
    return 1;
}

/* What is sent of a step's blocks. */
static char *message_of(Chunk *chunk, const Step *step)
{
    const Job *job = chunk->job;
    const Step *before = chunk->streamed;
    char *total = sends_total(job, step)
        ? (char *)total_of(chunk, step->start) : NULL;
    if (!needs_space(job, step))
        return total ? total : wire_of(chunk, step->start);
    const int to_share = step->near && step->kind == SEND_RESULT;
    if (to_share && before && before->start == step->start
        && before->stop == step->stop) /* all neighbours read the same copy */
        return chunk->streamed_to;
    size_t size = message_size(chunk, step);
    char *message = take(chunk, size);
    if (total)
        stream(message, total, size);
    else if (sends_sum(job, step))
        encode_halves(total_of(chunk, step->start), job->shrink,
                      (u16 *)(void *)message, size / sizeof(u16));
    else
        FOR_EACH_BLOCK(chunk, step, block) {
            if (step->near)
                stream(message + block.place, block.wire, block.size);
            else
                memcpy(message + block.place, block.wire, block.size);
        }
    if (to_share) {
        chunk->streamed = step;
        chunk->streamed_to = message;
    }
    return message;
}

static void begin_sums(const Chunk *chunk, const Step *step)
{
    FOR_EACH_BLOCK(chunk, step, block) {
        const void *own = block.wire;
        sum_wires(&chunk->job->coding, &own, chunk->lane->contributes,
                  total_of(chunk, block.number), block.entries);
    }
}

/* Adds a message to the sums of a step. */
static void add_message(const Chunk *chunk, const Step *step,
                        const Receive *receive)
{
    const Job *job = chunk->job;
    const char *data = receive->data;
    f32 *total = job->in_place ? NULL : total_of(chunk, step->start);
    if (step->summed && !job->in_place) {
        if (job->sum_size == sizeof(u16))
            accumulate_halves((const u16 *)(const void *)data,
                              1 / job->shrink, total,
                              receive->size / sizeof(u16));
        else
            add_floats((const f32 *)(const void *)data, total,
                       receive->size / sizeof(f32));
        return;
    }
    FOR_EACH_BLOCK(chunk, step, block) {
        if (!job->in_place)
            accumulate_wire(&job->coding, data_of(receive, &block),
                            total_of(chunk, block.number), block.entries);
        else if (step->fresh && !chunk->lane->contributes)
            memcpy(block.wire, data_of(receive, &block), block.size);
        else
            add_wires(&job->coding, data_of(receive, &block), block.wire,
                      block.entries);
    }
}

static void encode_mean_at(const Chunk *chunk, const Step *step, f32 *total,
                           Range range, char *wire)
{
    const Coding *coding = &chunk->job->coding;
    encode_mean(coding, total, range, step->peer,
                chunk->share->means + chunk->site * coding->tensors_count,
                wire);
}

/* Elements whose sums stay in the nearest cache until they are encoded.  More
 * at a time would have memory wait: contributions are read while sums are
 * made, parameters and residuals while means are encoded, and neither would
 * be fetched ahead meanwhile. */
#define GATHERED 1024

/* Makes the sums of the last messages, and of them their mean. */
static void encode_gathered(const Chunk *chunk, const Step *step)
{
    const Coding *coding = &chunk->job->coding;
    const int count = step->gathered, own = chunk->lane->contributes;
    const Receive *receives = &chunk->receives[chunk->next_receive - count];
    const int64_t most = GATHERED / coding->grain;
    f32 sums[GATHERED] __attribute__((aligned(CACHE_LINE)));
    FOR_EACH_BLOCK(chunk, step, block)
        for (Range range = block.part; range.start < block.part.stop;
             range.start = range.stop) {
            const void *wires[MOST_SUMMED];
            size_t at = (size_t)(range.start - block.part.start)
                        * coding->itemsize;
            range.stop = block.part.stop - range.start < most
                ? block.part.stop : range.start + most;
            wires[0] = block.wire + at;
            for (int i = 0; i < count; ++i)
                wires[own + i] = data_of(&receives[i], &block) + at;
            sum_wires(coding, wires, own + count, sums,
                      (size_t)(range.stop - range.start));
            encode_mean_at(chunk, step, sums, range, block.wire + at);
        }
}

/* Makes the sums of a step their mean, in the wire's format. */
static void make_mean(Chunk *chunk, const Step *step)
{
    if (step->fresh) /* one contribution only */
        contribute(chunk, step);
    else if (chunk->job->in_place)
        ; /* they are */
    else if (step->gathered)
        encode_gathered(chunk, step);
    else
        FOR_EACH_BLOCK(chunk, step, block)
            encode_mean_at(chunk, step, total_of(chunk, block.number),
                           block.part, block.wire);
}

/* A result in a neighbour's memory that nobody else is to get from here. */
static int decodes_where_it_lies(const Chunk *chunk, const Step *step)
{
    return step->near && step->is_last && has_one_block(step)
           && !chunk->job->uses_wire;
}

static void take_result(const Chunk *chunk, const Step *step,
                        const Receive *receive)
{
    const int in_place = decodes_where_it_lies(chunk, step);
    FOR_EACH_BLOCK(chunk, step, block) {
        if (!in_place)
            memcpy(block.wire, data_of(receive, &block), block.size);
        else if (chunk->decodes)
            decode_range(&chunk->job->coding, block.part, receive->data);
    }
}

static void decode_chunk(const Chunk *chunk)
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
    const Receive *receive = &chunk->receives[chunk->next_receive];
    switch (chunk->task) {
    case CONTRIBUTE: contribute(chunk, step); break;
    case WRITE_MESSAGE: chunk->message = message_of(chunk, step); break;
    case BEGIN_SUMS: begin_sums(chunk, step); break;
    case ADD_MESSAGE: add_message(chunk, step, receive); break;
    case MAKE_MEAN: make_mean(chunk, step); break;
    case TAKE_RESULT: take_result(chunk, step, receive); break;
    default: decode_chunk(chunk);
    }
}

/* What the time of a task counts as; NULL: as the exchange. */
static double *seconds_of(Shared *shared, const Chunk *chunk)
{
    const Step *step = &chunk->lane->steps[chunk->position];
    switch (chunk->task) {
    case CONTRIBUTE: case MAKE_MEAN: return &shared->encoding;
    case WRITE_MESSAGE:
        return sends_sum(chunk->job, step) && !sends_total(chunk->job, step)
            ? &shared->encoding : NULL;
    case TAKE_RESULT:
        return decodes_where_it_lies(chunk, step) ? &shared->decoding : NULL;
    default: return &shared->decoding;
    }
}

/* Does it in the thread that has called the engine. */
static void perform_here(Shared *shared, Chunk *chunk)
{
    double since = now(), *seconds = seconds_of(shared, chunk);
    perform(chunk);
    if (seconds)
        *seconds += now() - since;
    atomic_store_explicit(&chunk->working, 0, memory_order_release);
}

/* Has a task done, here or by a worker. */
static int begin(Shared *shared, Chunk *chunk, int task)
{
    chunk->task = task;
    atomic_store_explicit(&chunk->working, 1, memory_order_relaxed);
    if (shared->uses_workers)
        enqueue(chunk);
    else
        perform_here(shared, chunk);
    return DONE;
}

/* --- messages ----------------------------------------------------------- */

static int fail(Shared *shared, int error)
{
    shared->messages.error = error;
    return FAILED;
}

static Mail *mail_of(const Chunk *chunk, const Step *step)
{
    return step->mail + (ptrdiff_t)chunk->seat * step->stride;
}

static int has_come(Shared *shared, const Step *step, Receive *receive)
{
    if (!receive->mail)
        return receive->pending ? BLOCKED : DONE;
    if (!is_posted(receive->mail))
        return BLOCKED;
    receive->data = step->near->memory + receive->mail->offset;
    receive->scattered = receive->mail->scattered;
    return receive->mail->size == (int64_t)receive->size
        ? DONE : fail(shared, OUT_OF_STEP);
}

/* The message has been used, if it is one of a neighbour's. */
static void give_back(Receive *receive)
{
    if (receive->mail)
        set_posted(receive->mail, 0);
    receive->mail = NULL;
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
    Messages *messages = &shared->messages;
    for (int i = 0; i < chunk->lane->steps_count; ++i) {
        const Step *step = &chunk->lane->steps[i];
        if (step->kind != kind)
            continue;
        Receive *receive = &chunk->receives[chunk->posted++];
        *receive = (Receive){.size = message_size(chunk, step)};
        if (step->near) {
            receive->mail = receive->size ? mail_of(chunk, step) : NULL;
            continue;
        }
        receive->data = needs_space(chunk->job, step)
            ? take(chunk, receive->size) : wire_of(chunk, step->start);
        if (receive->size > 0
            && transmit(messages, messages->receive, receive->data,
                        receive->size, step->peer, chunk->tag,
                        &receive->pending) < 0)
            return FAILED;
    }
    return DONE;
}

/* --- steps: a phase is done, has to be tried again, or was the last; what
 *     one has begun is over before the next ------------------------------ */

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
        if (needs_space(chunk->job, step))
            return begin(shared, chunk, WRITE_MESSAGE);
        chunk->message = message_of(chunk, step);
        return DONE;
    }
    shared->bytes_sent += (int64_t)size;
    if (step->near) {
        Mail *mail = mail_of(chunk, step);
        mail->offset = chunk->message - shared->memory;
        mail->size = (int64_t)size;
        mail->scattered = !needs_space(chunk->job, step);
        set_posted(mail, 1);
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
    const int waits = step->gathered && !chunk->job->in_place;
    int there = DONE;
    switch (chunk->phase) {
    case 0: /* while the message is on its way */
        return step->fresh && !has_contributed(chunk, step)
            ? begin(shared, chunk, CONTRIBUTE) : DONE;
    case 1:
        return step->fresh && !chunk->job->in_place && !waits
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
    Ranges *ranges = job->decodes ? &job->decoded : &job->undecoded;
    if (ranges->count == ranges->room) {
        int64_t room = ranges->room ? 2 * ranges->room : 64;
        if (!grow(&ranges->items, (size_t)room * sizeof *ranges->items))
            return fail(shared, NO_MEMORY);
        ranges->room = room;
    }
    ranges->items[ranges->count++] = range;
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
    chunk->slot = chunk->lane->slots[--chunk->lane->slots_count];
    chunk->space = chunk->share->space
                   + (size_t)chunk->slot * chunk->share->room;
    chunk->taken = 0;
    chunk->wire = take(chunk, chunk->job->uses_wire ? 0
        : (size_t)(chunk->lane->blocks * chunk->share->frame)
              * chunk->job->coding.itemsize);
    place_sums(chunk);
    return post_receives(shared, chunk, RECEIVE_PARTIAL);
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
    chunk->lane->slots[chunk->lane->slots_count++] = chunk->slot;
    SET(chunk->active, 0);
    return DONE;
}

#endif
