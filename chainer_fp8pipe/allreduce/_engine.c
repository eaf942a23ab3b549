/* Runs the steps of plans on frames of buckets, without the interpreter.
 *
 * What it does.  A plan arrives as a list of steps (plan.py): send a sum,
 * receive one and add it, encode the mean, send it, receive others'.  A flight
 * takes one frame of every block of a bucket through all of them, and a few
 * flights are under way at a time: the first means return while the last
 * contributions are still to be sent, and both directions of a link are busy.
 * A step does what it can and never waits.  `run` goes round the flights until
 * a bucket is finished or its seconds are over; engine.py submits and waits.
 *
 * Where things lie.  A flight has memory of its own: a wire with its frames
 * side by side, sums of the blocks that it adds to, and messages.  Frames of
 * all blocks count as equally long, that of the longest block, so that blocks
 * in a row are one message as they lie, and several such flights stay in the
 * processor's caches.  Gradients are encoded into the wire when a frame is
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
 * Why C.  The same in Python, a generator for each flight, takes as long at
 * 500 Mbit/s, half as long again at 10 Gbit/s and twice to six times as long
 * between ranks of a host.  The price are these lines, and MPI by addresses:
 * its functions are called through pointers, so nothing of a library is needed
 * to build this.  Handles are ints in some libraries and pointers in others:
 * an argument's register is the same for both, and in arrays their size says
 * which.
 *
 * What is under way belongs to MPI and to neighbours.  An engine holds the
 * buckets that are not finished, and they all that their tables point to.  An
 * engine that is dropped meanwhile never frees any of this.
 */
#include "../formats/coding.h"

#include <sched.h>
#include <stdatomic.h>
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

typedef struct {
    int kind;
    int peer;        /* the other rank; of ENCODE, how many were summed */
    int start, stop; /* blocks */
    int summed;      /* the message is a sum of several ranks */
    int fresh;       /* nothing has been added to the blocks before */
    int is_last;     /* what is received is not sent on */
    int gathered;    /* of ENCODE: how many messages before it stay where they
                      * are; of a receive: 1 if its message does */
    Mail *mail;      /* of seat 0, if the peer shares memory */
    char *data;      /* the message's place there */
    int64_t stride;  /* bytes to those of the next seat */
    int copies;      /* it is to be written; or an earlier step has */
} Step;

/* How a bucket is cut for a plan. */
typedef struct {
    int64_t start, stop, frame, frames;
    const Mean *means; /* by site and tensor */
    Py_buffer means_buffer;
} Cut;

/* The compiled part of engine.py's Bucket. */
typedef struct {
    PyObject_HEAD
    Coding coding;
    Py_buffer wire_buffer;
    char *wire;
    size_t sum_size;    /* bytes of an element of a sum that travels */
    float shrink;       /* of sums that travel as halves */
    int in_wire;        /* sums are made in the wire */
    int encodes, decodes;
    int64_t unfinished; /* frames */
    int cuts_count;
    Cut *cuts;
} Bucket;

typedef struct {
    int pending; /* of MPI's: 1 until it is through */
    char *data;
    size_t size;
    Mail *mail;  /* NULL: it comes through MPI, or has been used */
} Receive;

typedef struct {
    char *memory;
    size_t size;
} Space;

struct Plan;

/* What has become of a block. */
enum { CONTRIBUTED = 1, ARRIVED = 2 };

typedef struct {
    struct Plan *plan;
    Bucket *bucket;
    Cut *cut;
    int64_t frame;      /* which one of each block */
    int64_t n;          /* entries of the longest block's */
    int seat, tag, active;
    double since;
    int position, site; /* what is to be done next */
    int begun;          /* the step at this position */
    int pending[2];     /* sends of MPI's that are under way: sums, means */
    int looked[2];      /* steps before it have nothing posted */
    int next_receive, posted;
    Receive *receives;
    char *progress;     /* by block */
    Space space;
    size_t taken;       /* bytes of it */
    char *wire;
    f32 *sums;
} Flight;

/* A bucket's frames that have not taken off. */
typedef struct {
    Bucket *bucket;
    Cut *cut;
    int64_t next;
} Waiting;

