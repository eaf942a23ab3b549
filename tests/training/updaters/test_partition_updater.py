"""Training a partitioned model for some steps, as serial training goes."""
import copy
import itertools
import json
import warnings
from traceback import walk_tb
from unittest import mock

from chainer_fp8pipe import Dropout, create_communicator, deferred
from chainer_fp8pipe.chains import partitioned
from chainer_fp8pipe.links import dropout
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.pipeline.schedules import bounds
from chainer_fp8pipe.training.extensions import Snapshot, resume

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.training import StandardUpdater, Trainer
from mpi4py import MPI

from tests.ranks import on_ranks
from tests.training.trainers import first
from tests.training.updaters.partitions import (
    batch_of,
    close,
    give,
    gradients,
    make,
    observed,
    own,
    part,
    plan_of,
    reporting,
    running,
    serially,
    updater_of,
    values,
)


class Tied(chainer.Chain):
    """Its output layer is its embedding; normalised in the middle."""

    def __init__(self, words=11, units=6):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(words, units)
            self.body = chainer.Sequential(
                L.Linear(units, units), F.tanh, L.BatchNormalization(units),
                L.Linear(units, units), F.tanh)
            self.bias = chainer.Parameter(0., (words,))

    def forward(self, x, t):
        y = F.linear(self.body(self.embed(x)), self.embed.W, self.bias)
        return F.softmax_cross_entropy(y, t)


def tied(seed=0):
    with deferred(seed):
        return reporting(Tied())


def words(seed, samples=8):
    random = numpy.random.RandomState(seed)
    return tuple(random.randint(0, 11, samples).astype('i')
                 for _ in range(2))


def clipping(model):
    """Adam, with gradients that are always longer than is allowed."""
    optimizer = chainer.optimizers.Adam(.01).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(.2))
    return optimizer


class Strided(chainer.Chain):
    """Reads its input and a transposed array as they lie in memory."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one, self.two = L.Linear(4, 6), L.Linear(3, 1)

    def forward(self, x):
        h = self.one(F.as_strided(x, (len(x), 4), (3, 1), 0))
        h = F.as_strided(F.transpose(h), (len(x), 3), (6, 2), 0)
        return F.sum(F.tanh(self.two(h)))


@pytest.mark.parametrize(('calls_later', 'crosses'), [
    (1, 'LinearFunction'), (2, 'Transpose')])
@on_ranks(2)
def test_memory_is_read_as_in_one_process_wherever_the_cut_is(
        comm, calls_later, crosses):
    batch = numpy.random.RandomState(0).randn(8, 4).astype('f'),
    with deferred(0):
        plain, model = reporting(Strided()), reporting(Strided())
    plan = plan_of([['/one/W', '/one/b'], ['/two/W', '/two/b']], '/one/W',
                   later=calls_later)
    updater = updater_of(comm, model, [batch], cut={'plan': plan})
    (name, _), = model.partition.crossing[0]
    assert name == crosses
    give(plain, values(comm, model))
    found = observed(model, updater.update)
    # Micro-batches of their own, as a converter makes them.
    total = 0.
    plain.cleargrads()
    for start in (0, 4):
        loss = plain(batch[0][start:start + 4].copy()) / 2
        loss.backward()
        total += float(loss.array)
    assert found['total'] == pytest.approx(total, rel=1e-6)
    close(gradients(comm, model), own(plain))


class Scaled(chainer.Chain):
    """A mean over what is computed of repeated numbers."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3, stride=2, nobias=True)
            self.gain = chainer.Parameter(
                numpy.linspace(.3, 1.7, 8, dtype='f'))

    def forward(self, x):
        h = self.conv(x)
        gain = F.broadcast_to(F.reshape(self.gain, (1, 8, 1, 1)), h.shape)
        return F.sum(F.mean(h * gain, axis=(2, 3)) ** 3)


