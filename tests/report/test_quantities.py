"""Numbers have a unit that suits them; memory is in bytes."""
import mmap
import sys

from chainer_fp8pipe.report import quantities

import pytest


@pytest.mark.parametrize(('say', 'value', 'text'), [
    *((quantities.seconds, value, text) for value, text in (
        (0, '0 s'), (2e-6, '2 µs'), (0.0123, '12.3 ms'), (1.5, '1.5 s'),
        (119, '119 s'), (3725, '1:02:05 h'), (float('nan'), 'nan'),
        (0.9999, '1 s'), (0.99996e-3, '1 ms'))),
    *((quantities.size, value, text) for value, text in (
        (0, '0 bytes'), (999, '999 bytes'), (1500, '1.5 kB'), (2e6, '2 MB'),
        (3.21e10, '32.1 GB'), (1.2345e12, '1230 GB'),
        (float('inf'), 'inf'))),
    (quantities.share, 0.1234, '12.3 %'), (quantities.share, 12.345,
                                           '1230 %'),
    *((quantities.number, value, text) for value, text in (
        (0, '0'), (12.34567, '12.35'), (1234567, '1235000'),
        (99999, '100000'), (-12345678, '-12350000'),
        (0.00123456, '0.001235'), (1e-7, '1e-07'), (2e9, '2e+09'),
        (float('inf'), 'inf')))])
def test_a_quantity_is_said_as_people_read_it(say, value, text):
    assert say(value) == text


@pytest.mark.skipif(sys.platform != 'linux', reason='others do not say')
def test_memory_is_read_in_bytes():
    # How much is resident is for the kernel to say; this is for us.
    before = quantities.bytes_in('VmSize')
    with mmap.mmap(-1, 1 << 30):
        assert quantities.bytes_in('VmSize') - before > 0.9 * (1 << 30)
    assert 0 < quantities.bytes_in('VmRSS') <= quantities.bytes_in('VmHWM')
    assert quantities.bytes_in('VmNothing') is None
