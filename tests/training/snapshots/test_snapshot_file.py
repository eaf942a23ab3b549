import os
import stat

from chainer_fp8pipe.training.snapshots.snapshot_file import (
    digest,
    opened,
    plan,
    write,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st


def test_a_plan_by_hand():
    """b differs on rank 1; c is only there; rank 2 has b as rank 0."""
    parts, has = plan([{'a': b'0', 'b': b'1'},
                       {'a': b'0', 'b': b'2', 'c': b'3'}, {'b': b'1'}])
    assert parts == [[('all/', 'a'), ('all/', 'b')],
                     [('rank1/', 'b'), ('all/', 'c')], []]
    assert has.tolist() == [[True, True, False], [True, True, True],
                            [False, True, False]]


@given(st.lists(st.dictionaries(st.sampled_from('abcde'),
                                st.sampled_from([b'0', b'1', b'2'])),
                min_size=1, max_size=5))
def test_every_rank_can_be_put_together_from_what_is_written(tables):
    parts, has = plan(tables)
    file = {prefix + key: tables[rank][key]
            for rank, part in enumerate(parts) for prefix, key in part}
    assert len(file) == sum(map(len, parts))
    keys = [name[4:] for name in file if name.startswith('all/')]
    for rank, table in enumerate(tables):
        assert table == {
            key: file.get(f'rank{rank}/{key}', file[f'all/{key}'])
            for key, is_there in zip(keys, has[rank], strict=True)
            if is_there}
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
    first, second, again = (digest(value)
                            for value in (one, other, one.copy()))
    assert first == again
    assert first != second


def test_columns_have_the_digest_of_a_copy():
    array = numpy.arange(12.0).reshape(3, 4)
    assert digest(array.T) == digest(array.T.copy())


def members(*names):
    return digested([
        *((name, numpy.arange(3)) for name in names),
        ('meta/has', numpy.ones((1, len(names)), bool)),
        ('meta/communicator', numpy.asarray('none'))])


def digested(values):
    return ((name, value, digest(value)) for name, value in values)


def test_a_snapshot_file_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / 'x.npz')
    write(path, members('all/a', 'all/b/c'))
    with opened(path) as content:
        assert content.index.keys == ['a', 'b/c']
        assert content.index.ranks == 1
        assert content.index.communicator == 'none'
        assert content.read('b/c').tolist() == [0, 1, 2]
        assert not content.has_own(0, 'a')


def test_a_crash_leaves_the_older_file_and_nothing_else(tmp_path):
    def crash():
        yield from digested([('all/a', numpy.arange(1000))])
        raise KeyboardInterrupt
    path = tmp_path / 'x.npz'
    write(str(path), members('all/a'))
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write(str(path), crash())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_two_files_can_be_written_at_once(tmp_path):
    """A snapshot beside the training, and one for which it waits."""
    def slow():
        write(str(tmp_path / 'other.npz'), members('all/b'))
        yield from members('all/a')
    write(str(tmp_path / 'x.npz'), slow())
    for name, key in (('x', 'a'), ('other', 'b')):
        with opened(str(tmp_path / f'{name}.npz')) as content:
            content.check()
            assert content.index.keys == [key]
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
    write(str(tmp_path / 'x.npz'), members('all/a'))
    assert done == ['fsync', 'replace', 'folder']


def test_other_files_are_no_snapshots(tmp_path):
    numpy.save(tmp_path / 'array.npy', numpy.zeros(3))
    numpy.savez(tmp_path / 'other.npz', x=1)
    (tmp_path / 'text').write_text('text')
    for name, match in (('array.npy', 'no snapshot'), ('text', 'no snapshot'),
                        ('other.npz', 'was not written by')):
        with pytest.raises(ValueError, match=match), opened(
                str(tmp_path / name)):
            pass
    with pytest.raises(FileNotFoundError), opened(str(tmp_path / 'nothing')):
        pass
