/* Runs plans, without the interpreter; engine.py submits and waits.
 *
 * What is under way belongs to MPI, and to the neighbours that read it.  An
 * engine holds the jobs that are not finished, and a job all that its tables
 * point to.  An engine that is dropped meanwhile never frees any of this.
 */
#include "chunk.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#define NEWEST 0.125    /* weight of the newest chunk in their mean time */
#define LONGEST 10e-3   /* seconds; a rank that is late makes no chunk slow */
#define SHARE 0.25      /* of a chunk's time that is slept at most */
#define PAUSE 50e-6     /* seconds; Linux makes about 100 us of it */
#define AWAKE 30e-6     /* seconds that a worker looks for tasks before it
                         * sleeps: as long as a task takes, or to wake up */

/* --- workers: threads of the process that do tasks while the thread that has
 *     called an engine exchanges messages.  That one does tasks, too, when no
 *     message has come.  All engines have the same workers, as many as any of
 *     them has wanted, and they sleep where there is nothing to do. -------- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    int count, asleep;
    pid_t owner; /* a fork of this process has no threads */
    Chunk *first, *last; /* tasks, the oldest first */
    atomic_int waiting;  /* how many there are */
} workers = {.lock = PTHREAD_MUTEX_INITIALIZER,
             .more = PTHREAD_COND_INITIALIZER};

/* Denormal numbers are neither read nor written as 0, whatever mode a library
 * has put a thread into: results must not depend on which thread, or which
 * rank, does a task.  Returns the mode before. */
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

static void enqueue(Chunk *chunk)
{
    chunk->next_task = NULL;
    pthread_mutex_lock(&workers.lock);
    if (workers.first)
        workers.last->next_task = chunk;
    else
        workers.first = chunk;
    workers.last = chunk;
    atomic_fetch_add(&workers.waiting, 1);
    if (workers.asleep)
        pthread_cond_signal(&workers.more);
    pthread_mutex_unlock(&workers.lock);
}

/* The oldest task that nobody does yet; NULL: there is none. */
static Chunk *next_task(void)
{
    pthread_mutex_lock(&workers.lock);
    Chunk *chunk = workers.first;
    if (chunk) {
        workers.first = chunk->next_task;
        atomic_fetch_sub(&workers.waiting, 1);
        atomic_fetch_add(&chunk->lane->shared->with_workers, 1);
    }
    pthread_mutex_unlock(&workers.lock);
    return chunk;
}

/* Does a task that no worker has begun; whether there was one. */
static int help(void)
{
    Chunk *chunk = next_task();
    if (chunk == NULL)
        return 0;
    Shared *shared = chunk->lane->shared;
    perform_here(shared, chunk);
    atomic_fetch_sub(&shared->with_workers, 1);
    return 1;
}

/* Waits until there may be a task; at first without sleeping. */
static void wait_for_tasks(void)
{
    for (double end = now() + AWAKE; now() < end; sched_yield())
        if (atomic_load(&workers.waiting))
            return;
    pthread_mutex_lock(&workers.lock);
    ++workers.asleep;
    while (!atomic_load(&workers.waiting))
        pthread_cond_wait(&workers.more, &workers.lock);
    --workers.asleep;
    pthread_mutex_unlock(&workers.lock);
}

static void *work(void *unused)
{
    (void)unused;
    begin_ieee();
    for (;;) {
        wait_for_tasks();
        Chunk *chunk = next_task();
        if (chunk) {
            Shared *shared = chunk->lane->shared;
            perform(chunk);
            atomic_store_explicit(&chunk->working, 0, memory_order_release);
            atomic_fetch_sub(&shared->with_workers, 1);
        }
    }
    return NULL;
}

/* Drops what nobody has begun for an engine, and waits for the rest: its
 * memory and the arrays of its jobs may go. */
static void abandon(Shared *shared)
{
    /* A fork does not know who held the lock. */
    if (!shared->uses_workers || workers.owner != getpid())
        return;
    pthread_mutex_lock(&workers.lock);
    Chunk **place = &workers.first, *last = NULL;
    while (*place)
        if ((*place)->lane->shared == shared) {
            *place = (*place)->next_task;
            atomic_fetch_sub(&workers.waiting, 1);
        }
        else {
            last = *place;
            place = &last->next_task;
        }
    workers.last = last;
    pthread_mutex_unlock(&workers.lock);
    while (atomic_load(&shared->with_workers))
        sched_yield();
}

