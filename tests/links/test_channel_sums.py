"""Sums and factors by channel against NumPy's, in float64."""
from chainer_fp8pipe.links.channel_sums import ChannelView

import numpy as np


def test_sums_of_millions_of_elements_lose_no_digits():
    """Also those of one channel of one sample, all of one sign."""
    x = np.random.RandomState(0).rand(1, 2, 3_000_000).astype('f')
    view = ChannelView(x, np.zeros(2, 'f'), None)
    shift = np.zeros(2, 'f')
    for found, exact in ((view.moments(x, shift)[1], x.astype(float) ** 2),
                         (view.products(x, x, shift)[0], x.astype(float))):
        np.testing.assert_allclose(found, exact.sum(axis=(0, 2)), rtol=1e-7)