@pytest.mark.parametrize('calls_later', range(5))
@on_ranks(2)
def test_repeated_numbers_cross_without_another_rounding(comm, calls_later):
    """Where they lie in memory settles the order of sums over the product."""
    batch = numpy.random.RandomState(0).randn(8, 3, 16, 16).astype('f'),
    with deferred(0):
        plain, model = reporting(Scaled()), reporting(Scaled())
    plan = plan_of([['/conv/W'], ['/gain']], '/gain', later=calls_later)
    updater = updater_of(comm, model, [batch], cut={'plan': plan})
    give(plain, values(comm, model))
    found = observed(model, updater.update)
    halves = [batch[0][start:start + 4].copy() for start in (0, 4)]
    assert found['total'] == sum(
        float((plain(half) / 2).array) for half in halves)


class Moving(chainer.Chain):
    """A link of it moves on with every forward pass."""

    def __init__(self, moving):
        super().__init__()
        with self.init_scope():
            self.one = L.Linear(4, 6)
            self.norm = (L.BatchRenormalization(6) if moving == 'norm'
                         else L.LayerNormalization(6))
            self.two, self.three = L.Linear(6, 6), L.Linear(6, 1)
        if moving == 'two':
            self.two.add_hook(chainer.link_hooks.SpectralNormalization())

    def forward(self, x):
        h = F.tanh(self.norm(self.one(x)))
        return F.sum(self.three(F.tanh(self.two(h))))


@pytest.mark.parametrize('moving', ['norm', 'two'])
@on_ranks(2)
def test_all_stages_recompute_but_those_that_move_on(comm, moving):
    batch = numpy.random.RandomState(0).randn(8, 4).astype('f'),
    numpy.random.seed(0)
    model = Moving(moving)
    plain = copy.deepcopy(model)
    updater = updater_of(comm, model, [batch], cut={'recompute': True})
    plan = model.plan.as_dict()
    assert list(plan['recompute']) == [
        not any(name.startswith(f'/{moving}/') for name in names)
        for names in model.partition.used.values()]
    assert any(plan['recompute'])
    other = updater_of(comm, plain, [batch], cut={
        'plan': {**plan, 'recompute': [False, False]}})
    for _ in range(2):
        updater.update()
        other.update()
        close(gradients(comm, model), gradients(comm, plain), 0)
    expected = running(comm, plain)
    for key, value in running(comm, model).items():
        numpy.testing.assert_array_equal(value, expected[key], key)


@on_ranks(2, 3)
def test_copies_of_a_tied_parameter_stay_the_same(comm):
    """With Adam and clipping, whose norm counts them once."""
    # Of 2 samples in a micro-batch the normalisation leaves gradients below
    # it that nearly cancel: against float64, W's are wrong by up to 3e-4,
    # and the bias's by 6e-3, in serial training as well.
    batches = [words(seed, 16) for seed in range(4)]
    model, plain = tied(), tied()
    updater = updater_of(comm, model, batches, micro_batches=4,
                         optimizer=chainer.optimizers.Adam(.01))
    assert model.partition.ties == {'/embed/W': (0, comm.size - 1)}
    updater.get_optimizer('main').add_hook(
        chainer.optimizer_hooks.GradientClipping(.2))
    optimizer = clipping(plain)
    for batch in batches:
        give(plain, values(comm, model))    # compares copies bit for bit
        updater.update()
        serially(plain, batch, 4)
        optimizer.update()
        close(gradients(comm, model), own(plain), 1e-5)
        for name, value in values(comm, model).items():
            numpy.testing.assert_allclose(
                value, own(plain, 'array')[name], atol=1e-4, err_msg=name)
    assert 'is on stages 0 and' in str(model)


@on_ranks(2)
def test_running_averages_are_those_of_the_whole_batch(comm):
    """Not of one micro-batch after the other."""
    batch = words(0, 12)
    model, plain = tied(), tied()
    updater = updater_of(comm, model, [batch], micro_batches=3)
    inputs = []

    class Noting(chainer.LinkHook):
        def forward_preprocess(self, args):
            if isinstance(args.link, L.BatchNormalization):
                inputs.append(args.args[0].array)
    give(plain, values(comm, model))
    with Noting():
        serially(plain, batch, 3)
    updater.update()
    whole = numpy.concatenate(inputs).astype('d')
    found = {key: value for (_, key), value
             in running(comm, model).items()}
    numpy.testing.assert_allclose(
        found['avg_mean'], .1 * whole.mean(axis=0), 1e-5, 1e-7)
    numpy.testing.assert_allclose(
        found['avg_var'], .9 + .1 * whole.var(axis=0, ddof=1), 1e-5)


