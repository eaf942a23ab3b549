"""A file is read as it was written, or refused."""
import collections
import os
import random
import stat
import zipfile

from chainer_fp8pipe.training.snapshots.file import (
    DamagedSnapshot,
    digest_of,
    file_of,
    identities,
    manifest_of,
    new_identity,
    read,
    write,
)
from chainer_fp8pipe.training.snapshots.values import (
    fingerprint,
    is_value,
    pack,
    put,
    unpack,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

VALUES = {
    'updater/model:main/l/W': numpy.random.RandomState(0).rand(
        3, 4).astype('f'),
    'empty': numpy.zeros((0, 3), 'f'),
    'iteration': numpy.array(7),
    'text': numpy.array('é\0x'),
    'bytes': numpy.array([b'a', b'bcd']),
    'flags': numpy.array([True, False]),
    'day': numpy.array('2026-11-25', 'M8[D]'),
    'columns': numpy.arange(6.0).reshape(2, 3).T,
    **pack('own', {'a': [1, None, numpy.arange(3, dtype='f2')]}),
}
IDENTITY = new_identity()


def write_to(folder):
    write(str(folder), VALUES, 1, 2, IDENTITY, 'fp8')
    return folder / 'rank1of2.npz'


def is_right(path):
    """Whether a file has the right values; or it is refused."""
    try:
        manifest = manifest_of(str(path))
        found = read(manifest, manifest.digests)
    except DamagedSnapshot:
        return False
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert digest_of(found[name]) == digest_of(value), name
    return True


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    path = write_to(tmp_path_factory.mktemp('whole') / 'x.ranks')
    return path, path.read_bytes()


@pytest.fixture
def path(whole):
    path, content = whole
    path.write_bytes(content)
    return path


def test_a_file_is_read_as_it_was_written_by_numpy_too(path):
    assert is_right(path)
    assert manifest_of(str(path))[:4] == (str(path), 1, 2, 'fp8')
    assert identities(str(path.parent)) == [(1, 2, IDENTITY)]
    assert file_of(str(path.parent), 1, 2) == str(path)
    with numpy.load(path) as archive:
        for name, value in VALUES.items():
            assert archive[name].dtype == value.dtype
            assert archive[name].tolist() == value.tolist()


@pytest.mark.parametrize(('one', 'other'), [
    (numpy.zeros(2, 'f4'), numpy.zeros(1, 'f8')),
    (numpy.zeros((2, 1)), numpy.zeros((1, 2))),
    (numpy.zeros(2), numpy.array([0.0, -0.0])),
    (numpy.array('x'), numpy.array('y')),
    (numpy.zeros(0, 'i'), numpy.zeros(0, 'f'))])
def test_values_that_differ_have_other_digests(one, other):
    assert digest_of(one) == digest_of(one.copy()) != digest_of(other)


def fails(*_):
    raise OSError(28, 'No space left on device')


@pytest.mark.parametrize(('place', 'name'), [
    (zipfile._ZipWriteFile, 'write'), (os, 'fsync'), (os, 'replace')])
def test_what_fails_leaves_the_older_file_and_nothing_else(
        path, place, name, monkeypatch):
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(place, name, fails)
        with pytest.raises(OSError, match='No space left'):
            write_to(path.parent)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert list(path.parent.parent.iterdir()) == [path.parent]


def test_file_and_names_are_brought_to_the_disk(tmp_path, monkeypatch):
    """In this order: bytes, name, the names' own bytes."""
    done = []

    def noted(call, original):
        def note(*arguments):
            is_folder = call == 'fsync' and stat.S_ISDIR(
                os.fstat(arguments[0]).st_mode)
            done.append('folder' if is_folder else call)
            return original(*arguments)
        return note
    for call in ('fsync', 'replace'):
        monkeypatch.setattr(os, call, noted(call, getattr(os, call)))
    write_to(tmp_path / 'x.ranks')
    assert done == ['fsync', 'replace', 'folder', 'folder']


# --- damage ------------------------------------------------------------------

def test_no_byte_that_changes_is_a_wrong_value(path):
    """And each one of the first values and of the manifest is noticed."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        # Behind the 30 bytes that hold the time, of which 15:24 to 15:31 is
        # written as "{", too.
        noticed = {place for info in (*infos[:3], infos[-1])
                   for place in range(
                       data.index(b'{' if info is infos[-1] else b'\x93NUMPY',
                                  info.header_offset + 30),
                       info.header_offset + 30 + info.file_size)}
    for place in sorted({*noticed, *range(0, len(data), 3)}):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert not is_right(path) or place not in noticed


@given(st.data())
def test_missing_doubled_and_overwritten_bytes_are_no_wrong_values(
        whole, data):
    path, content = whole
    start, stop = sorted(data.draw(st.tuples(*[st.integers(
        0, len(content))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.sampled_from([
        b'', bytes(stop - start), content[:stop - start],
        2 * content[start:stop]])) + content[stop:])
    is_right(path)


# --- values that are no arrays of numbers ------------------------------------

OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5)
    | st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False).map(
        numpy.float32) | st.integers(-9, 9).map(numpy.int8)
    | st.just(numpy.datetime64('2026-11-25'))
    | st.lists(st.floats(width=16), max_size=3).map(
        lambda numbers: numpy.array([numbers], 'f2')),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.lists(inner, max_size=3).map(lambda one: collections.deque(one, 5))
    | st.sets(st.integers(), max_size=3)
    | st.dictionaries(st.text(max_size=3) | st.integers(), inner,
                      max_size=3), max_leaves=8)


@given(OBJECTS)
def test_an_object_comes_back_as_it_was(value):
    found = unpack('key', pack('key', value))
    assert repr(found if isinstance(found, type(value)) else found[()]
                ) == repr(value)


GENERATORS = [lambda: numpy.random.RandomState(1), lambda: random.Random(1),
              lambda: numpy.random.default_rng(1),
              lambda: numpy.random.Generator(numpy.random.MT19937(1))]


@pytest.mark.parametrize('number', range(4))
def test_a_generator_goes_on_also_where_others_refer_to_it(number):
    def draw(one):
        return [one.normal(*[0, 1]) if hasattr(one, 'normal')
                else one.gauss(0, 1) for _ in range(3)]
    one = GENERATORS[number]()
    draw(one)
    state, before = pack('key', one), fingerprint(one)
    expected = draw(one)
    assert fingerprint(one) != before
    assert draw(unpack('key', state)) == expected
    again = {'random': GENERATORS[number]()}
    shared = again['random']
    put(again, 'random', unpack('key', state))
    assert again['random'] is shared
    assert draw(shared) == expected


INNER = []
INNER.append(INNER)


@pytest.mark.parametrize('value', [
    print, [b'x'], INNER, [collections.OrderedDict()],
    numpy.zeros(2, [('a', 'f4')]), numpy.array([None])])
def test_an_object_that_cannot_be_saved_is_an_error(value):
    assert not is_value(value)
    with pytest.raises(TypeError, match='it '):
        pack('key', value)
