import itertools
import logging
import os
import pathlib
import shutil
import subprocess
import sys

from chainer_fp8pipe.images import ImageFolder
from chainer_fp8pipe.images.decoding import ImageError

import chainer
import numpy
import pytest

from ..ranks import environment
from .folders import Broken, crop, make_folder, numbers, spoil, stream
from .pictures import jpeg, photograph
from .processes import eventually, is_alive, memory_of
from .turbo import needs_turbo


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root', 20)


def folder(root, **options):
    return ImageFolder(root, crop(), **{'decoder': 'pillow', 'seed': 3,
                                        **options})


@pytest.fixture
def iterate(root):
    """Makes iterators that are finalized after the test."""
    made = []

    def make(batch=6, workers=0, prefetch=0, repeat=True, shuffle=True,
             **options):
        made.append(folder(root, **options).iterator(
            batch, workers, prefetch, repeat, shuffle))
        return made[-1]
    yield make
    for iterator in made:
        iterator.finalize()


@pytest.mark.parametrize(('workers', 'prefetch', 'cache'), [
    (1, 0, None), (0, 0, 'memory'), (1, 1, 'decoded'), (3, 8, 'memory')])
def test_images_do_not_depend_on_workers_prefetching_or_the_cache(
        iterate, root, workers, prefetch, cache):
    labels, expected = [], []
    plain = iterate()
    for images, found in zip(*stream(plain, 12), strict=True):
        expected.append(images)
        labels.append(found)
    iterator = iterate(workers=workers, prefetch=prefetch, cache=cache)
    first = stream(iterator, 4)
    if cache:       # from now on no file is opened
        shutil.rmtree(root)
    later = stream(iterator, 8)
    assert first[1] + later[1] == labels
    assert numpy.array_equal(first[0] + later[0], expected)


@needs_turbo
@pytest.mark.parametrize('workers', [0, 2])
def test_epochs_from_a_cache_are_those_without_one(
        tmp_path, workers):
    (tmp_path / 'class').mkdir()
    for number in range(9):
        (tmp_path / 'class' / f'{number}.jpg').write_bytes(jpeg(
            photograph()[20 * number:250, :300 + number]))
    expected, labels = stream(
        folder(tmp_path, decoder='turbojpeg').iterator(3, workers=0), 9)
    data = folder(tmp_path, decoder='turbojpeg', cache='memory')
    files = sum(os.path.getsize(data.path(k)) for k in range(9))
    iterator = data.iterator(3, workers, 4)
    first = stream(iterator, 3)
    # What a worker has kept, it has kept for all.
    count, size = data.cached()
    assert count == 9
    assert size == files
    for k in range(9):
        os.remove(data.path(k))
    others = stream(iterator, 6)
    iterator.finalize()
    assert first[1] + others[1] == labels
    assert numpy.array_equal(first[0] + others[0], expected)


