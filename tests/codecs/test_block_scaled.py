"""Records as a codec: what is kept from one update to the next."""
from chainer_fp8pipe.block_formats import FORMATS
from chainer_fp8pipe.codecs import BlockScaled, Fp8Ratio, Tensors
from chainer_fp8pipe.codecs.relay import CodecRecipe, RelayState

import numpy
import pytest

from benchmarks.codec_updates import begin

from .helpers import random_tensors

SIZES = [31, 0, 32, 33, 1, 1000, 64]


def tensors_of(seed=0, loss_scale=1.0, sizes=SIZES):
    made = random_tensors(sizes, seed)
    return Tensors(
        made.names,
        [gradient * numpy.float32(loss_scale) for gradient in made.gradients],
        made.parameters, loss_scale, BlockScaled.grain)


def encode(codec, tensors, prescale=1.0):
    wire = numpy.zeros(tensors.size, codec.wire_dtype)
    begin(codec, tensors)
    codec.encode(tensors, wire, prescale)
    return wire


def encode_mean(codec, tensors, wires):
    """The mean as one rank encodes it; relayed or not."""
    total = numpy.zeros(tensors.size * codec.grain, numpy.float32)
    for wire in wires:
        codec.accumulate(wire, total)
    mean = numpy.zeros(tensors.size, codec.wire_dtype)
    codec.encode_mean(tensors, total, len(wires), mean, 0, 'sum 0 0',
                      (0, tensors.size))
    return mean


def fused(tensors):
    return numpy.concatenate(tensors.gradients).astype(float)


def mean_error(name, feedback=True, steps=60, loss_scales=(1.0,),
               relayed=False):
    """Of the mean over updates of two ranks' constant gradients."""
    codecs = [BlockScaled(name, error_feedback=feedback) for _ in range(2)]
    kept, sent = RelayState(), 0.0
    for step in range(steps):
        scale = loss_scales[step % len(loss_scales)]
        ranks = [tensors_of(seed, scale) for seed in range(2)]
        wires = [encode(codec, tensors) for codec, tensors
                 in zip(codecs, ranks, strict=True)]
        made = codecs[0], ranks[0]
        if relayed:
            made = CodecRecipe.of(*made, 0, ranks[0].size).make(kept, 0, 2)
        mean = encode_mean(*made, wires)
        assert codecs[0].decode(ranks[0], mean) == []
        sent = sent + fused(ranks[0]) / scale
    true = (fused(tensors_of(0)) + fused(tensors_of(1))) / 2
    return numpy.linalg.norm(sent / steps - true) / numpy.linalg.norm(true)


# --- error feedback ----------------------------------------------------------

@pytest.mark.parametrize('relayed', [False, True])
@pytest.mark.parametrize('name', FORMATS)
def test_means_over_updates_converge_to_the_true_mean(name, relayed):
    without = mean_error(name, feedback=False, steps=1, relayed=relayed)
    assert 0.02 < without < 0.2
    assert mean_error(name, relayed=relayed) < without / 10


@pytest.mark.parametrize('loss_scales', [
    (2.0 ** 16,), (1000.0,), (1.0, 1000.0, 2.0 ** 20, 3.0), (1e-3, 1e6)])
def test_so_they_do_whatever_the_loss_scale_is_and_becomes(loss_scales):
    assert mean_error('int4', loss_scales=loss_scales) < 0.01


def test_a_power_of_two_as_loss_scale_changes_no_bit():
    codecs = BlockScaled(), BlockScaled()
    for step, scale in enumerate([1.0, 2.0 ** 10, 2.0 ** -4]):
        plain, scaled = (encode(codec, tensors_of(step, factor)) for
                         codec, factor in zip(codecs, (1.0, scale),
                                              strict=True))
        numpy.testing.assert_array_equal(plain, scaled)


def test_a_prescale_multiplies_what_is_sent():
    numpy.testing.assert_array_equal(
        encode(BlockScaled(), tensors_of(0, 1.0), 0.25),
        encode(BlockScaled(), Tensors(
            tensors_of().names, [g / 4 for g in tensors_of().gradients],
            tensors_of().parameters, grain=32)))


