import mmap
import sys

from chainer_fp8pipe.report.process_memory import bytes_in

import pytest


@pytest.mark.skipif(sys.platform != 'linux', reason='others do not say')
def test_a_field_is_read_in_bytes():
    # How much is resident is for the kernel to say; this is for us.
    before = bytes_in('VmSize')
    with mmap.mmap(-1, 1 << 30):
        assert bytes_in('VmSize') - before > 0.9 * (1 << 30)
    assert 0 < bytes_in('VmRSS') <= bytes_in('VmHWM')


def test_a_field_that_is_not_there_is_none():
    assert bytes_in('VmNothing') is None
