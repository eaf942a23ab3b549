"""The command line: ``python -m benchmarks.network --help``."""
from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Sequence

from .namespaces import NetworkError
from .network import Network
from .speed import table
from .star import Star
from .torus import Torus

_UNITS = {'': 1., 'bit': 1., 'kbit': 1e3, 'mbit': 1e6, 'gbit': 1e9}
_DESCRIPTION = '''
Builds several hosts on this machine, joined by links that have a rate,
measures the links, and runs COMMAND on the hosts by mpiexec.  Ranks of one
host share memory, and between hosts there is TCP over these links only.
Without COMMAND it only measures.  Needs root and iproute2.
'''
_EXAMPLES = '''
examples:
  python -m benchmarks.network star --hosts 4 --rate 500mbit
  python -m benchmarks.network star --hosts 4 --rate 500mbit \\
      --ranks-per-host 2 -- python train.py
  python -m benchmarks.network torus --shape 3x3 --rate 200mbit -- hostname

Everything is taken away at the end, however this program ends.  The exit
code is that of mpiexec; 1 if the network cannot be built, 124 after a
time-out.
'''


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if '--' in given:
        at = given.index('--')
        given, command = given[:at], given[at + 1:]
    options = _parser().parse_args(given)
    try:
        with _build(options) as network:
            print(network.describe(), flush=True)
            print(table(network.rates(probe=options.probe)), flush=True)
            if not command:
                return 0
            return network.run(command, options.ranks_per_host,
                               timeout=options.timeout).returncode
    except (NetworkError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired:
        print(f'still running after {options.timeout:g} s: ended',
              file=sys.stderr)
        return 124


def _build(options: argparse.Namespace) -> Network:
    if options.kind == 'star':
        return Star(options.hosts, options.rate, options.switch)
    x, y = options.shape
    return Torus(x, y, options.rate)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.network', description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest='kind', required=True)
    star = kinds.add_parser('star', help='all hosts around one switch')
    star.add_argument('--hosts', type=int, default=4, help='default 4')
    star.add_argument('--switch', action='store_true',
                      help='one more host, the last one, that no link slows '
                      'down: in the switch')
    torus = kinds.add_parser('torus', help='a grid that goes round, with a '
                             'link for each pair of neighbours')
    torus.add_argument('--shape', type=_shape, default=(3, 3), metavar='XxY',
                       help='default 3x3')
    for kind, rate in ((star, '500mbit'), (torus, '200mbit')):
        kind.add_argument('--rate', type=_rate, default=rate, help=(
            'of each link and direction, in bit, kbit, mbit or gbit per '
            f'second, headers included; default {rate}'))
        kind.add_argument('--ranks-per-host', type=int, default=1,
                          metavar='N', help='default 1')
        kind.add_argument('--timeout', type=float, metavar='SECONDS',
                          help='end COMMAND after so long')
        kind.add_argument('--probe', choices=('iperf3', 'own'), help=(
            'what measures the links; default: iperf3 if it is there'))
        kind.usage = f'{kind.prog} [options] [-- COMMAND ...]'
    return parser


def _rate(text: str) -> float:
    found = re.fullmatch(r'(\d+\.?\d*)([a-z]*)', text.lower())
    if not found or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            f'{text} is not a rate such as 500mbit')
    return float(found[1]) * _UNITS[found[2]]


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r'(\d+)x(\d+)', text)
    if not found:
        raise argparse.ArgumentTypeError(f'{text} is not a shape such as 3x3')
    return int(found[1]), int(found[2])


if __name__ == '__main__':
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
