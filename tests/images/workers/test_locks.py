import subprocess
import sys
import threading

from chainer_fp8pipe.images.workers.locks import FileLock
from chainer_fp8pipe.images.workers.segment import Segment

import pytest

from ...ranks import environment

HOLDER = """
import sys
from chainer_fp8pipe.images.workers.locks import FileLock
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
        assert is_through(thread, 20)


def test_one_thread_waits_for_another(segment):
    lock = FileLock(segment.fd)
    with lock:
        thread = enter(lock)
        assert not is_through(thread, 0.2)
    assert is_through(thread, 20)


def test_an_error_inside_opens_it(segment):
    lock = FileLock(segment.fd)
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert is_through(enter(lock), 20)


def test_a_lock_that_fails_is_not_held():
    segment = Segment.create(10)
    lock = FileLock(segment.fd)
    segment.close()
    with pytest.raises(OSError, match='Bad file'), lock:
        pass
    assert lock._threads.acquire(blocking=False)
