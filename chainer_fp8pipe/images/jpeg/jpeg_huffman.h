/* Huffman codes of a JPEG: as a file defines them, read and written.
 *
 * ITU-T T.81, Annex C (codes from lengths) and F.2.2.3 (reading).
 */
#ifndef CHAINER_FP8PIPE_JPEG_HUFFMAN_H
#define CHAINER_FP8PIPE_JPEG_HUFFMAN_H
#include "jpeg_bits.h"

#define LOOK 11                     /* bits that are looked up at once */
#define LARGEST_DC 11               /* size of a difference of 8 bits' DC */
/* Instead of how many coefficients are skipped: more than other codes skip
 * that are looked up at once, 63 + 16, from any place in a block. */
#define END_OF_BLOCK 160
#define NO_CODE 255

/* As a file has it: how many codes of each length, and what they mean. */
typedef struct {
    int defined;
    u8 counts[17];
    unsigned length;
    u8 symbols[256];
} Definition;

typedef struct {
    u16 one[1 << LOOK];             /* symbol << 8 | length, or 0: longer */
    u32 limit[17];                  /* first value above the codes so long */
    int offset[17];                 /* from a code to its place in symbols */
    const u8 *symbols;
} Huffman;

/* The codes that are whole within LOOK bits, one after the other, with the
 * extra bits of the last: coefficients << 8 | bits, at most LOOK + 15. */
typedef struct {
    u16 entry[1 << LOOK];
} Several;

/* Returns whether the codes are possible.  No code is all ones. */
static int build(const Definition *d, Huffman *h)
{
    u32 code = 0;
    unsigned place = 0;
    if (!d->defined)
        return 0;
    memset(h->one, 0, sizeof(h->one));
    h->symbols = d->symbols;
    for (unsigned length = 1; length <= 16; length++, code <<= 1) {
        h->offset[length] = (int)place - (int)code;
        for (unsigned i = 0; i < d->counts[length]; i++, code++, place++)
            if (length <= LOOK && code < 1u << length) {
                u32 first = code << (LOOK - length);
                u16 entry = (u16)(d->symbols[place] << 8 | length);
                for (u32 j = 0; j < 1u << (LOOK - length); j++)
                    h->one[first + j] = entry;
            }
        h->limit[length] = code;
        if (code >= 1u << length && d->counts[length])
            return 0;
    }
    return 1;
}

/* The symbol of the next code << 8 | its length; 0 if there is none. */
static inline u32 next_code(const Reader *r, const Huffman *h)
{
    u32 entry = h->one[peek(r, LOOK)];
    if (entry)
        return entry;
    for (unsigned length = LOOK + 1; length <= 16; length++) {
        u32 code = peek(r, length);
        if (code < h->limit[length])
            return (u32)h->symbols[(int)code + h->offset[length]] << 8
                   | length;
    }
    return 0;
}

static void build_several(const Huffman *h, Several *s)
{
    for (u32 i = 0; i < 1u << LOOK; i++) {
        unsigned bits = 0, skipped = 0;
        while (bits < LOOK && skipped < 64) {
            u32 entry = h->one[(i << bits) & ((1u << LOOK) - 1)];
            unsigned length = entry & 0xFF, symbol = entry >> 8;
            if (!length || bits + length > LOOK
                || (symbol % 16 == 0 && symbol != 0 && symbol != 0xF0))
                break;
            bits += length + symbol % 16;
            skipped += symbol ? symbol / 16 + 1 : END_OF_BLOCK;
            if (!symbol)
                break;
        }
        s->entry[i] = (u16)((bits ? skipped : NO_CODE) << 8 | bits);
    }
}

/* Reads some codes at once, if they end with the block or before. */
static inline int skip_several(Reader *r, const Several *s, unsigned *k)
{
    unsigned entry = s->entry[peek(r, LOOK)], next = *k + (entry >> 8);
    if (next > 64 && next - (END_OF_BLOCK + 1) >= 63)
        return 0;
    take(r, entry & 0xFF);
    *k = next;
    return 1;
}

