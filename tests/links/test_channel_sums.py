"""Sums and factors by channel against NumPy's, in float64."""
from chainer_fp8pipe.links import channel_sums
from chainer_fp8pipe.links.channel_sums import ChannelView

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def cases(draw):
    """A shape with the axes that are summed over, and a size of blocks."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    axis = draw(st.sets(st.integers(0, len(shape) - 1)))
    return shape, tuple(sorted(axis)), draw(st.sampled_from([1, 5, 1 << 16]))


@settings(max_examples=150)
@given(cases(), st.sampled_from(['e', 'f', 'd']), st.integers(0, 9))
def test_channel_sums_equal_numpys(case, dtype, seed):
    shape, axis, block = case
    random = np.random.RandomState(seed)
    x, gy = random.randn(2, *shape).astype(dtype)
    lengths = [length for number, length in enumerate(shape)
               if number not in axis]
    gamma = np.zeros(lengths, 'f')
    before, channel_sums._BLOCK = channel_sums._BLOCK, block
    try:
        view = ChannelView(x, gamma, axis)
        shift, scale, offset, other = random.randn(4, gamma.size)
        shift = shift.astype('f')
        found = [view.centre(x), *view.moments(x, shift),
                 *view.products(gy, x, shift)]
        scaled = view.scaled(x, shift, scale, offset)
        gradient = view.scaled(x, shift, scale, offset, gy, other)
    finally:
        channel_sums._BLOCK = before
    count = view.elements
    assert count == np.prod([shape[item] for item in axis], dtype=int)

    def spread(values):
        return np.expand_dims(values.reshape(lengths), axis)
    x, gy = x.astype(float), gy.astype(float)
    centred = x - spread(shift)
    wanted = [x.sum(axis) / max(count, 1), centred.sum(axis),
              (centred ** 2).sum(axis), gy.sum(axis),
              (gy * centred).sum(axis)]
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, two.ravel(), rtol=1e-5, atol=1e-4)
    tolerance = 1e-2 if dtype == 'e' else 1e-5
    wanted = centred * spread(scale) + spread(offset)
    for one, two in ((scaled, wanted), (gradient, wanted + gy * spread(
            other))):
        assert one.dtype == dtype
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


def test_sums_of_millions_of_elements_lose_no_digits():
    """Also those of one channel of one sample, all of one sign."""
    x = np.random.RandomState(0).rand(1, 2, 3_000_000).astype('f')
    view = ChannelView(x, np.zeros(2, 'f'), None)
    shift = np.zeros(2, 'f')
    for found, exact in ((view.moments(x, shift)[1], x.astype(float) ** 2),
                         (view.products(x, x, shift)[0], x.astype(float))):
        np.testing.assert_allclose(found, exact.sum(axis=(0, 2)), rtol=1e-7)
