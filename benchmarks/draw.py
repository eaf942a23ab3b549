"""Draws docs/benchmarks/training_steps.png from the raw text beside it.

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
        training_steps().savefig(RAW / 'training_steps.png')


if __name__ == '__main__':
    main()
