"""Batches of a folder's images: their order, what is bad, their memory."""
import itertools
import os
import pickle
import shutil
import threading
import traceback

from chainer_fp8pipe.images import ImageError, ImageFolder, batch_arrays

import chainer
import numpy
import pytest

from .folders import Broken, crop, make_folder, numbers, spoil, stream
from .processes import eventually, memory_of


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root', 20)


def folder(root, **options):
    return ImageFolder(root, **{'transform': crop(), 'seed': 3, **options})


@pytest.fixture
def iterate(root):
    """Makes iterators that are finalized after the test."""
    made = []

    def make(batch=6, workers=1, prefetch=0, repeat=True, shuffle=True,
             **options):
        data = folder(root, **options)
        made.append(data.iterator(batch, workers, prefetch, repeat, shuffle))
        return made[-1]
    yield make
    for iterator in made:
        iterator.finalize()


def save(iterator, tmp_path):
    path = tmp_path / 'state.npz'
    chainer.serializers.save_npz(path, iterator)
    return path


# --- order

@pytest.mark.parametrize(('workers', 'prefetch', 'cache'), [
    (3, 0, 1 << 20), (2, 1, None), (3, 8, None)])
def test_images_do_not_depend_on_workers_prefetching_or_the_cache(
        iterate, root, workers, prefetch, cache):
    images, labels = stream(iterate(), 12)
    iterator = iterate(workers=workers, prefetch=prefetch, cache=cache)
    first = stream(iterator, 4)
    if cache:       # from now on no file is opened
        shutil.rmtree(root)
    later = stream(iterator, 8)
    assert first[1] + later[1] == labels
    assert numpy.array_equal(first[0] + later[0], images)


