"""The format as others have written it: ml_dtypes, and NumPy's half."""
import ml_dtypes
import numpy as np

E5M2 = ml_dtypes.float8_e5m2

#: Not negative, finite values in the order of their codes 0x00 to 0x7B.
VALUES = np.arange(0x7C, dtype=np.uint8).view(E5M2).astype(np.float64)


def decode(codes):
    return codes.view(E5M2).astype(np.float32)


def nearest(values):
    """Codes of floats of any width; finite values saturate."""
    finite = np.isfinite(values)
    limited = np.where(finite, np.clip(values, -57344, 57344), values)
    with np.errstate(invalid='ignore'):  # signalling NaN
        return limited.astype(E5M2).view(np.uint8)


def truncate(values):
    """The upper byte of NumPy's half; finite values saturate."""
    finite = np.isfinite(values)
    limited = np.where(finite, np.clip(values, -65504, 65504), values)
    codes = (limited.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    quiet_nan = (codes & 0x80) | 0x7E  # a half keeps some of the payload
    return np.where(np.isnan(values), quiet_nan, codes)


def interesting_floats():
    """Every boundary of the format, ties, and what is next to them."""
    ties = (VALUES[1:] + VALUES[:-1]) / 2
    half_ties = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(
        np.float64) + 2.0 ** -25
    special = [0, 2.0 ** -17, 61440, 57344, 65504, 65519.99, 65520, 65536,
               np.finfo(np.float32).max, 2.0 ** -126, 2.0 ** -149, 2.0 ** -127,
               np.inf, np.nan]
    exact = np.concatenate([VALUES, ties, half_ties, special]).astype(
        np.float32)
    with np.errstate(over='ignore'):  # next to the largest is infinity
        exact = np.concatenate([
            np.nextafter(exact, np.float32(-np.inf)), exact,
            np.nextafter(exact, np.float32(np.inf))])
    return np.concatenate([exact, -exact])


def random_bits(n, seed=0):
    """Float32 numbers with random bits: all magnitudes, NaN, infinity."""
    bits = np.random.default_rng(seed).integers(
        0, 2 ** 32, n, dtype=np.uint32)
    return bits.view(np.float32)


def random_in_range(n, seed=0):
    """Float32 numbers from below the smallest code to above the largest."""
    rng = np.random.default_rng(seed)
    low, high = np.array([2.0 ** -19, 2.0 ** 17], np.float32).view(np.uint32)
    bits = rng.integers(low, high, n, dtype=np.uint32)
    bits |= rng.integers(0, 2, n, dtype=np.uint32) << 31
    return bits.view(np.float32)


def same_bits(a, b):
    """Whether two float32 arrays hold the same bits, NaN included."""
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))
