"""Draws docs/benchmarks/*.png from the raw text beside them.

    .venv/bin/python benchmarks/draw.py

A picture's title says what to see; grey is the baseline.  Medians and spreads
are those that the text has.
"""
import re
from pathlib import Path

from matplotlib import pyplot

pyplot.switch_backend('Agg')        # without a display

RAW = Path(__file__).parent.parent / 'docs' / 'benchmarks'
OURS, OTHERS = '#1f6fb4', '#8a8a8a'
LOOK = {'axes.spines.top': False, 'axes.spines.right': False,
        'axes.titlelocation': 'left', 'axes.titlesize': 'medium',
        'figure.constrained_layout.use': True, 'savefig.dpi': 150,
        'font.size': 11}


def read(name):
    """A raw text without thousands' commas."""
    return re.sub(r'(?<=\d),(?=\d{3})', '', (RAW / f'{name}.txt').read_text())


def training_steps():
    """Steps by codec and overlap, PyTorch's in grey."""
    rows = [(label.strip(), *map(float, numbers)) for label, *numbers in
            re.findall(r'^(.{32}) +([\d.]+) +([\d.]+) - ([\d.]+) ',
                       read('training_steps'), re.MULTILINE)]
    figure, axis = pyplot.subplots(figsize=(7, 3.8))
    bars(axis, [row[0].replace('overlapped', 'beside the backward pass')
                for row in rows], [row[1:] for row in rows],
         [OTHERS if 'PyTorch' in row[0] or row[0] == 'float32' else OURS
          for row in rows])
    axis.set(xlabel='ms, medians and spreads', title=(
        'One training step (4.2 million parameters,\n4 virtual hosts, links '
        'of 500 Mbit/s)'))
    return figure


def large_batch():
    """Test error by batch, with the standard deviation of seeds."""
    table = read('large_batch').partition('the same with')[0]
    rows = [[float(number) for number in re.findall(r'[\d.]+', row)]
            for row in re.findall(r'^ +\d+ +\d+ .*', table, re.MULTILINE)]
    batches = [row[0] for row in rows]
    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for place, (name, colour) in enumerate((
            ('linear scaling', OTHERS), ('+ warm-up', '#c05a1e'),
            ('+ LARS', OURS), ('+ grouped BN', '#3a8a4d'))):
        error = [100 - row[2 + 2 * place] for row in rows]
        half = [row[3 + 2 * place] for row in rows]
        # Beside each other, or bars would hide one another; down to a tenth,
        # as the axis cannot show less than nothing.
        axis.errorbar([batch * 1.035 ** (place - 1.5) for batch in batches],
                      error, ([min(a, 0.9 * b) for a, b in zip(
                          half, error, strict=True)], half),
                      color=colour, marker='o', capsize=3)
        axis.annotate('  ' + name, (batches[-1] * 1.06, error[-1]),
                      va='center', color=colour)
    axis.set_xscale('log', base=2)
    axis.set_yscale('log')
    axis.set_xticks(batches, [f'{batch:.0f}' for batch in batches])
    axis.set_yticks([1, 2, 5, 10, 20, 50], ['1', '2', '5', '10', '20', '50'])
    axis.minorticks_off()
    axis.set_xlim(26, 2900)
    axis.set(xlabel='samples per update; 1200 are the whole set',
             ylabel='test error [%]', title=(
                 'Up to 256 samples no method is better; with 1200\nonly LARS '
                 'helps (digits, 20 epochs, mean and\nstandard deviation of 5 '
                 'seeds)'))
    return figure


def pipeline():
    """Speed-up over serial Chainer by micro-batches."""
    rows = [tuple(map(float, row)) for row in re.findall(
        r'^ +(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) - +([\d.]+) .* (\d+)'
        r' +[\d.]+ x as', read('pipeline'), re.MULTILINE)]
    widths = sorted({row[0] for row in rows})
    figure, every = pyplot.subplots(1, len(widths), figsize=(7, 2.8),
                                    sharey=True)
    for axis, width in zip(every, widths, strict=True):
        parts, serial, ours, least, most, torch = zip(*(
            row[1:] for row in rows if row[0] == width), strict=True)
        speed = [a / b for a, b in zip(serial, ours, strict=True)]
        axis.errorbar(
            parts, speed, color=OURS, marker='o', capsize=3,
            yerr=[[v - a / b for v, a, b in zip(speed, serial, most,
                                                strict=True)],
                  [a / b - v for v, a, b in zip(speed, serial, least,
                                                strict=True)]])
        others = [a / b for a, b in zip(serial, torch, strict=True)]
        axis.plot(parts, others, color=OTHERS, marker='s')
        axis.axhline(1, color='black', linewidth=0.8)
        axis.set_xscale('log', base=2)
        axis.set_xticks(parts, [f'{part:.0f}' for part in parts])
        axis.set(title=f'width {width:.0f}', xlabel='micro-batches')
    every[-1].annotate('this package', (2.3, 1.47), color=OURS)
    every[-1].annotate('PyTorch', (1.5, 1.05), color=OTHERS)
    every[0].set_ylabel('times as fast as\nserial Chainer')
    figure.suptitle('Two stages on two cores: 2 to 4 micro-batches are best',
                    x=0.01, ha='left')
    return figure


def bars(axis, names, found, colours):
    """Horizontal bars with their numbers; found: median, least, most."""
    for place, (median, least, most) in enumerate(found):
        axis.barh(place, median, color=colours[place], height=0.7)
        if least < most:
            axis.errorbar(median, place, xerr=[[median - least],
                                               [most - median]],
                          color='black', capsize=3)
        axis.annotate(f'  {median:.0f}', (most, place), va='center')
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(most for *_, most in found))


def main():
    with pyplot.rc_context(LOOK):
        for draw in training_steps, pipeline, large_batch:
            figure = draw()
            figure.savefig(RAW / f'{draw.__name__}.png')
            pyplot.close(figure)


if __name__ == '__main__':
    main()
