/* Runs plans over MPI, without the interpreter; see executor.py.
 *
 * What is under way belongs to MPI, and to the neighbours that read it.  An
 * executor holds the jobs that are not finished, and a job all that its tables
 * point to.  An executor that is dropped meanwhile never frees any of this.
 */
#include "job_type.h"
#include "running.h"

static void free_lane(Lane *lane)
{
    for (int i = 0; lane->seats && i < lane->in_flight; ++i) {
        free(lane->seats[i].receives);
        free(lane->seats[i].progress);
        free(lane->seats[i].places);
        PyBuffer_Release(&lane->seats[i].space.memory);
    }
    for (int i = 0; i < lane->spare_count; ++i)
        PyBuffer_Release(&lane->spare[i].memory);
    free(lane->spare);
    free(lane->seats);
    free(lane->steps);
    free(lane->held);
    free(lane->waiting);
}

static void executor_dealloc(PyObject *object)
{
    Executor *self = (Executor *)object;
    PyTypeObject *type = Py_TYPE(object);
    abandon(self->shared.workers, &self->shared);
    leave_workers(self->shared.workers);
    if (!is_under_way(self)) {
        for (int i = 0; i < self->lanes_count; ++i)
            free_lane(&self->lanes[i]);
        free(self->lanes);
        free_messages(&self->shared.messages);
        free(self->shared.neighbours);
        Py_CLEAR(self->shared.allocate);
        Py_CLEAR(self->jobs);
    }
    Py_CLEAR(self->error);
    type->tp_free(object);
    Py_DECREF(type);
}

static Neighbour *neighbour_of(const Shared *shared, int rank)
{
    for (int i = 0; i < shared->neighbours_count; ++i)
        if (shared->neighbours[i].rank == rank)
            return &shared->neighbours[i];
    return NULL;
}

/* From (rank, address of its memory, of its mailbox for this rank, of this
 * rank's for it, slots). */
static int make_neighbours(Shared *shared, PyObject *of)
{
    int count = (int)PyTuple_GET_SIZE(of);
    shared->neighbours = calloc((size_t)count + 1, sizeof(Neighbour));
    if (shared->neighbours == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < count; ++i) {
        Neighbour *made = &shared->neighbours[i];
        unsigned long long memory, in, out;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(of, i), "iKKKI", &made->rank,
                              &memory, &in, &out, &made->slots))
            return -1;
        made->memory = (char *)(uintptr_t)memory;
        made->in = (Mail *)(uintptr_t)in;
        made->out = (Mail *)(uintptr_t)out;
        ++shared->neighbours_count;
    }
    return 0;
}

static int is_send(const Step *step)
{
    return step->kind == SEND_PARTIAL || step->kind == SEND_RESULT;
}

/* Gives each message between this rank and a neighbour, for each seat, a slot
 * of its own; -1: there are too few.  What one rank sends the other receives in
 * the same order, so both find the same slots. */
static int place_mails(Lane *lane, Neighbour *near)
{
    int counts[2] = {0, 0}; /* of receives, of sends */
    for (int i = 0; i < lane->steps_count; ++i) {
        Step *step = &lane->steps[i];
        if (step->near == near)
            step->mail = (is_send(step) ? near->out + near->sends
                                        : near->in + near->receives)
                         + counts[is_send(step)]++;
    }
    for (int i = 0; i < lane->steps_count; ++i)
        if (lane->steps[i].near == near)
            lane->steps[i].stride = counts[is_send(&lane->steps[i])];
    near->receives += (unsigned int)(counts[0] * lane->in_flight);
    near->sends += (unsigned int)(counts[1] * lane->in_flight);
    if (near->receives <= near->slots && near->sends <= near->slots)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a mailbox has too few slots");
    return -1;
}

static void mark_last(Lane *lane)
{
    for (int i = 0; i < lane->steps_count; ++i) {
        Step *step = &lane->steps[i];
        step->is_last = step->kind == RECEIVE_RESULT;
        for (int j = i + 1; j < lane->steps_count; ++j)
            if (lane->steps[j].kind == SEND_RESULT
                && lane->steps[j].start < step->stop
                && step->start < lane->steps[j].stop)
                step->is_last = 0;
    }
}

/* Fills a lane from (steps, blocks, held, contributes); steps are 6 ints
 * each. */
