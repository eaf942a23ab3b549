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
import random
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from ..chains.partition import partition
from ..chains.plan import PartitionPlan
from ..codecs import CODECS
from ..intercept.training_objects import own_work
from ..mpi import divisors
from ..mpi.agreement import agree, raise_together
from ..mpi.ranks import nodes_of
from ..pipeline.randomness import preserved
from .job_plan import JobPlan, Trial, Way
from .trials import (
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
def plan(trained: Trained, comm: MPI.Comm, codecs: Sequence[str],
         budget: float, say: Callable[[str], object],
         as_it_is: Way | None = None) -> JobPlan:
    """Finds the fastest of some ways to train on these ranks; call it on all.

    The later ones of ``codecs`` and other ways are left out where updates are
    so long that the ``budget`` is over, seconds.  ``as_it_is`` is how the job
    is trained without a plan.  Generators of random numbers stay as they are.

    Raises ValueError, on all ranks, if they have other models, or no way can
    train the model.
    """
    begin = time.perf_counter()
    agree(comm, {'the batch': str(trained.batch), 'the communicator': str(
        as_it_is), 'the model': str([
            (name, one.is_initialized and one.shape)
            for name, one in sorted(trained.model.namedparams())])},
        remedy='Have the script make the same on all ranks.')
    trials = Trials(
        lambda way: try_way(way, trained, comm, budget * _OF_A_TRIAL), say,
        lambda: comm.bcast(budget + _OVERTIME - time.perf_counter() + begin))
    state = random.getstate()
    try:
        with preserved():
            _try_all(trials, trained, comm, codecs, as_it_is)
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
    return JobPlan(taken, comm.size, trained.batch, tuple(sorted(
        (trial for _, trial in trials.found), key=lambda one: one.seconds)),
        tuple(trials.remarks))


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
    if count > 1 and trained.is_shared:
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
