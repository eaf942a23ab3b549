"""Training steps over a slow network: fp8 and overlap against PyTorch DDP.

    python benchmarks/training.py steps       # an MLP of 4.2 M parameters
    python benchmarks/training.py accelerator # as many, computed elsewhere

4 virtual hosts of this machine (Linux, iproute2) on a star of 500 Mbit/s
links, one rank each, time blocks of 10 whole steps in turns, batch 32 per
rank.  All ranks compute on this machine, each on its share of the cores;
layers of ``accelerator`` sleep instead, 5 ms forward and 10 ms backward each,
as a computation on a GPU leaves the processors alone.

Where a processor has AVX-512, OpenBLAS's kernels for it may be slower for a
batch of 32 than those for Haswell: OPENBLAS_CORETYPE=Haswell takes these.
"""
from __future__ import annotations

import statistics

from environment import (
    describe,
    milliseconds,
    parser,
    ranks_of,
    with_torch,
    write_json,
)
from network import Star, begin

_HOSTS = 4


def main() -> None:
    options = _arguments()
    begin()
    print(describe(), flush=True)
    torch = with_torch(not options.without_torch)
    with Star(_HOSTS, options.rate) as network:
        payload = network.payload()
        print(f'{network.describe()}: {payload / 1e6:.1f} Mbit/s of payload '
              'measured in both directions at once', flush=True)
        rows = ranks_of('training_ranks.py', {
            'what': options.what, 'repeats': options.repeats, 'torch': torch},
            network=network)
    print()
    _show(rows)
    if options.json:
        write_json(options.json, {'what': options.what, 'payload': payload,
                                  'rows': rows})


def _show(rows):
    base = statistics.median(rows[0]['seconds'])
    print(f'{"":<32}{"median [ms]":>12}{"spread [ms]":>20}  '
          f'x {rows[0]["label"]}')
    for row in rows:
        median, spread = milliseconds(row['seconds'])
        print(f'{row["label"]:<32}{median:>12}{spread:>20}  '
              f'{base / statistics.median(row["seconds"]):.2f}')


def _arguments():
    given = parser(__doc__, 'torch')
    given.add_argument('what', choices=['steps', 'accelerator'])
    given.add_argument('--rate', type=float, default=500e6, metavar='BIT/S',
                       help='of every link (default: 500e6)')
    given.add_argument('--repeats', type=int, default=15, metavar='N',
                       help='blocks of steps that are timed (default: 15)')
    return given.parse_args()


if __name__ == '__main__':
    main()
