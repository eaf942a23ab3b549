"""Batches of a folder's images: their order, what is bad, their memory."""
import copy
import itertools
import logging
import os
import pickle
import shutil

from chainer_fp8pipe.images import ImageFolder, batch_arrays
from chainer_fp8pipe.images.decoding import ImageError, create_decoder

import chainer
import numpy
import pytest

from .folders import Broken, crop, make_folder, numbers, spoil, stream
from .processes import eventually, is_alive, memory_of


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root', 20)


def folder(root, **options):
    return ImageFolder(root, **{'transform': crop(), 'decoder': 'pillow',
                                'seed': 3, **options})


@pytest.fixture
def iterate(root):
    """Makes iterators that are finalized after the test."""
    made = []

    def make(batch=6, workers=0, prefetch=0, repeat=True, shuffle=True,
             bad=(), **options):
        data = folder(root, **options)
        for number in bad:
            spoil(data.path(number))
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
    (1, 0, None), (0, 0, 'memory'), (1, 1, 'decoded'), (3, 8, 'memory')])
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
            assert batch.labels.dtype == numpy.int32
            assert batch.labels.tolist() == [label for _, label in batch] \
                == [number * 3 // 20 for number in found]
            orders[epoch] += found
            seen.append((iterator.epoch, iterator.epoch_detail,
                         iterator.previous_epoch_detail,
                         iterator.is_new_epoch))
        assert sorted(orders[epoch]) == list(range(20))
    assert orders[0] != orders[1] != orders[2]
    assert seen[:5] == [(0, 0.25, 0.0, False), (0, 0.5, 0.25, False),
                        (0, 0.75, 0.5, False), (1, 1.0, 0.75, True),
                        (1, 1.25, 1.0, False)]


@pytest.mark.parametrize('workers', [0, 1])
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
        6, 0, shuffle=bool(change.get('shuffle', 1)))
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

