"""The formats in NumPy, element by element, and E2M1 as ml_dtypes has it."""
import ml_dtypes
import numpy as np

BYTES = {'int4': 17, 'e2m1': 17, 'int5': 21}
TOP = {'int4': 7, 'e2m1': 6, 'int5': 15}

E2M1 = ml_dtypes.float4_e2m1fn


def scale_code(largest, name):
    """The last byte of a record whose largest magnitude is this float32."""
    if not np.isfinite(largest):
        return 255
    if name == 'e2m1':      # as much below as 4 is above 1
        code = np.floor(np.log2(np.float64(largest))) - 2 + 127 if (
            largest > 0) else 0
    else:                   # eighths of a power of two, rounded up
        ratio = np.float64(largest * np.float32(1 / TOP[name]))
        fraction, exponent = np.frexp(ratio)        # 0.5 <= fraction < 1
        code = (4 * (exponent - 1 + 49) + np.ceil(8 * fraction) - 4
                if ratio else 0)
    return int(np.clip(code, 0, 255))


def scale(code, name):
    """Its value, in float64."""
    code = int(code)
    if code in (0, 255):
        return np.nan if code else 0.0
    if name == 'e2m1':
        return 2.0 ** (code - 127)
    return 2.0 ** (code // 4 - 49) * (1 + code % 4 / 4)


def encode(values, name, factor=1.0, residual=None):
    """Records (uint8, a row each), and what they leave out."""
    with np.errstate(over='ignore', invalid='ignore'):
        wanted = values * np.float32(factor)
        if residual is not None:
            wanted = wanted + residual
    whole = np.zeros(-(-values.size // 32) * 32, np.float32)
    whole[:values.size] = wanted
    left = np.zeros_like(whole)
    records = np.zeros((whole.size // 32, BYTES[name]), np.uint8)
    for number, record in enumerate(records):
        part = slice(32 * number, 32 * number + 32)
        record[:], left[part] = _encode_one(whole[part], name)
    return records, left[:values.size]


def _encode_one(wanted, name):
    record = np.zeros(BYTES[name], np.uint8)
    record[-1] = code = scale_code(abs(wanted).max(), name)
    if code == 255:
        return record, np.zeros(32, np.float32)
    size = np.float32(scale(code, name))
    inverse = np.float32(1) / size if size else np.float32(0)
    units = np.clip(wanted * inverse, -TOP[name], TOP[name])
    if name == 'e2m1':
        units = units.astype(E2M1)
        bits = units.view(np.uint8).astype(int)
        units = units.astype(np.float32)
    else:
        units = np.rint(units)
        bits = units.astype(int) & 31
    record[:16] = bits[:16] & 15 | (bits[16:] & 15) << 4
    if name == 'int5':
        record[16:20] = np.packbits(bits >> 4, bitorder='little')
    others = np.sort(abs(wanted[abs(wanted) < abs(wanted).max()]))[-1:]
    limit = others[0] if code and others.any() else np.inf
    return record, np.clip(wanted - units * size, -limit, limit)


def decode(records, n, name, factor=1.0):
    """Float32 values of records as :func:`encode` has them."""
    values = np.zeros((len(records), 32), np.float32)
    for record, out in zip(records, values, strict=True):
        bits = np.concatenate([record[:16] & 15, record[:16] >> 4])
        if name == 'e2m1':
            units = bits.view(E2M1).astype(np.float32)
        elif name == 'int4':
            units = bits.view(ml_dtypes.int4).astype(np.float32)
        else:
            fifths = np.unpackbits(record[16:20], bitorder='little')
            units = bits.astype(np.float32) - 16 * fifths.astype(np.float32)
            units += 0      # the same zero, whatever its sign
        out[:] = units * (np.float32(scale(record[-1], name))
                          * np.float32(factor))
    return values.reshape(-1)[:n]


def interesting(name, seed=0):
    """Records around every scale, and of what is no ordinary number."""
    rng = np.random.default_rng(seed)
    tiny = np.float32(2.0 ** -149)
    halves = np.arange(-31, 33, dtype=np.float32)       # ties and whole ones
    groups = [halves / 2, halves / 4, halves * np.float32(0.75)]
    for code in (*range(1, 12), *range(120, 132), *range(246, 255)):
        size = np.float32(scale(code, name))
        with np.errstate(over='ignore'):
            largest = size * np.float32(TOP[name])
        around = [np.nextafter(largest, np.float32(0)), largest,
                  np.nextafter(largest, np.float32(np.inf))]
        for one in around:
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
