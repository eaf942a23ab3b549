"""What a schedule consists of: each rank's actions, in their order."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """What an action does; ``BACKWARD`` is both halves in one."""

    FORWARD = 'forward'
    BACKWARD = 'backward'
    BACKWARD_INPUT = 'backward_input'
    BACKWARD_WEIGHT = 'backward_weight'
    SEND_ACTIVATION = 'send_activation'
    RECEIVE_ACTIVATION = 'receive_activation'
    SEND_GRADIENT = 'send_gradient'
    RECEIVE_GRADIENT = 'receive_gradient'


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: What.
        micro_batch: Its number, from 0.
        chunk: The chunk of the whole model that this rank works on.
            ``RECEIVE_ACTIVATION`` receives its input, ``SEND_ACTIVATION``
            sends its output; ``RECEIVE_GRADIENT`` receives the gradient of
            its output, ``SEND_GRADIENT`` sends that of its input.
    """

    kind: Kind
    micro_batch: int
    chunk: int

    @property
    def boundary(self) -> int:
        """The boundary that a transfer crosses: after the chunk so numbered.

        The same number on the rank that sends and on the one that receives.
        """
        return self.chunk - (self.kind in (
            Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT))

    def __str__(self) -> str:
        return (f'{self.kind.value} of micro-batch {self.micro_batch} '
                f'(chunk {self.chunk})')


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions, in the order in which it does them.

    Attributes:
        name: Of the schedule, for messages and pictures.
        stages: Ranks of the pipeline.
        micro_batches: Parts of a batch.
        chunks: Chunks of each rank.
        actions: One tuple per rank.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def last_chunk(self) -> int:
        """The chunk that makes the loss."""
        return self.stages * self.chunks - 1


class ScheduleError(ValueError):
    """A schedule is wrong; the message names the rank and the action."""
