"""Tensors with random values, and how a codec is used by one rank alone."""
from chainer_fp8pipe.codecs import (
    BlockScaled,
    Cast,
    Fp8Paper,
    Fp8Ratio,
    Tensors,
)

import numpy

from benchmarks.codec_updates import begin

SITE = 'sum 0 0'
CODECS = {
    'float32': Cast('float32'), 'float16': Cast('float16'),
    'bfloat16': Cast('bfloat16'),
    'fp8': Fp8Ratio(period=2), 'fp8_paper': Fp8Paper(period=2, seed=5),
    'without': Fp8Ratio(error_feedback=False, ranks=9),
    'int4': BlockScaled(), 'int4 without': BlockScaled(error_feedback=False)}


def random_tensors(sizes, seed=0, spread=1.0, grain=1, loss_scale=1.0):
    """Normal gradients and parameters; ``spread`` scales the gradients."""
    generator = numpy.random.default_rng(seed)

    def draw(scale):
        return [generator.normal(0, scale, size).astype(numpy.float32)
                for size in sizes]
    gradients, parameters = draw(spread), draw(0.1)
    return Tensors(
        [f'/l{i}/W' for i in range(len(sizes))],
        [gradient * numpy.float32(loss_scale) for gradient in gradients],
        parameters, grain)


def encode(state, tensors, prescale=1.0, loss_scale=1.0):
    """The wire of an update, and the tensors, coded."""
    coding = begin(state, tensors, prescale=prescale, loss_scale=loss_scale)
    wire = numpy.zeros(tensors.size, state.codec.wire_dtype)
    coding.encode(wire)
    coding.conclude()
    return wire, coding


def round_trip(state, tensors):
    """Encodes and decodes; returns whether finite, and the gradients."""
    wire, coding = encode(state, tensors)
    before = tensors.gradients
    coding.decode_into([gradient.copy() for gradient in before])
    finite = not coding.decode(wire)
    assert finite == coding.wire_is_finite
    after, tensors.gradients = tensors.gradients, before
    return finite, after


def sum_of(wires, codec):
    """Float32 sums of wires."""
    total = numpy.zeros(wires[0].size * codec.grain, numpy.float32)
    coding = begin(codec.init(), random_tensors([1], grain=codec.grain))
    for wire in wires:
        coding.accumulate(wire, total)
    return total


def mean_of(coding, total, count, start=0, site=SITE, owned=None, means=None):
    """The wire of a mean, encoded in one piece."""
    wire = numpy.zeros(total.size // coding.state.codec.grain,
                       coding.state.codec.wire_dtype)
    if means is None:
        means = coding.means([(site, owned or (0, coding.size))])[0]
    coding.mean(numpy.array(total, numpy.float32), count, wire, start, means)
    return wire


def fused(tensors):
    return numpy.concatenate(tensors.gradients).astype(float)
