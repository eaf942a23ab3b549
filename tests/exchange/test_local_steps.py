"""Local steps give what ranks give that are simulated one after the other."""
from unittest import mock

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.codecs import BlockScaled
from chainer_fp8pipe.communicators.options import make_options
from chainer_fp8pipe.exchange.drift import ReplicaDrift
from chainer_fp8pipe.exchange.local_steps import LocalExchange
from chainer_fp8pipe.exchange.model_exchange import NonfiniteMean
from chainer_fp8pipe.training.extensions import MovingAverage, Snapshot
from chainer_fp8pipe.training.snapshots.snapshot import resume

import chainer
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer import optimizer_hooks, optimizers
from chainer.training.extensions import Evaluator
from chainer.training.trigger import get_trigger

from tests.ranks import on_ranks
from tests.training import trainers

from ..communicators.networks import Convolutions, Plain, Shared, Unused
from .jobs import OneModel, values, wrapped


class Halves(Plain):
    """In float16, updated in float32."""

    def __init__(self):
        with chainer.using_config('dtype', numpy.float16):
            super().__init__()

    def loss(self, step, rank=0):
        with chainer.using_config('dtype', numpy.float16):
            x = numpy.random.default_rng((step, rank)).normal(
                0, 1, self.shape).astype('f2')
            return chainer.functions.sum(self(x) ** 2) / 10


