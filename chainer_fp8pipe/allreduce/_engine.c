/* Runs the steps of a plan on frames of buckets, without the interpreter.
 *
 * A plan arrives as a table of steps (plan.py): send a sum, receive one and
 * add it, encode the mean, send it, receive others'.  A flight takes one frame
 * of every block of a bucket through all of them, and a few flights are under
 * way at a time: the first means return while the last contributions are still
 * to be sent, and both directions of a link are busy.  A step does what it can
 * and never waits.  `run` goes round the flights until a bucket is finished or
 * its seconds are over; engine.py submits and waits.
 *
 * A flight has memory of its own: a wire with its frames side by side, sums of
 * the blocks that it adds to, and messages.  Frames of all blocks count as
 * equally long, that of the longest block, so that blocks in a row are one
 * message as they lie.  Gradients are encoded into the wire when a frame is
 * sent, and means decoded from it into gradients; where a bucket has a wire of
 * its own (of a GPU; or means may not be written yet), they are copied from
 * and to it.  Sums of float32 are made in the wire itself.
 *
 * Messages travel through MPI, or lie where the other rank reads them: memory
 * of its node, in which memory.py has laid out a place for each message, and a
 * Mail that says it is there.  The reader clears the Mail when it has done
 * with the message, and a flight ends when all that it has sent was used.
 * Contributions that meet on the rank that makes their mean stay where they
 * have come, until sums and mean are made in one pass: that takes half the
 * time of adding one after the other.
 *
 * Why C: the same in Python takes as long at 500 Mbit/s, half as long again at
 * 10 Gbit/s and twice to six times as long between ranks of a host.  MPI's
 * functions are called by addresses, so nothing of a library is needed to
 * build this.  Handles are ints in some libraries and pointers in others: an
 * argument's register is the same for both, and in arrays their size says
 * which.
 *
 * This is called by ctypes.  Structs that are shared are engine.py's, which
 * keeps them, and all that has its address in them, while they are in use.
 */
#include "../formats/coding.h"

#include <fenv.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define NEWEST 0.125    /* weight of the newest flight in their mean time */
#define LONGEST 10e-3   /* seconds; a rank that is late makes no flight slow */
#define SHARE 0.25      /* of a flight's time that is slept at most */
#define PAUSE 50e-6     /* seconds; Linux makes about 100 us of it */

enum { SEND_SUM, RECEIVE_SUM, ENCODE, SEND_MEAN, RECEIVE_MEAN };
enum { FAILED = -1, BLOCKED, DONE };
enum { NO_MEMORY = -1, OUT_OF_STEP = -2 }; /* beside MPI's errors */

typedef int Transmit(void *data, int count, intptr_t datatype, int rank,
                     int tag, intptr_t comm, void *request);
typedef int Testsome(int count, void *requests, int *found, int *indices,
                     void *statuses);

/* In memory that two processes share; a line for each, or they would wait for
 * each other's. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_int posted;
    int64_t size; /* bytes of the message */
} Mail;

_Static_assert(sizeof(Mail) == CACHE_LINE, "memory.py reckons with that");

/* --- what engine.py fills in ----------------------------------------------- */

typedef struct {
    int kind;
    int peer;        /* the other rank; of ENCODE, how many were summed */
    int start, stop; /* blocks */
    int summed;      /* the message is a sum of several ranks */
    int fresh;       /* nothing has been added to the blocks before */
    int is_last;     /* what is received is not sent on */
    int gathered;    /* of ENCODE: how many messages before it stay where they
                      * are; of a receive: 1 if its message does */
    int copies;      /* it is to be written; or an earlier step has */
    Mail *mail;      /* of seat 0, if the peer shares memory */
    char *data;      /* the message's place there */
    int64_t stride;  /* bytes to those of the next seat */
} Step;

