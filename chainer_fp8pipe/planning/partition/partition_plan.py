"""A plan: where a model is cut, as data that can be saved and edited."""
from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..json_file import read_json
from .positions import Order, Position

_FORMAT = 1


@dataclass(frozen=True)
class Predicted:
    """Predicted seconds and bytes of a plan.

    Attributes:
        seconds: Of a step, without the update of the parameters.
        busy: Seconds in which each chunk computes, per micro-batch.
        memory: Bytes that each rank needs at most, beyond the
            interpreter's.
        crossing: Bytes that go from each chunk but the last to the next
            one, per micro-batch.
    """

    seconds: float = 0.0
    busy: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    crossing: tuple[float, ...] = ()


@dataclass(frozen=True)
class PartitionPlan:
    """Where a model is cut.

    Attributes:
        order: The model's parameters in groups, in the order of first use.
        cuts: The first position of each chunk but the first one.
        stages: Ranks of the pipeline; chunk c is on rank c % stages.
        recompute: For each chunk, whether it keeps its inputs only and runs
            forward twice.
        micro_batches: Number of micro-batches that the plan was made for.
        schedule: Name of the schedule that the plan was made for.
        predicted: Seconds and bytes of the plan.
    """

    order: Order
    cuts: tuple[Position, ...]
    stages: int
    recompute: tuple[bool, ...]
    micro_batches: int
    schedule: str
    predicted: Predicted = field(default_factory=Predicted)

    @property
    def chunks(self) -> int:
        """Chunks of each rank."""
        return (len(self.cuts) + 1) // self.stages

    def homes(self) -> dict[str, int]:
        """The chunk of each parameter, by the parameter's path."""
        return {name: sum(cut <= Position(place, 0) for cut in self.cuts)
                for place, group in enumerate(self.order) for name in group}

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file, which can be edited."""
        with open(path, 'w') as file:
            json.dump(self.as_dict(), file, indent=1)
            file.write('\n')

    def as_dict(self) -> dict[str, Any]:
        """The content of the file that :meth:`save` writes."""
        return {
            'format': _FORMAT, 'stages': self.stages,
            'schedule': self.schedule, 'micro_batches': self.micro_batches,
            'cuts': [{'before': self.order[cut.place][0],
                      'calls_later': cut.depth} for cut in self.cuts],
            'recompute': list(self.recompute),
            'order': [list(group) for group in self.order],
            'predicted': asdict(self.predicted)}


def load_plan(source: str | Mapping[str, Any] | PartitionPlan
             ) -> PartitionPlan:
    """Reads a plan, and checks that its parts agree with each other.

    Args:
        source: The path of a file that :meth:`PartitionPlan.save` has written,
            the dictionary in such a file, or a :class:`PartitionPlan`, which
            is returned as it is.

    Raises:
        OSError: The file cannot be read.
        ValueError: The source is no plan, or a plan that contradicts itself;
            the message says how.
    """
    if isinstance(source, PartitionPlan):
        return source
    name = 'the plan'
    if isinstance(source, str):
        name, source = source, read_json(source)
    try:
        return _checked(source)     # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise ValueError(f'{name} is no plan: {error!r} is missing or of '
                         'another kind') from None


def _checked(data: Mapping[str, Any]) -> PartitionPlan:
    if data['format'] != _FORMAT:
        raise ValueError(f'a plan of format {data["format"]!r}; this version '
                         f'reads format {_FORMAT}')
    order = tuple(tuple(group) for group in data['order'])
    place_of = {name: place for place, group in enumerate(order)
                for name in group}
    cuts = []
    for cut in data['cuts']:
        if cut['before'] not in place_of:
            raise ValueError(f'the plan cuts before {cut["before"]}, which '
                             'is not in its order of parameters')
        cuts.append(Position(place_of[cut['before']],
                             int(cut['calls_later'])))
    if any(left >= right for left, right in itertools.pairwise(cuts)):
        raise ValueError('the cuts of a plan must be in the order of '
                         'parameters')
    chunks, stages = len(cuts) + 1, int(data['stages'])
    if stages < 1 or chunks % stages:
        raise ValueError(f'{chunks} chunks cannot be on {stages} stages '
                         'equally')
    recompute = tuple(map(bool, data['recompute']))
    if len(recompute) != chunks:
        raise ValueError(f'recompute has {len(recompute)} entries for '
                         f'{chunks} chunks')
    predicted: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data.get('predicted', {}).items()}
    return PartitionPlan(order, tuple(cuts), stages, recompute,
                         int(data['micro_batches']), str(data['schedule']),
                         Predicted(**predicted))


def ends_of(cuts: Sequence[Position], starts: Sequence[Position]
            ) -> tuple[int, ...]:
    """The index after the last atom of each chunk.

    Args:
        cuts: Of a plan.
        starts: Position of the first call of each atom.
    """
    return (*(sum(start < cut for start in starts) for cut in cuts),
            len(starts))
