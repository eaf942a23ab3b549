/* The loops of the fp8 format for Python, run without the GIL.
 *
 * Shapes and dtypes are the caller's business: here all arguments are plain
 * buffers, checked for their length only.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "loops.h"

#define CACHE_LINE 64

/* Length of the chunk at `start` of n elements.
 *
 * The first one ends where `floats` reaches a cache line, so that no vector
 * of the others lies across two; and none crosses a multiple of 2^32, because
 * the loops take the upper half of the index for constant. */
static size_t chunk_length(size_t start, size_t n, const f32 *floats)
{
    uint64_t length = (UINT64_C(1) << 32) - (start & UINT32_MAX);
    if (start == 0 && (uintptr_t)floats % CACHE_LINE != 0)
        length = (CACHE_LINE - (uintptr_t)floats % CACHE_LINE + 3) / 4;
    if (length > CHUNK)
        length = CHUNK;
    return length < n - start ? (size_t)length : n - start;
}

#define FOR_EACH_CHUNK(start, length, n, floats) \
    for (size_t start = 0, length; \
         start < (n) && (length = chunk_length(start, (n), (floats)), 1); \
         start += length)

/* One of three loops by the number of the rounding. */
#define BY_ROUNDING(LOOP, rounding) \
    ((rounding) == E5M2_NEAREST    ? LOOP##_nearest \
     : (rounding) == E5M2_TRUNCATE ? LOOP##_truncate \
                                   : LOOP##_stochastic)

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
        const f32 *x = values.buf;
        u8 *y = codes.buf;
        Py_BEGIN_ALLOW_THREADS
        FOR_EACH_CHUNK(start, length, n, x) {
            r.first = start;
            BY_ROUNDING(encode, rounding)(x + start, y + start, length, r);
        }
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
        const u8 *x = codes.buf;
        f32 *y = out.buf;
        Py_BEGIN_ALLOW_THREADS
        FOR_EACH_CHUNK(start, length, n, y)
            decode_loop(x + start, y + start, length);
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
        const u8 *x = a.buf, *y = b.buf;
        u8 *z = out.buf;
        Py_BEGIN_ALLOW_THREADS
        FOR_EACH_CHUNK(start, length, n, NULL) {
            r.first = start;
            BY_ROUNDING(add, rounding)(x + start, y + start, z + start,
                                       length, r);
        }
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
        const u8 *x = codes.buf;
        f32 *y = total.buf;
        Py_BEGIN_ALLOW_THREADS
        FOR_EACH_CHUNK(start, length, n, y)
            accumulate_loop(x + start, y + start, length);
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
    if (!PyArg_ParseTuple(args, "y*y*w*OfffiII", &gradient, &parameter,
                          &codes, &residual_or_none, &q.scale, &q.inverse,
                          &q.epsilon, &rounding, &r.key0, &r.key1))
        return NULL;
    size_t n = (size_t)codes.len;
    int ok = has_length(&gradient, n, sizeof(f32))
             && has_length(&parameter, n, sizeof(f32));
    if (ok && residual_or_none != Py_None)
        ok = PyObject_GetBuffer(residual_or_none, &residual,
                                PyBUF_WRITABLE) == 0
             && has_length(&residual, n, sizeof(f32));
    if (ok) {
        const f32 *g = gradient.buf, *w = parameter.buf;
        f32 *left = residual.buf;
        u8 *y = codes.buf;
        Py_BEGIN_ALLOW_THREADS
        FOR_EACH_CHUNK(start, length, n, g) {
            r.first = start;
            Counts c = left == NULL
                ? BY_ROUNDING(ratio_encode, rounding)(
                      g + start, w + start, y + start, length, q, r)
                : BY_ROUNDING(ratio_feedback, rounding)(
                      g + start, w + start, left + start, y + start, length,
                      q, r);
            total.clipped += c.clipped;
            total.nonfinite += c.nonfinite;
        }
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
        const u8 *codes = wire.buf;
        const f32 *floats = wire.buf, *w = parameter.buf;
        f32 *y = out.buf;
        Py_BEGIN_ALLOW_THREADS
        FOR_EACH_CHUNK(start, length, n, w)
            nonfinite += is_codes
                ? ratio_decode_codes(codes + start, w + start, y + start,
                                     length, q)
                : ratio_decode_floats(floats + start, w + start, y + start,
                                      length, q);
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
