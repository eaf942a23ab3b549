"""Test accuracy on the digits by codec, over seeds.

    .venv/bin/python benchmarks/accuracy.py --seeds 10

runs examples/train_digits.py on 4 ranks once per seed and communicator.
Within a seed all start from the same weights and see the same batches.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

from environment import RANKS, describe, mpiexec, parser

_SCRIPT = os.path.join(os.path.dirname(__file__), os.pardir, 'examples',
                       'train_digits.py')


def parse():
    given = parser(__doc__)
    given.add_argument('--seeds', type=int, default=10,
                       help='how many seeds (default: 10)')
    given.add_argument('--communicator', nargs='+', metavar='NAME',
                       default=['float32', 'fp8', 'int4'],
                       help='what to compare; the first is the reference '
                       '(default: float32 fp8 int4)')
    return given.parse_args()


def run(seed, name):
    """Test accuracy of a training, and the bytes of an update."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            mpiexec(4, sys.executable, _SCRIPT, '--seed', str(seed), '--out',
                    out, '--communicator', name),
            check=True, stdout=subprocess.DEVNULL,
            env={**os.environ, **RANKS})
        with open(os.path.join(out, 'log')) as file:
            last = json.load(file)[-1]
    return 100 * last['validation/main/accuracy'], last['comm/bytes']


def print_table(found):
    (_, reference), *_ = found.items()
    print(f'\n{"communicator":16}{"test accuracy [%]":>20}{"lost":>18}'
          f'{"bytes":>8}\n{"":16}{"mean +- std":>20}'
          f'{"mean +- std. error":>18}{"ratio":>8}')
    for name, runs in found.items():
        lost = [base - own for (own, _), (base, _)
                in zip(runs, reference, strict=True)]
        accuracy = mean_and_spread([own for own, _ in runs])
        print(f'{name:16}{accuracy:>20}'
              f'{mean_and_spread(lost, len(lost) ** 0.5):>18}'
              f'{runs[0][1] / reference[0][1]:8.3f}')


def mean_and_spread(values, divisor=1.0):
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f'{statistics.mean(values):.2f} +- {spread / divisor:.2f}'


def main():
    options = parse()
    print(describe())
    found = {name: [] for name in options.communicator}
    for seed in range(options.seeds):
        for name, runs in found.items():
            runs.append(run(seed, name))
        print(f'seed {seed}: ' + ', '.join(
            f'{name} {runs[-1][0]:.2f}' for name, runs in found.items()),
            flush=True)
    print_table(found)


if __name__ == '__main__':
    main()
