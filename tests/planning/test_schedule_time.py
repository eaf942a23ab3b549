"""Simulated steps take what equations, hand and graphs say."""
import dataclasses
from fractions import Fraction

from chainer_fp8pipe.pipeline.schedules import (
    SCHEDULES,
    Kind,
    ScheduleError,
    forward_schedule,
    make_schedule,
)
from chainer_fp8pipe.planning.schedule_time import (
    Costs,
    Link,
    simulate,
    step_time,
)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..pipeline.graphs import longest_path

quick = settings(max_examples=60)

#: Whole numbers and halves of float64: every sum below is exact.
HALVES = st.integers(1, 2000).map(lambda number: number / 2)


@quick
@given(st.integers(1, 8), st.integers(1, 32), HALVES, HALVES, HALVES,
       st.integers(1, 500), st.integers(1, 60), st.sampled_from([2, 64, 512]))
def test_equal_stages_take_what_the_paper_says(
        d, m, forward, backward, latency, samples, sample_bytes, bandwidth):
    """Equations 1 to 3: with a link that blocks the sender, and without.

    Forward, the first micro-batch crosses d - 1 boundaries and the other
    m - 1 follow, one transfer each; so do the gradients.
    """
    costs = [Costs(forward, backward, 0.0)] * d
    t_comp = (Fraction(forward) + Fraction(backward)) * m * d
    t_pipe = (m + d - 1) * t_comp / (m * d)
    for name in 'gpipe', '1f1b':
        timeline = simulate(make_schedule(name, d, m), costs)
        assert Fraction(timeline.step_time) == t_pipe
        assert timeline.idle_share == pytest.approx((d - 1) / (m + d - 1))
    if d > 1:
        link = Link(latency, bandwidth, [samples * sample_bytes] * (d - 1),
                    overlapped=False)
        t_comm = 2 * (Fraction(latency)
                      + Fraction(samples * sample_bytes, bandwidth))
        assert Fraction(step_time(make_schedule('gpipe', d, m), costs, link)
                        ) == t_pipe + (m + d - 2) * t_comm


@quick
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 8),
       st.floats(0, 10), st.booleans(), st.data())
def test_unequal_chunks_take_the_longest_path_through_the_graph(
        name, stages, micro_batches, latency, overlapped, data):
    """And a rank does one thing at a time until the step ends."""
    chunks = (data.draw(st.integers(1, 3)) if name in (
        'interleaved', 'zero_bubble') else 1)
    schedule = make_schedule(name, stages, micro_batches, chunks)
    seconds = st.floats(0.125, 8)
    costs = [Costs(*(data.draw(seconds) for _ in range(3)))
             for _ in range(stages * chunks)]
    # The wire of the last holds a message for no time: only latency counts.
    for bandwidth, nbytes in (data.draw(HALVES), HALVES), (1.0, st.just(0)):
        link = Link(latency, bandwidth, [
            data.draw(nbytes) for _ in range(schedule.last_chunk)], overlapped)
        timeline = simulate(schedule, costs, link)
        assert step_time(schedule, costs, link) == timeline.step_time == max(
            event.end for event in timeline.events)
        for rank in range(stages):
            events = [one for one in timeline.events if one.rank == rank]
            assert all(first.end <= second.start for first, second
                       in zip(events, events[1:], strict=False))
    if not overlapped:
        return

    def seconds_of(action):
        cost = costs[action.chunk]
        return {Kind.FORWARD: cost.forward,
                Kind.BACKWARD: cost.backward_input + cost.backward_weight,
                Kind.BACKWARD_INPUT: cost.backward_input,
                Kind.BACKWARD_WEIGHT: cost.backward_weight,
                }.get(action.kind, 0.0)
    assert timeline.step_time == pytest.approx(
        longest_path(schedule, seconds_of, latency))
    work = micro_batches * sum(sum(cost[:3]) for cost in costs)
    assert timeline.idle_share == pytest.approx(
        1 - work / (stages * timeline.step_time), abs=1e-9)


