"""``python -m chainer_fp8pipe``: commands for scripts, clusters and Chainer.

``run``, ``plan`` and ``bench`` are started on ranks by ``mpiexec``;
``export``, ``launch``, ``report`` and ``install-chainer`` without it.
"""
from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

from ._version import __version__
from .command_line import Parser, did_you_mean

#: By command, the module and the function that adds it to a parser.
_COMMANDS = {
    'bench': ('bench', 'add_bench'),
    'export': ('export', 'add_export'),
    'install-chainer': ('compat.install_chainer', 'add_install'),
    'launch': ('launcher.launch_command', 'add_launch'),
    'plan': ('planner.plan_script', 'add_plan'),
    'report': ('report.report_command', 'add_report'),
    'run': ('planner.run_script', 'add_run'),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; ``arguments`` default to ``sys.argv``'s."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] in (['export'], ['launch'], ['report'], ['install-chainer']):
        # They are no ranks, which importing the others would make them, and
        # ranks need not wait for what they need.
        module, _ = _COMMANDS[given[0]]
        sys.exit(importlib.import_module(f'.{module}', __package__).main(
            given[1:]))
    if given == ['--version']:
        print(f'chainer_fp8pipe {__version__}')
    else:
        _run_on_ranks(given)


def _run_on_ranks(given: Sequence[str]) -> None:
    """Runs a command that ``mpiexec`` has started, or prints help."""
    from .mpi.abort import StartError, enter_world
    from .training.unmodified.launch import only_rank_0_prints
    with only_rank_0_prints(contextlib.redirect_stdout,
                            contextlib.redirect_stderr):
        options = _parser(given).parse_args(given)
        try:
            enter_world()
        except StartError as error:
            options.parser.exit(2, f'{options.parser.prog}: {error}\n')
        action = options.call(options)
    if action is not None:      # which prints on all ranks
        action()


def _parser(given: Sequence[str]) -> Parser:
    """Knows the command that is given, or all, whose imports take time."""
    parser = Parser(
        prog='python -m chainer_fp8pipe',
        description='Chainer on current Pythons, with fp8 gradients.')
    parser.add_argument('--version', action='version',
                        version=f'chainer_fp8pipe {__version__}')
    command = next(iter(given), '')
    if command not in (*_COMMANDS, '-h', '--help'):
        parser.error(
            'a command is missing' if not command else
            f'there is no option {command}' if command.startswith('-') else
            f'there is no command {command!r}'
            + did_you_mean(command, _COMMANDS), 'it is one of '
            + ', '.join(_COMMANDS))
    commands = parser.add_subparsers(required=True, metavar='COMMAND')
    for name in [command] if command in _COMMANDS else _COMMANDS:
        module, function = _COMMANDS[name]
        getattr(importlib.import_module(f'.{module}', __package__),
                function)(commands)
    return parser


if __name__ == '__main__':
    main()
