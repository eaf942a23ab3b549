/* How messages travel: through MPI, or through memory that ranks of a node
 * share.
 *
 * MPI is called through the addresses of its functions.  The library is the
 * one that mpi4py has loaded, whichever it is, so nothing of it is needed to
 * build this.  Handles are ints in some libraries and pointers in others: an
 * argument's register is the same for both, and in arrays their size says
 * which.
 *
 * In shared memory nothing is copied on the way.  For each message that a
 * chunk of this rank can have for a neighbour there is a Mail, which says
 * where in the sender's memory the message lies.  The reader clears it when
 * the message has been used, and only then may that memory change.  A chunk
 * ends when all that it has sent has been used, so whoever takes its seat
 * finds its Mails empty: messages can be used in any order, as late as the
 * reader likes.
 */
#ifndef CHAINER_FP8PIPE_MESSAGES_H
#define CHAINER_FP8PIPE_MESSAGES_H
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "../formats/loops.h"

enum { NO_MEMORY = -1, OUT_OF_STEP = -2 }; /* beside MPI's errors */

typedef int Transmit(void *data, int count, intptr_t datatype, int rank,
                     int tag, intptr_t comm, void *request);
typedef int Testsome(int count, void *requests, int *found, int *indices,
                     void *statuses);

/* What is under way.  Of each message, `pending` points to a number that is
 * one less when the message is through. */
typedef struct {
    Transmit *send, *receive;
    Testsome *testsome;
    size_t request_size, status_size;
    intptr_t comm, byte;
    int count, room;
    char *requests, *statuses;
    int *indices;
    int **pending;
    int error;
    int found; /* how many statuses the last look has filled in */
} Messages;

/* Makes an array longer; 0 if there is no memory. */
static int grow(void *array, size_t size)
{
    void *grown = realloc(*(void **)array, size);
    if (grown)
        *(void **)array = grown;
    return grown != NULL;
}

/* Starts a message of `size` bytes, fewer than 2^31; -1 if that fails. */
static int transmit(Messages *m, Transmit *function, void *data, size_t size,
                    int rank, int tag, int *pending)
{
    if (m->count == m->room) {
        size_t n = m->room ? 2 * (size_t)m->room : 64;
        if (!grow(&m->requests, n * m->request_size)
            || !grow(&m->statuses, n * m->status_size)
            || !grow(&m->indices, n * sizeof *m->indices)
            || !grow(&m->pending, n * sizeof *m->pending)) {
            m->error = NO_MEMORY;
            return -1;
        }
        m->room = (int)n;
    }
    m->error = function(data, (int)size, m->byte, rank, tag, m->comm,
                        m->requests + (size_t)m->count * m->request_size);
    if (m->error != 0)
        return -1;
    m->pending[m->count++] = pending;
    ++*pending;
    return 0;
}

/* Finds out what is through; -1 if MPI says that something has failed. */
static int look(Messages *m)
{
    int found = 0, kept = 0;
    m->found = 0;
    if (m->count == 0)
        return 0;
    m->error = m->testsome(m->count, m->requests, &found, m->indices,
                           m->statuses);
    m->found = found > 0 && found <= m->count ? found : 0;
    if (m->error != 0)
        return -1;
    if (m->found == 0)
        return 0;
    for (int i = 0; i < found; ++i) {
        int **pending = &m->pending[m->indices[i]];
        --**pending;
        *pending = NULL;
    }
    for (int i = 0; i < m->count; ++i) {
        if (m->pending[i] == NULL)
            continue;
        m->pending[kept] = m->pending[i];
        memmove(m->requests + (size_t)kept * m->request_size,
                m->requests + (size_t)i * m->request_size, m->request_size);
        ++kept;
    }
    m->count = kept;
    return 0;
}

static void free_messages(Messages *m)
{
    free(m->requests);
    free(m->statuses);
    free(m->indices);
    free(m->pending);
}

/* In memory that two processes share; a line for each, or they would wait for
 * each other's. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_int posted;
    int scattered;        /* blocks lie as far apart as in the wire */
    int64_t offset, size; /* bytes, in the sender's memory */
} Mail;

_Static_assert(sizeof(Mail) == CACHE_LINE, "memory.py reckons with that");

typedef struct {
    int rank;
    char *memory; /* the other's, as it is mapped here */
    Mail *in, *out;
} Neighbour;

typedef struct {
    int pending; /* of MPI's: 1 until it is through */
    char *data;
    size_t size; /* bytes */
    int scattered; /* as of Mail */
    Mail *mail;  /* NULL: it comes through MPI, or is empty */
} Receive;

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

static void set_posted(Mail *mail, int posted)
{
    atomic_store_explicit(&mail->posted, posted, memory_order_release);
}

#endif
