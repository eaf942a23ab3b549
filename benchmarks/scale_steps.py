"""Seconds of a step by codec, algorithm and cut, for ``planning_scale``.

Ranks are GPUs with a host each, around a switch.  New codecs and algorithms
are new rows of :func:`codecs` and :data:`ALGORITHMS`.
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

from chainer_fp8pipe.mpi.placement import torus_shape
from chainer_fp8pipe.planning.allreduce.codec_costs import CodecCosts
from chainer_fp8pipe.planning.allreduce.demand import (
    aggregator_demand,
    compose_demand,
    direct_demand,
    ring_demand,
    torus2d_demand,
)
from chainer_fp8pipe.planning.allreduce.prediction import (
    estimate,
    total_seconds,
)
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.partition.cuts import (
    CutProblem,
    DoesNotFit,
    Wire,
    best_cut,
)
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.positions import order_of

from allreduce_model import one_after_the_other
from scale_models import calls_of

#: Bytes of frames on the wire and of buckets of float32, of which the best
#: are taken.
FRAMES = 24 << 10, 256 << 10, 2 << 20
BUCKETS = 4 << 20, 32 << 20, math.inf
FRAMES_IN_FLIGHT = 8
STAGES = 1, 2, 4, 8, 16
#: Micro-batches, as a multiple of the stages.
MICRO_BATCHES = 1, 2, 4, 8
#: Arrays of a parameter's size: value, gradient, Adam's two, and a buffer.
COPIES = 5


class Kind(NamedTuple):
    """A way to train: what the map compares."""

    codec: str
    algorithm: str
    stages: int


class Speeds(NamedTuple):
    """What ranks do per second.

    Attributes:
        operations: Of floating point, on the GPU.
        memory: Bytes of a GPU, read and written.
        pcie: Bytes in each direction.
        kernels: Elements by row of ``kernels.py``, of a core.
    """

    operations: float
    memory: float
    pcie: float
    kernels: dict[str, float]


def codecs(speeds, sums):
    """The costs of each codec, the most accurate first.

    Gradients are encoded and decoded on the GPU.  Rates that ``kernels.py``
    has not measured are bytes at the rate of a copy.

    Args:
        speeds: Of ranks.
        sums: ``'nccl'``: of fp8 by a core, after bytes came over PCIe, as
            this package makes them, of others by the GPU, whose memory the
            network reads, as NCCL; ``'host'``: all the one way; ``'gpu'``:
            all the other.
    """
    host, gpu = _on_host(speeds), _on_gpu(speeds)
    return {'host': host, 'gpu': gpu,
            'nccl': {**gpu, 'fp8': host['fp8']}}[sums]


def _on_gpu(speeds):
    memory = speeds.memory
    return {
        'float32': CodecCosts(4, 4, encode=memory / 8, decode=memory / 8,
                              add=memory / 12, add_partial=memory / 12),
        # Sums are float16, as NCCL's.
        'float16': CodecCosts(2, 2, encode=memory / 6, decode=memory / 6,
                              add=memory / 6, add_partial=memory / 6),
        'fp8': CodecCosts(1, 2, encode=memory / 17, decode=memory / 9,
                          add=memory / 9, add_partial=memory / 10,
                          add_own=memory / 9, pack=memory / 6,
                          mean=memory / 5)}


def _on_host(speeds):
    memory, kernels = speeds.memory, speeds.kernels
    copied = kernels['copy (NumPy)'] * 8        # bytes

    def crossing(rate, nbytes):
        return one_after_the_other(rate, speeds.pcie / nbytes)

    return {
        'float32': CodecCosts(
            4, 4, encode=crossing(memory / 8, 4),
            decode=crossing(memory / 8, 4),
            add=copied / 12, add_partial=copied / 12),
        'float16': CodecCosts(
            2, 4, encode=crossing(memory / 6, 2),
            decode=crossing(memory / 6, 2), add=copied / 10,
            add_partial=copied / 12, add_own=copied / 10, mean=copied / 6),
        'fp8': CodecCosts(
            1, 2, encode=crossing(memory / 17, 1),
            decode=crossing(memory / 9, 1), add=kernels['accumulate'],
            add_partial=copied / 10, add_own=kernels['accumulate'],
            pack=copied / 6, mean=kernels['encode'])}


def _two_level(ranks):
    inside, groups = sorted(torus_shape(ranks, 0))
    return (compose_demand(direct_demand(inside), direct_demand(groups),
                           True),)


#: What each algorithm needs of so many ranks; the package's default is first.
ALGORITHMS = {
    'direct': lambda ranks: (direct_demand(ranks),),
    'ring': lambda ranks: (ring_demand(ranks),),
    'torus2d': lambda ranks: torus2d_demand(*torus_shape(ranks, 0)),
    'two-level': _two_level,
}
#: Some of the ranks sum for the others, and compute nothing.
AGGREGATOR = 'aggregator'


class Setting(NamedTuple):
    """What all steps have in common.

    Attributes:
        speeds: Of ranks.
        memory: Bytes of a GPU.
        latency: Seconds of a message.
        message_cost: Seconds of a rank for a message.
        sums: Where they are made, see :func:`codecs`.
        overlap: Whether gradients travel beside the backward pass.
    """

    speeds: Speeds
    memory: float = 32e9
    latency: float = 1e-5
    message_cost: float = 1e-6
    sums: str = 'nccl'
    overlap: bool = False


class Steps:
    """Seconds of steps, which are kept once they are known."""

    def __init__(self, setting):
        self.setting = setting
        self.codecs = codecs(setting.speeds, setting.sums)
        self.exchange = functools.cache(self._exchange)
        self.switch = functools.cache(self._switch)
        self.pipeline = functools.cache(self._pipeline)

    def seconds(self, model, ranks, rate, kind):
        """Of a step in which each rank computes its samples; None: no room.

        Where some ranks only sum, seconds of the others until they have
        computed as many samples as all would in a step.

        Args:
            model: A :class:`ScaleModel`.
            ranks: How many.
            rate: Of a link, bytes per second.
            kind: Of training.
        """
        if kind.stages == 1:
            if not self.fits(model):
                return None
            if kind.algorithm == AGGREGATOR:
                return min(self._served(model, ranks, servers, rate,
                                        kind.codec)
                           for servers in _halves(ranks))
            return self._replicated(model, functools.partial(
                self.exchange, ranks, rate, kind.codec, kind.algorithm))
        found = self.pipeline(model, kind.stages, rate)
        if found is None:
            return None
        seconds, elements = found
        return seconds + self.exchange(ranks // kind.stages, rate, kind.codec,
                                       kind.algorithm, elements)

    def kinds(self, model, ranks):
        """All kinds of training, the simplest first."""
        return [Kind(codec, algorithm, stages)
                for codec in self.codecs
                for stages in STAGES
                if stages == 1 or (ranks % stages == 0
                                   and stages <= len(model.layers))
                for algorithm in (*ALGORITHMS,
                                  *([AGGREGATOR] if stages == 1 else []))
                if stages < ranks or algorithm == 'direct']

    def compute(self, model):
        """Seconds of a rank's forward and backward passes."""
        return (model.samples * model.operations
                / self.setting.speeds.operations)

    def with_switch(self, model, ranks, rate, codec):
        """Seconds where the switch itself sums; None: no room."""
        if not self.fits(model):
            return None
        return self._replicated(model, functools.partial(
            self.switch, ranks, rate, codec))

    # --- one way to train ----------------------------------------------------

    def fits(self, model):
        """Whether a rank has room for the whole model."""
        return self.pipeline(model, 1, math.inf) is not None

    def _replicated(self, model, exchange):
        """Seconds of a step with a given exchange of so many elements."""
        compute = self.compute(model)
        if not self.setting.overlap:
            return compute + exchange(model.elements)
        return min(beside_backward(model, compute, exchange, bucket)
                   for bucket in BUCKETS)

    def _served(self, model, ranks, servers, rate, codec):
        workers = ranks - servers
        costs = self.codecs[codec]
        seconds = self._replicated(model, lambda elements: self._fastest(
            (aggregator_demand(workers, servers),), self._cluster(rate),
            costs, elements))
        return seconds * ranks / workers

    def _switch(self, ranks, rate, codec, elements):
        """Seconds through a switch that sums at the rate of its ports."""
        costs = self.codecs[codec]
        free = CodecCosts(costs.wire_bytes, costs.partial_bytes,
                          encode=costs.encode, decode=costs.decode)
        cluster = Cluster((), rate, self.setting.latency,
                          in_switch=frozenset([ranks]))
        return self._fastest((aggregator_demand(ranks, 1),), cluster, free,
                             elements)

    def _exchange(self, ranks, rate, codec, algorithm, elements):
        """Seconds from gradients to means of gradients."""
        if ranks == 1:
            return 0.0
        return self._fastest(ALGORITHMS[algorithm](ranks),
                             self._cluster(rate), self.codecs[codec],
                             elements)

    def _cluster(self, rate):
        return Cluster((), rate, self.setting.latency,
                       message_cost=self.setting.message_cost)

    @staticmethod
    def _fastest(demands, cluster, costs, elements):
        """Seconds with the best size of frames."""
        return min(total_seconds(estimate(
            demands, cluster, costs, elements, frame_bytes=frame,
            frames_in_flight=FRAMES_IN_FLIGHT), costs, elements)
            for frame in FRAMES)

    def _pipeline(self, model, stages, rate):
        """Seconds of a pipeline, and the elements of its largest stage."""
        samples = stages * model.samples
        found = [self._cut(model, stages, stages * each, rate)
                 for each in MICRO_BATCHES[:None if stages > 1 else 1]
                 if samples % (stages * each) == 0]
        return min((one for one in found if one), default=None)

    def _cut(self, model, stages, micro_batches, rate):
        setting = self.setting
        intervals = Intervals(*_traced(
            model, stages * model.samples // micro_batches,
            setting.speeds.operations))
        try:
            cut = best_cut(intervals, CutProblem(
                stages, micro_batches, memory=setting.memory, copies=COPIES,
                recompute='auto' if stages > 1 else False,
                wire=Wire(setting.latency, rate)))
        except DoesNotFit:
            return None
        starts = 0, *cut.ends
        return cut.predicted.seconds, max(
            sum(layer.parameters for layer in model.layers[start:stop])
            for start, stop in zip(starts, cut.ends, strict=False))


def beside_backward(model, compute, exchange, bucket):
    """Seconds of a step whose gradients travel beside the backward pass.

    Layers are ready from the last to the first, their gradients fill buckets,
    and one bucket is exchanged at a time.

    Args:
        model: A :class:`ScaleModel`.
        compute: Seconds of both passes.
        exchange: Seconds by elements.
        bucket: Bytes of float32.
    """
    full = bucket / 4
    total = sum(layer.operations for layer in model.layers)
    ready, end, waiting = compute / 3, 0.0, 0.0
    for layer in reversed(model.layers):
        ready += compute * 2 / 3 * layer.operations / total
        waiting += layer.parameters
        buckets = math.floor(waiting / full)
        if buckets:
            end = max(end, ready) + buckets * exchange(round(full))
            waiting -= buckets * full
    return max(end, ready) + (exchange(round(waiting)) if waiting >= 1
                              else 0.0)


@functools.cache
def _traced(model, samples, rate):
    calls, parameters = calls_of(model, samples, rate)
    return calls, order_of(calls), parameters


def _halves(ranks):
    """Half of the ranks, a quarter of them, and so on."""
    return [ranks >> power for power in range(1, ranks.bit_length())
            if ranks >> power]
