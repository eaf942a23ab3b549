import os
import subprocess
import sys

from chainer_fp8pipe.images.workers.segment import Segment

import numpy

from ...ranks import environment
from ..processes import holders

OTHER = """
import sys
from chainer_fp8pipe.images.workers.segment import Segment, SegmentPlace
segment = Segment.open(SegmentPlace(*map(int, sys.argv[1:])))
segment.view(0, 3)[:] = b'abc'
"""


def test_another_process_of_the_node_opens_the_same_memory():
    segment = Segment.create(10)
    subprocess.run([sys.executable, '-c', OTHER,
                    *map(str, segment.place)], env=environment(),
                   check=True, timeout=60)
    assert bytes(segment.view(0, 4)) == b'abc\0'


def test_a_descriptor_of_some_other_file_is_not_taken_for_it():
    one, other = Segment.create(10), Segment.create(10)
    assert Segment.open(one.place._replace(fd=other.fd)) is None
    assert Segment.open(one.place._replace(fd=99999)) is None


def test_arrays_are_copied_in_one_after_the_other():
    arrays = [numpy.arange(3), numpy.array([1.5]), numpy.zeros(0)]
    segment = Segment.of(arrays)
    assert segment.array(0, (3,), arrays[0].dtype).tolist() == [0, 1, 2]
    assert segment.array(24, (1,), float).tolist() == [1.5]


def test_memory_is_gone_with_the_last_that_refers_to_it():
    segment = Segment.create(5000)
    memory = {str(os.fstat(segment.fd).st_ino)}
    array = segment.array(0, (10,), numpy.int64)
    assert holders(memory) == {os.getpid()}
    segment.close()
    array[:] = 3        # still there
    assert holders(memory) == {os.getpid()}
    del array
    assert not holders(memory)


def test_a_segment_that_nobody_closes_is_closed():
    segment = Segment.create(5000)
    memory = {str(os.fstat(segment.fd).st_ino)}
    del segment
    assert not holders(memory)
