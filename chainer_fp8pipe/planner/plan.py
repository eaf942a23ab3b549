"""``plan``: tries some ways to train a model, and takes the fastest."""
# The ways are fixed:
#   the script as it is, if there is one
#   replicas by each codec, and the same with overlap
#   the fewest stages that divide the ranks, with as many micro-batches and
#   twice as many, replicas of these by the codec that was the fastest
#   ChainerMN's naive, where all ranks are on one host
# They are tried in an order that leaves out what matters least if updates are
# so long that the time is over.  Nothing is predicted: a way that was not
# tried is not in the plan.
from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import chainer
from mpi4py import MPI

from ..chains.partition import partition
from ..chains.plan import PartitionPlan
from ..codecs import CODECS
from ..intercept.training_objects import own_work
from ..links.divisible import Divisible
from ..mpi import all_ranks
from ..mpi.agreement import agree, raise_together
from ..mpi.placement import divisors
from ..mpi.ranks import nodes_of
from ..mpi.world import enter_world
from ..pipeline.randomness import preserved
from .job_plan import JobPlan, Trial, Way
from .trials import (
    Data,
    Example,
    Trained,
    Trials,
    communicators_in,
    grid_of_stages,
    together,
    try_way,
)

#: Communicators that may be tried.
TRIED = tuple(name for name, row in CODECS.items() if not row.for_study)
#: Those that are tried unless a user names others.
USUAL_CODECS = 'float32', 'fp8', 'int4'
#: The part of the time for one way, and the seconds by which a budget may be
#: exceeded.
_OF_A_TRIAL, _OVERTIME = 0.04, 6.0
#: Ways are equally fast within this share, or within what both are uncertain
#: by, but never beyond that one.
_EQUAL, _APART = 0.03, 0.1


@own_work()
def plan(model: Any, example: Any, comm: Any = None, *,
         batch: int | None = None, optimizer: Any = None,
         codecs: Sequence[str] = USUAL_CODECS, budget: float = 16.0,
         show: bool = False, data: Data | None = None,
         as_it_is: Way | None = None) -> JobPlan:
    """Finds the fastest of some ways to train a model on these ranks.

    Copies of model and optimizer are trained for some updates as replicas by
    each codec, with and without overlap, by ChainerMN's ``naive`` and as a
    pipeline.  Of ways that are equally fast the plan takes an exact one, and
    of these the simplest.  Call it on all ranks; the model, the optimizer and
    the generators of random numbers stay as they are.

    Args:
        model: The whole model, as it is written; it returns its loss.
        example: A batch of one rank, as the converter gives it: an array, a
            tuple of arrays or a dictionary.
        comm: All ranks: a communicator of mpi4py's or ChainerMN's; None:
            ``MPI.COMM_WORLD``.
        batch: Samples of an update, of all ranks together; None: those of
            the example, times the ranks.
        optimizer: That will train the model, set up or not; None: Adam.
        codecs: Names of communicators that are tried; ``('float32',)``: exact
            ones only.
        budget: Seconds in which ways are tried, about; the later ways are
            left out where updates are long.
        show: Whether the first rank prints the plan and, on the standard
            error stream, what is being tried.
        data: What ways are tried with in place of the example, a
            :class:`~.trials.Data`; None: the example.
        as_it_is: How the job is trained without a plan; it is tried, too, and
            is taken unless another one is faster.

    Returns:
        The plan, the same on all ranks.

    Raises:
        ValueError: An argument is wrong, ranks have other models, or no way
            can train the model; on all ranks.
    """
    enter_world()
    comm = MPI.COMM_WORLD if comm is None else all_ranks(comm)
    begin, shows = time.perf_counter(), show and comm.rank == 0

    def check() -> tuple[Trained, tuple[str, ...]]:
        _must_be_trainable(model, optimizer)
        samples = Example(example)
        if batch is not None and (type(batch) is not int or batch < 1):
            raise ValueError('batch must be a number of at least 1, not '
                             f'{batch!r}')
        if type(budget) not in (int, float) or not 0 < budget < math.inf:
            raise ValueError('budget must be seconds, more than 0, not '
                             f'{budget!r}')
        names = () if isinstance(codecs, str) else tuple(codecs)
        if not names or {*names} - {*TRIED}:
            raise ValueError(f'codecs must be some of {", ".join(TRIED)} in a '
                             f'list, not {[*names] or codecs!r}')
        return Trained(model, optimizer or chainer.optimizers.Adam(), samples,
                       batch or samples.samples * comm.size, data), names
    trained, names = raise_together(comm, check, ValueError)
    agree(comm, {name: repr(value) for name, value in {
        'batch': trained.batch, 'codecs': names, 'budget': budget,
        'as_it_is': as_it_is, 'the model': [
            (name, one.is_initialized and one.shape)
            for name, one in sorted(model.namedparams())]}.items()},
        remedy='Pass the same to plan() on all ranks.')

    def say(what: str) -> None:
        if shows:
            print(f'chainer_fp8pipe plan: {what}', file=sys.stderr,
                  flush=True)
    trials = Trials(
        lambda way: try_way(way, trained, comm, budget * _OF_A_TRIAL), say,
        lambda: comm.bcast(budget + _OVERTIME - time.perf_counter() + begin))
    state = random.getstate()
    try:
        with preserved():
            _try_all(trials, trained, comm, names, as_it_is)
    finally:
        random.setstate(state)
    if not trials.found:
        raise ValueError('no way to train this model could be tried: '
                         + '; '.join(trials.remarks))
    taken = preferred(trials.found, as_it_is)
    if not taken.is_exact:
        trials.remarks.append(
            f'gradients are rounded to {taken.communicator}; --codecs float32 '
            'leaves such ways out')
    found = JobPlan(taken, comm.size, trained.batch, tuple(sorted(
        (trial for _, trial in trials.found), key=lambda one: one.seconds)),
        tuple(trials.remarks))
    if shows:
        print(found, flush=True)
    return found


