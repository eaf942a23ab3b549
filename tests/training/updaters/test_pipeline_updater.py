"""Layers over stages and replicas, against serial Chainer."""
import contextlib

from chainer_fp8pipe.links import Divisible
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.pipeline.schedules import bounds
from chainer_fp8pipe.training.iterators import ReplicaIterator
from chainer_fp8pipe.training.updater import PipelineUpdater

import chainer
import chainer.links as L
import chainermn
import pytest
from chainer.training import extensions

from tests.ranks import on_ranks
from tests.training.trainers import Job, arrays, bits
from tests.training.updaters.networks import (
    NETWORKS,
    Plain,
    close,
    dataset,
    gathered,
    serial_gradients,
)


def trains_as_serially(job, sizes, tolerance=1e-6):
    """An update of all samples; sizes of micro-batches, where they matter."""
    seen, = job.update()
    wanted, expected = serial_gradients(job.network, job.data, sizes)
    assert seen == pytest.approx(wanted, rel=tolerance)
    assert job.comm.allgather(seen) == [seen] * job.comm.size
    close(job.gradients(), expected, tolerance)


#: Each network, schedule, recomputation and number of chunks, not all pairs.
WAYS = [
    *((network, *way, 1) for network in NETWORKS for way in (
        ('gpipe', True), ('1f1b', False), ('zero_bubble', False))),
    ('Normalised', '1f1b', True), ('Noisy', 'zero_bubble', True),
    ('Plain', 'interleaved', False, 2), ('Plain', 'interleaved', True, 3),
    ('Plain', 'zero_bubble', False, 3), ('Plain', 'zero_bubble', True, 2)]


@on_ranks(2, 4)
@pytest.mark.parametrize('way', WAYS, ids=str)
def test_loss_and_gradients_are_those_of_serial_training(comm, way):
    network, schedule, recompute, chunks = (*way, 1)[:4]
    if chunks * comm.size > 7:
        chunks = 1 + (comm.size < 4)
    for count in (1, 5):
        job = Job(comm, network, data=dataset(13, ignored=[2, 3, 7]),
                  cut={'chunks': chunks}, micro_batches=count,
                  schedule=schedule, recompute=recompute)
        trains_as_serially(job, [end - start for start, end
                                 in bounds(13, count)])


@on_ranks(3, 4)
@pytest.mark.parametrize('stages', [1, 2])
@pytest.mark.parametrize('ignored', [(), (0, 1, 2, 9)])
def test_loss_and_gradients_are_those_of_the_whole_batch(
        comm, stages, ignored):
    """Without dropout or normalisation the cut does not matter."""
    trains_as_serially(Job(
        comm, 'Plain', comm.size if comm.size % stages else stages,
        data=dataset(13, ignored=ignored), micro_batches=2), [13], 1e-5)


@on_ranks(4)
def test_dropout_masks_depend_on_the_sample_and_not_on_the_replica(comm):
    trains_as_serially(Job(comm, 'Noisy', 2, data=dataset(12)), [2] * 6, 1e-5)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize(('network', 'schedule', 'recompute'), [
    ('Plain', 'zero_bubble', False), ('Skipping', '1f1b', False),
    ('Noisy', '1f1b', False), ('Normalised', '1f1b', True)])
def test_the_bits_do_not_depend_on_the_cut(comm, network, schedule,
                                           recompute):
    """They are those of one rank, whose pipeline has one stage."""
    found = []
    for ranks in comm.Split(comm.rank, 0), comm:
        job = Job(ranks, network, data=dataset(12), micro_batches=4,
                  schedule=schedule, recompute=recompute).updated(2)
        running = gathered(comm, {
            (path, name): vars(link)[name].tobytes()
            for path, link in job.model.namedlinks()
            for name in link._persistent if hasattr(vars(link)[name], 'size')})
        found.append((running, {name: array.tobytes() for name, array
                                in job.gradients().items()}))
    assert found[0] == found[1]


@on_ranks(1, 2)
def test_a_parameter_that_was_not_used_gets_no_gradient(comm):
    class Unused(chainer.Chain):
        def __init__(self):
            super().__init__(used=L.Linear(8, 4), unused=L.Linear(8, 4))

        def forward(self, x):
            return self.used(x)
    job = Job(comm, lambda: Divisible(Unused(), L.Linear(4, 5)))
    # It makes zeros of what has no gradient.
    job.optimizer.update = lambda: None
    found = job.updated(1).gradients()
    assert [found[f'/0/{name}/W'] is None for name in ('used', 'unused')] == [
        False, True]


def serial(data, batch, **options):
    return chainer.iterators.SerialIterator(
        data if isinstance(data, list)
        else chainer.datasets.TupleDataset(*data), batch,
        **{'shuffle': False, **options})