/* An engine wants `count` workers; where the system has fewer threads to give,
 * these do the work. */
static void use_workers(Shared *shared, int count)
{
    if (count < 1)
        return;
    if (workers.owner != getpid()) {
        memset(&workers, 0, sizeof workers);
        pthread_mutex_init(&workers.lock, NULL);
        pthread_cond_init(&workers.more, NULL);
        workers.owner = getpid();
    }
    shared->uses_workers = 1;
    sigset_t all, before; /* signals are for Python's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t made; workers.count < count
         && pthread_create(&made, NULL, work, NULL) == 0; ++workers.count)
        pthread_detach(made);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* --- jobs: the compiled part of engine.py's Bucket ----------------------- */

static PyTypeObject *job_type;

static void job_dealloc(PyObject *self)
{
    Job *job = (Job *)self;
    PyTypeObject *type = Py_TYPE(self);
    /* Releasing one that was never filled does nothing. */
    PyBuffer_Release(&job->wire_buffer);
    coding_close(&job->coding);
    for (int i = 0; i < job->shares_count; ++i) {
        free(job->shares[i].bounds);
        PyBuffer_Release(&job->shares[i].means_buffer);
        PyBuffer_Release(&job->shares[i].space_buffer);
    }
    free(job->shares);
    free(job->undecoded.items);
    free(job->decoded.items);
    type->tp_free(self);
    Py_DECREF(type);
}

/* taken(): the ranges decoded since the last call, as pairs of 64-bit numbers;
 * not while an engine runs. */
static PyObject *job_taken(PyObject *self, PyObject *unused)
{
    Ranges *ranges = &((Job *)self)->decoded;
    PyObject *pairs = PyBytes_FromStringAndSize(
        (const char *)ranges->items,
        (Py_ssize_t)ranges->count * (Py_ssize_t)sizeof(Range));
    if (pairs != NULL)
        ranges->count = 0;
    return pairs;
}

static PyMethodDef job_methods[] = {
    {"taken", job_taken, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot job_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, job_dealloc},
    {Py_tp_methods, job_methods},
    {0, NULL},
};

static PyType_Spec job_spec = {
    .name = "chainer_fp8pipe.allreduce._engine.Job",
    .basicsize = sizeof(Job),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = job_slots,
};

/* --- the engine ---------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *error; /* makes an exception of an error code and statuses */
    PyObject *allocate; /* makes arrays that neighbours can read */
    PyObject *jobs; /* list: those whose memory is in use */
    Shared shared;
    PyThreadState *python; /* of the thread that is in a call */
    int is_used;
    int neighbours_count, lanes_count;
    Neighbour *neighbours;
    Lane *lanes;
    int finished;   /* some job has been finished */
    double moved;   /* seconds: when anything did */
    atomic_int interrupted;
} Engine;

static int is_busy(const Engine *self)
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
            memmove(first, first + 1,
                    (size_t)--lane->waiting_count * sizeof *first);
        *moved = 1;
        /* It sends before the next one encodes. */
        if (start_chunk(shared, chunk) == FAILED
            || advance_chunk(shared, chunk, moved) == FAILED)
            return FAILED;
    }
    return DONE;
}

static int advance_lane(Engine *self, Lane *lane, int *moved)
{
    if (start_chunks(&self->shared, lane, moved) == FAILED)
        return FAILED;
    for (int64_t number = lane->oldest; number < lane->started; ++number) {
        Chunk *chunk = &lane->seats[number % lane->in_flight];
        if (chunk->active
            && advance_chunk(&self->shared, chunk, moved) == FAILED)
            return FAILED;
        if (!chunk->active && chunk->job) {
            double taken = now() - chunk->since;
            lane->duration += ((taken < LONGEST ? taken : LONGEST)
                               - lane->duration) * NEWEST;
            self->finished |= --chunk->job->unfinished == 0;
            SET(chunk->job, NULL);
        }
    }
    while (lane->oldest < lane->started
           && !lane->seats[lane->oldest % lane->in_flight].active)
        ++lane->oldest;
    return DONE;
}

