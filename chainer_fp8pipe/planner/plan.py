"""``plan``: tries some ways to train a model, and takes the fastest."""
# The ways are fixed, as what is fast on machines at hand is one of few:
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
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import chainer
from mpi4py import MPI

from ..chains.partition import partition
from ..codecs import CODECS
from ..communicators.options import make_options
from ..intercept.training_objects import own_work
from ..links.divisible import Divisible
from ..mpi.agreement import agree, raise_together
from ..mpi.placement import divisors
from ..mpi.ranks import nodes_of
from ..mpi.world import enter_world
from ..planning.cuts import DoesNotFit
from ..planning.partition_plan import PartitionPlan
from ..report.quantities import parse_bytes
from .example import Example
from .job_plan import JobPlan, Way, grid_of_stages, mpi_of, shapes_of
from .trials import (
    Trained,
    Trials,
    communicators_in,
    preferred,
    together,
    try_way,
    undisturbed,
)

#: Communicators that may be tried.
TRIED = tuple(name for name, row in CODECS.items() if not row.for_study)
#: Those that are tried unless a user names others.
USUAL_CODECS = 'float32', 'fp8', 'int4'
#: The part of the time for one way, and the seconds by which a budget may be
#: exceeded.
_OF_A_TRIAL, _OVERTIME = 0.04, 6.0


