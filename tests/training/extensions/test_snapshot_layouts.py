"""A run goes on with other numbers of stages and replicas, or serially."""
import contextlib
import functools
import json
import tempfile
import warnings

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.training.extensions import Snapshot, resume
from chainer_fp8pipe.training.snapshots.state import collect, note_beginning

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from chainer.training import Trainer, extensions
from mpi4py import MPI

from tests.ranks import on_ranks

from ..trainers import (
    REPLICAS,
    SERIAL,
    Job,
    arrays,
    first,
    same_bits,
    save,
)
from ..updaters.networks import Tied, close, dataset

STOP, LAST = 5, 10


def network(normalised=False, random=True, width=9, layers=3):
    """What is random in it only a pipeline draws the same however cut."""
    model = Divisible(lazy(L.Linear, 8, width), F.relu,
                      lazy(L.Linear, width, 8), F.tanh)
    if normalised:
        model.append(lazy(L.BatchNormalization, 8))
    if random:
        model.append(functools.partial(F.dropout, ratio=0.2))
    # None: its shape comes from the first batch.
    model.append(lazy(L.Linear, None if random else 8, 8))
    model.append(F.tanh)
    for _ in range(layers - 2):
        model.append(lazy(L.Linear, 8, 8))
    return model


NORMALISED = functools.partial(network, normalised=True)
CALM = functools.partial(network, random=False)
CALM_CHAIN = functools.partial(Tied, normalised=False)


