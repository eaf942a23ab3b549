"""Test accuracy on the digits with float32 and fp8 gradients, over seeds.

    .venv/bin/python benchmarks/accuracy.py --seeds 10

runs examples/train_digits.py on 4 ranks once per seed.  Within a seed
all communicators start from the same weights and see the same batches.
--distributions and --trainings are about gradients few of whose elements
matter: heavy_tails.py.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

from chainer_fp8pipe.codecs import CODECS

import heavy_tails
from environment import RANKS, describe, mpiexec, parser, write_json

_SCRIPT = os.path.join(os.path.dirname(__file__), os.pardir, 'examples',
                       'train_digits.py')


def parse():
    given = parser(__doc__)
    given.add_argument('--seeds', type=int, default=10,
                       help='how many seeds (default: 10)')
    given.add_argument('--ranks', type=int, default=4,
                       help='MPI ranks (default: 4)')
    given.add_argument('--communicator', nargs='+', metavar='NAME',
                       default=['float32', 'fp8', 'fp8_paper'],
                       help='what to compare; the first is the reference '
                       '(default: float32 fp8 fp8_paper)')
    given.add_argument('--distributions', action='store_true',
                       help='print what arrives of gradients of 15 kinds')
    given.add_argument('--trainings', action='store_true',
                       help='train models of many classes and words')
    return given.parse_args()


def run(seed, options):
    """What train_digits.py reports for one seed, by communicator."""
    found = {}
    for name in options.communicator:
        with tempfile.TemporaryDirectory() as out:
            subprocess.run(
                [*mpiexec(options.ranks), sys.executable, _SCRIPT,
                 '--seed', str(seed), '--out', out, '--communicator', name],
                check=True, stdout=subprocess.DEVNULL,
                env={**os.environ, **RANKS})
            with open(os.path.join(out, 'log')) as file:
                log = json.load(file)
        accuracies = [100 * entry['validation/main/accuracy']
                      for entry in log]
        found[name] = {'final': accuracies[-1], 'best': max(accuracies),
                       'bytes': log[-1]['comm/bytes']}
    return found


def print_table(names, seeds):
    reference = names[0]
    print(f'\n{"communicator":26}{"final test accuracy [%]":>28}'
          f'{"difference":>22}{"best":>9}{"bytes":>10}')
    print(f'{"":26}{"mean +- std":>28}{"mean +- std. error":>22}'
          f'{"mean":>9}{"ratio":>10}')
    for name in names:
        final = [one[name]['final'] for one in seeds]
        differences = [one[name]['final'] - one[reference]['final']
                       for one in seeds]
        error = spread(differences) / len(differences) ** 0.5
        best = statistics.mean(one[name]['best'] for one in seeds)
        ratio = seeds[0][name]['bytes'] / seeds[0][reference]['bytes']
        accuracy = f'{statistics.mean(final):.2f} +- {spread(final):.2f}'
        difference = f'{statistics.mean(differences):+.2f} +- {error:.2f}'
        print(f'{name:26}{accuracy:>28}{difference:>22}{best:9.2f}'
              f'{ratio:10.3f}')


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main():
    options = parse()
    print(describe())
    if options.distributions:
        heavy_tails.print_shares([
            name for name in reversed(CODECS) if not CODECS[name].exact])
    if options.trainings:
        heavy_tails.print_trainings(['float32', 'fp8', 'int4'], options.seeds)
    if options.distributions or options.trainings:
        return
    seeds = []
    for seed in range(options.seeds):
        seeds.append(run(seed, options))
        print(f'seed {seed}: ' + ', '.join(
            f'{name} {one["final"]:.2f}'
            for name, one in seeds[-1].items()), flush=True)
    print_table(options.communicator, seeds)
    if options.json:
        write_json(options.json, {'seeds': seeds})


if __name__ == '__main__':
    main()
