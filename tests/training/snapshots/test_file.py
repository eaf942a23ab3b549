"""A file is read as it was written, or refused."""
import json
import os
import stat
import tracemalloc
import zipfile

from chainer_fp8pipe.training.snapshots import file
from chainer_fp8pipe.training.snapshots.file import (
    JSON,
    LARGEST,
    MOST_PARTS,
    Content,
    DamagedSnapshot,
    digest_of,
    from_json,
    to_json,
    write,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

VALUES = {
    'all/trainer/updater/model:main/l/W': numpy.random.RandomState(0).rand(
        3, 4).astype('f'),
    'all/empty': numpy.zeros((0, 3), 'f'),
    'all/iteration': numpy.array(7),
    'rank1/iteration': numpy.array(8),
    'all/text': numpy.array('é\0x'),
    'all/bytes': numpy.array([b'a', b'bcd']),
    'all/flags': numpy.array([True, False]),
    'all/day': numpy.array('2026-11-25', 'M8[D]'),
    'all/columns': numpy.arange(6.0).reshape(2, 3).T,
    'all/own': numpy.frombuffer(b'[1,null]', JSON),
}
OWNERS = {name[4:]: [1] if name == 'all/own' else [0, 1]
          for name in VALUES if name.startswith('all/')}


def members():
    for name, array in VALUES.items():
        yield name, array, digest_of(array)


def load(path):
    """All that is in a file, by name."""
    with Content(str(path)) as content:
        content.check()
        return {name: content.read(name) for name in content.index.digests}


def is_right(path):
    """Whether a file has the right values; or it is refused."""
    try:
        found = load(path)
    except DamagedSnapshot:
        return False
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert digest_of(found[name]) == digest_of(value), name
    return True


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp('whole') / 'x.npz'
    write(str(path), members(), 'fp8', 2, OWNERS)
    return path, path.read_bytes()


@pytest.fixture
def path(whole):
    path, content = whole
    path.write_bytes(content)
    return path


def test_a_file_is_read_as_it_was_written_by_numpy_too(path):
    assert is_right(path)
    with Content(str(path)) as content:
        index = content.index
    assert (index.ranks, index.communicator) == (2, 'fp8')
    assert index.of_rank(0) == index.of_rank(1) - {'own'} == {*OWNERS} - {
        'own'}
    assert index.name('iteration', 1) == 'rank1/iteration'
    assert index.name('text', 1) == index.name('text', None) == 'all/text'
    assert not index.is_same_everywhere('iteration')
    assert index.is_same_everywhere('text')
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


def full(*_):
    raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('when', ['a value', 'the end', 'the name', 'a kill'])
def test_what_fails_leaves_the_older_file_and_nothing_else(
        path, when, monkeypatch):
    def until_killed():
        yield from members()
        raise KeyboardInterrupt
    before = path.read_bytes()
    if when == 'a value':
        monkeypatch.setattr(zipfile._ZipWriteFile, 'write', full)
    elif when == 'the end':
        monkeypatch.setattr(os, 'fsync', full)
    elif when == 'the name':
        monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(KeyboardInterrupt if when == 'a kill' else OSError):
        write(str(path), until_killed() if when == 'a kill' else members(),
              'fp8', 2, OWNERS)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_two_files_can_be_written_at_once_into_a_new_folder(tmp_path):
    """A snapshot beside the training, and one for which it waits."""
    paths = [tmp_path / 'new' / name for name in ('x.npz', 'y.npz')]

    def slow():
        write(str(paths[1]), members(), 'fp8', 2, OWNERS)
        yield from members()
    write(str(paths[0]), slow(), 'fp8', 2, OWNERS)
    assert all(map(is_right, paths))
    assert sorted((tmp_path / 'new').iterdir()) == paths


def test_file_and_name_are_brought_to_the_disk(tmp_path, monkeypatch):
    """In this order: bytes, name, the name's own bytes."""
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
    write(str(tmp_path / 'x.npz'), members(), 'fp8', 2, OWNERS)
    assert done == ['fsync', 'replace', 'folder']


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


def crafted(path, name, change):
    """The file with another member, of which zip's CRC is right."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, 'w') as archive:
        for one, part in parts.items():
            archive.writestr(one, change(part) if one == name else part)


def manifest(change):
    """A change of the manifest, or another text in its place."""
    def changed(text):
        found = json.loads(text)
        return change(found) or json.dumps(found)
    return 'meta/manifest.json', changed


def header(old, new):
    """A change of the first value's header, as long as it was."""
    def changed(part):
        assert old in part
        return part.replace(old + b' ' * (len(new) - len(old)),
                            new + b' ' * (len(old) - len(new)), 1)
    return 'all/trainer/updater/model:main/l/W.npy', changed


CRAFTED = {
    'nothing': manifest(lambda found: None),
    'a large shape': header(b'(3, 4), }         ', b'(3000000, 400000)}'),
    'another dtype': header(b"'<f4'", b"'<i4'"),
    'objects': header(b"'<f4'", b"'|O' "),
    'another order': header(b'False', b'True '),
    'another digest': manifest(
        lambda found: found['digests'].update({'all/text': '00'})),
    'a digest more': manifest(
        lambda found: found['digests'].update({'all/x': '00'})),
    'no digests': manifest(lambda found: found.update(digests=7)),
    'no owner': manifest(lambda found: found['owners'].pop('text') and None),
    'a rank that has not': manifest(
        lambda found: found['owners'].update(iteration=[0])),
    'ranks': manifest(lambda found: found.update(ranks='x')),
    'no communicator': manifest(
        lambda found: found.pop('communicator') and None),
    'a list': manifest(lambda found: '[1]'),
    'half': manifest(lambda found: '{'),
    'deep': manifest(lambda found: '[' * 100000)}


@pytest.mark.parametrize('what', CRAFTED)
def test_a_crafted_file_is_refused_and_takes_no_memory(path, what):
    crafted(path, *CRAFTED[what])
    if what == 'nothing':       # or the others would not show much
        assert is_right(path)
        return
    tracemalloc.start()
    try:
        with pytest.raises(DamagedSnapshot, match='damaged or no snapshot'):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_other_files_are_no_snapshots(tmp_path, path, monkeypatch):
    numpy.save(tmp_path / 'array.npy', numpy.zeros(30))
    numpy.savez(tmp_path / 'other.npz', x=1)
    (tmp_path / 'empty').touch()
    for name, match in (('array.npy', 'not a zip file'),
                        ('empty', 'not a zip file'),
                        ('other.npz', 'was not written by')):
        with pytest.raises(DamagedSnapshot, match=match):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / 'nothing')
    monkeypatch.setattr(file, '_FORMAT', 6)
    with pytest.raises(DamagedSnapshot, match='it has format 5, and this '
                       'version of chainer_fp8pipe reads format 6'):
        load(path)


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
    | st.dictionaries(st.text(max_size=3) | st.integers(), inner,
                      max_size=3), max_leaves=8)