@own_work()
def plan(model: Any, example: Any, comm: Any = None, *,
         batch: int | None = None, memory: Any = None, optimizer: Any = None,
         codecs: Sequence[str] = USUAL_CODECS, stages: Sequence[int] = (),
         budget: float = 16.0, show: bool = False, data: Any = None,
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
        memory: What arrays of a rank may take: bytes, or a text such as
            ``'2 GiB'``; None: no limit.
        optimizer: That will train the model, set up or not; None: Adam.
        codecs: Names of communicators that are tried; ``('float32',)``: exact
            ones only.
        stages: Numbers of stages that are tried; (1,): replicas only; (): 1
            and the fewest that divide the ranks.
        budget: Seconds in which ways are tried, about; the later ways are
            left out where updates are long.
        show: Whether the first rank prints the plan and, on the standard
            error stream, what is being tried.
        data: What ways are tried with in place of the example, a
            :class:`~.example.Data`; None: the example.
        as_it_is: How the job is trained without a plan; it is tried, too, and
            is taken unless another one is faster.

    Returns:
        The plan, the same on all ranks.

    Raises:
        DoesNotFit: No way keeps within the memory; on all ranks.
        ValueError: An argument is wrong, ranks have other models, or the
            model cannot be trained; on all ranks.
    """
    enter_world()
    comm = mpi_of(comm)
    if not isinstance(codecs, str):
        codecs = raise_together(comm, lambda: tuple(codecs), ValueError)
    trained, stages = _checked(comm, model, example, optimizer, data, {
        'batch': batch, 'memory': memory, 'codecs': codecs,
        'stages': stages, 'budget': budget, 'as_it_is': as_it_is})
    begin, shows = time.perf_counter(), show and comm.rank == 0

    def say(what: str) -> None:
        if shows:
            print(f'chainer_fp8pipe plan: {what}', file=sys.stderr,
                  flush=True)
    trials = Trials(
        lambda way, limit: try_way(way, trained, comm, budget * _OF_A_TRIAL,
                                   limit), say,
        lambda: comm.bcast(budget + _OVERTIME - time.perf_counter() + begin))
    _try_all(trials, trained, comm, codecs, stages, as_it_is)
    found = _planned(trials, trained, comm, as_it_is)
    if shows:
        print(found, flush=True)
    return found


def _try_all(trials: Trials, trained: Trained, comm: MPI.Comm,
             codecs: Sequence[str], stages: Sequence[int],
             as_it_is: Way | None) -> None:
    count = comm.size
    if as_it_is is not None:
        trials.add(as_it_is)
    plain = [Way(count, communicator=codec) for codec in codecs
             ] if count > 1 else [Way()]
    if 1 not in stages:
        plain = []
    elif trained.batch < count:
        trials.remarks.append(f'no replicas: a batch of {trained.batch} has '
                              f'no sample for each of {count} ranks')
        plain = []
    for way in plain:
        trials.add(way)
    for number in stages:
        if number > 1:
            best = trials.fastest(plain)
            _try_stages(trials, trained, comm, number, best.communicator
                        if best else codecs[0])
    if count > 1 and plain:
        for way in plain:
            trials.add(dataclasses.replace(way, options={'overlap': True}))
        if len(set(nodes_of(comm))) == 1:
            trials.add(Way(count, communicator='naive'))
    trials.again()


def _try_stages(trials: Trials, trained: Trained, comm: MPI.Comm, stages: int,
                communicator: str) -> None:
    """Tries a pipeline with as many micro-batches as stages, and twice."""
    if communicators_in(trained.model):
        trials.remarks.append('no pipeline: the layers of the model '
                              'communicate with other ranks')
        return
    replicas = comm.size // stages
    most = trained.batch // replicas
    if not most:
        trials.remarks.append(f'no {stages} stages: a batch of '
                              f'{trained.batch} has no sample for each of '
                              f'{replicas} replicas')
        return
    cut: list[PartitionPlan] = []

    def find() -> None:
        copied = raise_together(comm, trained.copied)
        with undisturbed():
            cut.append(partition(
                copied.target, trained.share(replicas, min(stages, most)),
                grid_of_stages(comm, stages),
                micro_batches=min(stages, most), memory=trained.memory).plan)
    if problem := together(comm, find):
        trials.remarks.append(f'no {stages} stages: '
                              + problem.removeprefix('ValueError: '))
        return
    for number in sorted({min(stages, most), min(2 * stages, most)}):
        trials.add(Way(replicas, dataclasses.replace(
            cut[0], micro_batches=number), communicator))


def _planned(trials: Trials, trained: Trained, comm: MPI.Comm,
             as_it_is: Way | None) -> JobPlan:
    table, remarks = trials.table(), list(trials.remarks)
    if not table:
        raise (DoesNotFit if trained.memory is not None else ValueError)(
            'no way to train this model could be tried: '
            + '; '.join(remarks))
    taken = preferred(table, as_it_is)
    if taken.ranks < comm.size:
        remarks.append(
            'one process is as fast as any way on '
            f'{comm.size} ranks: "run --plan" has rank 0 train alone')
    if not taken.is_exact:
        remarks.append(
            f'gradients are rounded to {taken.communicator}; --codecs float32 '
            'leaves such ways out')
        if warmup := getattr(make_options(
                taken.communicator, dict(taken.options)), 'warmup', 0):
            remarks.append(f'the first {warmup} updates travel in float32 '
                           '(warmup); what was tried is what follows')
    return JobPlan(taken, comm.size, trained.batch, shapes_of(trained.model),
                   tuple(trial for _, trial in table), tuple(remarks))


# --- arguments --------------------------------------------------------------

def _checked(comm: MPI.Comm, model: Any, example: Any, optimizer: Any,
             data: Any, given: Mapping[str, Any]
             ) -> tuple[Trained, tuple[int, ...]]:
    """Checks the arguments, and that they are the same on all ranks."""
    def check() -> tuple[Trained, tuple[int, ...]]:
        if isinstance(model, Divisible) or not isinstance(
                model, chainer.Link):
            raise TypeError('plan() takes a chainer.Link that returns its '
                            f'loss, not {type(model).__name__}')
        if getattr(model, 'partition', None) is not None:
            raise ValueError('this model was cut already; build it anew')
        if optimizer is not None and not isinstance(
                optimizer, chainer.Optimizer):
            raise TypeError('optimizer must be a chainer.Optimizer, not '
                            f'{type(optimizer).__name__}')
        samples, batch = Example(example), given['batch']
        if batch is not None and (type(batch) is not int or batch < 1):
            raise ValueError('batch must be a number of at least 1, not '
                             f'{batch!r}')
        return Trained(
            model, optimizer or chainer.optimizers.Adam(), samples,
            batch or samples.samples * comm.size, data,
            parse_bytes(given['memory'])), _wanted(comm.size, given)
    found, stages = raise_together(comm, check, error=ValueError)
    agree(comm, {
        **{name: repr(value) for name, value in given.items()},
        'stages': repr(stages), 'batch': repr(found.batch),
        'the model': repr(shapes_of(model))},
        remedy='Pass the same to plan() on all ranks.')
    return found, stages


def _wanted(count: int, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Checks what may be tried; returns numbers of stages."""
    budget, codecs = given['budget'], given['codecs']
    if type(budget) not in (int, float) or not 0 < budget < math.inf:
        raise ValueError('budget must be seconds, more than 0, not '
                         f'{budget!r}')
    unknown = [name for name in codecs if name not in TRIED]
    if isinstance(codecs, str) or unknown or not codecs:
        raise ValueError(
            f'codecs must be some of {", ".join(TRIED)} in a list, not '
            f'{codecs if isinstance(codecs, str) else unknown or "none"!r}')
    stages = tuple(given['stages']) or tuple(divisors(count)[:2])
    for one in stages:
        if type(one) is not int or one < 1 or count % one:
            raise ValueError(f'stages={one!r} does not divide the {count} '
                             'ranks')
    return stages
