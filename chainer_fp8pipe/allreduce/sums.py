"""How partial sums are held on a rank, and how they travel to the next."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from ..codecs import Codec, Tensors
from ..codecs.staging import download, output, upload
from .bucket import Bucket

#: Names of the forms that a partial sum may travel in.
FORMS = ('wire', 'float16', 'float32')


class WireSums:
    """Sums in the wire's own format, made where the contribution lies.

    Contributions must be divided by the number of workers before they are
    encoded; a sum is then a mean, and cannot overflow.

    Args:
        codec: Adds.
        wire: The whole wire.
        contributes: There is a contribution of this rank in it.
    """

    def __init__(self, codec: Codec, wire: numpy.ndarray,
                 contributes: bool) -> None:
        self._codec = codec
        self._wire = wire
        self._contributes = contributes
        self.dtype = codec.wire_dtype

    def add(self, parts: Sequence[slice], message: numpy.ndarray,
            fresh: bool, summed: bool) -> None:
        """Adds a message to these parts of the vector.

        Args:
            parts: Where its elements belong, in order.
            message: Of :attr:`dtype` if it is a partial sum, else of the
                wire's.
            fresh: Nothing was added to these parts before.
            summed: It is a partial sum.
        """
        place = 0
        for part in parts:
            end = place + part.stop - part.start
            if fresh and not self._contributes:
                self._wire[part] = message[place:end]
            else:
                self._codec.add(message[place:end], self._wire[part])
            place = end

    def message(self, parts: Sequence[slice], out: numpy.ndarray) -> None:
        """Writes the sums of these parts, of :attr:`dtype`, into ``out``."""
        numpy.concatenate([self._wire[part] for part in parts], out=out)

    def encode(self, parts: Sequence[slice], owned: tuple[int, int],
               count: int, site: str) -> None:
        """Makes the sums of these parts their mean, in the wire's format.

        Args:
            parts: Of the vector.
            owned: The range of the vector of which this rank encodes all
                at this site, part by part.
            count: How many contributions were summed.
            site: Of the codec's residuals.
        """


class WideSums:
    """Sums in float32, which travel as they are or in float16.

    In float16 they are divided by a power of two first, so that a sum of
    saturated values cannot overflow.  11 significant bits lose little beside
    the 3 of fp8.

    Args:
        codec: Of the wire.
        tensors: The fused vector.
        wire: The whole wire.
        parts: What of it this rank adds something to.
        contributes: There is a contribution of this rank in it.
        dtype: Of travelling sums: float16 or float32.
        workers: How many contributions there are.
    """

    def __init__(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                 parts: Sequence[slice], contributes: bool,
                 dtype: numpy.dtype, workers: int) -> None:
        self._codec = codec
        self._tensors = tensors
        self._wire = wire
        self._contributes = contributes
        self.dtype = dtype
        self._shrink = shrink(dtype, workers)
        self._places: dict[int, int] = {}
        size = 0
        for part in parts:
            self._places[part.start] = size
            size += part.stop - part.start
        self._total = codec.zeros(tensors, size)

    def add(self, parts: Sequence[slice], message: numpy.ndarray,
            fresh: bool, summed: bool) -> None:
        """As :meth:`WireSums.add`."""
        total = self._of(parts)
        if fresh:
            total[...] = 0          # of an earlier level, maybe
            if self._contributes:
                place = 0
                for part in parts:
                    end = place + part.stop - part.start
                    self._codec.accumulate(self._wire[part],
                                           total[place:end])
                    place = end
        if not summed:
            self._codec.accumulate(message, total)
            return
        values = upload(self._tensors.xp, message)
        if self._shrink != 1.0:
            values = values.astype(numpy.float32)
            values *= numpy.float32(1 / self._shrink)
        total += values

    def message(self, parts: Sequence[slice], out: numpy.ndarray) -> None:
        """As :meth:`WireSums.message`."""
        xp = self._tensors.xp
        written = output(xp, out)
        if self._shrink == 1.0:
            written[...] = self._of(parts)
        else:
            xp.multiply(self._of(parts), numpy.float32(self._shrink),
                        out=written, casting='same_kind')
        download(written, out)

    def encode(self, parts: Sequence[slice], owned: tuple[int, int],
               count: int, site: str) -> None:
        """As :meth:`WireSums.encode`."""
        for part in parts:
            if part.start < part.stop:
                self._codec.encode_mean(
                    self._tensors, self._of([part]), count, self._wire[part],
                    part.start, site, owned)

    def _of(self, parts: Sequence[slice]) -> Any:
        # Parts of one action are held side by side.
        size = sum(part.stop - part.start for part in parts)
        place = self._places[parts[0].start]
        return self._total[place:place + size]


Sums = WireSums | WideSums


def shrink(dtype: numpy.dtype, workers: int) -> float:
    """The power of two that sums carry when they travel in ``dtype``."""
    if dtype != numpy.float16:
        return 1.0
    return 0.5 ** (workers - 1).bit_length()


def make_sums(form: str, bucket: Bucket, parts: Sequence[slice],
              contributes: bool, workers: int) -> Sums:
    """Sums of these parts, which travel in this form.

    Args:
        form: One of :data:`FORMS`.
        bucket: Of which.
        parts: As for :class:`WideSums`.
        contributes: As there.
        workers: As there.
    """
    if in_wire_format(form, bucket.codec):
        return WireSums(bucket.codec, bucket.wire, contributes)
    return WideSums(bucket.codec, bucket.tensors, bucket.wire, parts,
                    contributes,
                    numpy.dtype(form), workers)


def in_wire_format(form: str, codec: Codec) -> bool:
    """Whether sums are made in the wire's own format."""
    return form == 'wire' or codec.wire_dtype == numpy.float32
