"""What all codecs have in common: pieces, states, what is not finite."""
import dataclasses

from chainer_fp8pipe.codecs import BlockScaled, Cast, Fp8Ratio, State, Tensors

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


# --- casts -------------------------------------------------------------------

@pytest.mark.parametrize(('name', 'value', 'finite'), [
    ('float16', 1e6, False), ('bfloat16', 3.38e38, True),
    ('bfloat16', 3.4e38, False), ('float32', 3e38, True)])
def test_what_is_too_large_for_float16_is_not_finite(name, value, finite):
    tensors = random_tensors([4])
    tensors.gradients[0][...] = value       # their sum overflows
    state = Cast(name).init()
    assert round_trip(state, tensors)[0] == finite
    assert bool(state.nonfinite) != finite


# --- records -----------------------------------------------------------------

def mean_error(codec, steps=60, loss_scales=(1.0,), moving=False):
    """Of the mean over updates of two ranks' constant gradients, relative.

    With ``moving`` parameters change at every update, and so do the largest
    gradients, which set fp8's scale.
    """
    states = [codec.init() for _ in range(2)]
    sizes, largest = [31, 33, 1000], slice(100) if moving else slice(0)
    sent = 0.0
    for step in range(steps):
        scale = loss_scales[step % len(loss_scales)]
        ranks = [tensors_of(codec, seed, scale, sizes) for seed in range(2)]
        for tensors in ranks:
            tensors.parameters = ranks[0].parameters
            tensors.gradients[2][largest] *= 1 + step % 5
        if moving:
            ranks[0].parameters[2] += numpy.random.default_rng(step).normal(
                0, 0.002, 1000).astype('f4')
        proposed = []
        for state, tensors in zip(states, ranks, strict=True):
            codec.begin(state, scale)
            proposed.append(state.codec.propose(state, tensors))
        both = None if proposed[0] is None else numpy.max(proposed, 0)
        wires = [numpy.zeros(ranks[0].size, codec.wire_dtype)
                 for _ in range(2)]
        for state, tensors, wire in zip(states, ranks, wires, strict=True):
            state.codec.step(state, tensors, both)
            tensors.encode(wire)
        total = sum_of(wires, codec)
        assert ranks[0].decode(mean_of(ranks[0], total, 2)) == []
        sent = sent + fused(ranks[0]) / scale
    true = sum(fused(tensors_of(codec, seed, 1.0, sizes))
               for seed in range(2)) / 2
    rest = slice(64 + largest.stop, None) if moving else slice(None)
    return numpy.linalg.norm((sent / steps - true)[rest]) / (
        numpy.linalg.norm(true[rest]))


@pytest.mark.parametrize('moving', [False, True])
@pytest.mark.parametrize('codec', [BlockScaled(), Fp8Ratio(period=1)],
                         ids=str)
def test_means_over_updates_converge_to_the_true_mean(codec, moving):
    """What an encoding loses, on any rank, comes with the next."""
    without = mean_error(dataclasses.replace(codec, error_feedback=False), 1,
                         moving=moving)
    assert 0.02 < without < 0.2
    assert mean_error(codec, moving=moving) < without / (
        4 if moving else 10)


@pytest.mark.parametrize('loss_scales', [
    (2.0 ** 16,), (1000.0,), (1.0, 1000.0, 2.0 ** 20, 3.0), (1e-3, 1e6)])
def test_so_they_do_whatever_the_loss_scale_is_and_becomes(loss_scales):
    for codec in BlockScaled(), Fp8Ratio():
        assert mean_error(codec, loss_scales=loss_scales) < 0.01


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


def test_tensors_share_no_record():
    """Each one's bytes are those that it has alone."""
    codec = BlockScaled()
    tensors = tensors_of(codec, sizes=[31, 0, 32, 33, 1, 1000, 64])
    wire, _ = encode(codec.init(), tensors)
    assert tensors.size == 1 + 0 + 1 + 2 + 1 + 32 + 2
    for index, gradient in enumerate(tensors.gradients):
        alone = Tensors(['/x'], [gradient], [gradient], grain=32)
        numpy.testing.assert_array_equal(
            encode(codec.init(), alone)[0],
            wire[tensors.offsets[index]:tensors.offsets[index + 1]])
