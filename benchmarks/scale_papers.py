"""The papers' clusters: what they published beside what the model predicts.

Published are numbers that the texts give, or the abstracts where it says so.
What a paper does not say of its cluster is the same for all: GPUs compute at
:data:`USED` of their peak, a message takes 5 us, a core sums as in the table
of ``kernels.py``.
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

from chainer_fp8pipe.allreduce.plan import aggregator
from chainer_fp8pipe.pipeline.schedules import make_schedule
from chainer_fp8pipe.planning.allreduce.codec_costs import CodecCosts
from chainer_fp8pipe.planning.allreduce.demand import (
    direct_demand,
    ring_demand,
    torus2d_demand,
)
from chainer_fp8pipe.planning.allreduce.prediction import (
    estimate,
    total_seconds,
)
from chainer_fp8pipe.planning.allreduce.simulation import simulate
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.partition.cuts import (
    CutProblem,
    DoesNotFit,
    Wire,
    best_cut,
)
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.positions import order_of
from chainer_fp8pipe.planning.schedules.simulator import Costs, Link
from chainer_fp8pipe.planning.schedules.simulator import (
    simulate as simulate_pipeline,
)

from scale_models import MODELS, Layer, ScaleModel, calls_of
from scale_steps import COPIES, beside_backward

USED = 0.4
LATENCY = 5e-6
FRAMING = {'frame_bytes': 1 << 18, 'frames_in_flight': 8}
#: Images of ImageNet's training set.
IMAGES = 1_281_167
_BY_NAME = {model.name.partition('(')[2][:-1]: model for model in MODELS}


class Row(NamedTuple):
    """A published number and ours.

    ``published`` is None where the text has no number.
    """

    paper: str
    what: str
    published: float | None
    predicted: float
    why: str

    @property
    def ratio(self):
        """Predicted over published."""
        return self.published and self.predicted / self.published


class Nodes(NamedTuple):
    """A cluster of nodes with several GPUs each.

    Attributes:
        count: Nodes.
        gpus: Of each.
        port: Bytes per second of a node, in each direction.
        inside: Bytes per second between two GPUs of a node.
    """

    count: int
    gpus: int
    port: float
    inside: float

    def exchange(self, codec, elements):
        """Seconds of two levels: direct inside nodes, a ring between them.

        The GPUs of a node exchange a part of the vector each, at the same
        time, through one port.
        """
        between = total_seconds(estimate(
            [ring_demand(self.count)],
            Cluster((), self.port / self.gpus, LATENCY), codec,
            elements / self.gpus, **FRAMING), codec, elements / self.gpus)
        if self.gpus == 1:
            return between
        return between + estimate(
            [direct_demand(self.gpus)],
            Cluster((), self.inside, LATENCY), codec, elements,
            **FRAMING).seconds


def papers(kernels):
    """All rows; ``kernels`` has elements per second of a core's operations."""
    return [*fp8(kernels), *chainermn(), *tpu(), *rannc(), *in_network(),
            *pipelines()]


# --- Oyama, Nomura, Sato, Matsuoka -------------------------------------------

_FP8 = 'Oyama et al.'
_KFC = Nodes(24, 8, 7e9, 5e9)       # its table 2; inside through the host
_KFC_MODELS = {'CaffeNet': _BY_NAME['CaffeNet'], 'GoogLeNet': ScaleModel(
    'GoogLeNet', (Layer(13.4e6 / 14, 3e9 / 14, 0, 0),) * 14, 32)}


def fp8(kernels):
    """TSUBAME-KFC/DL: 8 GPUs per node, 4X FDR InfiniBand."""
    wires = _sums_in_wire(kernels)
    whole = {name: _kfc_allreduce(16, codec)
             for name, codec in wires.items()}
    rate = _rate_of_mpi(wires)
    slow = {name: _kfc_allreduce(16, codec, rate)
            for name, codec in wires.items()}
    rows = [
        Row(_FP8, 'MPI_Allreduce of 256 M elements, 16 nodes (figure 3): '
            'float32 over fp8', 3.21, whole['float32'] / whole['fp8'],
            "At the 7 GB/s of table 2 a core's sums take a quarter of the "
            'time in float32, and more than half in fp8.'),
        Row(_FP8, 'the same: float16 over fp8', 1.56,
            whole['float16'] / whole['fp8'], 'Likewise.'),
        Row(_FP8, f'the same with the rate at which float32 over fp8 comes '
            f'out, {rate / 1e9:.1f} GB/s: float16 over fp8', 1.56,
            slow['float16'] / slow['fp8'],
            "One rate of MPI, fitted to one ratio, gives the other: MPI's "
            'messages through host memory were slower than the link.')]
    return rows + _steps_of_kfc(wires, rate)


