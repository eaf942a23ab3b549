"""What codecs do to gradients few of whose elements matter.

    python benchmarks/accuracy.py --distributions     # the table of shares
    python benchmarks/accuracy.py --trainings         # many classes and words

Four workers in one process, with the package's codecs (simulated_workers.py).
The share is what arrives of the mean gradient, by projection on float32's,
<y, x> / <x, x>, and the error ||y - x|| / ||x||, over updates 4 to 24.
"""
import functools
import random
import statistics

from chainer_fp8pipe.codecs import CODECS

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from simulated_workers import SimulatedWorkers

WORKERS, _FIRST, _LAST = 4, 4, 24


# --- gradients ---------------------------------------------------------------

def around(draw, size=100_000):
    """Elements whose means are drawn once, with noise half as large."""
    rng = numpy.random.default_rng(0)
    means, weights = 1e-3 * draw(rng, size), rng.normal(0, .05, size)

    def gradients(update, worker):
        noise = numpy.random.default_rng([update, worker]).normal(1, .5, size)
        return weights, means * noise
    return gradients


def zeros_but_few(rng, size):
    return rng.normal(size=size) * (rng.random(size) < 1e-3)


def one_outlier(rng, size):
    values = rng.normal(size=size)
    values[size // 2] = 1e5
    return values


def sure_classifier(classes, width=16, batch=32):
    """Of rows, those matter whose class is in the batch."""
    centres = numpy.random.default_rng(3).normal(size=(classes, width))
    weights = (3 * centres).astype('f')

    def gradients(update, worker):
        rng = numpy.random.default_rng([update, worker])
        chosen = rng.integers(0, classes, batch)
        x = (centres[chosen] + rng.normal(0, .5, (batch, width))).astype('f')
        scores = x @ weights.T
        wrong = numpy.exp(scores - scores.max(1, keepdims=True))
        wrong /= wrong.sum(1, keepdims=True)
        wrong[range(batch), chosen] -= 1
        return weights, wrong.T @ x / batch
    return gradients


def embedding(words=20_000, width=32):
    weights = numpy.random.default_rng(0).normal(size=(words, width))

    def gradients(update, worker):
        rng = numpy.random.default_rng([update, worker])
        rows, found = rng.zipf(1.3, 256) % words, numpy.zeros((words, width))
        numpy.add.at(found, rows, rng.normal(0, 1e-3, (256, width)))
        return weights, found
    return gradients


def scales_of_batch_normalisation(size=256):
    rng = numpy.random.default_rng(0)
    weights, means = rng.normal(1, .1, size), rng.normal(0, 1e-3, size)
    return lambda update, worker: (weights, means + numpy.random.default_rng(
        [update, worker]).normal(0, 1e-3, size))


def of_training(before):
    """Those of a classifier that learns, after so many updates."""
    task = classes(10, 64)
    task.seed(0)
    model = task.model()
    rule = chainer.optimizers.MomentumSGD(.05).setup(model)
    found = []
    for update in range(before + _LAST):
        own = [task.gradients(model, worker, update)
               for worker in range(WORKERS)]
        names, parameters = zip(*sorted(model.namedparams()), strict=True)
        found.append((numpy.concatenate([
            parameter.array.ravel() for parameter in parameters]), [
                numpy.concatenate([one[name].ravel() for name in names])
                for one in own]))
        for name, parameter in zip(names, parameters, strict=True):
            parameter.grad = numpy.mean([one[name] for one in own], 0)
        rule.update()
    return lambda update, worker: (found[before + update][0],
                                   found[before + update][1][worker])


DISTRIBUTIONS = {
    'normal': lambda: around(lambda rng, size: rng.normal(size=size)),
    'Laplace': lambda: around(lambda rng, size: rng.laplace(size=size)),
    'Cauchy': lambda: around(
        lambda rng, size: rng.standard_cauchy(size=size)),
    **{f'log-normal, sigma {sigma}': functools.partial(
        around, lambda rng, size, sigma=sigma: rng.lognormal(
            0, sigma, size) * rng.choice([-1, 1], size))
       for sigma in (1, 3, 6)},
    '99.9 % zeros': lambda: around(zeros_but_few),
    'one outlier of 1e5': lambda: around(one_outlier),
    **{f'sure classifier, {count:,} classes': functools.partial(
        sure_classifier, count) for count in (2000, 20_000, 100_000)},
    'embedding': embedding,
    'batch-norm scales': scales_of_batch_normalisation,
    'first updates of a training': lambda: of_training(0),
    'last updates of a training': lambda: of_training(300)}


def share_and_error(codec, gradients):
    """What arrives of the mean of the workers' gradients; see the module."""
    simulated = workers_of(codec)
    on_true = true_squared = off_squared = 0.0
    for update in range(_LAST):
        made = [gradients(update, worker) for worker in range(WORKERS)]
        own = [numpy.asarray(one, 'f').reshape(-1) for _, one in made]
        weights = numpy.asarray(made[0][0], 'f').reshape(-1)
        mean, = simulated.average(['/W'], [[one] for one in own], [weights],
                                  warm=True)
        true = numpy.mean(own, 0, 'd')
        if update >= _FIRST:
            on_true += mean @ true
            true_squared += true @ true
            off_squared += ((mean - true) ** 2).sum()
    return on_true / true_squared, (off_squared / true_squared) ** .5


def workers_of(codec):
    row = CODECS[codec]
    return SimulatedWorkers(None if row.exact else functools.partial(
        make, row), WORKERS)


def make(row, rank):
    return row.codec(row.usual, rank, WORKERS)


def print_shares(names):
    print(f'{"":34}' + ''.join(f'{name:>16}' for name in names))
    for title, made in DISTRIBUTIONS.items():
        gradients = made()
        print(f'{title:34}' + ''.join(
            '{:9.3f} {:6.3f}'.format(*share_and_error(name, gradients))
            for name in names), flush=True)


# --- trainings ---------------------------------------------------------------

class classes:
    """Points around centres are told apart, MomentumSGD."""

    def __init__(self, count, batch=32, updates=250):
        self.count, self.batch, self.updates = count, batch, updates
        self.rule = lambda: chainer.optimizers.MomentumSGD(.5)

    def seed(self, seed):
        random.seed(seed)
        numpy.random.seed(seed)
        self._seed = seed
        self._centres = numpy.random.normal(0, 1, (self.count, 16)).astype('f')

    def model(self):
        return chainer.Sequential(
            L.Linear(16, 32), F.tanh, L.Linear(32, self.count))

    def batch_of(self, worker, update):
        rng = numpy.random.default_rng([self._seed, update, worker])
        # As many classes as are often seen in so many updates.
        chosen = rng.zipf(1.5, self.batch) % self.count
        x = self._centres[chosen] + rng.normal(0, .3, (self.batch, 16))
        return x.astype('f'), chosen.astype('i')

    def loss(self, model, x, t):
        return F.softmax_cross_entropy(model(x), t)

    def gradients(self, model, worker, update):
        model.cleargrads()
        self.loss(model, *self.batch_of(worker, update)).backward()
        return {name: parameter.grad.copy()
                for name, parameter in model.namedparams()}


class words(classes):
    """The next word from two before it, with Zipf's frequencies; Adam."""

    def __init__(self, count, batch=64, updates=250):
        super().__init__(count, batch, updates)
        self.rule = lambda: chainer.optimizers.Adam(3e-3)

    def model(self):
        return chainer.Sequential(
            L.EmbedID(self.count, 32), F.tanh, L.Linear(64, 32), F.tanh,
            L.Linear(32, self.count))

    def batch_of(self, worker, update):
        rng = numpy.random.default_rng([self._seed, update, worker])
        x = rng.zipf(1.2, (self.batch, 2)) % self.count
        usual = (7 * x[:, 0] + 13 * x[:, 1]) % 1000     # follows these two
        other = rng.zipf(1.2, self.batch) % self.count
        t = numpy.where(rng.random(self.batch) < .7, usual, other)
        return x.astype('i'), t.astype('i')


TRAININGS = {'2,000 classes': lambda: classes(2000),
             '20,000 classes': lambda: classes(20_000),
             'words, 20,000': lambda: words(20_000)}


def train(task, codec, seed):
    """The loss on new samples after a training, 5 % of it in float32."""
    task.seed(seed)
    model = task.model()
    rule, simulated = task.rule().setup(model), workers_of(codec)
    for update in range(task.updates):
        own = [task.gradients(model, worker, update)
               for worker in range(WORKERS)]
        names, parameters = zip(*sorted(model.namedparams()), strict=True)
        means = simulated.average(
            names, [[one[name] for name in names] for one in own],
            [parameter.array for parameter in parameters],
            warm=update >= task.updates // 20)
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean
        rule.update()
    with chainer.no_backprop_mode():
        return statistics.fmean(
            float(task.loss(model, *task.batch_of(worker, 10 ** 6)).array)
            for worker in range(16))


def print_trainings(names, seeds):
    for title, made in TRAININGS.items():
        losses = {name: [train(made(), name, seed) for seed in range(seeds)]
                  for name in names}
        print(title + ': ' + '; '.join(
            f'{name} {statistics.fmean(found):.3f} +- '
            f'{statistics.stdev(found) if seeds > 1 else 0:.3f}'
            for name, found in losses.items()), flush=True)
