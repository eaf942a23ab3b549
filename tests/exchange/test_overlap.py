"""With overlap, results are those without, bit for bit."""
import contextlib
import gc
import os
import threading
import time
from unittest import mock

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.allreduce.engine import Bucket
from chainer_fp8pipe.communicators import aggregator_ranks
from chainer_fp8pipe.communicators.options import make_options
from chainer_fp8pipe.exchange.deferred_update import BlockUpdate, deferred
from chainer_fp8pipe.exchange.thread import exchange_thread

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

from tests.images.processes import eventually
from tests.ranks import on_ranks, run_script
from tests.training.extensions.helpers import make_trainer, weights

from ..communicators.networks import NETWORKS, Plain
from .jobs import (
    CODECS,
    OVERLAPS,
    accumulated,
    counting,
    early,
    found_by_grad,
    kept,
    make,
    optimizer_of,
    same,
    train,
    update,
    values,
    warm,
    wrapped,
)


@on_ranks(3)
@pytest.mark.parametrize(('network', 'name'), [
    *((network, 'fp8') for network in NETWORKS),
    *((network, name) for name in CODECS if name != 'fp8'
      for network in ('Plain', 'Shared', 'Mixed'))])
def test_results_are_those_without_overlap(comm, network, name):
    sent, waits = same(comm, NETWORKS[network], name=name)
    assert sent[:2] == [0, 0], sent
    if network not in ('Unused', 'Changing', 'Lazy', 'Forgetful'):
        assert set(sent[2:]) == {max(sent)}, sent
    if network not in ('Changing', 'Forgetful'):
        assert max(sent) > 0
    assert not any(waits[:3])
    if network not in ('Changing', 'Forgetful', 'Lazy'):
        assert all(waits[4:])


@on_ranks(4)
@pytest.mark.parametrize('options', [
    {'algorithm': 'ring'}, {'algorithm': 'torus2d', 'shape': (2, 2)},
    {'algorithm': 'ring', 'partial_sums': 'wire'},
    {'algorithm': 'torus2d', 'rounding': 'stochastic'},
    {'algorithm': 'torus2d', 'bucket_bytes': 0},
    {'bucket_bytes': 1 << 20, 'warmup': 0},
    {'ranks_per_node': 2, 'two_level': 'yes'}])
def test_so_they_are_for_every_algorithm(comm, options):
    sent, waits = same(comm, Plain, **options)
    assert sent[-1] > 0
    assert waits[-1]


class Exploding(Plain):
    """An update that dynamic loss scaling skips."""

    def loss(self, step, rank):
        return super().loss(step, rank) * (
            numpy.float32('inf') if step == 5 and rank else 1)


class Alike(Plain):
    """Two layers' weights are one array: one's update would change what the
    other's mean is made with.
    """

    def __init__(self):
        super().__init__()
        del self.l3
        with self.init_scope():
            self.l3 = self.l2.copy('share')


