"""Many workers in one process: means through real codecs.

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
        least: Dimensions of the parameters that are coded, at least; means
            of the others are in float32.
    """

    def __init__(self, make_codec: Callable[[int], Codec] | None,
                 count: int, least: int = 0) -> None:
        self.states = [make_codec(rank).init() for rank in range(count)
                       ] if make_codec else []
        self._least = least

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
        means = [numpy.mean(one, axis=0, dtype=numpy.float32)
                 for one in zip(*gradients, strict=True)]
        if not self.states or not warm:
            return means
        coded = [index for index, array in enumerate(parameters)
                 if array.ndim >= self._least]
        workers = [
            Tensors([names[index] for index in coded],
                    [own[index].reshape(-1) for index in coded],
                    [parameters[index].reshape(-1) for index in coded],
                    grain=state.codec.grain)
            for own, state in zip(gradients, self.states, strict=True)]
        self._settle(workers)
        wire = self._sum_and_encode(workers)
        for tensors in workers:     # all learn from the mean
            tensors.decode_into([numpy.empty(size, numpy.float32)
                                 for size in tensors.sizes])
            tensors.decode(wire)
        for index, flat in zip(coded, workers[0].gradients, strict=True):
            means[index] = flat.reshape(parameters[index].shape)
        return means

    def _settle(self, workers: list[Tensors]) -> None:
        found = []
        for state, tensors in zip(self.states, workers, strict=True):
            state.codec.begin(state, 1.0)
            found.append(state.codec.propose(state, tensors))
        largest = None if found[0] is None else numpy.max(found, axis=0)
        for state, tensors in zip(self.states, workers, strict=True):
            state.codec.step(state, tensors, largest)

    def _sum_and_encode(self, workers: list[Tensors]) -> numpy.ndarray:
        count, codec = len(workers), self.states[0].codec
        size = workers[0].size
        total = numpy.zeros(size * codec.grain, numpy.float32)
        for tensors in workers:
            wire = numpy.empty(size, codec.wire_dtype)
            tensors.encode(wire)
            tensors.accumulate(wire, total)
        means = numpy.empty(size, codec.wire_dtype)
        bounds = [size * number // count for number in range(count + 1)]
        for number, tensors in enumerate(workers):
            start, stop = bounds[number:number + 2]
            if start < stop:
                tensors.mean(
                    total[start * codec.grain:stop * codec.grain], count,
                    means[start:stop], start,
                    tensors.means([('mean', (start, stop))])[0])
        return means