def _sums_in_wire(kernels):
    """Codecs whose sums are in the wire's format, on one core."""
    copied = kernels['copy (NumPy)'] * 8
    return {name: CodecCosts(size, size, add=add, add_partial=add)
            for name, size, add in (
                ('float32', 4, copied / 12), ('float16', 2, copied / 6),
                ('fp8', 1, kernels['add']))}


def _kfc_allreduce(nodes, codec, rate=_KFC.port):
    """Seconds of MPI's ring of whole blocks, which does not overlap."""
    return estimate([ring_demand(nodes)], Cluster((), rate, LATENCY), codec,
                    256_000_000, frame_bytes=1 << 60,
                    frames_in_flight=1).seconds


def _rate_of_mpi(wires):
    """Bytes per second at which figure 3's float32 over fp8 comes out."""
    return bisected(lambda rate: 3.21 - (
        _kfc_allreduce(16, wires['float32'], rate)
        / _kfc_allreduce(16, wires['fp8'], rate)), 1e8, 7e9)


def _steps_of_kfc(wires, rate):
    """Figures 5 to 7, at the link's rate and at that of figure 3."""
    rows = []
    for port, said in ((_KFC.port, ''),
                       (rate, f' at {rate / 1e9:.1f} GB/s')):
        for name, batch, figure, published in (
                ('CaffeNet', 256, 5, 2.67), ('GoogLeNet', 32, 6, 2.26)):
            float32, fp8 = (
                sum(_kfc_step(wires[codec], port, name, 2, batch / 16))
                for codec in ('float32', 'fp8'))
            rows.append(Row(
                _FP8, f'{name} on 2 nodes, batch {batch} (figure {figure})'
                f'{said}: float32 over fp8', published, float32 / fp8,
                _STRONG[bool(said)]))
        for name, codec, times in (
                ('CaffeNet', 'float32', 114), ('CaffeNet', 'fp8', 168),
                ('GoogLeNet', 'float32', 173), ('GoogLeNet', 'fp8', 170)):
            compute, exchange = _kfc_step(wires[codec], port, name)
            rows.append(Row(
                _FP8, f'{name} on 192 GPUs (figure 7){said}, {codec}: times '
                'one GPU', times, 192 * compute / (compute + exchange),
                _WEAK[bool(said)]))
    return rows


def _kfc_step(codec, port, name, nodes=24, samples=None):
    """Seconds of both passes, and what the exchange adds to them."""
    model = _KFC_MODELS[name]
    model = model._replace(samples=samples or model.samples)
    compute = _compute(model, 8.74e12 / 2)
    return compute, beside_backward(model, compute, functools.partial(
        _KFC._replace(count=nodes, port=port).exchange, codec),
        4 << 20) - compute


_STRONG = (
    'Passes and exchange beside them; the text says that passes were 4 to '
    '11 % of a step on 16 nodes, so the exchange took longer than the link.',
    "Likewise, with the rate fitted to figure 3: the rest of their step (host "
    'and GPU, update, quantiles) is the same for both formats.')
_WEAK = (
    "The model's exchange hides behind the backward pass; theirs did not, "
    'with eight processes per node on the MPI of figure 3.',
    'What is left is what eight processes on one port and twelve cores do to '
    'each other, between GPU and host, and images that are read.')


# --- ChainerMN ---------------------------------------------------------------

