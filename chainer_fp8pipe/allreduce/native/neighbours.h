/* Messages between ranks of a node that read each other's memory: nothing is
 * copied on the way.
 *
 * Each rank writes one mailbox for each neighbour, a ring of slots.  A slot
 * says where in the writer's memory a message lies, in one piece or by block
 * in the writer's wire; the reader marks it when the message has been used, and
 * only then may its memory change.  Messages of one tag arrive in their order,
 * as MPI's do.
 */
#ifndef CHAINER_FP8PIPE_NEIGHBOURS_H
#define CHAINER_FP8PIPE_NEIGHBOURS_H
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "../../fp8/long_loops.h"

enum { UNUSED, POSTED, USED };

/* In memory that two processes share; a line for each, or they would wait for
 * each other's. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_int state;
    int tag;
    int scattered;        /* blocks lie as far apart as they do in a wire */
    int64_t offset, size; /* bytes, in the writer's memory */
} Mail;

_Static_assert(sizeof(Mail) == CACHE_LINE, "Python reckons with that");

typedef struct {
    int pending; /* 1 until it is through */
    char *data;
    size_t size; /* bytes */
    Mail *mail;  /* that says where it lies; NULL: MPI's */
    int tag;
    int scattered; /* as of Mail */
} Receive;

typedef struct {
    int rank;
    char *memory; /* the other's, as it is mapped here */
    Mail *out, *in;
    unsigned int slots; /* a power of two, more than are ever under way */
    unsigned int sent, oldest, read;
    int **pending;      /* by slot of `out`; NULL: used */
    Mail **arrived;     /* that nothing has asked for */
    Receive **expected; /* that have not arrived */
    unsigned int arrived_count, expected_count;
} Neighbour;

/* Copies to memory that another processor reads next.  A line that both have
 * in their caches takes up to four times as long to write, or not, depending
 * on which cores the system has given to two processes: so it goes past the
 * caches. */
static void stream(char *to, const char *from, size_t size)
{
#ifdef __SSE2__
    size_t head = -(uintptr_t)to % CACHE_LINE;
    head = head < size ? head : size;
    memcpy(to, from, head);
    size_t stop = head + (size - head) / CACHE_LINE * CACHE_LINE;
    for (size_t i = head; i < stop; i += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(void *)(to + i),
                         _mm_loadu_si128((const __m128i *)(from + i)));
    memcpy(to + stop, from + stop, size - stop);
    _mm_sfence(); /* or they might come after the mail */
#else
    memcpy(to, from, size);
#endif
}

static int make_neighbour(Neighbour *of)
{
    of->pending = calloc(of->slots, sizeof *of->pending);
    of->arrived = calloc(of->slots, sizeof *of->arrived);
    of->expected = calloc(of->slots, sizeof *of->expected);
    return of->pending && of->arrived && of->expected ? 0 : -1;
}

static void free_neighbour(Neighbour *of)
{
    free(of->pending);
    free(of->arrived);
    free(of->expected);
}

static int is_quiet(const Neighbour *of)
{
    return of->sent == of->oldest && of->expected_count == 0;
}

/* Sends what lies at an offset of this rank's memory; -1: no slot is free. */
static int post_mail(Neighbour *to, int64_t offset, size_t size, int tag,
                     int scattered, int *pending)
{
    /* A full ring would look like one that has been read. */
    if (to->sent - to->oldest >= to->slots - 1)
        return -1;
    unsigned int slot = to->sent++ & (to->slots - 1);
    Mail *mail = &to->out[slot];
    mail->tag = tag;
    mail->scattered = scattered;
    mail->offset = offset;
    mail->size = (int64_t)size;
    to->pending[slot] = pending;
    ++*pending;
    atomic_store_explicit(&mail->state, POSTED, memory_order_release);
    return 0;
}

/* -1: it is not of the size that was expected. */
static int hand_over(const Neighbour *from, Mail *mail, Receive *receive)
{
    receive->mail = mail;
    receive->data = from->memory + mail->offset;
    receive->scattered = mail->scattered;
    return mail->size == (int64_t)receive->size ? 0 : -1;
}

/* Asks for a message; -1: as above, or there are too many. */
static int expect_mail(Neighbour *from, Receive *receive)
{
    for (unsigned int i = 0; i < from->arrived_count; ++i) {
        Mail *mail = from->arrived[i];
        if (mail->tag != receive->tag)
            continue;
        --from->arrived_count;
        for (; i < from->arrived_count; ++i)
            from->arrived[i] = from->arrived[i + 1];
        return hand_over(from, mail, receive);
    }
    if (from->expected_count == from->slots)
        return -1;
    ++receive->pending;
    from->expected[from->expected_count++] = receive;
    return 0;
}

/* Whoever expects a message gets it, or it waits. */
static int deliver(Neighbour *from, Mail *mail)
{
    for (unsigned int i = 0; i < from->expected_count; ++i) {
        Receive *receive = from->expected[i];
        if (receive->tag != mail->tag)
            continue;
        --from->expected_count;
        for (; i < from->expected_count; ++i)
            from->expected[i] = from->expected[i + 1];
        --receive->pending;
        return hand_over(from, mail, receive);
    }
    from->arrived[from->arrived_count++] = mail;
    return 0;
}

static int is_in_state(Mail *mail, int state)
{
    return atomic_load_explicit(&mail->state, memory_order_acquire) == state;
}

/* Finds out what has come and what has been used. */
static int look_at(Neighbour *of)
{
    for (Mail *mail; mail = &of->in[of->read & (of->slots - 1)],
                     is_in_state(mail, POSTED); ++of->read)
        if (deliver(of, mail) < 0)
            return -1;
    for (unsigned int i = of->oldest; i != of->sent; ++i) {
        int **pending = &of->pending[i & (of->slots - 1)];
        if (*pending && is_in_state(&of->out[i & (of->slots - 1)], USED)) {
            --**pending;
            *pending = NULL;
        }
    }
    while (of->oldest != of->sent
           && of->pending[of->oldest & (of->slots - 1)] == NULL)
        ++of->oldest;
    return 0;
}

/* The message has been used, if it is one of a neighbour's. */
static void give_back(Receive *receive)
{
    if (receive->mail)
        atomic_store_explicit(&receive->mail->state, USED,
                              memory_order_release);
    receive->mail = NULL;
}

#endif
