"""How fast a pipeline is, beside serial Chainer and PyTorch.

    python benchmarks/pipeline.py

trains the paper's network (fully connected layers of one width) serially and
over 2 and 4 stages.  Everything that is compared runs in the same processes,
turn by turn.  Needs ``pip install '.[mpich]'``; with PyTorch installed
(``pip install '.[compare]'``) its pipelines run beside.
"""
from __future__ import annotations

import statistics

from environment import ONE_THREAD, describe, parser, ranks_of, write_json

SCHEDULES = (('gpipe', 1), ('1f1b', 1), ('zero_bubble', 1),
             ('zero_bubble', 2))        # with so many chunks per rank


def parse():
    given = parser(__doc__, 'torch')
    given.add_argument('--stages', type=int, nargs='+', default=[2, 4],
                       help='numbers of stages (default: 2 4)')
    given.add_argument('--widths', type=int, nargs='+',
                       default=[512, 1024, 2048],
                       help='of the layers (default: 512 1024 2048)')
    given.add_argument('--micro-batches', type=int, nargs='+',
                       default=[1, 2, 4, 8, 16],
                       help='per batch (default: 1 2 4 8 16)')
    given.add_argument('--depth', type=int, default=8,
                       help='layers before the last one (default: 8)')
    given.add_argument('--batch', type=int, default=480,
                       help='samples (default: 480)')
    given.add_argument('--rounds', type=int, default=7,
                       help='steps of each that are timed (default: 7)')
    return given.parse_args()


def main():
    options = parse()
    print(describe())
    print(f'{options.depth} layers and one of 10, batch {options.batch}, '
          f'SGD, medians of {options.rounds} steps; one BLAS thread per rank')
    rows = []
    for stages in options.stages:
        rows += measure(stages, options)
        report([row for row in rows if row['stages'] == stages])
    if options.json:
        write_json(options.json, {'rows': rows})


def measure(stages, options):
    """Starts the ranks; returns a row per width and number of parts."""
    return ranks_of('pipeline_ranks.py', {
        name: getattr(options, name) for name in (
            'widths', 'micro_batches', 'depth', 'batch', 'rounds',
            'without_torch')}, stages, env=ONE_THREAD)


def report(rows):
    """The table for one number of stages."""
    stages = rows[0]['stages']
    torch = any('torch' in row for row in rows)
    print(f'\n{stages} stages{"":8}serial  ours  '
          f'{"spread":>11}  best schedule  speed-up   of (2)   of (3)'
          + ('   PyTorch  ours is' if torch else ''))
    print('width  parts      [ms]  [ms]  [ms]')
    for row in rows:
        best, times = fastest(row, 'ours')
        time = statistics.median(times)
        line = (f'{row["width"]:5} {row["micro_batches"]:6} '
                f'{1e3 * statistics.median(row["serial"]):9.1f} '
                f'{1e3 * time:5.0f}  {1e3 * min(times):4.0f} - '
                f'{1e3 * max(times):4.0f}  {best:>13} '
                f'{statistics.median(row["serial"]) / time:9.2f} '
                f'{paper(row)[0] / time:8.2f} {paper(row)[1] / time:8.2f}')
        if 'torch' in row:
            other = statistics.median(fastest(row, 'torch')[1])
            line += f' {1e3 * other:8.0f} {other / time:6.2f} x as fast'
        print(line)
    print("of (2), of (3): the paper's equations 2 and 3 from the serial time "
          'and the link, over ours')


def paper(row):
    """Seconds of a step by the paper's equations, without and with messages.

    With d stages, m micro-batches and t_comp the time of the serial step::

        t_comm = 2 * (latency + bytes / bandwidth)          (equation 1)
        t_pipe = (m + d - 1) * t_comp / (m * d)             (equation 2)
        T_pipe = t_pipe + (m + d - 2) * t_comm              (equation 3)

    t_comm is the time of a micro-batch's activation and its gradient to
    cross one boundary, during which the sender waits.
    """
    stages, parts = row['stages'], row['micro_batches']
    latency, bandwidth = row['link']
    t_comm = 2 * (latency + row['bytes'] / bandwidth)
    t_pipe = ((parts + stages - 1) / parts / stages
              * statistics.median(row['serial']))
    return t_pipe, t_pipe + (parts + stages - 2) * t_comm


def fastest(row, kind):
    """Schedule and times with the smallest median."""
    return min(row[kind].items(),
               key=lambda item: statistics.median(item[1]))


if __name__ == '__main__':
    main()
