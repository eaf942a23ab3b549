"""Which codec, algorithm and cut is fastest on which cluster, on paper.

    python benchmarks/planning_scale.py --plot planning_scale.png

A map of links from 100 Mbit/s to 400 Gbit/s and of 4 to 4,096 ranks, for
models of 1 M to 1.8 G parameters; then the papers' clusters, what they
published beside what is predicted.  Everything comes from
``chainer_fp8pipe.planning``; nothing is measured but the rates of one core,
which are read from the table of ``kernels.py``.  ``--check`` compares the
estimates of exchanges with simulations of all their messages.
"""
from __future__ import annotations

import argparse
import textwrap

from allreduce_model import KERNELS, kernel_rates, number
from environment import describe, write_json
from scale_check import cases, summary
from scale_map import cell
from scale_models import MODELS
from scale_papers import papers
from scale_steps import Setting, Speeds, Steps

RATES = (0.1, 1, 10, 25, 100, 400)
RANKS = (4, 16, 64, 256, 1024, 4096)
#: Who sums.
WHERE = {'host': 'by a core of the host, after PCIe',
         'gpu': 'by the GPU, whose memory the network reads',
         'nccl': 'of fp8 by a core of the host, after PCIe, of others by the '
         'GPU'}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--flops', type=float, default=1e13,
        help='operations per second of a rank (default: 1e13)')
    add('--memory', type=float, default=32e9,
        help='bytes of a GPU (default: 32e9)')
    add('--gpu-memory', type=float, default=9e11,
        help='bytes per second of its memory (default: 9e11)')
    add('--pcie', type=float, default=12e9,
        help='bytes per second and direction (default: 12e9)')
    add('--latency', type=float, default=1e-5,
        help='of a message, in seconds (default: 1e-5)')
    add('--message-cost', type=float, default=1e-6,
        help='seconds that a rank is busy with a message at either end '
        '(default: 1e-6)')
    add('--sums', choices=[*WHERE], default='nccl',
        help='who makes sums: a core of the host, as in this package; the '
        'GPU, whose memory the network reads; or of fp8 the one, of others '
        'the other, as NCCL (default: nccl)')
    add('--overlap', action='store_true',
        help='replicas exchange gradients beside the backward pass')
    add('--tolerance', type=float, default=0.02,
        help='the simplest of the kinds is named that are so much slower '
        'than the fastest (default: 0.02)')
    add('--kernels', metavar='FILE', default=KERNELS,
        help='what kernels.py printed (default: that of the documentation)')
    add('--check', type=int, nargs='?', const=200, default=0, metavar='COUNT',
        help='compare so many random exchanges with their simulation '
        '(default: 200), and nothing else')
    add('--seed', type=int, default=0, help='of --check (default: 0)')
    add('--json', metavar='FILE', help='write the raw data')
    add('--plot', metavar='FILE', help='draw the map (PNG)')
    return parser.parse_args()


def setting_of(options):
    """What the command line says of all steps."""
    return Setting(
        Speeds(options.flops, options.gpu_memory, options.pcie,
               kernel_rates(options.kernels)),
        options.memory, options.latency, options.message_cost, options.sums,
        options.overlap)


def main():
    options = parse()
    steps = Steps(setting_of(options))
    print(describe())
    data = {'options': {name: str(value)
                        for name, value in vars(options).items()}}
    if options.check:
        data['check'] = print_check(steps.codecs, options)
    else:
        print_setting(steps)
        data['map'] = print_map(steps, options.tolerance)
        data['papers'] = print_papers(steps.setting.speeds.kernels)
    if options.json:
        write_json(options.json, data)
    if options.plot and not options.check:
        from scale_plot import plot
        plot(data['map'], steps, RATES, RANKS, LETTERS, options.plot)


def print_setting(steps):
    setting = steps.setting
    speeds = setting.speeds
    print('\n' + textwrap.fill(
        'Ranks: GPUs with a host each, around a switch; '
        f'{speeds.operations:.3g} operations/s, {setting.memory / 1e9:g} GB '
        f'with {speeds.memory / 1e9:g} GB/s, PCIe {speeds.pcie / 1e9:g} GB/s; '
        f'a message takes {setting.latency * 1e6:g} us, and a rank '
        f'{setting.message_cost * 1e6:g} us at either end.  Sums '
        f'{WHERE[setting.sums]}.  Replicas exchange '
        f'{"beside" if setting.overlap else "after"} the backward pass; '
        'pipelines (1f1b, the best number of micro-batches) after it.  '
        'Updates of parameters, input and waiting for the slowest are left '
        'out.', 78, break_on_hyphens=False) + '\n')
    print(f'{"model":22}{"elements":>12}{"samples":>9}{"GFLOP each":>12}'
          f'{"ms of a rank":>14}')
    for model in MODELS:
        print(f'{model.name:22}{model.elements / 1e6:>10.1f} M'
              f'{model.samples:>9}{model.operations / 1e9:>12.3g}'
              f'{1e3 * steps.compute(model):>14.3g}')


