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


def one_rank(draw, run):
    rank = draw.randrange(run.ranks)
    run.slow = {rank: draw.uniform(1.25, 3)}
    return [(rank,)]


def two_ranks(draw, run):
    run.ranks = 6
    slow = sorted(draw.sample(range(6), 2))
    run.slow = dict.fromkeys(slow, draw.uniform(1.3, 2))
    return [(rank,) for rank in slow]


def a_link(draw, run):
    """Also one of ninety, where the way back is as usual."""
    ranks = draw.sample(range(run.ranks), 2)
    both = draw.random() < 0.5
    one, other = sorted(ranks) if both else ranks
    run.links = dict.fromkeys([(one, other), (other, one)][:1 + both],
                              draw.uniform(0.1, 0.45))
    return [(one, other)]


def a_host(draw, run):
    """Both ways, or in sending or receiving alone."""
    host, factor = draw.randrange(run.ranks), draw.uniform(0.1, 0.45)
    ways = draw.choice([(True,), (False,), (True, False)])
    run.links = {(host, other) if sends else (other, host): factor
                 for other in range(run.ranks) for sends in ways}
    return [(host,)]


@pytest.mark.parametrize(('kind', 'slow', 'options'), [
    (SLOW_RANK, one_rank, {}), (SLOW_RANK, two_ranks, {}),
    (SLOW_LINK, a_link, {'ranks_per_host': 1}),
    (SLOW_LINK, a_host, {'ranks_per_host': 1})])
def test_what_is_slow_is_named_and_nothing_else(kind, slow, options):
    right = 0
    for draw, run in runs(slow.__name__, **options):
        if options:
            run.ranks = draw.choice([3, 4, 6, 10])
        expected = slow(draw, run)
        right += named(run.record(), kind) == expected
    assert right >= RIGHT


def test_the_figure_is_how_many_times_as_long_the_rank_works():
    finding, = diagnose(MadeUpRun(slow={2: 1.6}, noise=0.02).record())
    assert finding.kind == SLOW_RANK
    assert finding.figure == pytest.approx(1.6, rel=0.03)
    assert f'{finding.figure:.2f} times' in finding.text
    assert 'backward' in finding.text       # which is longest
    assert 'Rank 2 on node1' in finding.text


@pytest.mark.parametrize(('links', 'said'), [
    ([(0, 1)], 'from node0 (rank 0) to node1 (rank 1)'),
    ([(0, 1), (1, 0)], 'between node0 (rank 0) and node1 (rank 1)'),
    ([(0, other) for other in range(4)], 'is slow in sending'),
    ([(other, 0) for other in range(4)], 'is slow in receiving')])
def test_the_direction_of_a_slow_link_is_said(links, said):
    finding, = diagnose(MadeUpRun(
        ranks=4, ranks_per_host=1, noise=0.02,
        links=dict.fromkeys(links, 0.3)).record())
    assert said in finding.text


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
