"""With overlap, results are those without, bit for bit."""
import contextlib
import gc
import os
import threading
import time
from unittest import mock

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.communicators import aggregator_ranks
from chainer_fp8pipe.communicators.options import make_options
from chainer_fp8pipe.exchange.thread import exchange_thread

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from mpi4py import MPI

from tests.images.processes import eventually
from tests.ranks import on_ranks, run_script
from tests.training.extensions.helpers import make_trainer, weights

from ..communicators.networks import NETWORKS, Plain

OVERLAPS = True, 'next_forward'
CODECS = {'float32': {}, 'float16': {},
          'fp8': {'warmup': 2, 'period': 2}, 'int4': {'warmup': 2}}


def make(comm, name, overlap, **options):
    """Buckets are tiny, so that there are many."""
    return create_communicator(name, comm, overlap=overlap, **{
        **CODECS[name], 'bucket_bytes': 300, 'frame_bytes': 64, **options})


def early(communicator, model):
    """What a communicator knows of a model's exchange during backward."""
    return communicator._reducer.known(model)


@contextlib.contextmanager
def counting(communicator):
    """How many slices of buckets each update sent early."""
    found = []
    original = communicator.multi_node_mean_grad

    def mean(model, *arguments):
        known = early(communicator, model)
        found.append(known.update.ready if known else 0)
        original(model, *arguments)
    with mock.patch.object(communicator, 'multi_node_mean_grad', mean):
        yield found


def wrapped(optimizer, communicator, zero_fill=True):
    return chainermn.create_multi_node_optimizer(
        optimizer, communicator, zero_fill=zero_fill)


def update(optimizer, model, step, rank):
    optimizer.update(lambda: model.loss(step, rank))


def warm(comm, overlap=True, updates=4, **options):
    """A job whose buckets are sent during backward from now on."""
    communicator = make(comm, 'fp8', overlap, **options)
    model = Plain()
    optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator)
    optimizer.setup(model)
    for number in range(updates):
        update(optimizer, model, number, comm.rank)
    return communicator, model, optimizer


def train(comm, overlap, network, name='fp8', steps=9, step=update,
          zero_fill=True, scaling=None, **options):
    """Parameters' bytes after every update, and buckets sent early."""
    communicator = make(comm, name, overlap, **options)
    numpy.random.seed(1)
    model = network()
    optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator, zero_fill)
    optimizer.setup(model)
    if scaling is not None:
        optimizer.loss_scaling(**scaling)
    result = []
    with counting(communicator) if overlap else (
            contextlib.nullcontext()) as sent:
        for number in range(steps):
            step(optimizer, model, number, comm.rank)
            result.append(b''.join(
                parameter.array.tobytes() for _, parameter
                in sorted(model.namedparams())
                if parameter.array is not None))
    communicator.finalize()
    return result, sent


def same(comm, network, **options):
    """Checks that results are the same; returns buckets sent early."""
    plain, _ = train(comm, False, network, **options)
    overlapped, sent = train(comm, True, network, **options)
    assert plain == overlapped
    assert plain == train(comm, 'next_forward', network, **options)[0]
    assert len(set(plain)) > 3, 'it does not learn at all'
    assert comm.allgather(plain[-1]) == [plain[-1]] * comm.size
    return sent


@on_ranks(3)
@pytest.mark.parametrize('network', NETWORKS)
@pytest.mark.parametrize('name', CODECS)
def test_results_are_those_without_overlap_bit_for_bit(comm, network, name):
    sent = same(comm, NETWORKS[network], name=name)
    assert sent[:2] == [0, 0], sent
    if network in ('Plain', 'Shared', 'Branches', 'Recurrent', 'Penalty',
                   'Convolutions', 'Bare', 'Mixed'):
        assert set(sent[2:]) == {max(sent)}, sent
    if network not in ('Changing', 'Forgetful'):
        assert max(sent) > 0


