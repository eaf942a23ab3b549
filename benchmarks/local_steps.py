"""Local steps on slow links: seconds to the same accuracy.

    python benchmarks/local_steps.py accuracy --results runs.jsonl
    python benchmarks/local_steps.py seconds --results curves.jsonl
    python benchmarks/local_steps.py utilisation

``accuracy`` trains the tasks of near_exact.py, and photographs with batch
normalisation, with simulated workers.  Between two exchanges every worker
updates by itself; at an exchange its difference to the last common
parameters travels as int4, with error feedback.

The criterion, written down before the first run of ten seeds: local steps are
*near-exact* for a task, its optimizer and a number of workers if they lose, in
the mean over all seeds of the difference to float32 on every step with the
same seed, at most

    0.2 points of test accuracy           (digits, photographs)
    0.3 % of float32's bits per character (language)

and this is *shown*, *not shown* or *refuted* by the 95 % confidence interval
of that mean, as near_exact.py says.  Bytes are those of an element and
update in one direction, the mean over a training with all its phases.

``seconds`` gives the time to the final accuracy of float32.  4 ranks train a
perceptron of 1.85 M parameters on photographs, batch 64 in all, and record
test accuracy every 8 updates; this does not depend on the network.  An
update's seconds are then measured on a star of 4 virtual hosts
(Linux, iproute2).  A method is there at the first
recorded update from which the mean accuracy of all seeds is at least the
final one of float32 less 0.5 points (3 seeds do not tell 0.2); its seconds are
those of all updates until then, each phase's with the median seconds of that
phase.  They are derived so, not measured whole.

``utilisation`` gives the share of a step that an accelerator computes:
30.8 M parameters, 26 ms, during which the processors are free.  The published
grid beside it is of 4 GPUs, float32 (diloco-measured).
"""
from __future__ import annotations

import json
import os
import statistics

import near_exact
from environment import (
    RANKS,
    describe,
    parser,
    ranks_of,
    with_torch,
    write_json,
)
from local_steps_ranks import (
    EXACT,
    METHODS,
    STEP,
    SYNCHRONOUS,
    UPDATES,
)
from near_exact_runs import ALL_TASKS, LOCAL, bytes_of
from network import Star, begin

_HOSTS = 4
_LIMIT = 0.5            # points below float32's final accuracy
_RATES = {'seconds': (50e6, 100e6, 200e6, 500e6),
          'utilisation': (50e6, 200e6, 1000e6, 5000e6)}
#: Per cent, by Mbit/s, for the local steps in ``_STEPS``.
_PUBLISHED = {50: (0.07, 0.55, 2.4, 11.6), 200: (0.32, 2.5, 10, 36),
              1000: (1.7, 12, 36, 72), 5000: (7.8, 40, 68, 87)}
_STEPS = 1, 8, 32, 128
#: First updates of others; as accurate as float32 and int4 at every update.
_TIMED_ONLY = 'int4, not overlapped', 'PyTorch, float32'


def main():
    options = _arguments()
    if options.what in _RATES:
        begin()
    print(describe(), flush=True)
    found = {'accuracy': _accuracy, 'seconds': _seconds,
             'utilisation': _utilisation}[options.what](options)
    if options.json:
        write_json(options.json, {'what': options.what, **found})


def _accuracy(options):
    if not options.table:
        near_exact.run_all(options, [
            (task, 'Adam' if task == 'language' else 'MomentumSGD', workers)
            for task in options.task for workers in options.workers])
    runs = near_exact.read(options.results)
    near_exact.print_table(runs, ['float32', 'int4', *LOCAL], bytes_of)
    return {'runs': [{'key': key, 'figure': figure}
                     for key, figure in runs.items()]}


# --- seconds to the same accuracy -------------------------------------------

def _seconds(options):
    torch = with_torch(not options.without_torch)
    labels = [label for label in METHODS if torch or 'PyTorch' not in label]
    curves = _curves(options, [
        label for label in labels if label not in _TIMED_ONLY])
    times = _on_stars('seconds', options, {
        'what': 'times', 'labels': labels, 'repeats': options.repeats or 5,
        'least': 2})
    print_seconds(curves, times)
    if options.plot:
        plot_curves(curves, times, options.plot)
    return {'curves': curves, 'times': times}


