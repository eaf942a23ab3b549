import mmap
import sys

from chainer_fp8pipe.report.process_memory import bytes_in

import pytest


@pytest.mark.skipif(sys.platform != 'linux', reason='others do not say')
def test_memory_that_is_used_is_counted():
    before = bytes_in('VmRSS')
    # Of pages that the process has not had before.
    with mmap.mmap(-1, 1 << 26) as memory:
        memory.write(b'1' * (1 << 26))
        assert bytes_in('VmRSS') - before > 0.9 * (1 << 26)
        assert bytes_in('VmHWM') >= before + 0.9 * (1 << 26)


def test_a_field_that_is_not_there_is_none():
    assert bytes_in('VmNothing') is None
