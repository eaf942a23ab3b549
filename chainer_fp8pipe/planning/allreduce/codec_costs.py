"""A codec in numbers, and how long the steps of a plan keep a rank busy."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ...allreduce.plan import Opcode
from ...allreduce.rank_plan import Step
from ..cluster import Cluster
from .traffic import MessageForm


@dataclass(frozen=True)
class CodecCosts:
    """Bytes of an element, and elements per second of one rank.

    What is never done, or takes no time, has an infinite rate.

    Attributes:
        wire_bytes: Bytes of an element of contributions and results.
        partial_bytes: Bytes of an element of partial sums.
        encode: Elements per second of gradients encoded for the wire.
        add: Likewise of received contributions added to a sum.
        add_partial: Of received partial sums added to a sum.
        add_own: Of the rank's own contribution added to a sum.
        pack: Of sums brought into the form in which sums travel.
        mean: Of sums made means and encoded.
        decode: Of results decoded into gradients.
        by_frame: Gradients are encoded and decoded frame by frame, during
            the exchange; if not, all before the exchange and all after.
    """

    wire_bytes: float
    partial_bytes: float
    encode: float = math.inf
    add: float = math.inf
    add_partial: float = math.inf
    add_own: float = math.inf
    pack: float = math.inf
    mean: float = math.inf
    decode: float = math.inf
    by_frame: bool = False

    def bytes_of(self, form: MessageForm) -> float:
        """Bytes of an element in a message."""
        return (self.partial_bytes if form is MessageForm.PARTIAL
                else self.wire_bytes)

    def frame(self, frame_bytes: float) -> int:
        """Elements of a frame of so many bytes on the wire."""
        return max(1, int(frame_bytes / self.wire_bytes))

    @property
    def first(self) -> float:
        """Seconds per element before the first step of a chunk."""
        return 1 / self.encode if self.by_frame else 0.0

    @property
    def last(self) -> float:
        """Seconds per element after the last step of a chunk."""
        return 1 / self.decode if self.by_frame else 0.0


@dataclass(frozen=True)
class StepCosts:
    """For how long steps of a plan keep a rank busy.

    Attributes:
        cluster: Whose ranks pay for each message and byte.
        codec: Bytes and rates of the elements.
    """

    cluster: Cluster
    codec: CodecCosts

    def seconds(self, step: Step, elements: int,
                contributes: bool) -> float:
        """The seconds of one step.

        Args:
            step: Of a plan.
            elements: How many are in the step's message or blocks.
            contributes: The rank has a contribution of its own.
        """
        kind, codec = step.action.kind, self.codec
        if not elements:
            return 0.0
        if kind is Opcode.ENCODE:
            return 0.0 if step.fresh else elements / codec.mean
        form = form_of(step)
        seconds = (self.cluster.message_cost + elements * codec.bytes_of(form)
                   * self.cluster.byte_cost)
        if kind is Opcode.SEND_PARTIAL and form is MessageForm.PARTIAL:
            seconds += elements / codec.pack
        elif kind is Opcode.RECEIVE_PARTIAL:
            seconds += elements / (
                codec.add_partial if form is MessageForm.PARTIAL
                else codec.add)
            if step.fresh and contributes:
                seconds += elements / codec.add_own
        return seconds


def form_of(step: Step) -> MessageForm:
    """What the message carries that a step sends or receives."""
    if step.action.kind in (Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT):
        return MessageForm.RESULT
    return MessageForm.PARTIAL if step.summed else MessageForm.CONTRIBUTION
