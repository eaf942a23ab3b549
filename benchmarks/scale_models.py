"""Models of ``planning_scale.py``: what their layers compute, keep and send.

Counted by hand from the networks' shapes: two operations for a multiplication
and an addition, backward twice forward, float32 everywhere.
"""
from __future__ import annotations

from typing import NamedTuple

from chainer_fp8pipe.planning.partition.calls import (
    Call,
    Parameter,
    Source,
    Value,
)

import numpy

_FLOAT = numpy.dtype('f')


class Layer(NamedTuple):
    """What cannot be cut further.

    Attributes:
        parameters: Elements.
        operations: Of a sample's forward pass.
        output: Bytes of a sample's activation.
        kept: Bytes of a sample that are kept for backward.
    """

    parameters: float
    operations: float
    output: float
    kept: float


class ScaleModel(NamedTuple):
    """A model and how it is trained.

    Attributes:
        name: For tables.
        layers: In their order.
        samples: Of a rank in an update.
    """

    name: str
    layers: tuple[Layer, ...]
    samples: int

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return round(sum(layer.parameters for layer in self.layers))

    @property
    def operations(self) -> float:
        """Of a sample, forward and backward."""
        return 3 * sum(layer.operations for layer in self.layers)


def calls_of(model, samples, rate):
    """A trace with so many samples on ranks of so many operations per second.

    Returns:
        Calls, and parameters by path.
    """
    calls, parameters = [], {}
    for number, layer in enumerate(model.layers):
        path = f'/{number}/W'
        parameters[path] = Parameter((round(layer.parameters),), _FLOAT)
        forward = samples * layer.operations / rate
        calls.append(Call(
            'layer', link=f'/{number}', path=(number,),
            inputs=(Source(number - 1, 0),) if number else (),
            parameters=(path,), forward=forward, backward=2 * forward,
            outputs={0: Value((round(samples * layer.output / 4),), _FLOAT,
                              True)},
            kept=round(samples * layer.kept)))
    return calls, parameters


def _resnet56():
    """He et al. 2016 for images of 32 x 32: three stages of nine blocks."""
    layers = []
    for stage in range(3):
        width, size = 16 << stage, 32 >> stage
        out = width * size ** 2 * 4
        layers += [Layer(18 * width ** 2, 36 * width ** 2 * size ** 2, out,
                         6 * out)] * 9
    return tuple(layers)


def _resnet50():
    """He et al. 2016 for images of 224 x 224."""
    layers = [Layer(9408, 2.4e8, 56 ** 2 * 64 * 4, 112 ** 2 * 64 * 12)]
    for width, size, count in ((64, 56, 3), (128, 28, 4), (256, 14, 6),
                               (512, 7, 3)):
        parameters = 17 * width ** 2
        layers += [Layer(parameters, 2 * parameters * size ** 2,
                         4 * width * size ** 2 * 4,
                         6 * width * size ** 2 * 12)] * count
        # Its first block has a convolution beside, and a narrower input.
        first = layers[-count]
        more = (6 if width > 64 else 1) * width ** 2
        layers[-count] = first._replace(
            parameters=parameters + more,
            operations=2 * (parameters + more) * size ** 2)
    return (*layers, Layer(2_049_000, 4.1e6, 4000, 4000))


def _caffenet():
    """Krizhevsky et al. 2012 in Caffe: five convolutions, then 58.6 M."""
    shapes = ((34_944, 1.05e8, 27 ** 2 * 96), (307_456, 2.24e8, 13 ** 2 * 256),
              (885_120, 1.50e8, 13 ** 2 * 384),
              (663_936, 1.12e8, 13 ** 2 * 384), (442_624, 7.5e7, 36 * 256),
              (37_752_832, 3.77e7, 4096),
              (16_781_312, 1.68e7, 4096), (4_097_000, 4.1e6, 1000))
    return tuple(Layer(parameters, 2 * additions, 4 * output, 16 * output)
                 for parameters, additions, output in shapes)


def _bert(layers, width, inner, heads, vocabulary, tokens=128):
    """Devlin et al. 2019; Tanaka et al. 2021 enlarged it."""
    parameters = 4 * width ** 2 + 2 * width * inner
    output = 4 * tokens * width
    block = Layer(
        parameters, 2 * parameters * tokens + 4 * tokens ** 2 * width, output,
        16 * output + 12 * heads * tokens ** 2)
    return (Layer(vocabulary * width, 0., output, 2 * output),
            *[block] * layers)


MODELS = (
    ScaleModel('0.9 M (ResNet-56)', _resnet56(), 128),
    ScaleModel('25 M (ResNet-50)', _resnet50(), 32),
    ScaleModel('61 M (CaffeNet)', _caffenet(), 256),
    ScaleModel('334 M (BERT-Large)', _bert(24, 1024, 4096, 16, 30_522), 8),
    # Its inner width is not in the paper; with 4,096, as in BERT-Large, the
    # model has the paper's 1.85 G parameters.
    ScaleModel('1.84 G (BERT-Tall)', _bert(54, 1920, 4096, 20, 100_000), 8))