typedef struct Bucket {
    const Coding *coding;
    const Mean *means;       /* by site and tensor */
    char *wire;
    int64_t size, frame;     /* entries of all, and of a frame of a block */
    int64_t frames;          /* of the longest block */
    int64_t begun, finished; /* frames of those */
    struct Bucket *behind;   /* the next that waits */
    size_t sum_size;         /* bytes of an element of a sum that travels */
    float shrink;            /* of sums that travel as halves */
    int in_wire;             /* sums are made in the wire */
    int encodes, decodes;
} Bucket;

typedef struct Flight Flight;

typedef struct {
    char *memory;
    size_t size;
} Space;

typedef struct Engine {
    Transmit *send, *receive;
    Testsome *testsome;
    size_t request_size, status_size;
    intptr_t comm, byte;
    const Step *steps;
    const int *places; /* by block, of its sum; and how many have one */
    int steps_count, blocks, contributes, in_flight;
    /* What others read: */
    Bucket *waiting;   /* the first whose frames have not all taken off */
    int64_t started, oldest; /* flights */
    double duration;   /* seconds that a flight takes, a moving average */
    int64_t bytes_sent;
    double encoding, decoding; /* seconds */
    int error, found;  /* how many statuses the last look has filled in */
    char *statuses;
    atomic_int interrupted;
    /* And nobody: */
    int some_finished;
    double moved;      /* seconds: when anything did */
    Flight *seats;     /* flight c is in seat c modulo in_flight */
    Space *spaces;     /* that are free; the last one is warm */
    int spaces_count;
    /* Messages of MPI's that are under way.  Of each, `pending` points to a
     * number that is one less when it is through. */
    int count;
    char *requests;
    int *indices;
    int **pending;
} Engine;

_Static_assert(sizeof(Engine) - offsetof(Engine, some_finished) <= 128,
               "engine.py reckons with that");

/* --- flights --------------------------------------------------------------- */

typedef struct {
    int pending; /* of MPI's: 1 until it is through */
    char *data;
    size_t size;
    Mail *mail;  /* NULL: it comes through MPI, or has been used */
} Receive;

/* What has become of a block. */
enum { CONTRIBUTED = 1, SUMMING, ARRIVED };

struct Flight {
    Engine *engine;
    Bucket *bucket;     /* NULL: the seat is free */
    int64_t frame;      /* which one of each block */
    int64_t n;          /* entries of the longest block's */
    int seat, tag, active;
    double since;
    int position, site; /* what is to be done next */
    int pending[2];     /* sends of MPI's that are under way: sums, means */
    int next_receive, posted;
    Receive *receives;
    char *progress;     /* by block */
    Space space;
    size_t taken;       /* bytes of it */
    char *wire;
    f32 *sums;
};

/* Any thread may ask what flights wait for. */
#define SET(number, value) \
    __atomic_store_n(&(number), (value), __ATOMIC_RELAXED)
#define SEEN(number) __atomic_load_n(&(number), __ATOMIC_RELAXED)

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

static int fail(Engine *self, int error)
{
    self->error = error;
    return FAILED;
}

/* --- messages ------------------------------------------------------------ */

/* Starts a message of `size` bytes, fewer than 2^31. */
static int transmit(Engine *self, Transmit *function, void *data, size_t size,
                    int rank, int tag, int *pending)
{
    self->error = function(
        data, (int)size, self->byte, rank, tag, self->comm,
        self->requests + (size_t)self->count * self->request_size);
    if (self->error != 0)
        return FAILED;
    self->pending[self->count++] = pending;
    ++*pending;
    return DONE;
}

/* Finds out what is through. */
static int look(Engine *self)
{
    int found = 0, kept = 0;
    self->found = 0;
    if (self->count == 0)
        return DONE;
    self->error = self->testsome(self->count, self->requests, &found,
                                 self->indices, self->statuses);
    self->found = found > 0 && found <= self->count ? found : 0;
    if (self->error != 0)
        return FAILED;
    for (int i = 0; i < self->found; ++i) {
        int **pending = &self->pending[self->indices[i]];
        --**pending;
        *pending = NULL;
    }
    for (int i = 0; self->found && i < self->count; ++i) {
        if (self->pending[i] == NULL)
            continue;
        self->pending[kept] = self->pending[i];
        memmove(self->requests + (size_t)kept * self->request_size,
                self->requests + (size_t)i * self->request_size,
                self->request_size);
        ++kept;
    }
    if (self->found)
        self->count = kept;
    return DONE;
}

