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
CASES, RIGHT = 100, 99


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


# --- records by hand ---------------------------------------------------------

def record(ranks=2, intervals=(), links=(), stages=()):
    """``links`` are source, target, bandwidth and latency."""
    return RunRecord(
        '', [RunStart(0, 0.0, 0, ranks, tuple('abcdefghij'[:ranks]), stages)],
        intervals=[*intervals], links=[LinkReading(0, 10, *link)
                                       for link in links])


def interval(rank, own, last=20, **phases):
    """``own``: quartiles, or one number for all."""
    own = own if isinstance(own, tuple) else (own,) * 3
    return RankInterval(0, rank, last - 9, last, own, own,
                        phases or {'forward': own[1]})


def together(*updates):
    """Intervals of all ranks, one after the other."""
    return [interval(rank, own, 10 * place + 10)
            for place, ranks in enumerate(updates)
            for rank, own in enumerate(ranks)]


STAGES = [interval(rank, 1.0 + (rank > 1) * 0.1, forward=1.0)
          for rank in range(4)]
BUSY = (0.0537, 0.1058, 0.1658), (0.0539, 0.0815, 0.1236)

#: What is not slow, or is: a record, and kind, ranks and figure of what is
#: found.
CASES_BY_HAND = {
    # As an idle link passes the first part of a message at once.
    'a slow host though one of its links seems less slow': (
        MadeUpRun(ranks=4, ranks_per_host=1, noise=0.02, links={
            pair: 0.7 if 3 in pair else 0.5 for other in (0, 1, 3)
            for pair in ((2, other), (other, 2))}).record(),
        [(SLOW_LINK, (2,), 0.50165)]),
    # As 4 ranks on 2 cores measured it, of links that all are equal.
    'ranks that wait for a core make no link slow': (
        record(3, links=[(0, 1, 71e6, 10e-6), (0, 1, 69e6, 28e-6),
                         (0, 2, 70e6, 10e-6), (0, 2, 72e6, 10e-6),
                         (1, 2, 15e6, 237e-6), (1, 2, 73e6, 158e-6)]), []),
    'a link that answers late is slow at any bandwidth': (
        record(3, links=[(0, 1, 1e8, 50e-6), (0, 2, 1e8, 50e-6),
                         (1, 2, 1e8, 500e-6)]), [(SLOW_LINK, (1, 2), 0.1)]),
    'links of one host are not compared': (
        MadeUpRun(ranks=4, ranks_per_host=4, links={(0, 1): 0.1}).record(),
        []),
    'one direction of ninety': (
        record(10, links=[(source, target, 3e7 if (source, target) == (0, 9)
                           else 1e8, 1e-4) for source in range(10)
                          for target in range(10) if source != target]),
        [(SLOW_LINK, (0, 9), 0.3)]),
    'stages do different work, which makes no rank slow': (
        record(4, STAGES, stages=(0, 0, 1, 1)), []),
    'replicas are compared within their stage': (
        record(4, [*STAGES[:3], interval(3, 2.2, forward=2.2)],
               stages=(0, 0, 1, 1)),
        [(SLOW_RANK, (3,), 2.0), (SLOW_STAGE, (2, 3), 1.65)]),
    # As two even ranks were measured on a machine that others used.
    'a rank whose core is busy now and then is not slow': (
        record(2, map(interval, (0, 1), BUSY)), []),
    'were a quarter of its updates not as quick, it would be': (
        record(2, map(interval, (0, 1), (BUSY[0][1], BUSY[1]))),
        [(SLOW_RANK, (0,), 0.1058 / 0.0815)]),
    # As 4 even ranks were measured on 2 cores that others used, too.
    'a rank whose quickest updates are as quick as others is not slow': (
        record(4, together(
            [(3.1, 3.5, 4.5), (3.0, 9.3, 23.7), (3.4, 8.6, 20.4),
             (3.2, 16.9, 26.3)],
            [(3.3, 3.5, 3.6), (3.0, 3.1, 3.1), (3.0, 3.2, 11.0),
             (3.4, 7.8, 20.4)],
            [(3.3, 6.9, 12.7), (4.5, 8.8, 10.6), (3.2, 5.2, 10.1),
             (7.7, 11.8, 15.7)])), []),
    'a rank that is slow in one of five intervals is not': (
        record(2, together(*[(1.0, 1.0)] * 4, (1.0, 3.0))), []),
    'a record without a start': (RunRecord(''), [])}


@pytest.mark.parametrize('case', CASES_BY_HAND)
def test_what_is_found(case):
    given, expected = CASES_BY_HAND[case]
    found = diagnose(given)
    assert [finding[:2] for finding in found] == [
        one[:2] for one in expected]
    assert [finding.figure for finding in found] == pytest.approx(
        [one[2] for one in expected], rel=1e-5)


def test_a_slow_link_is_named_with_its_speed():
    found, = diagnose(CASES_BY_HAND['one direction of ninety'][0])
    assert 'from a (rank 0) to j (rank 9) is slow: 30.0 MB/s' in found.text


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
    slow = MadeUpRun(slow={0: 2.0}).record()
    assert diagnose(slow)
    slow.starts.append(slow.starts[0]._replace(number=1))
    assert not diagnose(slow)
