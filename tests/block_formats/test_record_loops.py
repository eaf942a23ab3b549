"""The compiled loops: all generations of a processor, and many threads."""
import concurrent.futures

from chainer_fp8pipe import block_formats
from chainer_fp8pipe.block_formats import FORMATS, _records

import numpy as np
import pytest

from tests.fp8 import compilers

from . import reference


def results(loops, made):
    """The bits of every operation, on an odd length."""
    values = reference.interesting(made.name)[:-5]
    other = np.random.default_rng(5).normal(0, 1, values.size)
    size = -(-values.size // 32) * made.nbytes
    bits = []
    for factor in (1.0, 1 / 3):
        residual = other.astype(np.float32)
        for feedback in (None, residual):
            wire = np.zeros(size, np.uint8)
            count = loops.encode(values, factor, feedback, wire, made.number)
            out = other.astype(np.float32)
            for adds in (True, False):
                count += loops.decode(wire, factor, out, adds, made.number)
                bits.append(np.nan_to_num(out).view(np.uint32))
            bits += [wire, np.array(count)]
        bits.append(residual.view(np.uint32))
    wire = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    loops.decode(wire, 1.0, out, False, made.number)
    return [*bits, np.nan_to_num(out).view(np.uint32)]


@pytest.mark.parametrize('generation', compilers.GENERATIONS)
def test_every_generation_of_processors_gives_the_same_bits(
        generation, tmp_path):
    alone = compilers.loops_for(generation, tmp_path, block_formats,
                                '_records')
    for made in FORMATS.values():
        for ours, theirs in zip(results(_records, made),
                                results(alone, made), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize('made', FORMATS.values(), ids=[*FORMATS])
def test_many_threads_at_once_give_the_same_results(made):
    expected = results(_records, made)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: results(_records, made), range(16)):
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_buffers_of_different_length_are_refused():
    floats, wire = np.zeros(33, np.float32), np.zeros(34, np.uint8)
    longer = np.zeros(40, np.float32)       # in as many records
    for call in (lambda: _records.encode(floats, 1.0, None, wire[1:], 0),
                 lambda: _records.encode(longer, 1.0, floats, wire, 0),
                 lambda: _records.encode(floats, 1.0, floats[:9], wire, 0),
                 lambda: _records.encode(floats, 1.0, floats[:32], wire, 0),
                 lambda: _records.encode(floats, 1.0, None, wire, 2),
                 lambda: _records.encode(floats, 1.0, None, wire, 3),
                 lambda: _records.decode(wire[1:], 1.0, floats, False, 1),
                 lambda: _records.decode(wire, 1.0, floats, True, -1)):
        with pytest.raises(ValueError, match='differ in length'):
            call()
