/* Messages between ranks of a node that read each other's memory: nothing is
 * copied on the way.
 *
 * Each rank writes one mailbox for each neighbour, with a slot for every
 * message that its chunks under way can have for that neighbour.  A slot says
 * where in the writer's memory a message lies, in one piece or by block in the
 * writer's wire.  The reader clears it when the message has been used, and only
 * then may its memory change.
 *
 * A chunk ends when all that it has sent has been used, so whoever takes its
 * seat finds its slots empty.  Messages can be used in any order, as late as
 * the reader likes.
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

#include "../../formats/loops.h"

/* In memory that two processes share; a line for each, or they would wait for
 * each other's. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_int posted;
    int scattered;        /* blocks lie as far apart as they do in a wire */
    int64_t offset, size; /* bytes, in the writer's memory */
} Mail;

_Static_assert(sizeof(Mail) == CACHE_LINE, "Python reckons with that");

typedef struct {
    int pending; /* of MPI's: 1 until it is through */
    char *data;
    size_t size; /* bytes */
    Mail *mail;  /* that says where it lies, or will; NULL: MPI's */
    int scattered; /* as of Mail */
} Receive;

typedef struct {
    int rank;
    char *memory; /* the other's, as it is mapped here */
    Mail *out, *in;
    unsigned int slots;
    unsigned int sends, receives; /* slots that are given to lanes */
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

static int is_posted(Mail *mail)
{
    return atomic_load_explicit(&mail->posted, memory_order_acquire);
}

/* Sends what lies at an offset of this rank's memory. */
static void post_mail(Mail *mail, int64_t offset, size_t size, int scattered)
{
    mail->scattered = scattered;
    mail->offset = offset;
    mail->size = (int64_t)size;
    atomic_store_explicit(&mail->posted, 1, memory_order_release);
}

/* Finds out where a message lies that has been posted; -1: it is not of the
 * size that was expected. */
static int open_mail(const Neighbour *from, Receive *receive)
{
    receive->data = from->memory + receive->mail->offset;
    receive->scattered = receive->mail->scattered;
    return receive->mail->size == (int64_t)receive->size ? 0 : -1;
}

/* The message has been used, if it is one of a neighbour's. */
static void give_back(Receive *receive)
{
    if (receive->mail)
        atomic_store_explicit(&receive->mail->posted, 0,
                              memory_order_release);
    receive->mail = NULL;
}

#endif
