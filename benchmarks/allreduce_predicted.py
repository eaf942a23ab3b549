"""The model's times beside those that ``allreduce.py`` has measured.

    python benchmarks/allreduce.py star --json star.json
    python benchmarks/allreduce_predicted.py star.json

What the model is given, all measured in the same run: the rate of the links
and what they pass at once, the latency of a message, for how long messages and
their bytes keep ranks busy, what a core does per second while all ranks work,
and what an update of a few elements takes.  Besides, how many cores all hosts
share, and Linux's time slice for so many.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys

from chainer_fp8pipe.allreduce.executor import Framing
from chainer_fp8pipe.allreduce.plan import (
    LEVELS,
    aggregator,
    torus2d,
    two_level,
)
from chainer_fp8pipe.planning.allreduce.prediction import total_seconds
from chainer_fp8pipe.planning.allreduce.simulation import simulate
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.job.codec_choice import FEW, codec_costs
from chainer_fp8pipe.planning.job.job_profile import CodecFigures, Figure

from allreduce_ranks import UPDATES
from environment import describe

#: Seconds of a time slice for one core; 8 and more have 4 of them.
_LINUX = 0.7e-3
_WANTED = {'cases', 'rows', 'network', 'payload', 'burst', 'workers',
           'message_costs', 'core_rates', 'update_seconds'}


def main() -> None:
    options = _arguments()
    found = [_read(path) for path in options.files]
    print(describe())
    print(f'{"network":<12}{"elements":>12}  {"":<34}{"measured":>10}'
          f'{"predicted":>10}  predicted / measured   [ms]')
    for data in found:
        by_label = {case['label']: case for case in data['cases']}
        for row in data['rows']:
            case = by_label[row['label']]
            if case['kind'] not in (*UPDATES, 'alone'):
                continue
            measured = statistics.median(row['seconds'])
            predicted = _predicted(data, case, row['size'], options)
            print(f'{data["network"]:<12}{row["size"]:>12,}  '
                  f'{row["label"]:<34}{measured * 1e3:>10.4g}'
                  f'{predicted * 1e3:>10.4g}  {predicted / measured:.2f}',
                  flush=True)


def _read(path):
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f'{path} cannot be read: {error}')
    missing = _WANTED - set(data) if isinstance(data, dict) else _WANTED
    if missing:
        sys.exit(f'{path} has no {", ".join(sorted(missing))}: measure again, '
                 'with allreduce.py --json')
    return data


def _predicted(data, case, size, options):
    settings = case['options']
    plans = _plans(data, case)
    ranks, workers = plans[0].ranks, data['workers']
    cluster = Cluster(
        _hosts(data, case, ranks), data['payload'] / 8,
        **data['message_costs'],
        torus=(3, 3) if data['network'] == 'torus' else None,
        cores=options.cores, sharing=ranks, burst=data['burst'],
        time_slice=_LINUX * (1 + min(int(math.log2(options.cores)), 3)),
        in_switch=frozenset(range(workers, ranks)))
    codec = _codec(case, data['core_rates'])
    frame = (settings.get('frame_bytes', Framing.frame_bytes)
             or size * case['bytes'])
    framing = {'frame_bytes': frame, 'frames_in_flight': 6}
    seconds = total_seconds(
        simulate(plans, cluster, codec, size, **framing), codec, size)
    if case['kind'] == 'alone':
        return seconds
    # Agreement and waking up, without what the simulation knows of it.
    known = simulate(plans, cluster, codec, FEW, **framing).seconds
    few = statistics.median(data['update_seconds'][case['label']])
    return seconds + max(few - known, 0.0)


def _plans(data, case):
    workers = data['workers']
    algorithm = case['options']['algorithm']
    if algorithm == 'aggregator':
        return (aggregator(workers, 1),)
    if algorithm == 'torus2d':
        return torus2d(3, 3)
    if data['network'] == 'two-level' and case['options'].get(
            'two_level') != 'no':
        return (two_level('direct', LEVELS[algorithm](workers // 2), [
            [rank, rank + 1] for rank in range(0, workers, 2)]),)
    return (LEVELS[algorithm](workers),)


def _hosts(data, case, ranks):
    if case.get('order'):
        return case['order']
    return [rank // (2 if data['network'] == 'two-level' else 1)
            for rank in range(ranks)]


def _codec(case, rates):
    """What a rank does per second."""
    name, options = case['codec'], case['options']
    figures = CodecFigures({operation: Figure(rate) for operation, rate
                            in rates[name].items()})
    costs = codec_costs(figures, name, options['algorithm'],
                        options.get('partial_sums', 'auto'))
    if case['kind'] == 'alone':     # of wires that are encoded already
        return dataclasses.replace(costs, encode=math.inf, decode=math.inf,
                                   by_frame=False)
    return costs


def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('files', nargs='+', metavar='FILE',
                        help='what allreduce.py --json has written')
    parser.add_argument('--cores', type=int, default=os.cpu_count(),
                        help='that all hosts share (default: all)')
    return parser.parse_args()


if __name__ == '__main__':
    main()
