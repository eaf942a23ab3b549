/* MPI through the addresses of its functions.
 *
 * The library is the one that mpi4py has loaded, whichever it is, so nothing
 * of it is needed to build this.  Handles are ints in some libraries and
 * pointers in others: an argument's register is the same for both, and in
 * arrays their size says which.
 */
#ifndef CHAINER_FP8PIPE_MESSAGES_H
#define CHAINER_FP8PIPE_MESSAGES_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NO_MEMORY = -1, OUT_OF_STEP = -2 };

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
    int error; /* of MPI, or one of those below */
    int found; /* how many statuses the last look has filled in */
} Messages;

static int make_room(Messages *messages)
{
    int room = messages->room ? 2 * messages->room : 64;
    size_t n = (size_t)room;
    char *requests = realloc(messages->requests, n * messages->request_size);
    messages->requests = requests ? requests : messages->requests;
    char *statuses = realloc(messages->statuses, n * messages->status_size);
    messages->statuses = statuses ? statuses : messages->statuses;
    int *indices = realloc(messages->indices, n * sizeof *indices);
    messages->indices = indices ? indices : messages->indices;
    int **pending = realloc(messages->pending, n * sizeof *pending);
    messages->pending = pending ? pending : messages->pending;
    if (!requests || !statuses || !indices || !pending) {
        messages->error = NO_MEMORY;
        return -1;
    }
    messages->room = room;
    return 0;
}

/* Starts a message of `size` bytes, fewer than 2^31; -1 if that fails. */
static int transmit(Messages *messages, Transmit *function, void *data,
                    size_t size, int rank, int tag, int *pending)
{
    if (messages->count == messages->room && make_room(messages) < 0)
        return -1;
    size_t place = (size_t)messages->count;
    messages->error = function(
        data, (int)size, messages->byte, rank, tag, messages->comm,
        messages->requests + place * messages->request_size);
    if (messages->error != 0)
        return -1;
    messages->pending[place] = pending;
    ++*pending;
    ++messages->count;
    return 0;
}

/* Finds out what is through; -1 if MPI says that something has failed. */
static int look(Messages *messages)
{
    int found = 0;
    messages->found = 0;
    if (messages->count == 0)
        return 0;
    messages->error = messages->testsome(
        messages->count, messages->requests, &found, messages->indices,
        messages->statuses);
    messages->found = found > 0 && found <= messages->count ? found : 0;
    if (messages->error != 0)
        return -1;
    for (int i = 0; i < found; ++i) {
        int **pending = &messages->pending[messages->indices[i]];
        --**pending;
        *pending = NULL;
    }
    if (found <= 0)
        return 0;
    int kept = 0;
    size_t size = messages->request_size;
    for (int i = 0; i < messages->count; ++i) {
        if (messages->pending[i] == NULL)
            continue;
        messages->pending[kept] = messages->pending[i];
        memmove(messages->requests + (size_t)kept * size,
                messages->requests + (size_t)i * size, size);
        ++kept;
    }
    messages->count = kept;
    return 0;
}

static void free_messages(Messages *messages)
{
    free(messages->requests);
    free(messages->statuses);
    free(messages->indices);
    free(messages->pending);
}

#endif
