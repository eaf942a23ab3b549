"""``python -m chainer_fp8pipe run``: its arguments, and what it does."""
from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

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
from ..pipeline.schedules import SCHEDULES
from ..planning.sizes import parse_bytes
from ..report.launch_protocol import is_launched
from ..training.unmodified.launch import (
    RankAware,
    as_one_process,
    launch,
    refuse_together,
)

_DESCRIPTION = """
Runs an unmodified ChainerMN script:

    mpiexec -n 4 python -m chainer_fp8pipe run --communicator fp8 \\
        --warmup 50 train_mnist.py --epoch 20

Chainer is made to work on this Python before the script's first line.
chainermn.create_communicator(...) inside it gives the communicator named
here, whatever name the script passes; without --communicator, the one the
script names, which may be one of this package's.

With --pipeline, an unmodified Chainer script, which knows nothing of ranks,
trains its model with its layers divided over N of them:

    mpiexec -n 4 python -m chainer_fp8pipe run --pipeline 4 \\
        --micro-batches 8 --memory '2 GiB' train_mnist.py --epoch 20

Every rank runs the script; rank 0 says in what order the data come, prints
and writes files.  The script's optimizer.setup(model), StandardUpdater,
Trainer, Evaluator, LogReport, PrintReport, PlotReport, ProgressBar, snapshot,
save_npz and load_npz stay as they are, and the batch size is that of all
ranks together.  Of more than N ranks, every N are a replica of the model, and
share each batch; their gradients are averaged by --communicator (default
here: float32).

With --plan, either kind of script is run as a plan says, which the command
"plan" has made on as many ranks:

    mpiexec -n 8 python -m chainer_fp8pipe plan -o plan.json train.py
    mpiexec -n 8 python -m chainer_fp8pipe run --plan plan.json train.py

With --snapshots, any of these scripts goes on where it was when it is started
again; "launch" starts it again by itself.
"""


def add_run(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    run = commands.add_parser(
        'run', help='run an unmodified Chainer or ChainerMN script',
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    run.add_argument(
        '--plan', metavar='FILE', help='do as a plan says, which "plan" has '
        'made; in place of all other options')
    run.add_argument(
        '--communicator', metavar='NAME', choices=[*FAMILIES, *CHAINERMN],
        help=f'one of {", ".join([*FAMILIES, *CHAINERMN])}')
    run.add_argument(
        '--pipeline', metavar='N', type=count,
        help='divide the model of a script without ChainerMN over N ranks')
    run.add_argument(
        '--micro-batches', metavar='N', type=count,
        help='into how many each pipeline cuts its batch (default: 4)')
    run.add_argument(
        '--memory', metavar='SIZE', type=size, help='what a rank of the '
        "pipeline may use, such as '2 GiB' (default: no limit)")
    run.add_argument(
        '--schedule', choices=SCHEDULES,
        help='in what order a pipeline works (default: 1f1b)')
    run.add_argument(
        '--snapshots', metavar='DIR', help="give the script's Trainer "
        'snapshots of the whole job, in a directory, and go on from the '
        'newest one there')
    run.add_argument(
        '--every', metavar='INTERVAL', type=parse_interval, help='between '
        "snapshots: 30s, 5m, 1h, '100 iterations', '1 epoch' (default: 5m)")
    for name, field in OPTIONS.items():
        metadata = field.metadata
        choices = '|'.join(map(str, metadata['choices']))
        run.add_argument(
            f'--{name.replace("_", "-")}', metavar=choices or
            type(field.default).__name__.upper(),
            help=metadata['help'].replace('%', '%%') + f' ({_defaults(name)})')
    run.add_argument('script', metavar='SCRIPT')
    run.add_argument('arguments', metavar='ARGS', nargs=argparse.REMAINDER,
                     help="the script's own arguments")
    run.set_defaults(call=_checked_run, parser=run)


def _checked_run(options: argparse.Namespace) -> Callable[[], None]:
    """Checks the arguments of ``run``; what it returns runs the script."""
    try:
        refuse_together(MPI.COMM_WORLD, lambda: check_script(options.script),
                        ValueError)
        restarting = _restarting(options)
        if options.plan is not None:
            from .planned_run import planned_run
            return planned_run(options, restarting)
        given = _communicator_options(options)
        pipeline = _pipeline_options(options)
    except ValueError as error:
        options.parser.error(str(error))
    return functools.partial(_run, options.script, options.arguments,
                             options.communicator, given, pipeline,
                             restarting)


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


def _run(script: str, arguments: Sequence[str], communicator: str | None,
         given: dict[str, Any], pipeline: Any,
         restarting: Sequence[Any]) -> None:
    def create(communicator_name: str = 'pure_nccl', mpi_comm: Any = None,
               **kwargs: Any) -> Any:
        if communicator is None:
            return create_communicator(communicator_name, mpi_comm,
                                       **{**kwargs, **given})
        if MPI.COMM_WORLD.rank == 0 and communicator != communicator_name:
            print(f'chainer_fp8pipe: communicator {communicator!r} in place '
                  f'of {communicator_name!r}', file=sys.stderr)
        # The script's options are for the communicator it meant.
        return create_communicator(communicator, mpi_comm, **given)

    if pipeline is None:
        launch(script, arguments, 'run', create, *restarting,
               RankAware(MPI.COMM_WORLD, script))
        return
    from ..training.unmodified.jobs import PipelineJob
    job = PipelineJob(MPI.COMM_WORLD, pipeline, lambda comm:
                      create_communicator(communicator or 'float32', comm,
                                          **given))
    # The script would say everything as often as there are ranks.
    with as_one_process(), job.undrawn.building():
        launch(script, arguments, 'run', create, *restarting, job)