def print_map(steps, tolerance):
    print('''
The fastest: codec, algorithm (d direct, r ring, t torus2d, 2 two-level,
a aggregator), stages x replicas, and times the speed of a float32 ring of
replicas (of pipelines, where a rank has no room for the model).''')
    cells = []
    for model in MODELS:
        rows = [[cell(steps, model, ranks, rate, tolerance)
                 for rate in RATES] for ranks in RANKS]
        cells += [one for row in rows for one in row]
        head(model.name)
        for row in rows:
            line(row[0].ranks, (said(one) for one in row))
        head(f'{model.name}: times the best with another codec / algorithm / '
             'cut')
        for row in rows:
            line(row[0].ranks, ('/'.join(
                '-' if gain is None else number(gain)
                for gain in one.gains.values()) for one in row))
    print_switch(cells)
    return cells


def said(one):
    """A cell as text."""
    codec = one.kind.codec if one.kind.stages < one.ranks else '-'
    letter = LETTERS[one.kind.algorithm] if codec != '-' else '-'
    return f'{codec} {letter} {one.cut} {number(one.over_ring)}'


#: Of algorithms, in tables and in the figure.
LETTERS = {'direct': 'd', 'ring': 'r', 'torus2d': 't', 'two-level': '2',
           'aggregator': 'a'}


def print_switch(cells):
    head('a switch that sums, times the speed of the fastest without, '
         'replicas only', 26)
    by_place = {(one.model, one.ranks, one.gigabits): one for one in cells}
    for model in MODELS:
        for ranks in (RANKS[0], RANKS[-1]):
            row = [by_place[model.name, ranks, rate] for rate in RATES]
            if row[0].switch:
                line(f'{model.name:19}{ranks:>7,}',
                     (number(one.switch) for one in row), 26)


def print_papers(kernels):
    print('\nThe papers\' clusters\n')
    print(f'{"":76}{"published":>11}{"predicted":>11}{"ratio":>7}')
    rows = papers(kernels)
    paper = why = ''
    for index, row in enumerate(rows):
        if row.paper != paper:
            paper = row.paper
            print(f'\n{paper}')
        wide = textwrap.wrap(row.what, 72)
        published = '-' if row.published is None else f'{row.published:.5g}'
        ratio = f'{row.ratio:.2f}' if row.ratio else ''
        print('\n'.join(f'  {text}' for text in wide[:-1])
              + '\n' * (len(wide) > 1)
              + f'  {wide[-1]:74}{published:>11}{row.predicted:>11.3g}'
              f'{ratio:>7}'.rstrip())
        why = row.why
        if index + 1 == len(rows) or rows[index + 1].why != why:
            print(textwrap.fill(why, 76, initial_indent='      ',
                                subsequent_indent='      '))
    return [{**row._asdict(), 'ratio': row.ratio} for row in rows]


def print_check(codecs, options):
    """Estimates over simulations of random exchanges."""
    found = cases(codecs, options.check, options.seed)
    print('\nestimate / simulation of random exchanges of 4 to 64 ranks\n')
    print(f'{"":16}{"cases":>6}{"median":>8}{"least":>7}{"most":>7}'
          f'{"beyond 10 %":>13}')
    for name, count, median, least, most, beyond in summary(found):
        print(f'{name:16}{count:>6}{median:>8.3f}{least:>7.2f}{most:>7.2f}'
              f'{beyond:>13}')
    print('\nthe furthest away\n')
    for case in sorted(found, key=lambda case: -abs(case.ratio - 1))[:5]:
        print(f'{case.ratio:.2f}  {case.algorithm}, {case.ranks} ranks, '
              f'{case.codec}, {case.gigabits:g} Gbit/s, '
              f'{case.latency * 1e6:g} us, {case.elements:,} elements in '
              f'frames of {case.frame_bytes >> 10} KiB: '
              f'{1e3 * case.simulated:.3g} ms')
    return [case._asdict() for case in found]


def head(title, width=6):
    print(f'\n{title}\n')
    line('', (f'{rate:g} Gb/s' for rate in RATES), width)


def line(name, cells, width=6):
    text = f'{name:,}' if isinstance(name, int) else name
    print(f'{text:>{width}}' + ''.join(f'{one:>22}' for one in cells))


if __name__ == '__main__':
    main()
