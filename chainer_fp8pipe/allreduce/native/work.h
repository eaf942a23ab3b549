/* What a chunk asks of its codec: compiled loops, or the same in Python
 * (uncompiled.py).  These return 0, or -1 where Python raised an exception.
 * What is compiled may run in any thread.
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
    return result;
}

/* Writes a part of the means into the gradients. */
static int decode_part(Shared *shared, const Job *job, Range part,
                       char *wire)
{
    int result = 0;
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

/* Makes sums of contributions as they travel, n entries of each. */
static void sum_contributions(const Job *job, const void *const *wires,
                              int count, f32 *total, size_t n)
{
    if (job->codec == FP8 || job->codec == RELAY) {
        long_sum((const u8 *const *)wires, count, total, n);
        return;
    }
    memset(total, 0, n * (size_t)job->grain * sizeof *total);
    for (int i = 0; i < count; ++i)
        accumulate(job, wires[i], total, n);
}

/* The first of the receives just before the ENCODE at `encode` if its sums are
 * all contributions that come there; otherwise `encode`. */
static int first_gathered(const Lane *lane, int encode)
{
    const Step *sum = &lane->steps[encode];
    for (int i = encode - 1; i >= 0 && encode - i < MOST_SUMMED; --i) {
        const Step *step = &lane->steps[i];
        if (step->kind != RECEIVE_PARTIAL || step->summed
            || step->start != sum->start || step->stop != sum->stop)
            break;
        if (step->fresh)
            return i;
    }
    return encode;
}

/* Whether what this step receives stays where it is until its sums are
 * encoded: together that takes half the time of one after the other. */
static int is_gathered(const Chunk *chunk)
{
    const Lane *lane = chunk->lane;
    int i = chunk->position;
    while (i < lane->steps_count && lane->steps[i].kind == RECEIVE_PARTIAL)
        ++i;
    return i < lane->steps_count && lane->steps[i].kind == ENCODE
           && first_gathered(lane, i) <= chunk->position;
}

/* Where a block of a message that has come lies, behind `before` bytes of
 * other blocks. */
static char *block_of(const Chunk *chunk, const Step *step,
                      const Receive *receive, int block, size_t before)
{
    if (!receive->scattered)
        return receive->data + before;
    return receive->data
           + (size_t)(part_of(chunk, block).start
                      - part_of(chunk, step->start).start)
                 * chunk->job->itemsize;
}

/* Begins the sums of a step with this rank's own contribution. */
static void begin_sums(const Chunk *chunk, const Step *step)
{
    if (is_gathered(chunk))
        return;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        const void *own = wire_of(chunk, block);
        sum_contributions(chunk->job, &own, chunk->lane->contributes != 0,
                          total_of(chunk, block),
                          (size_t)(part.stop - part.start));
    }
}

static void add_in_wire(const Chunk *chunk, const Step *step,
                        const Receive *receive)
{
    const Job *job = chunk->job;
    const Random none = {0};
    size_t place = 0;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t n = (size_t)(part.stop - part.start);
        void *wire = wire_of(chunk, block);
        const char *data = block_of(chunk, step, receive, block, place);
        if (step->fresh && !chunk->lane->contributes)
            memcpy(wire, data, n * job->itemsize);
        else if (job->codec == FLOAT32)
            add_floats((const f32 *)data, wire, n);
        else if (job->codec == FLOAT16)
            half_add((const u16 *)data, wire, n);
        else
            long_add((const u8 *)data, wire, wire, n, job->rounding, none);
        place += n * job->itemsize;
    }
}

static void accumulate_message(const Chunk *chunk, const Step *step,
                               const Receive *receive)
{
    size_t place = 0;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t n = (size_t)(part.stop - part.start);
        accumulate(chunk->job, block_of(chunk, step, receive, block, place),
                   total_of(chunk, block), n);
        place += n * chunk->job->itemsize;
    }
}

/* Python gets messages in one piece. */
static int add_in_python(Shared *shared, const Chunk *chunk, const Step *step,
                         const Receive *receive)
{
    Memory message = {receive->data, receive->size};
    if (receive->scattered) {
        message.data = malloc(receive->size);
        if (message.data == NULL) {
            shared->messages.error = NO_MEMORY;
            return -1;
        }
        size_t place = 0;
        for (int block = step->start; block < step->stop; ++block) {
            Range part = part_of(chunk, block);
            size_t size = (size_t)(part.stop - part.start)
                          * chunk->job->itemsize;
            memcpy((char *)message.data + place,
                   block_of(chunk, step, receive, block, place), size);
            place += size;
        }
    }
    int result = in_python(shared, chunk->job, "add", "(iLiO&)",
                           chunk->lane->number, (long long)chunk->frame,
                           chunk->position, view, &message);
    if (receive->scattered)
        free(message.data);
    return result;
}