@on_ranks(2)
def test_ranks_that_read_no_data_need_no_iterator(comm):
    iterator = None if comm.rank else serial(dataset(8), 4)
    updater = PipelineUpdater(
        iterator, chainer.optimizers.SGD(0).setup(Plain().stage(comm)), comm,
        micro_batches=2)
    details = []
    for _ in range(3):
        updater.update()
        details.append((updater.epoch, updater.epoch_detail,
                        updater.previous_epoch_detail, updater.is_new_epoch))
    assert comm.allgather(details) == [details] * 2
    assert details == [(0, 0.5, 0.0, False), (1, 1.0, 0.5, True),
                       (1, 1.5, 1.0, False)]


# --- replicas ----------------------------------------------------------------

@on_ranks(4)
@pytest.mark.parametrize('communicator', ['fp8', 'float32', 'naive'])
def test_replicas_are_brought_together_and_no_update_is_lost_to_it(
        comm, communicator):
    """And they keep the same bits."""
    job = Job(comm, 'Plain', 2, communicator=communicator)
    before = arrays(job.model)
    for parameter in job.model.params():
        parameter.array += job.grid.replica_index
    job.update()
    assert all((array != before[name]).any()
               for name, array in arrays(job.model).items())
    job.update(4)
    assert job.grid.data.allgather(bits(job.model)) == [bits(job.model)] * 2


@on_ranks(4)
@pytest.mark.parametrize(('of', 'match'), [
    (None, 'has 2 replicas, and the optimizer.* for 1; wrap'),
    ('all ranks', 'has 2 replicas, and the optimizer.* for 4; wrap')])
def test_a_communicator_of_other_ranks_or_none_is_an_error(comm, of, match):
    grid = ProcessGrid(comm, pipeline=2)
    optimizer = chainer.optimizers.SGD()
    if of:
        optimizer = Job(comm, stages=1).optimizer
    with pytest.raises(ValueError, match=match):
        PipelineUpdater(serial(dataset(4), 4), optimizer.setup(
            Plain().stage(grid)), grid)
    grid.free()


class Odd(Plain):
    """Its layer 5 fails."""

    def __init__(self):
        super().__init__()
        self[5] = lambda x: None


@on_ranks(4)
def test_what_a_failed_step_leaves_does_not_reach_a_new_grid(comm):
    """Rank 3 is the last stage of the second replica."""
    for alone in (True, False, False):
        for fails in (True, False):
            grid = ProcessGrid(comm, 2)
            with (pytest.raises((ValueError, RuntimeError), match='layer 5')
                  if fails else contextlib.nullcontext()):
                Job(comm, Odd if fails and (comm.rank == 3 or not alone)
                    else Plain, grid, micro_batches=4).update()
            grid.free()


@on_ranks(4)
def test_a_replica_whose_data_end_first_is_an_error(comm):
    grid = ProcessGrid(comm, 2)
    job = Job(comm, stages=grid, micro_batches=2, iterator=serial(
        dataset(6 if grid.replica_index else 12), 6, repeat=False)).updated(1)
    with pytest.raises(ValueError, match='the step is (train|stop) on rank '
                                         '.*equal length'):
        job.update()
    grid.free()


@on_ranks(4)
def test_with_overlap_a_pipelines_gradients_are_sent_after_its_step(comm):
    found = []
    for overlap in False, True:
        job = Job(comm, 'Plain', 2, codec={
            'overlap': overlap, 'bucket_bytes': 100}).updated(4)
        found.append([parameter.array.tobytes()
                      for _, parameter in sorted(job.model.namedparams())])
        job.communicator.finalize()
    assert found[0] == found[1]


# --- evaluation --------------------------------------------------------------

def evaluated(model, data, batch):
    """What Chainer's Evaluator gives for the whole model."""
    return extensions.Evaluator(serial(data, batch, repeat=False),
                                L.Classifier(model))()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(('network', 'stages', 'shared'), [
    ('Plain', None, False), ('Noisy', None, False), ('Plain', 2, False),
    ('Plain', 2, True)])
def test_the_evaluator_gives_what_it_gives_serially(
        comm, network, stages, shared):
    """Where each pipeline evaluates all data, and where each its share."""
    data = dataset(20)      # the last batch is short
    job = Job(comm, network, stages if comm.size > 1 else 1, data=data,
              micro_batches=4,
              optimizer=chainer.optimizers.SGD(0.0))
    evaluator = extensions.Evaluator(ReplicaIterator(
        chainer.datasets.TupleDataset(*data), 8,
        grid=job.grid if shared else None, repeat=False, shuffle=False),
        job.model, eval_func=job.updater.evaluate)
    if shared and job.communicator is not None:
        evaluator = chainermn.create_multi_node_evaluator(
            evaluator, job.communicator)
    found = evaluator()
    assert found == pytest.approx(
        evaluated(NETWORKS[network](), data, 8), rel=1e-5)
    job.update()
    assert evaluator() == found
    assert comm.allgather(found) == [found] * comm.size


@on_ranks(2)
def test_ranks_that_want_different_steps_get_an_error(comm):
    job = Job(comm)
    step = job.updater.evaluate if comm.rank else job.updater.predict
    with pytest.raises(ValueError, match='rank 1: this rank is about to '
                                         'evaluate, but the first stage to '
                                         'predict'):
        step(*job.data[:1 + comm.rank])
