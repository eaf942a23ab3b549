"""The map of ``planning_scale`` as a figure."""
from __future__ import annotations

import matplotlib
from matplotlib import pyplot
from matplotlib.patches import Patch, Rectangle

matplotlib.use('Agg')

#: Of codecs, in their order: told apart by colour-blind people, and in grey
#: by lightness (Okabe and Ito's palette); the last is for no exchange.
COLOURS = ('#0072B2', '#E69F00', '#F0E442', '#009E73', '#CC79A7', '#56B4E9')
NONE = '#FFFFFF'
#: Who sums.
WHERE = {'host': 'by a core of the host', 'gpu': 'by the GPU',
         'nccl': 'of fp8 by a core\nof the host, of others by the GPU'}
#: Where text must be white.
DARK = ('#0072B2',)


def plot(cells, steps, rates, ranks, letters, path):
    """Draws a panel per model, and one that explains.

    Args:
        cells: Of all models.
        steps: Whose they are.
        rates: In Gbit/s, of the columns.
        ranks: Of the rows.
        letters: Of algorithms.
        path: Of the PNG.
    """
    names = [*dict.fromkeys(cell.model for cell in cells)]
    figure, axes = pyplot.subplots(2, 3, figsize=(14.5, 10.2))
    colours = dict(zip(steps.codecs, COLOURS, strict=False))
    for axis, name in zip(axes.flat, names, strict=False):
        panel(axis, [cell for cell in cells if cell.model == name], rates,
              ranks, colours, letters)
        axis.set_title(f'{name}, {milliseconds(cells, name, steps)} per rank',
                       fontsize=11)
    for axis in list(axes.flat)[len(names):]:
        axis.axis('off')
    explain(axes.flat[len(names)], steps, colours, letters)
    figure.tight_layout(h_pad=1.6, w_pad=1.4)
    figure.savefig(path, dpi=110)


def milliseconds(cells, name, steps):
    """Of a rank's passes, as text."""
    from scale_models import MODELS
    model = next(model for model in MODELS if model.name == name)
    return f'{1e3 * steps.compute(model):,.0f} ms'


def panel(axis, cells, rates, ranks, colours, letters):
    """The map of one model."""
    for cell in cells:
        column, row = rates.index(cell.gigabits), ranks.index(cell.ranks)
        alone = cell.kind.stages == cell.ranks
        colour = NONE if alone else colours[cell.kind.codec]
        axis.add_patch(Rectangle(
            (column, row), 1, 1, facecolor=colour, edgecolor='#808080',
            linewidth=0.6))
        if cell.kind.stages > 1:
            axis.add_patch(Rectangle(
                (column + 0.02, row + 0.02), 0.96, 0.96, fill=False,
                hatch='///', edgecolor='#00000028', linewidth=0))
        ink = 'white' if colour in DARK else 'black'
        lines = label(cell, letters, alone)
        for index, (text, size, weight) in enumerate(lines):
            axis.text(column + 0.5, row + 1 - (index + 0.75) / (
                len(lines) + 0.5), text, ha='center', va='center',
                fontsize=size, color=ink, weight=weight)
    axis.set_xlim(0, len(rates))
    axis.set_ylim(0, len(ranks))
    axis.set_xticks([place + 0.5 for place in range(len(rates))],
                    [f'{rate:g}' for rate in rates])
    axis.set_yticks([place + 0.5 for place in range(len(ranks))],
                    [f'{count:,}' for count in ranks])
    axis.tick_params(length=0)
    axis.set_xlabel('Gbit/s of each link')
    axis.set_ylabel('ranks')


def label(cell, letters, alone):
    """Lines of a cell: algorithm, cut, speed; with size and weight."""
    lines = [] if alone else [(letters[cell.kind.algorithm], 10, 'bold')]
    if cell.kind.stages > 1:
        lines.append((cell.cut.replace('x', '\u00d7'), 7.5, 'normal'))
    return [*lines, (f'\u00d7 {factor(cell.over_ring)}', 8.5, 'normal')]


def factor(value):
    """Two digits and more."""
    return f'{value:.3g}' if value >= 100 else f'{value:.2g}' if (
        value >= 10) else f'{value:.1f}' if value >= 2 else f'{value:.2f}'


def explain(axis, steps, colours, letters):
    """What colours, hatches, letters and numbers mean."""
    patches = [Patch(facecolor=colour, edgecolor='grey', label=name)
               for name, colour in colours.items()]
    patches += [
        Patch(facecolor=NONE, edgecolor='grey',
              label='nothing to exchange: stages only'),
        Patch(facecolor=NONE, edgecolor='#00000060', hatch='///',
              label='stages \u00d7 replicas; without: replicas only')]
    axis.legend(handles=patches, loc='upper left', fontsize=10.5,
                frameon=False, title='Fastest kind of training',
                title_fontsize=11.5, alignment='left', handleheight=1.4)
    setting = steps.setting
    where = WHERE[setting.sums]
    algorithms = ',  '.join(f'{letter} {name}'
                            for name, letter in letters.items())
    head, _, tail = algorithms.rpartition(',  2')
    axis.text(0.03, 0.46, '\n'.join((
        f'Letters: {head},', f'2{tail}', '',
        'Second line: stages \u00d7 replicas', '',
        'Last line: speed, float32 ring of replicas = 1 (pipelines',
        'with one, where a rank has no room for the model)', '',
        f'{setting.speeds.operations / 1e12:g} TFLOP/s, '
        f'{setting.memory / 1e9:g} GB; sums {where};',
        'replicas exchange '
        f'{"beside" if setting.overlap else "after"} the backward pass')),
        transform=axis.transAxes, va='top', fontsize=10)