class Scaled(Halves):
    """With a parameter that has no dimension."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.s = chainer.Parameter(numpy.ones((), 'f2'))

    def forward(self, x):
        y = super().forward(x)
        return y * chainer.functions.broadcast_to(self.s, y.shape)


class Copies(Plain):
    """Two layers whose parameters share memory."""

    def __init__(self):
        super().__init__()
        del self.l9
        with self.init_scope():
            self.l9 = self.l3.copy('share')


def sgd():
    return optimizers.SGD(0.02)


def halves():
    made = optimizers.MomentumSGD(0.02)
    made.use_fp32_update()
    return made


def clipped(optimizer):
    optimizer.add_hook(optimizer_hooks.GradientClipping(0.5))


def decayed(optimizer):
    optimizer.add_hook(optimizer_hooks.WeightDecay(0.1))


def frozen(optimizer):
    optimizer.target.l2.disable_update()


def scaled(optimizer):
    optimizer.set_loss_scale(64)


def scaled_dynamically(optimizer):
    optimizer.loss_scaling(interval=2)


def as_made(optimizer):
    """Nothing is changed."""


CASES = {
    'sgd': (Plain, sgd, as_made),
    'momentum, clipped': (
        Plain, lambda: optimizers.MomentumSGD(0.02), clipped),
    'adam, decayed': (Plain, lambda: optimizers.Adam(0.01), decayed),
    'lars': (Plain, sgd, lambda optimizer: optimizer.add_hook(
        optimizer_hooks.GradientLARS())),
    'frozen': (Plain, sgd, frozen),
    'loss scale': (Plain, sgd, scaled),
    'dynamic loss scale': (Plain, sgd, scaled_dynamically),
    'tied': (Shared, lambda: optimizers.MomentumSGD(0.02), as_made),
    'shared memory': (Copies, sgd, as_made),
    'unused': (Unused, lambda: optimizers.Adam(0.01), as_made),
    'statistics': (Convolutions, sgd, as_made),
    'float16': (Scaled, sgd, as_made),
    'float16 in float32': (Halves, halves, as_made)}


def master(parameter):
    copy = parameter.update_rule._fp32_param
    return parameter if copy is None else copy


def statistics(model):
    return [getattr(link, name) for link in (
        [model.bn1, model.bn2] if hasattr(model, 'bn1') else [])
        for name in ('avg_mean', 'avg_var')]


class Simulation:
    """All ranks, one after the other, with plain Chainer."""

    def __init__(self, ranks, case, steps, sync):
        network, make, prepare = CASES[case]
        self.optimizers = []
        for _ in range(ranks):
            numpy.random.seed(1)
            made = make()
            made.setup(network())
            prepare(made)
            self.optimizers.append(made)
        self.steps, self.sync, self.updates = steps, sync, 0
        self.models = [one.target for one in self.optimizers]
        for rank, model in enumerate(self.models):
            model.loss(0, rank)     # as before the broadcast
        self.anchors = self._values()[0]

    def update(self, step):
        for rank, optimizer in enumerate(self.optimizers):
            model = optimizer.target
            loss = model.loss(step, rank)
            model.cleargrads()
            loss.backward(loss_scale=optimizer._loss_scale)
        if self.updates < self.sync:
            for everyone in zip(*map(self._parameters, self.models),
                                strict=True):
                found = [one.grad for one in everyone]
                if found[0] is not None:
                    mean = numpy.mean([one.astype('f4') for one in found], 0)
                    for one in everyone:
                        one.grad = numpy.array(mean, one.dtype)
        for optimizer in self.optimizers:
            optimizer.update()
        self.updates += 1
        local = self.updates - self.sync
        if local <= 0:
            self.anchors = self._values()[0]
        elif local % self.steps == 0:
            self.exchange()

    def exchange(self):
        means = [anchor + numpy.mean([one - anchor for one in everyone], 0)
                 for anchor, *everyone in zip(
                     self.anchors, *self._values(), strict=True)]
        for model in self.models:
            for parameter, mean in zip(self._parameters(model), means,
                                       strict=True):
                master(parameter).array[...] = mean
                parameter.array[...] = master(parameter).array
        self.anchors = self._values()[0]
        for arrays in zip(*map(statistics, self.models), strict=True):
            mean = numpy.mean(arrays, 0)
            for array in arrays:
                array[...] = mean

    def _values(self):
        return [[master(one).array.astype('f4')
                 for one in self._parameters(model)]
                for model in self.models]

    @staticmethod
    def _parameters(model):
        return [one for _, one in sorted(model.namedparams())]


class Training:
    """The same by a communicator."""

    def __init__(self, comm, case='sgd', name='float32', **options):
        network, make, prepare = CASES[case]
        self.rank = comm.rank
        self.communicator = create_communicator(name, comm, **{
            'sync_steps': 0, 'bucket_bytes': 300, **options})
        numpy.random.seed(1)
        self.model = network()
        self.optimizer = wrapped(make(), self.communicator)
        self.optimizer.setup(self.model)
        prepare(self.optimizer.actual_optimizer)
        self.update(0)      # only broadcasts

    def update(self, *steps):
        for step in steps:
            self.optimizer.update(lambda step=step: self.model.loss(
                step, self.rank))


@on_ranks(2)
@pytest.mark.parametrize('case', CASES)
def test_updates_are_those_of_simulated_ranks_to_the_bit(comm, case):
    # The sum of two numbers is the same in any order.
    training = Training(comm, case, local_steps=3, sync_steps=2)
    expected = Simulation(comm.size, case, 3, 2)
    for step in range(1, 13):
        training.update(step)
        expected.update(step)
        assert trainers.bits(training.model) == trainers.bits(
            expected.models[comm.rank]), step
    training.communicator.synchronize(training.model)
    expected.exchange()
    assert trainers.bits(training.model) == trainers.bits(
        expected.models[comm.rank])


@on_ranks(3)
@pytest.mark.parametrize(('name', 'options', 'error'), [
    ('float32', {}, 1e-6), ('float32', {'algorithm': 'ring'}, 1e-6),
    ('float16', {'algorithm': 'mpi_op'}, 1e-3),
    ('fp8', {'warmup': 0}, 0.01), ('int4', {'warmup': 7}, 0.02)])
def test_changes_travel_by_every_codec_and_algorithm(
        comm, name, options, error):
    training = Training(comm, 'sgd', name, local_steps=2, sync_steps=1,
                        **options)
    expected = Simulation(comm.size, 'sgd', 2, 1)
    for step in range(1, 14):
        training.update(step)
        expected.update(step)
    assert len(set(comm.allgather(values(training.model)))) == 1
    for name, parameter in training.model.namedparams():
        numpy.testing.assert_allclose(
            parameter.array, dict(expected.models[0].namedparams())[
                name].array, rtol=0, atol=error)


@on_ranks(2)
def test_nothing_travels_between_two_exchanges(comm):
    training = Training(comm, local_steps=3, check_every=1)
    sent = []
    for step in range(7):
        before = training.communicator.events.bytes_sent
        training.update(step)
        sent.append(training.communicator.events.bytes_sent > before)
    assert sent == [False, False, True, False, False, True, False]
    assert training.communicator.events.updates == 7


@on_ranks(2)
def test_a_broadcast_begins_a_new_period(comm):
    training = Training(comm, local_steps=3)
    training.update(1, 2)
    training.communicator.bcast_data(training.model)
    alike = []
    for step in range(3):
        training.update(step)
        alike.append(len(set(comm.allgather(values(training.model)))) == 1)
    assert alike == [False, False, True]


# --- the length of a period --------------------------------------------------

@pytest.mark.parametrize(('given', 'rate', 'steps'), [
    ({'local_steps': 5}, 0.1, 5),
    # (0.3 / 0.1)^2, of the rule's paper.
    ({'local_steps': 'qsr', 'qsr_alpha': 0.3}, 0.1, 9),
    ({'local_steps': 'qsr', 'qsr_alpha': 0.31}, 0.1, 9),
    ({'local_steps': 'qsr', 'qsr_alpha': 0.3}, 1.0, 4),
    ({'local_steps': 'qsr', 'qsr_alpha': 0.3, 'qsr_min': 2}, 1.0, 2),
    ({'local_steps': 'qsr', 'qsr_alpha': 0.3}, 1e-3, 256),
    ({'local_steps': 'qsr', 'qsr_alpha': 0.3, 'qsr_max': 99}, 0.0, 99)])
@pytest.mark.parametrize('kind', [optimizers.SGD, optimizers.Adam])
def test_a_period_has_the_updates_of_the_rule(kind, given, rate, steps):
    model = Plain()
    optimizer = kind(rate).setup(model)
    reducer = OneModel(make_options('int4', {'sync_steps': 0, **given}),
                       BlockScaled())
    local = LocalExchange(lambda: model, reducer)
    local._begin(model)
    with mock.patch.object(local, 'end_period') as ended:
        for _ in range(steps):
            ended.assert_not_called()
            local.mean(model, zero_fill=False)
            local.updated(optimizer)
            # The rate at the beginning of the period counts.
            optimizer.hyperparam.lr = optimizer.hyperparam.alpha = 7.0
    ended.assert_called_once_with(model)


# --- who looks at a model between two exchanges ------------------------------

@on_ranks(2)
@pytest.mark.parametrize('case', [
    'float16 in float32', 'shared memory', 'statistics'])
def test_evaluations_see_what_all_ranks_had_last_in_common(
        comm, tmp_path, case):
    training = Training(comm, case, local_steps=3)
    training.update(*range(3))
    common = values(training.model)
    means = [array.copy() for array in statistics(training.model)]
    training.update(3, 4)
    own = values(training.model)
    assert len(set(comm.allgather(own))) == comm.size
    seen = []
    evaluator = Evaluator(
        chainer.iterators.SerialIterator([0], 1, repeat=False),
        training.model, eval_func=lambda batch: seen.append(
            values(training.model)))
    if comm.rank == 0:      # nobody waits for the others
        evaluator()
        with chainer.Reporter():
            evaluator.evaluate()
        with training.communicator.common(), training.communicator.common():
            seen.append(values(training.model))
            numpy.testing.assert_equal(statistics(training.model), means)
        average = MovingAverage(training.model, 0.5)
        average()
        average.evaluator(evaluator)()
        with chainer.Reporter():
            evaluator.evaluate()
        assert [seen.pop(), seen.pop()] == [own, own]
        chainer.serializers.save_npz(tmp_path / 'model.npz', training.model)
        saved = CASES[case][0]()
        chainer.serializers.load_npz(tmp_path / 'model.npz', saved)
        assert [*seen, values(saved)] == [common] * 4
    assert values(training.model) == own
    training.update(5)
    assert len(set(comm.allgather(values(training.model)))) == 1


def trainer_of(comm, folder, iterations, optimizer=optimizers.Adam, **options):
    options = {'local_steps': 4, 'warmup': 2, **options}
    if options['local_steps'] != 1:
        options = {'sync_steps': 3, **options}
    trainer, communicator = trainers.make_trainer(
        comm, folder, name='int4', optimizer=optimizer(0.01), **options)
    trainer.stop_trigger = get_trigger((iterations, 'iteration'))
    trainer.extend(Snapshot(communicator), trigger=(3, 'iteration'))
    return trainer, communicator


def model_of(trainer):
    return trainer.updater.get_optimizer('main').target


@on_ranks(2)
def test_the_end_of_a_training_ends_the_period(comm, tmp_path):
    trainer, _ = trainer_of(comm, tmp_path, 10)
    own = []
    trainer.extend(lambda _: own.append(values(model_of(trainer))),
                   'own', trigger=(1, 'iteration'))
    trainer.run()
    assert len(set(comm.allgather(own[-1]))) == comm.size
    assert len(set(comm.allgather(values(model_of(trainer))))) == 1


# --- snapshots ---------------------------------------------------------------

@on_ranks(2)
@pytest.mark.parametrize(('optimizer', 'options'), [
    (optimizers.Adam, {}), (optimizers.MomentumSGD, {'sync_steps': 0}),
    (optimizers.Adam, {'local_steps': 'qsr', 'qsr_alpha': 0.02,
                       'qsr_min': 3})])
def test_a_run_goes_on_in_the_middle_of_a_period(
        comm, tmp_path, optimizer, options):
    def run(iterations, folder, snapshot=''):
        trainer, communicator = trainer_of(
            comm, f'{tmp_path}/{folder}', iterations, optimizer,
            **options)
        if snapshot:
            resume(trainer, communicator, f'{tmp_path}/{snapshot}')
        trainer.run()
        return trainers.weights(trainer)

    expected = run(14, 'whole')
    for iterations in 3, 6, 9, 12:
        name = f'whole/snapshot_iter_{iterations}.npz'
        found = run(14, f'after {iterations}', name)
        assert found == expected, iterations


@on_ranks(3)
def test_fewer_ranks_go_on_from_what_all_had_in_common(comm, tmp_path):
    trainer, communicator = trainer_of(comm, tmp_path, 6)
    seen = []
    trainer.extend(lambda _: seen.append(values(model_of(trainer))), 'seen',
                   trigger=(1, 'iteration'))
    trainer.run()
    part = trainers.first(comm, 2)
    if part is None:
        return
    fewer, other = trainer_of(part, f'{tmp_path}/fewer', 20)
    resume(fewer, other, f'{tmp_path}/snapshot_iter_6.npz')
    # The last synchronous update was the fourth, and gave the anchors.
    assert values(model_of(fewer)) == seen[3]
    fewer.run()
    assert len(set(part.allgather(values(model_of(fewer))))) == 1


@on_ranks(2)
def test_the_model_in_a_snapshot_is_what_all_ranks_had_in_common(
        comm, tmp_path):
    trainer, communicator = trainer_of(comm, tmp_path, 6)
    trainer.run()
    plain = L.Classifier(trainers.Net())
    chainer.serializers.load_npz(
        f'{tmp_path}/snapshot_iter_6.npz', plain,
        path='all/trainer/updater/model:main/')
    again, _ = trainer_of(comm, f'{tmp_path}/again', 4)
    again.run()
    for name, parameter in plain.namedparams():
        numpy.testing.assert_array_equal(
            parameter.array,
            dict(model_of(again).namedparams())[name].array, name)


@on_ranks(2)
@pytest.mark.parametrize('first', ['local', 'synchronous'])
def test_a_run_goes_on_with_or_without_local_steps(comm, tmp_path, first):
    given = {'local': {}, 'synchronous': {'local_steps': 1}}
    trainer, _ = trainer_of(comm, tmp_path, 6, **given[first])
    trainer.run()
    other = next(name for name in given if name != first)
    trainer, communicator = trainer_of(
        comm, f'{tmp_path}/other', 20, check_every=1, **given[other])
    resume(trainer, communicator, f'{tmp_path}/snapshot_iter_6.npz')
    trainer.run()
    assert len(set(comm.allgather(values(model_of(trainer))))) == 1


@on_ranks(2)
def test_a_run_does_not_go_back_to_synchronous_updates(comm, tmp_path):
    trainer, _ = trainer_of(comm, tmp_path, 6)
    trainer.run()
    trainer, communicator = trainer_of(comm, f'{tmp_path}/other', 20,
                                       sync_steps=9)
    with pytest.raises(ValueError, match='local_steps and sync_steps to cre'):
        resume(trainer, communicator, f'{tmp_path}/snapshot_iter_6.npz')


# --- what is refused, or found -----------------------------------------------

@on_ranks(2)
def test_replicas_that_differ_before_the_first_local_update_are_found(comm):
    training = Training(comm, local_steps=2)
    if comm.rank:
        training.model.l2.W.array[1, 1] += 1
    with pytest.raises(ReplicaDrift, match='the value of parameter /l2/W'):
        training.update(1)


@on_ranks(2)
def test_anchors_that_differ_are_found(comm):
    training = Training(comm, local_steps=2, check_every=4)
    training.update(*range(4))
    if comm.rank:
        training.communicator._reducer.known(
            training.model).anchors['/l2/W'][1, 1] += 1
    with pytest.raises(ReplicaDrift, match='8 updates: the value.*/l2/W'):
        training.update(*range(4, 8))


@on_ranks(2)
def test_a_change_that_is_not_finite_is_named_and_undone(comm):
    training = Training(comm, local_steps=3)
    training.update(*range(3))
    before = values(training.model)
    training.update(3)
    if comm.rank:
        training.model.l3.b.array[0] = numpy.nan
    with pytest.raises(NonfiniteMean, match=(
            r'the change of /l\d+/. is not finite in float32 on rank 1 .*\. '
            'The parameters are those of the last exchange')):
        training.update(4, 5)
    assert values(training.model) == before


@on_ranks(2)
def test_an_update_that_the_optimizer_does_not_make_is_an_error(comm):
    training = Training(comm, local_steps=3)
    training.update(1)
    training.communicator.multi_node_mean_grad(training.model)
    with pytest.raises(RuntimeError, match=r'update\(\) of a ch'):
        training.communicator.multi_node_mean_grad(training.model)


@on_ranks(2)
def test_ranks_with_other_rates_cannot_follow_the_rule(comm):
    training = Training(comm, 'momentum, clipped', local_steps='qsr',
                        qsr_alpha=0.06, qsr_min=1)
    training.optimizer.lr = 0.02 if comm.rank else 0.03
    with pytest.raises(ValueError, match=(
            'the number of updates is 4 on rank 0 but 9 on rank 1')):
        training.update(*range(10))


@on_ranks(2)
@pytest.mark.parametrize('sync_steps', [0, 5])
def test_batch_normalisation_over_ranks_is_refused(comm, sync_steps):
    communicator = create_communicator(
        'float32', comm, local_steps=2, sync_steps=sync_steps)
    model = chainer.Sequential(chainermn.links.MultiNodeBatchNormalization(
        3, communicator))
    optimizer = wrapped(sgd(), communicator).setup(model)

    def loss():
        return chainer.functions.sum(model(numpy.ones((2, 3), 'f')))
    optimizer.update(loss)
    with pytest.raises(ValueError, match='MultiNodeBatchNormalization aver'):
        optimizer.update(loss)


@on_ranks(2)
def test_replicas_of_a_pipeline_are_refused(comm):
    with pytest.raises(ValueError, match='local_steps is for replicas'):
        trainers.Job(comm, stages=1, codec={'local_steps': 2})


@on_ranks(1)
def test_an_optimizer_without_a_rate_cannot_follow_the_rule(comm):
    communicator = create_communicator(
        'float32', comm, local_steps='qsr', qsr_alpha=1, sync_steps=0)
    model = Plain()
    optimizer = wrapped(optimizers.AdaDelta(), communicator).setup(model)
    optimizer.update(lambda: model.loss(0))
    with pytest.raises(ValueError, match='AdaDelta has no learning rate'):
        optimizer.update(lambda: model.loss(1))


@on_ranks(2)
def test_a_communicator_that_has_been_finalized_says_so(comm):
    training = Training(comm, local_steps=2)
    training.update(1)
    training.communicator.finalize()
    training.optimizer.actual_optimizer.update()    # nobody is told
    with pytest.raises(RuntimeError, match='has been finalized; make'):
        training.communicator.synchronize(training.model)