class Empty(Plain):
    """A parameter has no elements."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.empty = chainer.Parameter(numpy.ones((0, 3), 'f4'))

    def loss(self, step, rank):
        return super().loss(step, rank) + F.sum(self.empty)


@on_ranks(2)
@pytest.mark.parametrize(('network', 'options', 'waits'), [
    (Plain, {'scaling': {'scale': 64.0}}, True),
    (Plain, {'scaling': {'scale': 64.0}, 'name': 'int4'}, True),
    (Plain, {'scaling': {'interval': 2, 'scale': None}}, False),
    (Exploding, {'scaling': {}}, False),
    (Plain, {'step': accumulated}, True), (Plain, {'step': kept}, True),
    # The other rank begins early, and does not wait for this one.
    (Plain, {'step': found_by_grad}, True),
    (Plain, {'optimizer': 'adam'}, True),
    (Plain, {'optimizer': 'clipped'}, False),
    (Plain, {'optimizer': 'lars'}, True),
    (Alike, {}, False), (Empty, {}, True)])
def test_so_they_are_for_every_way_to_train(comm, network, options, waits):
    with numpy.errstate(invalid='ignore'):
        sent, found = same(comm, network, **options)
    assert set(found[4:]) == {waits}
    if network is not Exploding and not (
            comm.rank and options.get('step') is found_by_grad):
        assert min(sent[3:]) > 0


@on_ranks(2)
@pytest.mark.parametrize('zero_fill', [True, False])
def test_unused_parameters_do_not_hold_up_the_others(comm, zero_fill):
    sent, _ = same(comm, NETWORKS['Unused'], zero_fill=zero_fill,
                   bucket_bytes=100)    # each alone
    assert set(sent[2:]) == {4}


@on_ranks(2)
@pytest.mark.parametrize(('unchain', 'critic', 'same_communicator'), [
    (True, 1, True), (False, 3, True), (True, 3, False), (False, 1, False)])
def test_a_generator_and_a_discriminator_are_trained_together(
        comm, unchain, critic, same_communicator):
    def adversaries(overlap):
        numpy.random.seed(2)
        networks = generator, discriminator = [chainer.Sequential(
            L.Linear(4, 12), F.tanh, L.Linear(12, 12), F.tanh,
            L.Linear(12, size)) for size in (4, 1)]
        first = make(comm, 'fp8', overlap)
        second = first if same_communicator else make(comm, 'fp8', overlap)
        optimizers = [
            wrapped(chainer.optimizers.Adam(0.01), communicator).setup(model)
            for model, communicator in zip(networks, (first, second),
                                           strict=True)]
        draws = numpy.random.default_rng(comm.rank)
        sent = [[], []]

        def step(number, communicator, loss):
            with counting(communicator) as found:
                optimizers[number].update(loss)
            sent[number].extend(found)
        for _ in range(8):
            for _ in range(critic):
                fake = generator(draws.normal(0, 1, (5, 4)).astype('f4'))
                verdict = discriminator(fake)
                if unchain:
                    verdict = discriminator(fake.array)
                real = discriminator(draws.random((5, 4)).astype('f4'))
                step(1, second, lambda real=real, fake=verdict: (
                    F.sum(F.softplus(-real)) + F.sum(F.softplus(fake))))
            fake = discriminator(generator(
                draws.normal(0, 1, (5, 4)).astype('f4')))
            step(0, first, lambda fake=fake: F.sum(F.softplus(-fake)))
        return [values(model) for model in networks], sent
    plain, _ = adversaries(False)
    overlapped, sent = adversaries(True)
    assert plain == overlapped
    assert plain == adversaries('next_forward')[0]
    assert min(max(counts) for counts in sent) > 0


@on_ranks(2)
def test_a_trainer_with_a_standard_updater_needs_no_change(comm, tmp_path):
    found = []
    for overlap in (False, *OVERLAPS):
        trainer, communicator = make_trainer(
            comm, tmp_path, overlap=overlap, bucket_bytes=200)
        with counting(communicator) as sent:
            trainer.run()
        found.append(weights(trainer))
        assert not overlap or sent[-1] > 0
    assert found[0] == found[1] == found[2]


@on_ranks(2)
@pytest.mark.parametrize('overlap', OVERLAPS)
def test_training_goes_on_bit_for_bit_from_a_state(comm, tmp_path, overlap):
    """Saved while an update is on its way."""
    def fresh():
        communicator = make(comm, 'fp8', overlap)
        numpy.random.seed(1)
        model = Plain()
        return communicator, model, optimizer_of('adam', model, communicator)

    def steps(made, numbers):
        for number in numbers:
            update(made[2], made[1], number, comm.rank)
    whole = fresh()
    steps(whole, range(6))
    assert bool(deferred(whole[1])) == (overlap == 'next_forward')
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
    assert values(whole[1]) == values(again[1])


@on_ranks(3)
@pytest.mark.parametrize('name', ['fp8', 'int4'])
def test_aggregators_sum_what_is_sent_early(comm, name):
    results = []
    for overlap in (False, *OVERLAPS):
        communicator = aggregator_ranks.divide(comm, name, make_options(name, {
            **CODECS[name], 'algorithm': 'aggregator', 'overlap': overlap,
            'bucket_bytes': 300, 'frame_bytes': 64}))
        if communicator is None:
            continue
        numpy.random.seed(1)
        model = Plain()
        optimizer = optimizer_of('sgd', model, communicator)
        with counting(communicator) as sent:
            for number in range(6):
                update(optimizer, model, number, comm.rank)
        results.append(values(model))
        if overlap:
            assert sent[-1] > 0
            other = Plain()
            other.cleargrads()
            with pytest.raises(ValueError, match='is for one model'):
                communicator.multi_node_mean_grad(other, zero_fill=True)
        communicator.finalize()
    assert results[:1] * 2 == results[1:]


@on_ranks(1, 2)
@pytest.mark.parametrize('overlap', [False, *OVERLAPS])
def test_a_model_without_elements_is_averaged(comm, overlap):
    communicator = make(comm, 'fp8', overlap)
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(numpy.ones((0, 3), 'f4'))
    for _ in range(5):
        model.w.grad = numpy.ones((0, 3), 'f4')
        communicator.multi_node_mean_grad(model)
        assert model.w.grad.shape == (0, 3)
    communicator.finalize()


@on_ranks(2)
def test_gradients_can_be_used_without_an_optimizer(comm):
    communicator = make(comm, 'float32', 'next_forward')
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
            model.loss(number, rank).backward()
            for name, parameter in model.namedparams():
                mean[name] -= parameter.grad / comm.size
        assert all(abs(error).max() < 1e-5 for error in mean.values())
    communicator.finalize()


# --- when things happen ---

class Held(chainer.FunctionNode):
    """Its backward waits until something was done."""

    def __init__(self, done):
        super().__init__()
        self.done = done

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        assert eventually(self.done), 'nothing happens during backward'
        return gradients


@on_ranks(2, 4)
@pytest.mark.parametrize('algorithm', ['direct', 'ring'])
def test_means_arrive_while_backward_still_runs(comm, algorithm):
    communicator = make(comm, 'fp8', True, algorithm=algorithm, warmup=0)
    first, last = L.Linear(8, 8), L.Linear(8, 8)
    model = chainer.Sequential(first, last)
    optimizer = optimizer_of('sgd', model, communicator)

    def arrived():
        sent = early(communicator, model).update.sent.values()
        return len(sent) >= 1 and all(one.finished for one in sent)

    def loss(held):
        h = first(numpy.ones((2, 8), 'f4') * (comm.rank + 1))
        if held:
            h, = Held(arrived).apply((h,))
        return F.mean(last(h) ** 2)
    for step in range(6):
        optimizer.update(lambda step=step: loss(step >= 3))
    events = communicator.events
    assert events.hidden['encode'] > 0
    assert events.waited == sum(events.seconds.values()) > 0
    communicator.finalize()


@on_ranks(2)
def test_each_layer_waits_for_its_own_parameters(comm):
    communicator = make(comm, 'float32', 'next_forward', bucket_bytes=4)
    model = chainer.Chain(first=L.Linear(8, 64, nobias=True),
                          last=L.Linear(64, 64, nobias=True))
    optimizer = optimizer_of('sgd', model, communicator)
    x = numpy.ones((2, 8), 'f4')
    for _ in range(4):
        optimizer.update(lambda: F.sum(model.last(model.first(x)) ** 2))
    decoded, decode = [], Bucket.decode
    with mock.patch.object(Bucket, 'decode', lambda bucket, tensors: (
            decoded.append(*bucket.tensors.names), decode(bucket, tensors))[1]
            ):
        h = model.first(x)
        assert decoded == ['/first/W']
        model.last(h)
        assert decoded == ['/first/W', '/last/W']
    communicator.finalize()


class Long(chainer.Chain):
    """Of many frames."""

    def __init__(self):
        super().__init__(l1=L.Linear(1024, 1024))

    def loss(self, step, rank):
        x = numpy.random.default_rng((step, rank)).standard_normal(
            (4, 1024), numpy.float32)
        return F.mean(self.l1(x) ** 2)


@on_ranks(2)
@pytest.mark.parametrize('optimizer', ['sgd', 'adam', 'lars'])
def test_a_parameter_is_updated_while_its_mean_is_on_its_way(comm, optimizer):
    """Block by block, where its rule and hooks look at single elements."""
    options = {'optimizer': optimizer, 'frame_bytes': 2048, 'warmup': 0,
               'steps': 12, 'looks': False}
    expected, *_ = train(comm, False, Long, **options)
    blocks, complete = [], BlockUpdate.complete

    def counted(self):
        blocks.append(self._missing.count(0))
        complete(self)
    with mock.patch.object(BlockUpdate, 'complete', counted):
        found, *_ = train(comm, 'next_forward', Long, **options)
    assert found == expected
    assert bool(comm.allreduce(sum(blocks))) == (optimizer != 'lars')


@on_ranks(2, 4)
def test_urgent_buckets_overtake_in_the_same_order_on_all_ranks(comm):
    communicator = make(comm, 'fp8', 'next_forward', warmup=0,
                        bucket_bytes=2000)
    model = chainer.Sequential(*(L.Linear(40, 40) for _ in range(6)))
    optimizer = optimizer_of('sgd', model, communicator)
    for step in range(14):
        x = numpy.full((2, 40), 0.1 * step + comm.rank, 'f4')
        optimizer.update(lambda x=x: F.mean(model(x) ** 2))
    known = early(communicator, model)
    orders = comm.allgather(list(known.slices))
    assert orders == orders[:1] * comm.size
    assert {number for number, _ in known.slices} == set(
        range(len(known.buckets)))
    communicator.finalize()


@on_ranks(2)
def test_who_has_something_to_send_lets_others_have_the_core(comm):
    """Its own thread, which sends it, or a rank that is behind."""
    communicator, model, optimizer = warm(comm)
    with counting(communicator) as sent, mock.patch(
            'chainer_fp8pipe.exchange.model_exchange.give_way') as given:
        update(optimizer, model, 4, comm.rank)
    assert 1 < given.call_count <= sent[0]
    communicator.finalize()


@on_ranks(2)
def test_without_threads_in_mpi_it_says_so_and_goes_on(comm):
    level = MPI.THREAD_SERIALIZED if comm.rank else MPI.THREAD_MULTIPLE
    with mock.patch.object(MPI, 'Query_thread', return_value=level), (
            contextlib.nullcontext() if comm.rank else
            pytest.warns(RuntimeWarning, match='THREAD_MULTIPLE')):
        communicator, *_ = warm(comm)
    assert not any(communicator.events.hidden.values())


# --- models, threads and the end of the program ---

@on_ranks(2)
@pytest.mark.parametrize('overlap', OVERLAPS)
def test_models_that_are_no_more_leave_nothing_behind(comm, overlap):
    """Their queues are the next ones', and have no threads of their own."""
    communicator = make(comm, 'fp8', overlap, warmup=0, threads=3)
    reducer = communicator._reducer
    counts, threads = [], []
    for number in range(4):
        model = Plain()
        optimizer = optimizer_of('sgd', model, communicator)
        for step in range(5):
            update(optimizer, model, step + number, comm.rank)
        counts.append((len(reducer._queues), len(reducer.exchanges)))
        threads.append(len(os.listdir('/proc/self/task')))
        del model, optimizer
        gc.collect()
    assert counts == [(1, 1)] * 4
    assert threads[-1] <= threads[0]    # others of the process may have ended
    communicator.finalize()