# --- state -------------------------------------------------------------------

def test_a_saved_codec_goes_on_bit_for_bit():
    def steps(codec, numbers):
        wires = []
        for number in numbers:
            tensors = tensors_of(number, [1.0, 1000.0][number % 2])
            wires.append(encode(codec, tensors))
            wires.append(encode_mean(codec, tensors, wires[-1:]))
        return [wire.tobytes() for wire in wires]
    whole = BlockScaled()
    steps(whole, range(3))
    again = BlockScaled()
    again.load_state(whole.state())
    assert steps(whole, range(3, 6)) == steps(again, range(3, 6))
    assert steps(BlockScaled(), range(3, 6)) != steps(again, range(6, 9))


def test_without_feedback_nothing_is_kept():
    codec = BlockScaled(error_feedback=False)
    first = encode(codec, tensors_of())
    numpy.testing.assert_array_equal(encode(codec, tensors_of()), first)
    assert [*codec.state()] == ['over_unit']


def test_the_state_of_another_codec_is_refused():
    other = Fp8Ratio()
    encode(other, random_tensors(SIZES))
    for state in (other.state(), {}, {'nonsense': numpy.zeros(1)}):
        with pytest.raises(ValueError, match='no state of the int5 codec'):
            BlockScaled('int5').load_state(state)


# --- tensors side by side ----------------------------------------------------

@pytest.mark.parametrize('name', FORMATS)
def test_tensors_share_no_record(name):
    """Each one's bytes are those that it has alone."""
    tensors = tensors_of()
    wire = encode(BlockScaled(name), tensors)
    assert tensors.size == 1 + 0 + 1 + 2 + 1 + 32 + 2
    for index, gradient in enumerate(tensors.gradients):
        alone = Tensors(['/x'], [gradient], [gradient], grain=32)
        numpy.testing.assert_array_equal(
            encode(BlockScaled(name), alone),
            wire[tensors.offsets[index]:tensors.offsets[index + 1]])


@pytest.mark.parametrize('bad', [numpy.nan, numpy.inf])
@pytest.mark.parametrize('place', range(len(SIZES)))
def test_what_is_not_finite_is_named_and_reaches_its_own_record_only(
        place, bad):
    if not SIZES[place]:
        return
    codec, tensors = BlockScaled(), tensors_of()
    tensors.gradients[place][-1] = bad
    wire = encode(codec, tensors)
    name = tensors.names[place]
    assert codec.nonfinite == [f'the gradient of {name}']
    assert not codec.is_finite(wire)
    assert codec.decode(tensors, wire) == [name]
    for index, gradient in enumerate(tensors.gradients):
        found = numpy.isnan(gradient)
        first = (SIZES[place] - 1) // 32 * 32
        numpy.testing.assert_array_equal(
            found, (index == place) & (numpy.arange(gradient.size) >= first))
    codec.start(1.0)
    assert codec.nonfinite == []


@pytest.mark.parametrize('name', FORMATS)
def test_pieces_have_the_bits_and_the_state_of_the_whole(name):
    whole, cut = BlockScaled(name), BlockScaled(name)
    for step in range(3):
        tensors = tensors_of(step)
        wire = encode(whole, tensors)
        pieces = numpy.zeros_like(wire)
        begin(cut, tensors)
        for start in (30, 0, 10, 20):
            cut.encode(tensors, pieces[start:start + 10], 1.0, start)
        numpy.testing.assert_array_equal(pieces, wire)
        out = tensors_of(step + 1)
        for start in (30, 0, 10, 20):
            assert cut.decode(out, wire[start:start + 10], start) == []
        whole.decode(tensors, wire)
        numpy.testing.assert_array_equal(fused(out), fused(tensors))
    for key, value in whole.state().items():
        numpy.testing.assert_array_equal(cut.state()[key], value)


def test_blocks_have_no_sums_in_their_format():
    codec = BlockScaled()
    wire = numpy.zeros(3, codec.wire_dtype)
    with pytest.raises(NotImplementedError, match='int4 has no sums'):
        codec.add(wire, wire.copy())
    with pytest.raises(NotImplementedError, match='int4 has no sums'):
        codec.rescale(wire, .5)
