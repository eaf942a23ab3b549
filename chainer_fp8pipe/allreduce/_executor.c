/* Runs plans over MPI, without the interpreter; see executor.py.
 *
 * While something is under way it belongs to MPI: who drops an Executor or a
 * Job then must keep it for ever.
 */
#include "chunk.h"

#include <sched.h>
#include <stdatomic.h>

#define NEWEST 0.125    /* weight of the newest chunk in their mean time */
#define LONGEST 10e-3   /* seconds; a rank that is late makes no chunk slow */
#define SHARE 0.25      /* of a chunk's time that is slept at most */
#define PAUSE 50e-6     /* seconds; Linux makes about 100 us of it */

/* --- a job --------------------------------------------------------------- */

static PyTypeObject *job_type;

static int table(PyObject *object, Py_buffer *buffer, int flags,
                 Py_ssize_t size)
{
    if (PyObject_GetBuffer(object, buffer, flags) < 0)
        return -1;
    if (size >= 0 && buffer->len != size) {
        PyErr_SetString(PyExc_ValueError, "tables differ in length");
        return -1;
    }
    return 0;
}

static PyObject *job_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "python", "wire", "itemsize", "sum_size", "codec", "rounding",
        "in_place", "encodes", "decodes", "prescale", "epsilon", "shrink",
        "tensors",
        "scales", "findings", "shares", NULL};
    PyObject *python, *wire, *tensors, *scales, *findings;
    Py_ssize_t itemsize, sum_size;
    int shares;
    Job *job = (Job *)type->tp_alloc(type, 0);
    if (job == NULL || !PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOnniipppfffOOOi", names, &python, &wire,
            &itemsize, &sum_size, &job->codec, &job->rounding,
            &job->in_place, &job->encodes, &job->decodes, &job->prescale,
            &job->epsilon, &job->shrink, &tensors, &scales, &findings, &shares)
        || table(wire, &job->wire_buffer, PyBUF_WRITABLE, -1) < 0
        || table(tensors, &job->tensors_buffer, PyBUF_SIMPLE, -1) < 0) {
        Py_XDECREF(job);
        return NULL;
    }
    job->tensors_count =
        job->tensors_buffer.len / (Py_ssize_t)sizeof(Tensor);
    job->shares = calloc((size_t)shares, sizeof *job->shares);
    job->shares_count = job->shares ? shares : 0;
    if (job->shares == NULL)
        PyErr_NoMemory();
    if (job->shares == NULL
        || table(scales, &job->scales_buffer, PyBUF_SIMPLE,
                 job->tensors_count * (Py_ssize_t)sizeof(Scales)) < 0
        || table(findings, &job->findings_buffer, PyBUF_WRITABLE,
                 job->tensors_count * (Py_ssize_t)sizeof(Findings)) < 0) {
        Py_DECREF(job);
        return NULL;
    }
    job->itemsize = (size_t)itemsize;
    job->sum_size = (size_t)sum_size;
    job->wire = job->wire_buffer.buf;
    job->tensors = job->tensors_buffer.buf;
    job->scales = job->scales_buffer.buf;
    job->findings = job->findings_buffer.buf;
    job->python = Py_NewRef(python);
    return (PyObject *)job;
}

static int job_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Job *)self)->python);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int job_clear(PyObject *self)
{
    Py_CLEAR(((Job *)self)->python);
    return 0;
}

