/* The head of a JPEG whose codes can be indexed, read and written.
 *
 * Such a file has one scan of all components, baseline or extended
 * sequential, of 8 bits, without restart markers.  What is unusual, or wrong,
 * is not looked into: such a file has no index.
 */
#ifndef CHAINER_FP8PIPE_JPEG_HEADER_H
#define CHAINER_FP8PIPE_JPEG_HEADER_H
#include "jpeg_huffman.h"

#define COMPONENTS 3
#define BLOCKS 10                   /* of a unit, at most (B.2.3) */
#define LARGEST_SIDE 65500          /* of libjpeg */
#define COPIED 16                   /* segments, at most */

/* From its marker on. */
typedef struct {
    const u8 *at;
    size_t size;
} Segment;

typedef struct {
    unsigned width, height, components;
    unsigned unit_width, unit_height;       /* pixels */
    unsigned columns, rows;                 /* units */
    unsigned blocks;                        /* of a unit */
    u8 component_of[BLOCKS];
    u8 dc_table[COMPONENTS], ac_table[COMPONENTS];
    unsigned dc_used, ac_used;              /* bits: which tables */
    Definition dc[4], ac[4];
    Definition all_dc[4];                   /* with codes for all sizes */
    Segment frame, scan, copied[COPIED];
    unsigned copies;
    const u8 *codes;                        /* where they begin */
} Header;

static unsigned two_bytes(const u8 *at)
{
    return (unsigned)at[0] << 8 | at[1];
}

/* DHT (B.2.4.2) */
static int read_tables(Header *h, Segment s)
{
    const u8 *at = s.at + 4, *end = s.at + s.size;
    while (at < end) {
        if (end - at < 17 || (at[0] & ~0x13))
            return 0;
        Definition *d = (at[0] >> 4 ? h->ac : h->dc) + at[0] % 16;
        memset(d, 0, sizeof(*d));
        d->defined = 1;
        for (unsigned i = 1; i <= 16; i++)
            d->length += d->counts[i] = at[i];
        at += 17;
        if (d->length > 256 || (size_t)(end - at) < d->length)
            return 0;
        memcpy(d->symbols, at, d->length);
        at += d->length;
    }
    return 1;
}

/* SOF0 and SOF1 (B.2.2) */
static int read_frame(Header *h, Segment s)
{
    if (h->frame.at != NULL || s.size < 10)
        return 0;
    const u8 *at = s.at + 4;
    unsigned widest = 1, highest = 1;
    h->frame = s;
    h->height = two_bytes(at + 1);
    h->width = two_bytes(at + 3);
    h->components = at[5];
    if (at[0] != 8 || h->height == 0 || h->height > LARGEST_SIDE
        || h->width == 0 || h->width > LARGEST_SIDE
        || (h->components != 1 && h->components != 3)
        || s.size != 10 + 3 * h->components)
        return 0;
    for (unsigned c = 0; c < h->components; c++) {
        unsigned across = at[7 + 3 * c] >> 4, down = at[7 + 3 * c] % 16;
        if (across < 1 || across > 4 || down < 1 || down > 4)
            return 0;
        if (h->components == 1)         /* a unit is a block (A.2.2) */
            across = down = 1;
        if (h->blocks + across * down > BLOCKS)
            return 0;
        memset(h->component_of + h->blocks, (int)c, across * down);
        h->blocks += across * down;
        widest = across > widest ? across : widest;
        highest = down > highest ? down : highest;
    }
    h->unit_width = 8 * widest;
    h->unit_height = 8 * highest;
    h->columns = (h->width + h->unit_width - 1) / h->unit_width;
    h->rows = (h->height + h->unit_height - 1) / h->unit_height;
    return 1;
}

/* SOS (B.2.3): all components, in the frame's order */
static int read_scan(Header *h, Segment s)
{
    if (h->frame.at == NULL || s.size != 8 + 2 * h->components
        || s.at[4] != h->components)
        return 0;
    const u8 *at = s.at + 5, *end = s.at + s.size - 3;
    for (unsigned c = 0; c < h->components; c++, at += 2) {
        for (unsigned other = 0; other <= c; other++)
            if ((h->frame.at[10 + 3 * other] == at[0]) != (other == c))
                return 0;
        h->dc_table[c] = at[1] >> 4;
        h->ac_table[c] = at[1] % 16;
        if (h->dc_table[c] > 3 || h->ac_table[c] > 3)
            return 0;
        unsigned dc = h->dc_table[c], ac = h->ac_table[c];
        h->all_dc[dc] = h->dc[dc];
        if (!h->dc[dc].defined || !h->ac[ac].defined
            || !complete(&h->all_dc[dc]))
            return 0;
        h->dc_used |= 1u << dc;
        h->ac_used |= 1u << ac;
    }
    h->scan = s;
    h->codes = s.at + s.size;
    return end[0] == 0 && end[1] == 63 && end[2] == 0;
}

