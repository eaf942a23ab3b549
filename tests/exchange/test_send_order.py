import math
from fractions import Fraction

from chainer_fp8pipe.allreduce.engine import PARTS
from chainer_fp8pipe.exchange.buckets import (
    Slice,
    finished_first,
    needed_first,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st


def times(names):
    return {name: float(place) for place, name in enumerate(names)}


def test_buckets_that_are_never_complete_come_last_in_their_own_order():
    buckets = ('a', 'b'), ('c',), ('d', 'e'), ('f',)
    for finals, order in (('cfba', [1, 3, 0, 2]), ('dba', [0, 1, 2, 3]),
                          ('', [0, 1, 2, 3])):
        expected = list(map(Slice, order))
        assert finished_first(buckets, times(finals)) == expected
        assert needed_first(buckets, times(finals), [0.1] * 4,
                            [3] * 4) == expected


def test_what_forward_needs_first_overtakes_what_is_on_its_way():
    """Worked out by hand: a is final at 0, b at 2, c at 3."""
    buckets = ('a',), ('b',), ('c',)
    finals = {'a': 0, 'b': 2, 'c': 3}
    assert needed_first(buckets, finals, [8, 4, 2], [8, 4, 2]) == [
        Slice(0, PARTS // 4), Slice(1, PARTS // 4), Slice(2), Slice(1),
        Slice(0)]


def test_nothing_is_overtaken_in_the_middle_of_a_chunk():
    """One of the first bucket travels until 4, of the second until 6."""
    buckets = ('a',), ('b',), ('c',)
    finals = {'a': 0, 'b': 2, 'c': 3}
    assert needed_first(buckets, finals, [8, 4, 2], [2, 2, 1]) == [
        Slice(0, PARTS // 2), Slice(2), Slice(1), Slice(0)]


@given(st.integers(1, 100), st.fractions(0, 1).filter(bool))
def test_slices_are_whole_chunks_of_a_bucket(chunks, before):
    """As compiled code rounds them down; of 64 chunks and more, some."""
    order = needed_first([('a',), ('b',)], {'a': Fraction(), 'b': before},
                         [Fraction(1)] * 2, [chunks, 1])
    begun = math.ceil(before * min(chunks, PARTS))
    if begun < min(chunks, PARTS):
        assert [part.bucket for part in order] == [0, 1, 0]
        if chunks <= PARTS:
            assert chunks * order[0].until // PARTS in (begun, begun + 1)


def test_without_anything_on_its_way_nothing_is_overtaken():
    buckets = ('a',), ('b',), ('c',)
    finals = {'a': 0, 'b': 2, 'c': 3}
    assert needed_first(buckets, finals, [1, 1, 1], [5, 5, 5]) == list(
        map(Slice, range(3)))


@given(st.data(), st.integers(1, 12))
def test_all_of_every_bucket_is_sent_and_none_before_it_is_final(data, count):
    buckets = [(f'p{number}',) for number in range(count)]
    finals = data.draw(st.dictionaries(
        st.sampled_from([name for name, in buckets]), st.floats(0, 10)))
    seconds = data.draw(st.lists(st.floats(1e-3, 10), min_size=count,
                                 max_size=count))
    chunks = data.draw(st.lists(st.integers(1, 100), min_size=count,
                                max_size=count))
    order = needed_first(buckets, finals, seconds, chunks)
    sent = dict.fromkeys(range(count), 0)
    for bucket, until in order:
        assert sent[bucket] < until <= PARTS
        sent[bucket] = until
    assert set(sent.values()) == {PARTS}
    assert waiting(order, buckets, finals, seconds) <= waiting(
        finished_first(buckets, finals), buckets, finals, seconds
        ) + sum(seconds) / PARTS * len(order) + max(
            time / min(number, PARTS) for time, number in zip(
                seconds, chunks, strict=True))


def waiting(order, buckets, finals, seconds):
    """When the bucket that a forward pass needs first has arrived."""
    if not finals:
        return 0.0
    urgent = max((time, number) for number, (name,) in enumerate(buckets)
                 for time in [finals.get(name, -math.inf)])[1]
    now, before = 0.0, dict.fromkeys(range(len(buckets)), 0)
    for bucket, until in order:
        now = max(now, finals.get(buckets[bucket][0], now)) + (
            seconds[bucket] * (until - before[bucket]) / PARTS)
        before[bucket] = until
        if bucket == urgent and until == PARTS:
            return now
    pytest.fail('it was never sent')
