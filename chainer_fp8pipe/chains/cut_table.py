"""The cut of a model as text."""
from __future__ import annotations

from typing import Any

from ..planning.sizes import said_bytes


def table(partition: Any) -> str:
    """A line per chunk: ranks, time, memory, and what is sent on."""
    plan, predicted = partition.plan, partition.plan.predicted
    replicas = partition.grid.replicas
    total = sum(predicted.busy) or 1.0
    rows = [['stage', 'rank', 'time', 'parameters', 'memory',
             'sends on', 'first parameter']]
    order, homes = plan.order, plan.homes()
    for chunk in range(partition.last + 1):
        stage = chunk % plan.stages
        names = partition.used[chunk]
        ranks = partition.grid.placement.ranks[stage]
        first = next((group[0] for group in order
                      if homes[group[0]] == chunk), '')
        rows.append([
            str(stage) + (f'.{chunk // plan.stages}'
                          if plan.chunks > 1 else ''),
            ' '.join(map(str, ranks)),
            f'{100 * predicted.busy[chunk] / total:.0f} %'
            if predicted.busy else '',
            said_bytes(sum(partition.parameter_bytes(name)
                           for name in names)),
            said_bytes(predicted.memory[stage]) if predicted.memory else '',
            _crossing(partition, chunk),
            first + (' (again)' if plan.recompute[chunk] else '')])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(text.ljust(width) for text, width
                       in zip(row, widths, strict=True)).rstrip()
             for row in rows]
    busy = predicted.busy
    balance = sum(busy) / len(busy) / max(busy) if busy and max(busy) else 1.0
    head = (f'{partition.title}: {plan.stages} stages'
            + (f' x {replicas} replicas' if replicas > 1 else '')
            + f', {plan.schedule} with {plan.micro_batches} micro-batches, '
            f'balance {balance:.2f}')
    if predicted.seconds:
        head += f', {predicted.seconds * 1e3:.0f} ms a step predicted'
    notes = ['(again): keeps its inputs only, and runs forward twice'] * any(
        plan.recompute)
    for name, ranks in partition.ties.items():
        notes.append(f'{name} is on stages '
                     + ' and '.join(map(str, ranks))
                     + ', which sum its gradient')
    return '\n'.join([head, *lines, *notes])


def _crossing(partition: Any, chunk: int) -> str:
    if chunk == partition.last:
        return ''
    values = partition.crossing[chunk]
    size = sum(value.nbytes for _, value in values)
    names = ', '.join(f'{name} {"x".join(map(str, value.shape))}'
                      for name, value in values[:2])
    more = f' and {len(values) - 2} more' if len(values) > 2 else ''
    return f'{said_bytes(size)}: {names}{more}'
