import sys

from chainer_fp8pipe.report.process_memory import bytes_in

import numpy
import pytest


@pytest.mark.skipif(sys.platform != 'linux', reason='others do not say')
def test_memory_that_is_used_is_counted():
    before = bytes_in('VmRSS')
    array = numpy.ones(1 << 23)     # 64 MiB
    assert bytes_in('VmRSS') - before > 0.9 * array.nbytes
    assert bytes_in('VmHWM') >= before + 0.9 * array.nbytes


def test_a_field_that_is_not_there_is_none():
    assert bytes_in('VmNothing') is None
