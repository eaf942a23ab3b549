"""What the ranks of the planning benchmark do: started by mpiexec.

    python planning_ranks.py SPECIFICATION.json RESULT.json

Measures the job, draws configurations, predicts a step of each, and then
trains in each of them, twice.  Before and after each time, all ranks pass
their own models forward and back: how fast the machine is now, as such
machines are not equally fast for long.
"""
from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import random
import statistics
import sys
import time

import chainer_fp8pipe  # noqa: F401, before chainer
from chainer_fp8pipe import PipelineUpdater
from chainer_fp8pipe.mpi.waiting import wait_until
from chainer_fp8pipe.planner.example import Example, Repeating, as_it_is
from chainer_fp8pipe.planner.planned_job import PlannedJob, measure
from chainer_fp8pipe.planner.training_passes import plain_pass
from chainer_fp8pipe.planning.job.choices import Choices, Wanted
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.job_plan import JobPlan
from chainer_fp8pipe.planning.job.step import StepModel
from chainer_fp8pipe.planning.partition.cuts import DoesNotFit

import chainer
import chainermn
import numpy
from mpi4py import MPI
from planning_models import NETS

#: Updates before the first that is timed: memory is allotted in these, and
#: with overlap the order of buckets is learnt.
WARM_UP, LEARNING = 2, 7
BLOCKS, SECONDS = 5, 1.5
#: For each look at the machine's speed.
PACE_SECONDS = 0.4


def main(specification: str, result: str) -> None:
    with open(specification) as file:
        job = json.load(file)
    comm = MPI.COMM_WORLD
    if job['pinned']:
        _keep_to_own_cores(comm)
    net = NETS[job['model']]
    batch = net.samples * comm.size
    wanted = Wanted(batch)
    start = time.perf_counter()
    profile = _profile(comm, job, net, wanted)
    measuring = time.perf_counter() - start
    if job['only_measure']:
        if comm.rank == 0:
            with open(result, 'wb') as file:
                pickle.dump(profile, file)
        return
    rows = []
    if comm.rank == 0:
        start = time.perf_counter()
        choices = Choices(profile, wanted)
        searching = time.perf_counter() - start
        best = choices.best.configuration
        chosen = drawn(choices, job['seed'], job['configurations'])
        rows = [{'label': str(one), 'choice': one.as_dict(),
                 'best': one == best, **_predicted(choices, one, batch)}
                for one in chosen]
    rows = comm.bcast(rows)
    pace = Pace(comm, net)
    for row in rows:
        row['seconds'], row['pace'] = [], []
    for _ in range(job['rounds']):
        for row in rows:
            before = pace.now()
            row['seconds'].append(_measured(comm, net, batch, row['choice']))
            row['pace'].append((before + pace.now()) / 2)
    if comm.rank == 0:
        for row, one in zip(rows, chosen, strict=True):
            row['predicted_now'] = [
                _at_pace(choices, one, batch, net.samples, seconds)
                for seconds in row['pace']]
        with open(result, 'w') as file:
            json.dump({**job, 'ranks': comm.size, 'measuring': measuring,
                       'searching': searching, 'rows': rows}, file)


def _profile(comm, job, net, wanted):
    """What the planner measures here, or has measured with fewer ranks."""
    if not job['profile']:
        return measure(make_model(net), example_of(net), comm, wanted,
                       net.optimizer(), torus=tuple(job['torus']) or None)
    with open(job['profile'], 'rb') as file:
        return pickle.load(file).for_ranks(comm.size)


def _predicted(choices, configuration, batch):
    step = choices.model.predict(configuration)
    return {'predicted': step.seconds.value, 'spread': step.seconds.spread,
            'parts': dict(step.parts),
            'memory': list(choices.memory.bytes_of(configuration, batch))}


def _at_pace(choices, configuration, batch, samples, seconds):
    """The prediction if a pass of all ranks takes so many seconds."""
    profile = choices.profile
    alone = Configuration(profile.ranks)
    expected = choices.model.predict(alone).parts['forward and backward']
    cores, factor = profile.cores, seconds / expected
    return StepModel(dataclasses.replace(profile, cores=dataclasses.replace(
        cores, single=cores.single * factor, full=tuple(
            one * factor for one in cores.full))), batch
        ).predict(configuration).seconds.value


def drawn(choices, seed, count):
    """The choice, and others by chance."""
    generator = random.Random(seed)
    found = [choices.best.configuration]
    makers = [_replicas_only]
    if choices.profile.ranks > 1:
        makers.append(_pipeline)
    tries = 0
    while len(found) < count and tries < 200:
        tries += 1
        one = makers[len(found) % len(makers)](choices, generator)
        if one is not None and one not in found:
            found.append(one)
    return found