/* Copies to memory that another processor reads next.  A line that both have
 * in their caches takes up to four times as long to write, or not, depending
 * on which cores the system has given to two processes: so it goes past the
 * caches. */
static void stream(char *to, const char *from, size_t size)
{
#ifdef __SSE2__
    size_t head = -(uintptr_t)to % CACHE_LINE;
    head = head < size ? head : size;
    memcpy(to, from, head);
    size_t stop = head + (size - head) / CACHE_LINE * CACHE_LINE;
    for (size_t i = head; i < stop; i += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(void *)(to + i),
                         _mm_loadu_si128((const __m128i *)(from + i)));
    memcpy(to + stop, from + stop, size - stop);
    _mm_sfence(); /* or they might come after the mail */
#else
    memcpy(to, from, size);
#endif
}

static int is_posted(Mail *mail)
{
    return atomic_load_explicit(&mail->posted, memory_order_acquire);
}

static void set_posted(Mail *mail, int posted)
{
    atomic_store_explicit(&mail->posted, posted, memory_order_release);
}

static void *in_seat(const Flight *flight, const Step *step, void *place)
{
    return (char *)place + flight->seat * step->stride;
}

/* --- where things lie ---------------------------------------------------- */

/* A flight's frame of a block. */
static Range range_of(const Flight *flight, int block)
{
    const Bucket *bucket = flight->bucket;
    const int64_t blocks = flight->engine->blocks;
    int64_t start = bucket->size * block / blocks
                    + flight->frame * bucket->frame;
    int64_t stop = bucket->size * (block + 1) / blocks;
    start = start < stop ? start : stop;
    return (Range){start, stop - start < bucket->frame
                              ? stop : start + bucket->frame};
}

static size_t entries_of(Range range)
{
    return (size_t)(range.stop - range.start);
}

static char *wire_of(const Flight *flight, int block)
{
    return flight->wire + (size_t)(block * flight->n)
                              * flight->bucket->coding->itemsize;
}

static f32 *sums_of(const Flight *flight, int block)
{
    return flight->bucket->in_wire
        ? (f32 *)(void *)wire_of(flight, block)
        : flight->sums + flight->engine->places[block] * flight->n
                             * flight->bucket->coding->grain;
}

/* Where a message has a block. */
static char *block_of(const Flight *flight, const Step *step, char *message,
                      int block)
{
    return message + (size_t)((block - step->start) * flight->n)
                         * flight->bucket->coding->itemsize;
}

#define FOR_EACH_BLOCK(flight, step, block) \
    for (int block = (step)->start; block < (step)->stop; ++block)

/* What is sent or received is a sum that does not lie in the wire. */
static int is_apart(const Bucket *bucket, const Step *step)
{
    return step->summed && !bucket->in_wire
           && (step->kind == SEND_SUM || step->kind == RECEIVE_SUM);
}

/* Elements of a step's blocks. */
static size_t elements_of(const Flight *flight, const Step *step)
{
    return (size_t)((step->stop - step->start) * flight->n
                    * flight->bucket->coding->grain);
}

static size_t message_size(const Flight *flight, const Step *step)
{
    const Bucket *bucket = flight->bucket;
    return is_apart(bucket, step)
        ? elements_of(flight, step) * bucket->sum_size
        : (size_t)((step->stop - step->start) * flight->n)
              * bucket->coding->itemsize;
}

/* Whether a step's message lies neither in the wire nor in the sums, nor
 * where a neighbour has it. */
