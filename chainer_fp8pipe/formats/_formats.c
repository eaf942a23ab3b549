/* The loops, as a library (ctypes), and where arrays are in memory.
 *
 * Arguments are checked by their callers (__init__.py, codecs/tensors.py).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "coding.h"

CLONES void decode_codes(const u8 *codes, f32 *out, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; ++i)
        out[i] = e5m2_decode(codes[i]);
}

/* Address and elements of each array of a list, as pairs of 64-bit numbers;
 * None if compiled code cannot use one of them.  A model has hundreds, and
 * every update new ones; what NumPy offers in Python, __array_interface__,
 * takes ten times as long as a buffer. */
PyObject *places(PyObject *list, int writeable)
{
    const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS
                      | (writeable ? PyBUF_WRITABLE : 0);
    Py_ssize_t count = PyList_GET_SIZE(list);
    PyObject *found = PyBytes_FromStringAndSize(
        NULL, count * 2 * (Py_ssize_t)sizeof(int64_t));
    if (found == NULL)
        return NULL;
    int64_t *next = (int64_t *)(void *)PyBytes_AS_STRING(found);
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_buffer buffer;
        int ok = PyObject_GetBuffer(PyList_GET_ITEM(list, i), &buffer, flags)
                 == 0;
        if (ok) {
            ok = buffer.format != NULL && strcmp(buffer.format, "f") == 0;
            *next++ = (int64_t)(intptr_t)buffer.buf;
            *next++ = buffer.len / (Py_ssize_t)sizeof(float);
            PyBuffer_Release(&buffer);
        }
        PyErr_Clear();
        if (!ok) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
    }
    return found;
}
