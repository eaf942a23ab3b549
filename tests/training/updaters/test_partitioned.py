"""Partitioned models: schedules, values, plans, as serial training goes."""
import json

from chainer_fp8pipe import PipelineUpdater, deferred, partition
from chainer_fp8pipe.chains.cuts import DoesNotFit

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.models.judge import (
    Batches,
    Both,
    batch_of,
    make,
    observed,
    reporting,
    running,
    updater_of,
    values,
)
from tests.ranks import on_ranks


def learning(model):
    return chainer.optimizers.SGD(.1).setup(model)


def both_of(comm, name, *batches, **options):
    return Both(comm, lambda: make(name), *(batches or [batch_of(name)]),
                optimizer=learning, **options)


@on_ranks(2)
def test_a_shared_parameter_is_clipped_as_often_as_links_have_it(comm):
    def clipping(model):
        optimizer = learning(model)
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(.01))
        return optimizer

    Both(comm, lambda: make('shared_parameters'),
         batch_of('shared_parameters'), optimizer=clipping,
         tolerance=1e-5).update(2)


@pytest.mark.parametrize('name', ['encoder', 'conditional'])
@on_ranks(2)
def test_recomputation_changes_nothing(comm, name):
    """Not one bit: masks, running statistics, reports."""
    found = []
    for recompute in (False, True):
        model = make(name)
        updater = updater_of(comm, model, [batch_of(name), batch_of(name, 2)],
                             cut={'recompute': recompute})
        assert any(model.plan.recompute) == recompute
        reports = [observed(model, updater.update) for _ in range(2)]
        found.append((reports, values(comm, model), running(comm, model)))
    plain, again = found
    assert plain[0] == again[0]
    for one, other in zip(plain[1:], again[1:], strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            numpy.testing.assert_array_equal(value, other[key], key)


@on_ranks(2)
def test_micro_batches_count_by_their_labels(comm):
    """Most labels of the first one are ignored."""
    image, label = batch_of('segmentation')
    few, none = label.copy(), label.copy()
    few[:4, :, 1:], none[:4] = -1, -1       # of which none of it counts
    both_of(comm, 'segmentation', (image, few), (image, none)).update()


class Ignoring(chainer.Chain):
    """A loss that ignores labels which the model computes itself."""

    def __init__(self):
        super().__init__(teacher=L.Linear(4, 3),
                         student=L.Linear(4, 3))

    def forward(self, x):
        y = self.teacher(x).array
        label = numpy.where(y.max(axis=1) > .5, y.argmax(axis=1), -1)
        return F.softmax_cross_entropy(
            self.student(x), label.astype('i'), ignore_label=-1)


@on_ranks(2)
def test_labels_that_nobody_knows_before_need_a_weight(comm):
    x = numpy.random.RandomState(0).randn(8, 4).astype('f')
    updater = updater_of(comm, Ignoring(), [(x,)])
    with pytest.raises(ValueError, match='labels that the model computes '
                       'itself.*loss_weight='):
        updater.update()
    updater = updater_of(comm, Ignoring(), [(x,)], loss_weight=len)
    updater.update()


@on_ranks(2)
def test_a_weight_of_ones_own_is_a_function_of_the_batch(comm):
    Both(comm, lambda: make('keyword_tagger'), batch_of('keyword_tagger'),
         weight=lambda few: float(few['mask'].sum()),
         loss_weight=lambda x, t, mask: mask.sum()).update()


@on_ranks(2)
def test_a_batch_of_another_form_is_traced_and_trained(comm):
    """Longer sentences, other trees, fewer samples, one after the other."""
    for name in ('seq2seq', 'tree_lstm'):
        batches = [batch_of(name, seed) for seed in (1, 2)]
        if name == 'seq2seq':
            source, target = batches[1]
            batches.append((source[:6, :4], target[:6, :5]))
        both_of(comm, name, *batches).update()


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


def tied(kind=Tied):
    with deferred(0):
        return reporting(kind())


def words(seed, samples=8):
    random = numpy.random.RandomState(seed)
    return tuple(random.randint(0, 11, samples).astype('i')
                 for _ in range(2))


# --- tied parameters, normalisation, replicas --------------------------------

@on_ranks(2, 3)
def test_copies_of_a_tied_parameter_stay_the_same(comm):
    """With Adam and clipping, whose norm counts them once."""
    # Of 2 samples in a micro-batch the normalisation leaves gradients below
    # it that nearly cancel: against float64, W's are wrong by up to 3e-4,
    # and the bias's by 6e-3, in serial training as well.
    def clipping(model):
        optimizer = chainer.optimizers.Adam(.01).setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(.2))
        return optimizer            # gradients are always longer
    both = Both(comm, tied, *(words(seed, 16) for seed in range(4)),
                micro_batches=4, optimizer=clipping, tolerance=1e-5)
    assert both.model.partition.placement.ties == {
        '/embed/W': (0, comm.size - 1)}
    both.update()           # compares copies bit for bit, too
    assert 'is on stages 0 and' in str(both.model)


