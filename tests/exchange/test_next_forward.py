"""``overlap='next_forward'``: updates return before their exchange is over."""
import time

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.allreduce.engine import Bucket
from chainer_fp8pipe.exchange import blockwise_update
from chainer_fp8pipe.exchange.blockwise_update import BlockwiseUpdate
from chainer_fp8pipe.exchange.deferred_update import deferred
from chainer_fp8pipe.training.large_batch import large_batch

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks, run_script

from ..communicators.networks import NETWORKS, Plain
from .test_exchange_thread import CODECS, early, make, update, warm, wrapped


def plain_sgd(model, communicator):
    return wrapped(chainer.optimizers.SGD(0.02), communicator).setup(model)


def decayed_adam(model, communicator):
    optimizer = wrapped(chainer.optimizers.Adam(0.01), communicator)
    optimizer.setup(model).add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
    return optimizer


def clipped(model, communicator):
    """Needs all gradients before it changes a parameter."""
    optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator)
    optimizer.setup(model).add_hook(
        chainer.optimizer_hooks.GradientClipping(1.0))
    return optimizer


def large(model, communicator):
    return large_batch(
        wrapped(chainer.optimizers.MomentumSGD(), communicator), 8, 0.05, 8,
        0.2, 2, samples=64).setup(model)


OPTIMIZERS = {one.__name__: one
              for one in (plain_sgd, decayed_adam, clipped, large)}


def trained(comm, overlap, network, optimizer=plain_sgd, steps=9, **options):
    """Parameters, looked at after all steps; whether updates waited."""
    communicator = make(comm, options.pop('name', 'fp8'), overlap, **options)
    numpy.random.seed(1)
    model = network()
    made = optimizer(model, communicator)
    waits = []
    for number in range(steps):
        update(made, model, number, comm.rank)
        waits.append(deferred(model) is None)
    result = [parameter.array.tobytes()
              for _, parameter in sorted(model.namedparams())]
    assert deferred(model) is None
    communicator.finalize()
    return result, waits


@pytest.fixture
def small_blocks(monkeypatch):
    """Small parameters, too, are updated range by range."""
    monkeypatch.setattr(blockwise_update, 'BLOCK', 8)


@pytest.mark.usefixtures('small_blocks')
@on_ranks(2)
@pytest.mark.parametrize('network', NETWORKS)
@pytest.mark.parametrize('name', CODECS)
def test_results_are_those_without_overlap_without_early_accesses(
        comm, network, name):
    expected, _ = trained(comm, False, NETWORKS[network], name=name)
    found, waits = trained(comm, 'next_forward', NETWORKS[network], name=name)
    assert found == expected
    assert waits[:3] == [True] * 3
    if network not in ('Changing', 'Forgetful', 'Lazy'):
        assert not any(waits[4:])


@pytest.mark.usefixtures('small_blocks')
@on_ranks(2)
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_so_they_are_for_every_optimizer(comm, optimizer):
    make_optimizer = OPTIMIZERS[optimizer]
    expected, _ = trained(comm, False, Plain, make_optimizer)
    found, waits = trained(comm, 'next_forward', Plain, make_optimizer)
    assert found == expected
    assert all(waits) if optimizer == 'clipped' else not any(waits[4:])


@pytest.mark.usefixtures('small_blocks')
@on_ranks(4)
@pytest.mark.parametrize('options', [
    {'algorithm': 'ring'}, {'algorithm': 'torus2d', 'shape': (2, 2)},
    {'ranks_per_node': 2, 'two_level': 'yes'}, {'bucket_bytes': 0},
    {'bucket_bytes': 1 << 20, 'warmup': 0}, {'rounding': 'stochastic'}])
def test_so_they_are_for_every_algorithm(comm, options):
    expected, _ = trained(comm, False, Plain, **options)
    found, waits = trained(comm, 'next_forward', Plain, **options)
    assert found == expected
    assert not waits[-1]


class Two(chainer.Chain):
    """Two layers, the last one's exchange longer than a frame."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(8, 64, nobias=True)
            self.last = L.Linear(64, 64, nobias=True)


class Unfinished(Bucket):
    """Its mean may be there, or not."""

    @property
    def finished(self):
        return False

    @finished.setter
    def finished(self, value):
        vars(self)['finished'] = value


@on_ranks(2)
def test_each_layer_waits_for_its_own_parameters(comm):
    """The ranks' first layers go on before the last layer's are there."""
    communicator = make(comm, 'float32', 'next_forward', bucket_bytes=4)
    model = Two()
    optimizer = plain_sgd(model, communicator)
    x = numpy.ones((2, 8), 'f4')
    for _ in range(4):
        optimizer.update(lambda: F.sum(model.last(model.first(x)) ** 2))
    sent = deferred(model)._finish.__self__._sent
    # As if not all of the last layer had come.
    transfer = sent['/last/W'][0]
    transfer.__class__ = Unfinished
    assert {'/first/W', '/last/W'} == set(sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator._reducer.exchanges[0].queue,
                      'finish', lambda asked, _: asked is transfer and 1 / 0)
        # It is not called for the first layer until that has come.
        while not sent['/first/W'][0].finished:
            time.sleep(1e-3)
        h = model.first(x)
        with pytest.raises(ZeroDivisionError):
            model.last(h)
    transfer.__class__ = Bucket
    while not transfer.finished:
        time.sleep(1e-3)
    assert numpy.isfinite(model.last(h).array).all()
    communicator.finalize()


class Long(chainer.Chain):
    """Of many frames."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(1024, 1024)

    def loss(self, step, rank):
        x = numpy.random.default_rng((step, rank)).standard_normal(
            (4, 1024), numpy.float32)
        return F.mean(self.l1(x) ** 2)


