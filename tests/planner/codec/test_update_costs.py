"""Seconds of updates: of few elements, of further tensors and buckets."""
from chainer_fp8pipe.exchange.buckets import divide
from chainer_fp8pipe.planner.codec import update_costs
from chainer_fp8pipe.planner.codec.update_costs import (
    costs_of_few,
    measure_updates,
)
from chainer_fp8pipe.planning.job.codec_choice import FEW
from chainer_fp8pipe.planning.job.job_profile import Figure

import pytest

from tests.ranks import on_ranks


class Updates:
    """A communicator that counts buckets, and may refuse an update."""

    def __init__(self, limit, refused):
        self.buckets = []
        self.limit = limit
        self.refused = refused
        self.finalised = 0

    def multi_node_mean_grad(self, model):
        if len(self.buckets) == self.refused:
            raise RuntimeError('no')
        self.buckets.append(len(divide({
            name: parameter.size for name, parameter in model.namedparams()},
            self.limit)))

    def finalize(self):
        self.finalised += 1


def patched(monkeypatch, refused=None):
    made = []

    def create(name, comm, bucket_bytes=1 << 22, **options):
        assert (name, options) == ('fp8', {'warmup': 0})
        made.append(Updates(bucket_bytes, refused))
        return made[-1]
    monkeypatch.setattr(update_costs, 'create_communicator', create)
    return made


@on_ranks(1, 2)
def test_tensors_travel_together_and_each_by_itself(comm):
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = patched(monkeypatch)
        found = measure_updates(comm, 'fp8', 0.0)
    assert [one.buckets for one in made] == [[1, 1] * 5, [65] * 5]
    assert [one.finalised for one in made] == [1, 1]
    assert found.update.value > 0
    assert len(set(comm.allgather(found))) == 1


@on_ranks(1)
def test_communicators_are_finalised_after_an_error(comm):
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = patched(monkeypatch, refused=1)
        with pytest.raises(RuntimeError, match='no'):
            measure_updates(comm, 'fp8', 1.0)
    assert [one.finalised for one in made] == [1, 1]


@on_ranks(2)
def test_the_slowest_rank_counts_on_all(comm):
    with pytest.MonkeyPatch.context() as monkeypatch:
        times = iter([0.0, 1.0 + comm.rank])
        monkeypatch.setattr(update_costs.time, 'perf_counter',
                            lambda: next(times))
        monkeypatch.setattr(update_costs, 'wait_until', lambda done: None)
        found = update_costs._seconds(
            comm, Updates(0, None), update_costs._model(1),
            update_costs.CacheFiller())
    assert found == 2


def test_medians_are_compared():
    """2 s, 0.5 s more for each of 64 tensors, 0.25 s for each bucket."""
    found = costs_of_few([[2.0, 34.0, 50.0], [3.0, 34.0, 50.0],
                          [2.0, 66.0, 50.0]])
    assert found.update == Figure.of([2, 3, 2])
    assert found.tensor == Figure.of([0.5, 0.5, 1.0])
    assert found.bucket == Figure(0.25)


def test_noise_makes_no_cost_less_than_nothing():
    found = costs_of_few([[2.0, 1.0, 0.5], [2.0, 3.0, 0.5], [2.0, 1.0, 0.5]])
    assert found == (Figure(2.0), Figure(0.0), Figure(0.0))


@on_ranks(1)
def test_a_model_has_so_many_tensors_of_few_elements(comm):
    parameters = list(update_costs._model(65).params())
    assert [parameter.size for parameter in parameters] == [FEW] * 65
    assert all(parameter.grad is not None for parameter in parameters)
