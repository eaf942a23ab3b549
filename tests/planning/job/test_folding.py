"""Some replicas in place of all: the same seconds, fewer programs."""
import dataclasses

from chainer_fp8pipe.allreduce.plan import direct, ring
from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job import (
    exchanges,
    folding,
    overlap_run,
    pipeline_model,
)
from chainer_fp8pipe.planning.job.choices import Choices, Wanted
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.exchanges import Exchange
from chainer_fp8pipe.planning.job.folding import Fold, fold
from chainer_fp8pipe.planning.job.job_profile import Figure
from chainer_fp8pipe.planning.job.step import StepModel

import pytest

from .jobs import codecs, figures, job

MODEL = figures(*[.01] * 8, parameters=400_000, size=16_000, buckets=3,
                update=Figure(.002))
LINKS = {'rate': 1e8, 'latency': 5e-5, 'codec': codecs(5e8, 1e-4, 1e-5),
         'local_rate': Figure(1e9), 'local_latency': Figure(5e-6),
         'message_cost': Figure(5e-6), 'byte_cost': Figure(1e-10)}
#: Hosts of each rank, and pools of cores.
SHAPES = {
    'hosts of two ranks': ((0, 0, 1, 1, 2, 2, 3, 3), None),
    'a rank on each host': (range(6), None),
    'hosts in turn': ((0, 1, 2, 0, 1, 2), None),
    'one host': ((0,) * 6, None),
    'cores that the ranks of a host share':
        ((0, 0, 1, 1), Cores((0, 0, 1, 1), 1.1, (1.7, 1.7))),
    'cores that all hosts share':
        ((0, 0, 1, 1), Cores((0,) * 4, 1.1, (2.3,)))}


def whole(profile, grid, plans=()):
    return Fold(len(grid[0]), profile.network.cluster(), profile.cores,
                (1.0,) * profile.ranks)


def both(monkeypatch, seconds):
    """Seconds of the simulation of a few ranks, and of all of them."""
    found = []
    for way in fold, whole:
        for module in exchanges, overlap_run, pipeline_model:
            monkeypatch.setattr(module, 'fold', way)
        found.append(seconds())
    return found


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('algorithm', ['direct', 'ring', 'torus2d'])
@pytest.mark.parametrize('codec', ['fp8', 'float32'])
def test_an_exchange_takes_as_long_as_that_of_all_ranks(
        monkeypatch, shape, algorithm, codec):
    hosts, cores = SHAPES[shape]
    profile = job(MODEL, hosts, cores, **LINKS)
    exchange = Configuration(profile.ranks, codec=codec, algorithm=algorithm)
    few, all_ = both(monkeypatch, lambda: StepModel(
        profile, 8 * profile.ranks)._exchange_time(exchange))
    # As the ranks are numbered:
    assert all_ == pytest.approx(Exchange(profile, exchange).seconds(
        range(profile.ranks), MODEL.elements))
    # Blocks are rounded up to equal numbers of elements.
    assert few == pytest.approx(all_, rel=2e-3)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('overlap', [True, 'next_forward'])
def test_an_overlapped_step_takes_as_long_as_that_of_all_ranks(
        monkeypatch, shape, overlap):
    hosts, cores = SHAPES[shape]
    profile = job(MODEL, hosts, cores, **LINKS)
    few, all_ = both(monkeypatch, lambda: StepModel(
        profile, 8 * profile.ranks).predict(Configuration(
            profile.ranks, codec='float16', overlap=overlap)).seconds.value)
    assert few == pytest.approx(all_, rel=5e-3)


@pytest.mark.parametrize('shape', [
    name for name, (hosts, _) in SHAPES.items() if len(hosts) % 2 == 0])