typedef struct Plan {
    int number, plans;
    int steps_count, blocks, contributes;
    Step *steps;
    int *place;       /* by block, of its sum; and how many have one */
    int in_flight;
    Flight *seats;    /* flight c is in seat c modulo in_flight */
    Space *spaces;    /* that are free; the last one is warm */
    int spaces_count;
    int64_t started, oldest;
    double duration;  /* seconds that a flight takes, a moving average */
    Waiting *waiting;
    int64_t waiting_count, waiting_room;
} Plan;

typedef struct {
    PyObject_HEAD
    PyObject *make_error; /* an exception of an error code and statuses */
    PyObject *buckets;    /* list: those whose memory is in use */
    PyThreadState *python; /* of the thread that is in a call */
    int is_used;
    int broken;           /* something has failed: a step is half done */
    int finished;         /* some bucket is */
    double moved;         /* seconds: when anything did */
    atomic_int interrupted;
    int plans_count;
    Plan *plans;
    int64_t bytes_sent;
    double encoding, decoding; /* seconds */
    /* Messages of MPI's that are under way.  Of each, `pending` points to a
     * number that is one less when it is through. */
    Transmit *send, *receive;
    Testsome *testsome;
    size_t request_size, status_size;
    intptr_t comm, byte;
    int count, room;
    char *requests, *statuses;
    int *indices;
    int **pending;
    int error;
    int found; /* how many statuses the last look has filled in */
} Engine;

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

/* Makes an array longer; 0 if there is no memory. */
static int grow(void *array, size_t size)
{
    void *grown = realloc(*(void **)array, size);
    if (grown)
        *(void **)array = grown;
    return grown != NULL;
}

/* --- messages ------------------------------------------------------------ */

/* Starts a message of `size` bytes, fewer than 2^31. */
static int transmit(Engine *self, Transmit *function, void *data, size_t size,
                    int rank, int tag, int *pending)
{
    if (self->count == self->room) {
        size_t n = self->room ? 2 * (size_t)self->room : 64;
        if (!grow(&self->requests, n * self->request_size)
            || !grow(&self->statuses, n * self->status_size)
            || !grow(&self->indices, n * sizeof *self->indices)
            || !grow(&self->pending, n * sizeof *self->pending))
            return fail(self, NO_MEMORY);
        self->room = (int)n;
    }
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
    const Cut *cut = flight->cut;
    const int64_t size = cut->stop - cut->start, blocks = flight->plan->blocks;
    int64_t start = cut->start + size * block / blocks
                    + flight->frame * cut->frame;
    int64_t stop = cut->start + size * (block + 1) / blocks;
    start = start < stop ? start : stop;
    return (Range){start, stop - start < cut->frame ? stop
                                                    : start + cut->frame};
}

static size_t entries_of(Range range)
{
    return (size_t)(range.stop - range.start);
}

static char *wire_of(const Flight *flight, int block)
{
    return flight->wire + (size_t)(block * flight->n)
                              * flight->bucket->coding.itemsize;
}

static f32 *sums_of(const Flight *flight, int block)
{
    return flight->bucket->in_wire
        ? (f32 *)(void *)wire_of(flight, block)
        : flight->sums + flight->plan->place[block] * flight->n
                             * flight->bucket->coding.grain;
}

/* Where a message has a block. */
static char *block_of(const Flight *flight, const Step *step, char *message,
                      int block)
{
    return message + (size_t)((block - step->start) * flight->n)
                         * flight->bucket->coding.itemsize;
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
                    * flight->bucket->coding.grain);
}

