/* What a chunk asks of its codec: compiled loops, or the same in Python
 * (uncompiled.py).  These return 0, or -1 where Python raised an exception.
 */
#ifndef CHAINER_FP8PIPE_WORK_H
#define CHAINER_FP8PIPE_WORK_H
#include <stdarg.h>

#include "lane.h"

typedef struct {
    void *data;
    size_t size; /* bytes */
} Memory;

/* For "O&" in the format of arguments. */
static PyObject *view(void *memory)
{
    Memory *of = memory;
    return PyMemoryView_FromMemory(of->data, (Py_ssize_t)of->size,
                                   PyBUF_WRITE);
}

/* Takes the interpreter back for one call. */
static int in_python(Shared *shared, const Job *job, const char *method,
                     const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyEval_RestoreThread(shared->python);
    PyObject *function = PyObject_GetAttrString(job->python, method);
    PyObject *arguments = Py_VaBuildValue(format, values);
    PyObject *value = function && arguments
        ? PyObject_CallObject(function, arguments) : NULL;
    Py_XDECREF(function);
    Py_XDECREF(arguments);
    Py_XDECREF(value);
    shared->failed |= value == NULL;
    shared->python = PyEval_SaveThread();
    va_end(values);
    return value == NULL ? -1 : 0;
}

/* Writes a part of the gradients into the wire. */
static int encode_part(Shared *shared, const Job *job, Range part,
                       char *wire)
{
    int result = 0;
    double since = now();
    if (part.start == part.stop)
        return 0;
    if (job->codec == FP8)
        encode_ratios(job, part, wire);
    else if (job->codec == FLOAT32)
        encode_floats(job, part, wire);
    else if (job->codec == FLOAT16)
        encode_halves(job, part, wire);
    else if (job->codec == RECORDS)
        encode_into_records(job, part, wire);
    else
        result = in_python(shared, job, "encode", "(LL)",
                           (long long)part.start, (long long)part.stop);
    shared->encoding += now() - since;
    return result;
}

/* Writes a part of the means into the gradients. */
static int decode_part(Shared *shared, const Job *job, Range part,
                       char *wire)
{
    int result = 0;
    double since = now();
    if (part.start == part.stop)
        return 0;
    if (job->codec == FP8)
        decode_ratios(job, part, wire);
    else if (job->codec == FLOAT32)
        decode_floats(job, part, wire);
    else if (job->codec == FLOAT16)
        decode_halves(job, part, wire);
    else if (job->codec == RECORDS)
        decode_from_records(job, part, wire);
    else
        result = in_python(shared, job, "decode", "(LL)",
                           (long long)part.start, (long long)part.stop);
    shared->decoding += now() - since;
    return result;
}

static f32 *total_of(const Chunk *chunk, int block)
{
    return chunk->total + chunk->places[block];
}

/* Adds contributions as they travel, n entries, to sums. */
static void accumulate(const Job *job, const void *wire, f32 *total, size_t n)
{
    if (job->codec == FLOAT16)
        half_accumulate_scaled(wire, 1.0f, total, n);
    else if (job->codec == RECORDS)
        decode_records(wire, 1.0f, total, n * RECORD, 1, job->format);
    else
        long_accumulate(wire, total, n);
}

/* Begins the sums of a step with this rank's own contribution. */
static void begin_sums(const Chunk *chunk, const Step *step)
{
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t n = (size_t)(part.stop - part.start);
        f32 *total = total_of(chunk, block);
        memset(total, 0, n * (size_t)chunk->job->grain * sizeof *total);
        if (chunk->lane->contributes)
            accumulate(chunk->job, wire_of(chunk, block), total, n);
    }
}

static void add_in_wire(const Chunk *chunk, const Step *step,
                        const char *data)
{
    const Job *job = chunk->job;
    const Random none = {0};
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t n = (size_t)(part.stop - part.start);
        void *wire = wire_of(chunk, block);
        if (step->fresh && !chunk->lane->contributes)
            memcpy(wire, data, n * job->itemsize);
        else if (job->codec == FLOAT32)
            add_floats((const f32 *)data, wire, n);
        else if (job->codec == FLOAT16)
            half_add((const u16 *)data, wire, n);
        else
            long_add((const u8 *)data, wire, wire, n, job->rounding, none);
        data += n * job->itemsize;
    }
}

/* Adds a message to the sums of a step. */
static int add_message(Shared *shared, const Chunk *chunk, const Step *step,
                       char *data, size_t size)
{
    const Job *job = chunk->job;
    int result = 0;
    double since = now();
    if (size == 0)
        return 0;
    if (job->codec == IN_PYTHON) {
        Memory message = {data, size};
        result = in_python(shared, job, "add", "(iLiO&)",
                           chunk->lane->number, (long long)chunk->frame,
                           chunk->position, view, &message);
    }
    else if (job->in_place)
        add_in_wire(chunk, step, data);
    else if (step->summed && job->sum_size == sizeof(u16))
        half_accumulate_scaled((const u16 *)data, 1 / job->shrink,
                               total_of(chunk, step->start),
                               size / sizeof(u16));
    else if (step->summed)
        add_floats((const f32 *)data, total_of(chunk, step->start),
                   size / sizeof(f32));
    else
        accumulate(job, data, total_of(chunk, step->start),
                   size / job->itemsize);
    shared->decoding += now() - since;
    return result;
}

/* Writes the sums of a step into a message. */
static int write_sums(Shared *shared, const Chunk *chunk, const Step *step,
                      char *data, size_t size)
{
    int result = 0;
    double since = now();
    if (chunk->job->codec == IN_PYTHON) {
        Memory message = {data, size};
        result = in_python(shared, chunk->job, "message", "(iLiO&)",
                           chunk->lane->number, (long long)chunk->frame,
                           chunk->position, view, &message);
    }
    else
        half_encode_scaled(total_of(chunk, step->start), chunk->job->shrink,
                           (u16 *)data, size / sizeof(u16));
    shared->encoding += now() - since;
    return result;
}

/* Makes the sums of a step their mean, in the wire's format. */
static int encode_sums(Shared *shared, const Chunk *chunk, const Step *step)
{
    const Job *job = chunk->job;
    int result = 0;
    double since = now();
    if (job->codec == IN_PYTHON)
        result = in_python(shared, job, "encode_sums", "(iLii)",
                           chunk->lane->number, (long long)chunk->frame,
                           chunk->position, chunk->site);
    else if (!job->in_place)
        for (int block = step->start; block < step->stop; ++block)
            encode_mean(job, total_of(chunk, block), part_of(chunk, block),
                        step->peer, chunk->share->residuals
                            + chunk->site * job->tensors_count,
                        wire_of(chunk, block));
    shared->encoding += now() - since;
    return result;
}

/* Copies blocks of the wire to or from a message. */
static void copy_blocks(const Chunk *chunk, const Step *step, char *message,
                        int to_wire)
{
    const Job *job = chunk->job;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t size = (size_t)(part.stop - part.start) * job->itemsize;
        char *wire = wire_of(chunk, block);
        memcpy(to_wire ? wire : message, to_wire ? message : wire, size);
        message += size;
    }
}

#endif
