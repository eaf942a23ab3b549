"""A folder of images: its files, items and arguments; on several ranks."""
import itertools
import multiprocessing
import os
import pathlib
import pickle

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.images import CenterCrop, ImageFolder
from chainer_fp8pipe.images.cache import Cache

import chainer
import chainermn
import numpy
import pytest

from tests.ranks import on_ranks

from .folders import Broken, crop, make_folder, numbers
from .processes import descriptors


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root')


# --- its files

def touch(root, *names):
    for name in names:
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_images_are_sorted_by_name_and_all_else_is_left_out(tmp_path):
    names = ['a/z.png', 'a/ä.jpeg', 'b/1.jpg', 'b/2.JPEG', 'c/x.JPG']
    touch(tmp_path, *names[::-1], 'a/readme.txt', 'a/.2.jpg', '.hidden/5.jpg',
          '6.jpg')
    with open(os.fsencode(tmp_path) + b'/c/\xff.jpg', 'wb'):
        pass
    data = ImageFolder(tmp_path, crop())
    assert data.classes == ['a', 'b', 'c']
    assert [data.path(index) for index in range(5)] == [
        str(tmp_path / name) for name in names]
    assert os.fsencode(data.path(5)).endswith(b'/c/\xff.jpg')
    assert data.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.labels.dtype == 'int32'


@pytest.mark.parametrize(('names', 'message'), [
    (None, 'is not a folder'), ((), 'has no folders in it'),
    (('1.jpg',), 'has no folders in it'),
    (('a/1.jpg', 'b/readme.txt'), "no images .* in 'b' of"),
])
def test_a_folder_without_images_is_an_error_that_names_it(
        tmp_path, names, message):
    where = str(tmp_path if names is not None else tmp_path / 'nowhere')
    touch(tmp_path, *names or ())
    with pytest.raises(ValueError, match=message) as caught:
        ImageFolder(where, crop())
    assert repr(where) in str(caught.value)


# --- one process

def test_a_folder_is_a_data_set_of_chainers(root):
    data, again = ImageFolder(root, crop()), ImageFolder(root, crop())
    assert len(data) == 12
    assert data.classes == ['class0', 'class1', 'class2']
    assert data.labels.tolist() == [number // 4 for number in range(12)]
    image, label = data[7]
    assert (image.shape, image.dtype) == ((3, 8, 8), numpy.uint8)
    assert (label, label.dtype) == (1, numpy.int32)
    assert numbers(data[2:5]) == [2, 3, 4]
    assert numbers([data[-1], data[-12]]) == [11, 0]
    with pytest.raises(IndexError):
        data[12]
    assert data.path(11).endswith('class2/011.png')
    # Another crop each time, but the same in the next run.
    data = ImageFolder(root, crop())
    found = [data[3][0] for _ in range(4)]
    assert all((one == again[3][0]).all() for one in found)
    assert len({image.tobytes() for image in found}) > 1


@pytest.mark.parametrize('kind', [
    chainer.iterators.SerialIterator,
    chainer.iterators.MultithreadIterator,
    lambda data, batch, repeat, shuffle: (
        chainer.iterators.MultiprocessIterator(
            data, batch, repeat, shuffle, n_processes=2))])
def test_chainers_own_iterators_fill_the_cache(root, kind):
    # Not what it is from Python 3.14 on: the memory belongs to forks.
    multiprocessing.set_start_method('fork', force=True)
    data = ImageFolder(root, crop(), 1 << 20)
    iterator = kind(data, 5, repeat=False, shuffle=True)
    found = list(itertools.chain(*map(numbers, iterator)))
    iterator.finalize()
    assert sorted(found) == list(range(12))
    for index in range(12):
        os.remove(data.path(index))
    assert numbers(data[:]) == list(range(12))


@pytest.mark.parametrize(('options', 'message'), [
    ({'cache': 'memory'}, "cache='memory' must be a whole number of 1"),
    ({'cache': 0}, 'cache=0 must be a whole number of 1'),
    ({'seed': -1}, 'seed=-1 must be a whole number of 0'),
    ({'seed': 1.5}, 'seed=1.5 must be a whole number'),
    ({'seed': 1 << 63}, 'and below 2'),
    ({'shard': (0, 1)}, 'must be a communicator'),
    ({'transform': 224}, r'transform=224 is no transform.*Crop\(224\)'),
    ({'transform': CenterCrop}, 'is no transform'),
    *((dict([one]), f'{one[0]}={one[1]} must be a whole number') for one in (
        ('batch', 0), ('batch', 4.5), ('workers', 0), ('prefetch', -1))),
])
def test_a_wrong_argument_is_an_error_that_names_it(root, options, message):
    def make(batch=2, workers=1, prefetch=0, **options):
        ImageFolder(root, **{'transform': crop(), **options}).iterator(
            batch, workers, prefetch)
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)