/* Does what can be done without waiting. */
static int sweep(Engine *self, int *moved)
{
    if (look(&self->shared.messages) < 0)
        return FAILED;
    for (int i = 0; i < self->lanes_count; ++i)
        if (advance_lane(self, &self->lanes[i], moved) == FAILED)
            return FAILED;
    if (!*moved && self->shared.uses_workers)
        *moved = help();
    return DONE;
}

/* Seconds that may be slept without slowing anything down. */
static double patience(const Engine *self)
{
    double least = LONGEST;
    for (int i = 0; i < self->lanes_count; ++i)
        if (self->lanes[i].duration < least)
            least = self->lanes[i].duration;
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

/* --- made and freed ------------------------------------------------------ */

static void engine_dealloc(PyObject *object)
{
    Engine *self = (Engine *)object;
    PyTypeObject *type = Py_TYPE(object);
    int is_under_way = self->shared.messages.count > 0;
    abandon(&self->shared);
    for (int i = 0; i < self->lanes_count; ++i)
        is_under_way |= self->lanes[i].oldest < self->lanes[i].started;
    for (int i = 0; i < self->lanes_count && !is_under_way; ++i) {
        Lane *lane = &self->lanes[i];
        for (int j = 0; lane->seats && j < lane->in_flight; ++j) {
            free(lane->seats[j].receives);
            free(lane->seats[j].progress);
            free(lane->seats[j].places);
        }
        Py_CLEAR(lane->space);
        free(lane->seats);
        free(lane->slots);
        free(lane->steps);
        free(lane->held);
        free(lane->waiting);
    }
    if (!is_under_way) {
        free(self->lanes);
        free(self->neighbours);
        free_messages(&self->shared.messages);
        Py_CLEAR(self->jobs);
    }
    Py_CLEAR(self->allocate);
    Py_CLEAR(self->error);
    type->tp_free(object);
    Py_DECREF(type);
}

/* From (rank, address of its memory, of its Mails for this rank, of this
 * rank's for it). */
static int make_neighbours(Engine *self, PyObject *of)
{
    Py_ssize_t count = PyTuple_GET_SIZE(of);
    self->neighbours = calloc((size_t)count + 1, sizeof(Neighbour));
    if (self->neighbours == NULL)
        return PyErr_NoMemory(), 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        Neighbour *made = &self->neighbours[i];
        unsigned long long memory, in, out;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(of, i), "iKKK", &made->rank,
                              &memory, &in, &out))
            return 0;
        made->memory = (char *)(uintptr_t)memory;
        made->in = (Mail *)(uintptr_t)in;
        made->out = (Mail *)(uintptr_t)out;
        ++self->neighbours_count;
    }
    return 1;
}

/* Fills a lane from (steps, blocks, contributes); steps are (kind, peer,
 * start, stop, summed, fresh, is_last, gathered, mail, stride). */