def test_a_pipeline_takes_as_long_as_that_of_all_replicas(
        monkeypatch, shape):
    hosts, cores = SHAPES[shape]
    profile = job(MODEL, hosts, cores, **LINKS)
    batch, replicas = 8 * profile.ranks, profile.ranks // 2
    cut, _ = Choices(profile, Wanted(batch)).cut(2, replicas, 4, '1f1b')
    few, all_ = both(monkeypatch, lambda: StepModel(profile, batch).predict(
        Configuration(replicas, 2, 4, cut)).seconds.value)
    assert few == pytest.approx(all_, rel=5e-3)


def test_all_hosts_share_what_lies_between_them(monkeypatch):
    profile = job(MODEL, range(6), **LINKS, trunk=Figure(2e8))
    few, all_ = both(monkeypatch, lambda: Exchange(profile, Configuration(
        6, codec='float32')).seconds(range(6), MODEL.elements).seconds)
    assert few == pytest.approx(all_, rel=.02)


@pytest.mark.parametrize(('hosts', 'period'), [
    ((0, 0, 1, 1, 2, 2, 3, 3), 2), (range(6), 1), ((0, 1, 2, 0, 1, 2), 2),
    ((0,) * 6, 1), ((0, 0, 0, 1), 4), ((0, 0, 1, 2), 4)])
def test_as_few_replicas_are_simulated_as_differ(hosts, period):
    profile = job(MODEL, hosts)
    ranks = Exchange(profile, Configuration(len(hosts))).by_hosts()
    assert fold(profile, [ranks]).period == period


@pytest.mark.parametrize(('hosts', 'options', 'order'), [
    ((0, 1, 0, 1), {}, [0, 2, 1, 3]), ((5, 3, 5, 3), {}, [0, 2, 1, 3]),
    ((0, 1, 0), {}, [0, 1, 2]), ((0, 0, 0), {}, [0, 1, 2]),
    ((2, 0, 1), {}, [0, 1, 2]),
    ((0, 1, 0, 1), {'two_level': 'no'}, [0, 1, 2, 3])])
def test_ranks_are_taken_host_by_host_where_plans_are(hosts, options, order):
    assert Exchange(job(MODEL, hosts), Configuration(
        len(hosts), options=options)).by_hosts() == order


def test_stages_across_hosts_that_share_their_ports_are_all_simulated():
    """Each stage on a host: its replicas send through one port."""
    profile = job(MODEL, (0, 0, 1, 1))
    assert fold(profile, [(0, 1), (2, 3)]).period == 2
    assert fold(profile, [(0, 2), (1, 3)]).period == 1


def test_ranks_that_do_different_things_are_all_simulated():
    """Of the second plan, the third rank adds up and the others do not."""
    profile = job(MODEL, range(4))
    uneven = dataclasses.replace(ring(4), gather=(
        (), *ring(4).gather[1:]))
    assert fold(profile, [range(4)], [[direct(4)]]).period == 1
    assert fold(profile, [range(4)], [[direct(4), uneven]]).period == 4


@pytest.mark.parametrize('ranks', [4, 32])
def test_only_large_jobs_take_hosts_for_as_slow_as_the_slowest(ranks):
    speeds = [1.0] * ranks
    speeds[2] = 2.5
    full = [1.0] * ranks
    full[3] = 1.5
    profile = job(MODEL, range(ranks), Cores(
        tuple(range(ranks)), 1.0, tuple(full)), speeds=tuple(speeds))
    found = fold(profile, [range(ranks)])
    if ranks == 4:
        assert found == whole(profile, [range(4)])._replace(
            speeds=tuple(speeds))
    else:
        assert found.period == 1
        assert found.speeds[0] == 2.5
        assert found.cores.slowdown(found.cores.pools[0], 1) == 1.5


def test_a_torus_of_hosts_is_simulated_whole():
    profile = job(MODEL, range(4))
    profile = dataclasses.replace(profile, network=dataclasses.replace(
        profile.network, torus=(2, 2)))
    assert fold(profile, [range(4)]).period == 4
    assert folding.FoldedCluster(range(2), 1.0, 0.0, stands_in={
        0: 0, 1: 0}).route(0, 1)[-1].link == ('in', 0)
