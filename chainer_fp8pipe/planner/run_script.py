"""``python -m chainer_fp8pipe run``: its arguments, and what it does."""
from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import chainer
from mpi4py import MPI

from ..command_line import check_script, count, parse_interval
from ..communicators import create_communicator
from ..communicators.factory import CHAINERMN
from ..communicators.options import (
    FAMILIES,
    OPTIONS,
    make_options,
    parse_option,
)
from ..mpi.agreement import of_first_rank
from ..pipeline.schedules import SCHEDULES
from ..report.launch_protocol import is_launched
from ..report.quantities import parse_bytes
from ..training.unmodified.launch import (
    RankAware,
    Refusal,
    launch,
    refuse_together,
    refusing,
)

_DESCRIPTION = """
Runs an unmodified ChainerMN script:

    mpiexec -n 4 python -m chainer_fp8pipe run --communicator fp8 \\
        --warmup 50 train_mnist.py --epoch 20

Chainer is made to work on this Python before the script's first line.
--communicator replaces the one that chainermn.create_communicator(...) names
in the script.

--pipeline N trains an unmodified Chainer script, without ChainerMN, with the
layers of its model divided over N ranks:

    mpiexec -n 4 python -m chainer_fp8pipe run --pipeline 4 \\
        --micro-batches 8 --memory '2 GiB' train_mnist.py --epoch 20

Every rank runs the script.  Rank 0 decides the order of the data, prints, and
writes files.  StandardUpdater, Trainer, Evaluator, Chainer's reports,
snapshot, save_npz and load_npz stay as they are.  The batch size is that of
all ranks together.  With more than N ranks, every N hold a replica of the
model.  Replicas share each batch; --communicator (default here: float32)
averages their gradients.

--plan runs either kind of script as the command "plan" has found best, on as
many ranks:

    mpiexec -n 8 python -m chainer_fp8pipe plan -o plan.json train.py
    mpiexec -n 8 python -m chainer_fp8pipe run --plan plan.json train.py

With --snapshots a script that is started again goes on where it was.  The
command "launch" starts it again by itself.
"""


