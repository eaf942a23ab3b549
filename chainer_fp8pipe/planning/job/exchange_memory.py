"""Bytes that a communicator keeps beside a model and its gradients."""
from __future__ import annotations

from collections.abc import Sequence

from ...allreduce.frames import Frames, piece_bounds
from ...allreduce.plan import Opcode, Plan
from ...allreduce.rank_plan import Step, program
from .codec_choice import (
    FRAME_BYTES,
    FRAMES_IN_FLIGHT,
    SUM_BYTES,
    WIRE_BYTES,
    form_of_sums,
)

#: What MPI and the interpreter take for megabytes of gradients.  With MPICH
#: 5.0, 2 and 4 ranks, 0.5 to 32 M elements and all codecs: 2.3 to 2.8 MB.
_BUFFERS = 2_500_000
#: Codecs with error feedback, whose first updates travel in float32.
_WARM = 'fp8', 'int4', 'int5'
_FLOAT = 4              # bytes of what is left out, and of sums being made


def exchange_bytes(name: str, elements: int, plans: Sequence[Plan], *,
                   partial_sums: str = 'auto', error_feedback: bool = True,
                   warm_up: bool = True, overlap: bool = False,
                   frame_bytes: int = FRAME_BYTES,
                   frames_in_flight: int = FRAMES_IN_FLIGHT) -> int:
    """Bytes that a communicator takes on a rank, gradients on the host.

    With overlap wires, which are kept from one update to the next; with error
    feedback what encodings have left out, of all gradients and of the means
    that a rank encodes; frames on their way, and the sums of those.

    Args:
        name: Of the communicator, one of :data:`.WIRE_BYTES`.
        elements: Of all gradients.  They are float32; of others there are
            copies besides.
        plans: Of the all-reduce, run side by side, each on its share.  Rank
            0 counts; others need as much.
        partial_sums: The communicator's option of that name.
        error_feedback: Likewise.
        warm_up: The first updates travel in float32, but for floats.
        overlap: Gradients are sent before all are there, so that means wait
            in wires; without, frames are decoded as they come.
        frame_bytes: The communicator's option of that name.
        frames_in_flight: Likewise.
    """
    form = form_of_sums(name, partial_sums)
    bytes_: float = elements * WIRE_BYTES[name] * overlap
    keeps = name in _WARM and error_feedback
    bytes_ += _FLOAT * elements * keeps
    bounds = piece_bounds(0, elements, len(plans))
    for plan, start, stop in zip(plans, bounds, bounds[1:], strict=False):
        steps = program(plan, 0).steps
        frames = Frames(start, stop, plan.blocks,
                        max(1, int(frame_bytes / WIRE_BYTES[name])))
        if keeps and form != 'wire':
            bytes_ += _FLOAT * sum(
                stop - start for start, stop in (
                    frames.owned(step.action) for step in steps
                    if step.action.kind is Opcode.ENCODE and not step.fresh))
        bytes_ += min(frames_in_flight, frames.chunks) * frames.frame * (
            _frame_bytes(steps, name, form)
            + plan.blocks * WIRE_BYTES[name] * (not overlap))
    if name in _WARM and warm_up and overlap:
        bytes_ = max(bytes_, elements * WIRE_BYTES['float32'])
    return int(bytes_) + _BUFFERS


def _frame_bytes(steps: Sequence[Step], name: str, form: str) -> float:
    """Bytes that a chunk needs for each element of a frame."""
    bytes_, held = 0.0, set[int]()
    for (kind, _, start, stop), summed, _ in steps:
        blocks = stop - start
        if kind is Opcode.RECEIVE_PARTIAL:
            bytes_ += blocks * _message_bytes(summed, name, form)
            held.update(range(start, stop))
        elif kind is Opcode.SEND_PARTIAL and summed and form == 'float16':
            bytes_ += blocks * SUM_BYTES[form]
        elif kind is not Opcode.ENCODE and blocks > 1:
            bytes_ += blocks * WIRE_BYTES[name]
    return bytes_ + _FLOAT * len(held) * (form != 'wire')


def _message_bytes(summed: bool, name: str, form: str) -> float:
    return (SUM_BYTES[form] if summed and form != 'wire'
            else WIRE_BYTES[name])
