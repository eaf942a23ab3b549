"""Test accuracy against batch size: scaling, warm-up, LARS, grouped BN.

    .venv/bin/python benchmarks/large_batch.py

trains a small convolutional network with batch normalisation on scikit-learn's
digits, for the same number of epochs with every batch, over several seeds.
Within a seed all trainings start from the same weights and see the same
images.  The last way runs on several ranks, so that batch normalisation sees
some 64 samples of a batch, the others on one, where it sees all of it.
"""
from __future__ import annotations

import concurrent.futures
import math
import os
import statistics
import sys
import tempfile

import numpy
from environment import (
    ONE_THREAD,
    describe,
    parser,
    ranks_of,
    write_json,
)
from large_batch_ranks import NORMALISED

_HERE = os.path.dirname(os.path.abspath(__file__))
#: Chosen for the smallest batch, on other seeds.
BASE_LR, COEFFICIENT, WEIGHT_DECAY = 0.2, 0.02, 1e-4
METHODS = ('linear scaling', '+ warm-up', '+ LARS', '+ grouped BN')


def parse():
    given = parser(__doc__)
    given.add_argument('--batches', type=int, nargs='+', metavar='N',
                       help='of all ranks together (default: 32 to 512, and '
                       'the whole training set of the digits)')
    given.add_argument('--epochs', type=int, default=20,
                       help='of every training (default: 20)')
    given.add_argument('--warmup', type=float, default=4,
                       help='epochs, where there is one (default: 4)')
    given.add_argument('--seeds', type=int, default=5,
                       help='how many seeds (default: 5)')
    given.add_argument('--ranks', type=int, default=20,
                       help='MPI ranks, at most (default: 20)')
    given.add_argument('--jobs', type=int, default=2,
                       help='jobs of one rank at a time (default: 2)')
    return given.parse_args()


def load():
    """Images, labels, and how many of them are for training."""
    from sklearn.datasets import load_digits
    digits = load_digits()
    return (digits.images[:, None].astype('f4') / 16,
            digits.target.astype('i4'), 1200)


def layout(batch, most):
    """Ranks and ranks per group, so that a group has some 64 samples."""
    choices = [(ranks, group) for ranks in range(2, most + 1)
               for group in range(1, ranks + 1)
               if batch % ranks == 0 and ranks % group == 0]
    if not choices:
        sys.exit(f'no number of ranks up to {most} divides batch {batch}')
    wanted = min(NORMALISED, batch)
    # Ranks that wait for their group take the cores of those that compute.
    return min(choices, key=lambda choice: (
        abs(math.log(choice[1] * batch / choice[0] / wanted)),
        choice[0] > 8, choice[1] == 1, choice[0]))


def method(name, warmup=0.0):
    """What a way of training needs to know; see large_batch_ranks.py."""
    lars = name in METHODS[2:]
    return {'name': name, 'lars': lars, 'base_lr': BASE_LR,
            'weight_decay': WEIGHT_DECAY,
            'coefficient': COEFFICIENT if lars else None,
            'warmup_epochs': warmup}


def run(job, ranks):
    """The rows of one mpiexec job."""
    return ranks_of('large_batch_ranks.py', job, ranks, env=ONE_THREAD)


def study(options, common, batches):
    """All rows, of as many mpiexec jobs as batches and layouts need."""
    warm = [method(name, warmup=options.warmup) for name in METHODS[1:]]
    alone, together = [], []
    for batch in batches:
        ranks, group = layout(batch, options.ranks)
        one = {**common, 'batch': batch, 'seeds': list(range(options.seeds))}
        alone.append({**one, 'methods': [method(METHODS[0]), *warm[:2]]})
        together.append(({**one, 'methods': warm[2:], 'group': group}, ranks))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda job: run(job, 1), alone))
    print('  on one rank: done', flush=True)
    for job, ranks in together:
        found.append(run(job, ranks))
        print(f'  batch {job["batch"]}, {ranks} ranks: done', flush=True)
    return [row for rows in found for row in rows]


def text_of(values, digits=2):
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f'{statistics.mean(values):.{digits}f} +- {spread:.{digits}f}'


def values_of(rows, batch, name, what):
    return [row[what] for row in rows
            if row['batch'] == batch and row['method'] == name]


def print_tables(rows, batches, options):
    for what, digits, title in (
            ('accuracy', 2, 'test accuracy [%], mean +- standard deviation'),
            ('running', 2, "the same with batch normalisation's running "
             'averages')):
        print(f'\n{title}\n{"batch":>7}{"updates":>9}'
              + ''.join(f'{name:>18}' for name in METHODS))
        for batch in batches:
            updates = values_of(rows, batch, METHODS[0], 'updates')[0]
            print(f'{batch:7}{updates:9}' + ''.join(
                f'{text_of(values_of(rows, batch, name, what), digits):>18}'
                for name in METHODS))
    print('\ngrouped BN on: ' + '; '.join(
        f'{batch}: {ranks} ranks, groups of {group}, '
        f'{group * batch // ranks} samples' for batch, (ranks, group) in (
            (batch, layout(batch, options.ranks)) for batch in batches)))


def main():
    options = parse()
    print(describe(), flush=True)
    images, labels, samples = load()
    batches = sorted(options.batches or [32, 64, 128, 256, 512, samples])
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, 'data.npz')
        numpy.savez(data, images=images, labels=labels)
        common = {'data': data, 'samples': samples, 'group': 1,
                  'epochs': options.epochs, 'base_batch': batches[0]}
        rows = study(options, common, batches)
    print_tables(rows, batches, options)
    if options.json:
        write_json(options.json, {'rows': rows})


if __name__ == '__main__':
    main()
