"""What all codecs have in common: pieces, states, what is not finite."""

from chainer_fp8pipe.codecs import BlockScaled, State

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codec_updates import begin

from .helpers import (
    CODECS,
    SITE,
    encode,
    fused,
    mean_of,
    random_tensors,
    round_trip,
    sum_of,
)

SIZES = [5, 1, 0, 300, 94]
ALL = pytest.mark.parametrize('codec', CODECS.values(), ids=[*CODECS])


def tensors_of(codec, seed=0, loss_scale=1.0, sizes=SIZES):
    return random_tensors(sizes, seed, grain=codec.grain,
                          loss_scale=loss_scale)


# In any order, and some of them empty; in thousandths of a wire.
pieces = st.lists(st.integers(0, 1000), max_size=6).map(
    lambda cuts: sorted([0, *cuts, 1000])).map(
        lambda cuts: [*zip(cuts[:-1], cuts[1:], strict=True)]).flatmap(
            st.permutations)


@ALL
@given(cuts=pieces, prescale=st.sampled_from([1.0, 0.25]))
@settings(max_examples=20)
def test_pieces_have_the_bits_and_the_state_of_the_whole(codec, cuts,
                                                         prescale):
    whole, cut = codec.init(), codec.init()
    for step in range(3):       # what is left out goes into the next
        tensors = tensors_of(codec, step)
        bounds = [(start * tensors.size // 1000, stop * tensors.size // 1000)
                  for start, stop in cuts]
        wire, coding = encode(whole, tensors, prescale)
        parts = begin(cut, tensors_of(codec, step), prescale=prescale)
        found, mean = numpy.zeros_like(wire), numpy.zeros_like(wire)
        owned = [(SITE, (0, tensors.size))]
        total = sum_of([wire], codec)
        means = parts.means(owned)[0]
        for start, stop in bounds:
            parts.encode(found[start:stop], start)
            parts.mean(total[start * codec.grain:stop * codec.grain].copy(),
                       3, mean[start:stop], start, means)
        parts.conclude()
        numpy.testing.assert_array_equal(found, wire)
        numpy.testing.assert_array_equal(mean_of(coding, total, 3), mean)
        coding.conclude()
        into = [[numpy.full_like(one, 7) for one in tensors.gradients]
                for _ in range(2)]
        coding.decode_into(into[0])
        coding.decode(wire)
        parts.decode_into(into[1])
        for start, stop in bounds:
            assert parts.decode(wire[start:stop], start) == []
        for one, other in zip(*into, strict=True):
            numpy.testing.assert_array_equal(one, other)
    assert whole.save().keys() == cut.save().keys()
    for key, value in whole.save().items():
        numpy.testing.assert_array_equal(cut.save()[key], value)


@ALL
def test_the_state_of_another_codec_or_a_damaged_one_is_refused(codec):
    message = f'no state of the {codec.name} codec'
    for other in CODECS.values():
        if other.name != codec.name:
            with pytest.raises(ValueError, match=message):
                State.load(codec, other.init().save())
    for nonsense in ({}, {'nonsense': numpy.zeros(3)}):
        with pytest.raises(ValueError, match=message):
            State.load(codec, nonsense)
    state = codec.init()
    encode(state, tensors_of(codec))
    saved = state.save()
    assert codec.error_feedback == any(
        key.startswith('residual') for key in saved)
    for key in saved:
        if key.startswith('residual'):
            for damaged in (saved[key][:-1], saved[key].astype('f8')):
                with pytest.raises(ValueError, match='damaged'):
                    State.load(codec, {**saved, key: damaged})


@ALL
@pytest.mark.parametrize('bad', [numpy.nan, numpy.inf, -numpy.inf])
def test_a_gradient_that_is_not_finite_is_named_once_and_by_its_piece(codec,
                                                                      bad):
    state, tensors = codec.init(), tensors_of(codec)
    tensors.gradients[3][[10, 200]] = bad
    coding = begin(state, tensors)
    wire = numpy.zeros(tensors.size, codec.wire_dtype)
    cut = tensors.offsets[3]
    for part in (slice(cut, None), slice(0, cut)):
        coding.encode(wire[part], part.start)
    coding.conclude()
    assert state.nonfinite == ['the gradient of /l3/W']
    assert coding.decode(wire[:cut]) == []
    assert coding.wire_is_finite
    assert coding.decode(wire[cut:], cut) == ['/l3/W']
    assert not coding.wire_is_finite
    record = numpy.arange(300) // 32
    expected = (numpy.isin(record, [0, 6]) if codec.grain == 32
                else numpy.isin(numpy.arange(300), [10, 200]))
    numpy.testing.assert_array_equal(~numpy.isfinite(tensors.gradients[3]),
                                     expected)
    if codec.grain == 1:
        numpy.testing.assert_array_equal(tensors.gradients[3][10],
                                         numpy.float32(bad))
    finite, _ = round_trip(state, tensors_of(codec))
    assert finite               # it leaves no trace in residuals
    assert state.nonfinite == []


# --- records -----------------------------------------------------------------

@pytest.mark.parametrize('ranks', [1, 8])
@pytest.mark.parametrize('spread', [1e-13, 1e-12, 2e5, 1e8, 1e30, 6e37])
def test_int4_has_room_for_every_finite_gradient(spread, ranks):
    """Clipped at first, but then right, and no error."""
    codec = BlockScaled(ranks=ranks)
    state, shares = codec.init(), []
    for step in range(10):
        tensors = tensors_of(codec, step)
        usual = fused(tensors)
        for gradient in tensors.gradients:
            gradient *= numpy.float32(spread)
        wire, coding = encode(state, tensors)
        assert state.nonfinite == coding.decode(wire) == []
        shares.append(fused(tensors) / spread @ usual / (usual @ usual))
        state = State.load(codec, state.save())
    assert abs(numpy.mean(shares[5:]) - 1) < 0.05, shares


def test_a_power_of_two_as_loss_scale_changes_no_bit_and_prescales_multiply():
    codec = BlockScaled()
    states = codec.init(), codec.init()
    for step, scale in enumerate([1.0, 2.0 ** 10, 2.0 ** -4]):
        plain, scaled = (
            encode(state, tensors_of(codec, step, factor),
                   loss_scale=factor)[0]
            for state, factor in zip(states, (1.0, scale), strict=True))
        numpy.testing.assert_array_equal(plain, scaled)
    quarter = random_tensors(SIZES, spread=0.25, grain=32)
    numpy.testing.assert_array_equal(
        encode(codec.init(), tensors_of(codec), 0.25)[0],
        encode(codec.init(), quarter)[0])
