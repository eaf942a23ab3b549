"""How long the search for the best way to run a job takes, without measuring.

    python benchmarks/planning_search.py
    python benchmarks/planning_search.py --calls 200 --hosts 4 --each 2
    python benchmarks/planning_search.py --profile 40

A job of 1,000 different calls on 16 hosts of 4 ranks each, all of whose
figures are made up.  One row without a limit of memory, one with a limit that
the model does not fit into whole.
"""
from __future__ import annotations

import argparse
import cProfile
import json
import pathlib
import pstats
import time
from typing import Any

from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.choices import Choices, Wanted
from chainer_fp8pipe.planning.job.job_profile import (
    CodecFigures,
    Figure,
    JobProfile,
    ModelFigures,
    NetworkFigures,
)
from chainer_fp8pipe.planning.partition.calls import (
    Call,
    Parameter,
    Source,
    Value,
)
from chainer_fp8pipe.planning.partition.positions import order_of
from chainer_fp8pipe.planning.sizes import said_bytes

import numpy
from environment import describe, environment

_FLOAT = numpy.dtype('f')
#: Parameters of a bucket, in bytes of float32.
_BUCKET = 1 << 22
#: Samples of a rank, and of the smaller batch that is measured.
_SAMPLES, _FEW = 32, 4
#: Elements per second of operations of codecs, on one core.
_RATES = {'float32': 2e9, 'float16': 4e8, 'fp8': 8e8}
_OPERATIONS = ('encode', 'decode', 'accumulate', 'add', 'add_partial',
               'pack', 'mean')


def main() -> None:
    options = _arguments()
    profile = made_up(options.calls, options.hosts, options.each)
    print(describe())
    print(f'{options.calls} calls, {profile.model.elements:,} parameters, '
          f'{options.hosts} hosts x {options.each} ranks')
    print(f'{"memory":>10}{"seconds":>10}{"processor":>11}{"looked at":>11}'
          f'{"simulated":>11}  the choice')
    whole = 4.0 * profile.model.elements
    rows = [_row(profile, memory, options)
            for memory in (None, 2.5 * whole)]
    if options.json:
        options.json.write_text(json.dumps(
            {**environment(), 'calls': options.calls,
             'ranks': profile.ranks, 'rows': rows}, indent=1))


def _row(profile: JobProfile, memory: float | None,
         options: argparse.Namespace) -> dict[str, Any]:
    wanted = Wanted(_SAMPLES * profile.ranks, memory)
    watch = cProfile.Profile()
    start, begin = time.perf_counter(), time.process_time()
    if options.profile:
        watch.enable()
    choices = Choices(profile, wanted)
    best = choices.best
    watch.disable()
    seconds = time.perf_counter() - start
    processor = time.process_time() - begin
    print(f'{said_bytes(memory) if memory else "no limit":>10}'
          f'{seconds:>10.1f}{processor:>11.1f}{choices.looked_at:>11}'
          f'{choices.simulated:>11}  '
          f'{best.configuration}, {best.seconds * 1e3:.4g} ms', flush=True)
    if options.profile:
        pstats.Stats(watch).sort_stats('cumulative').print_stats(
            options.profile)
    return {'memory': memory, 'seconds': seconds, 'processor': processor,
            'looked_at': choices.looked_at, 'simulated': choices.simulated,
            'choice': best.configuration.as_dict(),
            'predicted': best.seconds}


def made_up(calls: int, hosts: int, each: int) -> JobProfile:
    """The profile of a job that nobody has: each call is another.

    Args:
        calls: Of the model, half of them with parameters.
        hosts: 10 Gbit/s and 50 µs from each to each other one.
        each: Ranks of a host, with a core each.
    """
    numbers = numpy.random.default_rng(0)
    large, parameters = _calls(numbers, calls)
    few = tuple(_with_samples(call, _FEW / _SAMPLES) for call in large)
    order = order_of(large)
    seconds = [tuple(sum(getattr(call, way) for call in of)
                     for way in ('forward', 'backward'))
               for of in (large, few)]
    return JobProfile(
        NetworkFigures(
            tuple(rank // each for rank in range(hosts * each)),
            Figure(50e-6, .1), Figure(1.1e9, .05),
            local_latency=Figure(5e-6, .1), local_rate=Figure(4e9, .1),
            message_cost=Figure(5e-6, .1), byte_cost=Figure(1e-10, .1)),
        Cores(tuple(range(hosts * each))),
        {name: CodecFigures(dict.fromkeys(_OPERATIONS, Figure(rate, .05)),
                            Figure(5e-4, .1), Figure(1e-5, .1))
         for name, rate in _RATES.items()},
        ModelFigures(
            _SAMPLES, large, _FEW, few, order, parameters,
            _buckets(order, parameters), Figure(5e-2, .05), Figure(1e-3),
            *seconds, spread=.03, step=Figure(1e-3),
            micro_batch=Figure(2e-4)))


def _calls(numbers: numpy.random.Generator, count: int
           ) -> tuple[tuple[Call, ...], dict[str, Parameter]]:
    """Calls one after the other; every tenth value is used once more."""
    calls, parameters = [], {}
    for number in range(count):
        inputs = [Source(number - 1, 0)] if number else []
        if number % 10 == 5:
            inputs.append(Source(number - 5, 0))
        names = ()
        if number % 2 == 0:
            names = (f'/{number}/W',)
            parameters[names[0]] = Parameter(
                (int(numbers.integers(1, 400)) * 500,), _FLOAT)
        forward = float(numbers.uniform(1e-4, 1e-3))
        size = int(numbers.integers(100, 4000))
        calls.append(Call(
            'call', f'/{number}', (number,), tuple(inputs), names,
            {0: Value((_SAMPLES, size), _FLOAT, True)}, forward,
            2 * forward, .5 * bool(names), retained=tuple(inputs),
            temporary=_SAMPLES * size))
    return tuple(calls), parameters


def _with_samples(call: Call, share: float) -> Call:
    """A call with a share of its samples, and a tenth of its time fixed."""
    value = call.outputs[0]
    factor = .1 + .9 * share
    return Call(
        call.name, call.link, call.path, call.inputs, call.parameters,
        {0: value._replace(shape=(int(value.shape[0] * share),
                                  *value.shape[1:]))},
        call.forward * factor, call.backward * factor, call.deferrable,
        retained=call.retained, temporary=int(call.temporary * share))


def _buckets(order: tuple[tuple[str, ...], ...],
             parameters: dict[str, Parameter]
             ) -> tuple[tuple[str, ...], ...]:
    """From the end of the model, as backward makes gradients."""
    buckets: list[list[str]] = [[]]
    size = 0
    for group in reversed(order):
        for name in group:
            if size >= _BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(name)
            size += parameters[name].nbytes
    return tuple(map(tuple, buckets))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--calls', type=int, default=1000)
    parser.add_argument('--hosts', type=int, default=16)
    parser.add_argument('--each', type=int, default=4,
                        help='ranks of a host')
    parser.add_argument('--profile', type=int, default=0, metavar='LINES',
                        help='so many lines of cProfile')
    parser.add_argument('--json', type=pathlib.Path)
    return parser.parse_args()


if __name__ == '__main__':
    main()
