"""What compiled code must know to encode and decode by itself.

Tables have a row for each tensor; ``allreduce/job.h`` has the same columns.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy

from .tensors import Tensors

#: Numbers of codecs.
IN_PYTHON, FLOAT32, FP8, RELAY = range(4)

_OUT = 4                # column of `tensors`
_CLIPPED, _ENCODED, _BLAMED, _NONFINITE = range(4)      # of `findings`
_BAD_GRADIENT, _BAD_VALUE = 1, 2                        # in `_BLAMED`


@dataclasses.dataclass
class Compiled:
    """A codec's part in one job.

    Attributes:
        codec: Its number.
        rounding: Number of the rounding.
        epsilon: Of fp8.
        tensors: int64: where the tensor begins and ends in the fused vector,
            and addresses: of its gradient, its parameter, what its mean is
            decoded into, and its residual (0: none).
        scales: float32: the scale of encodings and its inverse, and the same
            for decoding and for means.
        findings: int64: elements clipped, elements encoded, what is to blame
            for a wire that is not finite, and more than 0 where what was
            decoded is not finite.
        kept: Arrays whose addresses are in the tables.
    """

    codec: int
    tensors: numpy.ndarray
    findings: numpy.ndarray
    scales: numpy.ndarray
    rounding: int = 0
    epsilon: float = 0.0
    kept: list[Any] = dataclasses.field(default_factory=list)

    def decode_into(self, gradients: Sequence[numpy.ndarray]) -> bool:
        """Has means go there; whether that is possible."""
        if not all(is_plain(gradient) and gradient.flags.writeable
                   for gradient in gradients):
            return False
        self.tensors[:, _OUT] = list(map(address, gradients))
        self.kept += gradients
        return True

    def nonfinite(self, names: Sequence[str]) -> list[str]:
        """Of these, those whose decoded mean is not finite."""
        return _where(names, self.findings[:, _NONFINITE])

    def bad_gradients(self, names: Sequence[str]) -> list[str]:
        """Of these, those whose gradient made a wire not finite."""
        return _where(names, self.findings[:, _BLAMED] & _BAD_GRADIENT)

    def bad_values(self, names: Sequence[str]) -> list[str]:
        """Of these, those whose value did."""
        return _where(names, self.findings[:, _BLAMED] & _BAD_VALUE)

    def counts(self) -> list[list[int]]:
        """By tensor, elements clipped and elements encoded."""
        return self.findings[:, (_CLIPPED, _ENCODED)].tolist()


def can_be_read(tensors: Tensors) -> bool:
    """Whether compiled code can read these gradients and parameters."""
    return all(is_plain(gradient) and is_plain(parameter)
               and gradient.size == parameter.size
               for gradient, parameter in zip(
                   tensors.gradients, tensors.parameters, strict=True))


def compile_tensors(codec: int, tensors: Tensors,
                    residuals: Sequence[numpy.ndarray | None] = (),
                    **of_codec: Any) -> Compiled:
    """What is compiled of a codec, for tensors that can be read.

    Where means are decoded into has still to be said.

    Args:
        codec: Its number.
        tensors: The fused vector.
        residuals: Of the gradients; none of all, or of some, if they have
            none.
        of_codec: Other attributes.
    """
    made = compile_sizes(codec, tensors, **of_codec)
    made.tensors[:, 2] = list(map(address, tensors.gradients))
    made.tensors[:, 3] = list(map(address, tensors.parameters))
    for index, residual in enumerate(residuals):
        if residual is not None:
            made.tensors[index, 5] = address(residual)
    made.kept += [*tensors.gradients, *tensors.parameters, *residuals]
    return made


def compile_sizes(codec: int, tensors: Tensors, **of_codec: Any) -> Compiled:
    """As above, for a codec that neither encodes nor decodes gradients."""
    count = len(tensors.names)
    table = numpy.zeros((count, 6), numpy.int64)
    table[:, 0], table[:, 1] = tensors.offsets[:-1], tensors.offsets[1:]
    of_codec.setdefault('scales', numpy.zeros((count, 4), numpy.float32))
    return Compiled(codec, table, numpy.zeros((count, 4), numpy.int64),
                    **of_codec)


def is_plain(array: Any) -> bool:
    """Whether compiled code can read this array."""
    return (isinstance(array, numpy.ndarray) and array.dtype == numpy.float32
            and array.flags.c_contiguous)


def address(array: numpy.ndarray) -> int:
    """Of the first element."""
    return array.__array_interface__['data'][0]


def _where(names: Sequence[str], found: numpy.ndarray) -> list[str]:
    return [names[index] for index in numpy.flatnonzero(found).tolist()]
