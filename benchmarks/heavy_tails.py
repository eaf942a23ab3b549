"""What arrives of gradients few of whose elements matter, by codec.

    python benchmarks/heavy_tails.py                # gradients of 15 kinds
    python benchmarks/heavy_tails.py --seeds 5      # trainings of many classes

Four ranks.  The share is what arrives of the mean gradient, by projection on
the mean in float64, <y, x> / <x, x>, and the error ||y - x|| / ||x||, over
updates 4 to 24.  --seeds trains models with many classes and words, whose
frequencies are Zipf's, and prints the loss on new samples.
"""
from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.codecs import CODECS

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from environment import describe, parser, ranks_of, start
from mpi4py import MPI

_FIRST, _LAST, RANKS = 4, 24, 4
#: Weights and gradient of an update on a rank.
Gradients = Callable[[int, int], tuple[numpy.ndarray, numpy.ndarray]]


# --- gradients ---------------------------------------------------------------

def around(draw: Callable, size: int = 100_000) -> Gradients:
    """Elements whose means are drawn once, with noise half as large."""
    rng = numpy.random.default_rng(0)
    means, weights = 1e-3 * draw(rng, size), rng.normal(0, .05, size)
    return lambda update, rank: (weights, means * numpy.random.default_rng(
        [update, rank]).normal(1, .5, size))


