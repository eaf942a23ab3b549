"""Any Chain, cut by itself: is it small and fast enough.

    python benchmarks/partition.py memory       # limits, kept and predicted
    python benchmarks/partition.py speed        # serial, by hand, PyTorch

``partition.py NAME --help`` says what each does and takes.  Progress goes to
stderr.  Whether it is right, tests/models tells.
"""
from __future__ import annotations

import argparse
import statistics

from environment import (
    ONE_THREAD,
    describe,
    parser,
    ranks_of,
    with_torch,
    write_json,
)

_RANKS = 'partition_ranks.py'


def main():
    options = _arguments().parse_args()
    print(describe(), flush=True)
    data = options.measure(options)
    if options.json:
        write_json(options.json, {'what': options.what, **data})


# --- what is measured --------------------------------------------------------

def memory(options):
    """The largest model that a limit allows, and what it then takes."""
    rows = []
    for ranks in options.ranks:
        job = {'memory': options.memory, 'units': options.units,
               'most': options.most, 'updates': options.updates}
        row = ranks_of(_RANKS, {**job, 'what': 'accepted'}, ranks)
        if row['layers']:
            # A process of its own: what the search took is not in it.  Freed
            # memory goes back, or it would count.
            row |= ranks_of(_RANKS, {
                **job, 'what': 'resident', 'layers': row['layers']}, ranks,
                env=ONE_THREAD)
        rows.append(row)
    show_memory(rows)
    return {'rows': rows}


def speed(options):
    """A step over two ranks against serial Chainer, turn by turn."""
    found = ranks_of(_RANKS, {
        'what': 'speed', 'rounds': options.rounds,
        'scale': options.scale, 'micro_batches': options.micro_batches,
        'torch': with_torch(not options.without_torch)}, 2)
    show_speed(found)
    return found


# --- tables ------------------------------------------------------------------

def show_memory(rows):
    """What a limit allows; what was taken."""
    one = next((row for row in rows if row['ranks'] == 1), None)
    print('\n               parameters           over 1 rank     '
          'MB per rank, the most of any\nranks  layers         '
          'MB             / n      limit  predicted  measured  over limit'
          '  off prediction')
    for row in rows:
        if not row['layers']:
            print(f'{row["ranks"]:5}  no model fits: {row["reason"]}')
            continue
        share = (row['parameters'] / one['parameters'] / row['ranks']
                 if one and one['layers'] else float('nan'))
        pairs = list(zip(row['measured'], row['predicted'], strict=True))
        measured = max(row['measured'])
        off = max((abs(found / said - 1), found / said - 1)
                  for found, said in pairs)[1]
        print(f'{row["ranks"]:5} {row["layers"]:7} '
              f'{row["parameters"] / 1e6:10.1f} {share:20.2f} '
              f'{row["limit"] / 1e6:10.0f} '
              f'{max(row["predicted"]) / 1e6:10.0f} {measured / 1e6:9.0f} '
              f'{100 * (measured / row["limit"] - 1):+9.1f} % '
              f'{100 * off:+13.1f} %')


def show_speed(found):
    """Speed-ups side by side."""
    print(f'\n{"":32} median [ms]       spread [ms]   speed-up')
    serial = statistics.median(found['times']['serial'])
    for what, times in found['times'].items():
        print(f'{what:32} {1e3 * statistics.median(times):11.1f} '
              f'{_spread(times):>20} '
              f'{serial / statistics.median(times):8.2f}')
    print(*found['notes'], sep='\n')


def _spread(times):
    return f'{1e3 * min(times):.1f} - {1e3 * max(times):.1f}'


# --- arguments ---------------------------------------------------------------

def _arguments():
    given = parser(__doc__)
    kinds = given.add_subparsers(dest='what', required=True, metavar='NAME')

    def kind(measure):
        said = ' '.join(measure.__doc__.split())
        one = kinds.add_parser(
            measure.__name__, help=said, description=said,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.set_defaults(measure=measure)
        # As before NAME, whose value stays where this one is not given.
        one.add_argument('--json', metavar='FILE', default=argparse.SUPPRESS,
                         help='write the raw data')
        return one

    def number(one, name, default, said, type=int):
        one.add_argument(name, type=type, default=default, metavar='N',
                         help=said)

    one = kind(memory)
    one.add_argument('--ranks', type=int, nargs='+', default=[1, 2, 4, 6],
                     metavar='N', help='numbers of ranks')
    one.add_argument('--memory', default='400 MB', help='limit of a rank')
    number(one, '--units', 256, 'of the encoder')
    number(one, '--most', 512, 'layers at most')
    number(one, '--updates', 4, 'updates in training')

    one = kind(speed)
    number(one, '--rounds', 9, 'steps of each that are timed')
    number(one, '--scale', 1., 'of the models\' sizes', float)
    number(one, '--micro-batches', 4, 'per batch')
    one.add_argument('--without-torch', action='store_true',
                     help='leave out PyTorch')

    return given


if __name__ == '__main__':
    main()
