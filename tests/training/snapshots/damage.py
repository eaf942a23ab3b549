"""Snapshots that are damaged, or crafted to do harm, from a seed.

Damage of the first kind changes bytes.  That of the second takes the file
apart and writes it anew with one thing wrong and every CRC right, as somebody
would who wants it to be read.
"""
import pickle
import struct
import zlib

from chainer_fp8pipe.training.snapshots.array_header import header_of
from chainer_fp8pipe.training.snapshots.plain_values import to_json
from chainer_fp8pipe.training.snapshots.snapshot_file import (
    digest,
    plan,
    write,
)

import numpy

#: What code in a file would leave here.
HARM = []


class Harmful:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return HARM.append, ('code of a file was run',)


def states():
    """Small states of two ranks with every kind of value."""
    random = numpy.random.RandomState(3)
    layer = random.rand(5, 4).astype('f')
    return [{
        'trainer/updater/model:main/l/W': layer,
        'trainer/updater/model:main/l/b': numpy.zeros(0, 'f'),
        'trainer/updater/iteration': numpy.array(7),
        'trainer/updater/optimizer:main/l/W/m': random.rand(20),
        'trainer/extensions/LogReport/_log': numpy.array('[{"a": 1.5}]'),
        'optimizer/main/class': numpy.array('Adam'),
        'trainer/extensions/own': to_json(numpy.array(None)),
        'communicator/0|residual': random.rand(33).astype('f') + rank,
        'random/words': numpy.arange(9, dtype='u4') * (rank + 1),
        f'trainer/mark{rank}': numpy.array([True, False]),
    } for rank in range(2)]


def write_sample(path):
    """Writes a snapshot of these states; what a reader must get, by name."""
    tables = states()
    parts, has = plan([{key: digest(value) for key, value in table.items()}
                       for table in tables])
    found = {(('json/' if 'own' in key else '') + prefix + key): table[key]
             for table, part in zip(tables, parts, strict=True)
             for prefix, key in part}
    found['meta/has'] = has
    found['meta/communicator'] = numpy.array('fp8')
    write(str(path), [(name, value, digest(value))
                      for name, value in found.items()])
    return found


# --- bytes -------------------------------------------------------------------

def flip(data, random):
    """Some bits are others."""
    data = bytearray(data)
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def cut_off(data, random):
    """The end is missing."""
    return data[:random.randrange(len(data))]


def overwrite(data, random):
    """A block is zeros, or another block."""
    length = random.randint(1, min(512, len(data) - 1))
    start = random.randrange(len(data) - length)
    other = random.randrange(len(data) - length)
    block = random.choice([bytes(length), data[other:other + length],
                           random.randbytes(length)])
    return data[:start] + block + data[start + length:]


def shift(data, random):
    """Bytes are missing in the middle, or too many."""
    place = random.randrange(len(data))
    return (data[:place] + random.randbytes(random.randint(1, 64))
            + data[place:] if random.random() < 0.5
            else data[:place] + data[place + random.randint(1, 64):])


def number(data, random):
    """A number somewhere is one of those that overflow."""
    size, form = random.choice([(2, '<H'), (4, '<I'), (8, '<Q')])
    value = random.choice([0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1),
                           2 ** (8 * size - 1) - 1, 2 ** (4 * size)])
    # The end is where the numbers are that others are found by.
    place = random.choice([random.randrange(len(data) - size),
                           len(data) - random.randint(size, 120)])
    return data[:place] + struct.pack(form, value) + data[place + size:]


OF_BYTES = [flip, cut_off, overwrite, shift, number]


# --- the same file with one thing wrong --------------------------------------

class Part:
    """A member, and what its two headers will say of it."""

    def __init__(self, name, data):
        self.name, self.data = name, data
        self.local, self.central = {}, {}
        self.crc = None

    def said(self, where, offset):
        """The fields of a header."""
        size = len(self.data)
        crc = zlib.crc32(self.data) if self.crc is None else self.crc
        return {'name': self.name.encode(), 'version': 20, 'flags': 0,
                'method': 0, 'crc': crc, 'packed': size, 'size': size,
                'extra': b'', 'comment': b'', 'offset': offset,
                **getattr(self, where)}


