"""The GPU's kernels of records as data: the text of headers.

They are data, so that tests can compile and run them where there is no GPU.
"""
from __future__ import annotations

from importlib import resources

from ..fp8 import kernels

#: No contraction of a * b + c, so that CPU and GPU give the same bits.
OPTIONS = kernels.OPTIONS

#: Of a block; a multiple of the 32 of a warp.
THREADS = 256

#: By number, as the header has them.
_FORMATS = ('INT4', 'E2M1', 'INT5')


def source() -> str:
    """All kernels, after the headers that they share with the CPU's loops."""
    folder = resources.files(__package__)
    return kernels.preamble() + ''.join(
        folder.joinpath(f'{name}.h').read_text(encoding='utf-8')
        for name in ('record_elements', 'record_kernels'))


def name(operation: str, number: int) -> str:
    """Of the kernel of an operation on a format.

    Args:
        operation: ``'encode_alone'``, ``'encode_feedback'``, ``'decode'`` or
            ``'accumulate'``.
        number: Of the format.
    """
    return f'{operation}_{_FORMATS[number]}'


def blocks(elements: int) -> int:
    """How many blocks do so many elements: each thread has four."""
    return -(-elements // (4 * THREADS))