/* Keeps a segment for the head of parts; not more of it than `size`. */
static int keep(Header *h, Segment s, size_t size)
{
    if (h->copies == COPIED)
        return 0;
    if (s.size > size)
        s.size = size;
    h->copied[h->copies++] = s;
    return 1;
}

static int read_segment(Header *h, Segment s)
{
    size_t size = s.size - 4;
    switch (s.at[1]) {
    case 0xC0: case 0xC1:
        return read_frame(h, s);
    case 0xC4:
        return read_tables(h, s);
    case 0xDA:
        return read_scan(h, s);
    case 0xDB:
        return keep(h, s, s.size);
    case 0xDD:                      /* restart markers: none, if it says 0 */
        return size == 2 && two_bytes(s.at + 4) == 0;
    /* What these two say decides about colours; thumbnails do not. */
    case 0xE0:
        return size < 14 || memcmp(s.at + 4, "JFIF", 5) != 0
               || keep(h, s, 4 + 14);
    case 0xEE:
        return size < 12 || memcmp(s.at + 4, "Adobe", 5) != 0
               || keep(h, s, 4 + 12);
    default:                        /* other applications, and comments */
        return (s.at[1] & 0xF0) == 0xE0 || s.at[1] == 0xFE;
    }
}

/* Reads all down to the scan; 0 if the file is not as said above. */
static int read_header(Header *h, const u8 *data, size_t size)
{
    const u8 *at = data, *end = data + size;
    memset(h, 0, sizeof(*h));
    if (size < 2 || at[0] != 0xFF || at[1] != 0xD8)
        return 0;
    at += 2;
    while (h->codes == NULL) {
        if (end - at < 4 || at[0] != 0xFF)
            return 0;
        if (at[1] == 0xFF) {        /* fills */
            at++;
            continue;
        }
        Segment s = {at, 2 + two_bytes(at + 2)};
        if (s.size < 4 || (size_t)(end - at) < s.size || !read_segment(h, s))
            return 0;
        at += s.size;
    }
    return 1;
}

static u8 *write_segment(u8 *to, Segment s)
{
    memcpy(to, s.at, s.size);
    to[2] = (u8)((s.size - 2) >> 8);        /* it may have become shorter */
    to[3] = (u8)(s.size - 2);
    return to + s.size;
}

static u8 *write_table(u8 *to, u8 number, const Definition *d)
{
    u8 head[5] = {0xFF, 0xC4, (u8)((19 + d->length) >> 8),
                  (u8)(19 + d->length), number};
    memcpy(to, head, 5);
    memcpy(to + 5, d->counts + 1, 16);
    memcpy(to + 21, d->symbols, d->length);
    return to + 21 + d->length;
}

/* Upper limit of what write_header writes. */
static size_t header_size(const Header *h)
{
    size_t size = 2 + h->frame.size + h->scan.size
                  + 2 * COMPONENTS * (21 + 256);
    for (unsigned i = 0; i < h->copies; i++)
        size += h->copied[i].size;
    return size;
}

/* The head of a file of another size; returns where it ends. */
static u8 *write_header(const Header *h, u8 *to, unsigned width,
                        unsigned height)
{
    *to++ = 0xFF;
    *to++ = 0xD8;
    for (unsigned i = 0; i < h->copies; i++)
        to = write_segment(to, h->copied[i]);
    u8 *frame = to;
    to = write_segment(to, h->frame);
    frame[5] = (u8)(height >> 8), frame[6] = (u8)height;
    frame[7] = (u8)(width >> 8), frame[8] = (u8)width;
    for (u8 number = 0; number < 4; number++) {
        if (h->dc_used >> number & 1)
            to = write_table(to, number, &h->all_dc[number]);
        if (h->ac_used >> number & 1)
            to = write_table(to, 0x10 | number, &h->ac[number]);
    }
    return write_segment(to, h->scan);
}

#endif
