"""Slow ranks and links are named, and even runs raise no alarm."""
import random

from chainer_fp8pipe.report.diagnosis import (
    INPUT,
    SLOW_LINK,
    SLOW_RANK,
    SLOW_STAGE,
    _of_others,
    diagnose,
    link_share,
)
from chainer_fp8pipe.report.records.run_record import (
    LinkReading,
    RankInterval,
    RunRecord,
    RunStart,
    SentBytes,
    Spread,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .made_up_run import MadeUpRun

#: Made-up runs of each kind, and how many of them must be told rightly.
CASES, RIGHT = 200, 198


def runs(kind, **options):
    """So many runs of a kind, each with numbers and noise of its own."""
    for seed in range(CASES):
        draw = random.Random(f'{kind} {seed}')
        yield draw, MadeUpRun(
            seed=seed, epochs=draw.randint(1, 4),
            updates=draw.choice([20, 50]), kept=0,
            noise=draw.choice([0.02, 0.05, 0.1]), **{
                'ranks': draw.choice([2, 3, 4, 6, 8]), **options})


def named(record, kind):
    return [finding.ranks for finding in diagnose(record)
            if finding.kind == kind]


def test_a_slow_rank_is_named_and_no_other():
    right = 0
    for draw, run in runs('rank'):
        rank = draw.randrange(run.ranks)
        run.slow = {rank: draw.uniform(1.25, 3)}
        right += [finding.ranks for finding in diagnose(run.record())
                  ] == [(rank,)]
    assert right >= RIGHT


def test_the_figure_is_how_many_times_as_long_the_rank_works():
    finding, = diagnose(MadeUpRun(slow={2: 1.6}, noise=0.02).record())
    assert finding.kind == SLOW_RANK
    assert finding.figure == pytest.approx(1.6, rel=0.03)
    assert f'{finding.figure:.2f} times' in finding.text
    assert 'backward' in finding.text       # which is longest
    assert 'Rank 2 on node1' in finding.text


def test_two_slow_ranks_of_six_are_both_named():
    right = 0
    for draw, run in runs('two', ranks=6):
        slow = sorted(draw.sample(range(6), 2))
        run.slow = dict.fromkeys(slow, draw.uniform(1.3, 2))
        right += named(run.record(), SLOW_RANK) == [(rank,) for rank in slow]
    assert right >= RIGHT


@pytest.mark.parametrize('noise', [0.05, 0.3])
def test_an_even_run_raises_no_alarm(noise):
    """Also on machines that are busy with something else now and then."""
    quiet = 0
    for _, run in runs(f'even {noise}'):
        run.noise = noise
        record = run.record()
        record.links = [link for link in record.links if noise < 0.1]
        quiet += not diagnose(record)
    assert quiet >= RIGHT


def test_a_slow_link_is_named_and_no_other():
    right = 0
    for draw, run in runs('link', ranks_per_host=1):
        run.ranks = draw.choice([3, 4, 6, 8])
        one, other = sorted(draw.sample(range(run.ranks), 2))
        run.links = dict.fromkeys([(one, other), (other, one)],
                                  draw.uniform(0.1, 0.45))
        right += named(run.record(), SLOW_LINK) == [(one, other)]
    assert right >= RIGHT


def test_a_host_whose_links_are_all_slow_is_named_once():
    right = 0
    for draw, run in runs('host', ranks_per_host=1):
        run.ranks = draw.choice([3, 4, 6, 8])
        host = draw.randrange(run.ranks)
        factor = draw.uniform(0.1, 0.45)
        run.links = {pair: factor for other in range(run.ranks)
                     for pair in ((host, other), (other, host))}
        right += named(run.record(), SLOW_LINK) == [(host,)]
    assert right >= RIGHT


def test_a_link_that_answers_late_is_slow_at_any_bandwidth():
    start = RunStart(0, 0.0, 0, 3, ('a', 'b', 'c'))
    links = [LinkReading(0, 10, one, other, 1e8,
                         500e-6 if other == 2 and one == 1 else 50e-6, False)
             for one, other in ((0, 1), (0, 2), (1, 2))]
    finding, = diagnose(RunRecord('', [start], links=links))
    assert finding.ranks == (1, 2)
    assert finding.figure == pytest.approx(0.1)


@given(st.dictionaries(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    # Few different values, so that many links are equal; or any.
    st.tuples(*[st.integers(1, 6).map(float)
                | st.floats(1e-9, 1e9)] * 2).map(list), min_size=2))
def test_each_link_is_compared_with_all_others(medians):
    def slow_one(pair):
        others = numpy.array([found for other, found in medians.items()
                              if other != pair])
        bandwidth, latency = medians[pair]
        fast = bandwidth / float(numpy.quantile(others[:, 0], 0.9))
        quick = float(numpy.quantile(others[:, 1], 0.1)) / latency
        return fast if fast < 0.6 else quick if quick < 1 / 3 else None

    assert _of_others(medians) == {
        pair: figure for pair in medians
        if (figure := slow_one(pair)) is not None}


def test_links_of_one_host_are_not_compared():
    run = MadeUpRun(ranks=4, ranks_per_host=4, links={(0, 1): 0.1})
    assert not diagnose(run.record())


def interval(rank, own, **phases):
    spread = Spread(own, own, own, own, own)
    return RankInterval(0, rank, 1, 20, spread, spread, phases or {
        'forward': own})


def test_replicas_are_compared_within_their_stage():
    """Stages do different work, which makes no rank slow."""
    start = RunStart(0, 0.0, 0, 4, ('a',) * 4, stages=(0, 0, 1, 1))
    even = [interval(rank, 1.0 + (rank > 1) * 0.1, forward=1.0)
            for rank in range(4)]
    assert not diagnose(RunRecord('', [start], intervals=even))
    uneven = [*even[:3], interval(3, 2.2, forward=2.2)]
    found = diagnose(RunRecord('', [start], intervals=uneven))
    assert [(finding.kind, finding.ranks) for finding in found] == [
        (SLOW_RANK, (3,)), (SLOW_STAGE, (2, 3))]
    assert found[0].figure == pytest.approx(2.0)
    assert found[1].figure == pytest.approx(1.65)


def test_a_rank_whose_core_is_busy_now_and_then_is_not_slow():
    """As two even ranks were measured on a machine that others used."""
    start = RunStart(0, 0.0, 0, 2, ('a', 'a'))
    spreads = (Spread(0.0537, 0.1058, 0.1658, 0.1241, 0.3053),
               Spread(0.0539, 0.0815, 0.1236, 0.0894, 0.2183))
    intervals = [RankInterval(0, rank, 1, 20, spread, spread, {})
                 for rank, spread in enumerate(spreads)]
    assert not diagnose(RunRecord('', [start], intervals=intervals))
    # Were a quarter of its updates not as quick as the other's, it would be.
    intervals[0] = interval(0, 0.1058)
    found, = diagnose(RunRecord('', [start], intervals=intervals))
    assert found.ranks == (0,)


def test_a_rank_that_is_slow_in_few_intervals_is_not():
    """One of five: the others are as usual."""
    start = RunStart(0, 0.0, 0, 2, ('a', 'b'))
    intervals = [
        interval(rank, 3.0 if rank and last == 50 else 1.0)._replace(
            last=last) for last in range(10, 60, 10) for rank in range(2)]
    assert not diagnose(RunRecord('', [start], intervals=intervals))


def test_waiting_for_batches_is_a_share_of_the_time():
    right = 0
    for draw, run in runs('input'):
        share = draw.uniform(0.15, 0.6)
        run.input_seconds = 0.025 * share / (1 - share)
        found = [finding for finding in diagnose(run.record())
                 if finding.kind == INPUT]
        right += bool(found) and abs(found[0].figure - share) < 0.05
    assert right >= RIGHT


def test_the_share_of_a_link_is_bytes_over_seconds_and_speed():
    start = RunStart(0, 0.0, 0, 2, ('a', 'b'))
    record = RunRecord(
        '', [start], intervals=[interval(0, 0.1), interval(1, 0.1)],
        links=[LinkReading(0, 10, 0, 1, 1e8, 1e-4, False)], sent=[
            SentBytes(0, 0, 10, 'fp8', 'between nodes', 2_000_000, 8_000_000),
            SentBytes(0, 0, 10, 'fp8', 'inside nodes', 9_000_000, 9_000_000)])
    assert link_share(record, 0) == pytest.approx(0.2)
    record.links.clear()
    assert link_share(record, 0) is None


def test_only_the_last_start_counts():
    record = MadeUpRun(slow={0: 2.0}).record()
    assert diagnose(record)
    record.starts.append(record.starts[0]._replace(number=1))
    assert not diagnose(record)
    assert not diagnose(RunRecord('without a start'))
