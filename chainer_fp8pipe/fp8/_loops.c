/* The loops of the fp8 format for Python, run without the GIL.
 *
 * Shapes and dtypes are the caller's business: here all arguments are plain
 * buffers, checked for their length only.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "long_loops.h"

/* 0 and an exception unless `buffer` has n items of the given size. */
static int has_length(const Py_buffer *buffer, size_t n, size_t itemsize)
{
    if ((size_t)buffer->len == n * itemsize)
        return 1;
    PyErr_SetString(PyExc_ValueError, "buffers differ in length");
    return 0;
}

static PyObject *encode(PyObject *self, PyObject *args)
{
    Py_buffer values, codes;
    Random r = {0};
    int rounding;
    if (!PyArg_ParseTuple(args, "y*w*iII", &values, &codes, &rounding,
                          &r.key0, &r.key1))
        return NULL;
    size_t n = (size_t)codes.len;
    int ok = has_length(&values, n, sizeof(f32));
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        long_encode(values.buf, codes.buf, n, rounding, r);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&codes);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject *decode(PyObject *self, PyObject *args)
{
    Py_buffer codes, out;
    if (!PyArg_ParseTuple(args, "y*w*", &codes, &out))
        return NULL;
    size_t n = (size_t)codes.len;
    int ok = has_length(&out, n, sizeof(f32));
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        long_decode(codes.buf, out.buf, n);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&out);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject *add(PyObject *self, PyObject *args)
{
    Py_buffer a, b, out;
    Random r = {0};
    int rounding;
    if (!PyArg_ParseTuple(args, "y*y*w*iII", &a, &b, &out, &rounding,
                          &r.key0, &r.key1))
        return NULL;
    size_t n = (size_t)out.len;
    int ok = has_length(&a, n, 1) && has_length(&b, n, 1);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        long_add(a.buf, b.buf, out.buf, n, rounding, r);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    PyBuffer_Release(&out);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject *accumulate(PyObject *self, PyObject *args)
{
    Py_buffer codes, total;
    if (!PyArg_ParseTuple(args, "y*w*", &codes, &total))
        return NULL;
    size_t n = (size_t)codes.len;
    int ok = has_length(&total, n, sizeof(f32));
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        long_accumulate(codes.buf, total.buf, n);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&total);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject *ratio_encode(PyObject *self, PyObject *args)
{
    Py_buffer gradient, parameter, codes, residual = {0};
    PyObject *residual_or_none;
    Random r = {0};
    Ratio q;
    int rounding;
    Counts total = {0, 0};
    if (!PyArg_ParseTuple(args, "y*y*w*OffffiII", &gradient, &parameter,
                          &codes, &residual_or_none, &q.scale, &q.inverse,
                          &q.epsilon, &q.bound, &rounding, &r.key0, &r.key1))
        return NULL;
    size_t n = (size_t)codes.len;
    int ok = has_length(&gradient, n, sizeof(f32))
             && has_length(&parameter, n, sizeof(f32));
    if (ok && residual_or_none != Py_None)
        ok = PyObject_GetBuffer(residual_or_none, &residual,
                                PyBUF_WRITABLE) == 0
             && has_length(&residual, n, sizeof(f32));
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        total = long_ratio_encode(gradient.buf, parameter.buf, residual.buf,
                                  codes.buf, n, q, rounding, r);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&gradient);
    PyBuffer_Release(&parameter);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&residual); /* does nothing to one never filled */
    return ok ? Py_BuildValue("KK", (unsigned long long)total.clipped,
                              (unsigned long long)total.nonfinite)
              : NULL;
}

static PyObject *ratio_decode(PyObject *self, PyObject *args)
{
    Py_buffer wire, parameter, out;
    Ratio q = {0};
    uint64_t nonfinite = 0;
    if (!PyArg_ParseTuple(args, "y*y*w*ff", &wire, &parameter, &out,
                          &q.inverse, &q.epsilon))
        return NULL;
    size_t n = (size_t)out.len / sizeof(f32);
    int is_codes = (size_t)wire.len == n;
    int ok = has_length(&out, n, sizeof(f32))
             && has_length(&parameter, n, sizeof(f32))
             && (is_codes || has_length(&wire, n, sizeof(f32)));
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        nonfinite = is_codes
            ? long_ratio_decode(wire.buf, parameter.buf, out.buf, n, q)
            : long_ratio_decode_floats(wire.buf, parameter.buf, out.buf, n,
                                       q);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&wire);
    PyBuffer_Release(&parameter);
    PyBuffer_Release(&out);
    return ok ? PyLong_FromUnsignedLongLong(nonfinite) : NULL;
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {"add", add, METH_VARARGS, NULL},
    {"accumulate", accumulate, METH_VARARGS, NULL},
    {"ratio_encode", ratio_encode, METH_VARARGS, NULL},
    {"ratio_decode", ratio_decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_loops",
    .m_doc = "Compiled loops of the fp8 format; see chainer_fp8pipe.fp8.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__loops(void)
{
    return PyModuleDef_Init(&definition);
}
