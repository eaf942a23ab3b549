from chainer_fp8pipe.intercept.function_calls import intercepting
from chainer_fp8pipe.pipeline.means import BatchStatistics

import chainer
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def assert_same_averages(found, wanted):
    for name in ('avg_mean', 'avg_var'):
        np.testing.assert_allclose(getattr(found, name),
                                   getattr(wanted, name), rtol=2e-6)


def run_in_parts(link, batch, sizes, **options):
    statistics = BatchStatistics()
    start = 0
    with chainer.using_config('train', True):
        for size in sizes:
            with statistics.counting(), intercepting(statistics):
                link(batch[start:start + size], **options)
            start += size
    statistics.finish()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5),
       st.floats(0, 1), st.integers(0, 3), st.booleans())
def test_parts_update_the_averages_like_the_whole(
        sizes, decay, seed, finetune):
    random = np.random.RandomState(seed)
    whole = L.BatchNormalization(3, decay=decay)
    parted = L.BatchNormalization(3, decay=decay)
    for _ in range(2):
        batch = (random.randn(sum(sizes), 3, 2, 2) * 3 + 10).astype('f')
        with chainer.using_config('train', True):
            whole(batch, finetune=finetune)
        run_in_parts(parted, batch, sizes, finetune=finetune)
    assert parted.N == whole.N
    assert_same_averages(parted, whole)


@pytest.mark.parametrize('uses_per_chunk', [2, 1])
def test_a_link_that_is_used_twice_is_updated_twice(uses_per_chunk):
    """In one chunk, or in two of a rank."""
    whole, parted = (L.BatchNormalization(2) for _ in range(2))
    random = np.random.RandomState(0)
    batches = [random.randn(6, 2).astype('f') + shift for shift in (0, 5)]
    with chainer.using_config('train', True):
        for batch in batches:
            whole(batch)
        statistics = BatchStatistics()
        for part in (slice(0, 3), slice(3, 6)):
            for first in range(0, 2, uses_per_chunk):
                with statistics.counting(first), intercepting(statistics):
                    for batch in batches[first:first + uses_per_chunk]:
                        parted(batch[part])
        statistics.finish()
    assert_same_averages(parted, whole)


def test_a_forward_pass_that_fails_leaves_the_averages_alone():
    link = L.BatchNormalization(2, decay=0.5)
    statistics = BatchStatistics()
    with pytest.raises(Exception, match='.'), chainer.using_config(
            'train', True), statistics.counting(), intercepting(statistics):
        link(np.ones((4, 3), 'f'))
    statistics.forget()
    assert link.decay == 0.5
    assert link.avg_mean.tolist() == [0, 0]
    assert link.avg_var.tolist() == [1, 1]
