"""``chainer-fp8pipe``: commands for scripts, clusters and Chainer.

The same as ``python -m chainer_fp8pipe``.  ``run``, ``plan`` and ``bench`` are
started on ranks by ``mpiexec``, the others without it.
"""
from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._version import __version__
from .command_line import Parser
from .compat import ABSENT
from .mpi import started_together

_PROG = 'python -m chainer_fp8pipe'
#: By command: its module, whether it is started on ranks, and what it does.
#: The others are no ranks, which importing these would make them.
_COMMANDS = {
    'bench': ('bench', True, 'measure this cluster'),
    'export': ('export', False, 'write a model as ONNX, and prove it'),
    'install-chainer': ('compat.install_chainer', False,
                        'install Chainer, which pip alone cannot build'),
    'launch': ('launcher.launch_command', False,
               'run a script, and start it again when its ranks die'),
    'plan': ('planner.plan', True,
             'find the fastest way to run a script on these ranks'),
    'report': ('report.page', False, 'show how a run went'),
    'run': ('run', True, 'run an unmodified Chainer or ChainerMN script'),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; ``arguments`` default to ``sys.argv``'s."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    name = next(iter(given), '')
    module, on_ranks, _ = _COMMANDS.get(name, ('', True, ''))
    started = started_together(os.environ)
    try:
        if not on_ranks:
            if not started:
                sys.exit(_module(module).main(given[1:]))
            if started[1] in '0?':      # each would do the whole work
                print(f'{_PROG} {name}: error: {started[0]} has started '
                      f'{started[2]} processes; start one, without mpiexec',
                      file=sys.stderr)
            sys.exit(2)
        # Help and what is wrong wait for no rank, where there is one.
        action = (_on_ranks if module or started else _parsed)(given)
    except ImportError as error:
        if error.name not in ABSENT:
            raise
        print(f'{_PROG} {name}: {error}', file=sys.stderr)
        sys.exit(2)
    if callable(action):        # which prints on all ranks
        action()


def _module(name: str) -> Any:
    return importlib.import_module(f'.{name}', __package__)


def _on_ranks(given: Sequence[str]) -> Callable[[], None] | None:
    """Does what ``mpiexec`` has started but for what it returns; or helps."""
    from .mpi.world import StartError, enter_world
    from .training.unmodified.launch import only_rank_0_prints
    with only_rank_0_prints():
        options = _parsed(given)
        try:
            enter_world()
        except StartError as error:
            options.parser.exit(2, f'{options.parser.prog}: {error}\n')
        return options.call(options)


def _parsed(given: Sequence[str]) -> Any:
    """The options of the command that is given; or helps with all."""
    name = next(iter(given), '')
    if name in _COMMANDS:
        parser = Parser(prog=f'{_PROG} {name}')
        getattr(_module(_COMMANDS[name][0]), f'add_{name}')(parser)
        return parser.parse_args(given[1:])
    parser = Parser(prog=_PROG, description='Chainer on current Pythons, with '
                    'fp8 gradients.')
    parser.add_argument('--version', action='version',
                        version=f'chainer_fp8pipe {__version__}')
    commands = parser.add_subparsers(required=True, metavar='COMMAND')
    for name, (_, _, what) in _COMMANDS.items():
        commands.add_parser(name, help=what)
    return parser.parse_args(given)


if __name__ == '__main__':
    main()
