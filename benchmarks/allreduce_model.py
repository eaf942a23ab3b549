"""What the all-reduce algorithms would take on clusters larger than this one.

    python benchmarks/allreduce_model.py

evaluates ``chainer_fp8pipe.planning.allreduce.prediction``; nothing is
measured but the rates of one core, which are read from the table of
``kernels.py``.
"""
from __future__ import annotations

import argparse
import math
import pathlib
import re
from typing import NamedTuple

from chainer_fp8pipe.planning.allreduce.codec_costs import CodecCosts
from chainer_fp8pipe.planning.allreduce.demand import (
    compose_demand,
    direct_demand,
    ring_demand,
    torus2d_demand,
)
from chainer_fp8pipe.planning.allreduce.prediction import (
    estimate,
    total_seconds,
)
from chainer_fp8pipe.planning.cluster import Cluster

from environment import describe, write_json

NODES = (16, 64, 256, 1024, 4096)
RATES = (1, 10, 25, 100, 400)
SIZES = {'1 M': 1_000_000, '25 M (ResNet-50)': 25_000_000,
         '61 M (CaffeNet)': 61_000_000}
KERNELS = pathlib.Path(__file__).parent.parent / 'docs/benchmarks/kernels.txt'
FREE = {4: CodecCosts(4, 4), 1: CodecCosts(1, 1)}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--latency', type=float, default=1e-5,
                        help='of a message, in seconds (default: 1e-5)')
    parser.add_argument('--message-cost', type=float, default=1e-6,
                        help='seconds that a rank is busy with a message at '
                        'either end (default: 1e-6)')
    parser.add_argument('--frame-bytes', type=int, default=1 << 18,
                        help='of a frame (default: 262144)')
    parser.add_argument('--frames-in-flight', type=int, default=8,
                        help='chunks under way at a time (default: 8)')
    parser.add_argument('--kernels', metavar='FILE', default=KERNELS,
                        help='what kernels.py printed (default: that of the '
                        'documentation)')
    parser.add_argument('--gpu-memory', type=float, default=2e12,
                        help='bytes per second (default: 2e12)')
    parser.add_argument('--pcie', type=float, default=25e9,
                        help='bytes per second and direction (default: '
                        '25e9)')
    parser.add_argument('--json', metavar='FILE', help='write the raw data')
    parser.add_argument('--plot', metavar='FILE', help='draw a figure (PNG)')
    return parser.parse_args()


class Setting(NamedTuple):
    """Where gradients are and who encodes, beside what it is compared with.

    ``sums`` is the codec where partial sums travel as fp8.
    """

    name: str
    float32: CodecCosts
    fp8: CodecCosts
    sums: CodecCosts | None


def settings(options):
    """The four that are compared."""
    rate = kernel_rates(options.kernels)
    memory, pcie = options.gpu_memory, options.pcie
    copy = rate['copy (NumPy)']
    add = copy * 8 / 12         # 12 bytes each instead of a copy's 8
    encode = rate['ratio_encode + residual']
    decode = rate['ratio_decode, fp8 wire']
    host32 = CodecCosts(4, 4, encode=copy, add=add, add_partial=add,
                        decode=copy, by_frame=True)
    host8 = CodecCosts(
        1, 4, encode=encode, add=rate['accumulate'], add_partial=add,
        add_own=rate['accumulate'], pack=copy,
        mean=one_after_the_other(copy, decode, encode), decode=decode,
        by_frame=True)
    sums8 = CodecCosts(1, 1, encode=encode, add=rate['add'],
                       add_partial=rate['add'], decode=decode, by_frame=True)
    gpu32 = CodecCosts(4, 4, encode=memory / 8, add=memory / 12,
                       add_partial=memory / 12, decode=memory / 8)
    gpu8 = CodecCosts(
        1, 4, encode=memory / 17, add=memory / 9, add_partial=memory / 12,
        add_own=memory / 9, pack=memory / 8, mean=memory / 37,
        decode=memory / 9)
    staged8 = CodecCosts(1, 4, **{
        name: one_after_the_other(getattr(gpu8, name), pcie)
        for name in ('encode', 'add', 'add_own', 'mean', 'decode')})
    far8 = CodecCosts(**{
        **vars(host8), 'encode': one_after_the_other(pcie / 4, encode),
        'decode': one_after_the_other(decode, pcie / 4),
        'by_frame': False})
    return (Setting('host memory, CPU', host32, host8, sums8),
            Setting('GPU, encoded on CPU', gpu32, far8, None),
            Setting('GPU, encoded on GPU', gpu32, staged8, None),
            Setting('same, no PCIe', gpu32, gpu8, None))