def test_an_epoch_has_every_sample_once_in_batches_of_nearly_one_size(
        iterate):
    iterator = iterate(workers=1, prefetch=2)
    assert iterator.batches_per_epoch == 4
    orders = []
    for _ in range(3):
        found = [numbers(next(iterator)) for _ in range(4)]
        assert [len(batch) for batch in found] == [5, 5, 5, 5]
        orders.append(list(itertools.chain(*found)))
        assert sorted(orders[-1]) == list(range(20))
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize('bad', [[], [4]])
def test_labels_are_the_classes_of_the_images(iterate, root, bad):
    for number in bad:      # and stay so when one is left out
        spoil(folder(root).path(number))
    iterator = iterate()
    for _ in range(8):
        batch = next(iterator)
        assert batch.labels.dtype == numpy.int32
        assert batch.labels.tolist() == [
            number * 3 // 20 for number in numbers(batch)]
        assert [label for _, label in batch] == batch.labels.tolist()


def test_epoch_detail_and_is_new_epoch_follow_the_batches(iterate):
    iterator = iterate(workers=1, prefetch=5)
    assert iterator.previous_epoch_detail is None
    seen = []
    for _ in range(5):
        next(iterator)
        seen.append((iterator.epoch, iterator.epoch_detail,
                     iterator.previous_epoch_detail, iterator.is_new_epoch))
    assert seen == [(0, 0.25, 0.0, False), (0, 0.5, 0.25, False),
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
    chainer.serializers.save_npz(tmp_path / 'state.npz', first)
    second = iterate(workers=2, prefetch=1)
    stream(second, 2)       # it has read ahead; that is void
    chainer.serializers.load_npz(tmp_path / 'state.npz', second)
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
def test_a_snapshot_of_another_order_is_refused(root, tmp_path, change,
                                                message):
    with_state = folder(root).iterator(6, 0)
    chainer.serializers.save_npz(tmp_path / 'state.npz', with_state)
    there = make_folder(tmp_path / 'other', change.get('samples', 20))
    other = ImageFolder(there, crop(), seed=change.get('seed', 3)).iterator(
        6, 0, shuffle=bool(change.get('shuffle', 1)))
    with pytest.raises(ValueError, match=message):
        chainer.serializers.load_npz(tmp_path / 'state.npz', other)


@pytest.mark.parametrize('prefetch', [0, 3])
def test_batches_are_read_ahead_while_nobody_asks(iterate, prefetch):
    iterator = iterate(workers=1, prefetch=prefetch)
    next(iterator)
    ahead = list(iterator._loader._open)
    assert len(ahead) == prefetch
    # Green and blue are in every image, so that it is all zero until then.
    assert eventually(lambda: all(
        slot.images[:count].any(axis=(1, 2, 3)).all()
        for _, slot, count in ahead))


def test_batches_and_single_images_that_are_kept_do_not_change(iterate):
    iterator = iterate(workers=1, prefetch=1)
    kept = [next(iterator) for _ in range(12)]
    single = iterate()
    images = [next(single)[2][0] for _ in range(12)]
    copies, _ = stream(iterate(), 12)
    assert numpy.array_equal([batch.images for batch in kept], copies)
    assert numpy.array_equal(images, [copy[2] for copy in copies])
    iterator.finalize()
    assert numpy.array_equal([batch.images for batch in kept], copies)


def test_batches_that_are_dropped_use_the_same_memory_again(iterate):
    iterator = iterate(workers=1, prefetch=1)
    addresses = {next(iterator).images.ctypes.data for _ in range(40)}
    assert len(addresses) <= 4


@pytest.mark.parametrize('workers', [0, 1])
def test_a_corrupt_image_is_left_out_counted_and_named_once(
        iterate, root, workers, caplog):
    data = folder(root)
    for number in 4, 11:
        spoil(data.path(number))
    iterator = iterate(workers=workers, prefetch=2)
    with caplog.at_level(logging.WARNING):
        found = [numbers(next(iterator)) for _ in range(8)]
    good = sorted({*range(20)} - {4, 11})
    assert sorted(itertools.chain(*found[:4])) == good
    assert sorted(itertools.chain(*found[4:])) == good
    assert iterator.skipped == 4
    assert sorted(message.split(': ')[1] for message in caplog.messages
                  if 'skipped' in message) == [
        f'skipped {data.path(number)}' for number in (4, 11)]


@pytest.mark.parametrize('workers', [0, 1])
def test_a_corrupt_image_is_an_error_if_that_is_wanted(
        iterate, root, workers):
    path = folder(root).path(4)
    spoil(path)
    iterator = iterate(workers=workers, prefetch=3, on_error='raise')
    pids = iterator.worker_pids
    with pytest.raises(ImageError, match=r'004\.png: .*\(rank 0\)'):
        stream(iterator, 4)
    assert not any(map(is_alive, pids))
    with pytest.raises(RuntimeError, match='finalized, or has failed'):
        next(iterator)


@pytest.mark.parametrize('workers', [0, 1])
def test_a_file_that_has_gone_is_an_error(iterate, root, workers):
    iterator = iterate(workers=workers)
    os.remove(folder(root).path(4))
    with pytest.raises(OSError, match=r'004\.png was found, but cannot be '
                                      r'read: FileNotFoundError'):
        stream(iterator, 4)


@pytest.mark.parametrize('workers', [0, 1])
def test_a_mistake_in_the_transform_is_shown_with_its_traceback(
        root, workers):
    iterator = ImageFolder(root, Broken()).iterator(6, workers)
    with pytest.raises(RuntimeError, match=r'(?s)\.png: .*in plan.*KeyError'):
        next(iterator)


def test_a_finalized_iterator_raises_and_can_still_be_saved(
        iterate, tmp_path):
    iterator = iterate()
    next(iterator)
    chainer.serializers.save_npz(tmp_path / 'earlier.npz', iterator)
    next(iterator)
    iterator.finalize()
    with pytest.raises(RuntimeError, match='finalized.*make another'):
        iterator.reset()
    with pytest.raises(RuntimeError, match='finalized.*make another'):
        chainer.serializers.load_npz(tmp_path / 'earlier.npz', iterator)
    chainer.serializers.save_npz(tmp_path / 'later.npz', iterator)
    again = iterate()
    chainer.serializers.load_npz(tmp_path / 'later.npz', again)
    assert again.epoch_detail == 0.5


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


def test_a_loop_of_iterators_opens_no_more_and_more_files(root):
    data = folder(root)

    def one():
        iterator = data.iterator(6, 1, 1)
        next(iterator)
        iterator.finalize()
        return len(os.listdir('/proc/self/fd'))
    assert one() == [one() for _ in range(2)][-1]


def test_workers_import_neither_chainer_nor_mpi(iterate):
    subprocess.run([sys.executable, '-c', (
        'import sys, chainer_fp8pipe.images.worker as worker\n'
        'assert worker.Reader\n'
        "assert not {'chainer', 'mpi4py', 'cupy'} & set(sys.modules)")],
        env=environment(), check=True, timeout=300)
    iterator = iterate(workers=1)
    next(iterator)
    mapped = pathlib.Path(f'/proc/{iterator.worker_pids[0]}/maps').read_text()
    assert [name in mapped for name in ('numpy', 'mpi4py', 'libmpi')] == [
        True, False, False]