static int make_lane(Engine *self, Lane *lane, PyObject *of)
{
    PyObject *steps;
    size_t receives = 1, blocks;
    if (!PyArg_ParseTuple(of, "O!ip", &PyTuple_Type, &steps, &lane->blocks,
                          &lane->contributes))
        return 0;
    blocks = (size_t)lane->blocks + 1;
    lane->shared = &self->shared;
    lane->steps_count = (int)PyTuple_GET_SIZE(steps);
    lane->steps = calloc((size_t)lane->steps_count + 1, sizeof(Step));
    lane->held = calloc(blocks, 1);
    lane->seats = calloc((size_t)lane->in_flight, sizeof(Chunk));
    lane->slots = calloc((size_t)lane->in_flight, sizeof(int));
    if (!lane->steps || !lane->held || !lane->seats || !lane->slots)
        return PyErr_NoMemory(), 0;
    for (int i = 0; i < lane->steps_count; ++i) {
        Step *step = &lane->steps[i];
        int mail;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, i), "iiiipppiii",
                              &step->kind, &step->peer, &step->start,
                              &step->stop, &step->summed, &step->fresh,
                              &step->is_last, &step->gathered, &mail,
                              &step->stride))
            return 0;
        for (int j = 0; j < self->neighbours_count; ++j) {
            Neighbour *near = &self->neighbours[j];
            if (step->kind != ENCODE && near->rank == step->peer) {
                step->near = near;
                step->mail = (is_receive(step) ? near->in : near->out) + mail;
            }
        }
        receives += (size_t)is_receive(step);
        if (step->kind == RECEIVE_PARTIAL)
            memset(lane->held + step->start, 1,
                   (size_t)(step->stop - step->start));
    }
    for (int i = 0; i < lane->in_flight; ++i) {
        Chunk *seat = &lane->seats[i];
        seat->lane = lane;
        seat->seat = lane->slots[lane->slots_count++] = i;
        seat->receives = calloc(receives, sizeof(Receive));
        seat->progress = calloc(blocks, 1);
        seat->places = calloc(blocks, sizeof *seat->places);
        if (!seat->receives || !seat->progress || !seat->places)
            return PyErr_NoMemory(), 0;
    }
    return 1;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs)
{
    static char *names[] = {"error", "functions", "sizes", "comm", "byte",
                            "lanes", "in_flight", "neighbours", "memory",
                            "allocate", "threads", NULL};
    unsigned long long send, receive, testsome, comm, byte, memory;
    Py_ssize_t request_size, status_size;
    PyObject *error, *lanes, *neighbours, *allocate;
    int in_flight, threads;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O(KKK)(nn)KKO!iO!KOi", names, &error, &send,
            &receive, &testsome, &request_size, &status_size, &comm, &byte,
            &PyTuple_Type, &lanes, &in_flight, &PyTuple_Type, &neighbours,
            &memory, &allocate, &threads))
        return NULL;
    Engine *self = (Engine *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->error = Py_NewRef(error);
    self->allocate = Py_NewRef(allocate);
    self->shared.memory = (char *)(uintptr_t)memory;
    self->shared.messages = (Messages){
        .send = (Transmit *)(uintptr_t)send,
        .receive = (Transmit *)(uintptr_t)receive,
        .testsome = (Testsome *)(uintptr_t)testsome,
        .request_size = (size_t)request_size,
        .status_size = (size_t)status_size,
        .comm = (intptr_t)comm, .byte = (intptr_t)byte};
    self->moved = now();
    int count = (int)PyTuple_GET_SIZE(lanes);
    self->jobs = PyList_New(0);
    self->lanes = calloc((size_t)count + 1, sizeof *self->lanes);
    if (self->lanes == NULL)
        PyErr_NoMemory();
    int made = self->jobs && self->lanes && make_neighbours(self, neighbours);
    while (made && self->lanes_count < count) {
        Lane *lane = &self->lanes[self->lanes_count];
        lane->number = self->lanes_count++;
        lane->lanes = count;
        lane->in_flight = in_flight;
        made = make_lane(self, lane, PyTuple_GET_ITEM(lanes, lane->number));
    }
    if (!made)
        Py_CLEAR(self);
    else
        use_workers(&self->shared, threads - 1);
    return (PyObject *)self;
}

/* --- calls --------------------------------------------------------------- */

/* Whether this thread may call now.  After an error nothing goes on: what came
 * of half a step would look like a mean. */
static int is_usable(const Engine *self)
{
    if (self->is_used)
        PyErr_SetString(PyExc_RuntimeError,
                        "two threads use this communicator's exchange at the "
                        "same time; call it from one");
    else if (self->shared.broken)
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
    const Messages *messages = &self->shared.messages;
    self->shared.broken = 1;
    abandon(&self->shared);
    if (messages->error == NO_MEMORY)
        return PyErr_NoMemory();
    if (messages->error == OUT_OF_STEP) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a rank of this node exchanges something else");
        return NULL;
    }
    PyObject *value = PyObject_CallFunction(
        self->error, "iy#", messages->error, messages->statuses,
        (Py_ssize_t)((size_t)messages->found * messages->status_size));
    if (value)
        PyErr_SetObject((PyObject *)Py_TYPE(value), value);
    Py_XDECREF(value);
    return NULL;
}