def job_of(comm, stages, model=None, optimizer=None, **options):
    """Four micro-batches of all replicas together."""
    replicas = comm.size // stages if isinstance(stages, int) else 1
    if stages not in (SERIAL, REPLICAS):
        options.setdefault('micro_batches', max(4 // replicas, 1))
    return Job(comm, model or network, stages, shuffle=True,
               data=dataset(34), batch=12, optimizer=optimizer
               or chainer.optimizers.Adam(0.01), **options)


@contextlib.contextmanager
def told(comm, exact=False):
    """A warning on rank 0, and nowhere else, that the layout is another."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield caught
    texts = [str(warning.message) for warning in caught
             if 'of a run with another layout' in str(warning.message)]
    assert len(texts) == (comm.rank == 0 and not exact), texts


def go(comm, out, stages, last, resumed=None, **options):
    """Trains, from a snapshot if told, and writes snapshots on the way.

    Args:
        comm: The ranks; None: this rank takes no part.
        resumed: None for a new run; otherwise whether it must be exact.

    Returns:
        The job, and the loss of every iteration.
    """
    if comm is None:
        return None, None
    job, losses = job_of(comm, stages, **options), []
    trainer = job.trainer(out, last)
    trainer.extend(lambda trainer: losses.append(
        float(getattr(trainer.observation['main/loss'], 'array',
                      trainer.observation['main/loss']))),
        name='losses', trigger=(1, 'iteration'))
    trainer.extend(Snapshot(job.ranks), trigger=(STOP, 'iteration'))
    if job.comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
    if resumed is not None:
        with told(job.comm, resumed):
            assert resume(trainer, job.ranks, str(out)) == STOP
    trainer.run()
    return job, losses


@functools.cache
def undisturbed(model):
    """All values after a run on one rank, and the losses."""
    with tempfile.TemporaryDirectory() as out:
        job, losses = go(MPI.COMM_SELF, out, 1, LAST, model=model)
    return job.values(), losses


#: (ranks, stages) before and after, and options of both.
SAME_BITS = {
    'deeper': ((1, 1), (4, 4), {}, {}),
    'less deep': ((4, 4), (2, 2), {}, {}),
    'as deep': ((4, 4), (4, 4), {}, {}),
    'serial again': ((2, 2), (1, 1), {}, {}),
    'other cuts': ((2, 2), (4, 4), {
        'cut': {'chunks': 2}, 'schedule': 'interleaved'},
        {'cut': {'balance': [1, 3, 2, 2]}})}


@pytest.mark.parametrize('name', SAME_BITS)
@on_ranks(4)
def test_a_run_at_any_depth_gives_the_same_bits(comm, name, tmp_path):
    """With dropout and batch normalisation; against one stage."""
    before, after, given, then = SAME_BITS[name]
    options = {'model': network if given else NORMALISED}
    whole, losses = undisturbed(**options)
    go(first(comm, before[0]), tmp_path, before[1], STOP, **options, **given)
    comm.Barrier()
    job, second = go(first(comm, after[0]), tmp_path, after[1], LAST,
                     resumed=before == after, **options, **then)
    if job:
        assert second == losses[STOP:]
        same_bits(arrays(job.model), whole)
    if comm.rank == 0:
        log = json.loads((tmp_path / 'log').read_text())
        assert [entry['iteration'] for entry in log] == [2, 4, 6, 8, 10]
        numpy.testing.assert_allclose(
            [entry['main/loss'] for entry in log],
            numpy.reshape(losses, (5, 2)).mean(1))


@pytest.mark.parametrize(('before', 'after', 'options'), [
    ((4, 2), (2, 2), {'model': network}), ((4, 1), (4, 4), {'model': network}),
    ((1, 1), (4, 2), {'model': network}),
    ((1, SERIAL), (4, 4), {'model': CALM}),
    ((4, 4), (1, SERIAL), {'model': CALM}),
    ((2, 2), (3, 3), {'model': Tied}),
    ((2, 2), (1, SERIAL), {'model': CALM_CHAIN})])
@on_ranks(4)
def test_a_run_at_any_width_gives_the_same_losses(comm, before, after,
                                                  options, tmp_path):
    """(ranks, stages); dropout masks go with the samples."""
    whole, losses = undisturbed(**options)
    go(first(comm, before[0]), tmp_path, before[1], STOP, **options)
    comm.Barrier()
    job, second = go(first(comm, after[0]), tmp_path, after[1], LAST,
                     resumed=False, **options)
    if job:
        numpy.testing.assert_allclose(second, losses[STOP:], 1e-5)
        close(job.values(), whole, 2e-5)


@pytest.mark.parametrize(('communicator', 'model'), [
    ('fp8', NORMALISED), ('float32', NORMALISED), ('fp8', Tied)])
@on_ranks(4)
def test_a_hybrid_run_goes_on_exactly(comm, communicator, model, tmp_path):
    """2 stages x 2 replicas, the residuals of each rank included."""
    options = {'model': model, 'communicator': communicator}
    whole, losses = go(comm, tmp_path / 'whole', 2, LAST, **options)
    go(comm, tmp_path / 'part', 2, STOP, **options)
    job, second = go(comm, tmp_path / 'part', 2, LAST, resumed=True,
                     **options)
    assert second == losses[STOP:]
    same_bits(arrays(job.model), arrays(whole.model))
    # Chainer's load_npz reads a stage, too.
    again = job_of(comm, 2, **options).model
    chainer.serializers.load_npz(
        tmp_path / f'part/snapshot_iter_10.ranks/rank{comm.rank}of4.npz',
        again, 'updater/model:main/')
    same_bits(arrays(job.model), arrays(again))


@on_ranks(4)
def test_another_layout_starts_residuals_afresh(comm, tmp_path):
    """And replicas have the running statistics of the first."""
    options = {'model': NORMALISED, 'communicator': 'fp8'}
    before, _ = go(comm, tmp_path, 2, STOP, **options)
    job = job_of(comm, 1, **options)
    trainer = job.trainer(tmp_path, LAST)
    with told(comm):
        resume(trainer, job.ranks, str(tmp_path))
    stages = comm.allgather(arrays(before.model))
    same_bits(arrays(job.model), {**stages[0], **stages[1]})
    trainer.run()
    assert job.communicator.state(job.model)['codec|done'] == LAST - STOP
    found = comm.allgather({key: value.tobytes() for key, value
                            in arrays(job.model).items()
                            if not key.startswith('4/')})
    assert found == found[:1] * 4


def momentum():
    """An optimizer of which Chainer would forget much."""
    optimizer = chainer.optimizers.MomentumSGD(0.01)
    optimizer.use_fp32_update()
    optimizer.loss_scaling(interval=2)
    return optimizer


@on_ranks(4)
def test_scales_rates_and_float32_copies_move_with_their_layer(
        comm, tmp_path):
    def state(job):
        kept, _ = collect(job.trainer(tmp_path, 1), MPI.COMM_SELF)
        return {key: value.tobytes() for key, value in kept.items()
                if key.startswith(('job/optimizer/', 'updater/optimizer'))
                and '/hook ' not in key}     # a pipeline's own
    chainer.global_config.dtype = chainer.mixed16
    x, t = dataset(24)
    jobs = [Job(comm, CALM, stages, optimizer=momentum(),
                data=(x.astype('f2'), t), batch=12) for stages in (4, 2)]
    first_job, second = jobs
    first_job.updated(STOP).optimizer.hyperparam.lr = numpy.float64(0.02)
    for name, parameter in first_job.model.namedparams():
        if name == '/4/W':
            parameter.update_rule.hyperparam.lr = 0.5
    save(first_job.trainer(tmp_path, 1), first_job.grid, tmp_path)
    before = {}
    for part in comm.allgather(state(first_job)):
        before.update(part)
    assert b'0.5' in before['job/optimizer/main/4/W/hyperparam']
    with told(comm):
        resume(second.trainer(tmp_path, 9), second.grid, str(tmp_path))
    after = state(second)
    assert after == {key: before[key] for key in after}
    assert second.optimizer._loss_scale == first_job.optimizer._loss_scale > 8
    assert set().union(*comm.allgather(set(after))) == set(before)


# --- iterators over a share of the data --------------------------------------

def data(samples):
    return numpy.random.RandomState(7).rand(samples, 3).astype('f')


def reading(comm, out, iterator):
    """A trainer that only reads."""
    model = chainer.Sequential(L.Linear(3, 3, initialW=1.0))
    updater = chainer.training.StandardUpdater(
        iterator, chainer.optimizers.SGD().setup(model),
        loss_func=lambda x: F.sum(model(x)))
    return Trainer(updater, (STOP, 'iteration'), str(out))


def read(comm, out, iterator):
    trainer = reading(comm, out, iterator)
    trainer.run()
    save(trainer, comm, out)


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize(('before', 'after'), [(4, 2), (2, 4), (2, 1)])
@on_ranks(4)
def test_an_iterator_goes_on_at_the_same_share_of_its_epoch(
        comm, before, after, shuffle, tmp_path):
    """Each rank reads every sample of its new share once in an epoch."""
    def scattered(ranks):
        numpy.random.seed(ranks.rank)
        return chainer.iterators.SerialIterator(
            data(96 // ranks.size), 4, shuffle=shuffle)
    if ranks := first(comm, before):
        read(ranks, tmp_path, scattered(ranks))
    comm.Barrier()
    if not (ranks := first(comm, after)):
        return
    iterator = scattered(ranks)
    drawn = iterator._state.order.copy() if shuffle else numpy.arange(
        96 // after)
    with told(ranks):
        resume(reading(ranks, tmp_path, iterator), ranks, str(tmp_path))
    assert iterator.epoch_detail == pytest.approx(STOP * 4 / (96 // before))
    assert iterator.previous_epoch_detail < iterator.epoch_detail
    place, size = iterator.current_position, 96 // after
    rest = numpy.concatenate([iterator.next() for _ in range(
        (size - place) // 4)])
    assert (rest == data(size)[drawn][place:place + len(rest)]).all()


@pytest.mark.parametrize(('before', 'after'), [(4, 2), (2, 4)])
@on_ranks(4)
def test_an_order_and_random_numbers_go_on_where_they_were(
        comm, before, after, tmp_path):
    """New ranks keep their own."""
    def whole(seed):
        numpy.random.seed(seed)
        return chainer.iterators.SerialIterator(data(24), 4)
    order, generator = None, None
    if ranks := first(comm, before):
        iterator = whole(ranks.rank)
        order = iterator._state.order.copy()
        read(ranks, tmp_path, iterator)
        generator = numpy.random.get_state()[1].tolist()
    comm.Barrier()
    if ranks := first(comm, after):
        iterator = whole(100 + ranks.rank)
        drawn = iterator._state.order.copy()
        trainer = reading(ranks, tmp_path, iterator)
        now = numpy.random.get_state()[1].tolist()
        with told(ranks):
            resume(trainer, ranks, str(tmp_path))
        assert (iterator._state.order == (
            drawn if order is None else order)).all()
        assert iterator.current_position == STOP * 4
        assert numpy.random.get_state()[1].tolist() == (generator or now)


# --- bad input ---------------------------------------------------------------

class Remembering(chainer.Chain):
    """Has a number, and a state as long as its last batch, as L.LSTM."""

    h, factor = None, 1.0

    def __init__(self):
        super().__init__(layer=L.Linear(3, 3))

    def reset_state(self):
        self.h = None

    def forward(self, x):
        y = self.layer(x) * self.factor
        if self.h is not None:
            y += self.h
        self.h = chainer.Variable(y.array)
        self.factor /= 2
        return y


@on_ranks(2)
def test_a_state_of_a_batch_is_left_and_numbers_go_on(comm, tmp_path):
    alone = comm.Split(comm.rank)
    for ranks, batch in (comm, 2), (alone, 4):
        model = Remembering()
        trainer = Trainer(chainer.training.StandardUpdater(
            chainer.iterators.SerialIterator(data(8), batch),
            chainer.optimizers.SGD().setup(model),
            loss_func=lambda x, model=model: F.sum(model(x))),
            (3, 'iteration'), str(tmp_path))
        if ranks is comm:
            note_beginning(trainer)     # as Snapshot does
            trainer.run()
            save(trainer, comm, tmp_path)
    with pytest.warns(UserWarning, match='another layout'):
        assert resume(trainer, alone, str(tmp_path)) == 3
    assert (model.h, model.factor) == (None, 0.125)
    alone.Free()


@on_ranks(4)
def test_a_model_that_does_not_fit_is_named_on_all_ranks(comm, tmp_path):
    """And the trainer stays as it was."""
    go(comm, tmp_path, 4, STOP)
    for options, match in [
            ({'layers': 4}, 'main/8/.* is not in the snapshot'),
            ({'layers': 2}, 'all ranks: the snapshot has updater/model:main/'
             '7/., the model has not'),
            ({'width': 6}, r'main/0/\S is float32 \(9.*\) in the '
             r'snapshot but float32 \(6.*\) here')]:
        job = job_of(comm, 2, model=functools.partial(network, **options))
        before = arrays(job.model)
        with pytest.raises(ValueError, match=match) as raised:
            resume(job.trainer(tmp_path, LAST), job.grid, str(tmp_path))
        assert len(set(comm.allgather(str(raised.value)))) == 1
        assert job.updater.iteration == 0
        same_bits({key: value for key, value in arrays(job.model).items()
                   if value.dtype != object}, before)
