"""Whether compression is healthy: scales, clipped shares, residuals."""
from __future__ import annotations

from ..quantities import number, share
from ..records.run_record import RunRecord, TensorHealth
from .line_bundle import Points, line_bundle
from .sections import MOST_ROWS, PageSection, Table, label

_TITLES = {'scale': 'Scale', 'q': 'Quantile that sets the scale',
           'clipped': 'Share of elements that were clipped',
           'residual': 'Norm of the residual (error feedback)',
           'gradient': 'Norm of the mean gradient'}

#: Figures show so many tensors, the largest.
_MOST_TENSORS = 100


def compression_section(runs: dict[str, RunRecord]) -> PageSection:
    """A figure per value, with a line per tensor.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('compression', 'Is compression healthy?')
    tensors: dict[str, list[TensorHealth]] = {}
    for run, record in runs.items():
        for item in record.tensors:
            tensors.setdefault(label(run, item.name), []).append(item)
    if not tensors:
        section.sentences.append('No state of a codec was recorded.')
        return section
    section.sentences = [*_most_clipped(tensors), *_most_residual(tensors)]
    shown = sorted(tensors, key=lambda name: -tensors[name][-1].elements)
    if len(shown) > _MOST_TENSORS:
        section.sentences.append(
            f'The figures show the {_MOST_TENSORS} largest of {len(shown)} '
            'tensors.')
    values = sorted({value for items in tensors.values() for item in items
                     for value in item.values},
                    key=lambda value: ([*_TITLES, value].index(value), value))
    for order, value in enumerate(values):
        lines: dict[str, Points] = {
            name: [(item.start, item.iteration, item.values[value])
                   for item in tensors[name] if value in item.values]
            for name in shown[:_MOST_TENSORS]}
        section.drawings.append(line_bundle(
            f'tensors-{order}', _TITLES.get(value, value),
            {name: points for name, points in lines.items() if points},
            logarithmic=value != 'clipped',
            choice='tensor' if not order else ''))
    section.tables.append(('Last readings', Table(
        ('tensor', 'elements', *values),
        [(name, f'{tensors[name][-1].elements:,}', *(
            number(tensors[name][-1].values[value])
            if value in tensors[name][-1].values else '-'
            for value in values)) for name in shown[:MOST_ROWS]])))
    return section


def _most_clipped(tensors: dict[str, list[TensorHealth]]) -> list[str]:
    clipped = {name: items[-1].values['clipped']
               for name, items in tensors.items()
               if 'clipped' in items[-1].values}
    if not clipped:
        return []
    worst = max(clipped, key=lambda name: clipped[name])
    if not clipped[worst]:
        return ['In the last reading no element was clipped.']
    return [f'In the last reading, {worst} has the largest share of clipped '
            f'elements: {share(clipped[worst])}.']


def _most_residual(tensors: dict[str, list[TensorHealth]]) -> list[str]:
    ratios = {name: items[-1].values['residual']
              / items[-1].values['gradient']
              for name, items in tensors.items()
              if items[-1].values.get('gradient')
              and 'residual' in items[-1].values}
    if not ratios:
        return []
    worst = max(ratios, key=lambda name: ratios[name])
    return [f'The largest residual, compared with the gradient: {worst}, '
            f'{number(ratios[worst])} times its norm. One that grows from '
            'reading to reading means that error feedback does not keep up.']
