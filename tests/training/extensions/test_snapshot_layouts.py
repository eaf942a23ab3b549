"""A run goes on with other numbers of stages and replicas, or serially."""
import contextlib
import warnings

from chainer_fp8pipe.training.extensions import resume
from chainer_fp8pipe.training.snapshots.snapshot import save
from chainer_fp8pipe.training.snapshots.state import collect

import chainer
import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

from .helpers import updates_of
from .stages import Noisy, data, first, make_job, run, same_bits, weights

STOP, LAST = 5, 9


def start(comm, out, stages, **options):
    """Trains for some iterations and writes a snapshot."""
    trainer, grid = make_job(comm, out, stages, **options)
    run(trainer, STOP)
    save(trainer, grid, str(out / 'snapshot_iter_5.npz'))
    grid.free()
    return trainer


def go_on(comm, out, stages, exact=False, **options):
    """Goes on from the snapshot in a job of another layout."""
    trainer, grid = make_job(comm, out, stages, **options)
    with told(comm, exact):
        assert resume(trainer, grid, str(out)) == STOP
    run(trainer, LAST)
    grid.free()
    return trainer


@contextlib.contextmanager
def told(comm, exact=False):
    """A warning on rank 0, and nowhere else, that the layout is another."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield
    texts = [str(warning.message) for warning in caught
             if 'of a run with another layout' in str(warning.message)]
    assert len(texts) == (comm.rank == 0 and not exact), caught


@on_ranks(4)
def test_another_layout_starts_residuals_afresh(comm, tmp_path):
    start(comm, tmp_path, 2, name='fp8')
    trainer = go_on(comm, tmp_path, 1, name='fp8')
    optimizer = trainer.updater.get_optimizer('main')
    assert updates_of(optimizer.communicator, optimizer.target) == LAST - STOP
    found = weights(trainer)
    assert all(len(set(comm.allgather(value.tobytes()))) == 1
               for key, value in sorted(found.items())
               if not key.startswith('3/'))


@on_ranks(4)
def test_replicas_get_the_running_statistics_of_the_first(comm, tmp_path):
    before = comm.bcast(weights(start(comm, tmp_path, 1)))
    ranks = first(comm, 2)
    if ranks:
        trainer, grid = make_job(ranks, tmp_path, 1)
        with told(ranks):
            resume(trainer, grid, str(tmp_path))
        same_bits(weights(trainer), before)


def momentum():
    """An optimizer of which Chainer would forget much."""
    optimizer = chainer.optimizers.MomentumSGD(0.01)
    optimizer.use_fp32_update()
    optimizer.loss_scaling(interval=2)
    return optimizer


@on_ranks(4)
def test_scales_rates_and_float32_copies_move_with_their_layer(
        comm, tmp_path):
    def job(ranks, stages):
        return make_job(ranks, tmp_path, stages, optimizer=momentum())

    def state(trainer):
        kept = collect(trainer, MPI.COMM_SELF)
        return {key: repr(value.item()[1] if key.endswith('/values')
                          else value) for key, value in kept.items()
                if key.startswith('optimizer/')
                or key.startswith('trainer/updater/optimizer')}
    chainer.global_config.dtype = chainer.mixed16
    trainer, grid = job(comm, 4)
    run(trainer, STOP)
    optimizer = trainer.updater.get_optimizer('main')
    optimizer.hyperparam.lr = numpy.float64(0.02)
    for name, parameter in optimizer.target.namedparams():
        if name == '/4/W':
            parameter.update_rule.hyperparam.lr = 0.5
    save(trainer, grid, str(tmp_path / 'snapshot_iter_5.npz'))
    assert optimizer._loss_scale == 2 ** STOP
    before = {}
    for part in comm.allgather(state(trainer)):
        before.update(part)
    assert "'hyperparam.lr': 0.5" in before['optimizer/main/4/W/values']
    assert 'optimizer/main/4/W/float32' in before
    trainer, grid = job(comm, 2)
    with told(comm):
        resume(trainer, grid, str(tmp_path))
    after = state(trainer)
    assert after == {key: before[key] for key in after}
    assert trainer.updater.get_optimizer('main')._loss_scale == 2 ** STOP
    found = set().union(*comm.allgather(set(after)))
    assert found == set(before)


class Resumed(Noisy):
    """An updater with a value of its own, that wants to know."""

    mark = 0
    times = 0

    def serialize(self, serializer):
        super().serialize(serializer)
        self.mark = serializer('mark', self.mark)

    def resumed(self):
        self.times += 1


@on_ranks(2)
def test_an_updater_hears_that_it_goes_on(comm, tmp_path):
    """Another updater: not the same layout, though all layers are."""
    start(comm, tmp_path, 2, updater=Noisy)
    trainer, grid = make_job(comm, tmp_path, 2, updater=Resumed)
    with told(comm):
        resume(trainer, grid, str(tmp_path))
    assert (trainer.updater.mark, trainer.updater.times) == (0, 1)
    trainer.updater.mark = 7
    save(trainer, grid, str(tmp_path / 'snapshot_iter_5.npz'))
    trainer, grid = make_job(comm, tmp_path, 2, updater=Resumed)
    with told(comm, exact=True):
        resume(trainer, grid, str(tmp_path))
    assert (trainer.updater.mark, trainer.updater.times) == (7, 1)


# --- iterators over a share of the data -------------------------------------

def scattered(ranks, samples=24, shuffle=True):
    """Each rank has its share of the data, in an order of its own."""
    numpy.random.seed(ranks.rank)
    return chainer.iterators.SerialIterator(
        data(samples // ranks.size), 4, shuffle=shuffle)


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize(('before', 'after'), [(4, 2), (2, 4), (2, 1)])
@on_ranks(4)
def test_an_iterator_goes_on_at_the_same_share_of_its_epoch(
        comm, before, after, shuffle, tmp_path):
    """Each rank reads every sample of its new share once in an epoch."""
    ranks = first(comm, before)
    if ranks:
        start(ranks, tmp_path, 1, iterator=scattered(ranks, 96, shuffle))
    comm.Barrier()
    ranks = first(comm, after)
    if not ranks:
        return
    epochs = STOP * 4 / (96 // before)
    iterator = scattered(ranks, 96, shuffle)
    drawn = None if not shuffle else iterator._state.order.copy()
    trainer, grid = make_job(ranks, tmp_path, 1, iterator=iterator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        resume(trainer, grid, str(tmp_path))
    assert ranks.rank or (
        f"iterator 'main' at the same share of its epoch, of {96 // after} "
        f'samples in place of {96 // before}') in str(caught[0].message)
    assert iterator.epoch_detail == pytest.approx(epochs)
    assert iterator.previous_epoch_detail < iterator.epoch_detail
    assert shuffle is False or (iterator._state.order == drawn).all()
    place, size = iterator.current_position, 96 // after
    rest = numpy.concatenate([iterator.next() for _ in range(
        (size - place) // 4)])
    expected = data(size)[numpy.arange(size) if drawn is None else drawn]
    assert (rest == expected[place:place + len(rest)]).all()


@pytest.mark.parametrize(('before', 'after'), [(4, 2), (2, 4)])
@pytest.mark.parametrize('same', [True, False])
@on_ranks(4)
def test_an_order_and_random_numbers_go_on_where_they_were(
        comm, same, before, after, tmp_path):
    """New ranks keep their own, unless all had the same order."""
    def whole(ranks, seed):
        numpy.random.seed(seed)
        return chainer.iterators.SerialIterator(data(24), 4)
    order, generator = None, None
    ranks = first(comm, before)
    if ranks:
        iterator = whole(ranks, 7 if same else ranks.rank)
        order = iterator._state.order.copy()
        start(ranks, tmp_path, 1, iterator=iterator)
        generator = numpy.random.get_state()[1].tolist()
    comm.Barrier()
    shared = comm.bcast(order) if same else None
    ranks = first(comm, after)
    if ranks:
        iterator = whole(ranks, 100 + ranks.rank)
        drawn = iterator._state.order.copy()
        trainer, grid = make_job(ranks, tmp_path, 1, iterator=iterator)
        now = numpy.random.get_state()[1].tolist()
        with told(ranks):
            resume(trainer, grid, str(tmp_path))
        expected = order if order is not None else (
            shared if same else drawn)
        assert (iterator._state.order == expected).all()
        assert iterator.current_position == STOP * 4
        assert numpy.random.get_state()[1].tolist() == (generator or now)


# --- bad input -------------------------------------------------------------

@on_ranks(4)
def test_a_model_that_does_not_fit_is_named_on_all_ranks(comm, tmp_path):
    """And the trainer stays as it was."""
    start(comm, tmp_path, 4)
    for options, match in [
            ({'layers': 6}, 'parameter /5/.* is not in the snapshot'),
            ({'layers': 4}, 'all ranks: the snapshot has parameter /4/., the '
             'model has not'),
            ({'width': 6}, r'parameter /0/W is float32 \(4, 3\) in the '
             r'snapshot but float32 \(6, 3\) in the model')]:
        trainer, grid = make_job(comm, tmp_path, 2, **options)
        before = weights(trainer)
        with pytest.raises(ValueError, match=match) as raised:
            resume(trainer, grid, str(tmp_path))
        assert len(set(comm.allgather(str(raised.value)))) == 1
        assert trainer.updater.iteration == 0
        same_bits(weights(trainer), before)
        grid.free()
