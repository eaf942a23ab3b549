"""Test accuracy against batch size: scaling, warm-up, LARS, grouped BN.

    .venv/bin/python benchmarks/large_batch.py

trains a small convolutional network with batch normalisation on scikit-learn's
digits, for the same number of epochs with every batch, over several seeds.
Within a seed all trainings start from the same weights and see the same
images.  The last way runs on several ranks, so that batch normalisation sees
some 64 samples of a batch, the others on one, where it sees all of it.
"""
from __future__ import annotations

import math
import statistics
import sys

import chainer_fp8pipe
from chainer_fp8pipe.mpi.waiting import wait_until
from chainer_fp8pipe.training.grouped_bn_model import create_grouped_bn_model

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from environment import (
    ONE_THREAD,
    describe,
    parser,
    ranks_of,
    start,
)
from sklearn.datasets import load_digits

#: Chosen for the smallest batch, on other seeds.
BASE_LR, COEFFICIENT, WEIGHT_DECAY = 0.2, 0.02, 1e-4
METHODS = ('linear scaling', '+ warm-up', '+ LARS', '+ grouped BN')
#: Images for training, and those that batch normalisation should see at once.
SAMPLES, NORMALISED = 1200, 64
#: Of every training, and of its warm-up; and ranks at most.
EPOCHS, WARMUP, RANKS = 20, 4, 20


# --- ranks -------------------------------------------------------------------

class Net(chainer.Chain):
    """Three convolutions with batch normalisation, and the image's mean."""

    def __init__(self):
        super().__init__()
        he = chainer.initializers.HeNormal()
        with self.init_scope():
            for number, (inner, outer) in enumerate(
                    [(1, 8), (8, 16), (16, 32)]):
                setattr(self, f'conv{number}', L.Convolution2D(
                    inner, outer, 3, pad=1, nobias=True, initialW=he))
                setattr(self, f'bn{number}', L.BatchNormalization(outer))
            self.last = L.Linear(32, 10)

    def forward(self, x, finetune=False):
        h = F.relu(self.bn0(self.conv0(x), finetune=finetune))
        h = F.relu(self.bn1(self.conv1(h), finetune=finetune))
        h = F.max_pooling_2d(h, 2)
        h = F.relu(self.bn2(self.conv2(h), finetune=finetune))
        return self.last(F.average(h, axis=(2, 3)))


def rank(comm, job):
    """A row for each seed and method of a job."""
    return [{'seed': seed, 'method': method, 'batch': job['batch'],
             **train(comm, seed, METHODS.index(method), job)}
            for seed in range(job['seeds']) for method in job['methods']]


def train(comm, seed, method, job):
    """One training: its updates and, on rank 0, the test accuracy."""
    digits = load_digits()
    images = digits.images[:, None].astype('f4') / 16
    labels, batch = digits.target.astype('i4'), job['batch']
    order = numpy.random.RandomState(seed).permutation(len(labels))
    learn, test = order[:SAMPLES], order[SAMPLES:]
    numpy.random.seed(seed)
    model = Net()
    if comm.size > 1:
        model = create_grouped_bn_model(model, comm, job['group'])
    communicator = chainer_fp8pipe.create_communicator(
        'float32', comm, nonfinite='pass')
    optimizer = chainermn.create_multi_node_optimizer(
        chainer_fp8pipe.large_batch(
            chainer.optimizers.MomentumSGD(), batch, BASE_LR,
            job['base_batch'], WARMUP * (method > 0), EPOCHS,
            lars=method > 1, weight_decay=WEIGHT_DECAY, samples=SAMPLES,
            lars_coefficient=COEFFICIENT if method > 1 else None),
        communicator).setup(model)
    # Spends the update that ChainerMN's optimizer only broadcasts in.
    model.cleargrads()
    optimizer.update()
    random = numpy.random.RandomState(seed + 1000)
    waiting, updates = numpy.zeros(0, int), EPOCHS * SAMPLES // batch
    with numpy.errstate(all='ignore'):      # what diverges is a result, too
        for _ in range(updates):
            while len(waiting) < batch:
                waiting = numpy.append(waiting, random.permutation(learn))
            own, waiting = waiting[:batch][comm.rank::comm.size], (
                waiting[batch:])
            loss = F.softmax_cross_entropy(model(images[own]), labels[own])
            model.cleargrads()
            loss.backward()
            optimizer.update()
        communicator.finalize()
        found = {'updates': updates}
        if comm.rank == 0:
            found['accuracy'] = accuracy(model, images, labels, learn, test)
    wait_until(comm.Ibarrier().Test)
    return found


def accuracy(model, images, labels, learn, test):
    """In per cent, with the statistics of the training set.

    After a few dozen updates running averages are still those of weights
    long gone, which would hide what the weights have learnt.
    """
    alone = Net()
    alone.copyparams(model)
    for link in alone.links():
        if isinstance(link, L.BatchNormalization):
            link.start_finetuning()
    with chainer.no_backprop_mode():
        for first in range(0, len(learn), NORMALISED):
            alone(images[learn[first:first + NORMALISED]], finetune=True)
        with chainer.using_config('train', False):
            found = alone(images[test]).array.argmax(1)
    return 100 * float((found == labels[test]).mean())


# --- jobs and table ----------------------------------------------------------

def parse():
    given = parser(__doc__)
    given.add_argument('--seeds', type=int, default=5,
                       help='how many seeds (default: 5)')
    return given.parse_args()


def layout(batch, most):
    """Ranks and ranks per group, so that a group has some 64 samples."""
    choices = [(ranks, group) for ranks in range(2, most + 1)
               for group in range(1, ranks + 1)
               if batch % ranks == 0 and ranks % group == 0]
    if not choices:
        sys.exit(f'no number of ranks up to {most} divides batch {batch}')
    # Ranks that wait for their group take the cores of those that compute.
    return min(choices, key=lambda choice: (
        abs(math.log(choice[1] * batch / choice[0] / min(NORMALISED, batch))),
        choice[0] > 8, choice[1] == 1, choice[0]))


def main():
    options = parse()
    print(describe(), flush=True)
    batches, rows, groups = [32, 64, 128, 256, 512, SAMPLES], [], []
    for batch in batches:
        ranks, group = layout(batch, RANKS)
        job = {'batch': batch, 'seeds': options.seeds, 'group': group,
               'base_batch': batches[0]}
        for methods, size in (METHODS[:3], 1), (METHODS[3:], ranks):
            rows += ranks_of('large_batch.py', {**job, 'methods': methods},
                             size, env=ONE_THREAD)
        groups.append(f'{batch}: {ranks} ranks, groups of {group}, '
                      f'{group * batch // ranks} samples')
        print(f'  batch {batch}: done', flush=True)
    print('\ntest accuracy [%], mean +- standard deviation\n  batch  updates'
          + ''.join(f'{name:>18}' for name in METHODS))
    for batch in batches:
        mine = [row for row in rows if row['batch'] == batch]
        found = [[row['accuracy'] for row in mine if row['method'] == name]
                 for name in METHODS]
        print(f'{batch:7}{mine[0]["updates"]:9}' + ''.join(
            '{:>18}'.format(f'{statistics.mean(its):.2f} +- '
                            f'{numpy.std(its, ddof=len(its) > 1):.2f}')
            for its in found))
    print('\ngrouped BN on: ' + '; '.join(groups))


if __name__ == '__main__':
    start(main, rank)
