"""Gradients on a device take the same way as on the CPU, bit for bit."""
import sys

from chainer_fp8pipe.block_formats import FORMATS
from chainer_fp8pipe.codecs import BlockScaled, Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.codecs.staging import empty_wire
from chainer_fp8pipe.compat import explain_no_gpu

import numpy
import pytest

from benchmarks.codec_updates import begin

from . import fake_cupy
from .helpers import encode, random_tensors

SIZES = [5, 0, 3000, 1]
CODECS = {
    'float32': lambda: Cast('float32'), 'float16': lambda: Cast('float16'),
    **{rounding: lambda rounding=rounding: Fp8Ratio(
        rounding=rounding, period=2)
       for rounding in ('nearest', 'truncate', 'stochastic')},
    'without feedback': lambda: Fp8Ratio(error_feedback=False),
    'int4': BlockScaled, 'e2m1': lambda: BlockScaled('e2m1'),
    'int5': lambda: BlockScaled('int5'),
    'int5 without': lambda: BlockScaled('int5', error_feedback=False)}
STATEFUL = {name: CODECS[name] for name in ('nearest', *FORMATS)}


@pytest.fixture
def cupy():
    with fake_cupy.installed() as cupy:
        yield cupy


def on_device(tensors):
    tensors.gradients = list(map(fake_cupy.ndarray, tensors.gradients))
    tensors.parameters = list(map(fake_cupy.ndarray, tensors.parameters))
    tensors.xp = sys.modules['cupy']
    return tensors


@pytest.mark.parametrize('codec', CODECS)
def test_nothing_is_compiled_for_gradients_on_a_device(cupy, codec):
    made = CODECS[codec]()
    tensors = random_tensors(SIZES, grain=made.grain)
    encode(made, tensors)
    compiled = made.compiled(tensors, 1.0)
    assert (compiled is None) == (codec == 'stochastic')
    assert made.compiled(on_device(tensors), 1.0) is None


def host(array):
    get = getattr(array, 'get', None)       # CuPy's, and the stand-in's
    return get() if get else array


def updates(codec, place, steps=4, bad=None):
    """What a rank of three computes: own wire, mean, decoded gradients."""
    results = []
    for step in range(steps):
        tensors = random_tensors(SIZES, seed=step, grain=codec.grain)
        if bad is not None:
            tensors.gradients[2][7] = bad
        tensors = place(tensors)
        wire = empty_wire(tensors.xp, tensors.size, codec.wire_dtype)
        assert isinstance(wire, numpy.ndarray)
        begin(codec, tensors)
        codec.encode(tensors, wire)
        results.append(wire.copy())
        piece = wire[2:2500]
        total = tensors.xp.zeros(piece.size * codec.grain, numpy.float32)
        for _ in range(3):
            codec.accumulate(piece, total)
        codec.encode_mean(tensors, total, 3, piece, 2, 'all',
                          (2, 2 + piece.size))
        results.append(wire.copy())
        results.append(codec.decode(tensors, wire))
        results += [host(gradient) for gradient in tensors.gradients]
        results.append(list(codec.nonfinite))
    return results


@pytest.mark.parametrize('bad', [None, numpy.nan, numpy.inf])
@pytest.mark.parametrize('name', CODECS)
def test_every_codec_gives_the_cpus_bits(cupy, name, bad):
    expected = updates(CODECS[name](), lambda tensors: tensors, bad=bad)
    found = updates(CODECS[name](), on_device, bad=bad)
    for wanted, got in zip(expected, found, strict=True):
        numpy.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize('bad', [None, numpy.nan, numpy.inf])
@pytest.mark.parametrize('name', CODECS)
def test_every_codec_gives_the_cpus_bits_on_a_gpu(name, bad):
    cupy = pytest.importorskip('cupy', reason='CuPy is not installed')
    if reason := explain_no_gpu():
        pytest.skip(reason)

    def on_gpu(tensors):
        return Tensors(tensors.names,
                       list(map(cupy.asarray, tensors.gradients)),
                       list(map(cupy.asarray, tensors.parameters)),
                       grain=tensors.grain)
    expected = updates(CODECS[name](), lambda tensors: tensors, bad=bad)
    found = updates(CODECS[name](), on_gpu, bad=bad)
    for wanted, got in zip(expected, found, strict=True):
        numpy.testing.assert_array_equal(got, wanted)


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
    whole, begun = made(), made()
    same(updates(begun, first, steps=3), updates(whole, on_host, steps=3))
    state = begun.state()
    assert all(isinstance(value, numpy.ndarray) for value in state.values())
    again = made()
    again.load_state(state)
    same(updates(again, second, steps=2), updates(whole, on_host, steps=2))


@pytest.mark.parametrize('name', STATEFUL)
def test_what_is_left_out_stays_on_the_device(cupy, name):
    codec = STATEFUL[name]()
    updates(codec, on_device, steps=1)
    kept = codec.residual(cupy, 'gradient', '/l2/W', 0, 3000)
    assert isinstance(kept, fake_cupy.ndarray)
    assert host(kept).any()
    before = host(kept)
    codec.start(3.0)        # residuals are multiplied as gradients are
    there = codec.residual(cupy, 'gradient', '/l2/W', 0, 3000)
    assert there is kept
    assert (host(there) != before).any()
