"""The runs of ``near_exact.py``: what is trained, and how.

Gradients of each worker are those of its own part of a batch, computed one
after the other on the same weights.
"""
from __future__ import annotations

import functools
import math
import os
import random
import sys
from typing import Any, NamedTuple

from chainer_fp8pipe.codecs import BlockScaled, Fp8Ratio

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.dataset import concat_examples
from simulated_workers import SimulatedWorkers

_EXAMPLES = os.path.join(os.path.dirname(__file__), os.pardir, 'examples')


#: What makes the codec of a rank; None: float32.
CODECS = {
    'float32': None, 'fp8': lambda rank: Fp8Ratio(),
    'int4': lambda rank: BlockScaled()}
#: The same with tensors of one dimension in float32.
EXEMPT = '-1d'
CODECS.update({name + EXEMPT: CODECS[name] for name in ('fp8', 'int4')})
#: Share of the updates in float32, before all others.
_WARM = 0.05


TASKS = 'digits', 'language'
OPTIMIZERS = 'MomentumSGD', 'Adam'
#: Highest learning rates, from which they fall to 0 along half a cosine;
#: those of the examples, where these use the optimizer.
_RATES = {('digits', 'MomentumSGD'): 0.05, ('digits', 'Adam'): 2e-3,
          ('language', 'MomentumSGD'): 1.0, ('language', 'Adam'): 3e-3}
_UPDATES = {('digits', 4): 600, ('digits', 16): 300,
            ('language', 4): 400, ('language', 16): 200}
# Of all workers together.
_BATCH = {('digits', 4): 32, ('digits', 16): 64,
          ('language', 4): 16, ('language', 16): 32}
_TEXTS = 512                                # of the validation
_LENGTH = 32


class Task(NamedTuple):
    """What is trained on what.

    Attributes:
        model: Computes the loss of a batch.
        train: The data set.
        figure: Returns what counts in the end.
        rise: Share of the updates in which the learning rate grows.
    """

    model: chainer.Chain
    train: Any
    figure: Any
    rise: float


def train(task, optimizer, workers, codec, seed):
    """Points of accuracy, or bits per character, of a run."""
    chainer.global_config.type_check = False
    seed_random(seed)
    made = {'digits': digits, 'language': language}[task]()
    updates, rate = _UPDATES[task, workers], _RATES[task, optimizer]
    rule = getattr(chainer.optimizers, optimizer)(rate).setup(made.model)
    rule.add_hook(chainer.optimizer_hooks.GradientClipping(1.0)
                  if task == 'language'
                  else chainer.optimizer_hooks.WeightDecay(1e-4))
    simulated = SimulatedWorkers(CODECS[codec], workers,
                                 2 if codec.endswith(EXEMPT) else 0)
    iterator = chainer.iterators.SerialIterator(
        made.train, _BATCH[task, workers])
    for number in range(updates):
        share = risen_and_fallen(number, updates, made.rise)
        setattr(rule, 'lr' if optimizer == 'MomentumSGD' else 'alpha',
                rate * share)
        average_gradients(made.model, next(iterator), simulated, workers,
                          warm=number >= int(_WARM * updates))
        rule.update()
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        return made.figure()


def seed_random(seed):
    """Seeds all generators that Chainer draws from on the CPU."""
    random.seed(seed)
    numpy.random.seed(seed)


def risen_and_fallen(done, updates, rise):
    """Share of the highest learning rate."""
    up = rise * updates
    return min(1.0, (done + 1) / up) if done < up else (
        1 + math.cos(math.pi * (done - up) / (updates - up))) / 2


def average_gradients(model, batch, simulated, workers, warm):
    """Leaves the mean of all workers' gradients in the model."""
    names, parameters = zip(*sorted(model.namedparams()), strict=True)
    gradients = []
    size = len(batch) // workers
    for worker in range(workers):
        model.cleargrads()
        model(*concat_examples(batch[worker * size:][:size])).backward()
        gradients.append([parameter.grad for parameter in parameters])
    means = simulated.average(
        names, gradients, [one.array for one in parameters], warm=warm)
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean


def digits():
    """The example's network; the figure is test accuracy in points."""
    train_set, (images, labels) = _digits()
    model = L.Classifier(_example('train_digits').ConvNet())

    def figure():
        return 100 * float(F.accuracy(model.predictor(images), labels).array)
    return Task(model, train_set, figure, 0.0)


def language():
    """The example's decoder on bytes; the figure is bits per character."""
    train_set, (texts, following) = _text()
    model = _example('train_language').Decoder(
        256, _LENGTH, units=64, layers=2, heads=4)

    def figure():
        return float(model(texts, following).array) / math.log(2)
    return Task(model, train_set, figure, 0.1)


@functools.cache
def _digits():
    train_set, test_set = _example('common').digits()
    return train_set, concat_examples(test_set[:])


@functools.cache
def _text():
    train_set, test_set = _example('common').texts(1_000_000, _LENGTH)
    return train_set, concat_examples(test_set[:_TEXTS])


@functools.cache
def _example(name):
    """A module of the examples."""
    sys.path.insert(0, _EXAMPLES)
    try:
        return __import__(name)
    finally:
        sys.path.remove(_EXAMPLES)
