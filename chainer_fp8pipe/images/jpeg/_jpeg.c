/* An index of a JPEG's codes, and parts cut with it; run without the GIL.
 *
 * Neither files nor indices are trusted: None is for what cannot be.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "jpeg_cut.h"

static PyObject *index_of(const Py_buffer *data, unsigned spacing)
{
    Header header;
    size_t length = 0, size = (size_t)data->len;
    if (read_header(&header, data->buf, size))
        length = index_size(&header, size, spacing);
    if (length == 0)
        return Py_NewRef(Py_None);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (result == NULL)
        return NULL;
    u8 *out = (u8 *)PyBytes_AS_STRING(result);
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = make_index(&header, data->buf, size, spacing, out);
    Py_END_ALLOW_THREADS
    if (done == 1)
        return result;
    Py_DECREF(result);
    return done ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyObject *part_of(const Py_buffer *data, const Py_buffer *index,
                         Box pixels)
{
    Header header;
    Part part;
    size_t size = (size_t)data->len;
    if (!read_header(&header, data->buf, size)
        || !open_index(&part, &header, data->buf, size, index->buf,
                       (size_t)index->len)
        || !choose(&part, pixels, size))
        return Py_NewRef(Py_None);
    PyObject *result = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)part_size(&part));
    if (result == NULL)
        return NULL;
    u8 *out = (u8 *)PyBytes_AS_STRING(result);
    ptrdiff_t written;
    Py_BEGIN_ALLOW_THREADS
    written = cut(&part, out);
    Py_END_ALLOW_THREADS
    if (written <= 0) {
        Py_DECREF(result);
        return written ? PyErr_NoMemory() : Py_NewRef(Py_None);
    }
    if (_PyBytes_Resize(&result, (Py_ssize_t)written) < 0)
        return NULL;
    pixels = pixels_of(&part);
    return Py_BuildValue("NIIII", result, pixels.left, pixels.top,
                         pixels.right - pixels.left,
                         pixels.bottom - pixels.top);
}

static PyObject *make(PyObject *self, PyObject *args)
{
    Py_buffer data;
    unsigned spacing;
    if (!PyArg_ParseTuple(args, "y*I", &data, &spacing))
        return NULL;
    PyObject *result;
    if (spacing >= 1 && spacing <= LARGEST_SPACING)
        result = index_of(&data, spacing);
    else
        result = PyErr_Format(PyExc_ValueError,
                              "a spacing of %u pixels is not 1 to %d",
                              spacing, LARGEST_SPACING);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *cut_out(PyObject *self, PyObject *args)
{
    Py_buffer data, index;
    Box box;
    if (!PyArg_ParseTuple(args, "y*y*IIII", &data, &index, &box.left,
                          &box.top, &box.right, &box.bottom))
        return NULL;
    PyObject *result = part_of(&data, &index, box);
    PyBuffer_Release(&data);
    PyBuffer_Release(&index);
    return result;
}

static PyMethodDef methods[] = {
    {"index", make, METH_VARARGS, NULL},
    {"cut", cut_out, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_jpeg",
    .m_doc = "Indices of JPEGs; see chainer_fp8pipe.images.jpeg.jpeg_index.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    return PyModuleDef_Init(&definition);
}