static int needs_space(const Flight *flight, const Step *step)
{
    return !step->mail && (step->kind == RECEIVE_SUM
                           || (is_apart(flight->bucket, step)
                               && flight->bucket->sum_size != sizeof(f32)));
}

static char *take(Flight *flight, size_t size)
{
    char *memory = flight->space.memory + flight->taken;
    flight->taken += aligned(size);
    return memory;
}

/* Gives a flight memory; the warmest there is, if that is large enough. */
static int lay_out(Engine *self, Flight *flight)
{
    const Bucket *bucket = flight->bucket;
    const size_t wire = (size_t)(self->blocks * flight->n)
                        * bucket->coding->itemsize;
    const size_t sums = bucket->in_wire ? 0
        : (size_t)(self->places[self->blocks] * flight->n
                   * bucket->coding->grain) * sizeof(f32);
    size_t size = aligned(wire) + aligned(sums);
    for (int i = 0; i < self->steps_count; ++i)
        if (needs_space(flight, &self->steps[i]))
            size += aligned(message_size(flight, &self->steps[i]));
    Space *space = &flight->space;
    *space = self->spaces[--self->spaces_count];
    if (space->size < size) {
        free(space->memory);
        space->memory = aligned_alloc(CACHE_LINE, size);
        space->size = space->memory ? size : 0;
        if (space->memory == NULL)
            return fail(self, NO_MEMORY);
        memset(space->memory, 0, size); /* ends of frames travel, too */
    }
    flight->taken = 0;
    flight->wire = take(flight, wire);
    flight->sums = (f32 *)(void *)take(flight, sums);
    return DONE;
}

/* --- what is done to frames ---------------------------------------------- */

/* Puts this rank's contribution to a step's blocks into the wire, unless that
 * has been done. */
static void contribute(Engine *self, Flight *flight, const Step *step)
{
    const Bucket *bucket = flight->bucket;
    const size_t itemsize = bucket->coding->itemsize;
    const double since = now();
    FOR_EACH_BLOCK(flight, step, block) {
        const Range range = range_of(flight, block);
        if (flight->progress[block] || !flight->engine->contributes)
            continue;
        flight->progress[block] = CONTRIBUTED;
        if (bucket->encodes)
            encode_range(bucket->coding, range, wire_of(flight, block));
        else
            memcpy(wire_of(flight, block),
                   bucket->wire + (size_t)range.start * itemsize,
                   entries_of(range) * itemsize);
    }
    self->encoding += now() - since;
}

static void begin_sums(const Flight *flight, const Step *step)
{
    FOR_EACH_BLOCK(flight, step, block) {
        const void *own = wire_of(flight, block);
        sum_wires(flight->bucket->coding, &own, flight->engine->contributes,
                  sums_of(flight, block), entries_of(range_of(flight, block)));
    }
}

/* Adds a message to the sums of a step. */
static void add_message(const Flight *flight, const Step *step, char *message)
{
    const Bucket *bucket = flight->bucket;
    f32 *sums = sums_of(flight, step->start);
    const size_t n = elements_of(flight, step);
    if (bucket->in_wire && step->fresh && !flight->engine->contributes)
        memcpy(sums, message, n * sizeof(f32));
    else if (bucket->in_wire || (step->summed
                                 && bucket->sum_size == sizeof(f32)))
        add_floats((const f32 *)(const void *)message, sums, n);
    else if (step->summed)
        CHOOSE(accumulate_halves)((const u16 *)(const void *)message,
                                  1 / bucket->shrink, sums, n);
    else
        FOR_EACH_BLOCK(flight, step, block)
            accumulate_wire(bucket->coding,
                            block_of(flight, step, message, block),
                            sums_of(flight, block),
                            entries_of(range_of(flight, block)));
}

static void encode_mean_at(const Flight *flight, const Step *step, f32 *sums,
                           Range range, char *wire)
{
    const Coding *coding = flight->bucket->coding;
    encode_mean(coding, range, wire, sums, step->peer,
                flight->bucket->means + flight->site * coding->tensors_count);
}

