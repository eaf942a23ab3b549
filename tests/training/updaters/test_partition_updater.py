"""Training a partitioned model for some steps, as serial training goes."""
import json

from chainer_fp8pipe import PipelineUpdater, deferred

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.partitions import (
    Batches,
    Both,
    batch_of,
    close,
    make,
    observed,
    reporting,
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


@on_ranks(2)
def test_a_loss_scale_changes_nothing(comm):
    found = []
    for scale in (None, 1024):
        optimizer, model = chainer.optimizers.SGD(.1), tied()
        updater = updater_of(comm, model, [words(0)], optimizer=optimizer)
        if scale:
            optimizer.set_loss_scale(scale)
        losses = [observed(model, updater.update)['total']
                  for _ in range(3)]
        found.append((losses, values(comm, model)))
    numpy.testing.assert_allclose(found[0][0], found[1][0], 1e-6)
    close(found[1][1], found[0][1], 1e-5)


# --- state between batches ---------------------------------------------------

@on_ranks(2)
def test_truncated_backpropagation_is_that_of_plain_chainer(comm):
    """State of one batch is where the next one begins, until it is reset."""
    batches = [batch_of('stateful_lm', seed) for seed in range(5)]
    both = Both(comm, lambda: make('stateful_lm'), *batches, micro_batches=1,
                optimizer=lambda model: chainer.optimizers.SGD(.1).setup(
                    model), tolerance=2e-5)
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
        data['cuts'] = [{'before': '/body/1/W', 'calls_later': 0}]
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