static size_t message_size(const Flight *flight, const Step *step)
{
    const Bucket *bucket = flight->bucket;
    return is_apart(bucket, step)
        ? elements_of(flight, step) * bucket->sum_size
        : (size_t)((step->stop - step->start) * flight->n)
              * bucket->coding.itemsize;
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
    Plan *plan = flight->plan;
    const Bucket *bucket = flight->bucket;
    const size_t wire = (size_t)(plan->blocks * flight->n)
                        * bucket->coding.itemsize;
    const size_t sums = bucket->in_wire ? 0
        : (size_t)(plan->place[plan->blocks] * flight->n
                   * bucket->coding.grain) * sizeof(f32);
    size_t size = aligned(wire) + aligned(sums);
    for (int i = 0; i < plan->steps_count; ++i)
        if (needs_space(flight, &plan->steps[i]))
            size += aligned(message_size(flight, &plan->steps[i]));
    Space *space = &flight->space;
    *space = plan->spaces[--plan->spaces_count];
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
    const size_t itemsize = bucket->coding.itemsize;
    const double since = now();
    FOR_EACH_BLOCK(flight, step, block) {
        const Range range = range_of(flight, block);
        if (flight->progress[block] || !flight->plan->contributes)
            continue;
        flight->progress[block] = CONTRIBUTED;
        if (bucket->encodes)
            encode_range(&bucket->coding, range, wire_of(flight, block));
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
        sum_wires(&flight->bucket->coding, &own, flight->plan->contributes,
                  sums_of(flight, block), entries_of(range_of(flight, block)));
    }
}

/* Adds a message to the sums of a step. */
static void add_message(const Flight *flight, const Step *step, char *message)
{
    const Bucket *bucket = flight->bucket;
    f32 *sums = sums_of(flight, step->start);
    const size_t n = elements_of(flight, step);
    if (bucket->in_wire && step->fresh && !flight->plan->contributes)
        memcpy(sums, message, n * sizeof(f32));
    else if (bucket->in_wire || (step->summed
                                 && bucket->sum_size == sizeof(f32)))
        add_floats((const f32 *)(const void *)message, sums, n);
    else if (step->summed)
        accumulate_halves((const u16 *)(const void *)message,
                          1 / bucket->shrink, sums, n);
    else
        FOR_EACH_BLOCK(flight, step, block)
            accumulate_wire(&bucket->coding,
                            block_of(flight, step, message, block),
                            sums_of(flight, block),
                            entries_of(range_of(flight, block)));
}

static void encode_mean_at(const Flight *flight, const Step *step, f32 *sums,
                           Range range, char *wire)
{
    const Coding *coding = &flight->bucket->coding;
    encode_mean(coding, sums, range, step->peer,
                flight->cut->means + flight->site * coding->tensors_count,
                wire);
}

/* Elements whose sums stay in the nearest cache until they are encoded.  More
 * at a time would have memory wait: contributions are read while sums are
 * made, parameters and residuals while means are encoded, and neither would
 * be fetched ahead meanwhile. */
#define GATHERED 1024

/* Makes the sums of the last messages, and of them their mean. */
static void encode_gathered(Flight *flight, const Step *step)
{
    const Coding *coding = &flight->bucket->coding;
    const int count = step->gathered, own = flight->plan->contributes;
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
    const size_t itemsize = bucket->coding.itemsize;
    flight->progress[block] = ARRIVED;
    if (!flight->plan->contributes)
        return;
    const double since = now();
    if (bucket->decodes)
        decode_range(&bucket->coding, range, mean);
    else
        memcpy(bucket->wire + (size_t)range.start * itemsize, mean,
               entries_of(range) * itemsize);
    self->decoding += now() - since;
}

/* --- steps: each does what it can, and says whether that was all ---------- */

/* Whether all that has been sent by steps of this kind has left. */
static int has_left(Flight *flight, int kind)
{
    const Plan *plan = flight->plan;
    const int means = kind == SEND_MEAN;
    int *place = &flight->looked[means];
    for (; *place < flight->position && *place < plan->steps_count; ++*place) {
        const Step *step = &plan->steps[*place];
        if (step->kind == kind && step->mail
            && is_posted(in_seat(flight, step, step->mail)))
            return 0;
    }
    return !flight->pending[means];
}