def kernel_rates(path):
    """Elements per second by row of the table of kernels.py."""
    rows = re.findall(
        r'^(\S.*?) {2,}[\d.]+ +[\d.]+ - [\d.]+ +([\d.]+) ',
        pathlib.Path(path).read_text(), re.MULTILINE)
    return {name: 1e9 * float(rate) for name, rate in rows}


def one_after_the_other(*rates):
    """The rate of several passes over the same elements."""
    return 1 / sum(1 / rate for rate in rates)


class Model:
    """Times on clusters of one rank per host."""

    def __init__(self, options):
        self.options = options

    def seconds(self, demands, gigabits, elements, codec, torus=None):
        """From gradients to means of gradients."""
        cluster = Cluster((), gigabits * 1e9 / 8, self.options.latency,
                          torus=torus, message_cost=self.options.message_cost)
        return total_seconds(estimate(
            demands, cluster, codec, elements,
            frame_bytes=self.options.frame_bytes,
            frames_in_flight=self.options.frames_in_flight), codec, elements)

    def torus_gain(self, nodes, gigabits, elements, size):
        """By how much a torus is faster than a ring, on cables."""
        rows = math.isqrt(nodes)
        ring, torus = (
            self.seconds(demands, gigabits, elements, FREE[size],
                         (rows, rows))
            for demands in ((ring_demand(nodes),),
                            torus2d_demand(rows, rows)))
        return ring / torus

    def by_algorithm(self, nodes, gigabits, elements, codec, sums):
        """Seconds by algorithm, around a switch.

        ``codec`` is for algorithms whose partial sums do not travel, or as
        means; ``sums``, if not None, for the others.
        """
        rows = math.isqrt(nodes)
        direct = direct_demand(rows)
        found = {
            'direct': ((direct_demand(nodes),), codec),
            'direct x 2': ((compose_demand(direct, direct, True),), codec)}
        if sums is not None:
            found['ring'] = (ring_demand(nodes),), sums
            found['torus'] = torus2d_demand(rows, rows), sums
        return {name: self.seconds(demands, gigabits, elements, costs)
                for name, (demands, costs) in found.items()}

    def best(self, nodes, gigabits, elements, codec, sums):
        """Name and seconds of the fastest algorithm."""
        return min(self.by_algorithm(nodes, gigabits, elements, codec,
                                     sums).items(), key=lambda item: item[1])

    def fp8_gain(self, setting, nodes, gigabits, elements):
        """By how much fp8 is faster than float32, each at its best."""
        _, seconds = self.best(nodes, gigabits, elements, setting.float32,
                               setting.float32)
        _, fp8 = self.best(nodes, gigabits, elements, setting.fp8,
                           setting.sums)
        return seconds / fp8

    def break_even(self, setting, nodes, elements):
        """The rate in Gbit/s above which fp8 is slower; None beyond 10,000.
        """
        low, high = 0.01, 1e4
        if self.fp8_gain(setting, nodes, high, elements) >= 1:
            return None
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            if self.fp8_gain(setting, nodes, middle, elements) >= 1:
                low = middle
            else:
                high = middle
        return low


def main():
    options = parse()
    model, cases = Model(options), settings(options)
    print(describe())
    data = {'torus': print_torus(model), 'algorithms': [], 'fp8': []}
    for name, elements in SIZES.items():
        data['algorithms'] += print_algorithms(model, cases[0], name,
                                               elements)
    for name, elements in SIZES.items():
        data['fp8'] += print_fp8(model, cases, name, elements)
    data['break even'] = print_break_even(model, cases)
    if options.json:
        write_json(options.json, data)
    if options.plot:
        plot(model, cases, options.plot)


def print_torus(model):
    head('a ring over its neighbours, as multiple of the time of torus2d')
    rows = []
    for name, elements in SIZES.items():
        for nodes in NODES:
            gains = [[model.torus_gain(nodes, rate, elements, size)
                      for rate in RATES] for size in (4, 1)]
            rows.append((name, nodes, gains))
            line(name, nodes, (f'{wide:.2f} {narrow:5.2f}' for wide, narrow
                               in zip(*gains, strict=True)))
    return rows


def print_algorithms(model, setting, name, elements):
    head(f'{name}: milliseconds of the fastest around a switch')
    rows = []
    for nodes in NODES:
        for codec, costs, sums in (
                ('float32', setting.float32, setting.float32),
                ('fp8', setting.fp8, setting.sums)):
            best = [model.best(nodes, rate, elements, costs, sums)
                    for rate in RATES]
            rows.append((name, nodes, codec, best))
            line(codec, nodes, (
                f'{SHORT[algorithm]} {number(1e3 * seconds):>5}'
                for algorithm, seconds in best))
    return rows


