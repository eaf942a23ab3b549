"""Images that cannot be used: left out, counted, replaced if need be."""
import logging
import os

from chainer_fp8pipe.images import ImageError, ImageFolder

import chainer
import pytest

from .folders import crop, make_folder, numbers, spoil


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root', 10)


def make(root, bad=(), batch=1, workers=0, shard=None, **options):
    data = ImageFolder(root, crop(), shard=shard, seed=3, decoder='pillow')
    for number in bad:
        spoil(data.path(number))
    return data.iterator(batch, workers, 2, **options)


def epoch_of(iterator):
    return [next(iterator) for _ in range(iterator.batches_per_epoch)]


@pytest.mark.parametrize('workers', [0, 1])
def test_a_batch_that_would_be_empty_is_the_next_good_image_as_it_is_there(
        root, workers):
    whole = [batch.images.copy() for batch in epoch_of(make(root))]
    order = [int(images[0, 0, 0, 0]) for images in whole]
    # Two in a row, and the last one, whose next is the first.
    bad = [order[3], order[4], order[9]]
    iterator = make(root, bad, workers=workers)
    batches = epoch_of(iterator)
    expected = [0, 1, 2, 5, 5, 5, 6, 7, 8, 0]
    for batch, place in zip(batches, expected, strict=True):
        assert (batch.images == whole[place]).all()
        assert batch.labels.tolist() == [order[place] * 3 // 10]
    assert iterator.epoch_detail == 1
    assert (iterator.skipped, iterator.substituted) == (3, 3)
    iterator.finalize()


def test_as_long_as_a_share_has_one_good_image_no_batch_is_empty(root):
    iterator = make(root, {*range(10)} - {6}, batch=3)
    assert [numbers(batch) for batch in epoch_of(iterator)] == [[6]] * 4
    assert (iterator.skipped, iterator.substituted) == (9, 3)


def test_substitutes_are_of_the_share_of_the_rank(root):
    mine, theirs = (set(numbers([pair for batch in epoch_of(
        make(root, shard=(rank, 2))) for pair in batch]))
        for rank in range(2))
    assert mine == {*range(10)} - theirs
    with pytest.raises(ImageError, match=(
            'rank 0: no image of its share of epoch 0 can be used')):
        next(make(root, mine, shard=(0, 2)))


def test_a_file_that_has_gone_is_no_substitute(root):
    iterator = make(root, [0], shuffle=False)
    os.remove(ImageFolder(root).path(1))
    with pytest.raises(OSError, match=r'001\.png was found, but cannot'):
        next(iterator)


def test_counts_of_skipped_images_go_on_after_a_resume(root, tmp_path, caplog):
    first = make(root, [4], shuffle=False)
    epoch_of(first)
    path = tmp_path / 'state.npz'
    chainer.serializers.save_npz(path, first)
    second = make(root, shuffle=False)
    chainer.serializers.load_npz(path, second)
    assert (second.skipped, second.substituted) == (1, 1)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        epoch_of(second)
    assert (second.skipped, second.substituted) == (2, 2)
    assert 'skipped' not in caplog.text     # it was named in the first run


def test_snapshots_have_one_shape_whatever_was_skipped(root):
    shapes = []
    for bad in [], [4, 5]:
        iterator = make(root, bad)
        epoch_of(iterator)
        serializer = chainer.serializers.DictionarySerializer()
        iterator.serialize(serializer)
        shapes.append({name: array.shape
                       for name, array in serializer.target.items()})
    assert shapes[0] == shapes[1]


def test_other_ranks_do_not_load_the_counts_of_one_rank(
        root, tmp_path):
    first = make(root, [0, 1], shard=(0, 2), batch=5, shuffle=False)
    next(first)
    assert first.skipped == 2
    path = tmp_path / 'state.npz'
    chainer.serializers.save_npz(path, first)
    other = make(root, shard=(1, 2), batch=5, shuffle=False)
    chainer.serializers.load_npz(path, other)
    assert other.epoch_detail == first.epoch_detail
    assert other.skipped == 0
