"""Updates take what can be reckoned by hand."""
import dataclasses

from chainer_fp8pipe.planning import step
from chainer_fp8pipe.planning.choices import Choices, Wanted
from chainer_fp8pipe.planning.job_plan import Configuration
from chainer_fp8pipe.planning.schedule_time import Link
from chainer_fp8pipe.planning.step import ExchangeFigures, predict

import pytest

from tests.planning.jobs import figures, job

#: Four layers of 10 ms and 1,000 elements.
MODEL = figures(*[0.01] * 4, parameters=4000)


@pytest.fixture(autouse=True)
def no_constants(monkeypatch):
    monkeypatch.setattr(step, 'PACKING', 0.0)
    monkeypatch.setattr(step, '_PLACEHOLDER', 0.0)
    monkeypatch.setattr(step, '_THREAD', 0.0)


def seconds_of(profile, batch, way):
    return sum(predict(profile, batch, way).values())


@pytest.mark.parametrize(('profile', 'overlap', 'seconds'), [
    # 8 samples on each rank: 40 ms; 4,000 elements.
    (job(MODEL, 2), False, .04),
    (job(MODEL, 2, element=1e-5, fixed=.001), False, .04 + .041),
    (job(MODEL, 2, slowdown=(1.0, 3.0)), False, .12),
    (job(MODEL, 2, reading=.5), False, .54),
    (job(dataclasses.replace(MODEL, update=.006), 2), False, .046),
    # Backward passes end at 25, 30, 35, 40 ms; the exchange of a layer takes
    # 10 ms: the last one ends at 65 ms if they follow each other.
    (job(MODEL, 2, element=1e-5), True, .065),
    (job(MODEL, 2, element=1e-6), True, .041),
    # The rank has the processor for passes and exchange.
    (job(MODEL, 2, element=1e-6, processor=1e-6), True, .044),
    (job(MODEL, 2, element=1e-6, processor=1e-6, spare=True), True, .041),
    # On one host there is no wire.
    (job(MODEL, 2, element=1e-6, hosts=(0, 0)), True, .044)])
def test_replicas(profile, overlap, seconds):
    assert seconds_of(profile, 16, Configuration(2, overlap=overlap)
                      ) == pytest.approx(seconds, rel=1e-6)


def pipeline(profile, batch, stages, micro_batches):
    """The way of the best cut."""
    replicas = profile.ranks // stages
    return Configuration(replicas, stages, micro_batches, Choices(
        profile, Wanted(batch)).cut(stages, replicas, micro_batches,
                                    '1f1b'))


@pytest.mark.parametrize(('profile', 'stages', 'seconds'), [
    # 16 samples take 80 ms; 2 stages with 4 micro-batches: 5/4 of a half.
    (job(MODEL, 2), 2, .05),
    (job(MODEL, 2, slowdown=(1.0, 2.0)), 2, .09),
    # Both on one core: all the work, and half of what they would wait.
    (job(MODEL, 2, slowdown=(2.0, 2.0)), 2, .08 + .005),
    # A gradient is back after 35 and 75 ms, the last one after 85.
    (job(MODEL, 2, link=Link(.01, float('inf'))), 2, .09),
    (job(dataclasses.replace(MODEL, update=.006), 2), 2, .053),
    (job(dataclasses.replace(MODEL, micro_batch=.001), 2), 2, .055),
    # Two replicas: half as long, and an exchange of 2,000 elements.
    (job(MODEL, 4, (1, 2), element=1e-6), 2, .025 + .002)])
def test_pipelines(profile, stages, seconds):
    way = pipeline(profile, 16, stages, 4)
    assert seconds_of(profile, 16, way) == pytest.approx(seconds, rel=1e-6)


def test_a_way_for_other_ranks_is_refused():
    with pytest.raises(ValueError, match='is for 4 ranks, the profile for 2'):
        predict(job(MODEL, 2), 16, Configuration(4))


@pytest.mark.parametrize(('replicas', 'rate', 'element'), [
    (2, None, 3e-8), (4, None, 1e-8 + 3e-8), (8, None, 1e-8 + 3.5e-8),
    # 2 (r - 1) / r elements of 4 bytes.
    (2, 4e7, 1e-8 + 1e-7), (4, 4e7, 1e-8 + 1.5e-7)])
def test_an_exchange_on_paper(replicas, rate, element):
    found = ExchangeFigures(2, .001, 3e-8, 1e-8).on_paper(
        'float32', replicas, rate)
    assert found.element == pytest.approx(element)
    assert found.fixed == pytest.approx(.001 * (1, 2, 3)[
        (2, 4, 8).index(replicas)])
    assert found.replicas == replicas


@pytest.mark.parametrize(('hosts', 'count', 'expected'), [
    ((0, 1), 4, (0, 1, 2, 3)), ((0, 0, 1, 1), 6, (0, 0, 1, 1, 2, 2)),
    ((0, 0), 4, (0, 0, 0, 0)), ((0, 1), 2, (0, 1))])
def test_more_ranks_are_added_as_the_others_began(hosts, count, expected):
    profile = job(MODEL, len(hosts), hosts=hosts).for_ranks(count)
    assert (profile.ranks, profile.hosts) == (count, expected)
    # Those of one host have the cores that they had.
    assert max(profile.slowdown) == (count / len(hosts) if set(hosts) == {0}
                               else 1.0)
    predict(profile, 16, Configuration(count))


def test_ranks_on_hosts_of_their_own_lose_nothing_by_each_other():
    profile = job(MODEL, 2, element=1e-8, slowdown=(2.0, 2.0)).on_hosts(
        4, 4e7)
    assert max(profile.slowdown) == 1.0
    assert profile.exchange(Configuration(4)).element == pytest.approx(
        1.5 * 4 / 4e7)
