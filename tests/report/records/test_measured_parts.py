from chainer_fp8pipe.report.records.run_record import (
    PHASES,
    RankInterval,
    Spread,
    measured_parts,
)


def interval(rank, last, median, **phases):
    spread = Spread(*[median] * 5)
    return RankInterval(0, rank, 1, last, spread, spread, phases)


def test_the_slowest_ranks_newest_phases_become_parts():
    assert measured_parts([
        interval(0, 10, 9.0, update=9.0),
        interval(0, 20, 1.0, update=1.0),
        interval(1, 20, 2.0, forward=1.0, backward=2.0, recompute=4.0,
                 encode=8.0, exchange=16.0, input=32.0, between=64.0)]) == {
        'forward and backward': 7.0, 'exchange': 24.0, 'other': 96.0}


def test_each_phase_is_in_one_part():
    whole = measured_parts([interval(0, 1, 1.0, **dict.fromkeys(
        PHASES, 1.0))])
    assert sum(whole.values()) == len(PHASES)


def test_without_intervals_there_are_no_parts():
    assert measured_parts([]) == {}