/* Fills a job's part of a lane from (start, stop, frame, chunks, means). */
static int make_share(Engine *self, Lane *lane, Job *job, PyObject *of)
{
    PyObject *means;
    Share *share = &job->shares[job->shares_count++];
    long long start, stop, frame, chunks;
    if (!PyArg_ParseTuple(of, "LLLLO", &start, &stop, &frame, &chunks, &means)
        || PyObject_GetBuffer(means, &share->means_buffer, PyBUF_SIMPLE) < 0)
        return 0;
    size_t room = room_for(job, lane, frame);
    if (lane->space == NULL || lane->room < room) {
        PyObject *space = PyObject_CallFunction(
            self->allocate, "n",
            (Py_ssize_t)(room * (size_t)lane->in_flight));
        if (space == NULL)
            return 0;
        Py_XSETREF(lane->space, space);     /* jobs under way have the old */
        lane->room = room;
    }
    if (PyObject_GetBuffer(lane->space, &share->space_buffer, PyBUF_WRITABLE)
        < 0)
        return 0;
    share->bounds = malloc(((size_t)lane->blocks + 1) * sizeof(int64_t));
    if (share->bounds == NULL)
        return PyErr_NoMemory(), 0;
    for (int64_t i = 0; i <= lane->blocks; ++i) /* as plan.py's `cut` */
        share->bounds[i] = start + (stop - start) * i / lane->blocks;
    share->means = share->means_buffer.buf;
    share->space = share->space_buffer.buf;
    share->room = lane->room;
    share->frame = frame;
    share->chunks = chunks;
    job->unfinished += chunks;
    return 1;
}

/* prepare(job, tables, wire, sum_size, shrink, in_place, uses_wire,
 * shares_wire, encodes, decodes, shares): `tables` are the codec's, `shares`
 * have what goes through each lane. */
static PyObject *prepare(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    PyObject *tables, *wire, *shares;
    Py_ssize_t sum_size;
    Job *job, of = {.wire = NULL};
    if (!PyArg_ParseTuple(args, "O!OOnfpppppO!", job_type, &job, &tables,
                          &wire, &sum_size, &of.shrink, &of.in_place,
                          &of.uses_wire, &of.shares_wire, &of.encodes,
                          &of.decodes, &PyTuple_Type, &shares))
        return NULL;
    if (job->shares || PyTuple_GET_SIZE(shares) != self->lanes_count) {
        PyErr_SetString(PyExc_ValueError, "a job has one share for each lane");
        return NULL;
    }
    if (PyObject_GetBuffer(wire, &job->wire_buffer, PyBUF_WRITABLE) < 0
        || !coding_open(tables, &job->coding))
        return NULL;
    job->shares = calloc((size_t)self->lanes_count + 1, sizeof(Share));
    if (job->shares == NULL)
        return PyErr_NoMemory();
    job->wire = job->wire_buffer.buf;
    job->sum_size = (size_t)sum_size;
    job->shrink = of.shrink;
    job->in_place = of.in_place;
    job->uses_wire = of.uses_wire;
    job->shares_wire = of.shares_wire;
    job->encodes = of.encodes;
    job->decodes = of.decodes;
    for (int i = 0; i < self->lanes_count; ++i)
        if (!make_share(self, &self->lanes[i], job,
                        PyTuple_GET_ITEM(shares, i)))
            return NULL;
    Py_RETURN_NONE;
}

/* let_in(job, until, parts): puts chunks behind the others that wait. */
static PyObject *let_in(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    Job *job;
    int until, parts;
    if (!PyArg_ParseTuple(args, "O!ii", job_type, &job, &until, &parts)
        || !is_usable(self))
        return NULL;
    if (!job->is_held && PyList_Append(self->jobs, (PyObject *)job) < 0)
        return NULL;
    job->is_held = 1;
    for (int i = 0; i < self->lanes_count; ++i) {
        Lane *lane = &self->lanes[i];
        Share *share = &job->shares[i];
        int64_t stop = share->chunks * until / parts;
        if (stop <= share->let_in)
            continue;
        if (lane->waiting_count == lane->waiting_room) {
            int64_t room = lane->waiting_room ? 2 * lane->waiting_room : 16;
            if (!grow(&lane->waiting, (size_t)room * sizeof(Waiting)))
                return PyErr_NoMemory();
            lane->waiting_room = room;
        }
        lane->waiting[lane->waiting_count++] =
            (Waiting){job, share, share->let_in, stop};
        share->let_in = stop;
    }
    Py_RETURN_NONE;
}

