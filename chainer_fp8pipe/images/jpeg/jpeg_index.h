/* The index of a JPEG: where its codes are, every few units.
 *
 * Twelve bytes about the image; as many for every group of consecutive units
 * in a row of units, the last of which may have fewer; and as many for the
 * end.  See Place for what is known of the beginning of a group.
 */
#ifndef CHAINER_FP8PIPE_JPEG_INDEX_H
#define CHAINER_FP8PIPE_JPEG_INDEX_H
#include <stdlib.h>

#include "jpeg_header.h"

#define LARGEST_FILE (UINT32_C(1) << 29)    /* bytes; 32 bits for a position */
#define LARGEST_SPACING 1024
#define ENTRY 12                            /* bytes */

typedef struct {
    u32 position;                   /* in the file, in bits */
    u32 offset[COMPONENTS];         /* from there to the component's first
                                     * block, in bits without stuffing */
    int dc[COMPONENTS];             /* the last before it; -1024 to 1023 */
} Place;

static void write_place(u8 *to, const Place *p)
{
    u64 rest = p->offset[1] << 16 | p->offset[2];
    for (unsigned c = 0; c < COMPONENTS; c++)
        rest = rest << 11 | (u64)(p->dc[c] + 1024);
    memcpy(to, &p->position, 4);
    memcpy(to + 4, &rest, 8);
}

/* Any bytes give DCs within their range; positions are to be checked. */
static Place read_place(const u8 *at)
{
    Place p;
    u64 rest;
    memcpy(&p.position, at, 4);
    memcpy(&rest, at + 4, 8);
    for (int c = COMPONENTS - 1; c >= 0; c--, rest >>= 11)
        p.dc[c] = (int)(rest & 2047) - 1024;
    p.offset[0] = 0;
    p.offset[1] = (u32)(rest >> 16);
    p.offset[2] = rest & 0xFFFF;
    return p;
}

/* What an index has about the image. */
typedef struct {
    u16 width, height, spacing, zero[3];
} About;

static About about(const Header *h, unsigned spacing)
{
    return (About){(u16)h->width, (u16)h->height, (u16)spacing, {0, 0, 0}};
}

static u32 smaller(u32 a, u32 b)
{
    return a < b ? a : b;
}

/* Units of a group, for groups about `spacing` pixels wide. */
static unsigned group_of(const Header *h, unsigned spacing)
{
    return spacing > h->unit_width ? spacing / h->unit_width : 1;
}

static unsigned groups_in_row(const Header *h, unsigned group)
{
    return (h->columns + group - 1) / group;
}

/* By the numbers of the tables; only what the scan uses is there. */
typedef struct {
    Huffman dc[4], ac[4];
} Codes;

static int build_codes(const Header *h, Codes *codes)
{
    for (unsigned number = 0; number < 4; number++)
        if ((h->dc_used >> number & 1
             && !build(&h->dc[number], &codes->dc[number]))
            || (h->ac_used >> number & 1
                && !build(&h->ac[number], &codes->ac[number])))
            return 0;
    return 1;
}

typedef struct {
    Codes codes;
    Several several[4];
} Tables;

static int build_tables(const Header *h, Tables *t)
{
    if (!build_codes(h, &t->codes))
        return 0;
    for (unsigned number = 0; number < 4; number++)
        if (h->ac_used >> number & 1)
            build_several(&t->codes.ac[number], &t->several[number]);
    return 1;
}

/* Bytes of an index; 0 if there is none of this file. */
static size_t index_size(const Header *h, size_t size, unsigned spacing)
{
    u64 units = (u64)h->columns * h->rows;
    /* No block has less than two bits.  A few bytes can claim many. */
    if (size >= LARGEST_FILE || units * h->blocks * 2 > (u64)size * 8)
        return 0;
    return ENTRY * ((size_t)groups_in_row(h, group_of(h, spacing)) * h->rows
                    + 2);
}

/* Reads the next unit; 0 if its codes are not as they should be.
 *
 * `place` is where it begins, but for the offsets, which are found; its DCs
 * become those of this unit. */
static int skip_unit(Reader *r, const Header *h, const Tables *t,
                     const u8 *codes, const u8 *end, Place *place)
{
    u64 start = position(r, codes);
    for (unsigned b = 0, seen = 0; b < h->blocks; b++) {
        unsigned c = h->component_of[b], ac = h->ac_table[c];
        int difference;
        if (c == seen)
            place->offset[seen++] = (u32)(position(r, codes) - start);
        if (r->at > end
            || !skip_block(r, &t->codes.dc[h->dc_table[c]],
                           &t->codes.ac[ac], &t->several[ac], &difference))
            return 0;
        place->dc[c] += difference;
        if (place->dc[c] < -1024 || place->dc[c] > 1023)
            return 0;
    }
    return 1;
}

/* Walks over all codes; 0 if they are not as they should be.
 *
 * `codes` are `length` bytes without stuffing, which begin `start` bytes into
 * the file; `marks` tells which of them were followed by stuffing. */
static int walk(const Header *h, const Tables *t, const u8 *codes,
                size_t length, size_t start, const u32 *marks,
                unsigned group, u8 *out)
{
    Reader r = reader_at(codes, 0);
    const u8 *end = codes + length + 8;     /* it reads ahead */
    Place place = {0}, unit = {0};
    for (unsigned row = 0; row < h->rows; row++)
        for (unsigned column = 0; column < h->columns; column++) {
            u64 at = position(&r, codes);
            place = unit;
            if (!skip_unit(&r, h, t, codes, end, &unit))
                return 0;
            if (column % group)
                continue;
            for (; *marks < at / 8; marks++)
                start++;
            place.position = (u32)(at + 8 * start);
            memcpy(place.offset, unit.offset, sizeof(unit.offset));
            write_place(out, &place);
            out += ENTRY;
        }
    u64 at = position(&r, codes);
    for (; *marks < at / 8; marks++)
        start++;
    unit.position = (u32)(at + 8 * start);
    write_place(out, &unit);
    return at <= length * 8 && length * 8 - at < 8;
}

/* Writes an index; returns 1, 0 if there is no index, or -1 without memory. */
static int make_index(const Header *h, const u8 *data, size_t size,
                      unsigned spacing, u8 *out)
{
    size_t start = (size_t)(h->codes - data), most = size - start;
    Tables t;
    u8 *codes = malloc(most + MARGIN);
    u32 *marks = malloc((most / 2 + 2) * sizeof(*marks));
    int done = codes != NULL && marks != NULL ? 0 : -1;
    if (done == 0 && build_tables(h, &t)) {
        const u8 *at = h->codes;
        size_t length = unstuff(&at, data + size, codes, marks);
        memset(codes + length, 0, MARGIN);
        /* Every mark is a byte that was left out; no byte is behind this. */
        marks[(size_t)(at - h->codes) - length] = UINT32_MAX;
        About image = about(h, spacing);
        memcpy(out, &image, ENTRY);
        /* The end of the image must follow, and nothing else. */
        if (data + size - at >= 2 && at[1] == 0xD9)
            done = walk(h, &t, codes, length, start, marks,
                        group_of(h, spacing), out + ENTRY);
    }
    free(codes);
    free(marks);
    return done;
}

#endif
