
from chainer_fp8pipe.images.iterator import (
    batch_stop,
    batches_left,
    epoch_order,
    part,
)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

quick = settings(max_examples=200)
sizes_of = st.tuples(st.integers(1, 40), st.integers(1, 9))    # batch, ranks


def batches(samples, batch, ranks, start=0):
    """Start and stop of the global batches from a place to an epoch's end."""
    found = []
    while start < samples:
        found.append((start, batch_stop(start, samples, batch, ranks)))
        start = found[-1][1]
    return found


def parts(found, ranks):
    """Where in the order of the epoch each rank's samples are, per batch."""
    return [[list(range(*part(start, stop, rank, ranks).indices(10 ** 9)))
             for rank in range(ranks)] for start, stop in found]


def flat(found):
    return [place for batch in found for of_rank in batch
            for place in of_rank]


@quick
@given(samples=st.integers(1, 400), sizes=sizes_of)
def test_every_sample_comes_once_in_batches_of_nearly_one_size(
        samples, sizes):
    batch, ranks = sizes
    samples = max(samples, ranks)
    found = parts(batches(samples, *sizes), ranks)
    assert flat(found) == list(range(samples))
    lengths = {len(of_rank) for step in found for of_rank in step}
    assert min(lengths) >= 1
    assert max(lengths) <= min(max(batch, 2), min(lengths) + 1)
    assert len(found) == batches_left(samples, *sizes)
    if batch > 1:
        assert len(found) == -(-samples // (batch * ranks))
        assert batches(samples, batch * ranks, 1) == batches(samples, *sizes)


@quick
@given(samples=st.integers(20, 400), first=sizes_of, then=sizes_of,
       done=st.integers(0, 50))
def test_an_epoch_is_finished_with_other_ranks_and_batches(
        samples, first, then, done):
    begun = batches(samples, *first)[:done]
    used = begun[-1][1] if begun else 0
    if used < samples and samples - used < then[1]:
        with pytest.raises(ValueError, match=f'{samples - used} sample'):
            batches(samples, *then, used)
        return
    assert flat(parts(begun, first[1]) + parts(
        batches(samples, *then, used), then[1])) == list(range(samples))


def test_an_order_depends_on_the_seed_and_the_epoch_alone():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch))
              for seed in (0, 1, 1 << 32, 1 << 40) for epoch in range(3)}
    assert len(set(orders.values())) == len(orders)
    for (seed, epoch), order in orders.items():
        assert sorted(order) == list(range(50))
        assert order == tuple(epoch_order(50, seed, epoch))
    assert epoch_order(5, 3, 7, shuffle=False).tolist() == [0, 1, 2, 3, 4]
