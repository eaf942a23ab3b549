"""A plan: where a model is cut, as data that can be saved and edited."""
from __future__ import annotations

import collections
import itertools
from dataclasses import asdict, dataclass

from ..report import stored
from .calls import Order


@dataclass(frozen=True)
class PartitionPlan:
    """Where a model is cut.

    Attributes:
        order: The model's parameters in groups, in the order of first use.
        cuts: Where each chunk but the first one begins: the index in the
            order of a group, and how many calls after the group's first use.
        stages: Ranks of the pipeline; chunk c is on rank c % stages.
        recompute: For each chunk, whether it keeps its inputs only and runs
            forward twice.
        micro_batches: Number of micro-batches that the plan was made for.
        schedule: Name of the schedule that the plan was made for.
        seconds: Predicted seconds in which each chunk computes, per
            micro-batch.
        memory: Predicted bytes that each rank needs at most, beyond the
            interpreter's.
        crossing: Bytes that go from each chunk but the last to the next
            one, per micro-batch.

    Raises:
        ValueError: The parts contradict each other.
    """

    order: Order
    cuts: tuple[tuple[int, ...], ...]
    stages: int
    recompute: tuple[bool, ...]
    micro_batches: int
    schedule: str
    seconds: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    crossing: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        chunks = len(self.cuts) + 1
        for cut in self.cuts:
            if len(cut) != 2 or cut[0] > len(self.order):
                raise ValueError(
                    f'the cut {list(cut)} is no index in the order of '
                    f'{len(self.order)} groups and number of calls')
        for name, times in collections.Counter(
                itertools.chain(*self.order)).items():
            if times > 1:
                raise ValueError(f'the order has {name} {times} times')
        if any(left >= right for left, right in itertools.pairwise(self.cuts)):
            raise ValueError('the cuts of a plan must be in ascending order')
        if self.stages < 1 or chunks % self.stages:
            raise ValueError(f'{chunks} chunks cannot be on {self.stages} '
                             'stages equally')
        if len(self.recompute) != chunks:
            raise ValueError(f'recompute has {len(self.recompute)} entries '
                             f'for {chunks} chunks')

    @property
    def chunks(self) -> int:
        """Chunks of each rank."""
        return (len(self.cuts) + 1) // self.stages

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file, which can be edited."""
        stored.save(path, asdict(self))