/* Elements whose sums stay in the nearest cache until they are encoded.  More
 * at a time would have memory wait: contributions are read while sums are
 * made, parameters and residuals while means are encoded, and neither would
 * be fetched ahead meanwhile. */
#define GATHERED 1024

/* Makes the sums of the last messages, and of them their mean. */
static void encode_gathered(Flight *flight, const Step *step)
{
    const Coding *coding = flight->bucket->coding;
    const int count = step->gathered, own = flight->engine->contributes;
    const Receive *receives = &flight->receives[flight->next_receive - count];
    const int64_t most = GATHERED / coding->grain;
    f32 sums[GATHERED] __attribute__((aligned(CACHE_LINE)));
    FOR_EACH_BLOCK(flight, step, block) {
        const Range whole = range_of(flight, block);
        for (Range range = whole; range.start < whole.stop;
             range.start = range.stop) {
            const void *wires[MOST_SUMMED];
            const size_t at = (size_t)(range.start - whole.start)
                              * coding->itemsize;
            char *wire = wire_of(flight, block) + at;
            range.stop = whole.stop - range.start < most
                ? whole.stop : range.start + most;
            wires[0] = wire;
            for (int i = 0; i < count; ++i)
                wires[own + i] = block_of(flight, step, receives[i].data,
                                          block) + at;
            sum_wires(coding, wires, own + count, sums, entries_of(range));
            encode_mean_at(flight, step, sums, range, wire);
        }
    }
}

/* A block's mean is there. */
static void arrive(Engine *self, Flight *flight, int block, const char *mean)
{
    Bucket *bucket = flight->bucket;
    const Range range = range_of(flight, block);
    const size_t itemsize = bucket->coding->itemsize;
    flight->progress[block] = ARRIVED;
    if (!flight->engine->contributes)
        return;
    const double since = now();
    if (bucket->decodes)
        decode_range(bucket->coding, range, mean);
    else
        memcpy(bucket->wire + (size_t)range.start * itemsize, mean,
               entries_of(range) * itemsize);
    self->decoding += now() - since;
}

/* --- steps: each does what it can, and says whether that was all ---------- */

/* Whether all that has been sent by steps of this kind has left. */
static int has_left(Flight *flight, int kind)
{
    for (int i = 0; i < flight->position; ++i) {
        const Step *step = &flight->engine->steps[i];
        if (step->kind == kind && step->mail
            && is_posted(in_seat(flight, step, step->mail)))
            return 0;
    }
    return !flight->pending[kind == SEND_MEAN];
}

static int post_receives(Engine *self, Flight *flight, int kind)
{
    for (int i = 0; i < flight->engine->steps_count; ++i) {
        const Step *step = &flight->engine->steps[i];
        if (step->kind != kind)
            continue;
        Receive *receive = &flight->receives[flight->posted++];
        *receive = (Receive){.size = message_size(flight, step)};
        if (step->mail) {
            receive->mail = in_seat(flight, step, step->mail);
            receive->data = in_seat(flight, step, step->data);
            continue;
        }
        receive->data = needs_space(flight, step)
            ? take(flight, receive->size) : wire_of(flight, step->start);
        if (transmit(self, self->receive, receive->data, receive->size,
                     step->peer, flight->tag, &receive->pending) == FAILED)
            return FAILED;
    }
    return DONE;
}

static int has_come(Engine *self, const Receive *receive)
{
    if (!receive->mail)
        return receive->pending ? BLOCKED : DONE;
    if (!is_posted(receive->mail))
        return BLOCKED;
    return receive->mail->size == (int64_t)receive->size
        ? DONE : fail(self, OUT_OF_STEP);
}

/* The message has been used. */
static void give_back(Receive *receive)
{
    if (receive->mail)
        set_posted(receive->mail, 0);
    receive->mail = NULL;
}

