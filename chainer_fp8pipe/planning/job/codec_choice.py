"""What a communicator's options make of a codec's figures."""
from __future__ import annotations

from ..allreduce.codec_costs import CodecCosts
from .job_profile import CodecFigures

#: Elements that take no time by themselves: the update of a codec's figures
#: is of so many.
FEW = 64

#: Bytes of an element on the wire, by the communicator's name.
WIRE_BYTES = {'fp8': 1, 'float16': 2, 'float32': 4}
_SUM_BYTES = {'float16': 2, 'float32': 4}


def form_of_sums(name: str, partial_sums: str = 'auto') -> str:
    """In which form a communicator's sums travel.

    Args:
        name: ``'fp8'``, ``'float16'`` or ``'float32'``.
        partial_sums: The communicator's option of that name.
    """
    if partial_sums != 'auto':
        return partial_sums
    return 'float16' if name == 'fp8' else 'float32'


def codec_costs(figures: CodecFigures, name: str, algorithm: str,
                partial_sums: str = 'auto') -> CodecCosts:
    """A codec for the simulation of a communicator's exchanges.

    Gradients are encoded and decoded frame by frame, as they are without
    ``overlap`` on a CPU, except by ``'mpi_op'``.

    Args:
        figures: Of the communicator.
        name: ``'fp8'``, ``'float16'`` or ``'float32'``.
        algorithm: The communicator's option of that name.
        partial_sums: Likewise; ``'mpi_op'`` always sums in the wire.
    """
    rates = {operation: figure.value
             for operation, figure in figures.rates.items()}
    wire, form = WIRE_BYTES[name], form_of_sums(name, partial_sums)
    beside = {'encode': rates['encode'], 'decode': rates['decode'],
              'by_frame': algorithm != 'mpi_op'}
    if 'wire' in (form,) or name == 'float32' or algorithm == 'mpi_op':
        return CodecCosts(wire, wire, add=rates['add'],
                          add_partial=rates['add'], **beside)
    return CodecCosts(
        wire, _SUM_BYTES[form], add=rates['accumulate'],
        add_partial=rates['add_partial'], add_own=rates['accumulate'],
        pack=rates['pack'], mean=rates['mean'], **beside)