def taken_apart(data):
    """The members of a whole snapshot."""
    parts, place = [], 0
    while data[place:place + 4] == b'PK\3\4':
        length, extra = struct.unpack_from('<2H', data, place + 26)
        size, = struct.unpack_from('<Q', data, place + 30 + length + 4)
        name = data[place + 30:place + 30 + length].decode()
        place += 30 + length + extra
        parts.append(Part(name, data[place:place + size]))
        place += size
    return parts


def put_together(parts, **end):
    """The file of these members."""
    body, directory = b'', b''
    for part in parts:
        said = part.said('local', 0)
        offset = len(body)
        body += struct.pack(
            '<4s5H3I2H', b'PK\3\4', said['version'], said['flags'],
            said['method'], 0, 33, said['crc'], said['packed'],
            said['size'], len(said['name']), len(said['extra'])) + (
            said['name'] + said['extra'] + part.data)
        said = part.said('central', offset)
        directory += struct.pack(
            '<4s6H3I5H2I', b'PK\1\2', 20, said['version'], said['flags'],
            said['method'], 0, 33, said['crc'], said['packed'],
            said['size'], len(said['name']), len(said['extra']),
            len(said['comment']), 0, 0, 0, said['offset']) + (
            said['name'] + said['extra'] + said['comment'])
    end = {'count': len(parts), 'size': len(directory), 'start': len(body),
           'before': b'', 'gap': b'', 'comment': b'', **end}
    return end['before'] + body + end['gap'] + directory + struct.pack(
        '<4s4H2IH', b'PK\5\6', 0, 0, end['count'], end['count'],
        end['size'], end['start'], len(end['comment'])) + end['comment']


def header(descr, shape, by_columns='False'):
    """A header of an array, which need not be true."""
    text = (f"{{'descr': {descr}, 'fortran_order': {by_columns}, "
            f"'shape': {shape}, }}").encode()
    text += b' ' * (-(len(text) + 11) % 64) + b'\n'
    return b'\x93NUMPY\1\0' + len(text).to_bytes(2, 'little') + text


def values_of(part):
    """The bytes after the header of a member."""
    return part.data[10 + int.from_bytes(part.data[8:10], 'little'):]


SHAPES = ['(5,)', '(2, 10)', '(20,)', '(4, 5)', '()', '(0,)', '(-1,)',
          '(1000000000000,)', '(0, 1000000000000000000)',
          '(4294967296, 4294967296)', '(18446744073709551617,)', '(1' + ',1'
          * 40 + ',)', '(5, 4,)', 'None', '(5.0,)', '(9 ** 9 ** 9,)',
          '(' * 400 + ')' * 400, '(99999999999999999999999999,)']
DTYPES = ["'<f4'", "'<i4'", "'<f8'", "'>f4'", "'|O'", "'O'", "'<U0'",
          "'|S0'", "'|V4'", "'<U1000000000'", "'<f3'", "'|b1'", "'<M8[ns]'",
          "'<M8[x]'", "[('a', '<f4')]", "'(1000000,)f4'", "'<u4'", "'f4, f4'",
          "'|S999999999999'", "{'names': ['a'], 'formats': ['f4']}", "'|V0'"]


def wrong_shape(parts, random):
    part = random.choice(parts)
    part.data = header("'<f4'", random.choice(SHAPES)) + values_of(part)


def wrong_dtype(parts, random):
    part = random.choice(parts)
    shape = random.choice(['(20,)', '(5, 4)', '()', '(1000000000,)'])
    part.data = header(random.choice(DTYPES), shape) + values_of(part)


def wrong_order(parts, random):
    part = random.choice(parts)
    part.data = part.data.replace(b"'fortran_order': False",
                                  b"'fortran_order': True ")


def other_numbers(parts, random):
    part = random.choice(parts)
    data = bytearray(part.data)
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    part.data = bytes(data)


