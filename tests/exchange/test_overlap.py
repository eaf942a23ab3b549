"""With overlap, results are those without, bit for bit."""
import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.trainers import make_trainer, weights

from ..communicators.helpers import with_aggregators
from ..communicators.networks import NETWORKS, Plain
from .jobs import (
    CODECS,
    accumulated,
    counting,
    found_by_grad,
    kept,
    make,
    optimizer_of,
    same,
    update,
    values,
    wrapped,
)


@on_ranks(3)
@pytest.mark.parametrize(('network', 'name'), [
    *((network, 'fp8') for network in NETWORKS),
    ('Plain', 'float32'), ('Shared', 'float16'), ('Mixed', 'int4')])
def test_results_are_those_without_overlap(comm, network, name):
    sent = same(comm, NETWORKS[network], name=name)
    assert sent[:2] == [0, 0], sent
    if network not in ('Unused', 'Changing', 'Lazy', 'Forgetful'):
        assert set(sent[2:]) == {max(sent)}, sent
    if network not in ('Changing', 'Forgetful'):
        assert max(sent) > 0


@on_ranks(4)
@pytest.mark.parametrize('options', [
    {'algorithm': 'ring', 'partial_sums': 'float32'},
    {'algorithm': 'torus2d', 'shape': (2, 2), 'period': 1},
    {'algorithm': 'ring', 'bucket_bytes': 0},
    {'bucket_bytes': 1 << 20, 'warmup': 0},
    {'ranks_per_node': 2, 'two_level': 'yes'}])
def test_so_they_are_for_every_algorithm(comm, options):
    assert same(comm, Plain, **options)[-1] > 0


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
@pytest.mark.parametrize(('network', 'options'), [
    (Plain, {'scaling': {'scale': 64.0}}),
    (Plain, {'scaling': {'scale': 64.0}, 'name': 'int4'}),
    (Plain, {'scaling': {'interval': 2, 'scale': None}}),
    (Exploding, {'scaling': {}}),
    (Plain, {'step': accumulated}), (Plain, {'step': kept}),
    # The other rank begins early, and does not wait for this one.
    (Plain, {'step': found_by_grad}),
    (Plain, {'optimizer': 'adam'}), (Plain, {'optimizer': 'clipped'}),
    (Plain, {'optimizer': 'lars'}), (Alike, {}), (Empty, {})])
def test_so_they_are_for_every_way_to_train(comm, network, options):
    with numpy.errstate(invalid='ignore'):
        sent = same(comm, network, **options)
    if network is not Exploding and not (
            comm.rank and options.get('step') is found_by_grad):
        assert min(sent[3:]) > 0


@on_ranks(2)
@pytest.mark.parametrize('zero_fill', [True, False])
def test_unused_parameters_do_not_hold_up_the_others(comm, zero_fill):
    sent = same(comm, NETWORKS['Unused'], zero_fill=zero_fill,
                bucket_bytes=100)       # each alone
    assert set(sent[2:]) == {4}


@on_ranks(2)
@pytest.mark.parametrize(('unchain', 'critic', 'same_communicator'), [
    (True, 1, True), (False, 3, True), (True, 3, False)])
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
    assert min(max(counts) for counts in sent) > 0


@on_ranks(2)
def test_a_trainer_with_a_standard_updater_needs_no_change(comm, tmp_path):
    found = []
    for overlap in False, True:
        trainer, communicator = make_trainer(
            comm, tmp_path, overlap=overlap, bucket_bytes=200)
        with counting(communicator) as sent:
            trainer.run()
        found.append(weights(trainer))
        assert not overlap or sent[-1] > 0
    assert found[0] == found[1]


@on_ranks(2)
def test_training_goes_on_bit_for_bit_from_a_state(comm, tmp_path):
    def fresh():
        communicator = make(comm, 'fp8', True)
        numpy.random.seed(1)
        model = Plain()
        return communicator, model, optimizer_of('adam', model, communicator)

    def steps(made, numbers):
        for number in numbers:
            update(made[2], made[1], number, comm.rank)
    whole = fresh()
    steps(whole, range(6))
    state = whole[0].state(whole[1])
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
    for overlap in False, True:
        communicator = with_aggregators(
            comm, name, **CODECS[name], overlap=overlap, bucket_bytes=300,
            frame_bytes=64)
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
    assert results[:1] == results[1:]


@on_ranks(1, 2)
@pytest.mark.parametrize('overlap', [False, True])
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
    communicator = make(comm, 'float32', True)
    model = Plain()
    communicator.bcast_data(model)
    for number in range(6):
        model.cleargrads()
        model.loss(number, comm.rank).backward()
        communicator.multi_node_mean_grad(model)
        mean = {name: parameter.grad.copy()
                for name, parameter in model.namedparams()}
        for rank in range(comm.size):
            model.cleargrads()
            model.loss(number, rank).backward()
            for name, parameter in model.namedparams():
                mean[name] -= parameter.grad / comm.size
        assert all(abs(error).max() < 1e-5 for error in mean.values())
    communicator.finalize()
