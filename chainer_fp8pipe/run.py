"""``python -m chainer_fp8pipe run``: its arguments, and what it does."""
from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from typing import Any

from mpi4py import MPI

from .command_line import Parser, as_type, count, parse_interval
from .communicators import create_communicator
from .communicators.factory import CHAINERMN
from .communicators.options import (
    FAMILIES,
    OPTIONS,
    make_options,
    parse_option,
)
from .compat.old_names import numpy_for_cupy
from .mpi.agreement import of_first_rank, raise_together
from .pipeline.schedules import SCHEDULES
from .planner.job_plan import JobPlan
from .report.launch_protocol import is_launched
from .report.quantities import counted, parse_bytes
from .training.unmodified.job import Options, PipelineJob
from .training.unmodified.launch import (
    RankAware,
    Refusal,
    add_script,
    launch,
    refusing,
)

_DESCRIPTION = """
Runs an unmodified ChainerMN script, with another communicator in place of the
one that chainermn.create_communicator(...) names:

    mpiexec -n 4 python -m chainer_fp8pipe run --communicator fp8 \\
        --warmup 50 train_mnist.py --epoch 20

--pipeline N trains an unmodified Chainer script, without ChainerMN, with the
layers of its model divided over N ranks:

    mpiexec -n 4 python -m chainer_fp8pipe run --pipeline 4 \\
        --micro-batches 8 --memory '2 GiB' train_mnist.py --epoch 20

Every rank runs the script.  Rank 0 decides the order of the data, prints, and
writes files.  The batch size is that of all ranks together.  With more than N
ranks, every N hold a replica of the model.  Replicas share each batch;
--communicator (default here: float32) averages their gradients.

With --snapshots a script that is started again goes on where it was.  The
command "launch" starts it again by itself.
"""


def add_run(run: Parser) -> None:
    """Adds the command's arguments to its parser."""
    run.usage = '%(prog)s [OPTIONS] SCRIPT [ARGS]'
    run.description = _DESCRIPTION
    first = run.add_argument_group('what most runs need')
    first.add_argument(
        '--communicator', metavar='NAME', choices=[*FAMILIES, *CHAINERMN],
        help=f'one of {", ".join([*FAMILIES, *CHAINERMN])}')
    first.add_argument(
        '--pipeline', metavar='N', type=count,
        help='divide the model of a script without ChainerMN over N ranks')
    first.add_argument(
        '--plan', metavar='FILE', help='plan to carry out, a file of the '
        'command "plan"; it replaces all options but those of snapshots and '
        'reports')
    first.add_argument(
        '--snapshots', metavar='DIR', help='directory for snapshots '
        'of the whole job; a start goes on from the newest one')
    first.add_argument(
        '--every', metavar='INTERVAL', type=parse_interval, help='between '
        "snapshots: 30s, 5m, 1h, '100 iterations', '1 epoch' (default: 5m)")
    first.add_argument(
        '--report', metavar='DIR', help='directory for a report: times of '
        'each rank, bytes, losses; DIR/report.html shows it')
    first.add_argument(
        '--cpu', action='store_true', help="give a script that imports CuPy "
        "NumPy's names for it, where there is no GPU")
    divided = run.add_argument_group('with --pipeline')
    divided.add_argument(
        '--micro-batches', metavar='N', type=count,
        help='parts of a batch in each pipeline (default: 4)')
    divided.add_argument(
        '--memory', metavar='SIZE', type=as_type(parse_bytes),
        help="most memory of a rank of the pipeline, such as '2 GiB' "
        '(default: no limit)')
    divided.add_argument(
        '--schedule', choices=SCHEDULES,
        help='order of work in a pipeline (default: 1f1b)')
    means = run.add_argument_group(
        'of the communicator', 'Which communicators have an option, and what '
        'it is good for: docs/choosing_a_codec.rst.')
    for name, field in OPTIONS.items():
        metadata = field.metadata
        choices = '|'.join(map(str, metadata['choices']))
        means.add_argument(
            f'--{name.replace("_", "-")}',
            metavar=choices or type(field.default).__name__.upper(),
            help=metadata['help'].replace('%', '%%') + f' ({_defaults(name)})')
    add_script(run, lambda options: functools.partial(
        launch, options.script, options.arguments, 'run', *_jobs(options)))


def _defaults(option: str) -> str:
    """``default: X``, and the other defaults by communicator."""
    return '; '.join([
        f'default: {OPTIONS[option].default}',
        *(f'{name}: {defaults[option]}'
          for name, defaults in FAMILIES.items() if option in defaults)])


