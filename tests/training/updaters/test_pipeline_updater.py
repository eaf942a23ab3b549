from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.pipeline.schedules import bounds
from chainer_fp8pipe.training.updater import PipelineUpdater

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.pipeline.graphs import peak_live
from tests.ranks import on_ranks
from tests.training.updaters.networks import (
    NETWORKS,
    Plain,
    close,
    dataset,
    gathered,
    gradients,
    serial_gradients,
)


def make_updater(comm, network, data, optimizer=None, batch=None, chunks=1,
                 **options):
    model = network().stage(comm, balance='layers', chunks=chunks)
    optimizer = (optimizer or chainer.optimizers.SGD(0.0)).setup(model)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(*data), batch or len(data[0]),
        shuffle=False)
    return PipelineUpdater(iterator, optimizer, comm, **options)


def update(updater):
    """One update; what was reported."""
    reporter, seen = chainer.Reporter(), {}
    reporter.add_observer('main', updater.get_optimizer('main').target)
    with reporter.scope(seen):
        updater.update()
    return {key: float(value) for key, value in seen.items()}


def trains_as_serially(comm, network, micro_batches, ignored, **options):
    data = dataset(13, ignored=ignored)
    for count in micro_batches:
        updater = make_updater(comm, network, data, micro_batches=count,
                               **options)
        seen = update(updater)
        sizes = [end - start for start, end in bounds(13, count)]
        loss, expected = serial_gradients(network, data, sizes)
        assert seen['main/loss'] == pytest.approx(loss, rel=1e-6)
        model = updater.get_optimizer('main').target
        close(gathered(comm, gradients(model)), expected)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(('schedule', 'recompute'), [
    ('gpipe', 'no stage'), ('gpipe', 'every stage'),
    ('1f1b', 'no stage'), ('1f1b', 'every stage'),
    ('1f1b', 'every stage but the last'),
    ('zero_bubble', 'no stage'), ('zero_bubble', 'every stage')])
@pytest.mark.parametrize('network', NETWORKS)
def test_loss_and_gradients_are_those_of_serial_training(
        comm, network, schedule, recompute):
    trains_as_serially(comm, NETWORKS[network], (1, 2, 5, 8), [2, 3, 7],
                       schedule=schedule, recompute=recompute)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize('schedule', ['interleaved', 'zero_bubble'])
@pytest.mark.parametrize('recompute', [False, True])
@pytest.mark.parametrize('chunks', [2, 3])
def test_interleaved_stages_give_the_same(comm, chunks, recompute, schedule):
    if chunks * comm.size > 7:
        chunks = 2
    trains_as_serially(comm, Plain, (1, 3, 4, 8), [2], schedule=schedule,
                       chunks=chunks, recompute=recompute)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize(('network', 'schedule'), [
    ('Plain', 'gpipe'), ('Plain', '1f1b'), ('Plain', 'zero_bubble'),
    ('Skipping', '1f1b'), ('Noisy', '1f1b'), ('Normalised', '1f1b')])
def test_the_bits_do_not_depend_on_the_cut(comm, network, schedule):
    alone = comm.Split(comm.rank, 0)
    data = dataset(12)
    found = []
    for ranks in (alone, comm):
        updater = make_updater(ranks, NETWORKS[network], data,
                               micro_batches=4, schedule=schedule)
        update(updater)
        found.append(gathered(ranks, gradients(
            updater.get_optimizer('main').target)))
    alone.Free()
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert found[0][name].tobytes() == found[1][name].tobytes()


@on_ranks(1, 3)
def test_all_ranks_report_the_same_loss_and_accuracy(comm):
    inputs, labels = dataset(10)
    updater = make_updater(comm, Plain, (inputs, labels), micro_batches=3)
    seen = update(updater)
    assert comm.allgather(seen) == [seen] * comm.size
    whole = Plain()
    with chainer.using_config('train', False):
        outputs = whole(inputs)
    assert seen == pytest.approx({
        'main/loss': float(F.softmax_cross_entropy(outputs, labels).array),
        'main/accuracy': float(F.accuracy(outputs, labels).array)})


@on_ranks(2)
def test_only_the_owner_of_a_layer_has_its_parameters(comm):
    updater = make_updater(comm, Plain, dataset(8), micro_batches=2)
    names = [name for name, _ in updater.get_optimizer(
        'main').target.namedparams()]
    everyone = comm.allgather(names)
    assert not set(everyone[0]) & set(everyone[1])
    assert sorted(everyone[0] + everyone[1]) == sorted(
        name for name, _ in Plain().namedparams())


@on_ranks(1, 2)
def test_a_parameter_that_was_not_used_gets_no_gradient(comm):
    class Unused(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.used, self.unused = L.Linear(8, 4), L.Linear(8, 4)

        def forward(self, x):
            return self.used(x)

    updater = make_updater(comm, lambda: Divisible(Unused(), L.Linear(4, 5)),
                           dataset(6), micro_batches=2)
    optimizer = updater.get_optimizer('main')
    # It makes zeros of what has no gradient.
    optimizer.update = lambda: None
    updater.update()
    if comm.rank == 0:
        layer = dict(optimizer.target.pieces[0])[0]
        assert layer.unused.W.grad is None
        assert layer.used.W.grad is not None


@on_ranks(1, 2, 4)
def test_the_users_random_numbers_are_left_alone(comm):
    updater = make_updater(comm, NETWORKS['Noisy'], dataset(8),
                           micro_batches=2)
    np.random.seed(5)
    expected = np.random.RandomState(5).rand()
    update(updater)
    assert np.random.rand() == expected


@on_ranks(2)
def test_dropout_masks_change_from_update_to_update(comm):
    updater = make_updater(comm, NETWORKS['Noisy'], dataset(8),
                           micro_batches=2)
    assert update(updater)['main/loss'] != update(updater)['main/loss']


@on_ranks(2)
def test_examples_may_be_dictionaries(comm):
    inputs, labels = dataset(8)
    data = [{'x': x, 'label': t} for x, t in zip(
        inputs, labels, strict=True)]
    model = Plain().stage(comm)
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(data, 8, shuffle=False),
        chainer.optimizers.SGD(0).setup(model), comm, label_key='label',
        micro_batches=2)
    expected = make_updater(comm, Plain, (inputs, labels), micro_batches=2)
    assert update(updater) == update(expected)


