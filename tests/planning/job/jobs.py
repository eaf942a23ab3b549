"""Jobs that nobody has, whose arithmetic is known."""
import dataclasses
import math

from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.job_profile import (
    CodecFigures,
    Figure,
    JobProfile,
    ModelFigures,
    NetworkFigures,
)
from chainer_fp8pipe.planning.partition.positions import order_of

from hypothesis import strategies as st

from tests.planning.traces import chain

OPERATIONS = ('encode', 'decode', 'accumulate', 'add', 'add_partial', 'pack',
              'mean')
SAMPLES, FEW = 8, 2


def scaled(calls, share):
    """The calls with a share of their samples: all in proportion."""
    return tuple(dataclasses.replace(
        call, forward=call.forward * share, backward=call.backward * share,
        kept=int(call.kept * share), temporary=int(call.temporary * share),
        outputs={key: value._replace(
            shape=(int(value.shape[0] * share),))
            for key, value in call.outputs.items()})
        for call in calls)


def figures(*seconds, buckets=None, **options):
    """A model's figures: a layer for each number of seconds.

    All grow in proportion to the samples, and nothing else takes time.

    Args:
        seconds: Of each call, forward and backward together, of 8 samples.
        buckets: Into how many the parameters are divided; None: each in its
            own.
        options: Of :func:`chain`, or attributes of the figures.
    """
    of_chain = {name: options.pop(name) for name in (
        'size', 'parameters', 'kept') if name in options}
    calls, parameters = chain(*seconds, **of_chain)
    few = scaled(calls, FEW / SAMPLES)
    names = list(reversed(parameters))
    each = -(-len(names) // (buckets or len(names)))
    return ModelFigures(**{
        'samples': SAMPLES, 'calls': tuple(calls), 'few': FEW,
        'calls_few': few, 'order': order_of(calls), 'parameters': parameters,
        'buckets': tuple(tuple(names[start:start + each])
                         for start in range(0, len(names), each)),
        'update': Figure(0.0),
        'plain': _sums(calls), 'plain_few': _sums(few),
        'ghost': Figure(0.0), 'optimizer_arrays': 0, **options})


def _sums(calls):
    return (sum(call.forward for call in calls),
            sum(call.backward for call in calls))


def codecs(rate=math.inf, update=0.0, tensor=0.0):
    """All codecs, whose operations are alike."""
    return {name: CodecFigures(dict.fromkeys(OPERATIONS, Figure(rate)),
                               Figure(update), Figure(tensor))
            for name in ('fp8', 'float16', 'float32')}


def job(model, hosts=(0,), cores=None, rate=math.inf, latency=0.0,
        speeds=(), codec=None, overhead=0.0, **network):
    """A job of a rank for each host's number, with a core each."""
    return JobProfile(
        NetworkFigures(
            tuple(hosts), Figure(latency), Figure(rate),
            **{'local_latency': Figure(latency), 'local_rate': Figure(rate),
               **network}),
        cores or Cores(tuple(range(len(hosts)))), codec or codecs(), model,
        speeds, overhead)


@st.composite
def jobs(draw, most=8):
    """Any job of a few ranks."""
    hosts, each = draw(st.sampled_from([
        shape for shape in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4),
                            (3, 2), (2, 4)) if shape[0] * shape[1] <= most]))
    ranks = hosts * each
    model = figures(
        *(draw(st.integers(1, 20)) * 1e-3
          for _ in range(draw(st.integers(1, 9)))),
        size=SAMPLES * 4 * draw(st.integers(1, 4000)),
        parameters=4 * draw(st.integers(1, 200_000)),
        kept=draw(st.integers(0, 100_000)),
        buckets=draw(st.integers(1, 4)),
        update=Figure(draw(st.floats(0, .01))),
        ghost=Figure(draw(st.sampled_from([0.0, 8e-6]))),
        micro_batch=Figure(draw(st.sampled_from([0.0, 1e-3]))),
        optimizer_arrays=draw(st.integers(0, 2)))
    shared = draw(st.booleans())
    return job(
        model, [rank // each for rank in range(ranks)],
        Cores((0,) * ranks, 1.0, (draw(st.floats(1.0, float(ranks))),))
        if shared else Cores(tuple(range(ranks)), draw(
            st.sampled_from([1.0, 1.3]))),
        draw(st.sampled_from([1e7, 1e8, 1e9])),
        draw(st.sampled_from([0.0, 1e-4])),
        codec=codecs(draw(st.sampled_from([1e8, 1e9])),
                     draw(st.sampled_from([0.0, 1e-3])),
                     draw(st.sampled_from([0.0, 1e-5]))),
        message_cost=Figure(draw(st.sampled_from([0.0, 5e-6]))))
