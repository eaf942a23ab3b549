/* A part of a JPEG as a JPEG of its own, by way of an index.
 *
 * All codes of the part are copied bit by bit but for the first of each
 * component in each row of units, as a row follows upon another one.
 */
#ifndef CHAINER_FP8PIPE_JPEG_CUT_H
#define CHAINER_FP8PIPE_JPEG_CUT_H
#include "jpeg_index.h"

/* In pixels of the image, or in units, from the first to before the last. */
typedef struct {
    unsigned left, top, right, bottom;
} Box;

typedef struct {
    const Header *header;
    const u8 *data;
    const u8 *places;               /* of the groups, and the end */
    unsigned group, groups;         /* units in a group, groups in a row */
    Box box;                        /* groups across, rows of units down */
    u64 bits, longest;              /* of all rows, of the longest one */
} Part;

/* Whether the index can be of this file. */
static int open_index(Part *part, const Header *h, const u8 *data,
                      size_t size, const u8 *index, size_t length)
{
    About found, expected;
    if (length < ENTRY)
        return 0;
    memcpy(&found, index, ENTRY);
    expected = about(h, found.spacing);
    if (found.spacing < 1 || found.spacing > LARGEST_SPACING
        || memcmp(&found, &expected, ENTRY) != 0
        || length != index_size(h, size, found.spacing))
        return 0;
    *part = (Part){.header = h, .data = data, .places = index + ENTRY};
    part->group = group_of(h, found.spacing);
    part->groups = groups_in_row(h, part->group);
    return 1;
}

static Place place_of(const Part *part, unsigned row, unsigned group)
{
    return read_place(part->places
                      + ENTRY * ((size_t)row * part->groups + group));
}

/* Chooses what has all of a box of pixels in it; returns whether the codes are
 * where the index says that they are, inside the file. */
static int choose(Part *part, Box pixels, size_t size)
{
    const Header *h = part->header;
    unsigned width = h->unit_width * part->group;
    if (pixels.left >= pixels.right || pixels.top >= pixels.bottom
        || pixels.right > h->width || pixels.bottom > h->height)
        return 0;
    part->box = (Box){pixels.left / width, pixels.top / h->unit_height,
                      (pixels.right + width - 1) / width,
                      (pixels.bottom + h->unit_height - 1) / h->unit_height};
    u64 last = 8 * (u64)(h->codes - part->data);
    for (unsigned row = part->box.top; row < part->box.bottom; row++) {
        u64 first = place_of(part, row, part->box.left).position;
        u64 end = place_of(part, row, part->box.right).position;
        if (first < last || end < first || end > 8 * (u64)size)
            return 0;
        part->bits += end - first;
        if (end - first > part->longest)
            part->longest = end - first;
        last = end;
    }
    return 1;
}

/* The part's pixels, in the image. */
static Box pixels_of(const Part *part)
{
    const Header *h = part->header;
    unsigned width = h->unit_width * part->group;
    return (Box){part->box.left * width, part->box.top * h->unit_height,
                 smaller(part->box.right * width, h->width),
                 smaller(part->box.bottom * h->unit_height, h->height)};
}

/* By the tables' numbers. */
typedef struct {
    Huffman codes[4];
    Encoder encoders[4];
} Differences;

static int build_differences(const Header *h, Differences *d)
{
    for (unsigned number = 0; number < 4; number++)
        if (h->dc_used >> number & 1) {
            if (!build(&h->dc[number], &d->codes[number]))
                return 0;
            build_encoder(&h->all_dc[number], &d->encoders[number]);
        }
    return 1;
}

/* Copies the codes of one row of units.
 *
 * `dc` has the last DC of each component in the part before the row, and
 * then that at its end.  `unstuffed` has room for the row.  Returns 0 if the
 * codes are not as they should be. */
static int copy_row(const Part *part, const Differences *d, unsigned row,
                    u8 *unstuffed, Writer *w, int *dc)
{
    const Header *h = part->header;
    Place first = place_of(part, row, part->box.left);
    Place end = place_of(part, row, part->box.right);
    const u8 *at = part->data + first.position / 8;
    const u8 *stop = part->data + ((u64)end.position + 7) / 8;
    size_t length = unstuff(&at, stop, unstuffed, NULL);
    if (at != stop)
        return 0;
    memset(unstuffed + length, 0, MARGIN);
    u64 copied = first.position % 8;
    u64 bits = 8 * (u64)length - (8 - end.position % 8) % 8;
    for (unsigned c = 0; c < h->components; c++) {
        u64 start = first.position % 8 + first.offset[c];
        int difference;
        if (start < copied || start >= bits)
            return 0;
        Reader r = reader_at(unstuffed, start);
        if (!read_dc(&r, &d->codes[h->dc_table[c]], &difference))
            return 0;
        difference += first.dc[c] - dc[c];
        if (difference < -2047 || difference > 2047
            || position(&r, unstuffed) > bits)
            return 0;
        put_range(w, unstuffed, copied, start);
        put_difference(w, &d->encoders[h->dc_table[c]], difference);
        copied = position(&r, unstuffed);
    }
    put_range(w, unstuffed, copied, bits);
    memcpy(dc, end.dc, sizeof(end.dc));
    return 1;
}

/* Upper limit of the bytes of the part's codes, without stuffing. */
static size_t codes_size(const Part *part)
{
    size_t rows = part->box.bottom - part->box.top;
    /* Differences have 27 bits at most. */
    return (size_t)(part->bits / 8) + rows * COMPONENTS * 4 + 2;
}

/* Upper limit of what cut writes: at worst all codes are bytes FF. */
static size_t part_size(const Part *part)
{
    return header_size(part->header) + 2 * codes_size(part) + 2;
}

/* Writes the part as a file; returns its size, 0 if that cannot be, or -1
 * without memory. */
static ptrdiff_t cut(const Part *part, u8 *out)
{
    const Header *h = part->header;
    Box pixels = pixels_of(part);
    int dc[COMPONENTS] = {0, 0, 0};
    Differences d;
    u8 *unstuffed = malloc((size_t)(part->longest / 8) + 2 + MARGIN);
    u8 *codes = malloc(codes_size(part) + 8);
    Writer w = {codes, 0, 0};
    ptrdiff_t done = unstuffed != NULL && codes != NULL ? 1 : -1;
    if (done == 1 && !build_differences(h, &d))
        done = 0;
    for (unsigned row = part->box.top;
         done == 1 && row < part->box.bottom; row++)
        done = copy_row(part, &d, row, unstuffed, &w, dc);
    if (done == 1) {
        if (w.count)                /* the last byte ends in ones (F.1.2.3) */
            put(&w, (1u << (8 - w.count)) - 1, 8 - w.count);
        u8 *to = write_header(h, out, pixels.right - pixels.left,
                              pixels.bottom - pixels.top);
        to = stuff(to, codes, w.at);
        *to++ = 0xFF;
        *to++ = 0xD9;
        done = to - out;
    }
    free(unstuffed);
    free(codes);
    return done;
}

#endif
