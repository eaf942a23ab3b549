/* The loops for Python, run without the GIL, and where arrays are in memory.
 *
 * Shapes and dtypes are the caller's business (the package's __init__.py and
 * codecs/tensors.py): here all arguments are plain buffers, checked for their
 * length only.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "coding.h"

/* Whether buffers have as many bytes as given, in turn; an exception if not. */
static int have(const Py_buffer *buffers, int count, const size_t *sizes)
{
    for (int i = 0; i < count; ++i)
        if (buffers[i].buf != NULL && (size_t)buffers[i].len != sizes[i]) {
            PyErr_SetString(PyExc_ValueError, "buffers differ in length");
            return 0;
        }
    return 1;
}

#define SIZES(...) (const size_t[]){__VA_ARGS__}

/* Runs a statement if buffers have these sizes, gives them back, and returns
 * the result or the exception. */
#define RUN(buffers, count, sizes, statement, result) \
    do { \
        int ok_ = have((buffers), (count), (sizes)); \
        if (ok_) { \
            Py_BEGIN_ALLOW_THREADS \
            statement; \
            Py_END_ALLOW_THREADS \
        } \
        for (int i_ = 0; i_ < (count); ++i_) \
            PyBuffer_Release(&(buffers)[i_]); \
        return ok_ ? (result) : NULL; \
    } while (0)

static PyObject *encode(PyObject *self, PyObject *args)
{
    Py_buffer b[2] = {{0}}; /* values, codes */
    int rounding;
    if (!PyArg_ParseTuple(args, "y*w*i", &b[0], &b[1], &rounding))
        return NULL;
    size_t n = (size_t)b[1].len;
    RUN(b, 2, SIZES(4 * n, n),
        encode_codes(b[0].buf, b[1].buf, n, rounding), Py_NewRef(Py_None));
}

static PyObject *decode(PyObject *self, PyObject *args)
{
    Py_buffer b[2] = {{0}}; /* codes, out */
    if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1]))
        return NULL;
    size_t n = (size_t)b[0].len;
    RUN(b, 2, SIZES(n, 4 * n), decode_codes(b[0].buf, b[1].buf, n),
        Py_NewRef(Py_None));
}

static PyObject *add(PyObject *self, PyObject *args)
{
    Py_buffer b[2] = {{0}}; /* codes, codes that become the sums */
    int rounding;
    if (!PyArg_ParseTuple(args, "y*w*i", &b[0], &b[1], &rounding))
        return NULL;
    size_t n = (size_t)b[1].len;
    RUN(b, 2, SIZES(n, n), add_codes(b[0].buf, b[1].buf, n, rounding),
        Py_NewRef(Py_None));
}

static PyObject *largest(PyObject *self, PyObject *args)
{
    Py_buffer b[2] = {{0}}; /* gradient, parameter */
    float epsilon;
    int found[2];
    if (!PyArg_ParseTuple(args, "y*y*f", &b[0], &b[1], &epsilon))
        return NULL;
    RUN(b, 2, SIZES((size_t)b[0].len, (size_t)b[0].len),
        largest_ratio(b[0].buf, b[1].buf, (size_t)b[0].len / sizeof(f32),
                      epsilon, found),
        Py_BuildValue("dd", (double)e5m2_float((unsigned int)found[0]),
                      (double)e5m2_float((unsigned int)found[1])));
}

/* code(what, tables, start, wire, other, count, means): what coding.h does
 * with a range, on the host: "encode", "decode", "sum", "mean", or "+"
 * (add_wires).  `wire` begins at entry `start`; `other` is a wire that is
 * added to it, or the float32 sums that it is added to, or of which it is to
 * be the mean, which are overwritten. */
static PyObject *code(PyObject *self, PyObject *args)
{
    const char *what;
    PyObject *tables;
    long long start;
    int count;
    Coding coding = {0};
    Py_buffer b[3] = {{0}}; /* wire, other, means */
    if (!PyArg_ParseTuple(args, "sOLw*z*iz*", &what, &tables, &start, &b[0],
                          &b[1], &count, &b[2]))
        return NULL;
    if (coding_open(tables, &coding)) {
        size_t n = (size_t)b[0].len / coding.itemsize;
        size_t of_other = *what == '+' ? (size_t)b[0].len
                                       : 4 * n * (size_t)coding.grain;
        Range range = {start, start + (int64_t)n};
        if (have(b, 3, SIZES((size_t)b[0].len, of_other,
                             (size_t)coding.tensors_count * sizeof(Mean)))) {
            Py_BEGIN_ALLOW_THREADS
            switch (*what) {
            case 'e': encode_range(&coding, range, b[0].buf); break;
            case 'd': decode_range(&coding, range, b[0].buf); break;
            case 's': accumulate_wire(&coding, b[0].buf, b[1].buf, n); break;
            case '+': add_wires(&coding, b[1].buf, b[0].buf, n); break;
            default: encode_mean(&coding, b[1].buf, range, count, b[2].buf,
                                 b[0].buf);
            }
            Py_END_ALLOW_THREADS
        }
        coding_close(&coding);
    }
    for (int i = 0; i < 3; ++i)
        PyBuffer_Release(&b[i]);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* places(arrays, writeable): address and elements of each array, as pairs of
 * 64-bit numbers; None if compiled code cannot use one of them.  A model has
 * hundreds, and every update new ones; what NumPy offers in Python,
 * __array_interface__, takes ten times as long as a buffer. */
static PyObject *places(PyObject *self, PyObject *args)
{
    PyObject *list;
    int writeable;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &list, &writeable))
        return NULL;
    int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS
                | (writeable ? PyBUF_WRITABLE : 0);
    Py_ssize_t count = PyList_GET_SIZE(list);
    PyObject *found = PyBytes_FromStringAndSize(
        NULL, count * 2 * (Py_ssize_t)sizeof(int64_t));
    if (found == NULL)
        return NULL;
    int64_t *next = (int64_t *)(void *)PyBytes_AS_STRING(found);
    /* Asking for a buffer may run Python code, which may change the list. */
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_buffer buffer;
        PyObject *array = i < PyList_GET_SIZE(list)
                              ? Py_NewRef(PyList_GET_ITEM(list, i)) : NULL;
        int ok = array != NULL
                 && PyObject_GetBuffer(array, &buffer, flags) == 0;
        if (ok) {
            ok = buffer.format != NULL && strcmp(buffer.format, "f") == 0;
            *next++ = (int64_t)(intptr_t)buffer.buf;
            *next++ = buffer.len / (Py_ssize_t)sizeof(float);
            PyBuffer_Release(&buffer);
        }
        PyErr_Clear();
        Py_XDECREF(array);
        if (!ok) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
    }
    return found;
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {"add", add, METH_VARARGS, NULL},
    {"largest", largest, METH_VARARGS, NULL},
    {"code", code, METH_VARARGS, NULL},
    {"places", places, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_formats",
    .m_doc = "Compiled loops; see chainer_fp8pipe.formats.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__formats(void)
{
    return PyModuleDef_Init(&definition);
}