static int post_receives(Engine *self, Flight *flight, int kind)
{
    for (int i = 0; i < flight->plan->steps_count; ++i) {
        const Step *step = &flight->plan->steps[i];
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
        encode_halves((const f32 *)(const void *)message, bucket->shrink,
                      (u16 *)(void *)place, elements_of(flight, step));
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
    if (step->fresh && !flight->begun) { /* while it is on its way */
        contribute(self, flight, step);
        since = now();
        if (!stays && !flight->bucket->in_wire)
            begin_sums(flight, step);
    }
    flight->begun = 1;
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
    const Cut *cut = flight->cut;
    const int64_t blocks = flight->plan->blocks;
    const int64_t longest = (cut->stop - cut->start + blocks - 1) / blocks
                            - flight->frame * cut->frame;
    flight->n = longest < cut->frame ? longest : cut->frame;
    flight->since = now();
    flight->site = flight->begun = 0;
    flight->next_receive = flight->posted = 0;
    memset(flight->pending, 0, sizeof flight->pending);
    memset(flight->looked, 0, sizeof flight->looked);
    memset(flight->progress, 0, (size_t)blocks);
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
    Plan *plan = flight->plan;
    while (flight->position < plan->steps_count) {
        const int result = do_step(self, flight,
                                   &plan->steps[flight->position]);
        if (result != DONE)
            return result;
        SET(flight->position, flight->position + 1);
        flight->begun = 0;
        *moved = 1;
    }
    for (int block = 0; block < plan->blocks; ++block)
        if (flight->progress[block] != ARRIVED)
            arrive(self, flight, block, wire_of(flight, block));
    if (!has_left(flight, SEND_SUM) || !has_left(flight, SEND_MEAN))
        return BLOCKED;
    *moved = 1;
    plan->spaces[plan->spaces_count++] = flight->space;
    SET(flight->active, 0);
    return DONE;
}

/* --- flights -------------------------------------------------------------- */

static int is_busy(const Engine *self)
{
    for (int i = 0; i < self->plans_count; ++i)
        if (self->plans[i].waiting_count
            || self->plans[i].oldest < self->plans[i].started)
            return 1;
    return 0;
}

/* Starts flights while there is room for them.
 *
 * They start in one order on all ranks, and messages find theirs by its tag.
 * One that is over here was started everywhere, and the oldest one under way
 * is less than in_flight behind the newest: ranks are less than 2 in_flight
 * apart, and tags may come again soon. */
static int start_flights(Engine *self, Plan *plan, int *moved)
{
    while (plan->waiting_count
           && plan->started - plan->oldest < plan->in_flight) {
        Waiting *first = &plan->waiting[0];
        const int64_t number = plan->started++;
        Flight *flight = &plan->seats[number % plan->in_flight];
        SET(flight->bucket, first->bucket);
        flight->cut = first->cut;
        SET(flight->frame, first->next);
        flight->tag = (int)(number % (4 * plan->in_flight)) * plan->plans
                      + plan->number;
        if (++first->next == first->cut->frames)
            memmove(first, first + 1,
                    (size_t)--plan->waiting_count * sizeof *first);
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
    if (look(self) == FAILED)
        return FAILED;
    for (int i = 0; i < self->plans_count; ++i) {
        Plan *plan = &self->plans[i];
        if (start_flights(self, plan, moved) == FAILED)
            return FAILED;
        for (int64_t number = plan->oldest; number < plan->started; ++number) {
            Flight *flight = &plan->seats[number % plan->in_flight];
            if (flight->active && advance(self, flight, moved) == FAILED)
                return FAILED;
            if (flight->active || !flight->bucket)
                continue;
            const double taken = now() - flight->since;
            plan->duration += ((taken < LONGEST ? taken : LONGEST)
                               - plan->duration) * NEWEST;
            self->finished |= --flight->bucket->unfinished == 0;
            SET(flight->bucket, NULL);
        }
        while (plan->oldest < plan->started
               && !plan->seats[plan->oldest % plan->in_flight].active)
            ++plan->oldest;
    }
    return DONE;
}

/* Seconds that may be slept without slowing anything down. */
static double patience(const Engine *self)
{
    double least = LONGEST;
    for (int i = 0; i < self->plans_count; ++i)
        if (self->plans[i].duration < least)
            least = self->plans[i].duration;
    return least * SHARE;
}

/* A look takes a few microseconds, so one each 100 leaves the processor to
 * others; ranks of one node are through before the first sleep. */
static void pause_a_little(Engine *self, double brief)
{
    if (now() - self->moved < brief || (brief > 0 && patience(self) < PAUSE))
        sched_yield();
    else
        nanosleep(&(struct timespec){0, (long)(PAUSE * 1e9)}, NULL);
}

/* --- buckets -------------------------------------------------------------- */

static PyTypeObject *bucket_type;

static void bucket_dealloc(PyObject *object)
{
    Bucket *self = (Bucket *)object;
    PyTypeObject *type = Py_TYPE(object);
    /* Releasing one that was never filled does nothing. */
    PyBuffer_Release(&self->wire_buffer);
    coding_close(&self->coding);
    for (int i = 0; i < self->cuts_count; ++i)
        PyBuffer_Release(&self->cuts[i].means_buffer);
    free(self->cuts);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot bucket_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, bucket_dealloc},
    {0, NULL},
};

static PyType_Spec bucket_spec = {
    .name = "chainer_fp8pipe.allreduce._engine.Bucket",
    .basicsize = sizeof(Bucket),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = bucket_slots,
};

/* --- made and freed ------------------------------------------------------- */

static void engine_dealloc(PyObject *object)
{
    Engine *self = (Engine *)object;
    PyTypeObject *type = Py_TYPE(object);
    int is_under_way = self->count > 0;
    for (int i = 0; i < self->plans_count; ++i)
        is_under_way |= self->plans[i].oldest < self->plans[i].started;
    for (int i = 0; i < self->plans_count && !is_under_way; ++i) {
        Plan *plan = &self->plans[i];
        for (int j = 0; plan->seats && j < plan->in_flight; ++j) {
            free(plan->seats[j].receives);
            free(plan->seats[j].progress);
        }
        for (int j = 0; j < plan->spaces_count; ++j)
            free(plan->spaces[j].memory);
        free(plan->spaces);
        free(plan->seats);
        free(plan->steps);
        free(plan->place);
        free(plan->waiting);
    }
    if (!is_under_way) {
        free(self->plans);
        free(self->requests);
        free(self->statuses);
        free(self->indices);
        free(self->pending);
        Py_CLEAR(self->buckets);
    }
    Py_CLEAR(self->make_error);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Fills a plan from (steps, blocks, contributes); a step is a tuple of the
 * numbers of Step. */
static int make_plan(Plan *plan, PyObject *of)
{
    PyObject *steps;
    size_t receives = 1, blocks, seats = (size_t)plan->in_flight;
    if (!PyArg_ParseTuple(of, "O!ip", &PyTuple_Type, &steps, &plan->blocks,
                          &plan->contributes))
        return 0;
    blocks = (size_t)plan->blocks + 1;
    plan->steps_count = (int)PyTuple_GET_SIZE(steps);
    plan->steps = calloc((size_t)plan->steps_count + 1, sizeof(Step));
    plan->place = calloc(blocks, sizeof *plan->place);
    plan->seats = calloc(seats, sizeof(Flight));
    plan->spaces = calloc(seats, sizeof(Space));
    if (!plan->steps || !plan->place || !plan->seats || !plan->spaces)
        return PyErr_NoMemory(), 0;
    for (int i = 0; i < plan->steps_count; ++i) {
        Step *step = &plan->steps[i];
        unsigned long long mail, data;
        long long stride;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, i), "iiiipppiKKLp",
                              &step->kind, &step->peer, &step->start,
                              &step->stop, &step->summed, &step->fresh,
                              &step->is_last, &step->gathered, &mail, &data,
                              &stride, &step->copies))
            return 0;
        step->mail = (Mail *)(uintptr_t)mail;
        step->data = (char *)(uintptr_t)data;
        step->stride = stride;
        receives += step->kind == RECEIVE_SUM || step->kind == RECEIVE_MEAN;
        if (step->kind == RECEIVE_SUM)
            FOR_EACH_BLOCK(plan, step, block)
                plan->place[block] = 1;
    }
    /* Sums of blocks in a row lie side by side, as in messages. */
    for (int block = 0, held = 0; block <= plan->blocks; ++block) {
        held += plan->place[block];
        plan->place[block] = held - plan->place[block];
    }
    for (int i = 0; i < plan->in_flight; ++i) {
        Flight *seat = &plan->seats[i];
        seat->plan = plan;
        seat->seat = i;
        seat->receives = calloc(receives, sizeof(Receive));
        seat->progress = calloc(blocks, 1);
        if (!seat->receives || !seat->progress)
            return PyErr_NoMemory(), 0;
    }
    plan->spaces_count = plan->in_flight;
    return 1;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs)
{
    static char *names[] = {"make_error", "functions", "sizes", "comm",
                            "byte", "plans", "in_flight", NULL};
    unsigned long long send, receive, testsome, comm, byte;
    Py_ssize_t request_size, status_size;
    PyObject *make_error, *plans;
    int in_flight;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O(KKK)(nn)KKO!i", names, &make_error, &send,
            &receive, &testsome, &request_size, &status_size, &comm, &byte,
            &PyTuple_Type, &plans, &in_flight))
        return NULL;
    Engine *self = (Engine *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    const int count = (int)PyTuple_GET_SIZE(plans);
    self->make_error = Py_NewRef(make_error);
    self->send = (Transmit *)(uintptr_t)send;
    self->receive = (Transmit *)(uintptr_t)receive;
    self->testsome = (Testsome *)(uintptr_t)testsome;
    self->request_size = (size_t)request_size;
    self->status_size = (size_t)status_size;
    self->comm = (intptr_t)comm;
    self->byte = (intptr_t)byte;
    self->moved = now();
    self->buckets = PyList_New(0);
    self->plans = calloc((size_t)count + 1, sizeof *self->plans);
    if (self->plans == NULL)
        PyErr_NoMemory();
    int made = self->buckets && self->plans;
    while (made && self->plans_count < count) {
        Plan *plan = &self->plans[self->plans_count];
        plan->number = self->plans_count++;
        plan->plans = count;
        plan->in_flight = in_flight;
        made = make_plan(plan, PyTuple_GET_ITEM(plans, plan->number));
    }
    if (!made)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* --- calls ---------------------------------------------------------------- */

/* Denormal numbers are neither read nor written as 0, whatever mode a library
 * has put a thread into: results must not depend on which rank adds up.
 * Returns the mode before. */
static uint64_t begin_ieee(void)
{
#if defined(__SSE2__)
    unsigned int before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before & ~(UINT64_C(1) << 24)));
    return before;