def _curves(options, labels):
    """Adds to the file what is missing, and returns what it has."""
    found = []
    if os.path.exists(options.results):
        with open(options.results) as file:
            found = [json.loads(line) for line in file]
    done = {(one['seed'], one['label']) for one in found}
    for seed in range(options.seeds):
        missing = [label for label in labels if (seed, label) not in done]
        if missing:
            new = ranks_of('local_steps_ranks.py', {
                'what': 'train', 'labels': missing, 'seeds': [seed]}, _HOSTS,
                env={**RANKS, 'MASTER_ADDR': '127.0.0.1',
                     'MASTER_PORT': '29500'})
            with open(options.results, 'a') as file:
                for one in new:
                    print(json.dumps(one), file=file)
            found += new
    return [one for one in found
            if one['seed'] < options.seeds and one['label'] in labels]


def _on_stars(what, options, job):
    """What the ranks measure at each rate, by Mbit/s."""
    found = {}
    for rate in options.rates or _RATES[what]:
        with Star(_HOSTS, rate) as network:
            print(network.describe(), flush=True)
            found[round(rate / 1e6)] = ranks_of(
                'local_steps_ranks.py', job, network=network)
    return found


def mean_curve(curves, label):
    """Updates, and the mean accuracy of all seeds after each."""
    own = [dict(one['curve']) for one in curves if one['label'] == label]
    return {number: statistics.mean(one[number] for one in own)
            for number in (own[0] if own else ())}


def reached(curves, label):
    """Updates until the final accuracy of float32 less the limit, or None.

    From there on it is not lost again.
    """
    goal = mean_curve(curves, 'float32')[UPDATES] - _LIMIT
    first = None
    for number, accuracy in mean_curve(curves, label).items():
        first = (first or number) if accuracy >= goal else None
    return first


def seconds_of(label, updates, medians):
    """Of so many updates, phase by phase.

    Args:
        label: The method.
        updates: From the beginning.
        medians: Seconds of an update by label.
    """
    phases = [(label, updates)]
    if label in ('PyTorch, PowerSGD hook', 'PyTorch, PostLocalSGD'):
        phases.insert(0, ('PyTorch, float32', EXACT + SYNCHRONOUS))
    elif 'PyTorch' not in label:
        if first := METHODS[label][1].get('sync_steps'):
            phases.insert(0, ('int4, not overlapped', first - EXACT))
        phases.insert(0, ('float32', EXACT))
    total = 0.0
    for name, most in phases:
        taken = min(updates, most)
        total, updates = total + taken * medians[name], updates - taken
    return total


def medians_of(rows):
    return {row['label']: statistics.median(row['seconds']) for row in rows}


def print_seconds(curves, times):
    """Final accuracy, updates and seconds to that of float32."""
    print(f'\n{"":24}{"final":>8}{"updates":>9}' + ''.join(
        f'{f"{rate:,} Mbit/s":>18}' for rate in times))
    print(f'{"":24}{"[%]":>8}{"":>9}'
          + f'{"ms each, s":>18}' * len(times))
    for label in METHODS:
        curve = mean_curve(curves, label)
        if not curve:
            continue
        updates = reached(curves, label)
        line = f'{label:24}{curve[UPDATES]:8.2f}{updates or "never":>9}'
        for rows in times.values():
            medians = medians_of(rows)
            total = f'{seconds_of(label, updates, medians):.3g}' if (
                updates) else '-'
            line += f'{f"{1e3 * medians[label]:,.0f}, {total}":>18}'
        print(line)


# --- utilisation ------------------------------------------------------------

def _utilisation(options):
    found = _on_stars('utilisation', options, {
        'what': 'utilisation', 'repeats': options.repeats or 2, 'least': 2,
        'steps': options.steps})
    print(f'\n{"Mbit/s":>8}' + ''.join(
        f'{f"H = {steps}":>20}' for steps in options.steps)
        + '\n' + ' ' * 8 + f'{"here, published [%]":>20}' * len(options.steps))
    for rate, rows in found.items():
        cells = []
        for row in rows:
            here = 100 * STEP / statistics.median(row['seconds'])
            there = dict(zip(_STEPS, _PUBLISHED.get(rate, ()),
                             strict=False)).get(row['steps'], '-')
            cells.append(f'{f"{here:.3g}, {there}":>20}')
        print(f'{rate:8,}' + ''.join(cells))
    return {'rows': found}


# --- figures and arguments --------------------------------------------------

