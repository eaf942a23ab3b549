"""What compiled code asks for where it has nothing for a codec.

That is the case for stochastic rounding.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from ..codecs.staging import download, output, upload
from .bucket import Bucket
from .frames import Frames
from .rank_plan import RankPlan, Step
from .sums import in_wire_format, shrink


class Uncompiled:
    """Encodes, decodes and sums for a bucket; ``work.h`` names the methods.

    Sums are made in the wire, or beside it in float32.  ``position`` is that
    of a step in this rank's part of a plan.

    Args:
        bucket: The bucket.
        lanes: Of each plan, this rank's part and how the bucket is cut.
        form: What partial sums travel in, one of :data:`.sums.FORMS`.
        workers: How many ranks contribute.
    """

    def __init__(self, bucket: Bucket,
                 lanes: Sequence[tuple[RankPlan, Frames]], form: str,
                 workers: int) -> None:
        # Its handle has this object; gradients should not wait for the
        # garbage collector.
        self._bucket = weakref.proxy(bucket)
        self._lanes = lanes
        self._in_wire = in_wire_format(form, bucket.codec)
        self._dtype = (bucket.codec.wire_dtype if self._in_wire
                       else numpy.dtype(form))      # of sums that travel
        self._shrink = shrink(self._dtype, workers)
        # Float32 sums by lane and chunk, and then by block.
        self._totals: dict[tuple[int, int], dict[int, Any]] = {}

    def encode(self, start: int, stop: int) -> None:
        self._bucket.encode(slice(start, stop))

    def decode(self, start: int, stop: int) -> None:
        self._bucket.decode_part(slice(start, stop))

    def add(self, lane: int, chunk: int, position: int, message: memoryview
            ) -> None:
        bucket, step = self._bucket, self._step(lane, position)
        contributes = self._lanes[lane][0].contributes
        totals = self._totals.setdefault((lane, chunk), {})
        values = numpy.frombuffer(
            message, self._dtype if step.summed else bucket.wire.dtype)
        grain = bucket.codec.grain if step.summed else 1
        for block, part, place in self._parts(lane, chunk, step, grain):
            own, came = bucket.wire[part], values[place]
            if self._in_wire:
                if step.fresh and not contributes:
                    own[...] = came
                else:
                    bucket.codec.add(came, own)
                continue
            if step.fresh:
                totals[block] = bucket.tensors.xp.zeros(
                    own.size * bucket.codec.grain, numpy.float32)
                if contributes:
                    bucket.codec.accumulate(own, totals[block])
            if step.summed:
                totals[block] += self._grown(came)
            else:
                bucket.codec.accumulate(came, totals[block])

    def message(self, lane: int, chunk: int, position: int, out: memoryview
                ) -> None:
        """Writes sums; those that lie in the wire are sent from there."""
        xp = self._bucket.tensors.xp
        values = numpy.frombuffer(out, self._dtype)
        for block, _, place in self._parts(
                lane, chunk, self._step(lane, position),
                self._bucket.codec.grain):
            target = values[place]
            written = output(xp, target)
            xp.multiply(self._totals[lane, chunk][block],
                        numpy.float32(self._shrink), out=written,
                        casting='same_kind')
            download(written, target)

    def encode_sums(self, lane: int, chunk: int, position: int, site: int
                    ) -> None:
        if self._in_wire:
            return
        bucket, step = self._bucket, self._step(lane, position)
        owned = self._lanes[lane][1].owned(step.action)
        for block, part, _ in self._parts(lane, chunk, step):
            bucket.codec.encode_mean(
                bucket.tensors, self._totals[lane, chunk][block],
                step.action.peer, bucket.wire[part], part.start,
                site_name(lane, site), owned)

    def forget(self, lane: int, chunk: int) -> None:
        self._totals.pop((lane, chunk), None)

    def _step(self, lane: int, position: int) -> Step:
        return self._lanes[lane][0].steps[position]

    def _parts(self, lane: int, chunk: int, step: Step, grain: int = 1
               ) -> Iterator[tuple[int, slice, slice]]:
        """Blocks, and where their parts lie in the wire and in a message.

        A message has ``grain`` numbers for each of the wire's entries.
        """
        place = 0
        for block in range(step.action.start, step.action.stop):
            part = self._lanes[lane][1].part(block, chunk)
            if part.start < part.stop:
                end = place + (part.stop - part.start) * grain
                yield block, part, slice(place, end)
                place = end

    def _grown(self, values: numpy.ndarray) -> Any:
        """Sums in float32 as they were before they travelled."""
        grown = upload(self._bucket.tensors.xp, values)
        return grown if self._shrink == 1 else grown.astype(
            numpy.float32) * numpy.float32(1 / self._shrink)


def site_name(lane: int, site: int) -> str:
    """Names a place of an algorithm where means are encoded."""
    return f'sum {lane} {site}'
