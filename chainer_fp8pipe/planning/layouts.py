"""Stages times replicas: which of all factorisations of the ranks is best.

A pipeline of all ranks sends activations, replicas send gradients; fewer
stages mean shorter pipelines and more memory for each rank.  Which is faster
depends on the model, on the links and on the codec between replicas.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .calls import Call, Parameter
from .cuts import DoesNotFit, Task
from .plan import Plan
from .positions import Order
from .search import search
from .sizes import said_bytes


class Layout(NamedTuple):
    """A number of stages, and what is expected of it.

    Attributes:
        stages: Ranks of a pipeline.
        replicas: Pipelines.
        seconds: Of an update without the optimizer; None: impossible.
        exchange: Seconds of these in which replicas average gradients.
        memory: Bytes of the fullest rank.
        plan: Of a pipeline; None: there is none.
        reason: Why there is none.
    """

    stages: int
    replicas: int
    seconds: float | None
    exchange: float = 0.0
    memory: float = 0.0
    plan: Plan | None = None
    reason: str = ''


def layouts(calls: Sequence[Call], order: Order,
            parameters: Mapping[str, Parameter], task: Task, ranks: int,
            gradient_bytes: float = 4.0) -> list[Layout]:
    """All factorisations of the ranks, the fastest first.

    Args:
        calls: Of a trace with one micro-batch.
        order: Of the model's parameters.
        parameters: By path.
        task: With the micro-batches of a whole batch, which replicas divide
            among themselves, and the memory of a rank.
        ranks: How many there are.
        gradient_bytes: Of a number between replicas: 4, or 1 for fp8.
    """
    found = [_layout(calls, order, parameters, dataclasses.replace(
        task, stages=stages, micro_batches=max(
            1, -(-task.micro_batches * stages // ranks))),
        ranks // stages, gradient_bytes)
        for stages in range(1, ranks + 1) if not ranks % stages]
    return sorted(found, key=lambda one: (
        one.seconds is None, one.seconds or 0.0))


def table(found: Sequence[Layout]) -> str:
    """A line per layout; why not the others."""
    rows = [['stages x replicas', 'update', 'of it exchange', 'memory',
             'against the best']]
    best = found[0].seconds
    for one in found:
        name = f'{one.stages} x {one.replicas}'
        if one.seconds is None:
            rows.append([name, '-', '-', '-', one.reason])
        else:
            assert best is not None
            rows.append([
                name, f'{one.seconds * 1e3:.0f} ms',
                f'{one.exchange * 1e3:.0f} ms', said_bytes(one.memory),
                f'{one.seconds / best:.2f} x' if best else ''])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join(
        text.ljust(width) for text, width
        in zip(row, widths, strict=True)).rstrip() for row in rows)


def _layout(calls: Sequence[Call], order: Order,
            parameters: Mapping[str, Parameter], task: Task, replicas: int,
            gradient_bytes: float) -> Layout:
    try:
        plan = search(calls, order, parameters, task)
    except (DoesNotFit, ValueError) as error:
        return Layout(task.stages, replicas, None,
                      reason=str(error).partition('. What')[0])
    homes = plan.homes()
    numbers = [0.0] * task.stages
    for name, chunk in homes.items():
        parameter = parameters[name]
        if parameter.shape is not None:
            numbers[chunk % task.stages] += (
                parameter.nbytes / parameter.dtype.itemsize)
    # The least that an all-reduce must send, over the same links.
    exchange = (2 * (replicas - 1) / replicas * max(numbers) * gradient_bytes
                / task.wire.bandwidth)
    return Layout(task.stages, replicas, plan.predicted.seconds + exchange,
                  exchange, max(plan.predicted.memory), plan)