def test_an_epoch_has_every_image_once_and_the_position_follows(iterate):
    iterator = iterate(workers=1, prefetch=2)
    assert iterator.batches_per_epoch == 4
    assert iterator.previous_epoch_detail is None
    orders, seen = [], []
    for epoch in range(3):
        orders.append([])
        for _ in range(4):
            batch = next(iterator)
            found = numbers(batch)
            assert len(found) == 5
            assert {label.dtype.name for _, label in batch} == {'int32'}
            assert [label for _, label in batch] == [
                number * 3 // 20 for number in found]
            orders[epoch] += found
            seen.append((iterator.epoch, iterator.epoch_detail,
                         iterator.previous_epoch_detail,
                         iterator.is_new_epoch))
        assert sorted(orders[epoch]) == list(range(20))
    assert orders[0] != orders[1] != orders[2]
    assert seen[:5] == [(0, 0.25, 0.0, False), (0, 0.5, 0.25, False),
                        (0, 0.75, 0.5, False), (1, 1.0, 0.75, True),
                        (1, 1.25, 1.0, False)]


@pytest.mark.parametrize('workers', [1, 2])
def test_one_epoch_ends_and_starts_again_after_a_reset(iterate, workers):
    iterator = iterate(workers=workers, prefetch=3, repeat=False,
                       shuffle=False)
    for _ in range(2):
        assert list(itertools.chain(*map(numbers, iterator))) == list(
            range(20))
        with pytest.raises(StopIteration):
            next(iterator)
        iterator.reset()
    next(iterator)
    iterator.reset()
    assert numbers(next(iterator)) == list(range(5))


@pytest.mark.parametrize('taken', [3, 4])
def test_a_run_goes_on_in_mid_epoch_with_other_workers(
        iterate, tmp_path, taken):
    whole, first = iterate(), iterate(workers=1, prefetch=5)
    stream(whole, taken)
    stream(first, taken)
    path = save(first, tmp_path)
    second = iterate(workers=2, prefetch=1)
    stream(second, 2)       # it has read ahead; that is void
    chainer.serializers.load_npz(path, second)
    for name in ('epoch', 'epoch_detail', 'previous_epoch_detail',
                 'is_new_epoch', 'current_position'):
        assert getattr(second, name) == getattr(whole, name)
    expected, found = stream(whole, 6), stream(second, 6)
    assert found[1] == expected[1]
    assert numpy.array_equal(found[0], expected[0])


@pytest.mark.parametrize(('change', 'message'), [
    ({'seed': 4}, 'saved with seed=3, but here seed=4'),
    ({'samples': 21}, 'saved with samples=20, but here samples=21'),
    ({'shuffle': 0}, 'saved with shuffle=1, but here shuffle=0')])
def test_a_snapshot_of_another_order_is_refused(iterate, tmp_path, change,
                                                message):
    path = save(iterate(), tmp_path)
    there = make_folder(tmp_path / 'other', change.get('samples', 20))
    other = folder(there, seed=change.get('seed', 3)).iterator(
        6, shuffle=bool(change.get('shuffle', 1)))
    with pytest.raises(ValueError, match=message):
        chainer.serializers.load_npz(path, other)


def test_a_finalized_iterator_raises_and_can_still_be_saved(
        iterate, tmp_path):
    iterator = iterate()
    next(iterator)
    earlier = shutil.move(save(iterator, tmp_path), tmp_path / 'earlier.npz')
    next(iterator)
    iterator.finalize()
    for act in (iterator.reset, lambda: chainer.serializers.load_npz(
            earlier, iterator)):
        with pytest.raises(RuntimeError, match='finalized.*make another'):
            act()
    again = iterate()
    chainer.serializers.load_npz(save(iterator, tmp_path), again)
    assert again.epoch_detail == 0.5


# --- what is bad

@pytest.mark.parametrize(('options', 'harm', 'message'), [
    ({}, spoil, r'rank 0: .*004\.png: ValueError: it is neither JPEG nor'),
    ({}, os.remove, r'rank 0: .*004\.png: FileNotFoundError'),
    ({'transform': Broken()}, None, r"\.png: KeyError: 'a mistake'"),
])
def test_what_cannot_be_read_is_an_error_that_ends_the_iterator(
        iterate, root, options, harm, message):
    iterator = iterate(prefetch=3, **options)
    if harm:        # nothing is read before the first batch is wanted
        harm(folder(root).path(4))
    with pytest.raises(ImageError, match=message) as caught:
        stream(iterator, 5)
    if 'transform' in options:
        assert 'in plan' in ''.join(traceback.format_exception(caught.value))
    assert not threads()
    with pytest.raises(RuntimeError, match='finalized, or has failed'):
        next(iterator)


def threads():
    return [thread for thread in threading.enumerate()
            if thread.name.startswith('images')]


# --- memory

@pytest.mark.parametrize('prefetch', [0, 3])
def test_batches_are_read_ahead_while_nobody_asks(iterate, root, prefetch):
    class Noted(type(crop())):
        def finish(self, pixels, out=None):
            read.append(pixels[0, 0, 0])
            return super().finish(pixels, out)
    read = []
    iterator = iterate(prefetch=prefetch, transform=Noted(8, normalise=None))
    next(iterator)
    assert eventually(lambda: len(read) == 5 * (1 + prefetch))


@pytest.mark.parametrize('finalize', [True, False])
def test_all_memory_and_threads_are_gone_with_an_iterator(root, finalize):
    before = memory_of(os.getpid())
    data = folder(root, cache=1 << 20)
    iterator = data.iterator(6, 2, 4)
    stream(iterator, 5)
    assert len(threads()) == 2
    assert memory_of(os.getpid()) > before
    if finalize:
        iterator.finalize()
        iterator.finalize()
        assert not threads()
    del data, iterator
    assert eventually(lambda: not threads())
    assert memory_of(os.getpid()) == before


def test_a_batch_goes_to_a_model_without_a_copy(iterate):
    batch = next(iterate())
    for device in None, -1, '@numpy':
        images, labels = batch_arrays(batch, device)
        assert images is batch[0][0].base
        assert labels.dtype == numpy.int32
        for found, right in zip((images, labels), (
                chainer.dataset.concat_examples(batch)), strict=True):
            assert numpy.array_equal(found, right)


@pytest.mark.parametrize('change', [
    lambda batch: batch.pop(), lambda batch: batch.reverse(),
    lambda batch: batch.append(batch[0]),
    lambda batch: batch.__setitem__(0, (255 - batch[0][0], batch[0][1])),
    lambda batch: batch.__setitem__(1, (batch[1][0][:, ::-1], 0)),
    lambda batch: batch.__setitem__(0, (batch[0][0], 2))])
def test_a_changed_batch_is_the_batch(iterate, change):
    batch = next(iterate())
    change(batch)
    for given in batch, pickle.loads(pickle.dumps(batch)):
        for found, expected in zip(
                batch_arrays(given), chainer.dataset.concat_examples([*batch]),
                strict=True):
            assert numpy.array_equal(found, expected)