@pytest.mark.parametrize(('schedule', 'costs', 'link', 'expected'), [
    # An overlapped link lets the sender compute on: messages are on the wire
    # for 1 s, 1 to 2 and 2 to 3, and arrive half a second later.
    (make_schedule('gpipe', 2, 2), [Costs(1, 1, 1)] * 2,
     Link(0.5, 100.0, [100]), [
         (0, 'forward', 0, 1), (0, 'forward', 1, 2),
         (1, 'forward', 2.5, 3.5), (1, 'forward', 3.5, 4.5),
         (1, 'backward', 4.5, 6.5), (1, 'backward', 6.5, 8.5),
         (0, 'backward', 8, 10), (0, 'backward', 10, 12)]),
    # Messages to a neighbour go one after the other.
    (forward_schedule(2, 3), [Costs(0.25, 0, 0)] * 2, Link(0.0, 1.0, [1]),
     [(1, 'forward', 3.25, 3.5)]),
    # The two directions do not disturb each other: activations 1 to 5 and 5
    # to 9, gradients 7 to 11 and 11 to 15.
    (make_schedule('1f1b', 2, 2), [Costs(1, 0.5, 0.5)] * 2,
     Link(0.0, 1.0, [4]), [(0, 'backward', 15, 16)]),
    # A rank has a link to each neighbour: rank 1 sends up from 14 to 18, and
    # down at 17 in no time.
    (make_schedule('1f1b', 3, 3), [Costs(1, 0.5, 0.5)] * 3,
     Link(0.0, 1.0, [0, 4]), [(0, 'backward', 17, 18),
                              (0, 'backward', 25, 26)]),
    # Boundaries have their own sizes of messages; chunks on ranks 0, 1, 0, 1.
    (forward_schedule(2, 1, 2), [Costs(1, 0, 0)] * 4,
     Link(0.0, 1.0, [1, 2, 4]), [(1, 'forward', 10, 11)]),
    (make_schedule('gpipe', 1, 1), [Costs(1, 2, 3, 1.5)], None, [
        (0, 'forward', 0, 1), (0, 'recompute', 1, 2.5),
        (0, 'backward', 2.5, 7.5)]),
    (make_schedule('zero_bubble', 1, 1), [Costs(1, 2, 3)], None, [
        (0, 'forward', 0, 1), (0, 'backward', 1, 3),
        (0, 'backward_weight', 3, 6)]),
    # A link that blocks shows what it takes.
    (forward_schedule(2, 1), [Costs(1, 0, 0)] * 2,
     Link(0.5, 1.0, [1], overlapped=False), [
         (0, 'forward', 0, 1), (0, 'send', 1, 2.5),
         (1, 'forward', 2.5, 3.5)])])
def test_steps_by_hand(schedule, costs, link, expected):
    timeline = simulate(schedule, costs, link)
    assert set(expected) <= {event[:4] for event in timeline.events}
    assert timeline.step_time == max(end for *_, end in expected)


@pytest.mark.parametrize(('arguments', 'message'), [
    (([Costs(1, 1, 1)] * 2,), 'costs has 2 entries for 3 chunks'),
    (([Costs(1, 1, 1)] * 3, Link(0, 1, [1])),
     r'link\.message_bytes has 1 entries for 2 boundaries')])
def test_wrong_lengths_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule('1f1b', 3, 4), *arguments)


def test_ranks_that_wait_for_each_other_are_an_error():
    schedule = make_schedule('1f1b', 2, 1)
    backwards = dataclasses.replace(schedule, actions=(
        schedule.actions[0][::-1], schedule.actions[1]))
    with pytest.raises(ScheduleError, match='comes to a deadlock'):
        step_time(backwards, [Costs(1.0, 1.0, 0.0)] * 2,
                  Link(0.0, 1.0, [0.0]))
