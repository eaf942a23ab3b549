"""Predicted steps beside measured ones, on jobs that nothing was fitted to.

    python benchmarks/planning.py --json planning.json
    python benchmarks/planning.py --only star --rounds 1
    python benchmarks/planning.py --from 2 --only '4 ranks'

A job is a model, a network and a number of ranks.  In each, the planner
measures what it measures for users, chooses, and predicts; then the choice and
configurations drawn by chance (stages, replicas, micro-batches, schedule,
codec, algorithm, overlap) are trained in, each of them twice.  The second time
against the first is the noise floor: what a perfect prediction would show.
As the machine's speed drifts between the planner's measurements and the
training, the ratio is given once more, ``paced``: the prediction, had passes
of the plain model taken as long as they do just before and after the training.
The regret is the time of the choice over that of the fastest measured.  With
``--from N`` the planner measures with N ranks, and predicts for all of a job.

Star, two-level and torus are virtual networks of this machine (network
namespaces, see benchmarks/network: root and iproute2); without root only the
jobs in shared memory run.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

import numpy
from environment import RANKS, describe, write_json
from network import NetworkError, Star, Torus

_RANKS = pathlib.Path(__file__).with_name('planning_ranks.py')


#: Rows and columns.
_TORUS = 3, 3


class Job(NamedTuple):
    """A model on some ranks."""

    model: str
    network: str        # memory, star, two-level or torus
    ranks: int
    rate: float = 0.0   # bit/s of a link

    @property
    def name(self) -> str:
        """For tables."""
        rate = f' {self.rate / 1e6:g} Mbit/s' if self.rate else ''
        return f'{self.model}, {self.network}{rate}, {self.ranks} ranks'


JOBS = [
    Job('mlp', 'memory', 2), Job('language', 'memory', 2),
    Job('resnet50', 'memory', 2), Job('encoder', 'memory', 4),
    Job('convolutions', 'memory', 4),
    Job('mlp', 'star', 4, 500e6), Job('language', 'star', 4, 1e9),
    Job('wide', 'star', 3, 100e6), Job('resnet50', 'star', 2, 500e6),
    Job('recurrent', 'star', 2, 1e9),
    Job('encoder', 'two-level', 4, 100e6),
    Job('convolutions', 'two-level', 8, 500e6),
    Job('mlp', 'torus', 9, 500e6), Job('wide', 'memory', 2),
]


def main() -> None:
    options = _arguments()
    print(describe(), flush=True)
    print(f'\n{"job, and a configuration of it":<64}{"predicted":>9}'
          f'{"measured":>9}{"ratio":>7}{"paced":>7}  [ms]', flush=True)
    known = _known(options) if options.keep else {}
    jobs = []
    for number, job in enumerate(JOBS):
        if options.only and not any(part in job.name
                                    for part in options.only.split('|')):
            continue
        try:
            found = known.get(job.name) or _run(job, number, options)
        except NetworkError as error:
            print(f'{job.name}: left out: {error}', flush=True)
            continue
        if found:
            _show(found)
            jobs.append(found)
            if options.json:
                write_json(options.json, {'jobs': jobs})
    if not jobs:
        sys.exit('no job was run')
    _summary(jobs)
    if options.plot:
        _plot(jobs, options.plot)


def _known(options):
    """Jobs of an earlier run, by name."""
    path = pathlib.Path(options.json)
    return {job['name']: job for job in json.loads(path.read_text())['jobs']
            } if path.exists() else {}


def _show(job):
    print(f'{job["name"]}: measured in {job["measuring"]:.1f} s, searched in '
          f'{job["searching"]:.1f} s', flush=True)
    for row in job['rows']:
        first, now = (statistics.median(row['seconds'][0]),
                      row['predicted_now'][0])
        label = row['label'] + ', chosen' * row['best']
        print(f'  {label:<62}{row["predicted"] * 1e3:>9.4g}'
              f'{first * 1e3:>9.4g}{row["predicted"] / first:>7.2f}'
              f'{now / first:>7.2f}', flush=True)


def _run(job, number, options):
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, 'result.json')
        said = {**job._asdict(), 'name': job.name, 'seed': number,
                'configurations': options.configurations,
                'rounds': options.rounds, 'pinned': job.network != 'memory',
                'profile': '', 'only_measure': False,
                'torus': _TORUS if job.network == 'torus' else ()}
        code = 0
        if options.measure_with:
            profile = str(pathlib.Path(folder, 'profile'))
            code = _start(job._replace(ranks=options.measure_with),
                          {**said, 'only_measure': True}, profile)
            said['profile'] = profile
        code = code or _start(job, said, str(result))
        if code or not result.exists():
            print(f'{job.name}: the ranks ended with exit code {code}',
                  flush=True)
            return None
        return json.loads(result.read_text())


def _start(job, said, result):
    """Runs the ranks; their exit code."""
    specification = f'{result}.specification'
    pathlib.Path(specification).write_text(json.dumps(said))
    command = [sys.executable, str(_RANKS), specification, result]
    if job.network == 'memory':
        mpiexec = pathlib.Path(sys.executable).with_name('mpiexec')
        return subprocess.run(
            [str(mpiexec), '-n', str(job.ranks), *command],
            env={**os.environ, **RANKS}, timeout=1200).returncode
    each = 2 if job.network == 'two-level' else 1
    network = (Torus(*_TORUS, job.rate) if job.network == 'torus'
               else Star(job.ranks // each, job.rate))
    with network:
        return network.run(command, ranks_per_host=each, env=RANKS,
                           timeout=1200).returncode


def _summary(jobs):
    rows = [row for job in jobs for row in job['rows']]
    medians = [[statistics.median(one) for one in row['seconds']]
               for row in rows]
    # The noise of steps at the pace of the moment, too.
    paced = [[seconds / pace for seconds, pace in zip(
        times, row['pace'], strict=True)]
        for row, times in zip(rows, medians, strict=True)]
    regrets = []
    for job in jobs:
        # Of all rounds, so that luck in one decides less.
        means = [statistics.median(sum(row['seconds'], []))
                 for row in job['rows']]
        regrets.append(means[0] / min(means) - 1)
    print(f'\n{len(rows)} configurations of {len(jobs)} jobs')
    for name, values in (
            ('error of the prediction', [
                abs(row['predicted'] / times[0] - 1)
                for row, times in zip(rows, medians, strict=True)]),
            ('noise: measured twice', _twice(medians)),
            ('error at the pace of the moment', [
                abs(row['predicted_now'][0] / times[0] - 1)
                for row, times in zip(rows, medians, strict=True)]),
            ('noise, in passes of the moment', _twice(paced))):
        if values:
            print(f'{name:<34}median {100 * statistics.median(values):5.1f} '
                  f'%   95th percentile {100 * _percentile(values, 95):5.1f} '
                  f'%   largest {100 * max(values):5.1f} %')
    print(f'{"regret of the choice":<34}median '
          f'{100 * statistics.median(regrets):5.1f} %   largest '
          f'{100 * max(regrets):5.1f} %')


def _plot(jobs, path):
    """Draws predictions, at the pace of the moment, beside measurements."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
    figure, axes = pyplot.subplots(figsize=(6.4, 5.6), layout='constrained')
    for network, marker in (('memory', 'o'), ('star', 's'),
                            ('two-level', '^'), ('torus', 'D')):
        rows = [row for job in jobs if job['network'] == network
                for row in job['rows']]
        if rows:
            axes.loglog(
                [1e3 * statistics.median(row['seconds'][0]) for row in rows],
                [1e3 * row['predicted_now'][0] for row in rows], marker,
                alpha=.75, label='shared memory' if network == 'memory'
                else network)
    ends = numpy.array(axes.get_xlim())
    axes.plot(ends, ends, color='gray', linewidth=1)
    axes.fill_between(ends, ends / 1.15, ends * 1.15, color='gray', alpha=.2,
                      label='within 15 %')
    for axis in axes.xaxis, axes.yaxis:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter('{x:g}'))
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlim=ends, ylim=ends, xlabel='measured step [ms]',
             ylabel='predicted step [ms], at the pace of the moment')
    axes.legend()
    figure.savefig(path, dpi=120)


def _twice(times):
    return [abs(several[1] / several[0] - 1) for several in times
            if len(several) > 1]


def _percentile(values, percent):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', metavar='TEXT', help='jobs whose names '
                        'have this in them; several with |')
    parser.add_argument('--configurations', type=int, default=6, metavar='N',
                        help='of each job (default: 6)')
    parser.add_argument('--rounds', type=int, default=2, metavar='N',
                        help='how often each is measured (default: 2)')
    parser.add_argument('--from', type=int, default=0, metavar='N',
                        dest='measure_with', help='ranks with which the '
                        'planner measures (default: all)')
    parser.add_argument('--json', metavar='FILE',
                        help='write the raw data there')
    parser.add_argument('--plot', metavar='FILE', help='draw predicted '
                        'beside measured steps')
    parser.add_argument('--keep', action='store_true', help='run only the '
                        'jobs that the file of --json has not')
    options = parser.parse_args()
    if options.keep and not options.json:
        parser.error('--keep needs --json')
    return options


if __name__ == '__main__':
    main()
