"""``plan``: tries some ways to train a script's model, and takes the fastest.
"""
# The ways are fixed:
#   the script as it is, if there is one
#   replicas by each codec, and the same with overlap
#   the fewest stages that divide the ranks, with as many micro-batches and
#   twice as many, replicas of these by the codec that was the fastest
#   ChainerMN's naive, where all ranks are on one host
# Their order leaves out what matters least if the time is over.  Nothing is
# predicted: a way that was not tried is not in the plan.
from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import chainer
import numpy
from chainermn.optimizers import _DoubleBufferingOptimizer, _MultiNodeOptimizer
from mpi4py import MPI

from ..chains import nested
from ..chains.partition import partition
from ..chains.plan import PartitionPlan
from ..codecs import CODECS
from ..command_line import Parser, as_type, some_of
from ..communicators import create_communicator
from ..communicators.options import FAMILIES
from ..intercept.training_objects import Originals, own_work
from ..mpi import divisors
from ..mpi.agreement import agree, raise_together
from ..mpi.ranks import nodes_of
from ..pipeline.meetings import decisions
from ..pipeline.randomness import preserved
from ..report.quantities import parse_seconds
from ..training.unmodified.files import Files
from ..training.unmodified.job import first_batch
from ..training.unmodified.launch import (
    Refusal,
    add_script,
    check,
    launch,
    loss_of,
    refusing,
)
from .job_plan import JobPlan, Trial, Way
from .trials import (
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
_DESCRIPTION = """
Finds the fastest way to run an unmodified Chainer or ChainerMN script:

    mpiexec -n 8 python -m chainer_fp8pipe plan -o plan.json train.py -b 64
    mpiexec -n 8 python -m chainer_fp8pipe run --plan plan.json train.py -b 64

Start it as you start your training: same hosts, same ranks, same arguments
of the script.  Options of "plan" come before SCRIPT.

All ranks run the script until it is about to train.  Copies of its model are
then trained for some updates in up to ten ways, with the script's own data.
It takes half a minute at most, unless updates take seconds.

The batch size of a script without ChainerMN is that of all ranks together.
That of a ChainerMN script is of each rank; its plan has replicas only.
"""


def add_plan(parser: Parser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        '-o', '--output', metavar='FILE',
        help='save the plan there, as JSON, for "run --plan"')
    parser.add_argument(
        '--codecs', metavar='NAME,...', type=some_of(TRIED),
        default=USUAL_CODECS, help='formats that gradients may travel in: '
        f'{", ".join(TRIED)} (default: {",".join(USUAL_CODECS)}; float32 '
        'alone is exact)')
    parser.add_argument(
        '--seconds', metavar='S', type=as_type(parse_seconds), default=16.0,
        help='time for trying ways, about (default: 16)')
    add_script(parser, lambda options: functools.partial(
        launch, options.script, options.arguments, 'plan', _job(options)))


def _job(options: argparse.Namespace) -> ScriptPlan:
    """What plans the script's job, if the plan can be written."""
    comm, file = MPI.COMM_WORLD, os.path.abspath(options.output or '.')
    place = file if os.path.exists(file) else os.path.dirname(file)
    # Rank 0 writes; others may be on hosts where the folder is not.
    if not comm.bcast(options.output is None or (
            os.access(place, os.W_OK) and not os.path.isdir(file))):
        raise ValueError(f'-o: {options.output} cannot be written')
    return ScriptPlan(comm, options)


#: Communicators that need no GPU.
_CREATED = {*FAMILIES, 'naive', 'flat', 'non_cuda_aware'}


class ScriptPlan(Originals):
    """Plans a script's job when the script is about to train.

    All ranks run the script until it calls ``run()`` of its Trainer or
    ``update()`` of its ``StandardUpdater``; then model, optimizer, batch and
    batch size are known.  The script writes no models, and does not go on.
    """

    def __init__(self, comm: MPI.Comm, options: argparse.Namespace) -> None:
        self._comm, self._options = comm, options
        # The script would say everything as often as there are ranks.
        self._files = Files(comm)
        self.block = self._files.script
        self._updater: Any = None
        # The communicators that the script has created, and how they train.
        self._made: list[tuple[Any, Way | None]] = []

    def create(self, original: Callable, communicator_name: str = 'pure_nccl',
               mpi_comm: Any = None, **options: Any) -> Any:
        with refusing():
            made = (create_communicator(communicator_name, mpi_comm, **options)
                    if communicator_name in FAMILIES
                    else create_communicator('float32', mpi_comm))
        self._made.append((made, Way(
            self._comm.size, None, communicator_name, {
                name: numpy.dtype(value).name if isinstance(
                    value, (type, numpy.dtype)) else value
                for name, value in options.items()})
            if communicator_name in _CREATED else None))
        return made

    def finish(self) -> None:
        """Raises Refusal: the script has not trained."""
        raise Refusal(
            'the script has ended without training: it has called neither '
            'run() of a Trainer nor update() of a chainer.training.'
            'StandardUpdater')

    # --- what the script makes ----------------------------------------------

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        check(updater=updater, other_updater=self._updater)
        self._updater = updater
        original(updater, *args, **kwargs)

    def update(self, original: Callable, updater: Any) -> None:
        self._end()

    def update_optimizer(self, original: Callable, optimizer: Any,
                         *args: Any, **kwargs: Any) -> None:
        check(own_loop=None)
        original(optimizer, *args, **kwargs)

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        if trainer.updater is not self._updater:
            check(updater=trainer.updater)
        self._end()

    def save(self, original: Callable, file: Any, obj: Any, *args: Any,
             **kwargs: Any) -> None:
        self._say(f'{file} is not written')

    # --- the plan -----------------------------------------------------------

    def _end(self) -> NoReturn:
        comm, options, updater = self._comm, self._options, self._updater
        self._files.close()
        with refusing():
            optimizer, as_it_is = raise_together(
                comm, self._optimizer, ValueError)
        is_shared = as_it_is is not None and as_it_is.ranks == 1 < comm.size
        # On all ranks, as iterators may be each other's.
        batch = first_batch(comm, updater, updater.get_iterator('main').next)
        with refusing():
            example = raise_together(comm, lambda: Example(batch), ValueError)
        trained = Trained(
            updater, optimizer, example,
            example.samples * (1 if is_shared else comm.size), is_shared)
        model = trained.model
        if not all(one.is_initialized for one in model.params()):
            given, named = nested.arguments_of(trained.share(comm.size))
            clone = copy.deepcopy(model)    # forward may change it
            with chainer.no_backprop_mode():
                clone(*given, **named)
            model.copyparams(clone, copy_persistent=False)
        if not is_shared:
            self._say("the script is ChainerMN's, which keeps the whole "
                      'model on each rank: no pipeline is looked at')
        with refusing():
            made = dataclasses.replace(
                plan(trained, comm, options.codecs, options.seconds,
                     self._say, as_it_is), communicates=bool(self._made))
        if comm.rank == 0:
            print(made, flush=True)
            if options.output is not None:
                made.save(options.output)
                self._say(f'the plan is in {options.output}')
        updater.finalize()
        self._say(f'{options.script} was left at its first update: nothing is '
                  'trained, evaluated or saved')
        raise SystemExit(0)     # the plan is made

    def _optimizer(self) -> tuple[Any, Way | None]:
        """Chainer's optimizer, and how the script trains, if that is known."""
        check(optimizers=self._updater.get_all_optimizers())
        found = self._updater.get_optimizer('main')
        count, as_it_is = self._comm.size, None
        if isinstance(found, (_MultiNodeOptimizer,
                              _DoubleBufferingOptimizer)):
            mean = found.communicator
            if mean.size != count:
                raise ValueError(
                    f'the script averages gradients over {mean.size} of the '
                    f'{count} ranks; a plan is for all of them')
            if isinstance(found, _MultiNodeOptimizer):
                as_it_is = next((way for made, way in self._made
                                 if made is mean), None)
            found = found.actual_optimizer
        elif not self._made and not (
                found.target and communicators_in(found.target)):
            as_it_is = Way()
            check(iterator=self._updater.get_iterator('main'),
                  optimizer=found, model=found.target)
            decisions(found, 1)
        check(model=found.target,
              loss_func=loss_of(self._updater.loss_func, found.target))
        return found, as_it_is

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f'chainer_fp8pipe plan: {text}', file=sys.stderr,
                  flush=True)


# --- the ways ---------------------------------------------------------------

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
    agree(comm, {'--codecs': str(codecs), '--seconds': str(
        budget), 'the batch': str(trained.batch), 'the communicator': str(
        as_it_is), 'the model': str([
            (name, one.is_initialized and one.shape)
            for name, one in sorted(trained.model.namedparams())])},
        remedy='Give all ranks the same options, and have the script '
        'make the same on them.')
    trials = Trials(
        lambda way: try_way(way, trained, comm, budget * _OF_A_TRIAL), say,
        lambda: comm.bcast(budget + _OVERTIME - time.perf_counter() + begin))
    with preserved():
        _try_all(trials, trained, comm, codecs, as_it_is)
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