def plot_curves(curves, times, path):
    """Mean test error of all seeds against seconds, an axis for each rate."""
    from draw import LOOK, OURS, pyplot
    goal = 100 - mean_curve(curves, 'float32')[UPDATES] + _LIMIT
    with pyplot.rc_context({**LOOK, 'font.size': 10}):
        figure, axes = pyplot.subplots(1, len(times), squeeze=False,
                                       sharey=True,
                                       figsize=(4.6 * len(times), 4.6))
        for axis, (rate, rows) in zip(axes[0], times.items(), strict=True):
            for label, colour in {
                    'float32': '#8a8a8a', 'fp8': '#7ab0dc', 'int4': OURS,
                    'int4, 8 local steps': '#c05a1e',
                    'int4, 8 local, 2nd half': '#d8a13a',
                    'PyTorch, fp16 hook': '#8a8a8a',
                    'PyTorch, PostLocalSGD': '#b0b0b0'}.items():
                numbers, found = zip(*mean_curve(curves, label).items(),
                                     strict=True)
                seconds = [seconds_of(label, number, medians_of(rows))
                           for number in numbers]
                axis.plot(seconds, [100 - one for one in found],
                          '--' if 'PyTorch' in label else '-', color=colour)
                axis.text(seconds[-1], 9.6, label.partition(', ')[2] or label,
                          color=colour, rotation=90, ha='center', va='top')
            axis.axhline(goal, color='black', linewidth=0.6)
            axis.set(title=f'{rate} Mbit/s', xlabel='seconds', xscale='log',
                     yscale='log', ylim=(2.6, 75), yticks=(10, 20, 50))
            axis.xaxis.set_major_formatter('{x:g}')
            axis.yaxis.set_major_formatter('{x:g}')
            axis.yaxis.set_minor_locator(pyplot.NullLocator())
        axes[0][0].set_ylabel('test error [%]')
        local = 'int4, 8 local steps'
        end = 100 - mean_curve(curves, local)[UPDATES]
        figure.suptitle(
            f'8 local steps end at {end:.1f} % of test error, '
            f'{"at or below" if reached(curves, local) else "above"} the line:'
            f' float32\'s plus {_LIMIT} points.\nMean of '
            f'{len({one["seed"] for one in curves})} seeds; dashed: PyTorch.',
            x=0.01, ha='left', fontsize=11)
        figure.savefig(path)
    print(f'figure: {path}')


def _arguments():
    given = parser(__doc__, 'torch')
    given.add_argument('what', choices=['accuracy', *_RATES])
    given.add_argument('--plot', metavar='FILE',
                       help='draw curves of seconds')
    given.add_argument('--results', metavar='FILE', help='where trainings '
                       'are kept, one a line (accuracy and seconds)')
    given.add_argument('--table', action='store_true',
                       help='train nothing, print what FILE has (accuracy)')
    given.add_argument('--short', action='store_true',
                       help='two seeds, 4 workers, two rates: minutes')
    given.add_argument('--seeds', type=int, metavar='N',
                       help='how many (default: 10; seconds: 3)')
    given.add_argument('--jobs', type=int, default=os.cpu_count(),
                       help='processes of accuracy (default: one per core)')
    given.add_argument('--workers', type=int, nargs='+', metavar='N',
                       help='simulated ones (default: 4 16)')
    given.add_argument('--task', nargs='+', choices=list(ALL_TASKS),
                       default=list(ALL_TASKS), help='of accuracy')
    given.add_argument('--codec', nargs='+', metavar='NAME',
                       default=['float32', *LOCAL],
                       help=f'of accuracy (default: {", ".join(LOCAL)} '
                       'beside float32)')
    given.add_argument('--rates', type=float, nargs='+', metavar='BIT/S',
                       help='of the links')
    given.add_argument('--steps', type=int, nargs='+', metavar='H',
                       default=list(_STEPS), help='of utilisation')
    given.add_argument('--repeats', type=int, metavar='N',
                       help='blocks of updates that are timed')
    options = given.parse_args()
    if options.what != 'utilisation' and not options.results:
        given.error(f'{options.what} needs --results FILE')
    options.seeds = options.seeds or (
        2 if options.short else 10 if options.what == 'accuracy' else 3)
    options.workers = options.workers or ([4] if options.short else [4, 16])
    if options.short and options.what != 'accuracy':
        options.rates = options.rates or _RATES[options.what][::2]
    return options


if __name__ == '__main__':
    main()