def _replicas_only(choices, generator):
    return Configuration(
        choices.profile.ranks, codec=generator.choice(
            ['fp8', 'fp8', 'float16', 'float32', 'float32']),
        algorithm=generator.choice(['direct', 'direct', 'ring', 'torus2d']
                                   if choices.profile.ranks > 3 else
                                   ['direct']),
        overlap=generator.choice([False, False, True, 'next_forward']))


def _pipeline(choices, generator):
    ranks = choices.profile.ranks
    stages = generator.choice([number for number in range(2, ranks + 1)
                               if ranks % number == 0])
    share = choices.wanted.batch * stages // ranks
    micro_batches = generator.choice([
        number for number in (2, 3, 4, 6, 8, 12, 16)
        if stages <= number <= share] or [stages])
    schedule = generator.choice(['1f1b', 'gpipe', 'zero_bubble',
                                 'interleaved'])
    try:
        cut, _ = choices.cut(stages, ranks // stages, micro_batches, schedule)
    except (DoesNotFit, ValueError):
        return None
    return Configuration(
        ranks // stages, stages, micro_batches, cut,
        codec=generator.choice(['fp8', 'float32']))


# --- training ----------------------------------------------------------------

def _measured(comm, net, batch, choice):
    """Seconds of a step: means of some blocks of steps, the slowest rank's."""
    updater, communicator = updater_of(comm, net, choice, batch)
    wait_until(comm.Ibarrier().Test)
    for _ in range(LEARNING if choice['overlap'] else WARM_UP):
        updater.update()
    start = time.perf_counter()
    updater.update()
    one = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    steps = max(1, min(50, round(SECONDS / BLOCKS / one)))
    found = []
    for _ in range(BLOCKS):
        wait_until(comm.Ibarrier().Test)
        start = time.perf_counter()
        for _ in range(steps):
            updater.update()
        found.append(comm.allreduce(time.perf_counter() - start, MPI.MAX)
                     / steps)
    if communicator:
        communicator.finalize()
    del updater
    gc.collect()
    return found


class Pace:
    """How fast all ranks pass their own copies of a model now.

    Args:
        comm: All ranks.
        net: The model.
    """

    def __init__(self, comm, net):
        self._comm = comm
        self._model = make_model(net)
        self._work = plain_pass(self._model, example_of(net).of(net.samples))

    def now(self):
        """Seconds of a pass, which all ranks begin together, on the last."""
        comm, found = self._comm, []
        begin = time.perf_counter()
        while len(found) < 3 or comm.bcast(
                time.perf_counter() - begin < PACE_SECONDS):
            wait_until(comm.Ibarrier().Test)
            start = time.perf_counter()
            self._work()
            found.append(time.perf_counter() - start)
        self._model.cleargrads()
        return statistics.median(map(max, zip(*comm.allgather(found[1:]),
                                              strict=True)))


def updater_of(comm, net, choice, batch):
    """An updater as a plan with this choice sets one up; the communicator.

    Args:
        comm: All ranks.
        net: The model.
        choice: Content of a configuration.
        batch: Samples of all ranks.
    """
    example = example_of(net)
    data = JobPlan(Configuration(comm.size), comm.size, batch).as_dict()
    planned = PlannedJob({**data, 'choice': choice}, example)
    choice = planned.plan.choice
    model = make_model(net)
    communicator = None
    optimizer = net.optimizer()
    if choice.replicas > 1:
        warm_up = {'warmup': 0} if choice.codec == 'fp8' else {}
        communicator = planned.communicator(comm, **warm_up)
    if choice.stages > 1:
        model = _partitioned(planned, model, example)
    if communicator:
        optimizer = chainermn.create_multi_node_optimizer(optimizer,
                                                          communicator)
    optimizer.setup(model)
    iterator = Repeating(example.of(batch // choice.replicas))
    if choice.stages > 1:
        return PipelineUpdater(
            iterator, optimizer, planned.grid(comm),
            micro_batches=choice.micro_batches, schedule=choice.schedule,
            converter=as_it_is), communicator
    return chainer.training.updaters.StandardUpdater(
        iterator, optimizer, converter=as_it_is), communicator


def _partitioned(planned, model, example):
    choice = planned.plan.choice
    samples = planned.plan.batch // choice.replicas
    return chainer_fp8pipe.partition(
        model, example.of(max(1, samples // choice.micro_batches)),
        planned.grid(), micro_batches=choice.micro_batches,
        schedule=choice.schedule, plan=choice.cut,
        chunks=choice.cut.chunks)


def example_of(net):
    return Example(net.batch(numpy.random.RandomState(1), net.samples))


def make_model(net):
    numpy.random.seed(3)
    return net.make()


def _keep_to_own_cores(comm):
    """Hosts share this machine's cores evenly, and none moves to another's."""
    if hasattr(os, 'sched_setaffinity'):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})


if __name__ == '__main__':
    main(*sys.argv[1:])
