/* A job as Python sees it. */
#ifndef CHAINER_FP8PIPE_JOB_TYPE_H
#define CHAINER_FP8PIPE_JOB_TYPE_H
#include "job.h"

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
        "tables", "kept", "wire", "sum_size", "in_place", "keeps_wire",
        "shares_wire", "encodes", "decodes", "shrink", "shares", NULL};
    PyObject *tables, *kept, *wire;
    Py_ssize_t sum_size;
    int shares;
    Job *job = (Job *)type->tp_alloc(type, 0);
    if (job == NULL || !PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOnpppppfi", names, &tables, &kept, &wire,
            &sum_size, &job->in_place, &job->keeps_wire, &job->shares_wire,
            &job->encodes, &job->decodes, &job->shrink, &shares)
        || table(wire, &job->wire_buffer, PyBUF_WRITABLE, -1) < 0
        || !coding_open(tables, &job->coding)) {
        Py_XDECREF(job);
        return NULL;
    }
    job->shares = calloc((size_t)shares, sizeof *job->shares);
    job->shares_count = job->shares ? shares : 0;
    if (job->shares == NULL) {
        Py_DECREF(job);
        return PyErr_NoMemory();
    }
    job->sum_size = (size_t)sum_size;
    job->wire = job->wire_buffer.buf;
    job->kept = Py_NewRef(kept);
    return (PyObject *)job;
}

static int job_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Job *)self)->kept);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int job_clear(PyObject *self)
{
    Py_CLEAR(((Job *)self)->kept);
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
    coding_close(&job->coding);
    for (int i = 0; i < job->shares_count; ++i) {
        PyBuffer_Release(&job->shares[i].bounds_buffer);
        PyBuffer_Release(&job->shares[i].means_buffer);
    }
    free(job->shares);
    free(job->undecoded.items);
    free(job->decoded.items);
    type->tp_free(self);
    Py_DECREF(type);
}

/* decoded(): the ranges since the last call, as pairs of 64-bit numbers; not
 * while an executor runs. */
static PyObject *decoded(PyObject *self, PyObject *unused)
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
    {"decoded", decoded, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

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
    {Py_tp_methods, job_methods},
    {Py_tp_getset, job_properties},
    {0, NULL},
};

static PyType_Spec job_spec = {
    .name = "chainer_fp8pipe.allreduce._executor.Job",
    .basicsize = sizeof(Job),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = job_slots,
};

#endif