def one_outlier(rng: numpy.random.Generator, size: int) -> numpy.ndarray:
    values = rng.normal(size=size)
    values[size // 2] = 1e5
    return values


def sure_classifier(classes: int, width: int = 16, batch: int = 32
                    ) -> Gradients:
    """Of rows, those matter whose class is in the batch."""
    centres = numpy.random.default_rng(3).normal(size=(classes, width))
    weights = (3 * centres).astype('f')

    def gradients(update: int, rank: int) -> tuple:
        rng = numpy.random.default_rng([update, rank])
        chosen = rng.integers(0, classes, batch)
        x = (centres[chosen] + rng.normal(0, .5, (batch, width))).astype('f')
        scores = x @ weights.T
        wrong = numpy.exp(scores - scores.max(1, keepdims=True))
        wrong /= wrong.sum(1, keepdims=True)
        wrong[range(batch), chosen] -= 1
        return weights, wrong.T @ x / batch
    return gradients


def embedding(words: int = 20_000, width: int = 32) -> Gradients:
    weights = numpy.random.default_rng(0).normal(size=(words, width))

    def gradients(update: int, rank: int) -> tuple:
        rng = numpy.random.default_rng([update, rank])
        rows, found = rng.zipf(1.3, 256) % words, numpy.zeros((words, width))
        numpy.add.at(found, rows, rng.normal(0, 1e-3, (256, width)))
        return weights, found
    return gradients


def batch_norm_scales(size: int = 256) -> Gradients:
    rng = numpy.random.default_rng(0)
    weights, means = rng.normal(1, .1, size), rng.normal(0, 1e-3, size)
    return lambda update, rank: (weights, means + numpy.random.default_rng(
        [update, rank]).normal(0, 1e-3, size))


def of_training(before: int) -> Gradients:
    """Those of a classifier that learns, after so many updates."""
    task, comm = Classes(10, batch=64, rate=.05), MPI.COMM_WORLD
    exact, found = create_communicator('float32', comm), []
    task.seed(0)
    model = task.model()
    rule = task.rule().setup(model)
    for update in range(before + _LAST):
        task.backward(model, update, comm.rank)
        arrays = [one for _, one in sorted(model.namedparams())]
        found.append(tuple(
            numpy.concatenate([getattr(one, what).ravel() for one in arrays])
            for what in ('array', 'grad')))
        exact.multi_node_mean_grad(model)
        rule.update()
    exact.finalize()
    return lambda update, rank: found[before + update]


DISTRIBUTIONS: dict[str, Callable[[], Gradients]] = {
    'normal': lambda: around(lambda rng, size: rng.normal(size=size)),
    'Laplace': lambda: around(lambda rng, size: rng.laplace(size=size)),
    'Cauchy': lambda: around(lambda rng, size: rng.standard_cauchy(size)),
    **{f'log-normal, sigma {sigma}': functools.partial(
        around, lambda rng, size, sigma=sigma: rng.lognormal(
            0, sigma, size) * rng.choice([-1, 1], size))
       for sigma in (1, 3, 6)},
    '99.9 % zeros': lambda: around(
        lambda rng, size: rng.normal(size=size) * (rng.random(size) < 1e-3)),
    'one outlier of 1e5': lambda: around(one_outlier),
    **{f'sure classifier, {count:,} classes': functools.partial(
        sure_classifier, count) for count in (2000, 20_000, 100_000)},
    'embedding': embedding,
    'batch-norm scales': batch_norm_scales,
    'first updates of a training': lambda: of_training(0),
    'last updates of a training': lambda: of_training(300)}


def make(comm: MPI.Comm, codec: str, warmup: int) -> Any:
    # float16 overflows with a log-normal of sigma 6.
    return create_communicator(codec, comm, nonfinite='pass', **(
        {'warmup': warmup} if 'warmup' in CODECS[codec].options else {}))


def share_and_error(comm: MPI.Comm, codec: str, gradients: Gradients
                    ) -> tuple[float, float]:
    """What arrives of the ranks' mean; see the module."""
    communicator = make(comm, codec, 0)
    model = chainer.Chain()
    with model.init_scope():
        model.W = chainer.Parameter(gradients(0, comm.rank)[0].astype('f'))
    on_true = true_squared = off_squared = 0.0
    for update in range(_LAST):
        weights, own = gradients(update, comm.rank)
        model.W.array[...], model.W.grad = weights, own.astype('f')
        true = numpy.empty(own.size)
        comm.Allreduce(own.astype('f').astype('d').ravel() / comm.size, true)
        communicator.multi_node_mean_grad(model)
        if update >= _FIRST:
            mean = model.W.grad.ravel().astype('d')
            on_true += mean @ true
            true_squared += true @ true
            off_squared += ((mean - true) ** 2).sum()
    communicator.finalize()
    return on_true / true_squared, (off_squared / true_squared) ** .5


# --- trainings ---------------------------------------------------------------

class Classes:
    """Points around centres are told apart, MomentumSGD."""

    def __init__(self, count: int, batch: int = 32, updates: int = 250,
                 rate: float = .5) -> None:
        self.count, self.batch, self.updates = count, batch, updates
        self.rule = lambda: chainer.optimizers.MomentumSGD(rate)

    def seed(self, seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed)
        self._seed = seed
        self._centres = numpy.random.normal(0, 1, (self.count, 16)).astype('f')

    def model(self) -> chainer.Chain:
        return chainer.Sequential(
            L.Linear(16, 32), F.tanh, L.Linear(32, self.count))

    def samples(self, update: int, rank: int) -> tuple:
        rng = numpy.random.default_rng([self._seed, update, rank])
        # As many classes as are often seen in so many updates.
        chosen = rng.zipf(1.5, self.batch) % self.count
        x = self._centres[chosen] + rng.normal(0, .3, (self.batch, 16))
        return x.astype('f'), chosen.astype('i')

    def loss(self, model: chainer.Chain, update: int, rank: int
             ) -> chainer.Variable:
        x, t = self.samples(update, rank)
        return F.softmax_cross_entropy(model(x), t)

    def backward(self, model: chainer.Chain, update: int, rank: int) -> None:
        model.cleargrads()
        self.loss(model, update, rank).backward()


class Words(Classes):
    """The next word from two before it, Adam."""

    def __init__(self, count: int) -> None:
        super().__init__(count, batch=64)
        self.rule = lambda: chainer.optimizers.Adam(3e-3)

    def model(self) -> chainer.Chain:
        return chainer.Sequential(
            L.EmbedID(self.count, 32), F.tanh, L.Linear(64, 32), F.tanh,
            L.Linear(32, self.count))

    def samples(self, update: int, rank: int) -> tuple:
        rng = numpy.random.default_rng([self._seed, update, rank])
        x = rng.zipf(1.2, (self.batch, 2)) % self.count
        usual = (7 * x[:, 0] + 13 * x[:, 1]) % 1000     # follows these two
        other = rng.zipf(1.2, self.batch) % self.count
        t = numpy.where(rng.random(self.batch) < .7, usual, other)
        return x.astype('i'), t.astype('i')


TRAININGS: dict[str, Callable[[], Classes]] = {
    '2,000 classes': lambda: Classes(2000),
    '20,000 classes': lambda: Classes(20_000),
    '20,000 words': lambda: Words(20_000)}


def train(comm: MPI.Comm, task: Classes, codec: str, seed: int) -> float:
    """The loss on new samples after a training, 5 % of it in float32."""
    task.seed(seed)
    communicator = make(comm, codec, task.updates // 20)
    model = task.model()
    rule = task.rule().setup(model)
    for update in range(task.updates):
        task.backward(model, update, comm.rank)
        communicator.multi_node_mean_grad(model)
        rule.update()
    communicator.finalize()
    with chainer.no_backprop_mode():
        return statistics.fmean(float(task.loss(model, 10 ** 6, one).array)
                                for one in range(16))


# --- ranks and tables --------------------------------------------------------

def rank(comm: MPI.Comm, job: dict) -> list[list]:
    """Rows: a name, and what each codec made of it."""
    codecs, seeds, rows = job['codecs'], job['seeds'], []
    for name, made in (TRAININGS if seeds else DISTRIBUTIONS).items():
        subject = made()
        rows.append([name, *([
            train(comm, subject, codec, seed) for seed in range(seeds)
        ] if seeds else share_and_error(comm, codec, subject)
            for codec in codecs)])
        if comm.rank == 0:
            print(line(rows[-1], bool(seeds)), flush=True)
    return rows


def line(row: Sequence, trained: bool) -> str:
    def said(found: Sequence[float]) -> str:
        if not trained:
            return '{:7.3f} {:6.3f}'.format(*found)
        return f'{statistics.fmean(found):7.3f} +- ' + (
            f'{statistics.stdev(found):.3f}' if len(found) > 1 else '?')
    return f'{row[0]:34}' + ''.join(f'{said(one):>16}' for one in row[1:])


def main() -> None:
    given = parser(__doc__)
    given.add_argument('--seeds', type=int, default=0, metavar='N',
                       help='train from so many seeds')
    options = given.parse_args()
    codecs = (['float32', 'fp8', 'int4'] if options.seeds else
              ['fp8', 'fp8_paper', 'int4', 'float16', 'bfloat16'])
    print(describe())
    print(f'{"":34}' + ''.join(f'{name:>16}' for name in codecs), flush=True)
    ranks_of('heavy_tails.py', {'codecs': codecs, 'seeds': options.seeds},
             RANKS)


if __name__ == '__main__':
    start(main, rank)
