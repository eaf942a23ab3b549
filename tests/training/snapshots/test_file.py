"""A file is read as it was written, or refused."""
import json
import os
import stat
import tracemalloc
import zipfile

from chainer_fp8pipe.training.snapshots import file
from chainer_fp8pipe.training.snapshots.file import (
    JSON,
    Content,
    DamagedSnapshot,
    Entry,
    Member,
    entry_of,
    plan,
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
        yield Member(name, array, entry_of(array))


def load(path):
    """All that is in a file, by name."""
    with Content(str(path)) as content:
        content.check()
        return {name: content.read(name) for name in content.index.entries}


def assert_is_right(found):
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert entry_of(found[name]) == entry_of(value), name


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


def test_a_file_is_read_as_it_was_written(path):
    assert_is_right(load(path))
    with Content(str(path)) as content:
        index = content.index
    assert (index.ranks, index.communicator) == (2, 'fp8')
    assert index.of_rank(0) == [key for key in index.keys if key != 'own']
    assert index.of_rank(1) == index.keys
    assert index.name('iteration', 1) == 'rank1/iteration'
    assert index.name('text', 1) == index.name('text') == 'all/text'
    assert not index.is_same_everywhere('iteration')
    assert index.is_same_everywhere('text')


def test_numpy_reads_the_file_as_any_npz(path):
    with numpy.load(path) as archive:
        for name, value in VALUES.items():
            assert archive[name].dtype == value.dtype
            assert archive[name].tolist() == value.tolist()
        assert archive['all/own'].tobytes() == b'[1,null]'
        assert json.loads(archive['meta/manifest.json'])['ranks'] == 2


@given(st.lists(st.dictionaries(
    st.sampled_from('abcde'), st.sampled_from('012').map(
        lambda text: Entry('<f4', (1,), text))), min_size=1, max_size=5))
def test_every_rank_can_be_put_together_from_what_is_written(tables):
    owners, names = plan(tables)
    written = {}
    for rank, part in enumerate(names):
        for name in part:
            assert name not in written
            written[name] = tables[rank][name.partition('/')[2]]
    for rank, table in enumerate(tables):
        assert table == {
            key: written.get(f'rank{rank}/{key}', written[f'all/{key}'])
            for key, ranks in owners.items() if rank in ranks}
    # What the first rank has is not written again.
    assert all(entry != written[f'all/{name.partition("/")[2]}']
               for name, entry in written.items() if name[:3] != 'all')


@pytest.mark.parametrize(('one', 'other'), [
    (numpy.zeros(2, 'f4'), numpy.zeros(1, 'f8')),
    (numpy.zeros((2, 1)), numpy.zeros((1, 2))),
    (numpy.zeros(2), numpy.array([0.0, -0.0])),
    (numpy.array('x'), numpy.array('y')),
    (numpy.zeros(0, 'i'), numpy.zeros(0, 'f'))])
def test_values_that_differ_have_other_digests(one, other):
    first, second, again = (entry_of(value).digest
                            for value in (one, other, one.copy()))
    assert first == again
    assert first != second


def test_a_crash_leaves_the_older_file_and_nothing_else(path):
    def crash():
        yield from members()
        raise KeyboardInterrupt
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write(str(path), crash(), 'fp8', 2, OWNERS)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_two_files_can_be_written_at_once(tmp_path):
    """A snapshot beside the training, and one for which it waits."""
    def slow():
        write(str(tmp_path / 'other.npz'), members(), 'fp8', 2, OWNERS)
        yield from members()
    write(str(tmp_path / 'x.npz'), slow(), 'fp8', 2, OWNERS)
    for name in ('x', 'other'):
        assert_is_right(load(tmp_path / f'{name}.npz'))
    assert len(list(tmp_path.iterdir())) == 2


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

def harmless(path):
    """Whether a file that is read in spite of all has the right values."""
    try:
        found = load(path)
    except DamagedSnapshot:
        return
    assert_is_right(found)


def test_no_byte_that_changes_is_a_wrong_value(path):
    data = path.read_bytes()
    found = 0
    for place in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert_is_right(load(path))
        except DamagedSnapshot:
            found += 1
    # The others are dates, padding and the like.
    assert found > len(data) / 3 * 0.7


def test_every_byte_of_the_values_and_of_the_manifest_counts(path):
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        spans = [(info.header_offset + 30 + len(info.filename) + 20,
                  info.file_size) for info in archive.infolist()[:3]]
        last = archive.infolist()[-1]
        spans.append((last.header_offset + 30 + len(last.filename),
                      last.file_size))
    for start, size in spans:
        for place in range(start, start + size):
            damaged = bytearray(data)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(DamagedSnapshot):
                load(path)


@given(st.data())
def test_missing_doubled_and_overwritten_bytes_are_no_wrong_values(
        whole, data):
    path, content = whole
    start, stop = sorted(data.draw(st.tuples(*[st.integers(
        0, len(content))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.sampled_from([
        b'', bytes(stop - start), content[:stop - start],
        2 * content[start:stop]])) + content[stop:])
    harmless(path)


def crafted(path, change):
    """The file with another manifest, of which zip's CRC is right."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(parts['meta/manifest.json'])
    text = change(manifest) or json.dumps(manifest)
    with zipfile.ZipFile(path, 'w') as archive:
        for name, part in parts.items():
            archive.writestr(
                name, text if name == 'meta/manifest.json' else part)


def member(place, value):
    """A change of the first member: dtype, shape, digest."""
    def change(manifest):
        next(iter(manifest['members'].values()))[place] = value
    return change


CRAFTED = {
    'nothing': lambda manifest: None,
    **{f'shape {shape}': member(1, shape) for shape in (
        [1 << 40], [-3, -4], [3, 4.0], [True], [10 ** 30], [[3], 4], None)},
    **{f'dtype {dtype}': member(0, dtype) for dtype in (
        '<f8', 'O', 'V0', 'f4,f4', '(9999999,)f4', 'f', None, 7, '|V1')},
    **{f'digest {digest}': member(2, digest) for digest in ('00', None)},
    'no members': lambda manifest: manifest.update(members=7),
    'no owner': lambda manifest: manifest['owners'].pop('text') and None,
    'a rank that has not': lambda manifest: manifest['owners'].update(
        iteration=[0]),
    'ranks': lambda manifest: manifest.update(ranks='x'),
    'no communicator': lambda manifest: manifest.pop('communicator') and None,
    'a list': lambda manifest: '[1]', 'half': lambda manifest: '{',
    'deep': lambda manifest: '[' * 100000}


@pytest.mark.parametrize('what', CRAFTED)
def test_a_crafted_manifest_is_refused_and_takes_no_memory(path, what):
    crafted(path, CRAFTED[what])
    if what == 'nothing':       # or the others would not show much
        assert_is_right(load(path))
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
    monkeypatch.setattr(file, '_FORMAT', 5)
    with pytest.raises(DamagedSnapshot, match='it has format 4, and this '
                       'version of chainer_fp8pipe reads format 5'):
        load(path)