@on_ranks(2)
def test_ranks_that_read_no_data_need_no_iterator(comm):
    model = Plain().stage(comm)
    data = chainer.datasets.TupleDataset(*dataset(8))
    iterator = None if comm.rank else chainer.iterators.SerialIterator(
        data, 4)
    updater = PipelineUpdater(
        iterator, chainer.optimizers.SGD(0).setup(model), comm,
        micro_batches=2)
    details = []
    for _ in range(3):
        update(updater)
        details.append((updater.epoch, updater.epoch_detail,
                        updater.previous_epoch_detail, updater.is_new_epoch))
    assert comm.allgather(details) == [details] * 2
    assert details == [(0, 0.5, 0.0, False), (1, 1.0, 0.5, True),
                       (1, 1.5, 1.0, False)]


@on_ranks(1, 3)
def test_an_iterator_that_ends_ends_on_all_ranks(comm):
    model = Plain().stage(comm)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(*dataset(8)), 8, repeat=False)
    updater = PipelineUpdater(
        iterator, chainer.optimizers.SGD(0).setup(model), comm,
        micro_batches=2)
    updater.update()
    with pytest.raises(StopIteration):
        updater.update()


class InPlace(Divisible):
    """A first layer of each chunk that would change what was kept."""

    def __init__(self):
        super().__init__(seed=1)
        for width in (8, 8):
            self.append(_doubled)
            self.append(lazy(L.Linear, width, 8))
        self.append(lazy(L.Linear, 8, 5))


def _doubled(h):
    h += h
    return h


@on_ranks(1, 2)
def test_recomputation_starts_from_what_came_in(comm):
    data = dataset(6)
    updater = make_updater(comm, InPlace, data, recompute=True,
                           micro_batches=2)
    update(updater)
    _, expected = serial_gradients(InPlace, data, [3, 3])
    close(gathered(comm, gradients(updater.get_optimizer('main').target)),
          expected)


@on_ranks(2)
def test_fp8_activations_give_nearly_the_same(comm):
    data = dataset(12)
    found = []
    for codec in (None, 'fp8'):
        updater = make_updater(comm, Plain, data, micro_batches=3,
                               activation_codec=codec)
        seen = update(updater)
        found.append((seen['main/loss'], gathered(comm, gradients(
            updater.get_optimizer('main').target))))
    (exact, wanted), (rounded, got) = found
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)
    for name, value in wanted.items():
        error = np.linalg.norm(got[name] - value) / np.linalg.norm(value)
        assert error < 0.3, name


@on_ranks(1, 2, 3)
@pytest.mark.parametrize('schedule', ['gpipe', '1f1b', 'zero_bubble'])
@pytest.mark.parametrize('recompute', [False, True])
def test_running_statistics_are_those_of_the_whole_batch(
        comm, schedule, recompute):
    data = dataset(13)
    updater = make_updater(comm, NETWORKS['Normalised'], data,
                           schedule=schedule, recompute=recompute,
                           micro_batches=4)
    update(updater)
    whole = NETWORKS['Normalised']()
    with chainer.using_config('train', False):
        h, _ = data[0], whole(data[0])      # draws the late parameters
    with chainer.using_config('train', True):
        for layer in list(whole)[:3]:       # to the first normalisation
            h = layer(h)
    averages = {}
    for piece in updater.get_optimizer('main').target.pieces:
        for index, layer in piece:
            if index == 2:
                averages = {'mean': layer.avg_mean, 'var': layer.avg_var}
    found = gathered(comm, averages)
    np.testing.assert_allclose(found['mean'], whole[2].avg_mean, rtol=1e-5,
                               atol=1e-7)
    np.testing.assert_allclose(found['var'], whole[2].avg_var, rtol=1e-5)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('schedule', ['gpipe', '1f1b', 'zero_bubble'])
def test_as_many_micro_batches_are_live_as_the_checker_says(comm, schedule):
    updater = make_updater(comm, Plain, dataset(12), micro_batches=6,
                           schedule=schedule)
    live = updater.pipeline._stage._tapes = Counted()
    update(updater)
    assert live.most == peak_live(updater.schedule)[comm.rank]
    assert not live


class Counted(dict):
    most = 0

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))


@on_ranks(2)
def test_only_the_owner_of_a_layer_has_its_optimizers_state(comm):
    optimizer = chainer.optimizers.Adam()
    updater = make_updater(comm, Plain, dataset(8), optimizer,
                           micro_batches=2)
    update(updater)
    sizes = sum(state.size for parameter in optimizer.target.params()
                for state in parameter.update_rule.state.values()
                if hasattr(state, 'size'))
    own = sum(parameter.size for parameter in optimizer.target.params())
    assert sizes == 2 * own
    assert comm.allreduce(own) == sum(
        parameter.size for parameter in Plain().params())