#: In tables: direct, direct within direct, ring, torus2d.
SHORT = {'direct': 'd', 'direct x 2': 'dd', 'ring': 'r', 'torus': 't'}


def print_fp8(model, cases, name, elements):
    head(f'{name}: float32, as multiple of the time of fp8')
    rows = []
    for setting in cases:
        for nodes in NODES:
            gains = [model.fp8_gain(setting, nodes, rate, elements)
                     for rate in RATES]
            rows.append((name, setting.name, nodes, gains))
            line(setting.name, nodes, (f'{gain:.2f}' for gain in gains))
    return rows


def print_break_even(model, cases):
    print('\nfp8 is slower from so many Gbit/s on\n')
    line('', 'nodes', SIZES, 19)
    rows = []
    for setting in cases:
        for nodes in NODES:
            rates = [model.break_even(setting, nodes, elements)
                     for elements in SIZES.values()]
            rows.append((setting.name, nodes, rates))
            line(setting.name, nodes, (
                'never' if rate is None else number(rate) for rate in rates),
                19)
    return rows


def head(title):
    print(f'\n{title}\n')
    line('', 'nodes', (f'{rate} Gb/s' for rate in RATES))


def line(name, nodes, cells, width=12):
    print(f'{name:19}{nodes:>6}' + ''.join(f'{cell:>{width}}'
                                           for cell in cells))


def number(value):
    """Three digits."""
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f'{value:.{digits}f}'


def plot(model, cases, path):
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8.6))
    plot_torus(axes[0][0], model, '1 M')
    plot_torus(axes[0][1], model, '25 M (ResNet-50)')
    plot_algorithms(axes[1][0], model, cases[0])
    plot_fp8(axes[1][1], model, cases)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.tight_layout(h_pad=2.5, w_pad=2)
    figure.savefig(path, dpi=130)


def plot_torus(axis, model, name):
    for rate, marker in zip(RATES, 'osv^D', strict=True):
        axis.plot(NODES, [model.torus_gain(nodes, rate, SIZES[name], 4)
                          for nodes in NODES], marker + '-',
                  label=f'{rate} Gbit/s')
    axis.axhline(1, color='grey', linewidth=0.8)
    label_nodes(axis)
    axis.set_yscale('log', base=2)
    ticks = [1, 2, 4, 8, 16, 32]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.set_ylabel("ring's time / torus2d's time")
    axis.set_title(f'Hosts wired as a torus, {name} elements, float32',
                   fontsize=10)
    axis.legend(fontsize=8, title='each link', title_fontsize=8)


def plot_algorithms(axis, model, setting):
    elements, rate = SIZES['25 M (ResNet-50)'], 25
    colours = dict(zip(SHORT, ('tab:blue', 'tab:green', 'tab:orange',
                               'tab:red'), strict=True))
    for codec, style, costs, sums in (
            ('float32', 'o-', setting.float32, setting.float32),
            ('fp8', 's--', setting.fp8, setting.sums)):
        times = [model.by_algorithm(nodes, rate, elements, costs, sums)
                 for nodes in NODES]
        for name in times[0]:
            axis.plot(NODES, [1e3 * seconds[name] for seconds in times],
                      style, color=colours[name], label=f'{name}, {codec}')
    label_nodes(axis)
    axis.set_yscale('log')
    ticks = [20, 50, 100, 200]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_ylabel('ms, encoding and decoding included')
    axis.set_title(f'Switch, {rate} Gbit/s, 25 M elements, sums and codec '
                   'on one core', fontsize=10)
    axis.legend(fontsize=8, ncol=2)


def plot_fp8(axis, model, cases):
    rates = [10 ** (step / 10) for step in range(31)]
    for setting, style in zip(cases, ('o-', 's-', '^-', 'D--'), strict=True):
        axis.plot(rates, [
            model.fp8_gain(setting, 64, rate, SIZES['25 M (ResNet-50)'])
            for rate in rates], style, markevery=5, label=setting.name)
    axis.axhline(1, color='grey', linewidth=0.8)
    axis.set_xscale('log')
    ticks = [1, 10, 25, 100, 400, 1000]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel('Gbit/s of each port')
    axis.set_ylabel("float32's time / fp8's time")
    axis.set_title('Switch, 64 nodes, 25 M elements', fontsize=10)
    axis.legend(fontsize=8, title='gradients in', title_fontsize=8)


def label_nodes(axis):
    axis.set_xscale('log', base=2)
    axis.set_xticks(NODES, [f'{nodes:,}' for nodes in NODES])
    axis.set_xlabel('nodes')


if __name__ == '__main__':
    main()