static int send_message(Engine *self, Flight *flight, const Step *step)
{
    const Bucket *bucket = flight->bucket;
    const size_t size = message_size(flight, step);
    const int is_sum = is_apart(bucket, step);
    if (step->kind == SEND_SUM)
        contribute(self, flight, step);
    char *message = is_sum ? (char *)sums_of(flight, step->start)
                           : wire_of(flight, step->start);
    char *place = step->mail ? in_seat(flight, step, step->data)
        : needs_space(flight, step) ? take(flight, size) : message;
    const double since = now();
    if (is_sum && bucket->sum_size != sizeof(f32)) {
        CHOOSE(encode_halves)((const f32 *)(const void *)message,
                              bucket->shrink, (u16 *)(void *)place,
                              elements_of(flight, step));
        self->encoding += now() - since;
    }
    else if (step->mail && step->copies)
        stream(place, message, size);
    self->bytes_sent += (int64_t)size;
    if (!step->mail)
        return transmit(self, self->send, place, size, step->peer,
                        flight->tag,
                        &flight->pending[step->kind == SEND_MEAN]);
    Mail *mail = in_seat(flight, step, step->mail);
    mail->size = (int64_t)size;
    set_posted(mail, 1);
    return DONE;
}

static int receive_sum(Engine *self, Flight *flight, const Step *step)
{
    Receive *receive = &flight->receives[flight->next_receive];
    const int stays = step->gathered && !flight->bucket->in_wire;
    double since = now();
    if (step->fresh && flight->progress[step->start] < SUMMING) {
        contribute(self, flight, step); /* while it is on its way */
        since = now();
        if (!stays && !flight->bucket->in_wire)
            begin_sums(flight, step);
        FOR_EACH_BLOCK(flight, step, block)
            flight->progress[block] = SUMMING;
    }
    const int result = has_come(self, receive);
    if (result == DONE) {
        ++flight->next_receive;
        if (!stays) {
            add_message(flight, step, receive->data);
            give_back(receive);
        }
    }
    self->decoding += now() - since;
    return result;
}

static int encode_means(Engine *self, Flight *flight, const Step *step)
{
    if (step->fresh) { /* of one contribution */
        contribute(self, flight, step);
        return DONE;
    }
    const double since = now();
    if (flight->bucket->in_wire)
        ; /* they are */
    else if (step->gathered)
        encode_gathered(flight, step);
    else
        FOR_EACH_BLOCK(flight, step, block)
            encode_mean_at(flight, step, sums_of(flight, block),
                           range_of(flight, block), wire_of(flight, block));
    for (int i = 0; i < flight->next_receive; ++i)
        give_back(&flight->receives[i]);
    FOR_EACH_BLOCK(flight, step, block)
        flight->progress[block] = CONTRIBUTED; /* to what may follow */
    ++flight->site;
    self->encoding += now() - since;
    return DONE;
}

static int receive_mean(Engine *self, Flight *flight, const Step *step)
{
    Receive *receive = &flight->receives[flight->next_receive];
    /* They come after all sums of the plan, where the contribution lies. */
    if (flight->posted == flight->next_receive
        && (!has_left(flight, SEND_SUM)
            || post_receives(self, flight, RECEIVE_MEAN) == FAILED))
        return self->error ? FAILED : BLOCKED;
    const int result = has_come(self, receive);
    if (result != DONE)
        return result;
    ++flight->next_receive;
    if (step->mail && !step->is_last)
        memcpy(wire_of(flight, step->start), receive->data, receive->size);
    else if (step->mail)
        FOR_EACH_BLOCK(flight, step, block)
            arrive(self, flight, block,
                   block_of(flight, step, receive->data, block));
    give_back(receive);
    return DONE;
}

static int take_off(Engine *self, Flight *flight)
{
    const Bucket *bucket = flight->bucket;
    const int64_t longest = (bucket->size + self->blocks - 1) / self->blocks
                            - flight->frame * bucket->frame;
    flight->n = longest < bucket->frame ? longest : bucket->frame;
    flight->since = now();
    flight->site = flight->next_receive = flight->posted = 0;
    memset(flight->pending, 0, sizeof flight->pending);
    memset(flight->progress, 0, (size_t)self->blocks);
    SET(flight->position, 0);
    SET(flight->active, 1);
    return lay_out(self, flight) == FAILED
        ? FAILED : post_receives(self, flight, RECEIVE_SUM);
}