@on_ranks(2)
def test_models_of_a_rank_that_keeps_them_keep_their_queues(comm):
    communicator = make(comm, 'fp8', True, warmup=0)
    kept_models = []
    for _ in range(3):
        model = Plain()
        optimizer = optimizer_of('sgd', model, communicator)
        for step in range(5):
            update(optimizer, model, step, comm.rank)
        if comm.rank:
            kept_models.append(model)
        del model, optimizer
        gc.collect()
    assert len(communicator._reducer._queues) == 3
    communicator.finalize()


@on_ranks(2)
def test_a_process_has_one_thread_for_all_communicators(comm):
    others = set(exchange_thread._reducers)     # of tests before this one
    jobs = [warm(comm, overlap) for overlap in OVERLAPS * 2]
    for step in range(3):
        for _, model, optimizer in jobs:
            update(optimizer, model, step, comm.rank)
    assert [thread.name for thread in threading.enumerate()].count(
        exchange_thread._thread.name) == 1
    for number, (communicator, *_) in enumerate(jobs):
        assert len(exchange_thread._reducers) == (
            len(others) + len(jobs) - number)
        communicator.finalize()
    assert set(exchange_thread._reducers) == others
    assert (exchange_thread._thread is None) == (not others)


@on_ranks(1)
def test_an_interrupt_while_the_thread_is_waited_for_leaves_it_working(comm):
    communicator = make(comm, 'fp8', True)
    reducer = communicator._reducer
    with mock.patch.object(reducer, '_turn', mock.MagicMock()) as turn:
        turn.__enter__.side_effect = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt), reducer.taken():
            pass
    assert not reducer._main_waits
    communicator.finalize()


