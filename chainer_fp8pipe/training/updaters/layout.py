"""Whether the ranks' stages make up one model."""
from __future__ import annotations

from typing import Any

from ...mpi.grid import ProcessGrid


def layout_problem(model: Any, grid: ProcessGrid) -> str:
    """What is wrong with the cut, seen over all ranks; '' if nothing.

    Call it on all ranks.

    Args:
        model: This rank's stage.
        grid: The ranks.
    """
    everyone = grid.comm.allgather(
        (grid.stage_index, model.total, model.bounds))
    totals = {total for _, total, _ in everyone}
    if len(totals) > 1:
        return (f'the models have {_list(sorted(totals))} layers on '
                'different ranks')
    chunks: dict[int, tuple[int, int, int]] = {}
    for rank, (stage, _, bounds) in enumerate(everyone):
        for position, (start, end) in enumerate(bounds):
            chunk = stage + position * grid.stages
            other, *known = chunks.setdefault(chunk, (rank, start, end))
            if known != [start, end]:
                return (f'rank {rank} has layers {start} to {end - 1} where '
                        f'its replica, rank {other}, has {known[0]} to '
                        f'{known[1] - 1}')
    return _gap(chunks, totals.pop())


def _gap(chunks: dict[int, tuple[int, int, int]], total: int) -> str:
    next_layer = 0
    for number in range(max(chunks) + 1):
        if number not in chunks:
            return 'the ranks have different numbers of chunks'
        rank, start, end = chunks[number]
        if start != next_layer:
            return (f'rank {rank} starts at layer {start} but layer '
                    f'{next_layer} is to follow')
        next_layer = end
    if next_layer != total:
        return (f'rank {rank} ends at layer {next_layer - 1} but the model '
                f'has {total} layers')
    return ''


def _list(numbers: list[int]) -> str:
    return ' and '.join(map(str, numbers))
