/* What a chunk asks of its codec; it may run in any thread. */
#ifndef CHAINER_FP8PIPE_WORK_H
#define CHAINER_FP8PIPE_WORK_H
#include "lane.h"

static f32 *total_of(const Chunk *chunk, int block)
{
    return chunk->total + chunk->places[block];
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
                 * chunk->job->coding.itemsize;
}

/* Begins the sums of a step with this rank's own contribution. */
static void begin_sums(const Chunk *chunk, const Step *step)
{
    if (is_gathered(chunk))
        return;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        const void *own = wire_of(chunk, block);
        sum_wires(&chunk->job->coding, &own, chunk->lane->contributes != 0,
                          total_of(chunk, block),
                          (size_t)(part.stop - part.start));
    }
}

static void add_in_wire(const Chunk *chunk, const Step *step,
                        const Receive *receive)
{
    const Job *job = chunk->job;
    size_t place = 0;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t n = (size_t)(part.stop - part.start);
        void *wire = wire_of(chunk, block);
        const char *data = block_of(chunk, step, receive, block, place);
        if (step->fresh && !chunk->lane->contributes)
            memcpy(wire, data, n * job->coding.itemsize);
        else
            add_wires(&job->coding, data, wire, n);
        place += n * job->coding.itemsize;
    }
}

static void accumulate_message(const Chunk *chunk, const Step *step,
                               const Receive *receive)
{
    size_t place = 0;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t n = (size_t)(part.stop - part.start);
        accumulate_wire(&chunk->job->coding, block_of(chunk, step, receive, block, place),
                        total_of(chunk, block), n);
        place += n * chunk->job->coding.itemsize;
    }
}

/* Adds a message to the sums of a step. */
static void add_message(const Chunk *chunk, const Step *step,
                        const Receive *receive)
{
    const Job *job = chunk->job;
    const void *data = receive->data;
    size_t size = receive->size;
    if (size == 0 || (!job->in_place && is_gathered(chunk)))
        return;
    if (job->in_place)
        add_in_wire(chunk, step, receive);
    else if (step->summed && job->sum_size == sizeof(u16))
        accumulate_halves(data, 1 / job->shrink,
                          total_of(chunk, step->start), size / sizeof(u16));
    else if (step->summed)
        add_floats(data, total_of(chunk, step->start), size / sizeof(f32));
    else
        accumulate_message(chunk, step, receive);
}

/* Writes the sums of a step, as halves, into a message. */
static void write_sums(const Chunk *chunk, const Step *step, char *data,
                       size_t size)
{
    encode_halves(total_of(chunk, step->start), chunk->job->shrink,
                  (u16 *)(void *)data, size / sizeof(u16));
}

static void encode_mean_at(const Chunk *chunk, const Step *step, f32 *total,
                           Range range, char *wire)
{
    const Coding *coding = &chunk->job->coding;
    encode_mean(coding, total, range, step->peer,
                chunk->share->means + chunk->site * coding->tensors_count,
                wire);
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
    const int64_t most = GATHERED / job->coding.grain;
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
            sum_wires(&job->coding, wires, own + count, sums, n);
            encode_mean_at(chunk, step, sums, range, wire);
        }
        place += (size_t)(part.stop - part.start) * job->coding.itemsize;
    }
}

/* Makes the sums of a step their mean, in the wire's format. */
static void encode_sums(const Chunk *chunk, const Step *step)
{
    const int count = chunk->position
                      - first_gathered(chunk->lane, chunk->position);
    if (chunk->job->in_place)
        ; /* they are */
    else if (count)
        encode_gathered(chunk, step, count);
    else
        for (int block = step->start; block < step->stop; ++block)
            encode_mean_at(chunk, step, total_of(chunk, block),
                           part_of(chunk, block), wire_of(chunk, block));
}

/* Copies blocks of the wire to a message. */
static void write_blocks(const Chunk *chunk, const Step *step, char *message)
{
    const Job *job = chunk->job;
    for (int block = step->start; block < step->stop; ++block) {
        Range part = part_of(chunk, block);
        size_t size = (size_t)(part.stop - part.start) * job->coding.itemsize;
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
                      * chunk->job->coding.itemsize;
        memcpy(wire_of(chunk, block),
               block_of(chunk, step, receive, block, place), size);
        place += size;
    }
}

#endif
