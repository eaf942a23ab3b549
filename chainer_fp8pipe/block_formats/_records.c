/* Loops over records for Python, run without the GIL.
 *
 * Shapes and dtypes are the caller's business: here all arguments are plain
 * buffers, checked for their length only.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "record_loops.h"

/* An exception unless the wire has as many records as n elements need. */
static int fits(const Py_buffer *wire, const Py_buffer *values, int format)
{
    size_t n = (size_t)values->len / sizeof(f32);
    if ((size_t)wire->len == (n + RECORD - 1) / RECORD
                                 * (size_t)record_bytes(format)
        && format >= INT4 && format <= INT5)
        return 1;
    PyErr_SetString(PyExc_ValueError, "buffers differ in length");
    return 0;
}

static PyObject *encode(PyObject *self, PyObject *args)
{
    Py_buffer values, wire, residual = {0};
    PyObject *residual_or_none;
    float factor;
    int format;
    uint64_t nonfinite = 0;
    if (!PyArg_ParseTuple(args, "y*fOw*i", &values, &factor,
                          &residual_or_none, &wire, &format))
        return NULL;
    int ok = fits(&wire, &values, format);
    if (ok && residual_or_none != Py_None)
        ok = PyObject_GetBuffer(residual_or_none, &residual,
                                PyBUF_WRITABLE) == 0;
    if (ok && residual.buf && residual.len != values.len) {
        PyErr_SetString(PyExc_ValueError, "buffers differ in length");
        ok = 0;
    }
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        nonfinite = encode_records(values.buf, factor, residual.buf, wire.buf,
                                   (size_t)values.len / sizeof(f32), format);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&wire);
    PyBuffer_Release(&residual); /* does nothing to one never filled */
    return ok ? PyLong_FromUnsignedLongLong(nonfinite) : NULL;
}

static PyObject *decode(PyObject *self, PyObject *args)
{
    Py_buffer wire, out;
    float factor;
    int adds, format;
    uint64_t nonfinite = 0;
    if (!PyArg_ParseTuple(args, "y*fw*pi", &wire, &factor, &out, &adds,
                          &format))
        return NULL;
    int ok = fits(&wire, &out, format);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        nonfinite = decode_records(wire.buf, factor, out.buf,
                                   (size_t)out.len / sizeof(f32), adds,
                                   format);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&wire);
    PyBuffer_Release(&out);
    return ok ? PyLong_FromUnsignedLongLong(nonfinite) : NULL;
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_records",
    .m_doc = "Compiled loops over records; see chainer_fp8pipe.block_formats.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__records(void)
{
    return PyModuleDef_Init(&definition);
}
