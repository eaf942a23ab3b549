"""The parts of a schedule: each rank's actions, in their order."""
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
    """A computation or a transfer by one rank.

    Attributes:
        kind: Of the action.
        micro_batch: Its number, from 0.
        chunk: Number of one of the rank's chunks in the whole model.
            ``RECEIVE_ACTIVATION`` receives the chunk's input,
            ``SEND_ACTIVATION`` sends its output; ``RECEIVE_GRADIENT``
            receives the gradient of its output, ``SEND_GRADIENT`` sends that
            of its input.
    """

    kind: Kind
    micro_batch: int
    chunk: int

    @property
    def boundary(self) -> int:
        """The boundary that a transfer crosses: the chunk before it.

        The sending and the receiving rank have the same number.
        """
        return self.chunk - (self.kind in (
            Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT))

    def __str__(self) -> str:
        return (f'{self.kind.value} of micro-batch {self.micro_batch} '
                f'(chunk {self.chunk})')


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions in their order.

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
