"""int4 in NumPy, element by element."""
import ml_dtypes
import numpy as np


def scale_code(largest):
    """The last byte of a record whose largest magnitude is this float32."""
    if not np.isfinite(largest):
        return 255
    # Eighths of a power of two, rounded up.
    ratio = np.float64(largest * np.float32(1 / 7))
    fraction, exponent = np.frexp(ratio)        # 0.5 <= fraction < 1
    code = (4 * (exponent - 1 + 49) + np.ceil(8 * fraction) - 4
            if ratio else 0)
    return int(max(code, 0))


def scale(code):
    """Its value, in float64."""
    code = int(code)
    if code in (0, 255):
        return np.nan if code else 0.0
    return 2.0 ** (code // 4 - 49) * (1 + code % 4 / 4)


def encode(values, residual=None):
    """Records (uint8, a row each), and what they leave out."""
    with np.errstate(over='ignore', invalid='ignore'):
        wanted = values if residual is None else values + residual
    whole = np.zeros(-(-values.size // 32) * 32, np.float32)
    whole[:values.size] = wanted
    left = np.zeros_like(whole)
    records = np.zeros((whole.size // 32, 17), np.uint8)
    for number, record in enumerate(records):
        part = slice(32 * number, 32 * number + 32)
        record[:], left[part] = _encode_one(whole[part])
    return records, left[:values.size]


def _encode_one(wanted):
    record = np.zeros(17, np.uint8)
    largest = abs(wanted).max()
    code = scale_code(largest)
    if not np.isfinite(largest):
        record[-1] = 255
        return record, np.zeros(32, np.float32)
    record[-1] = min(code, 254)
    size = np.float32(scale(record[-1]))
    inverse = np.float32(1) / size if size else np.float32(0)
    units = np.rint(np.clip(wanted * inverse, -7, 7))
    bits = units.astype(int) & 15
    record[:16] = bits[:16] | bits[16:] << 4
    others = np.sort(abs(wanted[abs(wanted) < largest]))[-1:]
    limit = others[0] if code and others.any() else np.inf
    if code > 254:
        limit = 0
    return record, np.clip(wanted - units * size, -limit, limit)


def decode(records, n):
    """Float32 values of records as :func:`encode` has them."""
    values = np.zeros((len(records), 32), np.float32)
    for record, out in zip(records, values, strict=True):
        bits = np.concatenate([record[:16] & 15, record[:16] >> 4])
        out[:] = bits.view(ml_dtypes.int4).astype(np.float32) * np.float32(
            scale(record[-1]))
    return values.reshape(-1)[:n]


def interesting(seed=0):
    """Records around every scale, and of what is no ordinary number."""
    rng = np.random.default_rng(seed)
    tiny = np.float32(2.0 ** -149)
    halves = np.arange(-31, 33, dtype=np.float32)       # ties and whole ones
    groups = [halves / 2, halves / 4, halves * np.float32(0.75)]
    for code in (*range(1, 12), *range(120, 132), *range(246, 255)):
        largest = np.float32(scale(code)) * np.float32(7)
        for one in (np.nextafter(largest, np.float32(0)), largest,
                    np.nextafter(largest, np.float32(np.inf))):
            group = rng.uniform(-1, 1, 32).astype(np.float32) * largest
            group[rng.integers(32)] = one
            groups.append(group)
    groups += [np.zeros(32), np.full(32, -0.0), np.full(32, tiny),
               np.full(32, 2.0 ** -126), np.full(32, 3.4e38),
               np.array([3.4e38, -3.4e38, 1e30, 1, tiny, 0, -0.0, -1] * 4)]
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 17, 31):
            group = rng.normal(0, 1, 32).astype(np.float32)
            group[place] = bad
            groups.append(group)
    bits = rng.integers(0, 2 ** 32, 3200, dtype=np.uint32)
    spread = rng.normal(0, 1, (200, 32)) * 10.0 ** rng.uniform(
        -20, 10, (200, 1))
    return np.concatenate([np.ravel(group).astype(np.float32) for group
                           in (*groups, bits.view(np.float32), spread)])