def chainermn():
    """128 GPUs (Akiba et al. 2017), and 1,024 in 15 minutes."""
    resnet = _BY_NAME['ResNet-50']
    float32, float16 = CodecCosts(4, 4), CodecCosts(2, 2)
    compute = _compute(resnet, 6.6e12)
    exchange = Nodes(32, 4, 7e9, 1e10).exchange(float32, resnet.elements)
    passes = _compute(resnet, 10.6e12)
    step = passes + Nodes(128, 8, 14e9, 1e10).exchange(
        float16, resnet.elements)
    return [
        Row('ChainerMN, Akiba et al. 2017',
            'ResNet-50 on 128 GPUs: parallel efficiency (abstract)', 0.90,
            compute / (compute + exchange),
            'The abstract names neither GPUs nor network; 32 nodes with '
            'GTX TITAN X and FDR are assumed.  A framework that computes '
            'slower loses less to the exchange.'),
        Row('ChainerMN, Akiba et al. 2017',
            'ResNet-50, 90 epochs on 1,024 P100: minutes (abstract)', 15,
            90 * IMAGES / 32768 * step / 60,
            f'The exchange is {percent(1 - passes / step)} of the predicted '
            'step; their GPUs computed at less than 40 % of the peak.')]


def _compute(model, peak):
    """Seconds of a step's passes on a GPU of so many operations per second."""
    return model.samples * model.operations / (USED * peak)


# --- Ying et al. 2018 --------------------------------------------------------

_YING = 'Ying et al. 2018'
#: Bytes per second of a link and direction: Google's documentation gives
#: 340 TB/s of all-reduces for the 4 links of 1,024 chips.
_TPU_LINK = 340e12 / 1024 / 4


def tpu():
    """A pod of TPUs, wired as a torus."""
    resnet = _BY_NAME['ResNet-50']
    codec = CodecCosts(4, 4)

    def exchange(edge, demands):
        cluster = Cluster((), _TPU_LINK, 1e-6, torus=(edge, edge))
        return estimate(demands, cluster, codec, resnet.elements,
                        **FRAMING).seconds

    passes = _compute(resnet, 123e12)
    step = passes + exchange(32, torus2d_demand(32, 32))
    gains = {edge: exchange(edge, [ring_demand(edge ** 2)])
             / exchange(edge, torus2d_demand(edge, edge))
             for edge in (16, 32)}
    why = (f'The exchange is {percent(1 - passes / step)} of the predicted '
           'step, so the chips computed at half of the assumed share of '
           'their peak: 32 images per chip, groups for batch normalisation, '
           'and input are not in the model.')
    return [
        Row(_YING, 'ResNet-50 on 1,024 TPU v3: images per second (abstract)',
            1.05e6, 32768 / step, why),
        Row(_YING, 'the same: minutes of 90 epochs', 2.2,
            90 * IMAGES / 32768 * step / 60,
            'Likewise; at its own 1.05 M images per second the paper '
            'takes 1.8 minutes, the rest is evaluation.'),
        *(Row(_YING, f'{edge ** 2:,} chips: a ring over the torus (its "1D") '
              'over 2D, exchange alone', None, gain,
              'The text says that latency limits the ring and the torus '
              'keeps its throughput; the numbers are in a figure.')
          for edge, gain in gains.items())]


# --- Tanaka et al. 2021 ------------------------------------------------------

_RANNC = 'Tanaka et al. 2021'


def rannc():
    """V100 with 32 GB, eight to a node, 100 Gbit/s between nodes."""
    tall, large = _BY_NAME['BERT-Tall'], _BY_NAME['BERT-Large']
    fewest = next(stages for stages in (1, 2, 4, 8)
                  if _cut(tall, stages, 8 * stages))
    best = min((2, 4, 8), key=lambda stages: _hybrid(tall, stages))
    base = _cut(large, 2, 16).seconds
    return [
        Row(_RANNC, 'BERT-Tall (1.85 G parameters) in 32 GB: fewest parts',
            None, fewest,
            'The text says that a GPU of 16 GB has room for a few hundred '
            'million parameters in half precision; here value, gradient, two '
            'arrays of the optimizer and a buffer are float32, 37 GB.'),
        Row(_RANNC, 'the same on 480 GPUs: parts that are fastest', None,
            best, 'The text gives 8 as the usual limit of parts, without '
            'throughputs.'),
        *(Row(_RANNC, f'BERT-Large on 8 GPUs, {stages} parts (figure 7): '
              'throughput, 2 parts = 1', None,
              base / _cut(large, stages, 32).seconds,
              'The text says that GPUs idle with 8 parts, where Megatron-LM '
              'is faster; the numbers are in a figure.')
          for stages in (4, 8))]


class _Part(NamedTuple):
    seconds: float
    elements: float


