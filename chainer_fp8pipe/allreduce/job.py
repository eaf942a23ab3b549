"""A range of the fused vector, on its way through an all-reduce."""
from __future__ import annotations

from typing import Any

import numpy

from ..codecs import Codec, Tensors
from ..codecs.compiled import Compiled


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
        compiled: What compiled code knows of the codec; None: it asks
            :meth:`encode` and :meth:`decode`.
        handle: What compiled code knows of the job; the executor's.
        finished: The mean is there, and nothing of it is on its way.
    """

    def __init__(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                 start: int, stop: int, prescale: float | None = None,
                 decodes: bool = False) -> None:
        self.codec = codec
        self.tensors = tensors
        self.wire = wire
        self.start = start
        self.stop = stop
        self.prescale = prescale
        self.decodes = decodes
        self.compiled: Compiled | None = None
        self.handle: Any = None
        self.finished = False
        self._nonfinite: set[str] = set()

    @property
    def nonfinite(self) -> list[str]:
        """Names of tensors into which a NaN or an infinity was decoded."""
        if self.compiled:
            return self.compiled.nonfinite(self.tensors.names)
        return [name for name in self.tensors.names
                if name in self._nonfinite]

    @property
    def encodes(self) -> bool:
        """Gradients are encoded frame by frame."""
        return self.prescale is not None

    def decoded(self) -> list[tuple[int, int]]:
        """Ranges of the fused vector whose means are new in the gradients.

        Those since the last call; not while an executor is at work.
        """
        pairs = numpy.frombuffer(self.handle.decoded(), numpy.int64)
        return [(start, stop) for start, stop in pairs.reshape(-1, 2).tolist()]

    def encode(self, part: slice) -> None:
        """Writes a part of the gradients into the wire."""
        assert self.prescale is not None
        self.codec.encode(self.tensors, self.wire[part], self.prescale,
                          part.start)

    def decode(self, part: slice) -> None:
        """Writes a part of the means into the gradients."""
        self._nonfinite.update(self.codec.decode(
            self.tensors, self.wire[part], part.start))

    def conclude(self) -> None:
        """It is finished."""
        if self.compiled:
            self.codec.conclude(self.compiled, self.tensors)
        self.finished = True        # other threads may go on from here
