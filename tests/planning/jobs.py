"""Jobs that nobody has, whose arithmetic is known."""
import dataclasses

from chainer_fp8pipe.planning.calls import order_of
from chainer_fp8pipe.planning.schedule_time import Link
from chainer_fp8pipe.planning.step import (
    ExchangeFigures,
    JobProfile,
    ModelFigures,
)

from tests.planning.traces import chain

SAMPLES, FEW = 8, 2
CODECS = 'float32', 'float16', 'fp8'


def scaled(calls, share):
    """The calls with a share of their samples: all in proportion."""
    return tuple(dataclasses.replace(
        call, forward=call.forward * share, backward=call.backward * share,
        kept=int(call.kept * share), temporary=int(call.temporary * share),
        outputs={key: value._replace(
            shape=(int(value.shape[0] * share),))
            for key, value in call.outputs.items()})
        for call in calls)


def figures(*seconds, **options):
    """A model's figures: a layer for each number of seconds, of 8 samples.

    All grow in proportion to the samples, and nothing else takes time.
    """
    of_chain = {name: options.pop(name) for name in (
        'size', 'parameters', 'kept') if name in options}
    calls, parameters = chain(*seconds, **of_chain)
    return ModelFigures(**{
        'samples': SAMPLES, 'calls': tuple(calls), 'few': FEW,
        'calls_few': scaled(calls, FEW / SAMPLES), 'order': order_of(calls),
        'parameters': parameters, 'optimizer_arrays': 0, 'heap': 0.0,
        **options})


def job(model, ranks, stages=(1,), element=0.0, fixed=0.0, processor=0.0,
        link=None, **profile):
    """A job of a rank on each of so many hosts.

    Args:
        model: Its figures.
        ranks: How many.
        stages: Numbers of stages of which exchanges were measured.
        element: Seconds of an exchange for each element, or by codec.
        fixed, processor: Of all exchanges.
        link: Between all ranks.
        profile: Other attributes of the profile.
    """
    each = element if isinstance(element, dict) else dict.fromkeys(
        CODECS, element)
    return JobProfile(**{
        'model': model, 'hosts': tuple(range(ranks)),
        'slowdown': (1.0,) * ranks, 'exchanges': {
            (number, codec, algorithm): ExchangeFigures(
                ranks // number, fixed, each[codec], processor)
            for number in stages if number < ranks for codec in CODECS
            for algorithm in ('direct', 'ring', 'torus2d')},
        'links': {number: link or Link()
                  for number in range(2, ranks + 1)},
        'overhead': 0.0, **profile})