def _must_be_trainable(model: Any, optimizer: Any) -> None:
    if isinstance(model, Divisible) or not isinstance(model, chainer.Link):
        raise TypeError('plan() takes a chainer.Link that returns its '
                        f'loss, not {type(model).__name__}')
    if getattr(model, 'partition', None) is not None:
        raise ValueError('this model was cut already; build it anew')
    if optimizer is not None and not isinstance(optimizer, chainer.Optimizer):
        raise TypeError('optimizer must be a chainer.Optimizer, not '
                        f'{type(optimizer).__name__}')


def _try_all(trials: Trials, trained: Trained, comm: MPI.Comm,
             codecs: Sequence[str], as_it_is: Way | None) -> None:
    count, batch = comm.size, trained.batch
    if as_it_is is not None:
        trials.add(as_it_is)
    plain = ([] if batch < count else [
        Way(count, None, codec) for codec in codecs]) if count > 1 else [Way()]
    if batch < count:
        trials.remarks.append(f'no replicas: a batch of {batch} has no sample '
                              f'for each of {count} ranks')
    for way in plain:
        trials.add(way)
    best = min((one for one in trials.found if one[0] in plain),
               key=lambda one: one[1].seconds, default=None)
    if count > 1 and (trained.data is None or trained.data.is_shared):
        _try_stages(trials, trained, comm,
                    best[0].communicator if best else codecs[0])
    for way in plain * (count > 1):
        trials.add(dataclasses.replace(way, options={'overlap': True}))
    if plain and len(set(nodes_of(comm))) == 1 < count:
        trials.add(Way(count, None, 'naive'))
    trials.again()


def _try_stages(trials: Trials, trained: Trained, comm: MPI.Comm,
                communicator: str) -> None:
    """Tries a pipeline with as many micro-batches as stages, and twice."""
    stages = divisors(comm.size)[1]
    replicas = comm.size // stages
    most = trained.batch // replicas
    cut: list[PartitionPlan] = []

    def find() -> None:
        copied = raise_together(comm, trained.copied)
        cut.append(partition(
            copied.target, trained.share(replicas, min(stages, most)),
            grid_of_stages(comm, stages),
            micro_batches=min(stages, most)).plan)
    try:
        if communicators_in(trained.model):
            raise ValueError('layers of the model communicate with other '
                             'ranks')
        if not most:
            raise ValueError(f'a batch of {trained.batch} has no sample for '
                             f'each of {replicas} replicas')
        together(comm, find)
    except ValueError as error:
        trials.remarks.append(f'no {stages} stages: {error}')
        return
    for number in sorted({min(stages, most), min(2 * stages, most)}):
        trials.add(Way(replicas, dataclasses.replace(
            cut[0], micro_batches=number), communicator))


def preferred(table: Sequence[tuple[Way, Trial]], as_it_is: Way | None = None
              ) -> Way:
    """Of the fastest ways the script's own, or the simplest."""
    best = min((trial for _, trial in table), key=lambda one: one.seconds)
    equal = [way for way, trial in table if trial.seconds <= best.seconds * (
        1 + max(_EQUAL, min(best.spread, trial.spread, _APART)))]
    return as_it_is if as_it_is in equal else min(equal, key=Way.simplicity)
