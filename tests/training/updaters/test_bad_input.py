"""Whatever is wrong on one rank is a clear error on every rank."""
from chainer_fp8pipe.links import Divisible
from chainer_fp8pipe.training.updater import PipelineUpdater

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, dataset
from tests.training.updaters.test_pipeline_updater import make_updater


def failing(comm, match, make, **options):
    """An update of a model of these layers; fails with this everywhere."""
    updater = make_updater(comm, lambda: Divisible(*make()), dataset(8),
                           micro_batches=2, **options)
    with pytest.raises((RuntimeError, ValueError), match=match):
        updater.update()
    return updater


@on_ranks(1, 4)
@pytest.mark.parametrize('schedule', ['1f1b', 'zero_bubble'])
@pytest.mark.parametrize('bad', [0, 1, 2, 3])
def test_a_layer_that_returns_none_is_named_on_every_rank(
        comm, schedule, bad):
    layers = [L.Linear(8, 8), F.relu, F.tanh, L.Linear(8, 5)]
    layers[bad] = _none
    failing(comm, fr'layer {bad} \(_none\), micro-batch 0: TypeError: it '
            'returned None', lambda: layers, schedule=schedule)


def _none(x):
    return None


@on_ranks(2, 3)
def test_shapes_that_do_not_fit_name_the_layer(comm):
    failing(comm, r'layer 1 \(Linear\), micro-batch 0: .*InvalidType',
            lambda: [L.Linear(8, 7), L.Linear(6, 4), L.Linear(4, 5)])


@on_ranks(1, 2)
def test_a_loss_that_is_no_scalar_is_an_error(comm):
    failing(comm, r'the loss, micro-batch 0: .*must return a scalar',
            lambda: [L.Linear(8, 5), F.relu], loss_fun=lambda y, t: y)


class Backward(chainer.FunctionNode):
    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        raise ArithmeticError('on the way back')


def _fails_in_backward(x):
    return Backward().apply((x,))[0]


@on_ranks(1, 3)
@pytest.mark.parametrize('place', [1, 2, 3])
@pytest.mark.parametrize('schedule', ['1f1b', 'zero_bubble'])
def test_a_failing_backward_pass_is_named_on_every_rank(
        comm, place, schedule):
    layers = [L.Linear(8, 8), F.relu, F.tanh, L.Linear(8, 5)]
    layers.insert(place, _fails_in_backward)
    failing(comm, fr'the backward pass of layer {place} '
            r'\(_fails_in_backward\), micro-batch 0: ArithmeticError',
            lambda: layers, schedule=schedule)


@on_ranks(2)
def test_the_rank_that_failed_has_its_own_exception(comm):
    updater = make_updater(comm, lambda: Divisible(L.Linear(8, 5), F.relu),
                           dataset(8), micro_batches=2,
                           loss_fun=lambda y, t: y)
    with pytest.raises(RuntimeError) as caught:
        updater.update()
    names = comm.allgather(type(caught.value).__name__)
    assert names == ['RemoteError', 'LayerError']
    assert comm.rank == 1 or str(caught.value).startswith('rank 1: the loss')


@on_ranks(1, 2)
def test_a_pipeline_that_failed_says_so_when_used_again(comm):
    updater = failing(comm, 'layer 1', lambda: [L.Linear(8, 5), _none])
    with pytest.raises(ValueError, match='failed before.*layer 1.*make a '
                                         'new updater'):
        updater.update()


@on_ranks(2)
def test_a_new_updater_works_after_one_that_failed(comm):
    failing(comm, 'layer 1', lambda: [L.Linear(8, 5), _none])
    make_updater(comm, Plain, dataset(8), micro_batches=2).update()


@on_ranks(1, 2, 4)
def test_a_batch_smaller_than_the_micro_batches_is_an_error(comm):
    updater = make_updater(comm, Plain, dataset(3), micro_batches=4)
    with pytest.raises(ValueError, match='a batch of 3 cannot be cut into 4 '
                                         'micro-batches; lower'):
        updater.update()


@on_ranks(1, 2)
def test_a_data_set_that_fails_is_an_error_on_every_rank(comm):
    class Broken(chainer.dataset.DatasetMixin):
        def __len__(self):
            return 4

        def get_example(self, i):
            raise OSError('unreadable')

    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(Broken(), 4),
        chainer.optimizers.SGD().setup(Plain().stage(comm)), comm,
        micro_batches=2)
    with pytest.raises(ValueError, match='OSError: unreadable'):
        updater.update()


@on_ranks(1, 2)
def test_examples_without_target_are_an_error(comm):
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(dataset(8)[0], 4),
        chainer.optimizers.SGD().setup(Plain().stage(comm)), comm,
        micro_batches=2)
    with pytest.raises(ValueError, match='an example has no target'):
        updater.update()


@on_ranks(2)
@pytest.mark.parametrize('key', ['label', 2, -3])
def test_a_key_that_no_element_has_is_an_error(comm, key):
    updater = make_updater(comm, Plain, dataset(8), micro_batches=2,
                           label_key=key)
    with pytest.raises(ValueError, match='an example has 2 elements, and '
                                         f'none is label_key={key!r}'):
        updater.update()


@on_ranks(2, 3)
@pytest.mark.parametrize(('option', 'values'), [
    ('micro_batches', (2, 3)), ('schedule', ('gpipe', '1f1b')),
    ('seed', (0, 1)), ('recompute', (True, False)),
    ('activation_codec', (None, 'fp8'))])
