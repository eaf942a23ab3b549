import json
import os
import stat
import struct

from chainer_fp8pipe.training.snapshots import snapshot_file
from chainer_fp8pipe.training.snapshots.snapshot_file import (
    DamagedSnapshot,
    Member,
    SavedValue,
    ValueEntry,
    entry_of,
    opened,
    plan,
    write,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st


def entry(text):
    return ValueEntry('<f4', (1,), text.encode())


def test_a_plan_by_hand():
    """b differs on rank 1; c is only there; rank 2 has b as rank 0."""
    zero, one, two, three = map(entry, '0123')
    assert plan([{'a': zero, 'b': one}, {'a': zero, 'b': two, 'c': three},
                 {'b': one}]) == [
        [('all/', 'a', [0, 1]), ('all/', 'b', None)],
        [('rank1/', 'b', None), ('all/', 'c', [1])], []]


@given(st.lists(st.dictionaries(st.sampled_from('abcde'),
                                st.sampled_from('012').map(entry)),
                min_size=1, max_size=5))
def test_every_rank_can_be_put_together_from_what_is_written(tables):
    file, owners = {}, {}
    for rank, part in enumerate(plan(tables)):
        for prefix, key, ranks in part:
            assert prefix + key not in file
            file[prefix + key] = tables[rank][key]
            if prefix == 'all/':
                owners[key] = range(len(tables)) if ranks is None else ranks
    for rank, table in enumerate(tables):
        assert table == {
            key: file.get(f'rank{rank}/{key}', file[f'all/{key}'])
            for key, ranks in owners.items() if rank in ranks}
        # What the first rank has is not written again.
        assert all(file[name] != file[f'all/{name.partition("/")[2]}']
                   for name in file if name.startswith(f'rank{rank}/'))


@pytest.mark.parametrize(('one', 'other'), [
    (numpy.zeros(2, 'f4'), numpy.zeros(1, 'f8')),
    (numpy.zeros((2, 1)), numpy.zeros((1, 2))),
    (numpy.zeros(2), numpy.array([0.0, -0.0])),
    (numpy.array('x'), numpy.array('y')),
    (numpy.zeros(0, 'i'), numpy.zeros(0, 'f')),
])
def test_values_that_differ_have_other_digests(one, other):
    first, second, again = (entry_of(SavedValue(value)).digest
                            for value in (one, other, one.copy()))
    assert first == again
    assert first != second


def test_columns_have_the_digest_of_a_copy():
    array = numpy.arange(12.0).reshape(3, 4)
    assert entry_of(SavedValue(array.T)) == entry_of(
        SavedValue(array.T.copy()))


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
}
JSON = b'[1,null]'


def members(values=None):
    for name, array in (VALUES if values is None else values).items():
        value = SavedValue(array)
        yield Member(name, value, entry_of(value))
    value = SavedValue(numpy.frombuffer(JSON, 'u1'), is_json=True)
    yield Member('all/own', value, entry_of(value), [1])


def load(path):
    """All that is in a file, by name."""
    with opened(str(path)) as content:
        content.check()
        index = content.index
        found = {f'all/{key}': content.read(key) for key in index.keys}
        found.update({
            f'rank{rank}/{key}': content.read(key, rank)
            for rank in range(index.ranks) for key in index.keys
            if index.has_own(rank, key)})
    return found


def assert_is_right(found):
    assert found.keys() == {*VALUES, 'all/own'}
    assert found['all/own'].tobytes() == JSON
    for name, value in VALUES.items():
        assert (found[name].dtype, found[name].shape) == (
            value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


@pytest.fixture
def path(tmp_path):
    path = tmp_path / 'x.npz'
    write(str(path), members(), 'fp8', 2)
    return path


def test_a_file_is_read_as_it_was_written(path):
    assert_is_right(load(path))
    with opened(str(path)) as content:
        index = content.index
    assert (index.ranks, index.communicator) == (2, 'fp8')
    assert index.of_rank(0) == [key for key in index.keys if key != 'own']
    assert index.of_rank(1) == index.keys
    assert index.has_own(1, 'iteration')
    assert not index.has_own(1, 'text')
    assert not index.is_same_everywhere('iteration')
    assert index.is_same_everywhere('text')


def test_numpy_reads_the_file_as_any_npz(path):
    with numpy.load(path) as archive:       # which compares zip's CRC
        for name, value in VALUES.items():
            assert archive[name].dtype == value.dtype
            assert archive[name].tobytes() == value.tobytes()
        assert archive['all/own.json'] == JSON
        assert json.loads(archive['meta/manifest.json'])['ranks'] == 2


def test_a_crash_leaves_the_older_file_and_nothing_else(path):
    def crash():
        yield from members()
        raise KeyboardInterrupt
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write(str(path), crash(), 'fp8', 2)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_two_files_can_be_written_at_once(tmp_path):
    """A snapshot beside the training, and one for which it waits."""
    def slow():
        write(str(tmp_path / 'other.npz'), members(), 'fp8', 2)
        yield from members()
    write(str(tmp_path / 'x.npz'), slow(), 'fp8', 2)
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
    write(str(tmp_path / 'x.npz'), members(), 'fp8', 2)
    assert done == ['fsync', 'replace', 'folder']


def test_other_files_are_no_snapshots(tmp_path):
    numpy.save(tmp_path / 'array.npy', numpy.zeros(30))
    numpy.savez(tmp_path / 'other.npz', x=1)
    (tmp_path / 'text').write_text('text')
    for name, match in (('array.npy', 'was not written by'),
                        ('text', 'its end is missing'),
                        ('other.npz', 'was not written by')):
        with pytest.raises(DamagedSnapshot, match=match):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / 'nothing')