static void job_dealloc(PyObject *self)
{
    Job *job = (Job *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    job_clear(self);
    /* Releasing one that was never filled does nothing. */
    PyBuffer_Release(&job->wire_buffer);
    PyBuffer_Release(&job->tensors_buffer);
    PyBuffer_Release(&job->scales_buffer);
    PyBuffer_Release(&job->findings_buffer);
    for (int i = 0; i < job->shares_count; ++i) {
        PyBuffer_Release(&job->shares[i].bounds_buffer);
        PyBuffer_Release(&job->shares[i].residuals_buffer);
    }
    free(job->shares);
    free(job->undecoded);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *job_unfinished(PyObject *self, void *unused)
{
    return PyLong_FromLongLong(((Job *)self)->unfinished);
}

static PyGetSetDef job_properties[] = {
    {"unfinished", job_unfinished, NULL, "Chunks that are not through.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot job_slots[] = {
    {Py_tp_new, job_new},
    {Py_tp_dealloc, job_dealloc},
    {Py_tp_traverse, job_traverse},
    {Py_tp_clear, job_clear},
    {Py_tp_getset, job_properties},
    {0, NULL},
};

static PyType_Spec job_spec = {
    .name = "chainer_fp8pipe.allreduce._executor.Job",
    .basicsize = sizeof(Job),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = job_slots,
};

/* --- an executor --------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *error; /* makes an exception of an error code and statuses */
    Shared shared;
    int lanes_count;
    Lane *lanes;
    double moved; /* seconds: when anything did */
    atomic_int interrupted;
} Executor;

static void free_lane(Lane *lane)
{
    for (int i = 0; lane->seats && i < lane->in_flight; ++i) {
        free(lane->seats[i].receives);
        free(lane->seats[i].encoded);
        free(lane->seats[i].places);
        free(lane->seats[i].space.data);
    }
    for (int i = 0; i < lane->spare_count; ++i)
        free(lane->spare[i].data);
    free(lane->spare);
    free(lane->seats);
    free(lane->steps);
    free(lane->held);
    free(lane->waiting);
}

static int is_busy(const Executor *self)
{
    for (int i = 0; i < self->lanes_count; ++i)
        if (self->lanes[i].waiting_count
            || self->lanes[i].oldest < self->lanes[i].started)
            return 1;
    return 0;
}

static void executor_dealloc(PyObject *object)
{
    Executor *self = (Executor *)object;
    PyTypeObject *type = Py_TYPE(object);
    /* What is under way is written to still. */
    if (self->shared.messages.count == 0) {
        for (int i = 0; i < self->lanes_count; ++i)
            free_lane(&self->lanes[i]);
        free(self->lanes);
        free_messages(&self->shared.messages);
    }
    Py_CLEAR(self->error);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Fills a lane from (steps, blocks, held, contributes); steps are 6 ints
 * each. */
static int make_lane(Lane *lane, PyObject *of)
{
    PyObject *steps, *held;
    if (!PyArg_ParseTuple(of, "O!iO!p", &PyTuple_Type, &steps, &lane->blocks,
                          &PyTuple_Type, &held, &lane->contributes))
        return -1;
    lane->steps_count = (int)PyTuple_GET_SIZE(steps);
    lane->held_count = (int)PyTuple_GET_SIZE(held);
    lane->steps = calloc((size_t)lane->steps_count + 1, sizeof(Step));
    lane->held = calloc((size_t)lane->held_count + 1, sizeof(int));
    lane->seats = calloc((size_t)lane->in_flight, sizeof(Chunk));
    lane->spare = calloc((size_t)lane->in_flight, sizeof(Space));
    if (!lane->steps || !lane->held || !lane->seats || !lane->spare) {
        PyErr_NoMemory();
        return -1;
    }
    int receives = 0;
    for (int i = 0; i < lane->steps_count; ++i) {
        Step *step = &lane->steps[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, i), "iiiipp",
                              &step->kind, &step->peer, &step->start,
                              &step->stop, &step->summed, &step->fresh))
            return -1;
        receives += step->kind == RECEIVE_PARTIAL
                    || step->kind == RECEIVE_RESULT;
    }
    for (int i = 0; i < lane->held_count; ++i)
        lane->held[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(held, i));
    for (int i = 0; i < lane->in_flight; ++i) {
        Chunk *seat = &lane->seats[i];
        size_t blocks = (size_t)lane->blocks;
        seat->lane = lane;
        seat->receives = calloc((size_t)receives + 1, sizeof(Receive));
        seat->encoded = calloc(blocks + 1, 1);
        seat->places = calloc(blocks + 1, sizeof *seat->places);
        if (!seat->receives || !seat->encoded || !seat->places) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *executor_new(PyTypeObject *type, PyObject *args,
                              PyObject *kwargs)
{
    static char *names[] = {"error", "functions", "sizes", "comm", "byte",
                            "lanes", "in_flight", NULL};
    unsigned long long send, receive, testsome, comm, byte;
    Py_ssize_t request_size, status_size;
    PyObject *error, *lanes;
    int in_flight;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O(KKK)(nn)KKO!i", names, &error, &send, &receive,
            &testsome, &request_size, &status_size, &comm, &byte,
            &PyTuple_Type, &lanes, &in_flight))
        return NULL;
    Executor *self = (Executor *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->error = Py_NewRef(error);
    Messages *messages = &self->shared.messages;
    messages->send = (Transmit *)(uintptr_t)send;
    messages->receive = (Transmit *)(uintptr_t)receive;
    messages->testsome = (Testsome *)(uintptr_t)testsome;
    messages->request_size = (size_t)request_size;
    messages->status_size = (size_t)status_size;
    messages->comm = (intptr_t)comm;
    messages->byte = (intptr_t)byte;
    int count = (int)PyTuple_GET_SIZE(lanes);
    self->lanes = calloc((size_t)count, sizeof *self->lanes);
    if (self->lanes == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (int i = 0; i < count; ++i) {
        Lane *lane = &self->lanes[self->lanes_count++];
        lane->number = i;
        lane->lanes = count;
        lane->in_flight = in_flight;
        if (make_lane(lane, PyTuple_GET_ITEM(lanes, i)) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    self->moved = now();
    return (PyObject *)self;
}

/* share(job, lane, bounds, frame, chunks, residuals): what of a job goes
 * through a lane. */
static PyObject *share(PyObject *object, PyObject *args)
{
    Executor *self = (Executor *)object;
    PyObject *bounds, *residuals;
    Job *job;
    int lane;
    long long frame, chunks;
    if (!PyArg_ParseTuple(args, "O!iOLLO", job_type, &job, &lane, &bounds,
                          &frame, &chunks, &residuals))
        return NULL;
    if (lane < 0 || lane >= self->lanes_count || lane >= job->shares_count) {
        PyErr_SetString(PyExc_IndexError, "there is no such lane");
        return NULL;
    }
    Share *of = &job->shares[lane];
    if (table(bounds, &of->bounds_buffer, PyBUF_SIMPLE,
              (self->lanes[lane].blocks + 1)
                  * (Py_ssize_t)sizeof(int64_t)) < 0
        || table(residuals, &of->residuals_buffer, PyBUF_SIMPLE, -1) < 0)
        return NULL;
    of->bounds = of->bounds_buffer.buf;
    of->residuals = of->residuals_buffer.buf;
    of->frame = frame;
    of->chunks = chunks;
    job->unfinished += chunks;
    Py_RETURN_NONE;
}

/* let_in(job, until, parts): puts chunks behind the others that wait. */
static PyObject *let_in(PyObject *object, PyObject *args)
{
    Executor *self = (Executor *)object;
    Job *job;
    int until, parts;
    if (!PyArg_ParseTuple(args, "O!ii", job_type, &job, &until, &parts))
        return NULL;
    for (int i = 0; i < self->lanes_count; ++i) {
        Lane *lane = &self->lanes[i];
        Share *of = &job->shares[i];
        int64_t stop = of->chunks * until / parts;
        if (stop <= of->let_in)
            continue;
        if (lane->waiting_count == lane->waiting_room) {
            int64_t room = lane->waiting_room ? 2 * lane->waiting_room : 16;
            Waiting *waiting = realloc(lane->waiting,
                                       (size_t)room * sizeof *waiting);
            if (waiting == NULL)
                return PyErr_NoMemory();
            lane->waiting = waiting;
            lane->waiting_room = room;
        }
        lane->waiting[lane->waiting_count++] =
            (Waiting){job, of, of->let_in, stop};
        of->let_in = stop;
    }
    Py_RETURN_NONE;
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
        chunk->job = first->job;
        chunk->share = first->share;
        chunk->frame = first->next;
        chunk->number = number;
        chunk->tag = (int)(number % (4 * lane->in_flight)) * lane->lanes
                     + lane->number;
        if (++first->next == first->stop)
            memmove(first, first + 1, (size_t)--lane->waiting_count
                                          * sizeof *first);
        *moved = 1;
        /* It sends before the next one encodes. */
        if (start_chunk(shared, chunk) == FAILED
            || advance_chunk(shared, chunk, moved) == FAILED)
            return FAILED;
    }
    return DONE;
}

static void finish_chunk(Shared *shared, Lane *lane, Chunk *chunk)
{
    double taken = now() - chunk->since;
    if (taken > LONGEST)
        taken = LONGEST;
    lane->duration += (taken - lane->duration) * NEWEST;
    shared->finished |= --chunk->job->unfinished == 0;
    chunk->job = NULL;
}

static int advance_lane(Shared *shared, Lane *lane, int *moved)
{
    if (start_chunks(shared, lane, moved) == FAILED)
        return FAILED;
    for (int64_t number = lane->oldest; number < lane->started; ++number) {
        Chunk *chunk = &lane->seats[number % lane->in_flight];
        if (chunk->active
            && advance_chunk(shared, chunk, moved) == FAILED)
            return FAILED;
        if (!chunk->active && chunk->job)
            finish_chunk(shared, lane, chunk);
    }
    while (lane->oldest < lane->started
           && !lane->seats[lane->oldest % lane->in_flight].active)
        ++lane->oldest;
    return DONE;
}

/* Does what can be done without waiting. */
static int sweep(Executor *self, int *moved)
{
    Shared *shared = &self->shared;
    if (look(&shared->messages) < 0)
        return FAILED;
    for (int i = 0; i < self->lanes_count; ++i)
        if (advance_lane(shared, &self->lanes[i], moved) == FAILED)
            return FAILED;
    return DONE;
}

static double patience(const Executor *self)
{
    double least = LONGEST;
    for (int i = 0; i < self->lanes_count; ++i)
        if (self->lanes[i].duration < least)
            least = self->lanes[i].duration;
    return least * SHARE;
}

/* A look takes a few microseconds, so one each 100 leaves the processor to
 * others; ranks of one node are through before the first sleep. */
static void pause_a_little(Executor *self, double brief)
{
    if (now() - self->moved < brief || (brief > 0 && patience(self) < PAUSE))
        sched_yield();
    else
        nanosleep(&(struct timespec){0, (long)(PAUSE * 1e9)}, NULL);
}

static PyObject *raised(Executor *self)
{
    const Messages *messages = &self->shared.messages;
    self->shared.broken = 1;
    if (self->shared.failed) {
        self->shared.failed = 0;
        return NULL;
    }
    if (messages->error == -1)
        return PyErr_NoMemory();
    PyObject *value = PyObject_CallFunction(
        self->error, "iy#", messages->error, messages->statuses,
        (Py_ssize_t)((size_t)messages->found * messages->status_size));
    if (value)
        PyErr_SetObject((PyObject *)Py_TYPE(value), value);
    Py_XDECREF(value);
    return NULL;
}

/* After an error nothing goes on: what came of half a step would look like a
 * mean. */
static int is_broken(const Executor *self)
{
    if (self->shared.broken)
        PyErr_SetString(PyExc_RuntimeError,
                        "an earlier error has left an all-reduce half done");
    return self->shared.broken;
}

static PyObject *advance(PyObject *object, PyObject *unused)
{
    Executor *self = (Executor *)object;
    int moved = 0;
    if (is_broken(self))
        return NULL;
    self->shared.python = PyEval_SaveThread();
    int result = sweep(self, &moved);
    PyEval_RestoreThread(self->shared.python);
    return result == FAILED ? raised(self) : PyBool_FromLong(moved);
}

/* run(seconds, brief): advances until there is nothing to do any more, some
 * job is finished, the seconds are over, or interrupt() is called; whether
 * anything moved. */
static PyObject *run(PyObject *object, PyObject *args)
{
    Executor *self = (Executor *)object;
    double seconds, brief;
    if (!PyArg_ParseTuple(args, "dd", &seconds, &brief) || is_broken(self))
        return NULL;
    int result = DONE, ever = 0;
    self->shared.python = PyEval_SaveThread();
    double end = now() + seconds;
    self->shared.finished = 0;
    while (is_busy(self) && !self->shared.finished
           && !atomic_exchange(&self->interrupted, 0)) {
        int moved = 0;
        result = sweep(self, &moved);
        if (result == FAILED)
            break;
        if (moved) {
            ever = 1;
            self->moved = now();
        }
        else
            pause_a_little(self, brief);
        if (now() > end)
            break;
    }
    PyEval_RestoreThread(self->shared.python);
    return result == FAILED ? raised(self) : PyBool_FromLong(ever);
}

/* Has run() return; may be called from any thread. */
static PyObject *interrupt(PyObject *object, PyObject *unused)
{
    atomic_store(&((Executor *)object)->interrupted, 1);
    Py_RETURN_NONE;
}

/* decode(job): from now on means are decoded as they come, and now those
 * that have come. */
static PyObject *decode_now(PyObject *object, PyObject *argument)
{
    Executor *self = (Executor *)object;
    if (!PyObject_TypeCheck(argument, job_type)) {
        PyErr_SetString(PyExc_TypeError, "this is no Job");
        return NULL;
    }
    if (is_broken(self))
        return NULL;
    Job *job = (Job *)argument;
    int result = 0;
    self->shared.python = PyEval_SaveThread();
    job->decodes = 1;
    while (job->undecoded_count && result == 0)
        result = decode_part(&self->shared, job,
                             job->undecoded[--job->undecoded_count]);
    PyEval_RestoreThread(self->shared.python);
    if (result < 0)
        return raised(self);
    Py_RETURN_NONE;
}

/* (bytes sent, seconds of encoding, seconds of decoding) since the last
 * call. */
static PyObject *taken(PyObject *object, PyObject *unused)
{
    Shared *shared = &((Executor *)object)->shared;
    PyObject *result = Py_BuildValue(
        "Ldd", (long long)shared->bytes_sent, shared->encoding,
        shared->decoding);
    shared->bytes_sent = 0;
    shared->encoding = shared->decoding = 0;
    return result;
}

static PyObject *get_busy(PyObject *self, void *unused)
{
    return PyBool_FromLong(is_busy((Executor *)self));
}

static PyObject *get_patience(PyObject *self, void *unused)
{
    return PyFloat_FromDouble(patience((Executor *)self));
}

static PyMethodDef executor_methods[] = {
    {"share", share, METH_VARARGS, NULL},
    {"let_in", let_in, METH_VARARGS, NULL},
    {"advance", advance, METH_NOARGS, NULL},
    {"run", run, METH_VARARGS, NULL},
    {"interrupt", interrupt, METH_NOARGS, NULL},
    {"decode", decode_now, METH_O, NULL},
    {"taken", taken, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef executor_properties[] = {
    {"busy", get_busy, NULL, NULL, NULL},
    {"patience", get_patience, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot executor_slots[] = {
    {Py_tp_new, executor_new},
    {Py_tp_dealloc, executor_dealloc},
    {Py_tp_methods, executor_methods},
    {Py_tp_getset, executor_properties},
    {0, NULL},
};

static PyType_Spec executor_spec = {
    .name = "chainer_fp8pipe.allreduce._executor.Executor",
    .basicsize = sizeof(Executor),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = executor_slots,
};

/* --- the module ---------------------------------------------------------- */

static int add_types(PyObject *module)
{
    job_type = (PyTypeObject *)PyType_FromSpec(&job_spec);
    PyObject *executor_type = PyType_FromSpec(&executor_spec);
    if (!job_type || !executor_type
        || PyModule_AddObjectRef(module, "Job", (PyObject *)job_type) < 0
        || PyModule_AddObjectRef(module, "Executor", executor_type) < 0)
        return -1;
    Py_DECREF(executor_type);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_executor",
    .m_doc = "Compiled; see chainer_fp8pipe.allreduce.executor.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__executor(void)
{
    return PyModuleDef_Init(&definition);
}