static int do_step(Engine *self, Flight *flight, const Step *step)
{
    switch (step->kind) {
    case RECEIVE_SUM: return receive_sum(self, flight, step);
    case RECEIVE_MEAN: return receive_mean(self, flight, step);
    case ENCODE: return encode_means(self, flight, step);
    default: return send_message(self, flight, step);
    }
}

/* Does what can be done now.  `moved` is set if that was anything; DONE: the
 * flight is over, and all that it sent has left. */
static int advance(Engine *self, Flight *flight, int *moved)
{
    while (flight->position < self->steps_count) {
        const int result = do_step(self, flight,
                                   &self->steps[flight->position]);
        if (result != DONE)
            return result;
        SET(flight->position, flight->position + 1);
        *moved = 1;
    }
    for (int block = 0; block < self->blocks; ++block)
        if (flight->progress[block] != ARRIVED)
            arrive(self, flight, block, wire_of(flight, block));
    if (!has_left(flight, SEND_SUM) || !has_left(flight, SEND_MEAN))
        return BLOCKED;
    *moved = 1;
    self->spaces[self->spaces_count++] = flight->space;
    SET(flight->active, 0);
    return DONE;
}

/* --- flights -------------------------------------------------------------- */

/* Starts flights while there is room for them.
 *
 * They start in one order on all ranks, and messages find theirs by its tag.
 * One that is over here was started everywhere, and the oldest one under way
 * is less than in_flight behind the newest: ranks are less than 2 in_flight
 * apart, and tags may come again soon. */
static int start_flights(Engine *self, int *moved)
{
    while (self->waiting && self->started - self->oldest < self->in_flight) {
        Bucket *first = self->waiting;
        const int64_t number = self->started++;
        Flight *flight = &self->seats[number % self->in_flight];
        SET(flight->frame, first->begun++);
        SET(flight->bucket, first);
        flight->tag = (int)(number % (4 * self->in_flight));
        if (first->begun == first->frames)
            self->waiting = first->behind;
        *moved = 1;
        /* It sends before the next one encodes. */
        if (take_off(self, flight) == FAILED
            || advance(self, flight, moved) == FAILED)
            return FAILED;
    }
    return DONE;
}

/* Does what can be done without waiting. */
static int sweep(Engine *self, int *moved)
{
    if (look(self) == FAILED || start_flights(self, moved) == FAILED)
        return FAILED;
    for (int64_t number = self->oldest; number < self->started; ++number) {
        Flight *flight = &self->seats[number % self->in_flight];
        if (flight->active && advance(self, flight, moved) == FAILED)
            return FAILED;
        if (flight->active || !flight->bucket)
            continue;
        const double taken = now() - flight->since;
        self->duration += ((taken < LONGEST ? taken : LONGEST)
                           - self->duration) * NEWEST;
        self->some_finished |=
            ++flight->bucket->finished == flight->bucket->frames;
        SET(flight->bucket, NULL);
    }
    while (self->oldest < self->started
           && !self->seats[self->oldest % self->in_flight].active)
        ++self->oldest;
    return DONE;
}

/* Seconds that may be slept without slowing anything down. */
double engine_patience(const Engine *self)
{
    return (self->duration < LONGEST ? self->duration : LONGEST) * SHARE;
}

/* A look takes a few microseconds, so one each 100 leaves the processor to
 * others; ranks of one node are through before the first sleep. */
static void pause_a_little(Engine *self, double brief)
{
    if (now() - self->moved < brief
        || (brief > 0 && engine_patience(self) < PAUSE))
        sched_yield();
    else
        nanosleep(&(struct timespec){0, (long)(PAUSE * 1e9)}, NULL);
}

