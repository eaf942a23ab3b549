"""Seconds of updates: of few elements, and of each further tensor."""
from chainer_fp8pipe.planner import update_costs
from chainer_fp8pipe.planner.update_costs import measure_updates
from chainer_fp8pipe.planning.job.codec_choice import FEW
from chainer_fp8pipe.planning.job.job_profile import Figure

import pytest

from tests.ranks import on_ranks


class Updates:
    """A communicator that counts updates, and may refuse one."""

    def __init__(self, refused=None):
        self.tensors = []
        self.refused = refused
        self.finalised = 0

    def multi_node_mean_grad(self, model):
        parameters = list(model.params())
        assert {parameter.size for parameter in parameters} == {FEW}
        if len(self.tensors) == self.refused:
            raise RuntimeError('no')
        self.tensors.append(len(parameters))

    def finalize(self):
        self.finalised += 1


def patched(monkeypatch, updates):
    made = []

    def create(name, comm, **options):
        made.append((name, options))
        return updates
    monkeypatch.setattr(update_costs, 'create_communicator', create)
    return made


@on_ranks(1)
def test_medians_are_of_all_but_the_first_pair(comm):
    """One tensor takes 2 s, 65 take 2 + 64 x 0.5 s, the first ones more."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        updates = Updates()
        made = patched(monkeypatch, updates)
        counted = iter([100.0, 100.0] + [2.0, 34.0] * 3 + [3.0, 35.0])

        def seconds(comm, communicator, model, filler):
            communicator.multi_node_mean_grad(model)
            return next(counted)
        monkeypatch.setattr(update_costs, '_seconds', seconds)
        update, tensor = measure_updates(comm, 'fp8', 0.0)
    assert made == [('fp8', {'warmup': 0})]
    assert updates.tensors == [1, 65] * 5
    assert updates.finalised == 1
    assert (update, tensor) == (Figure.of([2, 2, 2, 3]), Figure(0.5))


@on_ranks(1)
def test_the_communicator_is_finalised_after_an_error(comm):
    with pytest.MonkeyPatch.context() as monkeypatch:
        updates = Updates(refused=1)
        patched(monkeypatch, updates)
        with pytest.raises(RuntimeError, match='no'):
            measure_updates(comm, 'float32', 1.0)
    assert (updates.tensors, updates.finalised) == ([1], 1)


@on_ranks(2)
def test_the_slowest_rank_counts_on_all(comm):
    with pytest.MonkeyPatch.context() as monkeypatch:
        times = iter([0.0, 1.0 + comm.rank])
        monkeypatch.setattr(update_costs.time, 'perf_counter',
                            lambda: next(times))
        monkeypatch.setattr(update_costs, 'wait_until', lambda done: None)
        found = update_costs._seconds(
            comm, Updates(), update_costs._model(1),
            update_costs.CacheFiller())
    assert found == 2
