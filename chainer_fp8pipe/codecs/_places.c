/* Where arrays are in memory.
 *
 * A model has hundreds of arrays, and every update new ones.  What NumPy
 * offers in Python, __array_interface__, takes ten times as long as a buffer.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t address, elements;
} Place;

/* 0: this is no array that compiled code can use. */
static int find(PyObject *array, int flags, Place *place)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, flags) < 0) {
        PyErr_Clear();
        return 0;
    }
    int ok = buffer.format != NULL && strcmp(buffer.format, "f") == 0;
    place->address = (int64_t)(intptr_t)buffer.buf;
    place->elements = buffer.len / (Py_ssize_t)sizeof(float);
    PyBuffer_Release(&buffer);
    return ok;
}

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
        NULL, count * (Py_ssize_t)sizeof(Place));
    if (found == NULL)
        return NULL;
    Place *next = (Place *)PyBytes_AS_STRING(found);
    /* Asking for a buffer may run Python code, which may change the list. */
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *array = i < PyList_GET_SIZE(list)
                              ? Py_NewRef(PyList_GET_ITEM(list, i)) : NULL;
        int ok = array != NULL && find(array, flags, &next[i]);
        Py_XDECREF(array);
        if (!ok) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
    }
    return found;
}

static PyMethodDef methods[] = {
    {"places", places, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_places",
    .m_doc = "Where arrays are; see chainer_fp8pipe.codecs.tensors.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__places(void)
{
    return PyModuleDef_Init(&definition);
}