#else
    return 0;
#endif
}

static void end_ieee(uint64_t before)
{
#if defined(__SSE2__)
    _mm_setcsr((unsigned int)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

/* Whether this thread may call now.  After an error nothing goes on: what came
 * of half a step would look like a mean. */
static int is_usable(const Engine *self)
{
    if (self->is_used)
        PyErr_SetString(PyExc_RuntimeError,
                        "two threads use this communicator's exchange at the "
                        "same time; call it from one");
    else if (self->broken)
        PyErr_SetString(PyExc_RuntimeError,
                        "an earlier error has left an all-reduce half done");
    return !PyErr_Occurred();
}

static uint64_t give_up_python(Engine *self)
{
    self->is_used = 1;
    self->python = PyEval_SaveThread();
    return begin_ieee();
}

static void take_python(Engine *self, uint64_t mode)
{
    end_ieee(mode);
    PyEval_RestoreThread(self->python);
    self->is_used = 0;
}

static PyObject *raised(Engine *self)
{
    self->broken = 1;
    if (self->error == NO_MEMORY)
        return PyErr_NoMemory();
    if (self->error == OUT_OF_STEP) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a rank of this node exchanges something else");
        return NULL;
    }
    PyObject *value = PyObject_CallFunction(
        self->make_error, "iy#", self->error, self->statuses,
        (Py_ssize_t)((size_t)self->found * self->status_size));
    if (value)
        PyErr_SetObject((PyObject *)Py_TYPE(value), value);
    Py_XDECREF(value);
    return NULL;
}

/* prepare(bucket, tables, wire, sum_size, shrink, in_wire, encodes, decodes,
 * cuts): `tables` are the codec's; of each plan, `cuts` have (start, stop,
 * frame, frames, means). */
static PyObject *prepare(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    PyObject *tables, *wire, *cuts;
    Py_ssize_t sum_size;
    Bucket *bucket, of = {.wire = NULL};
    if (!PyArg_ParseTuple(args, "O!OOnfpppO!", bucket_type, &bucket, &tables,
                          &wire, &sum_size, &of.shrink, &of.in_wire,
                          &of.encodes, &of.decodes, &PyTuple_Type, &cuts))
        return NULL;
    if (bucket->cuts || PyTuple_GET_SIZE(cuts) != self->plans_count) {
        PyErr_SetString(PyExc_ValueError, "a bucket is cut for each plan");
        return NULL;
    }
    if (PyObject_GetBuffer(wire, &bucket->wire_buffer, PyBUF_WRITABLE) < 0
        || !coding_open(tables, &bucket->coding))
        return NULL;
    bucket->cuts = calloc((size_t)self->plans_count + 1, sizeof(Cut));
    if (bucket->cuts == NULL)
        return PyErr_NoMemory();
    bucket->wire = bucket->wire_buffer.buf;
    bucket->sum_size = (size_t)sum_size;
    bucket->shrink = of.shrink;
    bucket->in_wire = of.in_wire;
    bucket->encodes = of.encodes;
    bucket->decodes = of.decodes;
    for (int i = 0; i < self->plans_count; ++i) {
        Cut *cut = &bucket->cuts[bucket->cuts_count++];
        PyObject *means;
        long long start, stop, frame, frames;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(cuts, i), "LLLLO", &start,
                              &stop, &frame, &frames, &means)
            || PyObject_GetBuffer(means, &cut->means_buffer, PyBUF_SIMPLE) < 0)
            return NULL;
        cut->start = start;
        cut->stop = stop;
        cut->frame = frame;
        cut->frames = frames;
        cut->means = cut->means_buffer.buf;
        bucket->unfinished += frames;
    }
    Py_RETURN_NONE;
}

