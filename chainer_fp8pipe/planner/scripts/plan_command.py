"""``python -m chainer_fp8pipe plan``: its arguments."""
from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from ...command_line import count
from ...planning.job.configuration import CODECS, USUAL_CODECS
from ...planning.sizes import parse_bytes
from ...training.unmodified.launch import (
    as_one_process,
    check_on_all_ranks,
    launch,
)
from .script_plan import Request, ScriptPlan

_DESCRIPTION = """
Finds the fastest way to run an unmodified Chainer or ChainerMN script:

    mpiexec -n 8 python -m chainer_fp8pipe plan -o plan.json train.py -b 64
    mpiexec -n 8 python -m chainer_fp8pipe run --plan plan.json train.py -b 64

Start it as you start your training: same hosts, same ranks, same arguments
of the script.  Options of "plan" come before SCRIPT.

All ranks run the script until it is about to train.  Then links, codecs, and
the script's model with a batch of the script's data are measured, some 20
seconds, and a step of every way to run the job is predicted: how many stages
and replicas, where the model is cut, schedule, micro-batches, recomputation,
codec, algorithm and overlap.  The fastest that fits into memory is printed,
with its prediction, and why it is no other.  The script trains nothing.

The batch size of a script without ChainerMN is that of all ranks together; a
ChainerMN script's is that of each rank, and its plan has replicas only.
"""


def add_plan(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        'plan', help='find the fastest way to run a script on these ranks',
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '-o', '--output', metavar='FILE',
        help='save the plan there, as JSON, for "run --plan"')
    parser.add_argument(
        '--memory', metavar='SIZE', type=size, help='what a rank may use '
        "beyond the interpreter, such as 2GiB or '300 MB' (default: no "
        'limit)')
    parser.add_argument(
        '--batch', metavar='N', type=count, help='samples of an update, of '
        "all ranks together (default: the script's)")
    parser.add_argument(
        '--codecs', metavar='NAME,...', type=_codecs,
        default=USUAL_CODECS, help='what gradients may travel as: '
        f'{", ".join(CODECS)} (default: {",".join(USUAL_CODECS)}; float32 '
        'alone is exact)')
    parser.add_argument(
        '--ranks', metavar='N', type=count, help='plan for N ranks, as if '
        'more were added in the same way (default: for these)')
    parser.add_argument(
        '--torus', metavar='RxC', type=_torus, help='rows and columns, if '
        'hosts are wired as a torus, such as 3x4 (default: a switch)')
    parser.add_argument(
        '--seconds', metavar='S', type=_seconds, default=16.0,
        help='for measuring links and codecs (default: 16)')
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('arguments', metavar='ARGS', nargs=argparse.REMAINDER,
                        help="the script's own arguments")
    parser.set_defaults(call=_checked_plan, parser=parser)


def _checked_plan(options: argparse.Namespace) -> Callable[[], None]:
    """Checks the arguments; what it returns runs the script."""
    try:
        check_on_all_ranks(options.script)
    except ValueError as error:
        options.parser.error(str(error))
    # Rank 0 writes; others may be on hosts where the folder is not.
    comm = MPI.COMM_WORLD
    if problem := comm.bcast(comm.rank == 0 and _unwritable(options.output)):
        options.parser.error(f'-o: {problem}')
    job = ScriptPlan(comm, options.script, Request(
        options.batch, options.memory, options.codecs, options.ranks,
        options.output, options.torus, options.seconds))

    def run() -> None:
        # The script would say everything as often as there are ranks.
        with as_one_process():
            launch(options.script, options.arguments, 'plan', job.create, job)
    return run


def _unwritable(file: str | None) -> str:
    """Why a file cannot be written; '' if it can."""
    if file is None:
        return ''
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        return f'there is no folder {folder}'
    if os.path.isdir(file):
        return f'{file} is a folder'
    there = os.path.exists(file)
    if not os.access(file if there else folder, os.W_OK):
        return f'{file} cannot be written'
    return ''


def size(text: str) -> str:
    """For ``type=``: bytes, as people write them."""
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _codecs(text: str) -> tuple[str, ...]:
    names = tuple(text.split(','))
    for name in names:
        if name not in CODECS:
            raise argparse.ArgumentTypeError(
                f'{name!r} is none of {", ".join(CODECS)}')
    return names


def _torus(text: str) -> tuple[int, int]:
    rows, cross, columns = text.partition('x')
    if not (cross and rows.isdecimal() and columns.isdecimal()
            and int(rows) * int(columns)):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no torus, such as 3x4')
    return int(rows), int(columns)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float('inf'):
        raise argparse.ArgumentTypeError(f'{text!r} is no number of seconds')
    return found