static int make_lane(Shared *shared, Lane *lane, PyObject *of)
{
    PyObject *steps, *held;
    lane->shared = shared;
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
        if (step->kind != ENCODE)
            step->near = neighbour_of(shared, step->peer);
        receives += step->kind == RECEIVE_PARTIAL
                    || step->kind == RECEIVE_RESULT;
    }
    mark_last(lane);
    for (int i = 0; i < shared->neighbours_count; ++i)
        if (place_mails(lane, &shared->neighbours[i]) < 0)
            return -1;
    for (int i = 0; i < lane->held_count; ++i)
        lane->held[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(held, i));
    for (int i = 0; i < lane->in_flight; ++i) {
        Chunk *seat = &lane->seats[i];
        size_t blocks = (size_t)lane->blocks;
        seat->lane = lane;
        seat->seat = i;
        seat->receives = calloc((size_t)receives + 1, sizeof(Receive));
        seat->progress = calloc(blocks + 1, 1);
        seat->places = calloc(blocks + 1, sizeof *seat->places);
        if (!seat->receives || !seat->progress || !seat->places) {
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
                            "lanes", "in_flight", "neighbours", "memory",
                            "allocate", "threads", "beside", NULL};
    unsigned long long send, receive, testsome, comm, byte, memory;
    Py_ssize_t request_size, status_size;
    PyObject *error, *lanes, *neighbours, *allocate, *beside;
    int in_flight, threads;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O(KKK)(nn)KKO!iO!KOiO", names, &error, &send,
            &receive, &testsome, &request_size, &status_size, &comm, &byte,
            &PyTuple_Type, &lanes, &in_flight, &PyTuple_Type, &neighbours,
            &memory, &allocate, &threads, &beside))
        return NULL;
    if (beside != Py_None && !PyObject_TypeCheck(beside, type)) {
        PyErr_SetString(PyExc_TypeError, "beside must be an Executor");
        return NULL;
    }
    Executor *self = (Executor *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->error = Py_NewRef(error);
    self->shared.allocate = Py_NewRef(allocate);
    self->shared.memory = (char *)(uintptr_t)memory;
    self->jobs = PyList_New(0);
    if (self->jobs == NULL
        || make_neighbours(&self->shared, neighbours) < 0) {
        Py_DECREF(self);
        return NULL;
    }
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
        if (make_lane(&self->shared, lane, PyTuple_GET_ITEM(lanes, i)) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    if (beside != Py_None) {
        self->shared.workers = ((Executor *)beside)->shared.workers;
        if (self->shared.workers)
            ++self->shared.workers->executors;
    }
    else if (threads > 1) {
        self->shared.workers = make_workers(threads - 1);
        if (self->shared.workers == NULL) {
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
    }
    self->moved = now();
    return (PyObject *)self;
}

/* Whether this thread may call now.  After an error nothing goes on: what came
 * of half a step would look like a mean. */
static int is_usable(const Executor *self)
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

static uint64_t give_up_python(Executor *self)
{
    self->is_used = 1;
    self->shared.python = PyEval_SaveThread();
    return begin_ieee();
}

static void take_python(Executor *self, uint64_t mode)
{
    end_ieee(mode);
    PyEval_RestoreThread(self->shared.python);
    self->is_used = 0;
}

/* share(job, lane, bounds, frame, chunks, means): what of a job goes
 * through a lane. */
static PyObject *share(PyObject *object, PyObject *args)
{
    Executor *self = (Executor *)object;
    PyObject *bounds, *means;
    Job *job;
    int lane;
    long long frame, chunks;
    if (!PyArg_ParseTuple(args, "O!iOLLO", job_type, &job, &lane, &bounds,
                          &frame, &chunks, &means))
        return NULL;
    if (lane < 0 || lane >= self->lanes_count || lane >= job->shares_count) {
        PyErr_SetString(PyExc_IndexError, "there is no such lane");
        return NULL;
    }
    Share *of = &job->shares[lane];
    if (table(bounds, &of->bounds_buffer, PyBUF_SIMPLE,
              (self->lanes[lane].blocks + 1)
                  * (Py_ssize_t)sizeof(int64_t)) < 0
        || table(means, &of->means_buffer, PyBUF_SIMPLE, -1) < 0)
        return NULL;
    of->bounds = of->bounds_buffer.buf;
    of->means = of->means_buffer.buf;
    of->longest = 0;
    for (int i = 0; i < self->lanes[lane].blocks; ++i)
        if (of->bounds[i + 1] - of->bounds[i] > of->longest)
            of->longest = of->bounds[i + 1] - of->bounds[i];
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
    if (!PyArg_ParseTuple(args, "O!ii", job_type, &job, &until, &parts)
        || !is_usable(self))
        return NULL;
    if (!job->is_held && PyList_Append(self->jobs, (PyObject *)job) < 0)
        return NULL;
    job->is_held = 1;
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

static PyObject *raised(Executor *self)
{
    const Messages *messages = &self->shared.messages;
    self->shared.broken = 1;
    abandon(self->shared.workers, &self->shared);
    if (self->shared.failed) {
        self->shared.failed = 0;
        return NULL;
    }
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

static PyObject *advance(PyObject *object, PyObject *unused)
{
    Executor *self = (Executor *)object;
    int moved = 0;
    if (!is_usable(self))
        return NULL;
    uint64_t mode = give_up_python(self);
    int result = sweep(self, &moved);
    take_python(self, mode);
    return result == FAILED ? raised(self) : PyBool_FromLong(moved);
}

/* run(seconds, brief): advances until there is nothing to do any more, some
 * job is finished, the seconds are over, or interrupt() is called; whether
 * anything moved.  With 0 seconds it does not pause. */
static PyObject *run(PyObject *object, PyObject *args)
{
    Executor *self = (Executor *)object;
    double seconds, brief;
    if (!PyArg_ParseTuple(args, "dd", &seconds, &brief) || !is_usable(self))
        return NULL;
    int result = DONE, ever = 0;
    uint64_t mode = give_up_python(self);
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
        else if (seconds > 0)
            pause_a_little(self, brief);
        if (now() > end)
            break;
    }
    take_python(self, mode);
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
    if (!is_usable(self))
        return NULL;
    Job *job = (Job *)argument;
    int result = DONE;
    uint64_t mode = give_up_python(self);
    job->decodes = 1;
    while (job->undecoded.count && result == DONE) {
        Range range = job->undecoded.items[--job->undecoded.count];
        result = arrive(&self->shared, job, range, 0, kept_wire(job, range));
    }
    take_python(self, mode);
    if (result == FAILED)
        return raised(self);
    Py_RETURN_NONE;
}

/* (bytes sent, seconds of encoding, seconds of decoding) since the last
 * call; lets go of jobs that are finished. */
static PyObject *taken(PyObject *object, PyObject *unused)
{
    Executor *self = (Executor *)object;
    Shared *shared = &self->shared;
    if (self->is_used && !is_usable(self))
        return NULL;
    for (Py_ssize_t i = PyList_GET_SIZE(self->jobs); i-- > 0;)
        if (((Job *)PyList_GET_ITEM(self->jobs, i))->unfinished == 0
            && PyList_SetSlice(self->jobs, i, i + 1, NULL) < 0)
            return NULL;
    PyObject *result = Py_BuildValue(
        "Ldd", (long long)shared->bytes_sent, shared->encoding,
        shared->decoding);
    shared->bytes_sent = 0;
    shared->encoding = shared->decoding = 0;
    return result;
}

/* What a chunk waits for: (address of its job, lane, frame, step, kind, peer);
 * NULL without an exception: it is not under way.  Any thread may ask, so
 * nothing is read here that is ever freed while the executor lives. */
static PyObject *wait_of(const Lane *lane, const Chunk *chunk)
{
    uintptr_t job = (uintptr_t)SEEN(chunk->job);
    int position = SEEN(chunk->position);
    if (!job || !SEEN(chunk->active))
        return NULL;
    int kind = -1, peer = -1; /* for what it has sent to leave */
    if (position >= 0 && position < lane->steps_count) {
        kind = lane->steps[position].kind;
        peer = lane->steps[position].peer;
    }
    return Py_BuildValue("KiLiii", (unsigned long long)job, lane->number,
                         (long long)SEEN(chunk->frame), position, kind, peer);
}

/* waits(): of all chunks under way, what they wait for. */
static PyObject *waits(PyObject *object, PyObject *unused)
{
    Executor *self = (Executor *)object;
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
    {"waits", waits, METH_NOARGS, NULL},
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
