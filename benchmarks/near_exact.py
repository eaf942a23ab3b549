"""What fewer bits cost: accuracy with each codec beside float32, over seeds.

    .venv/bin/python benchmarks/near_exact.py --results runs.jsonl

Two tasks of the examples: scikit-learn's digits (train_digits.py; test
accuracy), and the sources of Python's standard library, byte by byte (the
decoder of train_language.py with 117,000 parameters; validation, bits per
character).  MomentumSGD and Adam; 4 and 16 workers, which one process
simulates with the package's codecs.  Within a seed all codecs start from the
same weights and see the same batches.  5 % of the updates are a warm-up in
float32, the default of the examples.

The criterion, written down before the first run: a codec is *near-exact* for
a task, an optimizer and a number of workers if it loses, in the mean over all
seeds of the difference to float32 with the same seed, at most

    0.2 points of test accuracy           (digits)
    0.3 % of float32's bits per character (language)

and this is *shown* if the whole 95 % confidence interval of that mean
(Student's t) is on this side, *not shown* if the limit is inside of it, and
*refuted* if the whole of it is beyond.

fp8-1d and int4-1d send tensors of one dimension (biases, scales of norms) in
float32.  The criterion for them, also written down before their first run: on
the digits, and on language with Adam, with the first 6 seeds, the difference
between int4 and int4-1d is taken in units of the case's limit.  int4-1d
becomes the default if the means over the cases, one for each seed, have a mean
of 0.1 at least and a 95 % confidence interval above 0, and no case has an
interval below 0.  The same holds for fp8.

Runs are added to the file as they end: the same command goes on where an
earlier one stopped, and --table prints what is there.
"""
import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time

from environment import RANKS, describe
from near_exact_runs import CODECS, EXEMPT, OPTIMIZERS, TASKS, train

#: What may be lost, of the figure itself or as a share of float32's.
LIMITS = {'digits': (0.2, 'points'), 'language': (0.3, '%')}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, default=10,
                        help='how many seeds (default: 10)')
    parser.add_argument('--workers', type=int, nargs='+', default=[4, 16],
                        help='how many are simulated (default: 4 16)')
    for name, known in (('task', TASKS), ('optimizer', OPTIMIZERS),
                        ('codec', CODECS)):
        parser.add_argument(f'--{name}', nargs='+', choices=list(known),
                            default=list(known), help='some of them')
    parser.add_argument('--results', metavar='FILE', required=True,
                        help='where runs are kept, one a line')
    parser.add_argument('--jobs', type=int, default=os.cpu_count(),
                        help='processes (default: one per core)')
    parser.add_argument('--table', action='store_true',
                        help='train nothing, print what FILE has')
    return parser.parse_args()


def read(path):
    """What runs came to, by task, optimizer, workers, codec and seed."""
    found = {}
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                run = json.loads(line)
                found[tuple(run['key'])] = run['figure']
    return found


def run_all(options, cases):
    """Adds to the file what is missing, seed by seed.

    Args:
        options: Of the command line.
        cases: Task, optimizer and workers of each.
    """
    done = read(options.results)
    missing = [(*case, codec, seed) for seed in range(options.seeds)
               for case in cases for codec in options.codec
               if (*case, codec, seed) not in done]
    start = time.monotonic()
    os.environ.update(RANKS)        # for processes that import NumPy anew
    with multiprocessing.get_context('spawn').Pool(
            options.jobs) as pool, open(options.results, 'a') as file:
        for number, (case, figure) in enumerate(
                pool.imap_unordered(_train, missing), 1):
            print(json.dumps({'key': case, 'figure': figure}), file=file,
                  flush=True)
            left = (time.monotonic() - start) / number * (
                len(missing) - number)
            print(f'{number} of {len(missing)}: {" ".join(map(str, case))}: '
                  f'{figure:.4f}, {left / 60:.0f} min left', flush=True)


def _train(case):
    return case, train(*case)


def differences(runs, case, codec, other='float32'):
    """What is lost with each seed: points, or per cent of the other's bits."""
    lost = []
    for (*where, name, seed), figure in sorted(runs.items()):
        exact = runs.get((*case, other, seed))
        if tuple(where) == case and name == codec and exact is not None:
            lost.append(100 * (figure / exact - 1) if case[0] == 'language'
                        else exact - figure)
    return lost


def interval(values):
    """Mean, and half of the 95 % confidence interval (Student's t)."""
    from scipy.stats import t
    error = statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), error * float(
        t.ppf(0.975, len(values) - 1))


def verdict(mean, half, limit):
    """By the criterion above."""
    if mean + half <= limit:
        return 'shown'
    if mean - half > limit:
        return 'REFUTED'
    return 'not shown'


def print_table(runs, codecs=tuple(CODECS), bytes_of=None):
    """A line for each case.

    Args:
        runs: As :func:`read` returns them.
        codecs: Those to show, in order.
        bytes_of: Of an element and update, for a codec, task and workers.
    """
    print(f'\n{"task":12}{"optimizer":13}{"workers":>7}  {"codec":12}'
          f'{"seeds":>5}{"figure":>10}{"lost, 95 % interval":>24}'
          f'{"limit":>13}  near-exact'
          + ('   bytes' if bytes_of else ''))
    for case in sorted({key[:3] for key in runs}):
        for codec in codecs:
            figures = [figure for key, figure in runs.items()
                       if key[:4] == (*case, codec)]
            if figures:
                line = line_of(runs, case, codec, figures)
                print(f'{line:110}{bytes_of(codec, case[0], case[2]):.3f}'
                      if bytes_of else line)


def print_gains(runs, codec):
    """What tensors of one dimension in float32 gain, in units of limits."""
    gains = {}
    for case in sorted({key[:3] for key in runs}):
        found = differences(runs, case, codec, codec + EXEMPT)
        if len(found) > 1:
            gains[' '.join(map(str, case))] = [
                gain / LIMITS[case[0]][0] for gain in found]
    if gains:
        gains['all of these'] = [*map(statistics.mean, zip(
            *gains.values(), strict=False))]
    for case, found in gains.items():
        print('{}{} gains {:+.2f} +- {:.2f} limits: {}'.format(
            codec, EXEMPT, *interval(found), case))


def line_of(runs, case, codec, figures):
    task, optimizer, workers = case
    head = (f'{task:12}{optimizer:13}{workers:7}  {codec:12}{len(figures):5}'
            f'{statistics.mean(figures):10.3f}')
    lost = differences(runs, case, codec)
    if codec == 'float32' or len(lost) < 2:
        return head
    limit, unit = LIMITS[task]
    mean, half = interval(lost)
    return (f'{head}{mean:+15.3f} +- {half:5.3f}{limit:6} {unit:6}  '
            f'{verdict(mean, half, limit)}')


def main():
    options = parse()
    print(describe(), flush=True)
    if not options.table:
        run_all(options, list(itertools.product(
            options.task, options.optimizer, options.workers)))
    runs = read(options.results)
    print_table(runs)
    for codec in CODECS:
        print_gains(runs, codec)


if __name__ == '__main__':
    main()
