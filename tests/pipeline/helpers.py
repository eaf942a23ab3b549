"""Comparison of messages, for the tests of what carries arrays."""
import numpy


def assert_same(found, wanted):
    """Equal arrays of equal shapes and dtypes, and None at equal places."""
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
        else:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            numpy.testing.assert_array_equal(one, other)
