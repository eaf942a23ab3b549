"""Tensors with random values, and how a codec is used by one rank alone."""
from chainer_fp8pipe.codecs import Tensors

import numpy

from benchmarks.codec_updates import begin


def random_tensors(sizes, seed=0, spread=1.0, grain=1):
    """Normal gradients and parameters; ``spread`` scales the gradients."""
    generator = numpy.random.default_rng(seed)

    def draw(scale):
        return [generator.normal(0, scale, size).astype(numpy.float32)
                for size in sizes]
    return Tensors([f'/l{i}/W' for i in range(len(sizes))],
                   draw(spread), draw(0.1), grain=grain)


def encode(codec, tensors):
    wire = numpy.empty(tensors.size, codec.wire_dtype)
    begin(codec, tensors)
    codec.encode(tensors, wire)
    return wire


def round_trip(codec, tensors):
    """Encodes and decodes; returns whether finite, and the gradients."""
    wire = encode(codec, tensors)
    before = [gradient.copy() for gradient in tensors.gradients]
    finite = not codec.decode(tensors, wire)
    assert finite == codec.is_finite(wire)
    after = tensors.gradients
    tensors.gradients = before
    return finite, after
