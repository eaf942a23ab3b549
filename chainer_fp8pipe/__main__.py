"""The command line: ``python -m chainer_fp8pipe run`` and ``bench``."""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from .bench.command import add_bench
from .communicators import create_communicator
from .communicators.factory import CHAINERMN
from .communicators.options import FAMILIES, make_options, parse_option
from .intercept.communicator_creation import creating
from .mpi.abort import abort_on_exception, end_all_ranks

_RUN = """
Runs an unmodified ChainerMN script:

    mpiexec -n 4 python -m chainer_fp8pipe run --communicator fp8 \\
        --warmup 50 train_mnist.py --epoch 20

Chainer is made to work on this Python before the script's first line.
chainermn.create_communicator(...) inside it gives the communicator named
here, whatever name the script passes; without --communicator, the one the
script names, which may be one of this package's.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; ``arguments`` default to ``sys.argv``'s."""
    parser = _parser()
    with _only_rank_0_prints():
        options = parser.parse_args(arguments)
        if 'script' not in options:
            options.call(options)
            return
        given = {}
        try:
            given = _communicator_options(options)
        except ValueError as error:
            parser.error(str(error))
        if not os.path.isfile(options.script):
            parser.error(f'there is no script {options.script}')
    _run(options.script, options.arguments, options.communicator, given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m chainer_fp8pipe',
        description='Chainer on current Pythons, with fp8 gradients.')
    commands = parser.add_subparsers(required=True, metavar='COMMAND')
    add_bench(commands)
    run = commands.add_parser(
        'run', help='run an unmodified ChainerMN script', description=_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    run.add_argument(
        '--communicator', metavar='NAME', choices=[*FAMILIES, *CHAINERMN],
        help=f'one of {", ".join([*FAMILIES, *CHAINERMN])}')
    for name, field in _fields().items():
        metadata = field.metadata
        choices = '|'.join(map(str, metadata['choices']))
        run.add_argument(
            f'--{name.replace("_", "-")}', metavar=choices or
            type(field.default).__name__.upper(),
            help=metadata['help'].replace('%', '%%') + f' ({_defaults(name)})')
    run.add_argument('script', metavar='SCRIPT')
    run.add_argument('arguments', metavar='ARGS', nargs=argparse.REMAINDER,
                     help="the script's own arguments")
    return parser


def _fields() -> dict[str, dataclasses.Field]:
    """Every option of any communicator, by its name."""
    return {field.name: field for options, _ in FAMILIES.values()
            for field in dataclasses.fields(options)}


def _defaults(option: str) -> str:
    """``default: X``, and whose is different."""
    common = _fields()[option].default
    others = [f'{name}: {defaults[option]}'
              for name, (_, defaults) in FAMILIES.items()
              if option in defaults]
    return '; '.join([f'default: {common}', *others])


def _communicator_options(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: text for name in _fields()
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


def _run(script: str, arguments: Sequence[str], communicator: str | None,
         given: dict[str, Any]) -> None:
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

    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    abort_on_exception()
    try:
        with creating(create):
            runpy.run_path(script, run_name='__main__')
    except SystemExit as exit:
        if exit.code not in (None, 0) and MPI.COMM_WORLD.size > 1:
            # The other ranks may be waiting for this one.
            if isinstance(exit.code, int):
                end_all_ranks('', exit.code)
            end_all_ranks(f'{exit.code}\n', 1)
        raise


@contextlib.contextmanager
def _only_rank_0_prints() -> Any:
    if MPI.COMM_WORLD.rank == 0:
        yield
        return
    with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(
            nowhere), contextlib.redirect_stderr(nowhere):
        yield


if __name__ == '__main__':
    main()
