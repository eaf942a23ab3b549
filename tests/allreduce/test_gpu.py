"""Means of gradients on a GPU have the bits of the CPU.

The GPU is a stand-in, but for the tests that are marked.
"""
import contextlib

from chainer_fp8pipe.allreduce.engine import Bucket
from chainer_fp8pipe.codecs import (
    BlockScaled,
    Cast,
    Fp8Paper,
    Fp8Ratio,
    Tensors,
)

import numpy
import pytest

from tests.codecs import fake_cupy
from tests.exchange.jobs import exchange_of
from tests.ranks import on_ranks

from .helpers import bits, make, spoiled, tensors_of

SIZES = [1000, 0, 3, 2037]
CODECS = {
    'float32': lambda: Cast('float32'), 'float16': lambda: Cast('float16'),
    'fp8': lambda: Fp8Ratio(period=2), 'fp8_paper': Fp8Paper,
    'fp8 without feedback': lambda: Fp8Ratio(error_feedback=False),
    'int4': BlockScaled,
    'int4 without feedback': lambda: BlockScaled(error_feedback=False)}
PLANS = 'direct', 'ring', 'torus2d', 'ring two'


@contextlib.contextmanager
def stand_in():
    """CuPy's, and what puts arrays there."""
    with fake_cupy.installed() as cupy:
        yield cupy, fake_cupy.ndarray


@contextlib.contextmanager
def graphics_card():
    """CuPy, and what puts arrays there."""
    import cupy
    yield cupy, cupy.asarray


@contextlib.contextmanager
def host():
    yield numpy, numpy.asarray


class Job:
    """A model's exchanges, as a communicator carries them out.

    Args:
        comm: The ranks.
        name: Of the plans.
        form: What partial sums travel in.
        codec: Of the model.
        framing: More of it.
    """

    def __init__(self, comm, name, form, codec, **framing):
        self.algorithm = make(f'{name} {form}', comm,
                              **{'frame_bytes': 300, **framing})
        self.state = exchange_of(codec)

    def update(self, tensors):
        """Makes gradients their mean; returns the bucket."""
        kept = self.state.state
        codec = kept.codec
        codec.begin(kept, 1.0)
        bucket = Bucket(kept, tensors, self.state.wire(
            0, tensors.xp, tensors.size), decodes=True)
        self.algorithm.finish(self.algorithm.submit(bucket))
        self.found = bucket.decode()
        return bucket

    def close(self):
        self.algorithm.free()


def moved(tensors, to):
    return Tensors(tensors.names, list(map(to, tensors.gradients)),
                   list(map(to, tensors.parameters)), grain=tensors.grain)


def back(array):
    return array if isinstance(array, numpy.ndarray) else array.get()


def results(comm, place, name, form, make_codec, kind='normal', sizes=SIZES,
            **framing):
    """All that three updates leave behind; and the last bucket."""
    with place() as (_, to), numpy.errstate(all='ignore'):
        codec, found = make_codec(), []
        job = Job(comm, name, form, codec, **framing)
        for number in range(3):
            tensors = moved(spoiled(tensors_of(
                comm.rank, sizes, number, codec.grain), comm.rank, kind), to)
            bucket = job.update(tensors)
            found += [*map(back, tensors.gradients), job.found,
                      not job.found or bucket.tensors.wire_is_finite,
                      sorted(job.state.state.nonfinite)]
        state = job.state.state.save()
        found += [state[key] for key in sorted(state)]
        if isinstance(codec, Fp8Ratio):
            found.append(codec.report(job.state.state))
        job.close()
        del bucket      # it has a wire
    return found


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, numpy.ndarray):
            numpy.testing.assert_array_equal(bits(one), bits(other))
        else:
            assert one == other


def check(comm, place, name, form, codec, kind='normal', **framing):
    """Compares with the CPU."""
    assert_same(
        results(comm, place, name, form, CODECS[codec], kind, **framing),
        results(comm, host, name, form, CODECS[codec], kind))


@pytest.mark.parametrize('codec', CODECS)
@on_ranks(1, 4)
def test_means_residuals_and_reports_are_those_of_the_cpu(comm, codec):
    for name, form, kind, framing in [
            ('direct', 'float32', 'extreme', {}),
            ('ring', 'float16', 'normal', {'shared_memory': False}),
            ('torus2d', 'float32', 'nonfinite', {}),
            ('ring two', 'float16', 'normal', {})]:
        check(comm, stand_in, name, form, codec, kind, **framing)


@pytest.mark.gpu
@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('name', PLANS)
@on_ranks(4)
def test_so_they_are_on_a_gpu(comm, name, codec, real):
    check(comm, graphics_card, name, 'float32', codec)
    check(comm, graphics_card, name, 'float32', codec, shared_memory=False)
