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


def equation_1(bs, t_0, dsize, bw):
    return t_0 + bs * dsize / bw


def equation_2(m, d, t_comp):
    return (m + d - 1) * Fraction(1, m) * t_comp / d


def equation_3(m, d, t_comp, t_comm):
    return equation_2(m, d, t_comp) + (m + d - 2) * t_comm


# --- the equations of the paper ---------------------------------------------

@quick
@given(st.sampled_from(['gpipe', '1f1b']), st.integers(1, 8),
       st.integers(1, 32), HALVES, HALVES, HALVES)
def test_equal_stages_take_equation_2(name, d, m, forward, backward_input,
                                      backward_weight):
    costs = Costs(forward, backward_input, backward_weight)
    timeline = simulate(make_schedule(name, d, m), [costs] * d)
    t_comp = Fraction(sum(costs)) * m * d
    assert Fraction(timeline.step_time) == equation_2(m, d, t_comp)
    assert timeline.idle_share == pytest.approx((d - 1) / (m + d - 1))


@quick
@given(st.integers(2, 8), st.integers(1, 32), HALVES, HALVES, HALVES,
       st.integers(1, 500), st.integers(1, 60), st.sampled_from([2, 64, 512]))
def test_a_link_that_blocks_the_sender_adds_what_equation_3_says(
        d, m, forward, backward, latency, samples, sample_bytes, bandwidth):
    """Forward, the first micro-batch crosses d - 1 boundaries and the other
    m - 1 follow, one transfer each; so do the gradients."""
    link = Link(latency, bandwidth, [samples * sample_bytes] * (d - 1),
                overlapped=False)
    timeline = simulate(make_schedule('gpipe', d, m),
                        [Costs(forward, backward, 0.0)] * d, link)
    transfer = equation_1(samples, Fraction(latency), sample_bytes,
                          Fraction(bandwidth))
    t_comp = (Fraction(forward) + Fraction(backward)) * m * d
    assert Fraction(timeline.step_time) == equation_3(
        m, d, t_comp, t_comm=2 * transfer)


# --- by a longest path ------------------------------------------------------

@quick
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 8),
       st.floats(0, 10), st.data())
def test_unequal_chunks_take_the_longest_path_through_the_graph(
        name, stages, micro_batches, latency, data):
    chunks = (data.draw(st.integers(1, 3)) if name in (
        'interleaved', 'zero_bubble') else 1)
    schedule = make_schedule(name, stages, micro_batches, chunks)
    seconds = st.floats(0.125, 8)
    costs = [Costs(*(data.draw(seconds) for _ in range(3)))
             for _ in range(stages * chunks)]
    # The wire holds a message for no time: only the latency counts.
    link = Link(latency, 1.0, [0] * schedule.last_chunk)
    timeline = simulate(schedule, costs, link)

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


@quick
@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 9),
       st.booleans(), st.data())
def test_the_seconds_alone_are_those_of_the_whole_timeline(
        name, stages, micro_batches, overlapped, data):
    chunks = (data.draw(st.integers(1, 3)) if name in (
        'interleaved', 'zero_bubble') else 1)
    schedule = make_schedule(name, stages, micro_batches, chunks)
    costs = [Costs(*(data.draw(HALVES) for _ in range(4)))
             for _ in range(stages * chunks)]
    link = Link(data.draw(HALVES), data.draw(HALVES),
                [data.draw(HALVES) for _ in costs[1:]], overlapped)
    assert step_time(schedule, costs, link) == pytest.approx(
        simulate(schedule, costs, link).step_time)


def test_the_seconds_of_ranks_that_wait_for_each_other_are_an_error():
    schedule = make_schedule('1f1b', 2, 1)
    backwards = dataclasses.replace(schedule, actions=(
        schedule.actions[0][::-1], schedule.actions[1]))
    with pytest.raises(ScheduleError, match='comes to a deadlock'):
        step_time(backwards, [Costs(1.0, 1.0, 0.0)] * 2,
                  Link(0.0, 1.0, [0.0]))


@quick
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 8),
       st.booleans())
def test_a_rank_does_one_thing_at_a_time(name, stages, micro_batches,
                                         overlapped):
    link = Link(0.25, 2.0, [1] * (stages - 1), overlapped)
    timeline = simulate(make_schedule(name, stages, micro_batches),
                        [Costs(1.0, 1.25, 0.75, 0.5)] * stages, link)
    assert max(event.end for event in timeline.events) == timeline.step_time
    for rank in range(stages):
        events = [event for event in timeline.events if event.rank == rank]
        assert all(first.end <= second.start for first, second
                   in zip(events, events[1:], strict=False))


# --- by hand ----------------------------------------------------------------