@given(OBJECTS)
def test_an_object_comes_back_as_it_was(value):
    found = from_json(to_json(value))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


INNER = []
INNER.append(INNER)


@pytest.mark.parametrize(('value', 'match'), [
    (print, 'an object of class builtin'), ({1, 2}, 'of class set'),
    ([b'x'], 'of class bytes'), (INNER, 'nested too deeply'),
    ('x' * LARGEST, f'takes {LARGEST + 2} bytes as JSON'),
    ([0] * MOST_PARTS, f'more than {MOST_PARTS} parts'),
    ([numpy.zeros(LARGEST)], f'an array in it has {8 * LARGEST} bytes'),
    (numpy.zeros(2, [('a', 'f4')]), 'of class ndarray')])
def test_an_object_that_cannot_be_saved_is_named(value, match):
    with pytest.raises(TypeError, match=match):
        to_json(value)


@pytest.mark.parametrize('text', [
    b'', b'{}', b'{"dict":[[[1],2]]}', b'{"tuple":1}', b'{"eval":"1"}',
    b'{"number":["<U9999999",[],"00"]}', b'{"number":["O",[],"00"]}',
    b'{"array":["<f4",[9999999999999],"00000000"]}', b'{"array":["<f4"]}',
    b'\xff', b'[' * 60000, b'1' * (LARGEST + 1)])
def test_another_text_is_damage(text):
    with pytest.raises(ValueError, match="no JSON of a snapshot's"):
        from_json(text)