@on_ranks(4)
@pytest.mark.parametrize('algorithm', ['ring', 'torus2d'])
@pytest.mark.parametrize('options', [
    {}, {'partial_sums': 'wire'}, {'rounding': 'stochastic'},
    {'bucket_bytes': 0}, {'bucket_bytes': 1 << 20, 'warmup': 0}])
def test_so_they_are_for_every_algorithm(comm, algorithm, options):
    assert same(comm, Plain, algorithm=algorithm, **options)[-1] > 0


@on_ranks(4)
def test_so_they_are_on_two_levels(comm):
    assert same(comm, Plain, ranks_per_node=2, two_level='yes')[-1] > 0


@on_ranks(2)
@pytest.mark.parametrize('scaling', [
    {'scale': 64.0}, {'interval': 2, 'scale': None}])
@pytest.mark.parametrize('name', CODECS)
def test_the_loss_may_be_scaled(comm, scaling, name):
    assert same(comm, Plain, scaling=scaling, name=name)[-1] > 0


@on_ranks(2)
def test_infinity_skips_the_update_under_dynamic_loss_scaling(comm):
    class Exploding(Plain):
        def loss(self, step, rank):
            return super().loss(step, rank) * (
                numpy.float32('inf') if step == 5 and rank else 1)
    with numpy.errstate(invalid='ignore'):
        same(comm, Exploding, scaling={}, name='fp8')


@on_ranks(2)
@pytest.mark.parametrize('zero_fill', [True, False])
def test_unused_parameters_do_not_hold_up_the_others(comm, zero_fill):
    sent = same(comm, NETWORKS['Unused'], zero_fill=zero_fill,
                bucket_bytes=100)       # each alone
    assert sent[2:] == [4] * 6


@on_ranks(2)
def test_gradients_may_add_up_over_several_passes(comm):
    def accumulate(optimizer, model, step, rank):
        model.cleargrads()
        for part in range(3):
            model.loss(3 * step + part, rank).backward()
        optimizer.update()
    assert same(comm, Plain, step=accumulate)[-1] > 0


@on_ranks(2)
def test_gradients_may_be_kept_for_a_second_derivative(comm):
    def keep(optimizer, model, step, rank):
        model.cleargrads()
        loss = model.loss(step, rank)
        loss.backward(retain_grad=True, enable_double_backprop=True)
        optimizer.update()
    assert same(comm, Plain, step=keep)[-1] > 0


@on_ranks(2)
@pytest.mark.parametrize('unchain', [True, False])
@pytest.mark.parametrize('critic', [1, 3])
@pytest.mark.parametrize('same_communicator', [True, False])
def test_a_generator_and_a_discriminator_are_trained_together(
        comm, unchain, critic, same_communicator):
    def adversaries(overlap):
        numpy.random.seed(2)
        networks = [chainer.Sequential(
            L.Linear(4, 12), F.tanh, L.Linear(12, 12), F.tanh,
            L.Linear(12, size)) for size in (4, 1)]
        generator, discriminator = networks
        first = make(comm, 'fp8', overlap)
        second = first if same_communicator else make(comm, 'fp8', overlap)
        optimizers = [
            wrapped(chainer.optimizers.Adam(0.01), communicator).setup(model)
            for model, communicator in zip(networks, (first, second),
                                           strict=True)]
        draws = numpy.random.default_rng(comm.rank)
        sent = [[], []]
        for _ in range(8):
            for _ in range(critic):
                fake = generator(draws.normal(0, 1, (5, 4)).astype('f4'))
                verdict = discriminator(fake)
                if unchain:
                    verdict = discriminator(fake.array)
                real = discriminator(draws.random((5, 4)).astype('f4'))
                with counting(second) if overlap else (
                        contextlib.nullcontext([])) as found:
                    optimizers[1].update(lambda real=real, fake=verdict: (
                        F.sum(F.softplus(-real)) + F.sum(F.softplus(fake))))
                sent[1] += found
            fake = discriminator(generator(
                draws.normal(0, 1, (5, 4)).astype('f4')))
            with counting(first) if overlap else (
                    contextlib.nullcontext([])) as found:
                optimizers[0].update(
                    lambda fake=fake: F.sum(F.softplus(-fake)))
            sent[0] += found
        return [parameter.array.tobytes() for model in networks
                for parameter in model.params()], sent
    plain, _ = adversaries(False)
    overlapped, sent = adversaries(True)
    assert plain == overlapped
    assert plain == adversaries('next_forward')[0]
    assert min(max(counts) for counts in sent) > 0