def test_an_overlapped_link_lets_the_sender_compute_on():
    """F 1 s, B 2 s; 0.5 s of latency and 1 s on the wire.

    Rank 0 forward 0-1, 1-2; the messages are on the wire 1-2, 2-3 and arrive
    at 2.5, 3.5.  Rank 1 forward 2.5-3.5, 3.5-4.5, backward 4.5-6.5, 6.5-8.5;
    gradients arrive at 8 and 10.  Rank 0 backward 8-10, 10-12.
    """
    timeline = simulate(make_schedule('gpipe', 2, 2), [Costs(1, 1, 1)] * 2,
                        Link(0.5, 100.0, [100]))
    assert {(event.rank, event.name, event.micro_batch, event.chunk,
             event.start, event.end) for event in timeline.events} == {
        (0, 'forward', 0, 0, 0, 1), (0, 'forward', 1, 0, 1, 2),
        (1, 'forward', 0, 1, 2.5, 3.5), (1, 'forward', 1, 1, 3.5, 4.5),
        (1, 'backward', 0, 1, 4.5, 6.5), (1, 'backward', 1, 1, 6.5, 8.5),
        (0, 'backward', 0, 0, 8, 10), (0, 'backward', 1, 0, 10, 12)}
    assert (timeline.step_time, timeline.idle_share) == (12, 0.5)


def test_messages_to_a_neighbour_go_one_after_the_other():
    """Three of 1 s each, made within 0.75 s: the last arrives at 3.25 s."""
    timeline = simulate(forward_schedule(2, 3), [Costs(0.25, 0, 0)] * 2,
                        Link(0.0, 1.0, [1]))
    assert timeline.step_time == 3.5


def test_the_two_directions_of_a_link_do_not_disturb_each_other():
    """F and B 1 s, messages 4 s: the second activation and the first
    gradient are under way at the same time.

    Rank 0 forward 0-1, 1-2 (messages 1-5, 5-9); rank 1 forward and backward
    5-7 (gradient 7-11), 9-11 (11-15); rank 0 backward 11-12, 15-16.
    """
    timeline = simulate(make_schedule('1f1b', 2, 2),
                        [Costs(1, 0.5, 0.5)] * 2, Link(0.0, 1.0, [4]))
    assert timeline.step_time == 16


def test_a_rank_has_a_link_to_each_neighbour():
    """Rank 1 of 3 sends up for 4 s and 8 s, down in no time; the second
    micro-batch has twice the size of the first.

    Rank 1 forward 1-2, 3-5 (messages 2-6, 6-14); rank 2 forward and backward
    6-8 (gradient 8-12); rank 1 backward 12-13, and rank 0 has it at once.
    """
    timeline = simulate(make_schedule('1f1b', 3, 2),
                        [Costs(1, 0.5, 0.5)] * 3, Link(0.0, 1.0, [0, 4]),
                        sizes=[1, 2])
    assert (0, 'backward', 13, 14) in [event[:4] for event in timeline.events]


def test_boundaries_have_their_own_message_sizes():
    """Chunks of 1 s on ranks 0, 1, 0, 1; messages of 1, 2 and 4 s."""
    timeline = simulate(forward_schedule(2, 1, 2), [Costs(1, 0, 0)] * 4,
                        Link(0.0, 1.0, [1, 2, 4]))
    assert timeline.step_time == 4 + 1 + 2 + 4


def test_uneven_micro_batches_take_time_by_their_size():
    """Sizes 1 and 1/2: forward 0-2, 2-3 and messages of 4 s and 2 s on rank
    0, until 6 and 8; then rank 1."""
    timeline = simulate(forward_schedule(2, 2), [Costs(2, 0, 0)] * 2,
                        Link(0.0, 1.0, [4]), sizes=[1, 0.5])
    assert [(event.start, event.end) for event in timeline.events
            if event.rank == 1] == [(6, 8), (8, 9)]


def test_recomputation_comes_before_backward():
    timeline = simulate(make_schedule('gpipe', 1, 1), [Costs(1, 2, 3, 1.5)])
    assert [event[1:4] for event in timeline.events] == [
        ('forward', 0, 1), ('recompute', 1, 2.5), ('backward', 2.5, 7.5)]


def test_halves_of_backward_are_events_of_their_own():
    timeline = simulate(make_schedule('zero_bubble', 1, 1), [Costs(1, 2, 3)])
    assert [event[1:4] for event in timeline.events] == [
        ('forward', 0, 1), ('backward', 1, 3), ('backward_weight', 3, 6)]


def test_a_link_that_blocks_shows_what_it_takes():
    timeline = simulate(forward_schedule(2, 1), [Costs(1, 0, 0)] * 2,
                        Link(0.5, 1.0, [1], overlapped=False))
    assert [event[:4] for event in timeline.events] == [
        (0, 'forward', 0, 1), (0, 'send', 1, 2.5), (1, 'forward', 2.5, 3.5)]


@pytest.mark.parametrize(('arguments', 'message'), [
    (([Costs(1, 1, 1)] * 2,), 'costs has 2 entries for 3 chunks'),
    (([Costs(1, 1, 1)] * 3, Link(0, 1, [1])),
     r'link\.message_bytes has 1 entries for 2 boundaries'),
    (([Costs(1, 1, 1)] * 3, None, [1.0]),
     'sizes has 1 entries for 4 micro-batches'),
])
def test_wrong_lengths_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule('1f1b', 3, 4), *arguments)
