"""Injects faults into jobs under ``launch``: what is lost, and how long?

    python benchmarks/faults.py --faults 60 --seed 1 --results runs.jsonl

Three jobs: the digits example with fp8, a pipeline of 2 stages and 2
replicas, and an unmodified ChainerMN script.  While one trains, faults happen
at random moments; then it may end, and its model is compared with that of a
run that nothing happened to.  --disk adds faults of a small disk, --network
those of two virtual hosts with links.

Runs are added to the file as they end, so that a long campaign can be made in
parts, with another seed each; --table prints what all of them came to.
"""
from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environment import describe, environment
from faults_kinds import FAULTS, Fault
from faults_places import TwoHosts, small_disk
from faults_run import JOBS, FaultyRun
from network import begin

_DEADLINE = 120.0       # seconds until a job must train again
_TO_THE_END = 300.0     # until one that nothing happens to must be through
_LONG = 12.0            # until a job trains: what is said meanwhile is kept

_TRAINS = r'trains: update (\d+) is done'
_ENDED = (r'start \d+ has ended after [^:,]+(?:, at update (\d+) or later)?'
          r': (.*)')


def main() -> None:
    options = _parser().parse_args()
    if options.table:
        print(describe())
        print(table(*_read(options.results)))
        return
    if options.disk or options.network:
        begin()
    # So that a campaign that is ended leaves no job behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    there = {'', *(name for name in ('disk', 'network', 'stall')
                   if vars(options)[name])}
    kinds = options.kinds or [
        name for name, fault in FAULTS.items()
        if set(fault.needs.split()) <= there and (
            not options.network or not fault.kills_launcher)]
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(small_disk()) if options.disk else None
        network = (stack.enter_context(TwoHosts(JOBS['script'].ranks))
                   if options.network else None)
        _inject(options, kinds, lambda name: FaultyRun(
            JOBS[name], parent, ['--stall', options.stall]
            if options.stall else [], network, options.length))


def _inject(options: argparse.Namespace, kinds: Sequence[str],
            start: Callable[[str], FaultyRun]) -> None:
    """The campaign: runs with faults, until there are enough."""
    draw = random.Random(options.seed)
    undisturbed = {name: _undisturbed(start(name))
                   for name in options.jobs}
    count = 0
    print(describe(), flush=True)
    turns = itertools.cycle(kinds)      # each comes as often as any other
    for name in itertools.cycle(options.jobs):
        planned = list(itertools.islice(
            turns, min(options.per_run, options.faults - count)))
        if not planned:
            break
        faults, run = _campaign(
            start(name), name, planned, undisturbed[name],
            lambda: draw.uniform(0.1, 1.9) * options.apart, draw)
        count += len(faults)
        print(f'{count} faults: {run}', file=sys.stderr, flush=True)
        with open(options.results, 'a') as file:
            file.write(json.dumps({**environment(), 'run': run,
                                   'faults': faults}) + '\n')
    print(table(*_read(options.results)))


