"""A codec's state is the same wherever gradients are.

(Of every codec's bits: tests/allreduce/test_gpu.py.)
"""
import sys

from chainer_fp8pipe.codecs import BlockScaled, Fp8Ratio, State
from chainer_fp8pipe.codecs.staging import empty_wire

import numpy
import pytest

from benchmarks.codec_updates import begin

from . import fake_cupy
from .helpers import random_tensors

SIZES = [5, 0, 3000, 1]
STATEFUL = {'nearest': Fp8Ratio(period=2),
            'int4': BlockScaled()}


@pytest.fixture
def cupy():
    with fake_cupy.installed() as cupy:
        yield cupy


def on_device(tensors):
    tensors.gradients = list(map(fake_cupy.ndarray, tensors.gradients))
    tensors.parameters = list(map(fake_cupy.ndarray, tensors.parameters))
    tensors.xp = sys.modules['cupy']
    return tensors


def host(array):
    get = getattr(array, 'get', None)       # CuPy's, and the stand-in's
    return get() if get else array


def updates(state, place, steps):
    """What a rank of three computes: own wire, mean, decoded gradients."""
    results, grain = [], state.codec.grain
    for step in range(steps):
        tensors = place(random_tensors(SIZES, seed=step, grain=grain))
        wire = empty_wire(tensors.xp, tensors.size, state.codec.wire_dtype)
        assert isinstance(wire, numpy.ndarray)
        coding = begin(state, tensors)
        coding.encode(wire)
        results.append(wire.copy())
        piece = wire[2:2500]
        owned = 2, 2 + piece.size
        coding.mean(
            numpy.random.default_rng(step).normal(
                0, 1e3, piece.size * grain).astype('f4'), 3, piece, 2,
            coding.means([('all', owned), ('other', (1, 4))])[0])
        results += [wire.copy(), coding.decode(wire)]
        results += [host(gradient) for gradient in tensors.gradients]
        coding.conclude()
        results.append(list(state.nonfinite))
    return results


def on_host(tensors):
    return tensors


def same(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        numpy.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize('name', STATEFUL)
@pytest.mark.parametrize(('first', 'second'), [
    (on_device, on_device), (on_device, on_host), (on_host, on_device)])
def test_a_saved_codec_goes_on_wherever_it_is(cupy, name, first, second):
    made = STATEFUL[name]
    whole, begun = made.init(), made.init()
    same(updates(begun, first, steps=3), updates(whole, on_host, steps=3))
    saved = begun.save()
    assert all(isinstance(value, numpy.ndarray) for value in saved.values())
    again = State.load(made, saved)
    same(updates(again, second, steps=2), updates(whole, on_host, steps=2))