/* Reads the codes of 63 coefficients; 0 if they are not as they should be. */
static inline int skip_coefficients(Reader *r, const Huffman *h,
                                    const Several *s)
{
    unsigned k = 1;
    while (k < 64) {
        refill(r);              /* enough for two times LOOK + 15 bits */
        if (skip_several(r, s, &k) && (k >= 64 || skip_several(r, s, &k)))
            continue;
        refill(r);
        u32 entry = next_code(r, h);
        unsigned symbol = entry >> 8;
        if (!entry || (symbol % 16 == 0 && symbol != 0 && symbol != 0xF0))
            return 0;
        take(r, (entry & 0xFF) + symbol % 16);
        k += symbol ? symbol / 16 + 1 : END_OF_BLOCK;
    }
    return k == 64 || k > END_OF_BLOCK;
}

/* Reads the difference of a block's DC to the last; 0 as above. */
static inline int read_dc(Reader *r, const Huffman *h, int *difference)
{
    refill(r);
    u32 entry = next_code(r, h);
    unsigned size = entry >> 8;
    if (!entry || size > LARGEST_DC)
        return 0;
    take(r, entry & 0xFF);
    *difference = 0;
    if (size) {
        int value = (int)peek(r, size);
        *difference = value >> (size - 1) ? value : value - (1 << size) + 1;
        take(r, size);
    }
    return 1;
}

/* Reads the codes of one block. */
static inline int skip_block(Reader *r, const Huffman *dc, const Huffman *ac,
                             const Several *s, int *difference)
{
    return read_dc(r, dc, difference) && skip_coefficients(r, ac, s);
}

/* Adds codes for the sizes of differences that have none.
 *
 * They are longer than the others, or as long and come after them, so that
 * these stay as they are.  Returns whether 16 bits are enough. */
static int complete(Definition *d)
{
    u8 missing[LARGEST_DC + 1];
    unsigned number = 0, length = 1;
    u32 used = 0;                   /* in codes of `length` bits */
    for (u8 size = 0; size <= LARGEST_DC; size++)
        if (!memchr(d->symbols, size, d->length))
            missing[number++] = size;
    if (!number)
        return 1;
    for (unsigned i = 1; i <= 16; i++)
        if (d->counts[i])
            length = i;
    for (unsigned i = 1; i <= length; i++)
        used += (u32)d->counts[i] << (length - i);
    while (length <= 16 && used + number >= 1u << length)
        length++, used <<= 1;
    if (length > 16 || d->length + number > 255)
        return 0;
    memcpy(d->symbols + d->length, missing, number);
    d->counts[length] = (u8)(d->counts[length] + number);
    d->length += number;
    return 1;
}

/* Codes and lengths for writing, by size. */
typedef struct {
    u16 code[LARGEST_DC + 1];
    u8 length[LARGEST_DC + 1];
} Encoder;

static void build_encoder(const Definition *d, Encoder *e)
{
    u32 code = 0;
    unsigned place = 0;
    for (unsigned length = 1; length <= 16; length++, code <<= 1)
        for (unsigned i = 0; i < d->counts[length]; i++, code++, place++)
            if (d->symbols[place] <= LARGEST_DC) {
                e->code[d->symbols[place]] = (u16)code;
                e->length[d->symbols[place]] = (u8)length;
            }
}

/* -2047 <= difference <= 2047 */
static inline void put_difference(Writer *w, const Encoder *e, int difference)
{
    u32 most = (u32)(difference < 0 ? -difference : difference);
    unsigned size = most ? 32 - (unsigned)__builtin_clz(most) : 0;
    put(w, e->code[size], e->length[size]);
    if (size)
        put(w, (u32)(difference < 0 ? difference - 1 : difference)
                   & ((1u << size) - 1), size);
}

#endif