def _read(path: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The faults and the runs of a file."""
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return ([fault for line in found for fault in line['faults']],
            [line['run'] for line in found])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--faults', type=int, default=24, metavar='N',
                        help='of all kinds together (default: 24)')
    parser.add_argument('--seed', type=int, default=0,
                        help='of moments and ranks (default: 0)')
    parser.add_argument('--jobs', type=lambda text: text.split(','),
                        default=list(JOBS), metavar='NAME,...',
                        help=f'of {", ".join(JOBS)} (default: all)')
    parser.add_argument(
        '--kinds', type=lambda text: text.split(','), metavar='NAME,...',
        help=f'of {", ".join(FAULTS)} (default: all that are possible)')
    parser.add_argument('--apart', type=float, default=1.3, metavar='SECONDS',
                        help='from training to the next fault, in the mean '
                        '(default: 1.3)')
    parser.add_argument('--per-run', type=int, default=4, metavar='N',
                        help='faults of a run, at most (default: 4)')
    parser.add_argument('--length', type=int, default=1, metavar='N',
                        help='jobs of N times as many updates (default: 1)')
    parser.add_argument('--stall', metavar='SECONDS',
                        help='also faults that only a stall shows')
    parser.add_argument('--disk', action='store_true',
                        help='also a full disk')
    parser.add_argument('--network', action='store_true',
                        help='the ranks are on two virtual hosts; also '
                        'faults of links and hosts')
    parser.add_argument('--results', metavar='FILE', required=True,
                        help='where runs are kept, one a line')
    parser.add_argument('--table', action='store_true',
                        help='inject nothing, print what FILE has')
    return parser


def _undisturbed(run: FaultyRun) -> tuple[dict[str, bytes], float]:
    """The model of a run that nothing happens to, and its seconds."""
    try:
        run.wait_for_the_end(_TO_THE_END * run.length)
        code = run.launcher.poll()
        bits = run.bits()
        if code != 0 or not bits:
            raise SystemExit('a job does not run undisturbed:\n' + ''.join(
                line.text for line in run.lines))
        return bits, run.seconds()
    finally:
        run.close()


def _campaign(run: FaultyRun, name: str, kinds: Sequence[str],
              undisturbed: tuple[dict[str, bytes], float],
              moment: Callable[[], float], draw: random.Random
              ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One run with faults; what came of each, and of the run."""
    faults: list[dict[str, Any]] = []
    try:
        place = 0
        for kind in kinds:
            if not faults or faults[-1]['detected'] is not None:
                trains = run.wait(_TRAINS, place, _DEADLINE)
                if trains is None:
                    break
                place = trains[0]
            time.sleep(moment())
            found, place = _one_fault(run, kind, draw, place)
            if found is None:
                break           # it has ended before
            faults.append({'job': name, 'kind': kind, **found})
            if found['hangs']:
                break
        ended = run.wait_for_the_end(_TO_THE_END * run.length)
        left = _left(run)
        return faults, {
            'job': name, 'faults': len(faults), 'ended': ended,
            'code': run.launcher.poll(),
            'bits': run.bits() == undisturbed[0],
            'speed': undisturbed[1] / max(run.seconds(), 1e-9),
            'left': left, 'said': None if ended and not left and (
                run.launcher.poll() == 0) else ''.join(
                line.text for line in run.lines)}
    finally:
        run.close()


def _one_fault(run: FaultyRun, kind: str, draw: random.Random, place: int
               ) -> tuple[dict[str, Any] | None, int]:
    """Injects a fault, and waits until the job trains again."""
    fault = FAULTS[kind]
    if run.has_ended:
        return None, place
    expected = fault.inject(run, draw)
    at = time.monotonic()
    if not expected:
        return None, place
    if fault.kills_launcher:
        run.wait_for_the_end(_DEADLINE)
        while run.left() and time.monotonic() < at + _DEADLINE:
            time.sleep(0.01)
        detected, latest, cause = time.monotonic(), None, '-'
        place = len(run.lines)
        run.launch()
    elif fault.lasts and (later := _survives(run, fault, place)):
        return {'hangs': False, 'detected': None, 'trains': later - at,
                'lost': 0, 'named': True, 'cause': 'survived'}, place
    elif ended := run.wait(_ENDED, place, _DEADLINE):
        place, line, match = ended
        detected, latest, cause = line.at, match[1], match[2]
    elif run.has_ended:
        return None, place      # in order, before the fault was felt
    else:
        return {**dict.fromkeys(('detected', 'trains', 'lost')),
                'hangs': True, 'named': False, 'cause': ''}, place
    trains = run.wait(_TRAINS, place, _DEADLINE)
    lost = None
    if trains and latest:
        # At least, as the launcher hears of updates twice a second only.
        lost = max(int(latest) - int(trains[2][1]) + 1, 0)
    named = bool(re.search(expected, cause))
    return {'hangs': trains is None, 'detected': detected - at,
            'trains': trains and trains[1].at - at, 'lost': lost,
            'named': named, 'cause': cause,
            'said': None if named and trains and (
                trains[1].at - at < _LONG) else ''.join(
                line.text for line in run.lines if line.at >= at)}, place


def _survives(run: FaultyRun, fault: Fault, place: int) -> float:
    """When the next snapshot came after a fault; 0.0 if the job has died.

    Or if the job is through, or nothing comes of it in time.
    """
    end = time.monotonic() + fault.lasts
    before = run.newest()
    while time.monotonic() < end + _DEADLINE and not run.has_ended:
        if run.wait(_ENDED, place, 0.05):
            break
        if time.monotonic() < end:
            before = run.newest()
        elif run.newest() != before:
            return time.monotonic()
    return 0.0


def _left(run: FaultyRun) -> list[str]:
    """What is left a moment after the end."""
    for _ in range(100):
        if not run.left():
            return []
        time.sleep(0.05)
    return run.left()


def table(faults: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]
          ) -> str:
    """A row for each kind of fault, and a line about all runs."""
    rows = [('fault', 'count', 'detected/s', 'p99', 'trains/s', 'p99',
             'updates lost', 'hangs', 'named right')]
    for kind in dict.fromkeys(fault['kind'] for fault in faults):
        of_kind = [fault for fault in faults if fault['kind'] == kind]
        rows.append((
            kind, str(len(of_kind)), *_figures(of_kind, 'detected'),
            *_figures(of_kind, 'trains'), _figures(of_kind, 'lost')[0],
            str(sum(fault['hangs'] for fault in of_kind)),
            str(sum(fault['named'] for fault in of_kind))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    good = sum(run['code'] == 0 and run['bits'] for run in runs)
    return '\n'.join([
        *('  '.join(cell.rjust(width) for cell, width in zip(
            row, widths, strict=True)) for row in rows),
        f'{len(runs)} runs, of which {good} ended with the undisturbed '
        f"run's bits; {sum(bool(run['left']) for run in runs)} left "
        'something behind; speed '
        f'{statistics.median(run["speed"] for run in runs):.2f} of the '
        "undisturbed run's in the median"])


def _figures(faults: Sequence[dict[str, Any]], name: str
             ) -> tuple[str, str]:
    """Median and 99th percentile."""
    values = sorted(fault[name] for fault in faults
                    if fault[name] is not None)
    if not values:
        return '-', '-'
    high = values[min(len(values) - 1, int(0.99 * len(values)))]
    return f'{statistics.median(values):.2f}', f'{high:.2f}'


if __name__ == '__main__':
    main()