@on_ranks(2)
def test_the_thread_does_not_walk_over_what_backward_fills(comm):
    """A dictionary that grows meanwhile would end the walk with an error."""
    class Growing(dict):
        def values(self):
            raise AssertionError('walked over')
        __iter__ = items = values

    communicator, model, optimizer = warm(comm)
    sender = early(communicator, model)
    begin = sender.begin

    def begin_growing(*arguments):
        found = begin(*arguments)
        sender.update.arrays = Growing()
        return found
    with mock.patch.object(sender, 'begin', begin_growing):
        for step in range(3):
            update(optimizer, model, step, comm.rank)
    # The thread, which was woken, gets the core at some time.
    assert eventually(lambda: communicator.events.hidden['exchange'] > 0)
    communicator.finalize()


SCRIPT = '''
import chainer_fp8pipe
import chainer, chainermn
from chainer import _backprop
from mpi4py import MPI
from tests.communicators.networks import Plain


def in_chainer():
    return (_backprop._backprop_to_all, _backprop._backprop_utils,
            chainer.GradientMethod.update)


rank = MPI.COMM_WORLD.rank
original = in_chainer()
communicator = chainer_fp8pipe.create_communicator(
    'fp8', overlap={overlap!r}, warmup=0, bucket_bytes=300)
model = Plain()
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.1), communicator).setup(model)
for step in range(5):
    optimizer.update(lambda: model.loss(step, rank))
assert communicator._reducer.known(model).ready
replaced = [mine is not theirs for mine, theirs in zip(in_chainer(), original)]
assert replaced == [True, True, {overlap!r} is not True], replaced
{end}
if communicator._is_finalized:
    assert in_chainer() == original
print('left', rank)
'''