def wrong_name(parts, random):
    part = random.choice(parts)
    part.name = random.choice([
        'all/other.npy', 'rank0/trainer/updater/iteration.npy',
        'rank99999999/trainer/updater/iteration.npy', 'meta/has.npy',
        'meta/x.npy', '../../all/x.npy', '/etc/x.npy', 'all/x', '', '.npy',
        'all/x\0.npy', 'rank-1/x.npy', 'json/all/x.npy', 'json/meta/has.npy',
        random.choice(parts).name, 'all/' + 'x' * 60000 + '.npy'])


def missing(parts, random):
    del parts[random.randrange(len(parts))]


def twice(parts, random):
    parts.insert(random.randrange(len(parts)), random.choice(parts))


def swapped(parts, random):
    one, other = random.sample(range(len(parts)), 2)
    parts[one].data, parts[other].data = parts[other].data, parts[one].data


def moved(parts, random):
    parts.insert(random.randrange(len(parts)),
                 parts.pop(random.randrange(len(parts))))


def pickled(parts, random):
    part = random.choice(parts)
    program = random.choice([
        pickle.dumps(Harmful()), pickle.dumps(numpy.array(Harmful(), object)),
        b'\x80\x04\x8e' + (1 << 40).to_bytes(8, 'little'),
        b'\x80\x04N' + b'r' + (1 << 31).to_bytes(4, 'little') + b'.'])
    part.data = header("'|O'", '()') + program


def bomb(parts, random):
    """Packed zeros, a thousand times what the file has."""
    part = random.choice(parts)
    size = 1 << 20
    data = header("'<f4'", f'({size // 4},)') + bytes(size)
    part.crc = zlib.crc32(data)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    part.data = packer.compress(data) + packer.flush()
    part.local = part.central = {'method': 8, 'size': len(data)}


def overlap(parts, random):
    one, other = random.sample(parts, 2)
    one.central['offset'] = random.choice([0, 1, len(other.data)])


def said_wrong(parts, random):
    """A header of the zip file says another thing."""
    part = random.choice(parts)
    where = random.choice([part.local, part.central])
    where.update(random.choice([
        {'size': 1 << 31}, {'size': 0xffffffff}, {'packed': 0xffffffff},
        {'size': 0}, {'packed': 1 << 30}, {'flags': 1}, {'flags': 8},
        {'method': 14}, {'crc': 0}, {'offset': 0xffffffff}, {'version': 63},
        {'name': b'all/y.npy'}, {'name': b'\xff\xfe'}, {'extra': bytes(9)},
        {'comment': b'x' * 99}, {'extra': bytes(60000)}]))


def zip64(parts, random):
    """Sizes of 64 bits that the file has not got."""
    part = random.choice(parts)
    values = [random.choice([1 << 40, 1 << 63, (1 << 64) - 1, 0,
                             len(part.data)]) for _ in range(2)]
    extra = struct.pack('<2H2Q', 1, 16, *values)
    said = {'size': 0xffffffff, 'packed': 0xffffffff, 'extra': extra}
    part.local.update(said)
    if random.random() < 0.7:
        part.central.update(said)


def huge_everywhere(parts, random):
    """Every header says the same: more than the file has."""
    part = random.choice(parts)
    size = random.choice([1 << 28, 1 << 31, 0xfffffffe])
    part.data = header("'|u1'", f'({size - 128},)') + values_of(part)
    part.local = part.central = {'size': size, 'packed': size}


OF_PARTS = [wrong_shape, wrong_dtype, wrong_order, other_numbers, wrong_name,
            missing, twice, swapped, moved, pickled, bomb, overlap,
            said_wrong, zip64, huge_everywhere]
ENDS = [{'count': 0}, {'count': 65535}, {'count': 3}, {'size': 0},
        {'size': 0xffffffff}, {'start': 0}, {'start': 0xffffffff},
        {'before': b'MZ' * 40}, {'gap': bytes(30)}, {'comment': b'PK\5\6'},
        {'comment': bytes(64)}]


def wrong_end(data, random):
    """The end of the file, or what is around it."""
    return put_together(taken_apart(data), **random.choice(ENDS))


def crafted(data, random):
    """Taken apart, changed in one way, and put together again."""
    parts = taken_apart(data)
    random.choice(OF_PARTS)(parts, random)
    return put_together(parts)


def array_member(value):
    """The bytes of an array as a member."""
    return header_of(value) + value.tobytes()
