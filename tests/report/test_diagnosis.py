"""Slow ranks and links are named, and even runs raise no alarm."""
import random

from chainer_fp8pipe.report.diagnosis import (
    INPUT,
    SLOW_LINK,
    SLOW_RANK,
    SLOW_STAGE,
    diagnose,
)
from chainer_fp8pipe.report.record import (
    LinkReading,
    RankInterval,
    RunRecord,
    RunStart,
)

import pytest

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


def test_a_direction_that_is_slow_is_named_with_the_sender_first():
    """Also a single one of a hundred: the way back says nothing of it."""
    right = 0
    for draw, run in runs('direction', ranks_per_host=1):
        run.ranks = draw.choice([3, 4, 6, 10])
        pair = tuple(draw.sample(range(run.ranks), 2))
        run.links = {pair: draw.uniform(0.1, 0.45)}
        found = [finding for finding in diagnose(run.record())
                 if finding.kind == SLOW_LINK]
        right += ([finding.ranks for finding in found] == [pair]
                  and f'from node{pair[0]} (rank {pair[0]}) to node{pair[1]}'
                  in found[0].text)
    assert right >= RIGHT


@pytest.mark.parametrize('way', ['sending', 'receiving'])
def test_a_host_that_only_sends_or_receives_slowly_is_named_once(way):
    right = 0
    for draw, run in runs(f'host {way}', ranks_per_host=1):
        run.ranks = draw.choice([3, 4, 6, 8])
        host = draw.randrange(run.ranks)
        factor = draw.uniform(0.1, 0.45)
        run.links = {
            (host, other) if way == 'sending' else (other, host): factor
            for other in range(run.ranks)}
        found = [finding for finding in diagnose(run.record())
                 if finding.kind == SLOW_LINK]
        right += ([finding.ranks for finding in found] == [(host,)]
                  and f'is slow in {way}' in found[0].text)
    assert right >= RIGHT


def test_a_slow_host_is_named_though_one_of_its_links_seems_less_slow():
    """As an idle link passes the first part of a message at once."""
    run = MadeUpRun(ranks=4, ranks_per_host=1, noise=0.02, links={
        pair: 0.7 if 3 in pair else 0.5
        for other in (0, 1, 3) for pair in ((2, other), (other, 2))})
    assert named(run.record(), SLOW_LINK) == [(2,)]


def test_ranks_that_wait_for_a_core_make_no_link_slow():
    """As 4 ranks on 2 cores measured it, of links that all are equal."""
    start = RunStart(0, 0.0, 0, 3, ('a', 'b', 'c'))
    links = [LinkReading(0, 10, one, other, bandwidth, latency)
             for one, other, readings in (
                 (0, 1, [(71e6, 10e-6), (69e6, 28e-6)]),
                 (0, 2, [(70e6, 10e-6), (72e6, 10e-6)]),
                 (1, 2, [(15e6, 237e-6), (73e6, 158e-6)]))
             for bandwidth, latency in readings]
    assert not diagnose(RunRecord('', [start], links=links))


def test_a_link_that_answers_late_is_slow_at_any_bandwidth():
    start = RunStart(0, 0.0, 0, 3, ('a', 'b', 'c'))
    links = [LinkReading(0, 10, one, other, 1e8,
                         500e-6 if other == 2 and one == 1 else 50e-6)
             for one, other in ((0, 1), (0, 2), (1, 2))]
    finding, = diagnose(RunRecord('', [start], links=links))
    assert finding.ranks == (1, 2)
    assert finding.figure == pytest.approx(0.1)


def test_links_of_one_host_are_not_compared():
    run = MadeUpRun(ranks=4, ranks_per_host=4, links={(0, 1): 0.1})
    assert not diagnose(run.record())


def interval(rank, own, **phases):
    return RankInterval(0, rank, 1, 20, (own,) * 3, (own,) * 3, phases or {
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
    spreads = ((0.0537, 0.1058, 0.1658),
               (0.0539, 0.0815, 0.1236))
    intervals = [RankInterval(0, rank, 1, 20, spread, spread, {})
                 for rank, spread in enumerate(spreads)]
    assert not diagnose(RunRecord('', [start], intervals=intervals))
    # Were a quarter of its updates not as quick as the other's, it would be.
    intervals[0] = interval(0, 0.1058)
    found, = diagnose(RunRecord('', [start], intervals=intervals))
    assert found.ranks == (0,)


def test_a_rank_whose_quickest_updates_are_as_quick_as_others_is_not_slow():
    """As 4 even ranks were measured on 2 cores that others used, too."""
    start = RunStart(0, 0.0, 0, 4, ('a', 'b', 'c', 'd'))
    measured = [[(3.1, 3.5, 4.5), (3.0, 9.3, 23.7), (3.4, 8.6, 20.4),
                 (3.2, 16.9, 26.3)],
                [(3.3, 3.5, 3.6), (3.0, 3.1, 3.1), (3.0, 3.2, 11.0),
                 (3.4, 7.8, 20.4)],
                [(3.3, 6.9, 12.7), (4.5, 8.8, 10.6), (3.2, 5.2, 10.1),
                 (7.7, 11.8, 15.7)]]
    intervals = [
        RankInterval(0, rank, 10 * place + 1, 10 * place + 10, spread, spread,
                     {}) for place, ranks in enumerate(measured)
        for rank, spread in enumerate(ranks)]
    assert not diagnose(RunRecord('', [start], intervals=intervals))


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


def test_only_the_last_start_counts():
    record = MadeUpRun(slow={0: 2.0}).record()
    assert diagnose(record)
    record.starts.append(record.starts[0]._replace(number=1))
    assert not diagnose(record)
    assert not diagnose(RunRecord('without a start'))


def test_one_direction_of_ninety_is_named_with_its_speed():
    start = RunStart(0, 0.0, 0, 10, tuple('abcdefghij'))
    links = [LinkReading(0, 1, source, target,
                         3e7 if (source, target) == (0, 9) else 1e8, 1e-4)
             for source in range(10) for target in range(10)
             if source != target]
    found, = diagnose(RunRecord('', [start], links=links))
    assert found.ranks == (0, 9)
    assert found.figure == pytest.approx(0.3)
    assert 'from a (rank 0) to j (rank 9) is slow: 30.0 MB/s' in found.text
