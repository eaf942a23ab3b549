"""A wire that is encoded and decoded piece by piece is the same wire."""
from chainer_fp8pipe.codecs import Cast, Fp8Ratio

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codec_updates import begin

from .helpers import encode, random_tensors

CODECS = {'float32': lambda: Cast('float32'),
          'float16': lambda: Cast('float16'),
          'fp8': lambda: Fp8Ratio(period=2, headroom=1.0)}
SIZES = [5, 1, 0, 300, 94]      # 400 in all

# In any order, and some of them empty.
pieces = st.lists(st.integers(0, 400), max_size=6).map(
    lambda cuts: sorted([0, *cuts, 400])).map(
        lambda cuts: [*zip(cuts[:-1], cuts[1:], strict=True)]).flatmap(
            st.permutations)


def parts_of(codec, tensors, bounds, prescale=1.0):
    wire = numpy.empty(tensors.size, codec.wire_dtype)
    begin(codec, tensors)
    for start, stop in bounds:
        codec.encode(tensors, wire[start:stop], prescale, start)
    return wire


@pytest.mark.parametrize('name', CODECS)
@given(bounds=pieces, prescale=st.sampled_from([1.0, 0.25]))
@settings(max_examples=40)
def test_pieces_have_the_bits_and_the_state_of_the_whole(name, bounds,
                                                         prescale):
    whole, cut = CODECS[name](), CODECS[name]()
    for step in range(3):       # what is left out goes into the next
        tensors = random_tensors(SIZES, seed=step)
        wire = numpy.empty(400, whole.wire_dtype)
        begin(whole, tensors)
        whole.encode(tensors, wire, prescale)
        numpy.testing.assert_array_equal(
            parts_of(cut, tensors, bounds, prescale), wire)
    assert whole.state().keys() == cut.state().keys()
    for key, value in whole.state().items():
        numpy.testing.assert_array_equal(cut.state()[key], value)


@pytest.mark.parametrize('name', CODECS)
@given(bounds=pieces)
@settings(max_examples=40)
def test_pieces_are_decoded_where_they_belong(name, bounds):
    codec = CODECS[name]()
    wire = encode(codec, random_tensors(SIZES))
    whole, cut = random_tensors(SIZES), random_tensors(SIZES)
    codec.decode(whole, wire)
    for gradient in cut.gradients:
        gradient[...] = 7
    for start, stop in bounds:
        assert codec.decode(cut, wire[start:stop], start) == []
    for one, other in zip(whole.gradients, cut.gradients, strict=True):
        numpy.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('name', CODECS)
def test_what_is_not_finite_is_named_once_and_by_the_piece_it_is_in(name):
    codec = CODECS[name]()
    tensors = random_tensors(SIZES)
    tensors.gradients[3][[10, 200]] = numpy.nan, numpy.inf
    wire = parts_of(codec, tensors, [(300, 400), (0, 100), (100, 300)])
    assert codec.nonfinite == ['the gradient of /l3/W']
    assert codec.decode(tensors, wire[:16]) == []
    assert codec.decode(tensors, wire[16:17], 16) == ['/l3/W']
    assert codec.decode(tensors, wire[17:206], 17) == []
    assert codec.decode(tensors, wire[206:], 206) == ['/l3/W']


def test_pieces_are_rounded_at_random_independently():
    """Random bits that came again would err in the same direction."""
    codec = Fp8Ratio(rounding='stochastic', error_feedback=False,
                     headroom=1.1)
    tensors = random_tensors([1000])
    tensors.gradients[0][...] = tensors.gradients[0][0]
    tensors.parameters[0][...] = 0.3
    wire = parts_of(codec, tensors, [(0, 500), (500, 1000)])
    assert set(wire[:500]) == set(wire[500:])
    assert len(set(wire)) == 2
    assert (wire[:500] != wire[500:]).any()