/* run(seconds, brief): advances until there is nothing to do any more, some
 * job is finished, the seconds are over, or interrupt() is called; whether
 * anything moved.  With 0 seconds it does not pause. */
static PyObject *run(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    double seconds, brief;
    if (!PyArg_ParseTuple(args, "dd", &seconds, &brief) || !is_usable(self))
        return NULL;
    int result = DONE, ever = 0;
    uint64_t mode = give_up_python(self);
    double end = now() + seconds;
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

/* decode(job): from now on means are decoded as they come, and now those that
 * have come. */
static PyObject *decode_now(PyObject *object, PyObject *argument)
{
    Engine *self = (Engine *)object;
    if (!PyObject_TypeCheck(argument, job_type)) {
        PyErr_SetString(PyExc_TypeError, "this is no Job");
        return NULL;
    }
    if (!is_usable(self))
        return NULL;
    Job *job = (Job *)argument;
    int result = DONE;
    uint64_t mode = give_up_python(self);
    job->decodes = 1;
    while (job->undecoded.count && result == DONE) {
        Range range = job->undecoded.items[--job->undecoded.count];
        result = arrive(&self->shared, job, range, 0, job->wire
                        + (size_t)range.start * job->coding.itemsize);
    }
    take_python(self, mode);
    if (result == FAILED)
        return raised(self);
    Py_RETURN_NONE;
}

/* taken(): (bytes sent, seconds of encoding, of decoding, finished jobs)
 * since the last call; lets go of these jobs. */
static PyObject *taken(PyObject *object, PyObject *unused)
{
    Engine *self = (Engine *)object;
    Shared *shared = &self->shared;
    if (self->is_used && !is_usable(self))
        return NULL;
    PyObject *finished = PyList_New(0);
    for (Py_ssize_t i = 0; finished && i < PyList_GET_SIZE(self->jobs);) {
        PyObject *job = PyList_GET_ITEM(self->jobs, i);
        if (((Job *)job)->unfinished)
            ++i;
        else if (PyList_Append(finished, job) < 0
                 || PyList_SetSlice(self->jobs, i, i + 1, NULL) < 0)
            Py_CLEAR(finished);
    }
    PyObject *result = finished ? Py_BuildValue(
        "LddN", (long long)shared->bytes_sent, shared->encoding,
        shared->decoding, finished) : NULL;
    shared->bytes_sent = 0;
    shared->encoding = shared->decoding = 0;
    return result;
}

/* What a chunk waits for: (its job, lane, frame, step, kind, peer); NULL
 * without an exception: it is not under way.  Any thread may ask.  A job that
 * is seen here is held: only taken(), by a thread that has the interpreter,
 * lets go of one. */
static PyObject *wait_of(const Lane *lane, const Chunk *chunk)
{
    Job *job = SEEN(chunk->job);
    int position = SEEN(chunk->position);
    if (!job || !SEEN(chunk->active))
        return NULL;
    int kind = -1, peer = -1; /* for what it has sent to leave */
    if (position >= 0 && position < lane->steps_count) {
        kind = lane->steps[position].kind;
        peer = lane->steps[position].peer;
    }
    return Py_BuildValue("OiLiii", (PyObject *)job, lane->number,
                         (long long)SEEN(chunk->frame), position, kind, peer);
}

/* waits(): of all chunks under way, what they wait for. */
static PyObject *waits(PyObject *object, PyObject *unused)
{
    Engine *self = (Engine *)object;
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < self->lanes_count; ++i)
        for (int j = 0; found && j < self->lanes[i].in_flight; ++j) {
            PyObject *wait = wait_of(&self->lanes[i],
                                     &self->lanes[i].seats[j]);
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
    {"let_in", let_in, METH_VARARGS, NULL},
    {"run", run, METH_VARARGS, NULL},
    {"interrupt", interrupt, METH_NOARGS, NULL},
    {"decode", decode_now, METH_O, NULL},
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
    job_type = (PyTypeObject *)PyType_FromSpec(&job_spec);
    PyObject *engine_type = PyType_FromSpec(&engine_spec);
    if (!job_type || !engine_type
        || PyModule_AddObjectRef(module, "Job", (PyObject *)job_type) < 0
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
