import os
import subprocess
import sys
import threading

from chainer_fp8pipe.images.segment import FileLock, Segment

import numpy
import pytest

from ..ranks import environment
from .processes import holders

OTHER = """
import sys
from chainer_fp8pipe.images.segment import Segment, SegmentPlace
segment = Segment.open(SegmentPlace(*map(int, sys.argv[1:])))
segment.view(0, 3)[:] = b'abc'
"""


def test_another_process_of_the_node_opens_the_same_memory():
    segment = Segment.create(10)
    subprocess.run([sys.executable, '-c', OTHER,
                    *map(str, segment.place)], env=environment(),
                   check=True, timeout=300)
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


# --- locks ------------------------------------------------------------------

HOLDER = """
import sys
from chainer_fp8pipe.images.segment import FileLock
with FileLock(int(sys.argv[1])):
    print('inside', flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def segment():
    return Segment.create(10)


def enter(lock):
    """A thread that ends when it has been inside a lock."""
    def wait():
        with lock:
            pass
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def is_through(thread, seconds):
    thread.join(seconds)
    return not thread.is_alive()


def test_one_process_waits_for_another(segment):
    with subprocess.Popen(
            [sys.executable, '-c', HOLDER, str(segment.fd)], text=True,
            pass_fds=[segment.fd], env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == 'inside\n'
        thread = enter(FileLock(segment.fd))
        assert not is_through(thread, 0.2)
        holder.stdin.write('\n')
        holder.stdin.flush()
        assert is_through(thread, 300)


def test_one_thread_waits_for_another(segment):
    lock = FileLock(segment.fd)
    with lock:
        thread = enter(lock)
        assert not is_through(thread, 0.2)
    assert is_through(thread, 300)


def test_an_error_inside_opens_it(segment):
    lock = FileLock(segment.fd)
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert is_through(enter(lock), 300)


def test_a_lock_that_fails_is_not_held(segment):
    lock = FileLock(segment.fd)
    segment.close()
    with pytest.raises(OSError, match='Bad file'), lock:
        pass
    assert lock._threads.acquire(blocking=False)