def replicated(comm, name, steps, batches):
    """2 stages x 2 replicas; losses and values after some steps."""
    grid = ProcessGrid(comm, 2)
    options = {'warmup': 0, 'period': 1} if name == 'fp8' else {}
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(.01),
        create_communicator(name, grid.data, **options))
    model = tied()
    updater = updater_of(grid, model, [
        part(batch, grid.replica_index * 4, grid.replica_index * 4 + 4)
        for batch in batches], optimizer=optimizer)
    losses = [observed(model, updater.update)['total']
              for _ in range(steps)]
    found = values(comm, model)     # the same on all replicas, all holders
    grid.free()
    return losses, found


@on_ranks(4)
def test_replicas_of_a_pipeline_learn_as_one(comm):
    batches = [words(seed) for seed in range(4)]
    losses, found = replicated(comm, 'float32', 8, batches)
    plain = tied()
    optimizer = chainer.optimizers.Adam(.01).setup(plain)
    expected = []
    for step in range(8):
        expected.append(serially(plain, batches[step % 4], 4))
        optimizer.update()
    numpy.testing.assert_allclose(losses, expected, 1e-5)
    close(found, own(plain, 'array'), 1e-3)
    compressed, other = replicated(comm, 'fp8', 8, batches)
    assert compressed[0] == losses[0]
    numpy.testing.assert_allclose(compressed, losses, .05)
    assert any(numpy.any(other[name] != found[name]) for name in found)


@on_ranks(2)
def test_a_loss_scale_changes_nothing(comm):
    found = []
    for scale in (None, 1024):
        optimizer = chainer.optimizers.SGD(.1)
        model = tied()
        updater = updater_of(comm, model, [words(0)], optimizer=optimizer)
        if scale:
            optimizer.set_loss_scale(scale)
        losses = [observed(model, updater.update)['total']
                  for _ in range(3)]
        found.append((losses, values(comm, model)))
    numpy.testing.assert_allclose(found[0][0], found[1][0], 1e-6)
    close(found[1][1], found[0][1], 1e-5)