# --- state between batches ---------------------------------------------------

@on_ranks(2)
def test_truncated_backpropagation_is_that_of_plain_chainer(comm):
    """State of one batch is where the next one begins, until it is reset."""
    batches = [batch_of('stateful_lm', seed) for seed in range(5)]
    both = Both(comm, lambda: make('stateful_lm'), *batches, micro_batches=1,
                optimizer=learning, tolerance=2e-5)
    for step in range(5):
        if step == 3:
            for one in (both.model, both.plain):
                one.reset_state()
        both.update(1)
        if step == 1:           # evaluation has a state of its own
            first, second = (observed(
                both.model, lambda: both.updater.evaluate(*batches[4])
            )['total'] for _ in range(2))
            assert first != second


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
        data['cuts'] = [[next(
            place for place, group in enumerate(data['order'])
            if '/body/1/W' in group), 0]]
        data['recompute'] = [True, False]
        with open(path, 'w') as file:
            json.dump(data, file)
    # Only the first rank reads it.
    both = Both(comm, tied, words(0), cut={
        'plan': path if comm.rank == 0 else None})
    mine = {name for name, _ in both.model.namedparams()}
    assert ('/body/0/W' in mine) == (comm.rank == 0)
    assert ('/body/1/W' in mine) == ('/bias' in mine) == (comm.rank == 1)
    assert '/embed/W' in mine
    assert both.model.plan.recompute == (True, False)
    both.update()


def vectors(samples):
    return numpy.ones((samples, 4), 'f'),


class Counted(chainer.FunctionNode):
    done = 0

    def forward(self, inputs):
        Counted.done += 1
        return inputs[0] * 1,

    def backward(self, indexes, gradients):
        return gradients


@on_ranks(1, 2)
def test_what_is_recomputed_is_what_the_plan_says(comm):
    for recompute in True, False:
        model = chainer.Sequential(
            L.Linear(4, 4), lambda h: F.mean(Counted().apply((h,))[0]))
        updater = updater_of(comm, model, [vectors(4)] * 2,
                             cut={'recompute': recompute})
        updater.update()        # the first one looks at the loss, too
        Counted.done = 0
        updater.update()
        assert comm.allreduce(Counted.done) == 2 * (1 + recompute)
        for other in ({'micro_batches': 4}, {'schedule': 'gpipe'},
                      {'recompute': not recompute}):
            with pytest.raises(ValueError, match='the model was planned for '
                               f'{next(iter(other))}=.*to partition'):
                PipelineUpdater(Batches(vectors(4)), updater.get_optimizer(
                    'main'), comm, **other)


# --- initial values -------------------------------------------------------

EXAMPLE = numpy.ones((2, 8), 'f'), numpy.zeros(2, 'i')


class Recurrent(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(8, 8)
            self.lstm = L.StatelessLSTM(None, 8)    # shapes in forward
            self.out = L.Linear(8, 4)

    def forward(self, x, t):
        _, h = self.lstm(None, None, F.relu(self.a(x)))
        return F.softmax_cross_entropy(self.out(h), t)


@on_ranks(2)
def test_a_recurrent_link_without_input_size_draws_its_own_weights(comm):
    model = partition(Recurrent(), EXAMPLE, comm, micro_batches=2)
    optimizer = chainer.optimizers.SGD(0.0).setup(model)
    iterator = chainer.iterators.SerialIterator(
        [(EXAMPLE[0][0], numpy.int32(0))] * 4, 4)
    updater = PipelineUpdater(iterator, optimizer, comm)
    for _ in range(2):
        updater.update()
    found = {}
    for several in comm.allgather({
            name: parameter.array for name, parameter
            in model.namedparams()}):
        found.update(several)
    # As the link's own initialisation: normal weights, a forget bias of 1.
    for name in '/lstm/upward/W', '/lstm/lateral/W':
        assert 0.2 < found[name].std() * numpy.sqrt(8) < 2, name
    assert found['/lstm/upward/b'].tolist() == [0, 0, 1, 0] * 8


def looking(x, t):
    return F.sum(x) * float(x.array.max())


@on_ranks(1, 2)
def test_a_model_that_was_not_cut_gets_its_shapes_as_ever(comm):
    for loss, options in (
            (F.softmax_cross_entropy, {'memory': '1 kB'}), (looking, {}),
            (F.softmax_cross_entropy, {'plan': {'format': 0}})):
        model = L.Classifier(chainer.Sequential(
            L.Linear(None, 5), L.BatchNormalization(axis=0), L.Linear(5, 4)),
            loss)
        with pytest.raises((DoesNotFit, ValueError)):
            partition(model, EXAMPLE, comm, micro_batches=2, **options)
        assert sum(not one.is_initialized for one in model.params()) == 3
        model.lossfun = F.softmax_cross_entropy
        assert numpy.isfinite(model(*EXAMPLE).array)
        weights = model.predictor[0].W.array
        assert type(weights) is numpy.ndarray
        assert weights.shape == (5, 8)
        assert numpy.std(weights) > .1