/* let_in(bucket): puts its frames behind the others that wait. */
static PyObject *let_in(PyObject *object, PyObject *argument)
{
    Engine *self = (Engine *)object;
    Bucket *bucket = (Bucket *)argument;
    if (!PyObject_TypeCheck(argument, bucket_type)) {
        PyErr_SetString(PyExc_TypeError, "this is no Bucket");
        return NULL;
    }
    if (!is_usable(self) || PyList_Append(self->buckets, argument) < 0)
        return NULL;
    for (int i = 0; i < self->plans_count; ++i) {
        Plan *plan = &self->plans[i];
        if (bucket->cuts_count == 0 || bucket->cuts[i].frames == 0)
            continue;
        if (plan->waiting_count == plan->waiting_room) {
            int64_t room = plan->waiting_room ? 2 * plan->waiting_room : 16;
            if (!grow(&plan->waiting, (size_t)room * sizeof(Waiting)))
                return PyErr_NoMemory();
            plan->waiting_room = room;
        }
        plan->waiting[plan->waiting_count++] =
            (Waiting){bucket, &bucket->cuts[i], 0};
    }
    Py_RETURN_NONE;
}

/* run(seconds, brief): advances until there is nothing to do any more, some
 * bucket is finished, the seconds are over, or interrupt() is called; whether
 * anything moved.  With 0 seconds it does not pause. */
