import types

from chainer_fp8pipe.training.iterators import ReplicaIterator

import chainer
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

SIZES = {'samples': st.integers(1, 40), 'batch': st.integers(1, 50),
         'replicas': st.integers(1, 5), 'seed': st.integers(0, 1 << 40)}


def grid_of(index, replicas):
    return types.SimpleNamespace(replica_index=index, replicas=replicas)


def replicas_of(samples, batch, replicas, **options):
    return [ReplicaIterator(range(samples), batch, grid_of(index, replicas),
                            **options) for index in range(replicas)]


@given(**SIZES, shuffle=st.booleans())
def test_the_batches_do_not_depend_on_the_replicas(
        samples, batch, replicas, seed, shuffle):
    batch = max(batch, replicas)
    options = {'seed': seed, 'shuffle': shuffle}
    whole = ReplicaIterator(range(samples), batch, **options)
    parts = replicas_of(samples, batch, replicas, **options)
    for _ in range(4):
        expected = whole.next()
        shares = [part.next() for part in parts]
        assert sum(shares, []) == expected
        sizes = [len(share) for share in shares]
        assert sum(sizes) == batch
        assert max(sizes) - min(sizes) <= 1
        for part in parts:
            assert part.epoch_detail == whole.epoch_detail


@given(**SIZES)
def test_every_sample_comes_once_in_each_epoch(samples, batch, replicas,
                                               seed):
    batch = max(batch, replicas)
    parts = replicas_of(samples, batch, replicas, seed=seed)
    seen = []
    while parts[0].epoch < 3:
        seen += sum((part.next() for part in parts), [])
    for epoch in range(3):
        assert sorted(seen[epoch * samples:(epoch + 1) * samples]) == list(
            range(samples))


@given(**SIZES)
def test_one_epoch_gives_all_replicas_equally_many_batches(
        samples, batch, replicas, seed):
    batch, samples = max(batch, replicas), max(samples, replicas)
    parts = replicas_of(samples, batch, replicas, seed=seed, repeat=False)
    batches = [list(part) for part in parts]
    assert len(set(map(len, batches))) == 1
    assert all(share for part in batches for share in part)
    assert sorted(sum(sum(batches, []), [])) == list(range(samples))
    assert all(part.epoch_detail == 1 for part in parts)
    # A rest that is too small for all replicas joins the batch before.
    assert all(sum(map(len, shares)) < batch + replicas
               for shares in zip(*batches, strict=True))


def test_the_order_depends_on_seed_and_epoch_only():
    def epochs(seed):
        iterator = ReplicaIterator(range(30), 30, seed=seed)
        return iterator.next(), iterator.next()
    numpy.random.seed(3)
    expected = numpy.random.rand()
    numpy.random.seed(3)
    (first, second), again, other = epochs(1), epochs(1), epochs(2)
    assert (first, second) == again
    assert first != second
    assert (first, second) != other
    # Fixed for ever, or snapshots would go on in another order.
    assert ReplicaIterator(range(8), 8).next() == [7, 2, 4, 0, 5, 3, 1, 6]
    # Neither does it draw from the global generator.
    assert numpy.random.rand() == expected


@given(steps=st.integers(0, 9), width=st.integers(1, 4))
def test_replica_iterator_resumes_at_any_number_of_replicas(steps, width):
    first = ReplicaIterator(range(13), 5, grid_of(1, 3), seed=4)
    whole = ReplicaIterator(range(13), 5, seed=4)
    for _ in range(steps):
        first.next()
        whole.next()
    saved = chainer.serializers.DictionarySerializer()
    first.serialize(saved)
    parts = replicas_of(13, 5, width, seed=4)
    for part in parts:
        part.serialize(chainer.serializers.NpzDeserializer(saved.target))
        assert part.epoch_detail == whole.epoch_detail
        assert part.previous_epoch_detail == whole.previous_epoch_detail
        assert part.is_new_epoch == whole.is_new_epoch
    for _ in range(4):
        assert sum((part.next() for part in parts), []) == whole.next()


@pytest.mark.parametrize(('arguments', 'match'), [
    ((range(9), 2, grid_of(0, 3)), 'each of the 3 replicas'),
    (([], 4), 'the 0 samples of the data set must be at least'),
    ((range(2), 4, grid_of(0, 3), False), 'each of the 3 replicas'),
    ((range(8), 4, 'world'), r'grid is a str; .*ProcessGrid\(comm, 1\)'),
    ((range(8), 4, None, True, True, '1'), "seed is '1'; it must be a whole"),
    ((range(8), 0), 'batch_size is 0; it must be a whole number'),
    ((range(8), 2.5), 'batch_size is 2.5; it must be a whole number')])
def test_what_cannot_be_divided_is_an_error(arguments, match):
    with pytest.raises(ValueError, match=match):
        ReplicaIterator(*arguments)


def test_a_smaller_data_set_than_was_saved_is_an_error():
    iterator = ReplicaIterator(range(13), 5)
    iterator.next()
    iterator.next()
    saved = chainer.serializers.DictionarySerializer()
    iterator.serialize(saved)
    with pytest.raises(ValueError, match='after 10 samples .* has 8'):
        ReplicaIterator(range(8), 5).serialize(
            chainer.serializers.NpzDeserializer(saved.target))
