"""Means of gradients on a GPU have the bits of the CPU.

The GPU is a stand-in, but for the tests that are marked.
"""
import contextlib

from chainer_fp8pipe.allreduce.engine import Bucket
from chainer_fp8pipe.codecs import State, Tensors

import numpy
import pytest

from tests.codecs.fake_cupy import installed, on_host
from tests.codecs.helpers import CODECS
from tests.exchange.jobs import exchange_of
from tests.ranks import on_ranks

from .helpers import make, tensors_of

SIZES = [1000, 0, 3, 2037]


@contextlib.contextmanager
def graphics_card():
    import cupy
    yield cupy.asarray


def spoiled(tensors, rank, kind):
    """Gradients and parameters that are hard to encode."""
    values = numpy.random.default_rng((rank, 7))
    first, last = tensors.gradients[0], tensors.gradients[-1]
    if kind == 'extreme':
        first *= 10.0 ** values.integers(-44, 38, first.size)
        first[values.integers(first.size, size=300)] = 0.0
        first[values.integers(first.size, size=300)] *= -0.0
    elif kind == 'nonfinite':
        first[5 + rank] = numpy.nan
        last[700 + 3 * rank] = numpy.inf if rank % 2 else -numpy.inf
        if rank == 1:
            tensors.parameters[2][1] = numpy.nan
    return tensors


def results(comm, places, way, codec, kind, **framing):
    """All that updates leave behind, each in another place."""
    found, algorithm = [], make(way, comm, frame_bytes=300, **framing)
    wires, state = exchange_of(codec), codec.init()
    for number, place in enumerate(places):
        with place() as to, numpy.errstate(all='ignore'):
            made = spoiled(tensors_of(comm.rank, SIZES, number, codec.grain),
                           comm.rank, kind)
            tensors = Tensors(made.names, [*map(to, made.gradients)],
                              [*map(to, made.parameters)], grain=codec.grain)
            codec.begin(state, 1.0)
            bucket = algorithm.submit(Bucket(state, tensors, wires.wire(
                0, tensors.xp, tensors.size), decodes=True))
            algorithm.finish(bucket)
            bad = bucket.decode()
            found += [array if to is numpy.asarray else array.get()
                      for array in tensors.gradients]
            found += [bad, not bad or tensors.wire_is_finite,
                      sorted(state.nonfinite)]
            saved = state.save()
            assert all(type(one) is numpy.ndarray for one in saved.values())
            state = State.load(codec, saved)
    found += [saved[key] for key in sorted(saved)]
    algorithm.free()
    return found


def check(comm, place, way, codec, kind='normal', **framing):
    """Compares with the CPU; the third update goes on from the state there.
    """
    for one, other in zip(*(
            results(comm, places, way, CODECS[codec], kind, **more)
            for places, more in (([place, place, on_host, place], framing),
                                 ([on_host] * 4, {}))), strict=True):
        numpy.testing.assert_array_equal(*map(bits, (one, other)))


def bits(found):
    """Of a number that is not one, only that it is none."""
    if not isinstance(found, numpy.ndarray) or found.dtype != numpy.float32:
        return found
    return numpy.where(numpy.isnan(found), numpy.float32('nan'),
                       found).view('u4')


@pytest.mark.parametrize('codec', CODECS)
@on_ranks(4)
def test_means_residuals_and_reports_are_those_of_the_cpu(comm, codec):
    for way, kind, framing in [
            ('direct', 'extreme', {}), ('torus2d', 'nonfinite', {}),
            ('ring', 'normal', {'shared_memory': False}),
            ('ring two', 'normal', {})]:
        check(comm, installed, way, codec, kind, **framing)


@pytest.mark.gpu
@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('way', ['direct', 'ring', 'torus2d', 'ring two'])
@on_ranks(4)
def test_so_they_are_on_a_gpu(comm, way, codec, real):
    check(comm, graphics_card, way, codec)
    check(comm, graphics_card, way, codec, shared_memory=False)
