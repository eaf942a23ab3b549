"""Whether the search for a cut finds the best one, and how long it takes."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time

from chainer_fp8pipe import partition
from chainer_fp8pipe.chains.names import Names, parameters_of
from chainer_fp8pipe.chains.tracing.trace import Tracer
from chainer_fp8pipe.planning.partition.cuts import (
    CutProblem,
    best_cut,
    evaluate,
)
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.partition_plan import PartitionPlan
from chainer_fp8pipe.planning.partition.positions import order_of
from chainer_fp8pipe.planning.partition.search import search

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from models import MODELS
from models.encoder import Encoder
from partition_sizes import encoder_batch, reported, trained
from pipeline_ranks import quiet_barrier

_PARTS = 4


def best(comm, job, rows):
    """Predicted steps of all cuts; with ``updates`` also as they run."""
    for name in job['names']:
        if 'updates' in job:
            rows.add(_as_run(comm, name, job), name)
            continue
        rows.begin(name)
        trace, names, _ = traced(MODELS[name])
        order = order_of(trace.calls, list(names.parameters))
        intervals = Intervals(trace.calls, order, parameters_of(names))
        for stages in job['ranks']:
            row = {'model': name, 'stages': stages, 'outcome': 'right',
                   **_predicted(intervals, stages, job['most'])}
            rows.add(row, f'{stages} stages, {name}: '
                     + (f'{row["chosen"] / row["best"]:.3f}'
                        if row['cuts'] else row['reason']))


def _predicted(intervals, stages, most):
    if intervals.count < stages:
        return {'cuts': 0, 'reason': f'fewer parts than {stages} stages'}
    count = math.comb(intervals.count - 1, stages - 1)
    if count > most:
        return {'cuts': 0, 'reason': f'more than {most} cuts'}
    task = CutProblem(stages, _PARTS)
    every = [evaluate(intervals, task, (*ends, intervals.count)).predicted
             for ends in itertools.combinations(
                 range(1, intervals.count), stages - 1)]
    return {'cuts': count, 'best': min(one.seconds for one in every),
            'chosen': best_cut(intervals, task).predicted.seconds}


def traced(case):
    numpy.random.seed(0)
    model = case.make()
    batch = case.batch(numpy.random.RandomState(1), case.samples)
    size = max(case.samples // _PARTS, 1)
    example = ({name: array[:size] for name, array in batch.items()}
               if isinstance(batch, dict)
               else tuple(array[:size] for array in batch))
    names = Names(model)
    with chainer.using_config('train', True):
        trace = Tracer(model, names).trace(
            lambda: case.loss(model, example))
    return trace, names, (batch, example)


def _as_run(comm, name, job):
    """Every cut between two ranks; all of them take turns."""
    case = MODELS[name]
    trace, names, (batch, example) = traced(case)
    plan = None
    if comm.rank == 0:      # whose times count
        plan = search(trace.calls, order_of(
            trace.calls, list(names.parameters)), parameters_of(names),
            CutProblem(2, _PARTS)).as_dict()
    plan = comm.bcast(plan)
    order = tuple(map(tuple, plan['order']))
    starts = Intervals(trace.calls, order, parameters_of(names)).starts
    steps, chosen = [], []
    for start in starts[1:]:
        numpy.random.seed(0)
        model = case.make()
        given = PartitionPlan(order, (start,), 2,
                              (False, False), _PARTS, '1f1b')
        partition(model, example, comm, micro_batches=_PARTS, plan=given)
        steps.append(reported(trained(model, batch, comm, _PARTS)))
        chosen.append(given.as_dict()['cuts'] == plan['cuts'])
    times = [[] for _ in steps]
    for number in range(job['updates'] + 1):
        for step, found in zip(steps, times, strict=True):
            quiet_barrier()
            begin = time.perf_counter()
            step()
            comm.Barrier()
            if number:
                found.append(comm.bcast(time.perf_counter() - begin))
    return {'model': name, 'stages': 2, 'run': [
        {'seconds': statistics.median(found), 'times': found,
         'chosen': one} for found, one in zip(times, chosen, strict=True)]}


# --- seconds until there is a plan -------------------------------------------

class Different(chainer.Chain):
    """Layers none of which is like another."""

    def __init__(self, calls):
        super().__init__()
        widths = [64 + number for number in range(calls // 2)]
        with self.init_scope():
            self.layers = chainer.ChainList(*[
                L.Linear(one, other) for one, other
                in itertools.pairwise(widths)])
            self.out = L.Linear(widths[-1], 10)

    def forward(self, x, t):
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.softmax_cross_entropy(self.out(x), t)


def plan(comm, job, rows):
    """A row for a model of equal layers and one of different ones."""
    for name, make in ('alike', _alike), ('all different', _different):
        model, batch = make(job['calls'])
        seconds = {}
        for what, timed in ('trace', False), ('profile', True):
            names = Names(model)
            tracer = Tracer(model, names)
            start = time.perf_counter()
            with chainer.using_config('train', True):
                trace = tracer.trace(functools.partial(model, *batch),
                                     timed=timed)
            seconds[what] = time.perf_counter() - start
        # Both traces run every call once; times are taken on top.
        seconds['profile'] = max(seconds['profile'] - seconds['trace'], 0.0)
        calls = len(trace.calls)
        plans = {}
        for stages in job['stages']:
            start = time.perf_counter()
            order = order_of(trace.calls, list(names.parameters))
            search(trace.calls, order, parameters_of(names),
                   dataclasses.replace(CutProblem(2, _PARTS), stages=stages))
            plans[str(stages)] = time.perf_counter() - start
        rows.add({'model': name, 'calls': calls,
                  'different': len(tracer._memo), **seconds, 'plan': plans},
                 f'{name}: {calls} calls')


def _alike(calls):
    """As many layers of an encoder as have so many calls."""
    def model(layers):
        return Encoder(1000, 64, 4, layers, 32)
    batch = encoder_batch(samples=4)

    def count(layers):
        one = model(layers)
        with chainer.using_config('train', True):
            return len(Tracer(one, Names(one)).trace(
                lambda: one(*batch), timed=False).calls)
    one, two = count(1), count(2)
    return model(max(-(-(calls - one) // (two - one)), 0) + 1), batch


def _different(calls):
    rng = numpy.random.RandomState(0)
    return Different(calls), (rng.normal(0, 1, (16, 64)).astype('f'),
                              rng.randint(0, 10, 16).astype('i'))