def add_run(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    run = commands.add_parser('run', description=_DESCRIPTION)
    run.add_argument(
        '--plan', metavar='FILE', help='plan to carry out, a file of the '
        'command "plan"; it replaces all other options')
    run.add_argument(
        '--communicator', metavar='NAME', choices=[*FAMILIES, *CHAINERMN],
        help=f'one of {", ".join([*FAMILIES, *CHAINERMN])}')
    run.add_argument(
        '--pipeline', metavar='N', type=count,
        help='divide the model of a script without ChainerMN over N ranks')
    run.add_argument(
        '--micro-batches', metavar='N', type=count,
        help='parts of a batch in each pipeline (default: 4)')
    run.add_argument(
        '--memory', metavar='SIZE', type=size, help='most memory of a '
        "rank of the pipeline, such as '2 GiB' (default: no limit)")
    run.add_argument(
        '--schedule', choices=SCHEDULES,
        help='order of work in a pipeline (default: 1f1b)')
    run.add_argument(
        '--snapshots', metavar='DIR', help='directory for snapshots '
        'of the whole job; a start goes on from the newest one')
    run.add_argument(
        '--every', metavar='INTERVAL', type=parse_interval, help='between '
        "snapshots: 30s, 5m, 1h, '100 iterations', '1 epoch' (default: 5m)")
    for name, field in OPTIONS.items():
        metadata = field.metadata
        choices = '|'.join(map(str, metadata['choices']))
        run.add_argument(
            f'--{name.replace("_", "-")}', metavar=(
                choices or type(field.default).__name__.upper()),
            help=metadata['help'].replace('%', '%%') + f' ({_defaults(name)})')
    add_script(run, 'run', lambda options: [
        *_restarting(options),
        (_as_given if options.plan is None else _as_planned)(options)])


def add_script(parser: argparse.ArgumentParser, command: str,
               jobs_of: Callable[[argparse.Namespace], list[Any]]) -> None:
    """Adds a script and its arguments to a command, which runs the script.

    Args:
        parser: Of the command.
        command: Its name.
        jobs_of: Checks the command's options, on all ranks, and gives the
            jobs for :func:`launch`; raises ValueError about wrong options.
    """
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('arguments', metavar='ARGS', nargs=argparse.REMAINDER,
                        help="the script's own arguments")

    def checked(options: argparse.Namespace) -> Callable[[], None]:
        try:
            refuse_together(MPI.COMM_WORLD, lambda: check_script(
                options.script), ValueError)
            jobs = jobs_of(options)
        except ValueError as error:
            parser.error(str(error))
        return lambda: launch(options.script, options.arguments, command,
                              *jobs)
    parser.set_defaults(call=checked, parser=parser)


def size(text: str) -> str:
    """For ``type=``: bytes, as people write them."""
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _restarting(options: argparse.Namespace) -> list[Any]:
    """What adds snapshots to a script's Trainers, if anything does."""
    if options.snapshots is None and options.every is not None:
        raise ValueError('--every is an option of --snapshots DIR')
    if options.snapshots is None and not is_launched():
        return []
    from ..training.unmodified.restarting import Restarting, check_writable
    comm = MPI.COMM_WORLD
    if options.snapshots is not None:
        refuse_together(comm, lambda: None if comm.rank else check_writable(
            options.snapshots), ValueError)
    return [Restarting(comm, options.snapshots,
                       options.every or parse_interval('5m'))]


# --- with options of its own ------------------------------------------------

def _as_given(options: argparse.Namespace) -> Any:
    """The job that the options of the command line say, but for ``--plan``."""
    given, name = _communicator_options(options), options.communicator
    pipeline, comm = _pipeline_options(options), MPI.COMM_WORLD

    def create(communicator_name: str = 'pure_nccl', mpi_comm: Any = None,
               **kwargs: Any) -> Any:
        if name is None:
            if communicator_name not in {*FAMILIES, *CHAINERMN}:
                raise Refusal(
                    f'ChainerMN 7 has no communicator {communicator_name!r}; '
                    'give --communicator naive, or another')
            with refusing():
                return create_communicator(communicator_name, mpi_comm,
                                           **{**kwargs, **given})
        if comm.rank == 0 and name != communicator_name:
            print(f'chainer_fp8pipe: communicator {name!r} in place of '
                  f'{communicator_name!r}', file=sys.stderr)
        # The script's options are for the communicator it meant.
        with refusing():
            return create_communicator(name, mpi_comm, **given)
    if pipeline is None:
        return RankAware(comm, options.script, create)
    from ..training.unmodified.jobs import PipelineJob
    return PipelineJob(comm, pipeline, lambda replicas: create_communicator(
        name or 'float32', replicas, **given), create)


def _defaults(option: str) -> str:
    """``default: X``, and the other defaults by communicator."""
    return '; '.join([
        f'default: {OPTIONS[option].default}',
        *(f'{name}: {defaults[option]}'
          for name, defaults in FAMILIES.items() if option in defaults)])


def _communicator_options(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: text for name in OPTIONS
             if (text := getattr(options, name)) is not None}
    name = options.communicator or 'fp8'
    if given and name not in FAMILIES:
        raise ValueError(f'communicator {name!r} is ChainerMN\'s and has no '
                         f'option {min(given)!r}')
    parsed = {option: parse_option(name, option, text)
              for option, text in given.items()}
    if parsed:
        make_options(name, parsed)      # raises if a value is not allowed
    return parsed


def _pipeline_options(options: argparse.Namespace) -> Any:
    """How to divide a model, as ``Options``; None: not at all."""
    if options.pipeline is None:
        for name in 'micro_batches', 'memory', 'schedule':
            if getattr(options, name) is not None:
                raise ValueError(f'--{name.replace("_", "-")} is an option '
                                 'of --pipeline N')
        return None
    ranks = MPI.COMM_WORLD.size
    if ranks % options.pipeline:
        raise ValueError(
            f'--pipeline {options.pipeline} does not divide the {ranks} '
            f'{"ranks" if ranks > 1 else "rank"} that mpiexec has started')
    from ..training.unmodified.jobs import Options
    return Options(options.pipeline, options.micro_batches or 4,
                   options.memory, options.schedule or '1f1b')


# --- as planned -------------------------------------------------------------

#: Options that go with a plan, and what is none.
_BESIDE = {'script', 'arguments', 'plan', 'snapshots', 'every', 'call',
           'parser'}


def _as_planned(options: argparse.Namespace) -> Any:
    """The job that a plan says; call it on all ranks.

    Raises:
        ValueError: Other options were given, or the plan cannot be carried
            out on these ranks; on all ranks.
    """
    comm, file = MPI.COMM_WORLD, options.plan
    for name, value in vars(options).items():
        if name not in _BESIDE and value is not None:
            raise ValueError(
                f'--{name.replace("_", "-")} does not go with --plan, as the '
                'plan says it; leave one of them out, or edit "choice" in '
                f'{file}')

    from .planned_job import PlannedJob

    def read() -> Any:
        found = PlannedJob(file).plan
        if problem := found.problem(found.model, comm.size):
            raise ValueError(f'{file}: {problem}')
        return found
    plan = of_first_rank(comm, read)
    if comm.rank == 0:
        print(f'chainer_fp8pipe run: as planned: {plan.choice}',
              file=sys.stderr)
    return _PlannedScript(plan, file, options.script)


class _PlannedScript:
    """Has a script's objects made as a plan says.

    A :class:`.Originals`.  A script that creates a communicator gets that of
    the plan, and Chainer makes everything else; any other script is trained
    by a :class:`.ReplicaJob` or a :class:`.PipelineJob`.

    Args:
        plan: For as many ranks.
        file: Where the plan is from, for messages.
        script: The script's path.
    """

    def __init__(self, plan: Any, file: str, script: str) -> None:
        from ..training.unmodified.jobs import (
            Options,
            PipelineJob,
            ReplicaJob,
        )
        self._plan, self._file, self._script = plan, file, script
        self._block = contextlib.ExitStack()
        choice = plan.choice
        kind = ReplicaJob if choice.stages == 1 else PipelineJob
        self._job: Any = kind(MPI.COMM_WORLD, Options(
            choice.stages, choice.micro_batches,
            schedule=choice.schedule or '1f1b', cut=choice.cut),
            self._communicator, self.create, self._check)

    def __getattr__(self, name: str) -> Callable:
        """What is done for this kind of script, when that is known."""
        def act(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._job, name)(*args, **kwargs)
        return act

    def block(self) -> contextlib.ExitStack:
        """A block for the script."""
        self._block.enter_context(self._job.block())
        return self._block

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        """The job's, or, of a ChainerMN script, Chainer's."""
        self._job.make_updater(original, updater, *args, **kwargs)
        if isinstance(self._job, RankAware):
            for optimizer in updater.get_all_optimizers().values():
                if isinstance(optimizer.target, chainer.Link):
                    self._check(optimizer.target)

    def create(self, communicator_name: str = '', mpi_comm: Any = None,
               **options: Any) -> Any:
        """In place of ``chainermn.create_communicator``."""
        stages, every = self._plan.choice.stages, MPI.COMM_WORLD
        ranks = every if mpi_comm is None else mpi_comm
        if stages > 1:
            raise Refusal(
                f'{self._file} has {stages} stages, and a ChainerMN script '
                'none; make a plan of this script: python -m '
                'chainer_fp8pipe plan -o FILE SCRIPT')
        if ranks.size != every.size:
            raise Refusal(
                f'the script creates a communicator of {ranks.size} of the '
                f'{every.size} ranks, but {self._file} is for all; give '
                '--communicator in place of --plan')
        if not isinstance(self._job, RankAware):
            self._block.close()
            self._job = RankAware(every, self._script, self._communicator)
            self.block()
        return self._job.create(ranks)

    def _communicator(self, comm: MPI.Comm) -> Any:
        choice = self._plan.choice
        with refusing():
            return create_communicator(choice.codec, comm,
                                       **choice.communicator_options())

    def _check(self, model: Any) -> None:
        from .planned_job import shapes_of
        # Not together: a script may have models on some ranks only.
        if problem := self._plan.problem(shapes_of(model), None):
            raise Refusal(f'{self._file}: {problem}')