@on_ranks(2)
@pytest.mark.parametrize('optimizer', ['plain_sgd', 'decayed_adam', 'large'])
def test_a_parameter_is_updated_while_its_mean_is_on_its_way(comm, optimizer):
    """Frame by frame, where its rule and hooks look at single elements."""
    options = {'frame_bytes': 2048, 'warmup': 0, 'steps': 12}
    make_optimizer = OPTIMIZERS[optimizer]
    expected, _ = trained(comm, False, Long, make_optimizer, **options)
    early_ranges = []
    complete = BlockwiseUpdate.complete

    def counted(self):
        early_ranges.append(len(self._done))
        complete(self)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockwiseUpdate, 'complete', counted)
        found, _ = trained(comm, 'next_forward', Long, make_optimizer,
                           **options)
    assert found == expected
    assert bool(comm.allreduce(sum(early_ranges))) == (optimizer != 'large')


class Alike(Plain):
    """Two layers' weights are one array."""

    def __init__(self):
        super().__init__()
        del self.l3
        with self.init_scope():
            self.l3 = self.l2.copy('share')


@on_ranks(2)
def test_parameters_that_are_one_array_do_not_wait(comm):
    """One's update would change what the other's mean is made with."""
    expected, _ = trained(comm, False, Alike)
    found, waits = trained(comm, 'next_forward', Alike)
    assert found == expected
    assert all(waits)


