"""What arrives of gradients few of whose elements matter, by codec.

    python benchmarks/heavy_tails.py

Four ranks, gradients of 15 kinds.  The share is what arrives of the mean
gradient, by projection on the mean in float64, <y, x> / <x, x>, and the error
||y - x|| / ||x||, over updates 4 to 24.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.codecs import CODECS
from chainer_fp8pipe.communicators.options import without_warmup

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from environment import describe, parser, ranks_of, start, write_json
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
    comm, found = MPI.COMM_WORLD, []
    exact = create_communicator('float32', comm)
    numpy.random.seed(0)
    centres = numpy.random.normal(0, 1, (10, 16)).astype('f')
    model = chainer.Sequential(L.Linear(16, 32), F.tanh, L.Linear(32, 10))
    rule = chainer.optimizers.MomentumSGD(.05).setup(model)
    for update in range(before + _LAST):
        rng = numpy.random.default_rng([0, update, comm.rank])
        chosen = rng.zipf(1.5, 64) % 10
        x = (centres[chosen] + rng.normal(0, .3, (64, 16))).astype('f')
        model.cleargrads()
        F.softmax_cross_entropy(model(x), chosen.astype('i')).backward()
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


def share_and_error(comm: MPI.Comm, codec: str, gradients: Gradients
                    ) -> tuple[float, float]:
    """What arrives of the ranks' mean; see the module."""
    communicator = create_communicator(     # float16 overflows with sigma 6
        codec, comm, nonfinite='pass', **without_warmup(codec))
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


# --- ranks and tables --------------------------------------------------------

def rank(comm: MPI.Comm, job: dict) -> list[list]:
    """Rows: a name, and what each codec made of it."""
    rows = []
    for name, made in DISTRIBUTIONS.items():
        gradients = made()
        rows.append([name, *(share_and_error(comm, codec, gradients)
                             for codec in job['codecs'])])
        if comm.rank == 0:
            print(f'{name:34}' + ''.join(
                '  {:7.3f} {:6.3f}'.format(*found) for found in rows[-1][1:]),
                flush=True)
    return rows


def main() -> None:
    given = parser(__doc__)
    given.add_argument('--codecs', nargs='+', choices=CODECS, metavar='NAME',
                       help=f'of {", ".join(CODECS)} (default: all but '
                       'float32)', default=['fp8', 'fp8_paper', 'int4',
                                            'float16', 'bfloat16'])
    options = given.parse_args()
    print(describe())
    print(f'{"":34}' + ''.join(f'{name:>16}' for name in options.codecs),
          flush=True)
    rows = ranks_of('heavy_tails.py', {'codecs': options.codecs}, RANKS)
    if options.json:
        write_json(options.json, {'rows': rows})


if __name__ == '__main__':
    start(main, rank)