/* --- calls ----------------------------------------------------------------- */

/* Gives an engine memory, whose first part is filled in; 0: there is none. */
int engine_open(Engine *self)
{
    const size_t seats = (size_t)self->in_flight;
    size_t receives = 1, messages = 1;
    for (int i = 0; i < self->steps_count; ++i) {
        const int kind = self->steps[i].kind;
        receives += kind == RECEIVE_SUM || kind == RECEIVE_MEAN;
        messages += kind != ENCODE;
    }
    messages *= seats;
    self->moved = now();
    self->spaces_count = self->in_flight;
    self->seats = calloc(seats, sizeof *self->seats);
    self->spaces = calloc(seats, sizeof *self->spaces);
    self->requests = calloc(messages, self->request_size);
    self->statuses = calloc(messages, self->status_size);
    self->indices = calloc(messages, sizeof *self->indices);
    self->pending = calloc(messages, sizeof *self->pending);
    int ok = self->seats && self->spaces && self->requests && self->statuses
             && self->indices && self->pending;
    for (int i = 0; ok && i < self->in_flight; ++i) {
        Flight *seat = &self->seats[i];
        seat->engine = self;
        seat->seat = i;
        seat->receives = calloc(receives, sizeof *seat->receives);
        seat->progress = calloc((size_t)self->blocks, 1);
        ok = seat->receives && seat->progress;
    }
    return ok;
}

/* Frees it again; nothing may be under way. */
void engine_close(Engine *self)
{
    for (int i = 0; self->seats && i < self->in_flight; ++i) {
        free(self->seats[i].receives);
        free(self->seats[i].progress);
    }
    for (int i = 0; self->spaces && i < self->spaces_count; ++i)
        free(self->spaces[i].memory);
    free(self->seats);
    free(self->spaces);
    free(self->requests);
    free(self->statuses);
    free(self->indices);
    free(self->pending);
}

/* Puts a bucket behind the others that wait. */
void engine_let_in(Engine *self, Bucket *bucket)
{
    Bucket **place = &self->waiting;
    while (*place)
        place = &(*place)->behind;
    if (bucket->frames)
        *place = bucket;
}

/* Advances until there is nothing to do any more, some bucket is finished, the
 * seconds are over, or `interrupted` is set.  With 0 seconds it does not pause.
 * Whether anything moved; -1: see `error`.
 *
 * Denormal numbers are neither read nor written as 0, whatever mode a library
 * has put a thread into: results must not depend on which rank adds up. */
int engine_run(Engine *self, double seconds, double brief)
{
    const double end = now() + seconds;
    int ever = 0;
    fenv_t mode;
    fegetenv(&mode);
    fesetenv(FE_DFL_ENV);
    self->some_finished = 0;
    while ((self->waiting || self->oldest < self->started)
           && !self->some_finished
           && !atomic_exchange(&self->interrupted, 0)) {
        int moved = 0;
        if (sweep(self, &moved) == FAILED) {
            ever = -1;
            break;
        }
        if (moved) {
            ever = 1;
            self->moved = now();
        }
        else if (seconds > 0)
            pause_a_little(self, brief);
        if (now() > end)
            break;
    }
    fesetenv(&mode);
    return ever;
}

/* What each flight waits for; of one that is not under way, no bucket.  Any
 * thread may ask. */
void engine_waits(const Engine *self, int64_t (*found)[5])
{
    for (int i = 0; i < self->in_flight; ++i) {
        const Flight *flight = &self->seats[i];
        const int position = SEEN(flight->position);
        const int goes_on = position < self->steps_count;
        found[i][0] = SEEN(flight->active)
            ? (int64_t)(intptr_t)SEEN(flight->bucket) : 0;
        found[i][1] = SEEN(flight->frame);
        found[i][2] = position;
        found[i][3] = goes_on ? self->steps[position].kind : -1;
        found[i][4] = goes_on ? self->steps[position].peer : -1;
    }
}