@on_ranks(2)
def test_a_trainer_with_a_standard_updater_needs_no_change(comm, tmp_path):
    def run(overlap):
        trainer, communicator = make_trainer(
            comm, tmp_path, overlap=overlap, bucket_bytes=200)
        with counting(communicator) if overlap else (
                contextlib.nullcontext()) as sent:
            trainer.run()
        return weights(trainer), sent
    plain, _ = run(False)
    overlapped, sent = run(True)
    assert plain == overlapped
    assert plain == run('next_forward')[0]
    assert sent[-1] > 0


class Held(chainer.FunctionNode):
    """Its backward waits until something was done."""

    def __init__(self, done):
        super().__init__()
        self.done = done

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        end = time.monotonic() + 200
        while not self.done():
            assert time.monotonic() < end, 'nothing happens during backward'
            time.sleep(1e-3)
        return gradients


@on_ranks(2, 4)
@pytest.mark.parametrize('algorithm', ['direct', 'ring'])
def test_means_arrive_while_backward_still_runs(comm, algorithm):
    communicator = make(comm, 'fp8', True, algorithm=algorithm, warmup=0)
    first, last = L.Linear(8, 8), L.Linear(8, 8)
    model = chainer.Sequential(first, last)
    optimizer = wrapped(chainer.optimizers.SGD(0.1), communicator)
    optimizer.setup(model)

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
def test_who_has_something_to_send_lets_others_have_the_core(comm):
    """Its own thread, which sends it, or a rank that is behind."""
    communicator, model, optimizer = warm(comm)
    with counting(communicator) as sent, mock.patch(
            'chainer_fp8pipe.exchange.model_exchange.give_way') as given:
        update(optimizer, model, 4, comm.rank)
    assert 1 < given.call_count <= sent[0]
    communicator.finalize()


@on_ranks(2)
def test_a_rank_that_begins_early_does_not_wait_for_one_that_does_not(comm):
    """Rank 1 runs its model in a way that is not watched."""
    def run(overlap):
        def step(optimizer, model, number, rank):
            model.cleargrads()
            if rank == 1 and number % 2:
                gradients = chainer.grad(
                    [model.loss(number, rank)],
                    [p for _, p in sorted(model.namedparams())])
                for (_, parameter), gradient in zip(
                        sorted(model.namedparams()), gradients, strict=True):
                    parameter.grad = gradient.array
            else:
                model.loss(number, rank).backward()
            optimizer.update()
        return train(comm, overlap, Plain, step=step)
    plain, _ = run(False)
    overlapped, sent = run(True)
    assert plain == overlapped
    assert plain == run('next_forward')[0]
    if comm.rank == 0:
        assert min(sent[3:]) > 0


@on_ranks(2)
def test_training_goes_on_bit_for_bit_from_a_state(comm):
    def steps(communicator, model, optimizer, numbers):
        for number in numbers:
            update(optimizer, model, number, comm.rank)
        return [parameter.array.tobytes() for parameter in model.params()]

    def fresh():
        communicator = make(comm, 'fp8', True)
        numpy.random.seed(1)
        model = Plain()
        return communicator, model, wrapped(
            chainer.optimizers.SGD(0.02), communicator).setup(model)
    whole = fresh()
    steps(*whole, range(6))
    state = whole[0].state(whole[1])
    half = [parameter.array.copy() for parameter in whole[1].params()]
    expected = steps(*whole, range(6, 12))
    again = fresh()
    steps(*again, range(1))     # which only broadcasts
    again[0].load_state(state, again[1])
    for parameter, array in zip(again[1].params(), half, strict=True):
        parameter.array[...] = array
    assert steps(*again, range(6, 12)) == expected


