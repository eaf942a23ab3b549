"""What a communicator's options make of a codec's figures."""
from __future__ import annotations

from typing import Any

from ..allreduce.codec_costs import CodecCosts
from .job_profile import CodecFigures

#: Elements that take no time by themselves: an update of a codec's figures
#: has so many.
FEW = 64
#: What communicators do without being told otherwise.
FRAME_BYTES, FRAMES_IN_FLIGHT, BUCKET_BYTES = 3 << 14, 3, 1 << 22

#: Bytes of an element on the wire, by the communicator's name.
WIRE_BYTES = {'fp8': 1, 'int4': 17 / 32, 'int5': 21 / 32, 'float16': 2,
              'float32': 4}
#: Bytes of an element of sums that travel, by their form.
SUM_BYTES = {'float16': 2, 'float32': 4}


def form_of_sums(name: str, partial_sums: str = 'auto') -> str:
    """In which form a communicator's sums are made and travel.

    Args:
        name: One of :data:`WIRE_BYTES`.
        partial_sums: The communicator's option of that name.

    Returns:
        ``'wire'`` if they are made in the wire, which float32 needs not be
        told; else what they travel in, one of :data:`SUM_BYTES`.
    """
    if name == 'float32':
        return 'wire'
    if partial_sums != 'auto':
        return partial_sums
    return 'float16' if name == 'fp8' else 'float32'


def codec_costs(figures: CodecFigures, name: str, algorithm: str,
                partial_sums: str = 'auto') -> CodecCosts:
    """A codec for the simulation of a communicator's exchanges.

    Gradients are encoded and decoded frame by frame, as on a CPU without
    ``overlap``, but not where MPI itself sums (``'mpi_op'``).

    Args:
        figures: Of the communicator.
        name: One of :data:`WIRE_BYTES`.
        algorithm: The communicator's option of that name.
        partial_sums: Likewise; ``'mpi_op'`` always sums in the wire.
    """
    rates = {operation: figure.value
             for operation, figure in figures.rates.items()}
    wire = WIRE_BYTES[name]
    form = ('wire' if algorithm == 'mpi_op'
            else form_of_sums(name, partial_sums))
    beside: dict[str, Any] = {
        'encode': rates['encode'], 'decode': rates['decode'],
        'by_frame': algorithm != 'mpi_op'}
    if form == 'wire':
        return CodecCosts(wire, wire, add=rates['add'],
                          add_partial=rates['add'], **beside)
    return CodecCosts(
        wire, SUM_BYTES[form], add=rates['accumulate'],
        add_partial=rates['add_partial'], add_own=rates['accumulate'],
        pack=rates['pack'], mean=rates['mean'], **beside)


def seconds_beside(figures: CodecFigures, tensors: int, buckets: int = 1,
                   known: float = 0.0) -> float:
    """Seconds of an update beside its exchange, by Python and agreement.

    Args:
        figures: Of the communicator.
        tensors: Whose gradients are exchanged.
        buckets: Into which they are divided.
        known: What the simulation of an exchange of :data:`FEW` elements
            takes: so much of an update is in every simulated exchange.
    """
    return (max(figures.update.value - known, 0.0)
            + max(tensors - 1, 0) * figures.tensor.value
            + max(buckets - 1, 0) * figures.bucket.value)
