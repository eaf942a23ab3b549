"""Clocks that are ahead, drift, and are asked over uneven ways."""
import math
import random

from chainer_fp8pipe.report.clocks import (
    ClockLine,
    RoundTrip,
    best_trip,
    clock_lines,
)
from chainer_fp8pipe.report.record import ClockReading

import pytest
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(0, 1e-3)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e5), st.lists(
    st.tuples(seconds, seconds), min_size=1, max_size=30))
def test_the_offset_is_right_to_half_of_the_shortest_round_trip(
        ahead, now, delays):
    """However unequal the ways there and back are."""
    trips = []
    for there, back in delays:
        trips.append(RoundTrip(now, now + there + ahead, now + there + back))
        now += 1.0
    best = best_trip(trips)
    assert best.error == pytest.approx(
        min(map(sum, delays)) / 2, abs=1e-9)
    assert abs(best.offset - ahead) <= best.error + 1e-9


def test_the_error_is_as_large_as_the_bound_where_all_delay_is_one_way():
    trip = RoundTrip(10.0, 10.0 + 0.004 + 100.0, 10.004)
    assert trip.offset == pytest.approx(100.002)
    assert trip.error == pytest.approx(0.002)


def readings(offset, times):
    return [ClockReading(0, 1, time, offset(time), 1e-5) for time in times]


def test_events_are_aligned_to_a_tenth_of_a_millisecond_while_clocks_drift():
    """200 runs: 50 ppm apart, and up to 2 ppm more or less as rooms warm up.

    Readings are 10 minutes apart, over ways of 150 us that differ by a half.
    """
    for seed in range(200):
        draw = random.Random(seed)
        ahead, rate = draw.uniform(-1e4, 1e4), draw.uniform(-50e-6, 50e-6)
        swing, phase = draw.uniform(0, 2e-6), draw.uniform(0, 6)

        def offset(time, ahead=ahead, rate=rate, swing=swing, phase=phase):
            day = 86400 / 2 / math.pi
            return (ahead + rate * time
                    + swing * day * math.sin(time / day + phase))
        found = []
        for number in range(20):
            trips = []
            for _ in range(16):
                asked = 600.0 * number + draw.random()
                there, back = (draw.uniform(37e-6, 112e-6) for _ in 'ab')
                trips.append(RoundTrip(
                    asked, asked + there + offset(asked + there),
                    asked + there + back))
            best = best_trip(trips)
            found.append(ClockReading(0, 1, best.asked, best.offset,
                                      best.error))
        line = ClockLine(found)
        for _ in range(50):
            time = draw.uniform(found[0].seconds, found[-1].seconds)
            assert abs(line.on_rank_0(time + offset(time)) - time) < 1e-4


def test_before_the_first_reading_and_after_the_last_the_offset_stays():
    line = ClockLine(readings(lambda time: 5 + 0.1 * time, (10, 20)))
    assert line.offset(0.0) == 6
    assert line.offset(100.0) == 7
    # Rank 0's 15 s are 21.5 s there.
    assert line.on_rank_0(21.5) == pytest.approx(15)


def test_readings_let_expect_the_next_one():
    line = ClockLine(readings(lambda time: 5 + 0.1 * time, (10, 20)))
    assert line.expected(30) == pytest.approx(8)
    assert ClockLine(readings(lambda time: 5, (10,))).expected(30) == 5


def test_each_rank_has_a_line_of_its_own():
    lines = clock_lines([ClockReading(0, 1, 0.0, 1.0, 0.0),
                         ClockReading(0, 3, 0.0, 3.0, 0.0)])
    assert {rank: line.offset(7) for rank, line in lines.items()} == {
        1: 1.0, 3: 3.0}
