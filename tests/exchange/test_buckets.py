"""Which gradients travel together, and in which order."""
import string

from chainer_fp8pipe.exchange.buckets import divide

import pytest
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.text(string.ascii_lowercase + string.digits + '/', min_size=1,
                max_size=6)


@pytest.mark.parametrize(('sizes', 'limit', 'buckets'), [
    # The last layers first, as people count.
    (dict.fromkeys(['/l1/W', '/l10/W', '/l2/W', '/l1/b', '/a/2/W', '/a/11/W'],
                   1), 0,
     ['/l10/W /l2/W /l1/W /l1/b /a/11/W /a/2/W']),
    # Filled with layers up to the limit.
    ({'/1/W': 10, '/2/W': 4, '/2/b': 1, '/3/W': 5, '/5/W': 1, '/6/W': 1}, 40,
     ['/6/W /5/W /3/W', '/2/W /2/b', '/1/W']),
    # What is small goes with the rest of its layer: no bucket waits for the
    # layer below.
    ({'/1/W': 98, '/1/b': 6, '/2/W': 1000, '/2/b': 6, '/3/W': 200,
      '/3/U': 90, '/3/b': 9}, 400,
     ['/3/W', '/3/U /3/b', '/2/W /2/b', '/1/W /1/b']),
    # A small layer goes with the large one below.
    ({'/0/W': 300, '/1/W': 500, '/1/b': 2, '/2/W': 3, '/2/b': 1, '/3/W': 250,
      '/4/W': 3, '/5/W': 2}, 400,
     ['/5/W /4/W /3/W', '/2/W /2/b /1/W /1/b', '/0/W']),
    # A layer with layers in it is one all the same.
    ({'/1/W': 10, '/1/conv/W': 10, '/1/z': 10}, 80,
     ['/1/conv/W /1/W', '/1/z']),
    ({}, 100, [])])
def test_buckets_by_hand(sizes, limit, buckets):
    assert divide(sizes, limit) == tuple(
        tuple(names.split()) for names in buckets)


@given(st.dictionaries(NAMES, st.integers(1, 50)), st.integers(0, 200))
def test_every_parameter_is_in_one_bucket_and_none_is_much_too_large(
        sizes, limit):
    buckets = divide(sizes, limit)
    assert sorted(name for names in buckets for name in names) == sorted(
        sizes)
    if limit:
        for names in buckets:
            large, *small = sorted((4 * sizes[name] for name in names),
                                   reverse=True)
            assert sum(small) <= max(limit - large, 0) + limit // 16
    else:
        assert len(buckets) <= 1
    # The insertion order is one rank's own business.
    assert divide(dict(reversed(sizes.items())), limit) == buckets