def _jobs(options: argparse.Namespace) -> list[Any]:
    """What makes a script's objects; call it on all ranks.

    Raises:
        ValueError: Options do not go together, or with these ranks; on all.
    """
    for needed, names in (('snapshots DIR', ['every']), ('pipeline N', [
            'micro_batches', 'memory', 'schedule'])):
        for name in names:
            if getattr(options, name) is not None and getattr(
                    options, needed.split()[0]) is None:
                raise ValueError(f'--{name.replace("_", "-")} is an option of '
                                 f'--{needed}')
    comm = MPI.COMM_WORLD
    job = (_as_given if options.plan is None else _as_planned)(comm, options)
    raise_together(comm, lambda: _check_writable(options), ValueError)
    if options.cpu:
        numpy_for_cupy()
    if not (options.snapshots or options.report or is_launched()):
        return [job]
    from .training.unmodified.additions import Additions
    return [Additions(comm, options.snapshots, options.every
                      or parse_interval('5m'), options.report), job]


def _check_writable(options: argparse.Namespace) -> None:
    for name in 'snapshots', 'report':
        directory = getattr(options, name)
        try:
            if directory is not None:
                os.makedirs(directory, exist_ok=True)
                tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise ValueError(
                f'--{name} {directory}: {error.strerror}') from error


def _as_given(comm: MPI.Comm, options: argparse.Namespace) -> Any:
    """What the options of the command line say, but for ``--plan``."""
    given, name = _communicator_options(options), options.communicator

    def create(original: Any, communicator_name: str = 'pure_nccl',
               mpi_comm: Any = None, **kwargs: Any) -> Any:
        # The script's options are for the communicator it meant.
        wanted, kwargs = ((communicator_name, {**kwargs, **given})
                          if name is None else (name, given))
        if wanted not in {*FAMILIES, *CHAINERMN}:
            raise Refusal(f'ChainerMN 7 has no communicator {wanted!r}; '
                          'give --communicator naive, or another')
        if comm.rank == 0 and wanted != communicator_name:
            print(f'chainer_fp8pipe: communicator {wanted!r} in place of '
                  f'{communicator_name!r}', file=sys.stderr)
        with refusing():
            return create_communicator(wanted, mpi_comm, **kwargs)
    if options.pipeline is None:
        return RankAware(comm, options.script, create)
    if comm.size % options.pipeline:
        raise ValueError(
            f'--pipeline {options.pipeline} does not divide the '
            f'{counted(comm.size, "rank")} that mpiexec has started')
    if comm.size == options.pipeline > 1 and (name or given):
        raise ValueError(
            f'--pipeline {comm.size} makes one replica of the {comm.size} '
            'ranks, whose gradients no communicator averages; leave options '
            f'of communicators out, or start {2 * comm.size} ranks')
    return PipelineJob(comm, Options(
        options.pipeline, options.micro_batches or 4, options.memory,
        options.schedule or '1f1b'), lambda replicas: create_communicator(
            name or 'float32', replicas, **given), create)


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


#: Options that go with a plan, and what is none.
_BESIDE = {'script', 'arguments', 'plan', 'snapshots', 'every', 'report',
           'cpu', 'call', 'parser'}


def _as_planned(comm: MPI.Comm, options: argparse.Namespace) -> Any:
    """What a plan says; call it on all ranks."""
    file = options.plan
    for name, value in vars(options).items():
        if name not in _BESIDE and value is not None:
            raise ValueError(
                f'--{name.replace("_", "-")} does not go with --plan, as the '
                'plan says it; leave one of them out, or edit "choice" in '
                f'{file}')

    def read() -> JobPlan:
        found = JobPlan.load(file)
        if (ranks := found.choice.ranks) != comm.size:
            raise ValueError(
                f'{file}: {found.choice} is for {counted(ranks, "rank")}, not '
                f'{comm.size}; start so many, or make a plan for {comm.size}')
        return found
    plan = of_first_rank(comm, read)
    choice = plan.choice
    if comm.rank == 0:
        print(f'chainer_fp8pipe run: as planned: {choice}', file=sys.stderr)

    def communicator(ranks: MPI.Comm) -> Any:
        with refusing():
            return create_communicator(choice.communicator, ranks,
                                       **choice.options)

    def create(original: Any, communicator_name: str = '',
               mpi_comm: Any = None, **options: Any) -> Any:
        ranks = comm if mpi_comm is None else mpi_comm
        if (not plan.communicates or choice.cut
                or ranks.size != comm.size):
            raise Refusal(
                f'{file} has {choice}, and is of a script that creates no '
                f'communicator of {ranks.size} of {comm.size} ranks; make a '
                'plan of this script, or give --communicator')
        return communicator(ranks)
    return (
        RankAware(comm, options.script, create) if plan.communicates else
        PipelineJob(comm, Options(
            choice.stages, choice.micro_batches, schedule=choice.cut.schedule
            if choice.cut else '1f1b', cut=choice.cut), communicator, create))