@pytest.mark.parametrize('workers', [0, 1])
def test_a_corrupt_image_is_left_out_counted_and_named_once(
        iterate, root, workers, caplog):
    iterator = iterate(workers=workers, prefetch=2, bad=[4, 11])
    with caplog.at_level(logging.WARNING):
        batches = [next(iterator) for _ in range(8)]
    for epoch in batches[:4], batches[4:]:
        assert sorted(itertools.chain(*map(numbers, epoch))) == sorted(
            {*range(20)} - {4, 11})
    for batch in batches:
        assert batch.labels.tolist() == [
            number * 3 // 20 for number in numbers(batch)]
    assert iterator.skipped == 4
    assert sorted(message.split(': ')[1] for message in caplog.messages
                  if 'skipped' in message) == [
        f'skipped {folder(root).path(number)}' for number in (4, 11)]


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize(('options', 'harm', 'error', 'message'), [
    ({'on_error': 'raise'}, spoil, ImageError, r'004\.png: .*\(rank 0\)'),
    # A decoder keeps its limit in the worker.
    ({'on_error': 'raise', 'decoder': create_decoder('pillow', 479)}, None,
     ImageError, 'too large: 20 x 24 pixels, and max_pixels=479'),
    ({}, os.remove, OSError, r'004\.png was found, but cannot be read: '
     'FileNotFoundError'),
    ({'transform': Broken()}, None, RuntimeError,
     r'(?s)\.png: .*in plan.*KeyError'),
    ({'transform': Broken('ä' + 'x' * 5000)}, None, RuntimeError, 'x{99}'),
])
def test_what_cannot_be_read_is_an_error_that_ends_the_iterator(
        iterate, root, workers, options, harm, error, message):
    iterator = iterate(workers=workers, prefetch=3, **options)
    if harm:        # nothing is read before the first batch is wanted
        harm(folder(root).path(4))
    pids = iterator.worker_pids
    with pytest.raises(error, match=message):
        stream(iterator, 4)
    assert not any(map(is_alive, pids))
    with pytest.raises(RuntimeError, match='finalized, or has failed'):
        next(iterator)


def epoch_of(iterator):
    return [next(iterator) for _ in range(iterator.batches_per_epoch)]


@pytest.mark.parametrize('workers', [0, 1])
def test_a_batch_that_would_be_empty_is_the_next_good_image_as_it_is_there(
        iterate, workers):
    whole = [batch.images.copy() for batch in epoch_of(iterate(1))]
    order = [int(images[0, 0, 0, 0]) for images in whole]
    # Two in a row, and the last one, whose next is the first.
    iterator = iterate(1, workers, bad=[order[3], order[4], order[19]])
    for batch, place in zip(epoch_of(iterator), [
            0, 1, 2, 5, 5, *range(5, 19), 0], strict=True):
        assert (batch.images == whole[place]).all()
        assert batch.labels.tolist() == [order[place] * 3 // 20]
    assert iterator.epoch_detail == 1
    assert (iterator.skipped, iterator.substituted) == (3, 3)


def test_substitutes_are_of_the_rank_and_as_long_as_there_is_one(iterate):
    mine, theirs = (set(numbers(itertools.chain(*epoch_of(
        iterate(3, shard=(rank, 2)))))) for rank in range(2))
    assert mine == {*range(20)} - theirs
    last = mine.pop()
    iterator = iterate(3, shard=(0, 2), bad=mine)
    assert [numbers(batch) for batch in epoch_of(iterator)] == [[last]] * 4
    assert (iterator.skipped, iterator.substituted) == (7, 3)
    with pytest.raises(ImageError, match=(
            'rank 0: no image of its share of epoch 0 can be used')):
        next(iterate(3, shard=(0, 2), bad=[last]))


def test_a_file_that_has_gone_is_no_substitute(iterate, root):
    iterator = iterate(1, bad=[0], shuffle=False)
    os.remove(folder(root).path(1))
    with pytest.raises(OSError, match=r'001\.png was found, but cannot'):
        next(iterator)


def test_counts_of_skipped_images_go_on_after_a_resume(
        iterate, tmp_path, caplog):
    plain = save(iterate(10, shard=(0, 2)), tmp_path)
    shapes = [{name: array.shape for name, array in numpy.load(plain).items()}]
    first = iterate(1, shard=(0, 2), shuffle=False, bad=[0])
    epoch_of(first)
    path = save(first, tmp_path)
    assert shapes == [{name: array.shape
                       for name, array in numpy.load(path).items()}]
    second, other = (iterate(1, shard=(rank, 2), shuffle=False)
                     for rank in range(2))
    for iterator in second, other:
        chainer.serializers.load_npz(path, iterator)
        assert iterator.epoch_detail == 1
    assert (second.skipped, second.substituted) == (1, 1)
    assert other.skipped == 0       # counts are of the rank that saved them
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        epoch_of(second)
    assert (second.skipped, second.substituted) == (2, 2)
    assert 'skipped' not in caplog.text     # it was named in the first run


# --- memory

@pytest.mark.parametrize('prefetch', [0, 3])
def test_batches_are_read_ahead_while_nobody_asks(iterate, prefetch):
    iterator = iterate(workers=1, prefetch=prefetch)
    next(iterator)
    loader = iterator._loader
    ahead = list(loader._requests)
    assert len(ahead) == prefetch
    # Green and blue are in every image, so that it is all zero until then.
    assert eventually(lambda: all(
        loader._ring.images(slot)[:count].any(axis=(1, 2, 3)).all()
        for slot, count in ahead))


def test_batches_that_are_kept_do_not_change_and_others_use_no_more_memory(
        iterate):
    images, _ = stream(iterate(), 12)
    iterator, single = iterate(workers=1, prefetch=1), iterate()
    kept = [next(iterator) for _ in range(12)]
    alone = [next(single)[2][0] for _ in range(12)]
    assert numpy.array_equal(alone, [image[2] for image in images])
    for _ in range(2):
        assert numpy.array_equal([batch.images for batch in kept], images)
        iterator.finalize()
    iterator = iterate(workers=1, prefetch=1)
    assert len({next(iterator).images.ctypes.data for _ in range(40)}) <= 4


@pytest.mark.parametrize('finalize', [True, False])
def test_all_memory_and_workers_are_gone_with_an_iterator(root, finalize):
    before = memory_of(os.getpid())
    data = folder(root, cache='memory')
    iterator = data.iterator(6, 1, 4)
    stream(iterator, 5)
    pids = iterator.worker_pids
    assert memory_of(os.getpid()) > before
    if finalize:
        iterator.finalize()
        iterator.finalize()
        assert not any(map(is_alive, pids))
        assert iterator.worker_pids == []
    del data, iterator
    assert eventually(lambda: not any(map(is_alive, pids)))
    assert memory_of(os.getpid()) == before


def test_a_batch_goes_to_a_model_without_a_copy_and_is_a_list_elsewhere(
        iterate):
    batch = next(iterate())
    for device in None, -1, '@numpy':
        images, labels = batch_arrays(batch, device)
        assert images is batch.images
        assert labels is batch.labels
    copies = pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)
    assert {*map(type, copies)} == {list}
    for found in (chainer.dataset.concat_examples(batch),
                  *map(chainer.dataset.concat_examples, copies),
                  batch_arrays(list(batch), -1)):
        assert (found[0] == batch.images).all()
        assert found[0] is not batch.images
        assert (found[1] == batch.labels).all()
        assert found[1].dtype == numpy.int32
