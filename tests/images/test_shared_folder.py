"""An image folder on several ranks."""
import itertools
import os

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.images import ImageFolder
from chainer_fp8pipe.images.segment import Segment

import chainer
import chainermn
import pytest

from tests.ranks import on_ranks

from .folders import Broken, crop, make_folder, numbers, spoil
from .processes import descriptors


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root', 22)


@pytest.fixture
def few(tmp_path):
    return make_folder(tmp_path / 'few', 3)


def raises_everywhere(comm, message, action):
    """Every rank has the error, whoever made the mistake."""
    with pytest.raises(ValueError, match=message):
        action()
    assert comm.allreduce(1) == comm.size


@on_ranks(2, 4)
def test_each_sample_is_read_once_in_an_epoch_over_all_ranks(comm, root):
    iterator = ImageFolder(root, crop(), shard=comm).iterator(
        3, workers=1, prefetch=2)
    mine = []
    for _ in range(2):
        found = []
        while True:
            found.append(numbers(next(iterator)))
            if iterator.is_new_epoch:
                break
        assert set(comm.allgather(len(found))) == {
            iterator.batches_per_epoch}
        whole = comm.allgather(list(itertools.chain(*found)))
        assert sorted(itertools.chain(*whole)) == list(range(22))
        mine.append(set(itertools.chain(*found)))
    iterator.finalize()
    assert mine[0] != mine[1]


@on_ranks(2)
def test_communicators_of_all_kinds_will_do(comm, root):
    for shard in (comm, create_communicator('fp8', comm),
                  chainermn.create_communicator('naive', comm)):
        iterator = ImageFolder(root, crop(), shard=shard).iterator(
            3, workers=0, repeat=False)
        found = list(itertools.chain(*map(numbers, iterator)))
        assert sorted(itertools.chain(*comm.allgather(found))) == list(
            range(22))


@on_ranks(4)
@pytest.mark.parametrize('kind', ['memory', 'decoded'])
def test_ranks_of_a_node_share_one_cache(comm, root, kind):
    data = ImageFolder(root, crop(), shard=comm, cache=kind)
    place = data._reader.cache.segment.place
    assert len(set(comm.allgather(place.file))) == 1
    iterator = data.iterator(3, workers=1, prefetch=0)
    for _ in range(iterator.batches_per_epoch):
        next(iterator)
    comm.Barrier()
    assert data.cached()[0] == 22
    if not comm.rank:
        for folder, _, names in os.walk(root):
            for name in names:
                os.remove(os.path.join(folder, name))
    comm.Barrier()
    # In the second epoch most samples are on another rank.
    for _ in range(iterator.batches_per_epoch):
        next(iterator)
    iterator.finalize()


@on_ranks(2)
def test_ranks_that_cannot_see_each_other_have_a_cache_each(comm, root):
    openly = Segment.open
    try:
        Segment.open = classmethod(lambda cls, place: None)
        data = ImageFolder(root, crop(), shard=comm, cache='memory',
                           cache_bytes=100_000)
    finally:
        Segment.open = openly
    assert data._reader.cache.budget == 50_000
    places = comm.allgather(data._reader.cache.segment.place.file)
    assert len(set(places)) == 2


@on_ranks(4)
def test_a_run_goes_on_with_other_ranks(comm, root, tmp_path):
    def read(iterator, batches):
        return [number for _ in range(batches)
                for number in numbers(next(iterator))]
    # As one rank, whose batch is that of all ranks together.
    serial = ImageFolder(root, crop()).iterator(2 * comm.size, workers=0)
    read(serial, 2)
    path = f'{tmp_path}/{comm.rank}.npz'
    chainer.serializers.save_npz(path, serial)
    iterator = ImageFolder(root, crop(), shard=comm).iterator(2, workers=1)
    chainer.serializers.load_npz(path, iterator)
    for _ in range(4):
        together = list(itertools.chain(*comm.allgather(read(iterator, 1))))
        assert together == read(serial, 1)
        assert iterator.epoch_detail == serial.epoch_detail
    iterator.finalize()


@on_ranks(2)
def test_a_folder_without_images_is_an_error_on_every_rank(comm, root):
    def make(root):
        return lambda: ImageFolder(root, crop(), shard=comm)
    raises_everywhere(comm, "rank 1: .*nowhere' is not a folder",
                      make('nowhere' if comm.rank else root))
    raises_everywhere(comm, "nowhere' is not a folder", make('nowhere'))
    os.makedirs(os.path.join(root, 'empty'), exist_ok=True)
    raises_everywhere(comm, "no images .* in 'empty'", make(root))


@on_ranks(2)
@pytest.mark.parametrize(('options', 'message'), [
    ({'seed': (0, 1)}, 'seed is 0 on rank 0 but 1 on rank 1'),
    ({'cache': (None, 'memory')}, "cache is None on rank 0 but 'memory'"),
    ({'on_error': ('skip', 'raise')}, "on_error is 'skip' on rank 0 but"),
    ({'decoder': ('auto', 'magic')}, 'rank 1: .*magic'),
    ({'seed': (0, 0.5)}, 'rank 1: .*0.5 is not a whole number'),
    ({'transform': (crop(8), crop(9))},
     r'transform is .*size=\(8, 8\).* on rank 0 but .*size=\(9, 9\)'),
    ({'transform': (crop(8), Broken())}, 'transform is .*Crop.*Broken'),
])
def test_arguments_that_differ_are_errors_on_every_rank(
        comm, root, options, message):
    mine = {name: values[comm.rank] for name, values in options.items()}
    raises_everywhere(comm, message, lambda: ImageFolder(
        root, shard=comm, **{'transform': crop(), **mine}))


@on_ranks(2)
def test_transforms_that_do_not_write_themselves_are_alike(comm, root):
    made = [Broken() for _ in range(1 + comm.rank)]
    assert len(set(comm.allgather(repr(made[-1])))) == 2    # addresses
    assert len(ImageFolder(root, made[-1], shard=comm)) == 22


@on_ranks(2)
def test_a_budget_below_one_sample_is_an_error_on_every_rank(comm, root):
    raises_everywhere(comm, 'does not hold one sample', lambda: ImageFolder(
        root, crop(), shard=comm, cache='memory', cache_bytes=7))


@on_ranks(4)
def test_wrong_iterators_are_errors_on_every_rank(comm, root, few):
    data = ImageFolder(root, crop(), shard=comm)
    raises_everywhere(
        comm, 'iterator batch is 2 on rank 0 but 3 on rank 3',
        lambda: data.iterator(2 + (comm.rank == 3), 0))
    raises_everywhere(comm, 'rank 2: ValueError: workers=-1', lambda:
                      data.iterator(2, -1 if comm.rank == 2 else 0))
    small = ImageFolder(few, crop(), shard=comm)
    raises_everywhere(comm, 'use at most 3 ranks',
                      lambda: small.iterator(2, 0))


@on_ranks(2)
def test_an_error_names_the_rank_that_has_it(comm, root):
    data = ImageFolder(root, crop(), shard=comm, on_error='raise')
    if not comm.rank:
        for number in range(22):
            spoil(data.path(number))
    comm.Barrier()
    with pytest.raises(ValueError, match=rf'\(rank {comm.rank}\)'):
        next(data.iterator(3, workers=0))


@on_ranks(2)
def test_nothing_of_a_cache_is_left_open(comm, root):
    before = descriptors('memfd')
    for _ in range(3):
        data = ImageFolder(root, crop(), shard=comm, cache='memory')
        next(data.iterator(3, workers=0))
        del data
    assert descriptors('memfd') == before