static PyObject *run(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    double seconds, brief;
    if (!PyArg_ParseTuple(args, "dd", &seconds, &brief) || !is_usable(self))
        return NULL;
    int result = DONE, ever = 0;
    const uint64_t mode = give_up_python(self);
    const double end = now() + seconds;
    self->finished = 0;
    while (is_busy(self) && !self->finished
           && !atomic_exchange(&self->interrupted, 0)) {
        int moved = 0;
        result = sweep(self, &moved);
        if (result == FAILED)
            break;
        if (moved) {
            ever = 1;
            self->moved = now();
        }
        else if (seconds > 0)
            pause_a_little(self, brief);
        if (now() > end)
            break;
    }
    take_python(self, mode);
    return result == FAILED ? raised(self) : PyBool_FromLong(ever);
}

/* interrupt(): has run() return; may be called from any thread. */
static PyObject *interrupt(PyObject *object, PyObject *unused)
{
    atomic_store(&((Engine *)object)->interrupted, 1);
    Py_RETURN_NONE;
}

/* taken(): (bytes sent, seconds of encoding, of decoding, finished buckets)
 * since the last call; lets go of these buckets. */
static PyObject *taken(PyObject *object, PyObject *unused)
{
    Engine *self = (Engine *)object;
    if (self->is_used && !is_usable(self))
        return NULL;
    PyObject *finished = PyList_New(0);
    for (Py_ssize_t i = 0; finished && i < PyList_GET_SIZE(self->buckets);) {
        PyObject *bucket = PyList_GET_ITEM(self->buckets, i);
        if (((Bucket *)bucket)->unfinished)
            ++i;
        else if (PyList_Append(finished, bucket) < 0
                 || PyList_SetSlice(self->buckets, i, i + 1, NULL) < 0)
            Py_CLEAR(finished);
    }
    PyObject *result = finished ? Py_BuildValue(
        "LddN", (long long)self->bytes_sent, self->encoding, self->decoding,
        finished) : NULL;
    self->bytes_sent = 0;
    self->encoding = self->decoding = 0;
    return result;
}

