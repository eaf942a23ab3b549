"""Which gradients travel together, in which order, and when that is chosen."""
import itertools
import math
import string
import time
from fractions import Fraction

from chainer_fp8pipe.allreduce.engine import PARTS
from chainer_fp8pipe.exchange.buckets import Passes, divide, send_order

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
     ['/1/conv/W', '/1/W /1/z']),
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


# --- the order ---

ABC = ('a',), ('b',), ('c',)


@pytest.mark.parametrize(('finals', 'order'), [
    ('cfba', [1, 3, 0, 2]), ('dba', [0, 1, 2, 3]), ('', [0, 1, 2, 3])])
def test_buckets_that_are_never_complete_come_last_in_their_own_order(
        finals, order):
    buckets = ('a', 'b'), ('c',), ('d', 'e'), ('f',)
    times = {name: float(place) for place, name in enumerate(finals)}
    expected = [(number, PARTS) for number in order]
    assert send_order(buckets, times) == expected
    assert send_order(buckets, times, [0.1] * 4, [3] * 4) == expected


@pytest.mark.parametrize(('seconds', 'chunks', 'order'), [
    # Worked out by hand: a is final at 0, b at 2, c at 3.
    ([8, 4, 2], [8, 4, 2], [(0, PARTS // 4), (1, PARTS // 4), (2, PARTS),
                            (1, PARTS), (0, PARTS)]),
    # Not in the middle of a chunk: a's first travels until 4.
    ([8, 4, 2], [2, 2, 1], [(0, PARTS // 2), (2, PARTS), (1, PARTS),
                            (0, PARTS)]),
    # Nothing is on its way any more.
    ([1, 1, 1], [5, 5, 5], [(0, PARTS), (1, PARTS), (2, PARTS)])])
def test_what_forward_needs_first_overtakes_what_is_on_its_way(
        seconds, chunks, order):
    assert send_order(ABC, {'a': 0, 'b': 2, 'c': 3}, seconds, chunks) == order


@given(st.integers(1, 100), st.fractions(0, 1).filter(bool))
def test_slices_are_whole_chunks_of_a_bucket(chunks, before):
    """As compiled code rounds them down; of 64 chunks and more, some."""
    order = send_order(ABC[:2], {'a': Fraction(), 'b': before},
                       [Fraction(1)] * 2, [chunks, 1])
    begun = math.ceil(before * min(chunks, PARTS))
    if begun < min(chunks, PARTS):
        assert [number for number, _ in order] == [0, 1, 0]
        if chunks <= PARTS:
            assert chunks * order[0][1] // PARTS in (begun, begun + 1)


@given(st.data(), st.integers(1, 12))
def test_all_of_every_bucket_is_sent_and_what_is_urgent_arrives_soon(
        data, count):
    buckets = [(f'p{number}',) for number in range(count)]
    finals = data.draw(st.dictionaries(
        st.sampled_from([name for name, in buckets]), st.floats(0, 10)))
    seconds = data.draw(st.lists(st.floats(1e-3, 10), min_size=count,
                                 max_size=count))
    chunks = data.draw(st.lists(st.integers(1, 100), min_size=count,
                                max_size=count))
    order = send_order(buckets, finals, seconds, chunks)
    sent = dict.fromkeys(range(count), 0)
    for number, until in order:
        assert sent[number] < until <= PARTS
        sent[number] = until
    assert set(sent.values()) == {PARTS}
    assert arrival(order, buckets, finals, seconds) <= arrival(
        send_order(buckets, finals), buckets, finals, seconds
        ) + sum(seconds) / PARTS * len(order) + max(
            time / min(number, PARTS) for time, number in zip(
                seconds, chunks, strict=True))


def arrival(order, buckets, finals, seconds):
    """When the bucket that a forward pass needs first has arrived."""
    if not finals:
        return 0.0
    urgent = max((time, number) for number, (name,) in enumerate(buckets)
                 for time in [finals.get(name, -math.inf)])[1]
    now, before = 0.0, dict.fromkeys(range(len(buckets)), 0)
    for number, until in order:
        now = max(now, finals.get(buckets[number][0], now)) + (
            seconds[number] * (until - before[number]) / PARTS)
        before[number] = until
        if number == urgent and until == PARTS:
            return now
    pytest.fail('it was never sent')


# --- when gradients are final ---

@pytest.mark.parametrize(('passes', 'usual'), [
    # One second from each gradient to the next; '-' is for nobody.  Times
    # count from the first gradient of the last pass.
    ([('cb b-c', False)], [math.inf, 0, 2]),
    # With early buckets the time without does not count.
    ([('ab', False)] + [('a--b', True)] * 3, [0, 3, math.inf]),
    # Nor does a single update that was disturbed.
    ([('a' + '-' * gap + 'b', True) for gap in (2, 2, 90, 2, 3)],
     [0, 3, math.inf]),
    # The last updates do.
    ([('a' + '-' * gap + 'b', True) for gap in [9] * 100 + [4] * 20],
     [0, 5, math.inf]),
    # What is mostly not final never is.
    ([('ab', True), ('a', True), ('a', True)], [0, math.inf, math.inf])])
def test_usual_times(monkeypatch, passes, usual):
    moments = itertools.count()
    monkeypatch.setattr(time, 'perf_counter', lambda: float(next(moments)))
    taught = Passes()
    for names, early in passes:
        for one in names.split():
            taught.begin('kind', 1)
            for name in one:
                taught.note(name)
        taught.keep(early)
    assert taught.usual('abc') == usual


def test_looks_become_rarer():
    times = Passes()
    assert times.keep(False)
    looks = [number for number in range(1, 100) if times.keep(True)]
    assert looks == [5, 10, 20, 40, 80]
    assert times.keep(False)            # another codec, for example
    assert [number for number in range(1, 12) if times.keep(True)] == [5, 10]


@pytest.mark.parametrize(('intervals', 'expected'), [
    # Once a whole interval was seen, one pass is the last.
    (['a', 'a', 'a', 'a'], ['-', '-', '+', '+']),
    # Of passes that add up only the last counts.
    (['aaa', 'aaa', 'aaa'], ['---', '---', '--+']),
    # Fewer than ever are not taken for all.
    (['a', 'aaa', 'a', 'aaa'], ['-', '---', '-', '--+']),
    # Passes of another kind do not count: a generator's goes through both.
    (['gd', 'gd', 'gd', 'd', 'ggd'], ['--', '--', '-+', '+', '--+']),
    # A new model makes it learn again: digits say how many there are.
    (['a', 'a', '2a', 'a', 'a'], ['-', '-', '-', '-', '+']),
    # An interval without a pass teaches nothing.
    (['a', 'a', '', 'a'], ['-', '-', '', '+'])])
def test_the_last_backward_pass_is_guessed(intervals, expected):
    passes, models, found = Passes(), 1, []
    for interval in intervals:
        if interval[:1].isdigit():
            models, interval = int(interval[0]), interval[1:]
        found.append(''.join('-+'[passes.begin(kind, models)]
                             for kind in interval))
        passes.averaged()
    assert found == expected
