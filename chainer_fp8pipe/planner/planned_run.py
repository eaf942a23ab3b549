"""``python -m chainer_fp8pipe run --plan``: a script as a plan says."""
from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import chainer
from mpi4py import MPI

from ..communicators import create_communicator
from ..intercept.training_objects import Originals
from ..planning.job_plan import JobPlan
from ..training.unmodified.jobs import Options, PipelineJob, ReplicaJob
from ..training.unmodified.launch import Refusal, as_one_process, launch
from .planned_job import read_together, shapes_of

#: Of ``run``'s options, what is none of the communicator's or pipeline's.
_BESIDE = {'script', 'arguments', 'plan', 'snapshots', 'every', 'call',
           'parser'}


def planned_run(options: argparse.Namespace,
                restarting: Sequence[Any]) -> Callable[[], None]:
    """Checks the arguments of ``run --plan``; the result runs the script.

    Call it on all ranks.

    Args:
        options: The parsed arguments of ``run``.
        restarting: What adds snapshots to the script's Trainers, if
            anything does.

    Raises:
        ValueError: Other options were given, or the plan cannot be carried
            out on these ranks; on all ranks.
    """
    for name, value in vars(options).items():
        if name not in _BESIDE and value is not None:
            raise ValueError(
                f'--{name.replace("_", "-")} does not go with --plan, as the '
                'plan says it; leave one of them out, or edit "choice" in '
                f'{options.plan}')
    plan = read_together(MPI.COMM_WORLD, options.plan)
    return functools.partial(_run, plan, options.plan, options.script,
                             options.arguments, restarting)


def _run(plan: JobPlan, file: str, script: str, arguments: list[str],
         restarting: Sequence[Any]) -> None:
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        print(f'chainer_fp8pipe run: as planned: {plan.choice}',
              file=sys.stderr)
    with contextlib.ExitStack() as quiet:
        # A script without ChainerMN would say everything on each rank.
        quiet.enter_context(as_one_process())
        job = PlannedScript(comm, plan, file, quiet.close)
        if plan.choice.stages > 1:
            quiet.enter_context(job.undrawn.building())
        launch(script, arguments, 'run', job.create, *restarting, job)


class PlannedScript:
    """Has a script's objects made as a plan says.

    A :class:`~chainer_fp8pipe.intercept.training_objects.Originals`.  A
    script that creates a communicator gets that of the plan, and Chainer
    makes everything else; any other script is trained by a
    :class:`.ReplicaJob` or a :class:`.PipelineJob`.

    Args:
        comm: All ranks.
        plan: For as many ranks.
        file: Where the plan is from, for messages.
        on_chainermn: Called when the script creates a communicator.
    """

    def __init__(self, comm: MPI.Comm, plan: JobPlan, file: str,
                 on_chainermn: Callable[[], None]) -> None:
        self._plan, self._comm, self._file = plan, comm, file
        self._on_chainermn = on_chainermn
        choice = plan.choice
        kind = ReplicaJob if choice.stages == 1 else PipelineJob
        self._now: Any = kind(comm, Options(
            choice.stages, choice.micro_batches,
            schedule=choice.schedule or '1f1b', cut=choice.cut),
            self._communicator, self._check)
        self.undrawn = self._now.undrawn

    def __getattr__(self, name: str) -> Callable:
        """What the substitute of this kind of script does, when it is known.
        """
        def act(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._now, name)(*args, **kwargs)
        return act

    def create(self, communicator_name: str = '', mpi_comm: Any = None,
               **options: Any) -> Any:
        """In place of ``chainermn.create_communicator``."""
        choice = self._plan.choice
        ranks = self._comm if mpi_comm is None else mpi_comm
        if choice.stages > 1:
            raise Refusal(
                "the script is ChainerMN's, which keeps the whole model on "
                f'each rank, but {self._file} has {choice.stages} stages; '
                'make a plan of this script: python -m chainer_fp8pipe plan '
                '-o FILE SCRIPT')
        if ranks.size != self._comm.size:
            raise Refusal(
                f'the script creates a communicator of {ranks.size} of the '
                f'{self._comm.size} ranks, but {self._file} is for all; give '
                '--communicator in place of --plan')
        self._on_chainermn()
        self._now = CheckedScript(self._check)
        return self._communicator(ranks)

    def _communicator(self, comm: MPI.Comm) -> Any:
        choice = self._plan.choice
        return create_communicator(choice.codec, comm,
                                   **choice.communicator_options())

    def _check(self, model: Any) -> None:
        # Not together: a script may have models on some ranks only.
        if problem := self._plan.problem(shapes_of(model), None):
            raise Refusal(f'{self._file}: {problem}')


class CheckedScript(Originals):
    """Has Chainer make everything; checks that the model is the plan's.

    Args:
        check: Raises Refusal about a model that is not.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        self._check = check

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        original(updater, *args, **kwargs)
        for optimizer in updater.get_all_optimizers().values():
            if isinstance(optimizer.target, chainer.Link):
                self._check(optimizer.target)

    def finish(self) -> None:
        """The script has ended."""
