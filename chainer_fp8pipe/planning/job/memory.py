"""Bytes that each rank of a way to run a job needs."""
# A promise: no rank takes more than the user's limit.  So what is not known
# exactly is taken to be what it is at most.
from __future__ import annotations

import math

from ..partition.cuts import CutProblem, rank_bytes
from ..partition.partition_plan import PartitionPlan, ends_of
from .job_plan import Configuration
from .step import WIRE_BYTES, StepModel

#: What MPI and the interpreter take for megabytes of gradients.  With MPICH
#: 5.0, 2 and 4 ranks, 0.5 to 32 M elements and all codecs: 2.3 to 2.8 MB.
_BUFFERS = 2_800_000
#: Codecs with error feedback, whose first updates travel in float32.
_WITH_FEEDBACK = 'fp8', 'int4', 'int5'
_FLOAT = 4              # bytes of what is left out, and of sums being made
#: Bytes and number of frames on their way, unless options say otherwise.
FRAME_BYTES, FRAMES_IN_FLIGHT = 3 << 14, 3


def rank_memory(model: StepModel, way: Configuration) -> tuple[float, ...]:
    """Bytes of each stage's ranks, beyond the interpreter's."""
    profile = model.profile
    samples = model.batch / way.replicas / way.micro_batches
    intervals = model.costs.intervals(samples)
    copies = 2.0 + profile.model.optimizer_arrays
    if way.cut is None:
        last = intervals.count
        # The first updates wait for no forward pass, and take as much as any.
        worst = max(intervals.kept[0, last] + intervals.plain,
                    intervals.updating(intervals.largest[0, last],
                                       intervals.largest_in_heap[0, last]))
        found = (profile.overhead + float(
            intervals.parameters[0, last] * copies + worst),)
        return (found[0] + exchange_bytes(way, profile.model.elements),)
    return _of_pipeline(model, way, way.cut, copies)


def _of_pipeline(model: StepModel, way: Configuration, cut: PartitionPlan,
                 copies: float) -> tuple[float, ...]:
    intervals = model.costs.intervals(
        model.batch / way.replicas / way.micro_batches)
    _, found = rank_bytes(intervals, CutProblem(
        cut.stages, cut.micro_batches, cut.schedule, cut.chunks, None, copies,
        'auto', overhead=model.profile.overhead),
        ends_of(cut.cuts, intervals.starts), cut.recompute)
    return tuple(bytes_ + exchange_bytes(way, elements) for bytes_, elements
                 in zip(found, model.elements_of_stages(cut), strict=True))


def exchange_bytes(way: Configuration, elements: float) -> float:
    """Bytes that a communicator keeps beside a model and its gradients.

    With error feedback, what encodings have left out, of all gradients and
    of the means that the rank encodes; with overlap, wires, which are kept
    from one update to the next; frames on their way, and their sums.

    Args:
        way: Names codec, overlap and options.
        elements: Of the gradients.  They are float32; of others there are
            copies besides.
    """
    if way.replicas == 1:
        return 0.0
    if way.codec == 'naive':        # a buffer for all gradients, and one more
        return 2 * _FLOAT * elements + _BUFFERS
    wire, feedback = WIRE_BYTES[way.codec], way.codec in _WITH_FEEDBACK
    found = 0.0
    if feedback and way.options.get('error_feedback', True):
        found += _FLOAT * elements * (1 + 1 / way.replicas)
    if way.overlap:
        warms = feedback and way.options.get('warmup', 1)
        found = max(found + wire * elements, _FLOAT * elements * warms)
    frame = min(way.options.get('frame_bytes', FRAME_BYTES) or math.inf,
                elements * wire) / wire
    # Of each rank's piece: as it comes and as it goes; and sums, of the
    # rank's own piece, or of all pieces on their way round.
    sums = 2.0 * _FLOAT * (1 if way.algorithm == 'direct' else way.replicas)
    return found + _BUFFERS + FRAMES_IN_FLIGHT * frame * (
        2 * wire * way.replicas + sums)