@pytest.mark.parametrize(('overlap', 'end'), [
    (True, ''), ('next_forward', ''),
    ('next_forward', 'model.loss(9, rank).backward()'),
    (True, 'if rank == 0: model.loss(9, rank).backward()'),
    ('next_forward', 'communicator.finalize()'),
    (True, 'model.loss(9, rank).backward(); communicator.finalize()')])
def test_the_end_of_the_program_does_not_hang(tmp_path, overlap, end):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT.format(end=end, overlap=overlap))
    done = run_script(2, script, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('left') == 2


# --- what cannot be exchanged early is an error, on all ranks ---

def replaced(comm, optimizer, model):
    model.cleargrads()
    model.loss(9, comm.rank).backward()
    if comm.rank == 1:
        model.l9.W.grad = model.l9.W.grad * 2
    optimizer.update()


def one_pass_more(comm, optimizer, model):
    model.cleargrads()
    model.loss(9, comm.rank).backward()
    model.loss(10, comm.rank).backward()
    optimizer.update()


def no_update(comm, optimizer, model):
    model.loss(9, comm.rank).backward()
    update(optimizer, model, 10, comm.rank)


class Choosing(NETWORKS['Changing']):
    """One rank lacks a gradient that the others have sent already."""

    def forward(self, x):
        rank = MPI.COMM_WORLD.rank
        for name in 'abc' if self.step < 6 or rank else 'ac':
            x = F.tanh(self[name](x))
        return x


def lacking(comm, optimizer, model):
    update(optimizer, model, 7, comm.rank)


def scaled(comm, optimizer, model):
    model.cleargrads()
    model.loss(9, comm.rank).backward(loss_scale=2.0 + comm.rank)
    optimizer.update()


def thread_fails(comm, optimizer, model):
    known = early(optimizer.communicator, model)
    with mock.patch.object(type(known), 'send', side_effect=(
            KeyError('lost') if comm.rank else None)):
        model.cleargrads()
        model.loss(9, comm.rank).backward()
        while comm.rank and not known.failure:
            time.sleep(1e-3)
        optimizer.update()


@on_ranks(2, 4)
@pytest.mark.parametrize(('change', 'network', 'match'), [
    (replaced, Plain, 'rank 1: the gradient of parameter /l9/W was changed '
     'after.*pass overlap=False'),
    (one_pass_more, Plain, 'the gradient of parameter .* was changed after'),
    (no_update, Plain, 'the gradient of parameter .* was changed after'),
    (lacking, Choosing, '/b/W is float32 .* without gradient on rank 0 but '
     'float32 .* on rank 1.*zero_fill=True'),
    (scaled, Plain, 'the loss scale is 2.0 on rank 0 but 3.0 on rank 1'),
    (thread_fails, Plain,
     '(?s)rank 1: the exchange failed beside backward.*lost')])
def test_every_rank_raises_and_refuses_to_go_on(
        comm, change, network, match):
    communicator = make(comm, 'fp8', True)
    numpy.random.seed(1)
    model = network()
    optimizer = optimizer_of('sgd', model, communicator,
                             zero_fill=network is Plain)
    for number in range(4):
        update(optimizer, model, number, comm.rank)
    with pytest.raises(ValueError, match=match) as raised:
        change(comm, optimizer, model)
    assert len(set(comm.allgather(str(raised.value)))) == 1
    with pytest.raises(RuntimeError, match='make a new communicator'):
        communicator.multi_node_mean_grad(model)
    assert not any(one.update.frozen
                   for one in communicator._reducer.exchanges)
    communicator.finalize()


@on_ranks(2)
def test_a_gradient_that_is_changed_in_place_is_an_error_at_once(comm):
    _, model, optimizer = warm(comm)
    model.cleargrads()
    model.loss(9, comm.rank).backward()
    with pytest.raises(ValueError, match='read-only'):
        model.l9.W.grad *= 2
    optimizer.update()
    model.l9.W.grad *= 2


@on_ranks(2)
def test_parameters_can_be_broadcast_in_the_middle_of_a_step(comm):
    """What was sent is dropped, also by ranks that sent nothing."""
    communicator, model, optimizer = warm(comm)
    if comm.rank == 0:
        model.loss(9, comm.rank).backward()
    communicator.bcast_data(model)
    for number in range(4):
        update(optimizer, model, number, comm.rank)
    assert len(set(comm.allgather(model.l1.W.array.tobytes()))) == 1


@on_ranks(3)
def test_an_update_that_is_dropped_leaves_error_feedback_as_small(comm):
    """Rank 2 has sent nothing of it, and sends zeros for the others."""
    communicator = create_communicator(
        'fp8', comm, overlap=True, warmup=0, partial_sums='float32')
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(numpy.random.default_rng(0).normal(
            0, 0.01, 20000).astype(numpy.float32))

    def backward(step):
        gradient = numpy.random.default_rng((comm.rank, step)).normal(
            0, 0.001, 20000).astype(numpy.float32)
        model.cleargrads()
        F.sum(model.w * gradient).backward()
        return gradient

    errors = []
    for step in range(8):
        if step == 6:
            if comm.rank != 2:
                backward(99)
            communicator.bcast_data(model)
        mean = comm.allreduce(backward(step).astype(float)) / comm.size
        communicator.multi_node_mean_grad(model)
        errors.append(abs(model.w.grad - mean).mean() / abs(mean).mean())
    assert max(errors[6:]) < 3 * max(errors[:6])
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
    for call in (lambda: communicator.multi_node_mean_grad(model),
                 communicator.finalize):
        with pytest.raises(RuntimeError, match='is not finite'):
            call()


@on_ranks(2)
def test_what_fails_in_the_thread_is_an_error_at_an_access(comm):
    communicator, model, _ = warm(comm, 'next_forward', 5, warmup=0)
    early(communicator, model).failure = 'lost'
    with pytest.raises(RuntimeError, match='failed beside.*lost'):
        model.l1.W.array.sum()


@on_ranks(2, 4)
@pytest.mark.parametrize('updates', [5, 7])
def test_ranks_that_disagree_hear_of_it_at_the_first_look(comm, updates):
    """Or at once, where an order is chosen: in the seventh update."""
    communicator, model, optimizer = warm(comm, 'next_forward', updates,
                                          warmup=0)
    model.cleargrads()
    model.loss(5, comm.rank).backward(loss_scale=2.0 + comm.rank)
    looks = [lambda: model(numpy.zeros((1, 8), 'f4'))] * 2
    if updates == 7:
        looks = [optimizer.update]
    else:
        optimizer.update()
    for look in looks:
        with pytest.raises(ValueError, match=(
                'the loss scale is 2.0 on rank 0 but 3.0 on rank 1')) as seen:
            look()
        assert len(set(comm.allgather(str(seen.value)))) == 1
    with pytest.raises((RuntimeError, ValueError), match=(
            'make a new communicator|the loss scale is')):
        communicator.multi_node_mean_grad(model)
    with pytest.raises((RuntimeError, ValueError)):
        communicator.finalize()


@on_ranks(1)
def test_an_algorithm_that_can_only_wait_is_an_error(comm):
    with pytest.raises(ValueError, match="'mpi_op' can only wait"):
        make(comm, 'fp8', True, algorithm='mpi_op')