def test_options_that_differ_between_ranks_are_an_error(
        comm, option, values):
    value = values[comm.rank == comm.size - 1]
    with pytest.raises(ValueError, match=f'{option} is .* on rank 0 but .* '
                       f'on rank {comm.size - 1}'):
        make_updater(comm, Plain, dataset(8), **{option: value})


@on_ranks(2)
def test_a_bad_option_on_one_rank_is_an_error_on_all(comm):
    with pytest.raises(ValueError, match='rank 1: ValueError: micro_batches '
                                         'must be a positive integer'):
        make_updater(comm, Plain, dataset(8), micro_batches=4 * (
            comm.rank == 0))


@on_ranks(1, 2)
@pytest.mark.parametrize(('options', 'said'), [
    ({'schedule': 'zigzag'}, 'gpipe, 1f1b, interleaved, zero_bubble'),
    ({'recompute': 'some'}, "'every stage but the last'"),
    ({'micro_batches': 2.0}, 'must be a positive integer, not 2.0'),
    ({'activation_codec': 'fp4'}, 'fp8'),
    ({'label_key': 1.5}, 'label_key must be'),
    ({'loss_fun': 'mse'}, 'loss_fun must be a function'),
    ({'loss_weight': 2}, 'loss_weight must be a function'),
    ({'metrics': {'loss': F.accuracy}}, "other than 'loss'"),
    ({'metrics': {'right': 'accuracy'}}, 'and functions or pairs'),
    ({'seed': 'one'}, 'seed must be an integer'),
])
def test_an_unknown_option_is_an_error_that_lists_the_known(
        comm, options, said):
    with pytest.raises(ValueError, match=said):
        make_updater(comm, Plain, dataset(8), **options)


@on_ranks(2)
@pytest.mark.parametrize(('cuts', 'said'), [
    ([(0, 7), (0, 7)],
     'rank 1 starts at layer 0 but layer 7 is to follow'),
    ([(0, 4), (4, 6)], 'rank 1 ends at layer 5 but the model has 7 layers'),
    ([(0, 4), (5, 7)],
     'rank 1 starts at layer 5 but layer 4 is to follow'),
])
def test_stages_that_do_not_make_up_the_model_are_an_error(comm, cuts, said):
    model = Plain().divide(*cuts[comm.rank])
    iterator = chainer.iterators.SerialIterator([0], 1)
    with pytest.raises(ValueError, match=said):
        PipelineUpdater(iterator, chainer.optimizers.SGD().setup(model), comm)


@on_ranks(1, 2)
def test_a_model_that_is_not_divisible_is_an_error(comm):
    with pytest.raises(ValueError, match='must be set up with a Divisible'):
        PipelineUpdater(chainer.iterators.SerialIterator([0], 1),
                        chainer.optimizers.SGD().setup(L.Linear(2, 2)), comm)


@on_ranks(4)
def test_more_ranks_than_layers_are_an_error(comm):
    model = Divisible(L.Linear(8, 8), F.relu, L.Linear(8, 5))
    with pytest.raises(ValueError, match=r'4.*3|3.*4'):
        model.stage(comm)


@on_ranks(2)
def test_a_gradient_of_zeros_is_no_error(comm):
    inputs, labels = dataset(8)
    labels[:] = -1          # nothing counts
    updater = make_updater(comm, Plain, (inputs, labels), micro_batches=2)
    updater.update()
    assert all(not np.any(parameter.grad) for parameter
               in updater.get_optimizer('main').target.params())


@on_ranks(2)
@pytest.mark.parametrize(('prepare', 'said'), [
    ('clip', 'the gradient clipping is'),
    ('scale', 'dynamic loss scaling is'),
])
def test_decisions_of_one_stage_alone_are_an_error(comm, prepare, said):
    optimizer = chainer.optimizers.SGD()
    updater = make_updater(comm, Plain, dataset(8), optimizer,
                           micro_batches=2)
    if comm.rank == 0 and prepare == 'clip':
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
    if prepare == 'scale':
        optimizer.loss_scaling(scale=None if comm.rank else 1.0)
    with pytest.raises(ValueError, match=said):
        updater.update()


@on_ranks(1, 2)
def test_an_output_without_samples_cannot_be_predicted(comm):
    updater = make_updater(comm, lambda: Divisible(L.Linear(8, 5), F.sum),
                           dataset(8), micro_batches=2)
    with pytest.raises(RuntimeError, match='the output'):
        updater.predict(dataset(8)[0])


@on_ranks(1, 2)
def test_a_prediction_without_arrays_is_an_error(comm):
    updater = make_updater(comm, Plain, dataset(8), micro_batches=2)
    with pytest.raises(ValueError, match='first stage of each pipeline needs '
                                         'arrays'):
        updater.predict(None)


@on_ranks(1, 2)
def test_shapes_that_numpy_would_broadcast_are_an_error(comm):
    """Losses of (n, 1) outputs and (n,) targets would be of (n, n)."""
    updater = make_updater(
        comm, lambda: Divisible(L.Linear(8, 4), L.Linear(4, 1)),
        (dataset(8)[0], np.ones(8, 'f')), micro_batches=2,
        loss_fun=F.mean_squared_error)
    with pytest.raises(RuntimeError, match='the loss.*InvalidType'):
        updater.update()