class Empty(Plain):
    """A parameter has no elements."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.empty = chainer.Parameter(numpy.ones((0, 3), 'f4'))

    def loss(self, step, rank):
        return super().loss(step, rank) + F.sum(self.empty)


@on_ranks(2)
def test_a_parameter_without_elements_is_not_waited_for(comm):
    expected, _ = trained(comm, False, Empty)
    found, waits = trained(comm, 'next_forward', Empty)
    assert found == expected
    assert not waits[-1]


@on_ranks(2, 4)
def test_urgent_buckets_overtake_what_is_on_its_way(comm):
    """On each rank as on the others, whatever its own times were."""
    communicator = make(comm, 'fp8', 'next_forward', warmup=0,
                        bucket_bytes=2000)
    model = chainer.Sequential(*(L.Linear(40, 40) for _ in range(6)))
    optimizer = plain_sgd(model, communicator)
    for step in range(14):
        x = numpy.full((2, 40), 0.1 * step + comm.rank, 'f4')
        optimizer.update(lambda x=x: F.mean(model(x) ** 2))
    known = early(communicator, model)
    orders = comm.allgather(list(known.slices))
    assert orders == orders[:1] * comm.size
    assert {part.bucket for part in known.slices} == set(
        range(len(known.buckets)))
    communicator.finalize()


@on_ranks(2, 4)
def test_a_gradient_that_is_not_finite_is_an_error_at_every_access(comm):
    communicator, model, optimizer = warm(comm, 'next_forward', 5, warmup=0)
    with numpy.errstate(invalid='ignore'):
        optimizer.update(lambda: model.loss(5, comm.rank) * numpy.float32(
            'nan' if comm.rank else 1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=(
                r'gradients of /l1/. is not finite: '
                + ('.* on this rank' if comm.rank else 'it is not so on this')
                + '.*go on from a snapshot')):
            model(numpy.zeros((1, 8), 'f4'))
    with pytest.raises(RuntimeError, match='is not finite'):
        communicator.multi_node_mean_grad(model)
    with pytest.raises(RuntimeError, match='is not finite'):
        communicator.finalize()


@on_ranks(2)
def test_what_fails_in_the_exchanges_thread_is_an_error_at_an_access(comm):
    communicator, model, _ = warm(comm, 'next_forward', 5, warmup=0)
    early(communicator, model).failure = 'lost'
    with pytest.raises(RuntimeError, match='failed beside.*lost'):
        model.l1.W.array.sum()


@on_ranks(2)
def test_training_goes_on_bit_for_bit_from_a_state(comm, tmp_path):
    """Saved while an update is on its way."""
    def fresh():
        communicator = make(comm, 'fp8', 'next_forward')
        numpy.random.seed(1)
        model = Plain()
        return communicator, model, decayed_adam(model, communicator)

    def steps(made, numbers):
        for number in numbers:
            update(made[2], made[1], number, comm.rank)
    whole = fresh()
    steps(whole, range(6))
    assert deferred(whole[1])
    state = whole[0].state(whole[1])
    assert deferred(whole[1]) is None
    files = [tmp_path / f'{comm.rank}{name}.npz' for name in 'om']
    chainer.serializers.save_npz(files[0], whole[2].actual_optimizer)
    chainer.serializers.save_npz(files[1], whole[1])
    steps(whole, range(6, 12))
    again = fresh()
    steps(again, range(1))      # which only broadcasts
    again[0].load_state(state, again[1])
    chainer.serializers.load_npz(files[0], again[2].actual_optimizer)
    chainer.serializers.load_npz(files[1], again[1])
    steps(again, range(6, 12))
    for one, other in zip(whole[1].params(), again[1].params(), strict=True):
        assert one.array.tobytes() == other.array.tobytes()


@on_ranks(2)
def test_gradients_can_be_used_without_an_optimizer(comm):
    communicator = create_communicator(
        'float32', comm, overlap='next_forward', bucket_bytes=300)
    model = Plain()
    communicator.bcast_data(model)
    for number in range(6):
        model.cleargrads()
        model.loss(number, comm.rank).backward()
        communicator.multi_node_mean_grad(model)
        assert (deferred(model) is not None) == (number > 1)
        mean = {name: parameter.grad.copy()
                for name, parameter in model.namedparams()}
        for rank in range(comm.size):
            model.cleargrads()
            with chainer.using_config('enable_backprop', True):
                model.loss(number, rank).backward()
            for name, parameter in model.namedparams():
                mean[name] -= parameter.grad / comm.size
        assert all(abs(error).max() < 1e-5 for error in mean.values())
    communicator.finalize()


@on_ranks(2, 4)
def test_ranks_that_disagree_hear_of_it_at_the_first_look(comm):
    communicator, model, optimizer = warm(comm, 'next_forward', 5, warmup=0)
    model.cleargrads()
    model.loss(5, comm.rank).backward(loss_scale=2.0 + comm.rank)
    optimizer.update()
    for _ in range(2):
        with pytest.raises(ValueError, match=(
                'the loss scale is 2.0 on rank 0 but 3.0 on rank 1')) as seen:
            model(numpy.zeros((1, 8), 'f4'))
        assert len(set(comm.allgather(str(seen.value)))) == 1
    with pytest.raises(RuntimeError, match='make a new communicator'):
        communicator.multi_node_mean_grad(model)
    with pytest.raises(ValueError, match='the loss scale is'):
        communicator.finalize()


@on_ranks(2, 4)
def test_where_the_order_is_looked_at_they_hear_of_it_at_once(comm):
    # The first update only broadcasts, and two are not sent early.
    communicator, model, optimizer = warm(comm, 'next_forward', 7, warmup=0)
    model.cleargrads()
    model.loss(5, comm.rank).backward(loss_scale=2.0 + comm.rank)
    with pytest.raises(ValueError, match=(
            'the loss scale is 2.0 on rank 0 but 3.0 on rank 1')) as seen:
        optimizer.update()
    assert len(set(comm.allgather(str(seen.value)))) == 1
    with pytest.raises((RuntimeError, ValueError)):
        communicator.finalize()


@on_ranks(2)
def test_one_rank_that_sends_late_makes_no_other_wait_or_differ(comm):
    """Rank 1 finds every second update's gradients in another way."""
    def step(optimizer, model, number, rank):
        model.cleargrads()
        if rank == 1 and number % 2:
            parameters = [p for _, p in sorted(model.namedparams())]
            for parameter, gradient in zip(parameters, chainer.grad(
                    [model.loss(number, rank)], parameters), strict=True):
                parameter.grad = gradient.array
        else:
            model.loss(number, rank).backward()
        optimizer.update()

    def run(overlap):
        communicator = make(comm, 'fp8', overlap)
        numpy.random.seed(1)
        model = Plain()
        optimizer = plain_sgd(model, communicator)
        for number in range(10):
            step(optimizer, model, number, comm.rank)
        result = [parameter.array.tobytes() for parameter in model.params()]
        communicator.finalize()
        return result
    assert run(False) == run('next_forward')


SCRIPT = '''
import chainer_fp8pipe
import chainer, chainermn, numpy
import chainer.functions as F, chainer.links as L
from chainer import _backprop


def in_chainer():
    return (_backprop._backprop_to_all, _backprop._backprop_utils,
            chainer.GradientMethod.update)


original = in_chainer()
comm = chainer_fp8pipe.create_communicator('fp8', overlap='next_forward')
model = chainer.Sequential(L.Linear(4, 4), L.Linear(4, 2))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm).setup(model)
replaced = []
for _ in range(6):
    loss = F.sum(model(numpy.ones((2, 4), 'f4')))
    model.cleargrads()
    loss.backward()
    optimizer.update()
    replaced.append([mine is not theirs for mine, theirs
                     in zip(in_chainer(), original)])
assert replaced[-1] == [True] * 3, replaced
comm.finalize()
assert in_chainer() == original
'''


def test_chainer_has_its_own_functions_back_at_the_end(tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    done = run_script(2, 'script.py', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
