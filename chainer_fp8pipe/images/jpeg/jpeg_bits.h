/* Bits of a JPEG's entropy-coded data, eight bytes at a time.
 *
 * In a file a byte FF among the codes is followed by a byte 00, the stuffing,
 * so that no codes look like a marker (ITU-T T.81, F.1.2.3).  Here it is taken
 * out before bits are read, and put in as they are written.
 */
#ifndef CHAINER_FP8PIPE_JPEG_BITS_H
#define CHAINER_FP8PIPE_JPEG_BITS_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define BIG(x) (x)
#else
#define BIG(x) __builtin_bswap64(x)
#endif

/* Eight bytes, the first one uppermost. */
static inline u64 load(const u8 *from)
{
    u64 x;
    memcpy(&x, from, 8);
    return BIG(x);
}

static inline void store(u8 *to, u64 x)
{
    x = BIG(x);
    memcpy(to, &x, 8);
}

/* Copies codes without their stuffing, up to `end` or the first marker.
 *
 * Where the copies of the bytes FF are is written to `marks`, unless that is
 * NULL.  `to` has room for every byte, `marks` for half of them and one.
 * Returns the number of copied bytes; `*from` is left where it stopped. */
static size_t unstuff(const u8 **from, const u8 *end, u8 *to, u32 *marks)
{
    const u8 *at = *from, *start = to;
    while (at < end) {
        const u8 *found = memchr(at, 0xFF, (size_t)(end - at));
        size_t length = (size_t)((found != NULL ? found : end) - at);
        memcpy(to, at, length);
        at += length, to += length;
        if (found == NULL || (end - at >= 2 && at[1] != 0))
            break;                  /* the end; a marker */
        if (marks != NULL)
            *marks++ = (u32)(to - start);
        *to++ = 0xFF;
        at += end - at >= 2 ? 2 : 1;
    }
    *from = at;
    return (size_t)(to - start);
}

/* Copies bytes and puts in the stuffing; returns where the copy ends. */
static u8 *stuff(u8 *to, const u8 *at, const u8 *end)
{
    while (at < end) {
        const u8 *found = memchr(at, 0xFF, (size_t)(end - at));
        const u8 *next = found != NULL ? found + 1 : end;
        memcpy(to, at, (size_t)(next - at));
        to += next - at;
        if (found != NULL)
            *to++ = 0;
        at = next;
    }
    return to;
}

/* Reads bits.  A block has at most 27 + 63 * 31 of them.  Where it has come to
 * is looked at between blocks, so that less than MARGIN bytes behind the data
 * may be read. */
#define MARGIN 272

typedef struct {
    const u8 *at;
    u64 bits;                       /* uppermost first */
    unsigned count;                 /* how many of them count */
} Reader;

/* Bits from `data` on that have been read. */
static inline u64 position(const Reader *r, const u8 *data)
{
    return (u64)(r->at - data) * 8 - r->count;
}

/* Makes at least 56 bits count. */
static inline void refill(Reader *r)
{
    r->bits |= load(r->at) >> r->count;
    r->at += (63 - r->count) / 8;
    r->count |= 56;
}

static inline u32 peek(const Reader *r, unsigned n)
{
    return (u32)(r->bits >> (64 - n));
}

static inline void take(Reader *r, unsigned n)
{
    r->bits <<= n;
    r->count -= n;
}

static inline Reader reader_at(const u8 *data, u64 position)
{
    Reader r = {data + position / 8, 0, 0};
    refill(&r);
    take(&r, position % 8);
    return r;
}

/* Writes bits, without stuffing.  Up to eight bytes beyond `at` are
 * written. */
typedef struct {
    u8 *at;
    u64 bits;                       /* uppermost first; the rest is 0 */
    unsigned count;                 /* 0 to 7 */
} Writer;

/* The lower n bits of x, of which the others are 0; n is 1 to 56. */
static inline void put(Writer *w, u64 x, unsigned n)
{
    u64 bits = w->bits | x << (64 - n) >> w->count;
    unsigned count = w->count + n;
    store(w->at, bits);
    w->at += count / 8;
    w->bits = bits << count / 8 * 8;
    w->count = count % 8;
}

/* Bits `from` to `to` of data that can be read up to eight bytes later. */
static void put_range(Writer *w, const u8 *data, u64 from, u64 to)
{
    while (from < to) {
        if (w->count == 0 && to - from >= 64) {
            const u8 *at = data + from / 8;
            unsigned shift = from % 8;
            u64 words = (to - from) / 64;
            for (u64 i = 0; i < words; i++, at += 8, w->at += 8)
                store(w->at, load(at) << shift | at[8] >> (8 - shift));
            from += 64 * words;
            continue;
        }
        unsigned n = w->count && to - from >= 64 ? 8 - w->count
                     : to - from < 56 ? (unsigned)(to - from) : 56;
        put(w, load(data + from / 8) << from % 8 >> (64 - n), n);
        from += n;
    }
}

#endif
