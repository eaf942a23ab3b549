"""What compiled code asks for where it has nothing for a codec.

That is the case on a GPU, for float16 and for stochastic rounding.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy

from .bucket import Bucket
from .frames import Frames
from .rank_plan import RankPlan, Step
from .sums import Sums, make_sums


class Uncompiled:
    """Encodes, decodes and sums for a bucket; ``work.h`` names the methods.

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
        self._form = form
        self._workers = workers
        self._sums: dict[tuple[int, int], Sums] = {}

    def encode(self, start: int, stop: int) -> None:
        self._bucket.encode(slice(start, stop))

    def decode(self, start: int, stop: int) -> None:
        self._bucket.decode_part(slice(start, stop))

    def add(self, lane: int, chunk: int, position: int, message: memoryview
            ) -> None:
        step = self._step(lane, position)
        sums = self._of(lane, chunk)
        dtype = sums.dtype if step.summed else self._bucket.wire.dtype
        sums.add(self._parts(lane, chunk, step),
                 numpy.frombuffer(message, dtype), step.fresh, step.summed)

    def message(self, lane: int, chunk: int, position: int, out: memoryview
                ) -> None:
        sums = self._of(lane, chunk)
        sums.message(self._parts(lane, chunk, self._step(lane, position)),
                     numpy.frombuffer(out, sums.dtype))

    def encode_sums(self, lane: int, chunk: int, position: int, site: int
                    ) -> None:
        step = self._step(lane, position)
        _, frames = self._lanes[lane]
        self._of(lane, chunk).encode(
            self._parts(lane, chunk, step), frames.owned(step.action),
            step.action.peer, site_name(lane, site))

    def forget(self, lane: int, chunk: int) -> None:
        self._sums.pop((lane, chunk), None)

    def _step(self, lane: int, position: int) -> Step:
        program, _ = self._lanes[lane]
        return program.steps[position]

    def _parts(self, lane: int, chunk: int, step: Step) -> list[slice]:
        _, frames = self._lanes[lane]
        return [frames.part(block, chunk)
                for block in range(step.action.start, step.action.stop)]

    def _of(self, lane: int, chunk: int) -> Sums:
        sums = self._sums.get((lane, chunk))
        if sums is None:
            program, frames = self._lanes[lane]
            sums = self._sums[lane, chunk] = make_sums(
                self._form, self._bucket, [
                    frames.part(block, chunk) for block in program.held],
                program.contributes, self._workers)
        return sums


def site_name(lane: int, site: int) -> str:
    """Of a place of an algorithm where means are encoded."""
    return f'sum {lane} {site}'