@on_ranks(2)
def test_with_less_than_thread_level_multiple_it_says_so_and_goes_on(comm):
    level = MPI.THREAD_SERIALIZED if comm.rank else MPI.THREAD_MULTIPLE
    with mock.patch.object(MPI, 'Query_thread', return_value=level), \
            pytest.warns(RuntimeWarning) if comm.rank == 0 else (
                contextlib.nullcontext()) as warned:
        communicator = make(comm, 'fp8', True)
    if comm.rank == 0:
        assert 'THREAD_MULTIPLE' in str(warned[0].message)
    model = Plain()
    optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator)
    optimizer.setup(model)
    for number in range(4):
        update(optimizer, model, number, comm.rank)
    assert communicator.events.hidden == dict.fromkeys(
        ('encode', 'exchange', 'decode'), 0)


@on_ranks(3)
@pytest.mark.parametrize('name', CODECS)
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
        optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator)
        optimizer.setup(model)
        with counting(communicator) if overlap else (
                contextlib.nullcontext()) as sent:
            for number in range(6):
                update(optimizer, model, number, comm.rank)
        results.append([p.array.tobytes() for p in model.params()])
        if overlap:
            assert sent[-1] > 0
            other = Plain()
            other.cleargrads()
            with pytest.raises(ValueError, match='is for one model'):
                communicator.multi_node_mean_grad(other, zero_fill=True)
        communicator.finalize()
    assert results[:1] * 2 == results[1:]


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
    # What was sent of the dropped update is not in the next one.
    assert max(errors[6:]) < 3 * max(errors[:6])
    communicator.finalize()


@on_ranks(2)
@pytest.mark.parametrize('overlap', OVERLAPS)
def test_models_that_are_no_more_leave_nothing_behind(comm, overlap):
    """Their executors are the next ones', and have no threads of their own."""
    communicator = make(comm, 'fp8', overlap, warmup=0, threads=3)
    reducer = communicator._reducer
    counts, threads = [], []
    for number in range(4):
        model = Plain()
        optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator)
        optimizer.setup(model)
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
def test_models_of_a_rank_that_keeps_them_keep_their_executors(comm):
    communicator = make(comm, 'fp8', True, warmup=0)
    kept = []
    for _ in range(3):
        model = Plain()
        optimizer = wrapped(chainer.optimizers.SGD(0.02), communicator)
        optimizer.setup(model)
        for step in range(5):
            update(optimizer, model, step, comm.rank)
        if comm.rank:
            kept.append(model)
        del model, optimizer
        gc.collect()
    assert len(communicator._reducer._queues) == 3
    communicator.finalize()


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


SCRIPT = '''
import chainer_fp8pipe
import chainer
import chainermn
import numpy
from mpi4py import MPI
from tests.communicators.networks import Plain

rank = MPI.COMM_WORLD.rank
communicator = chainer_fp8pipe.create_communicator(
    'fp8', overlap={overlap!r}, warmup=0, bucket_bytes=300)
model = Plain()
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.1), communicator).setup(model)
for step in range(5):
    optimizer.update(lambda: model.loss(step, rank))
assert communicator._reducer.known(model).ready
{end}
print('left', rank)
'''


@pytest.mark.parametrize('end', [
    '',
    'model.loss(9, rank).backward()',
    'if rank == 0: model.loss(9, rank).backward()',
    'communicator.finalize()',
    'model.loss(9, rank).backward(); communicator.finalize()'])
@pytest.mark.parametrize('overlap', OVERLAPS)
def test_the_end_of_the_program_does_not_hang(tmp_path, end, overlap):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT.format(end=end, overlap=overlap))
    done = run_script(2, script, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('left') == 2


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
