"""Replicas of a stage exchange gradients before the step is over."""
import numpy as np
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.networks import NETWORKS, Plain, dataset
from tests.training.updaters.test_hybrid import make


def train(comm, network, overlap, communicator='fp8', pipeline=2, **settings):
    """Parameters' bytes after every update, and buckets sent early."""
    options = {'warmup': 1} if communicator == 'fp8' else {}
    grid, updater = make(
        comm, pipeline, network, dataset(24), 12, communicator, 0.05,
        {**options, 'overlap': overlap, 'bucket_bytes': 100,
         'frame_bytes': 64}, **settings)
    optimizer = updater.get_optimizer('main')
    made = optimizer.communicator
    mean, sent, found = made.multi_node_mean_grad, [], []

    def counting(model, *arguments):
        if overlap:
            known = made._reducer.known(model)
            sent.append(known.update.ready if known else 0)
        mean(model, *arguments)
    made.multi_node_mean_grad = counting
    for _ in range(6):
        updater.update()
        found.append(b''.join(parameter.array.tobytes() for _, parameter
                              in sorted(optimizer.target.namedparams())))
    made.finalize()
    grid.free()
    return found, sent


@on_ranks(2, 4)
@pytest.mark.parametrize('schedule', [
    'gpipe', '1f1b', 'zero_bubble'])
@pytest.mark.parametrize('network', sorted(NETWORKS))
def test_results_are_those_without_overlap_bit_for_bit(
        comm, network, schedule):
    settings = {'micro_batches': 3, 'schedule': schedule,
                'pipeline': comm.size // 2}
    plain, _ = train(comm, NETWORKS[network], False, **settings)
    overlapped, sent = train(comm, NETWORKS[network], True, **settings)
    assert plain == overlapped
    assert plain == train(comm, NETWORKS[network], 'next_forward',
                          **settings)[0]
    assert len(set(plain)) == 6
    assert sent[-1] > 0, sent


@on_ranks(4)
@pytest.mark.parametrize('communicator', ['float32', 'float16'])
def test_so_they_are_for_other_codecs_and_recomputing_stages(
        comm, communicator):
    settings = {'micro_batches': 4, 'recompute': 'every stage',
                'communicator': communicator}
    plain, _ = train(comm, Plain, False, **settings)
    overlapped, sent = train(comm, Plain, True, **settings)
    assert plain == overlapped
    assert plain == train(comm, Plain, 'next_forward', **settings)[0]
    assert min(sent[2:]) > 0


@on_ranks(2)
def test_a_step_that_fails_half_way_is_not_forgotten(comm):
    """The sums are kept in the same arrays at the next step."""
    grid, updater = make(
        comm, 1, Plain, dataset(24), 12, 'float32', 0.05,
        {'overlap': True, 'bucket_bytes': 100}, micro_batches=2)
    optimizer = updater.get_optimizer('main')
    for _ in range(4):
        updater.update()
    model = optimizer.target
    with optimizer.communicator.announced(model, None) as final:
        for parameter in model.params():
            final(parameter, np.zeros_like(parameter.array))
    with pytest.raises(ValueError, match='ended without an update'):
        updater.update()
    optimizer.communicator.finalize()
    grid.free()