def test_a_file_of_another_format_says_so(path, monkeypatch):
    monkeypatch.setattr(snapshot_file, '_FORMAT', 4)
    with pytest.raises(DamagedSnapshot, match='it has format 3, and this '
                       'version of chainer_fp8pipe reads format 4'):
        load(path)


# --- damage ------------------------------------------------------------------

def test_every_byte_that_changes_is_found(path):
    data = path.read_bytes()
    with open(path, 'r+b', buffering=0) as file:
        for place, byte in enumerate(data):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
            with pytest.raises(DamagedSnapshot):
                load(path)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert_is_right(load(path))


@given(st.data())
def test_missing_doubled_and_overwritten_bytes_are_found(whole, data):
    path, content = whole
    start, stop = sorted(data.draw(st.tuples(*[st.integers(
        0, len(content))] * 2)))
    other = data.draw(st.sampled_from([
        b'', bytes(stop - start), content[:stop - start],
        2 * content[start:stop]]))
    damaged = content[:start] + other + content[stop:]
    path.write_bytes(damaged)
    if damaged != content:
        with pytest.raises(DamagedSnapshot, match='damaged or no snapshot'):
            load(path)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp('whole') / 'x.npz'
    write(str(path), members(), 'fp8', 2)
    return path, path.read_bytes()


def crafted(content, change):
    """The file with another manifest, and a digest that is right."""
    mark, start, size, _ = snapshot_file._END.unpack(
        content[-snapshot_file._END.size:])
    manifest = json.loads(content[start:start + size])
    manifest = change(manifest) or manifest
    text = manifest if isinstance(manifest, bytes) else json.dumps(
        manifest).encode()
    data = content[:start] + text + snapshot_file._END.pack(
        mark, start, len(text), bytes(16))
    spans = [(one[1], numpy.dtype(one[2].replace('json', 'u1')).itemsize
              * int(numpy.prod(one[3]))) for one in json.loads(
                  content[start:start + size])['members']]
    digest = snapshot_file._structure_digest(
        spans, len(data), lambda start, size: iter([data[start:start + size]]))
    return data[:-16] + digest


def member(**changes):
    """A change of the first member: name, start, dtype, shape, digest."""
    names = 'name', 'start', 'dtype', 'shape', 'digest', 'ranks'

    def change(manifest):
        for name, value in changes.items():
            manifest['members'][0][names.index(name)] = value
    return change


def test_a_file_with_the_same_manifest_is_whole(whole):
    """Or the next test would not show much."""
    path, content = whole
    path.write_bytes(crafted(content, lambda manifest: None))
    assert_is_right(load(path))


@pytest.mark.parametrize('change', [
    member(shape=[1 << 40]), member(shape=[-3, -4]), member(shape=[3, 4.0]),
    member(shape=[True]), member(shape=[10 ** 30]), member(shape=[[3], 4]),
    member(shape=None), member(dtype='<f8'), member(dtype='O'),
    member(dtype='<U0', shape=[1 << 50]), member(dtype='V0'),
    member(dtype='f4,f4'), member(dtype='(9999999,)f4'), member(dtype='f'),
    member(dtype=None), member(dtype=7), member(dtype='json'),
    member(start=-1), member(start=1 << 62), member(start='0'),
    member(digest='00'), member(digest='zz'), member(digest=None),
    member(name='all/empty'), member(name='rank1/x'), member(name='x'),
    member(name='rank99999999/iteration'), member(name=None),
    member(name='../all/x'), member(ranks=[0, 1 << 60, 'x'], shape=[5]),
    lambda manifest: manifest.update(ranks=1),
    lambda manifest: manifest.update(ranks='2'),
    lambda manifest: manifest.update(members=7),
    lambda manifest: manifest.update(members=[[]]),
    lambda manifest: manifest['members'].reverse(),
    lambda manifest: manifest['members'].append(manifest['members'][0]),
    lambda manifest: manifest.pop('communicator') and None,
    lambda manifest: [1], lambda manifest: b'{', lambda manifest: b'\xff',
    lambda manifest: b"[" * 100000])
def test_a_crafted_manifest_is_refused_and_takes_no_memory(whole, change):
    import tracemalloc
    path, content = whole
    path.write_bytes(crafted(content, change))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match='damaged or no snapshot'):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(('start', 'size'), [
    (0, 1 << 63), ((1 << 64) - 1, 1), (1 << 40, 4)])
def test_a_manifest_that_is_not_in_the_file_is_refused(whole, start, size):
    path, content = whole
    end = bytearray(content[-snapshot_file._END.size:])
    struct.pack_into('<2Q', end, 8, start, size)
    path.write_bytes(content[:-len(end)] + end)
    with pytest.raises(DamagedSnapshot, match='its manifest is not in it'):
        load(path)