/* Adds a message to the sums of a step. */
static int add_message(Shared *shared, const Chunk *chunk, const Step *step,
                       const Receive *receive)
{
    const Job *job = chunk->job;
    const void *data = receive->data;
    size_t size = receive->size;
    if (size == 0)
        return 0;
    if (job->codec == IN_PYTHON)
        return add_in_python(shared, chunk, step, receive);
    if (job->in_place)
        add_in_wire(chunk, step, receive);
    else if (is_gathered(chunk))
        return 0;
    else if (step->summed && job->sum_size == sizeof(u16))
        half_accumulate_scaled(data, 1 / job->shrink,
                               total_of(chunk, step->start),
                               size / sizeof(u16));
    else if (step->summed)
        add_floats(data, total_of(chunk, step->start), size / sizeof(f32));
    else
        accumulate_message(chunk, step, receive);
    return 0;
}

/* Writes the sums of a step into a message. */
static int write_sums(Shared *shared, const Chunk *chunk, const Step *step,
                      char *data, size_t size)
{
    int result = 0;
    if (chunk->job->codec == IN_PYTHON) {
        Memory message = {data, size};
        result = in_python(shared, chunk->job, "message", "(iLiO&)",
                           chunk->lane->number, (long long)chunk->frame,
                           chunk->position, view, &message);
    }
    else
        half_encode_scaled(total_of(chunk, step->start), chunk->job->shrink,
                           (u16 *)data, size / sizeof(u16));
    return result;
}

static void encode_mean_at(const Chunk *chunk, const Step *step, f32 *total,
                           Range range, char *wire)
{
    encode_mean(chunk->job, total, range, step->peer,
                chunk->share->residuals
                    + chunk->site * chunk->job->tensors_count, wire);
}

/* Elements whose sums stay in the nearest cache until they are encoded.  More
 * at a time would have memory wait: contributions are read while sums are
 * made, parameters and residuals while means are encoded, and neither would
 * be fetched ahead meanwhile. */
#define GATHERED 1024

/* Makes the sums of what has come for a step, and of them their mean. */
static void encode_gathered(const Chunk *chunk, const Step *step, int count)
{
    const Job *job = chunk->job;
    const Receive *receives = &chunk->receives[chunk->next_receive - count];
    const int own = chunk->lane->contributes != 0;
    const int64_t most = GATHERED / job->grain;
    f32 sums[GATHERED] __attribute__((aligned(CACHE_LINE)));
    size_t place = 0; /* of a block, in messages */
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block), range = part;
        for (; range.start < part.stop; range.start = range.stop) {
            const void *wires[MOST_SUMMED];
            int64_t left = part.stop - range.start;
            size_t n = (size_t)(left < most ? left : most);
            range.stop = range.start + (int64_t)n;
            char *wire = wire_at(job, wire_of(chunk, block), part,
                                 range.start);
            wires[0] = wire;
            for (int i = 0; i < count; ++i)
                wires[own + i] = wire_at(job, block_of(
                    chunk, step, &receives[i], block, place), part,
                    range.start);
            sum_contributions(job, wires, own + count, sums, n);
            encode_mean_at(chunk, step, sums, range, wire);
        }
        place += (size_t)(part.stop - part.start) * job->itemsize;
    }
}

/* Makes the sums of a step their mean, in the wire's format. */
static int encode_sums(Shared *shared, const Chunk *chunk, const Step *step)
{
    const Job *job = chunk->job;
    const int count = chunk->position
                      - first_gathered(chunk->lane, chunk->position);
    int result = 0;
    if (job->codec == IN_PYTHON)
        result = in_python(shared, job, "encode_sums", "(iLii)",
                           chunk->lane->number, (long long)chunk->frame,
                           chunk->position, chunk->site);
    else if (job->in_place)
        ; /* they are */
    else if (count)
        encode_gathered(chunk, step, count);
    else
        for (int block = step->start; block < step->stop; ++block)
            encode_mean_at(chunk, step, total_of(chunk, block),
                           part_of(chunk, block), wire_of(chunk, block));
    return result;
}

/* Copies blocks of the wire to a message. */
static void write_blocks(const Chunk *chunk, const Step *step, char *message)
{
    const Job *job = chunk->job;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t size = (size_t)(part.stop - part.start) * job->itemsize;
        if (step->near)
            stream(message, wire_of(chunk, block), size);
        else
            memcpy(message, wire_of(chunk, block), size);
        message += size;
    }
}

/* Copies blocks of a message that has come to the wire. */
static void take_blocks(const Chunk *chunk, const Step *step,
                        const Receive *receive)
{
    size_t place = 0;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t size = (size_t)(part.stop - part.start)
                      * chunk->job->itemsize;
        memcpy(wire_of(chunk, block),
               block_of(chunk, step, receive, block, place), size);
        place += size;
    }
}

#endif