class Overflowing(chainer.Chain):
    """Large inputs make the gradient of its first layer overflow, only."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one, self.two = L.Linear(8, 4), L.Linear(4, 1)

    def forward(self, x):
        return F.mean(self.two(F.sin(self.one(x))))


@on_ranks(2)
def test_one_stages_overflow_makes_all_stages_skip_the_update(comm):
    x = numpy.random.RandomState(0).randn(8, 8).astype('f')
    numpy.random.seed(0)
    model, optimizer = Overflowing(), chainer.optimizers.SGD(.1)
    updater = updater_of(
        comm, model, [(x,)], optimizer=optimizer, cut={'plan': plan_of(
            [['/one/W', '/one/b'], ['/two/W', '/two/b']], '/two/W')})
    optimizer.loss_scaling()
    optimizer._loss_scale = 2.0 ** 14
    initial = values(comm, model)
    updater.update()
    scale, before = optimizer._loss_scale, values(comm, model)
    assert scale > 2 ** 14
    assert all(numpy.any(before[name] != initial[name]) for name in before)
    x[0] = 1e37
    with numpy.errstate(all='ignore'), warnings.catch_warnings():
        warnings.simplefilter('ignore')     # Chainer's, of what is skipped
        updater.update()
    assert optimizer._loss_scale == scale / 2
    for name, array in values(comm, model).items():
        numpy.testing.assert_array_equal(array, before[name], name)


# --- state between batches ---------------------------------------------------

@on_ranks(2)
def test_truncated_backpropagation_is_that_of_plain_chainer(comm):
    """State of one batch is where the next one begins, until it is reset."""
    batches = [batch_of('stateful_lm', seed) for seed in range(5)]
    model, plain = make('stateful_lm'), make('stateful_lm')
    updater = updater_of(comm, model, batches, micro_batches=1)
    give(plain, values(comm, model))
    optimizer = chainer.optimizers.SGD(.1).setup(plain)
    for step, batch in enumerate(batches):
        if step == 3:
            for one in (model, plain):
                one.reset_state()
        found = observed(model, updater.update)
        assert found['total'] == pytest.approx(
            serially(plain, batch, 1), rel=1e-6)
        close(gradients(comm, model), own(plain), 2e-5)
        optimizer.update()
        if step == 1:           # evaluation has a state of its own
            first, second = (observed(model, lambda: updater.evaluate(
                *batches[4]))['total'] for _ in range(2))
            assert first != second
    close(values(comm, model), own(plain, 'array'), 1e-5)


@on_ranks(2)
def test_each_micro_batch_goes_on_from_its_own_state(comm):
    """As with one plain model per micro-batch that share their values."""
    batches = [batch_of('stateful_lm', seed) for seed in range(3)]
    model = make('stateful_lm')
    updater = updater_of(comm, model, batches, micro_batches=2)
    plain = [make('stateful_lm') for _ in range(2)]
    for batch in batches:
        now = values(comm, model)
        losses = []
        for (start, end), one in zip(bounds(8, 2), plain, strict=True):
            give(one, now)
            losses.append(float(one(*part(batch, start, end)).array))
        assert observed(model, updater.update)['total'] == pytest.approx(
            numpy.mean(losses), rel=1e-6)


# --- snapshots ---------------------------------------------------------------

def plain_net(seed=0):
    """Without batch normalisation, which knows micro-batches."""
    with deferred(seed):
        return reporting(L.Classifier(chainer.Sequential(
            L.EmbedID(11, 6), L.Linear(6, 6), F.tanh, L.Linear(6, 11))))


def noting_losses(trainer):
    """A list that the run fills."""
    losses = []
    trainer.extend(lambda trainer: losses.append(
        float(getattr(trainer.observation['main/total'], 'array',
                      trainer.observation['main/total']))),
        name='losses', trigger=(1, 'iteration'))
    return losses


def trained(comm, out, until, resumed=None, make_model=tied, **cut):
    """Trains for some iterations in all; snapshots are taken at the third.

    Args:
        comm: The ranks; None: this one takes no part.
        resumed: None: from the beginning; else whether exactly.
        make_model: Makes the model, with a seed.
        cut: Options of ``partition``.
    """
    if comm is None:
        return None, None, None
    grid = ProcessGrid(comm, comm.size)
    data = chainer.datasets.TupleDataset(*words(3, 24))
    model = make_model(5)
    optimizer = chainer.optimizers.Adam(.01)
    updater = updater_of(grid, model, [words(3, 8)], optimizer=optimizer,
                         micro_batches=4, cut=cut)
    if grid.stage_index == 0:
        updater._iterators['main'] = chainer.iterators.SerialIterator(
            data, 8, shuffle=False)
        updater.converter = chainer.dataset.concat_examples
    trainer = Trainer(updater, (until, 'iteration'), str(out))
    losses = noting_losses(trainer)
    trainer.extend(Snapshot(grid), trigger=(3, 'iteration'))
    if resumed is not None:
        with warnings.catch_warnings():
            warnings.simplefilter('error' if resumed else 'ignore')
            assert resume(trainer, grid, str(out)) == 3
    trainer.run()
    found = values(comm, model), running(comm, model)
    grid.free()
    return losses, found, model.plan


@on_ranks(2)
def test_a_run_goes_on_with_the_same_bits_by_the_same_plan(comm, tmp_path):
    losses, expected, plan = trained(comm, tmp_path / 'whole', 6)
    trained(comm, tmp_path, 3, plan=plan)
    again, found, _ = trained(comm, tmp_path, 6, resumed=True, plan=plan)
    assert again == losses[3:]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            numpy.testing.assert_array_equal(value, other[key], key)


@on_ranks(3)
def test_a_run_goes_on_from_a_snapshot_on_more_ranks(comm, tmp_path):
    few = first(comm, 2)
    losses, expected, _ = trained(few, tmp_path / 'whole', 6)
    trained(few, tmp_path, 3)
    comm.Barrier()
    again, found, _ = trained(comm, tmp_path, 6, resumed=False)
    if few is not None:
        numpy.testing.assert_allclose(again, losses[3:], 1e-5)
        for one, other in zip(found, expected, strict=True):
            for key, value in one.items():
                numpy.testing.assert_allclose(value, other[key], 1e-3, 1e-5,
                                              err_msg=str(key))


@on_ranks(2)
def test_a_run_goes_on_in_one_process_with_plain_chainer(comm, tmp_path):
    losses, (expected, _), _ = trained(comm, tmp_path / 'whole', 6,
                                       make_model=plain_net)
    trained(comm, tmp_path, 3, make_model=plain_net)
    if comm.rank:
        return
    data = chainer.datasets.TupleDataset(*words(3, 24))
    model = plain_net()
    updater = StandardUpdater(
        chainer.iterators.SerialIterator(data, 8, shuffle=False),
        chainer.optimizers.Adam(.01).setup(model))
    trainer = Trainer(updater, (6, 'iteration'), str(tmp_path))
    again = noting_losses(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')     # of another number of ranks
        assert resume(trainer, MPI.COMM_SELF, str(tmp_path)) == 3
    trainer.run()
    numpy.testing.assert_allclose(again, losses[3:], 1e-5)
    close(own(model, 'array'), expected, 1e-5)


@on_ranks(2)
def test_plain_chainer_reads_what_a_partition_wrote(comm, tmp_path):
    _, (expected, statistics), _ = trained(comm, tmp_path, 3)
    plain = Tied()
    chainer.serializers.load_npz(
        str(tmp_path / 'snapshot_iter_3.npz'), plain,
        path='all/trainer/updater/model:main/')
    close(own(plain, 'array'), expected, 0)
    links = dict(plain.namedlinks())
    for (path, key), value in statistics.items():
        numpy.testing.assert_array_equal(vars(links[path])[key], value)


@on_ranks(2)
def test_a_partition_reads_what_plain_chainer_wrote(comm, tmp_path):
    plain = tied(9)
    serially(plain, words(1), 1)        # its running averages have moved
    if comm.rank == 0:
        chainer.serializers.save_npz(tmp_path / 'plain.npz', plain)
    comm.Barrier()
    model = tied(1)
    updater_of(comm, model, [words(0)])
    chainer.serializers.load_npz(tmp_path / 'plain.npz', model)
    close(values(comm, model), own(plain, 'array'), 0)
    links = dict(plain.namedlinks())
    for (path, key), value in running(comm, model).items():
        numpy.testing.assert_array_equal(vars(links[path])[key], value)


# --- plans -------------------------------------------------------------------

@on_ranks(2)
def test_a_saved_plan_is_followed_and_can_be_edited(comm, tmp_path):
    model = tied()
    updater_of(comm, model, [words(0)])
    path = str(tmp_path / 'plan.json')
    if comm.rank == 0:
        model.plan.save(path)
        with open(path) as file:
            data = json.load(file)
        data['cuts'] = [{'before': '/body/1/W', 'calls_later': 0}]
        data['recompute'] = [True, False]
        with open(path, 'w') as file:
            json.dump(data, file)
    other = tied()
    # Only the first rank reads it.
    updater = updater_of(comm, other, [words(0)], cut={
        'plan': path if comm.rank == 0 else None})
    mine = {name for name, _ in other.namedparams()}
    assert ('/body/0/W' in mine) == (comm.rank == 0)
    assert ('/body/1/W' in mine) == ('/bias' in mine) == (comm.rank == 1)
    assert '/embed/W' in mine
    assert other.plan.recompute == (True, False)
    plain = tied()
    give(plain, values(comm, other))
    assert observed(other, updater.update)['total'] == serially(
        plain, words(0), 2)
    close(gradients(comm, other), own(plain))


class Iterating(chainer.Chain):
    """Goes through a variable, which ends with an error; catches another."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1, self.l2 = L.Linear(4, 5), L.Linear(5, 1)

    def forward(self, x):
        h = self.l1(x)
        try:
            h = h[len(h)]
        except IndexError:
            h = F.stack([*F.tanh(h)])
        return F.mean(self.l2(h))


