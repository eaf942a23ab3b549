import collections

from chainer_fp8pipe.images.shards import (
    EpochPosition,
    batches_left,
    epoch_order,
    largest_part,
    next_step,
    others,
    part,
)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

quick = settings(max_examples=200)
ranks_of = st.integers(1, 9)
batches = st.integers(1, 40)


def steps(samples, batch, ranks, position=None):
    """The steps to the end of an epoch."""
    position = position or EpochPosition()
    epoch, found = position.epoch, []
    while position.epoch == epoch:
        found.append(next_step(position, samples, batch, ranks))
        position = found[-1].after
    return found


def places(found, ranks):
    """Where in the order of the epoch each rank's samples are, per step."""
    return [[list(range(*part(step, rank, ranks).indices(10 ** 9)))
             for rank in range(ranks)] for step in found]


@quick
@given(samples=st.integers(1, 400), batch=batches, ranks=ranks_of)
def test_every_sample_comes_once_in_an_epoch_over_all_ranks(
        samples, batch, ranks):
    samples = max(samples, ranks)
    parts = places(steps(samples, batch, ranks), ranks)
    assert [place for step in parts for of_rank in step
            for place in of_rank] == list(range(samples))


@quick
@given(samples=st.integers(1, 400), batch=batches, ranks=ranks_of)
def test_no_batch_is_empty_or_too_large_and_all_are_of_nearly_one_size(
        samples, batch, ranks):
    samples = max(samples, ranks)
    found = steps(samples, batch, ranks)
    sizes = {len(of_rank) for step in places(found, ranks)
             for of_rank in step}
    assert min(sizes) >= 1
    assert max(sizes) <= largest_part(samples, batch, ranks)
    assert max(sizes) - min(sizes) <= 1
    assert len(found) == batches_left(samples, batch, ranks)
    if batch > 1:
        assert len(found) == -(-samples // (batch * ranks))


@quick
@given(samples=st.integers(20, 400), first=st.tuples(batches, ranks_of),
       then=st.tuples(batches, ranks_of), stop=st.integers(0, 50))
def test_an_epoch_is_finished_with_other_ranks_and_batches(
        samples, first, then, stop):
    begun = steps(samples, *first)[:stop]
    position = begun[-1].after if begun else EpochPosition()
    rest = samples - position.used
    if position.epoch:
        return
    if rest < then[1]:
        with pytest.raises(ValueError, match=f'{rest} sample'):
            next_step(position, samples, *then)
        return
    parts = (places(begun, first[1])
             + places(steps(samples, *then, position), then[1]))
    assert [place for step in parts for of_rank in step
            for place in of_rank] == list(range(samples))


@quick
@given(samples=st.integers(1, 400), batch=st.integers(2, 20))
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples, batch):
    samples = max(samples, 4)
    assert steps(samples, 4 * batch, 1) == steps(samples, batch, 4) == (
        steps(samples, 2 * batch, 2))


@pytest.mark.parametrize(('samples', 'batch', 'ranks', 'sizes'), [
    (10, 4, 1, [[4], [3], [3]]),
    (13, 2, 2, [[2, 2], [1, 2], [1, 2], [1, 2]]),
    (5, 1, 4, [[1, 1, 1, 2]]),
    (8, 4, 2, [[4, 4]]),
    (9, 4, 2, [[2, 3], [2, 2]]),
])
def test_sizes_derived_by_hand(samples, batch, ranks, sizes):
    assert [[len(of_rank) for of_rank in step] for step in places(
        steps(samples, batch, ranks), ranks)] == sizes


def test_an_order_depends_on_the_seed_and_the_epoch_alone():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch))
              for seed in (0, 1, 1 << 32, 1 << 40) for epoch in range(3)}
    assert len(set(orders.values())) == len(orders)
    for (seed, epoch), order in orders.items():
        assert sorted(order) == list(range(50))
        assert order == tuple(epoch_order(50, seed, epoch))


def test_without_shuffling_the_order_is_the_folders():
    assert epoch_order(5, 3, 7, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_samples_move_between_ranks_from_epoch_to_epoch():
    met = collections.defaultdict(set)
    for epoch in range(10):
        order = epoch_order(40, 0, epoch)
        for step in steps(40, 5, 4):
            for rank in range(4):
                for sample in order[part(step, rank, 4)]:
                    met[sample].add(rank)
    assert sum(len(ranks) for ranks in met.values()) > 3.5 * 40


@quick
@given(samples=st.integers(1, 200), batch=batches, ranks=ranks_of,
       data=st.data())
def test_the_others_of_a_step_are_those_behind_it_and_then_those_before(
        samples, batch, ranks, data):
    samples = max(samples, ranks)
    found = steps(samples, batch, ranks)
    place = data.draw(st.integers(0, len(found) - 1))
    assert list(others(found[place], samples, batch, ranks)) == [
        *found[place + 1:], *found[:place]]
