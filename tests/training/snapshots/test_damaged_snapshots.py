"""No damaged or crafted file is loaded with other numbers, or does harm."""
import random
import tracemalloc
import zipfile

from chainer_fp8pipe.training.snapshots.plain_values import from_json
from chainer_fp8pipe.training.snapshots.snapshot_file import opened

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import damage

#: Damaged files of one example: with 1,000 examples in a round, ten rounds
#: of ``make explore`` try 200,000 in each of the three tests.
FILES = 20
# Bytes of Python's own objects, whatever the size of the file.
_OWN = 1 << 18


def load(path):
    """All that is in a file, by the names of its members."""
    with opened(str(path)) as content:
        content.check()
        index = content.index
        found = {'meta/has': index.has,
                 'meta/communicator': numpy.array(index.communicator)}
        for key in index.keys:
            found[index.member_of(key)] = content.read(key)
            for rank in range(index.ranks):
                if content.has_own(rank, key):
                    found[index.member_of(key, rank)] = content.read(
                        key, rank)
    for name, value in found.items():
        if name.startswith('json/'):
            from_json(value)
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (
            value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


@pytest.fixture(scope='module')
def sample(tmp_path_factory):
    """A whole snapshot: its folder, its bytes, and what is in it."""
    folder = tmp_path_factory.mktemp('damaged')
    expected = damage.write_sample(folder / 'whole.npz')
    return folder, (folder / 'whole.npz').read_bytes(), expected


@pytest.fixture(scope='module')
def old_sample(tmp_path_factory):
    """The same as an older version would have written it."""
    folder = tmp_path_factory.mktemp('old')
    values = damage.write_sample(folder / 'new.npz')
    values = {name: value for name, value in values.items()
              if not name.startswith('json/')}
    # The key of what is left out is left out of the table, too.
    keys = [name for name in values if name.startswith('all/')]
    values['meta/has'] = numpy.array([
        [key[4:] in table for key in keys] for table in damage.states()])
    with zipfile.ZipFile(folder / 'whole.npz', 'w') as archive:
        for name, value in values.items():
            with archive.open(f'{name}.npy', 'w',
                              force_zip64=True) as member:
                numpy.lib.format.write_array(member, value)
    return folder, (folder / 'whole.npz').read_bytes(), values


def refuse_or_be_right(sample, kinds, seed):
    """Damages the file in several ways and tries to load each."""
    folder, whole, expected = sample
    draw = random.Random(seed)
    path = folder / 'damaged.npz'
    for _ in range(FILES):
        data = draw.choice(kinds)(whole, draw)
        path.write_bytes(data)
        tracemalloc.start()
        try:
            found = load(path)
        except ValueError:
            found = None
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak <= 2 * len(data) + _OWN
        assert not damage.HARM
        if found is not None:
            same(found, expected)


def test_the_whole_file_is_loaded_as_it_was_written(sample, old_sample):
    for folder, _, expected in sample, old_sample:
        same(load(folder / 'whole.npz'), expected)


def test_a_file_that_was_taken_apart_is_the_same_put_together(sample):
    folder, whole, expected = sample
    (folder / 'again.npz').write_bytes(
        damage.put_together(damage.taken_apart(whole)))
    same(load(folder / 'again.npz'), expected)


@given(st.integers(0, 2 ** 64 - 1))
def test_damaged_bytes_are_found_or_change_nothing(sample, seed):
    refuse_or_be_right(sample, damage.OF_BYTES, seed)


@given(st.integers(0, 2 ** 64 - 1))
def test_a_crafted_file_is_refused_or_changes_nothing(sample, seed):
    refuse_or_be_right(sample, [damage.crafted, damage.wrong_end], seed)


@given(st.integers(0, 2 ** 64 - 1))
def test_damaged_bytes_of_an_older_file_are_found(old_sample, seed):
    refuse_or_be_right(old_sample, damage.OF_BYTES, seed)


@pytest.mark.parametrize('kind', damage.OF_PARTS,
                         ids=lambda kind: kind.__name__)
def test_every_way_to_craft_a_file_is_refused(sample, kind):
    """Or the others would not show much."""
    _, whole, expected = sample
    folder = sample[0]
    refused = 0
    for seed in range(20):
        draw = random.Random(seed)
        parts = damage.taken_apart(whole)
        kind(parts, draw)
        (folder / 'crafted.npz').write_bytes(damage.put_together(parts))
        try:
            same(load(folder / 'crafted.npz'), expected)
        except ValueError:
            refused += 1
    assert refused >= 10


@pytest.mark.parametrize('at', [0.1, 0.5, 0.9, 0.999])
def test_a_cut_off_file_says_so_in_words(sample, at):
    folder, whole, _ = sample
    (folder / 'cut.npz').write_bytes(whole[:int(at * len(whole))])
    with pytest.raises(ValueError, match=r'cut.npz is damaged or no snapshot '
                       r'\(it.* end is missing\); resume from an older one'):
        load(folder / 'cut.npz')