def vectors(samples):
    return numpy.ones((samples, 4), 'f'),


@on_ranks(3)
def test_errors_that_a_model_catches_keep_no_batches(comm):
    """The third rank has no micro-batch to rehearse."""
    model = Iterating()
    updater = updater_of(comm, model, [vectors(8)])
    updater.update()
    errors = [call.error for programs in model.partition._programs.values()
              for program in programs for call in program.trace.calls
              if call.error]
    depths = []
    for _ in range(3):
        updater.update()
        depths.append([len(list(walk_tb(error.__traceback__)))
                       for error in errors])
    assert errors
    assert depths == depths[:1] * 3


@on_ranks(2)
def test_the_traces_that_are_used_are_kept(comm):
    model = Iterating()
    updater = updater_of(comm, model, [
        vectors(samples) for samples in (4, 6, 4, 8, 4)])
    part, traced = model.partition, []
    original = part.traced

    def trace(mode, form):
        traced.append(updater.iteration)
        return original(mode, form)
    part.traced = trace
    before, partitioned._FORMS = partitioned._FORMS, 2
    try:
        for _ in range(5):
            updater.update()
    finally:
        partitioned._FORMS = before
    assert traced == [0, 1, 3]


class Dropping(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(
                *(L.Linear(4, 4) for _ in range(4)))
            self.dropout = Dropout(.5)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(F.tanh(layer(x)))
        return F.sum(x)


@on_ranks(2)
def test_a_mask_is_made_where_it_is_needed_only(comm):
    made = []

    def mask(place, draw, *arguments):
        made.append((place.first_sample, draw))
        return original(place, draw, *arguments)
    updater = updater_of(comm, Dropping(), [vectors(8)])
    updater.update()
    original = dropout._mask
    with mock.patch.object(dropout, '_mask', mask):
        updater.update()
    everyone = comm.allreduce(made)
    assert sorted(everyone) == sorted(itertools.product((0, 4), range(1, 5)))


@on_ranks(2)
def test_a_limit_that_is_no_limit_brings_no_recomputation(comm):
    model = tied()
    updater_of(comm, model, [words(0)], cut={'memory': '1 GiB'})
    assert model.plan.recompute == (False, False)
    assert max(model.plan.predicted.memory) < 2 ** 30
    assert 'stage' in str(model)


@on_ranks(2)
def test_a_rank_holds_its_own_part_only(comm):
    with deferred():
        model = chainer.Sequential(
            *(L.Linear(50, 50) for _ in range(6)), F.sum)
    updater_of(comm, model, [(numpy.ones((4, 50), 'f'),)], cut={
        'optimizer_arrays': 0})
    mine = sum(parameter.array.nbytes for parameter in model.params())
    assert sum(comm.allgather(mine)) == 6 * 50 * 51 * 4
    assert 0 < mine < 6 * 50 * 51 * 4


@pytest.mark.parametrize(('recompute', 'calls'), [
    (None, 2), ('no stage', 1), (False, 1), (True, 2)])
@on_ranks(1, 2)
def test_what_is_recomputed_is_what_is_said(comm, recompute, calls):
    """The plan says that every stage is."""
    done = []

    class Counted(chainer.FunctionNode):
        def forward(self, inputs):
            done.append(0)
            return inputs[0] * 1,

        def backward(self, indexes, gradients):
            return gradients

    model = chainer.Sequential(
        L.Linear(4, 4), lambda h: F.sum(Counted().apply((h,))[0]))
    x = numpy.ones((4, 4), 'f')
    options = {} if recompute is None else {'recompute': recompute}
    updater = updater_of(comm, model, [(x,)], cut={'recompute': True},
                         **options)
    done.clear()
    updater.update()
    assert comm.allreduce(len(done)) == 2 * calls       # micro-batches