/* What a flight waits for: (its bucket, plan, frame, step, kind, peer); NULL
 * without an exception: it is not under way.  Any thread may ask.  A bucket
 * that is seen here is held: only taken(), by a thread that has the
 * interpreter, lets go of one. */
static PyObject *wait_of(const Plan *plan, const Flight *flight)
{
    Bucket *bucket = SEEN(flight->bucket);
    const int position = SEEN(flight->position);
    if (!bucket || !SEEN(flight->active))
        return NULL;
    int kind = -1, peer = -1; /* for what it has sent to leave */
    if (position >= 0 && position < plan->steps_count) {
        kind = plan->steps[position].kind;
        peer = plan->steps[position].peer;
    }
    return Py_BuildValue("OiLiii", (PyObject *)bucket, plan->number,
                         (long long)SEEN(flight->frame), position, kind, peer);
}

/* waits(): of all flights under way, what they wait for. */
static PyObject *waits(PyObject *object, PyObject *unused)
{
    Engine *self = (Engine *)object;
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < self->plans_count; ++i)
        for (int j = 0; found && j < self->plans[i].in_flight; ++j) {
            PyObject *wait = wait_of(&self->plans[i],
                                     &self->plans[i].seats[j]);
            if (wait ? PyList_Append(found, wait) < 0
                     : PyErr_Occurred() != NULL)
                Py_CLEAR(found);
            Py_XDECREF(wait);
        }
    return found;
}

static PyObject *get_busy(PyObject *self, void *unused)
{
    return PyBool_FromLong(is_busy((Engine *)self));
}

static PyObject *get_patience(PyObject *self, void *unused)
{
    return PyFloat_FromDouble(patience((Engine *)self));
}

static PyMethodDef engine_methods[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    {"let_in", let_in, METH_O, NULL},
    {"run", run, METH_VARARGS, NULL},
    {"interrupt", interrupt, METH_NOARGS, NULL},
    {"taken", taken, METH_NOARGS, NULL},
    {"waits", waits, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_properties[] = {
    {"busy", get_busy, NULL, NULL, NULL},
    {"patience", get_patience, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_properties},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "chainer_fp8pipe.allreduce._engine.Engine",
    .basicsize = sizeof(Engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

static int add_types(PyObject *module)
{
    bucket_type = (PyTypeObject *)PyType_FromSpec(&bucket_spec);
    PyObject *engine_type = PyType_FromSpec(&engine_spec);
    if (!bucket_type || !engine_type
        || PyModule_AddObjectRef(module, "Bucket", (PyObject *)bucket_type) < 0
        || PyModule_AddObjectRef(module, "Engine", engine_type) < 0)
        return -1;
    Py_DECREF(engine_type);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_engine",
    .m_doc = "Compiled; see chainer_fp8pipe.allreduce.engine.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__engine(void)
{
    return PyModuleDef_Init(&definition);
}