def test_a_folder_and_its_cache_go_to_another_process(
        root, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data = ImageFolder('root', crop(), 1 << 20)
    assert numbers([data[7]]) == [7]
    os.remove(data.path(7))
    monkeypatch.chdir('/')      # a relative folder is still found
    again = pickle.loads(pickle.dumps(data))
    assert again.path(0) == f'{tmp_path}/root/class0/000.png'
    assert numbers([again[0], again[7]]) == [0, 7]


# --- several ranks

def raises_everywhere(comm, message, action):
    """Every rank has the error, whoever made the mistake."""
    with pytest.raises(ValueError, match=message):
        action()
    assert comm.allreduce(1) == comm.size


def epoch_of(iterator):
    """The numbers of this rank's images in one epoch."""
    return [number for _ in range(iterator.batches_per_epoch)
            for number in numbers(next(iterator))]


def kinds(comm):
    """All that the folder takes as ``shard``."""
    return {'mpi4py': comm, 'fp8': create_communicator('fp8', comm),
            'naive': chainermn.create_communicator('naive', comm)}


@on_ranks(2, 4)
@pytest.mark.parametrize('kind', ['mpi4py', 'fp8', 'naive'])
def test_each_image_is_read_once_in_an_epoch_over_all_ranks(
        comm, root, kind):
    iterator = ImageFolder(root, crop(), shard=kinds(comm)[kind]).iterator(
        3, workers=1, prefetch=2)
    mine = [epoch_of(iterator) for _ in range(2)]
    assert iterator.is_new_epoch
    iterator.finalize()
    for found in mine:
        assert sorted(itertools.chain(*comm.allgather(found))) == list(
            range(12))
    assert set(mine[0]) != set(mine[1])


@on_ranks(4)
def test_ranks_of_a_node_share_one_cache(comm, root):
    before = descriptors('memfd')
    data = ImageFolder(root, crop(), shard=comm, cache=1 << 20)
    assert len({place[2:] for place in comm.allgather(
        data._cache.place)}) == 1
    iterator = data.iterator(3, workers=1, prefetch=0)
    epoch_of(iterator)
    comm.Barrier()
    if not comm.rank:
        for index in range(12):
            os.remove(data.path(index))
    comm.Barrier()
    epoch_of(iterator)      # here most images are on another rank
    iterator.finalize()
    del data, iterator
    assert descriptors('memfd') == before


@on_ranks(2)
def test_ranks_that_cannot_see_each_other_have_a_cache_each(comm, root):
    openly, create, budgets = Cache.open, Cache.create, []
    try:
        Cache.open = classmethod(lambda cls, place, samples: None)
        Cache.create = classmethod(lambda cls, samples, budget: (
            budgets.append(budget), create(samples, budget))[1])
        data = ImageFolder(root, crop(), 100_000, comm)
    finally:
        Cache.open, Cache.create = openly, create
    assert budgets[-1] == 50_000
    assert len({place[2:] for place in comm.allgather(
        data._cache.place)}) == 2


@on_ranks(4)
def test_a_run_goes_on_with_other_ranks(comm, root, tmp_path):
    # As one rank, whose batch is that of all ranks together.
    serial = ImageFolder(root, crop()).iterator(2 * comm.size, workers=1)
    next(serial)
    path = f'{tmp_path}/{comm.rank}.npz'
    chainer.serializers.save_npz(path, serial)
    iterator = ImageFolder(root, crop(), shard=comm).iterator(2, workers=1)
    chainer.serializers.load_npz(path, iterator)
    for _ in range(4):
        together = comm.allgather(numbers(next(iterator)))
        assert list(itertools.chain(*together)) == numbers(next(serial))
        assert iterator.epoch_detail == serial.epoch_detail
    iterator.finalize()


@on_ranks(2)
@pytest.mark.parametrize(('options', 'message'), [
    ({'root': (None, 'nowhere')}, "rank 1: .*nowhere' is not a folder"),
    ({'root': ('nowhere', 'nowhere')}, "nowhere' is not a folder"),
    # Rank 0 alone looks into it.
    ({'root': ('.', '.')}, 'has no folders in it|no images'),
    ({'seed': (0, 1)}, 'seed is 0 on rank 0 but 1 on rank 1'),
    ({'cache': (None, 7)}, 'cache is None on rank 0 but 7'),
    ({'seed': (0, 0.5)}, 'rank 1: .*0.5 must be a whole number'),
    ({'transform': (crop(8), crop(9))},
     r'transform is .*size=\(8, 8\).* on rank 0 but .*size=\(9, 9\)'),
    ({'transform': (crop(8), Broken())}, 'transform is .*Crop.*Broken'),
])
def test_wrong_arguments_are_errors_on_every_rank(
        comm, root, options, message):
    mine = {name: values[comm.rank] for name, values in options.items()}
    raises_everywhere(comm, message, lambda: ImageFolder(
        mine.pop('root', None) or root, shard=comm,
        **{'transform': crop(), **mine}))


@on_ranks(4)
def test_wrong_iterators_are_errors_on_every_rank(comm, root, tmp_path):
    data = ImageFolder(root, crop(), shard=comm)
    raises_everywhere(
        comm, 'iterator batch is 2 on rank 0 but 3 on rank 3',
        lambda: data.iterator(2 + (comm.rank == 3)))
    raises_everywhere(comm, 'rank 2: ValueError: workers=0', lambda:
                      data.iterator(2, 0 if comm.rank == 2 else 1))
    few = tmp_path / 'few'
    if not comm.rank:
        make_folder(few, 3)
    comm.Barrier()
    small = ImageFolder(str(few), crop(), shard=comm)
    raises_everywhere(comm, 'use at most 3 ranks',
                      lambda: small.iterator(2))