def _cut(model, stages, micro_batches):
    """The fastest pipeline on one node; None: no room."""
    rate = USED * 15.7e12
    samples = stages * model.samples
    calls, parameters = calls_of(model, samples / micro_batches, rate)
    try:
        cut = best_cut(
            Intervals(calls, order_of(calls), parameters), CutProblem(
                stages, micro_batches, memory=32e9, copies=COPIES,
                recompute='auto' if stages > 1 else False,
                wire=Wire(LATENCY, 25e9)))
    except DoesNotFit:
        return None
    starts = 0, *cut.ends
    return _Part(cut.predicted.seconds, max(
        sum(layer.parameters for layer in model.layers[start:stop])
        for start, stop in zip(starts, cut.ends, strict=False)))


def _hybrid(model, stages):
    """Seconds of a step on 60 nodes of 8 GPUs, pipelines inside nodes."""
    part = _cut(model, stages, min(8 * stages, 32))
    if part is None:
        return math.inf
    return part.seconds + _replicas(stages, part.elements)


def _replicas(stages, elements):
    """Seconds in which the replicas of each stage average gradients.

    The stages of a node share its port.
    """
    nodes = Nodes(60, 8 // stages, 12.5e9 / stages, 25e9)
    return nodes.exchange(CodecCosts(4, 4), elements)


# --- Tanaka, K. et al.: in-network computing ---------------------------------

_NETWORK = 'Tanaka, K. et al.'


def in_network():
    """An FPGA that sums, 10 Gbit/s Ethernet."""
    payload = 1460 / 1538           # of an Ethernet frame of 1,500 bytes
    cluster = Cluster(range(5), 1.25e9 * payload, LATENCY,
                      in_switch=frozenset([4]))
    elements = 25_000_000           # about 100 MB
    passing, stored = (
        simulate([aggregator(4, 1)], cluster, CodecCosts(4, 4), elements,
                 frame_bytes=frame, frames_in_flight=flight).seconds
        for frame, flight in ((1 << 16, 64), (1 << 60, 1)))
    return [
        Row(_NETWORK, 'all-reduce of large messages: Gbit/s', 9.62,
            32e-9 * elements / passing,
            'Wire speed less headers of frames of 1,500 bytes; with frames '
            'of 9,000 it would be 9.9.'),
        Row(_NETWORK, '100 MB, cut-through: less time than store and forward',
            0.65, 1 - passing / stored,
            'Theirs is against another network, whose times for messages of '
            'some kB were extended to 100 MB; ours is on the same links.')]


# --- Takisawa, Yazaki, Ishihata ----------------------------------------------

_PIPELINE = 'Takisawa et al.'
#: Processes, micro-batches, times as fast as one process (section 6.1).
_SPEED_UPS = ((2, 5, 1.34), (4, 5, 1.93), (8, 20, 2.7), (16, 20, 3.49),
              (32, 20, 3.72))


def pipelines():
    """32 layers of 5,000, batches of 1,200, a P100 per process."""
    width, samples, layers = 5000, 1200, 32
    passing = 2 * samples * width ** 2 / (USED * 9.3e12)
    serial = 3 * layers * passing
    rows = []
    for processes, count, times in _SPEED_UPS:
        here = layers // processes
        # A gradient is added to those of the micro-batches before: 12 bytes.
        adding = 12 * width ** 2 / 732e9
        each = here * passing / count
        step = simulate_pipeline(
            make_schedule('gpipe', processes, count),
            [Costs(each, each, each + here * adding)] * processes,
            Link(LATENCY, 12.5e9, [4 * samples / count * width]
                 * (processes - 1), overlapped=False)).step_time
        rows.append(Row(
            _PIPELINE, f'{processes} processes, {count} micro-batches '
            '(section 6.1): times as fast as one', times, serial / step,
            'Products of few samples run at less than 40 % of the peak, and '
            "ChainerMN's messages take two each, through Python; the more "
            'of both, the larger the difference.'))
    return rows


def percent(share):
    """A share as text."""
    return f'{100 * share:.0f} %'


def bisected(function, low, high):
    """Where a falling or rising function is zero, to a thousandth.

    Args:
        function: Its values at both ends have different signs.
        low: More than zero.
        high: More than that.
    """
    sign = function(low) > 0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if (function(middle) > 0) == sign:
            low = middle
        else:
            high = middle
    return low
