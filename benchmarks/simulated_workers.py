"""Many workers' gradients averaged in one process, through real codecs.

``direct`` all-reduce as ranks do it: every worker encodes all gradients; each
owns one piece of the fused vector, sums it in float32, in order of ranks, and
encodes its mean; everyone decodes the same bytes.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from chainer_fp8pipe.codecs import Codec, Tensors

import numpy


class SimulatedWorkers:
    """The codecs of some workers and what these remember.

    Args:
        make_codec: Makes that of a rank; None: means in float32.
        count: Of the workers.
    """

    def __init__(self, make_codec: Callable[[int], Codec] | None,
                 count: int) -> None:
        self.codecs = [make_codec(rank) for rank in range(count)
                       ] if make_codec else []

    def average(self, names: Sequence[str],
                gradients: Sequence[Sequence[numpy.ndarray]],
                parameters: Sequence[numpy.ndarray], *, warm: bool
                ) -> list[numpy.ndarray]:
        """The mean of each parameter's gradients, as all ranks get it.

        Args:
            names: Of the parameters.
            gradients: By worker and parameter, float32 of any shape.
            parameters: Float32 of the same shapes.
            warm: Whether the warm-up in float32 is over.
        """
        if not self.codecs or not warm:
            return [numpy.mean(one, axis=0, dtype=numpy.float32)
                    for one in zip(*gradients, strict=True)]
        weights = [array.reshape(-1) for array in parameters]
        workers = [
            Tensors(names, [array.reshape(-1) for array in own], weights,
                    grain=codec.grain)
            for own, codec in zip(gradients, self.codecs, strict=True)]
        self._settle(workers)
        wire = self._sum_and_encode(workers)
        self.codecs[0].decode(workers[0], wire)
        return [flat.reshape(array.shape) for flat, array in zip(
            workers[0].gradients, parameters, strict=True)]

    def _settle(self, workers: list[Tensors]) -> None:
        found = []
        for codec, tensors in zip(self.codecs, workers, strict=True):
            codec.start(1.0)
            found.append(codec.propose(tensors))
        largest = None if found[0] is None else numpy.max(found, axis=0)
        for codec, tensors in zip(self.codecs, workers, strict=True):
            codec.settle(tensors, largest)

    def _sum_and_encode(self, workers: list[Tensors]) -> numpy.ndarray:
        count, size = len(workers), workers[0].size
        first = self.codecs[0]
        total = numpy.zeros(size * first.grain, numpy.float32)
        for codec, tensors in zip(self.codecs, workers, strict=True):
            wire = numpy.empty(size, codec.wire_dtype)
            codec.encode(tensors, wire)
            codec.accumulate(wire, total)
        means = numpy.empty(size, first.wire_dtype)
        bounds = [size * number // count for number in range(count + 1)]
        for number, codec in enumerate(self.codecs):
            start, stop = bounds[number:number + 2]
            if start < stop:
                codec.encode_mean(
                    workers[number],
                    total[start * codec.grain:stop * codec.grain], count,
                    means[start:stop], start, 'mean', (start, stop))
        return means
