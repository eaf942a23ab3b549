"""A range of the fused vector, on its way through an all-reduce."""
from __future__ import annotations

import numpy

from ..codecs import Codec, Tensors


class Job:
    """A range of the fused vector whose mean is wanted.

    Args:
        codec: Of the wire.
        tensors: The fused vector.
        wire: Of all of it; the mean replaces the contribution.
        start: First element of the range.
        stop: Last element plus one.
        prescale: Gradients are encoded frame by frame, before they are sent,
            with this factor; None: the wire holds the contribution already.
        decodes: Means are written into the gradients frame by frame, as they
            come.

    Attributes:
        decodes: See above.
        unfinished: Chunks that are not through.
    """

    def __init__(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                 start: int, stop: int, prescale: float | None = None,
                 decodes: bool = False) -> None:
        self.codec = codec
        self.tensors = tensors
        self.wire = wire
        self.start = start
        self.stop = stop
        self.decodes = decodes
        self.unfinished = 0
        self._prescale = prescale
        self._nonfinite: set[str] = set()
        self._undecoded: list[slice] = []

    @property
    def finished(self) -> bool:
        """The mean is there, and nothing of it is on its way."""
        return not self.unfinished

    @property
    def nonfinite(self) -> list[str]:
        """Names of tensors into which a NaN or an infinity was decoded."""
        return [name for name in self.tensors.names
                if name in self._nonfinite]

    @property
    def encodes(self) -> bool:
        """Gradients are encoded frame by frame."""
        return self._prescale is not None

    def encode(self, part: slice) -> None:
        """Writes a part of the gradients into the wire."""
        if self._prescale is not None and part.start < part.stop:
            self.codec.encode(self.tensors, self.wire[part], self._prescale,
                              part.start)

    def decode(self, part: slice) -> None:
        """Writes a part of the means into the gradients, now or later."""
        if part.start == part.stop:
            return
        if self.decodes:
            self._nonfinite.update(self.codec.decode(
                self.tensors, self.wire[part], part.start))
        else:
            self._undecoded.append(part)

    def begin_decoding(self, tensors: Tensors) -> None:
        """From now on, means are decoded as they come.

        Args:
            tensors: The same ones, whose gradients may be overwritten.
        """
        self.tensors, self.decodes = tensors, True
        while self._undecoded:
            self.decode(self._undecoded.pop())
