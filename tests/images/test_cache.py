import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from chainer_fp8pipe.images.reading import Cache
from chainer_fp8pipe.images.segment import Segment

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..ranks import environment
from .processes import holders


def put(cache, index, data):
    """Keeps bytes as a file's are kept."""
    return cache.put(index, numpy.frombuffer(data, numpy.uint8))


def get(cache, index):
    found = cache.get(index)
    return None if found is None else found.tobytes()


def test_what_was_put_first_comes_back_and_outlives_the_cache():
    cache = Cache.create(2, 1000)
    pixels = numpy.random.RandomState(0).randint(
        0, 256, (5, 7, 3)).astype(numpy.uint8)
    assert cache.put(1, pixels[::-1])
    assert cache.put(1, pixels)
    assert cache.statistics() == (1, pixels.size)
    found = cache.get(1)
    assert cache.get(0) is None
    cache.close()
    del cache
    assert (found == pixels[::-1]).all()
    assert not found.flags.writeable


@settings(max_examples=100)
@given(budget=st.integers(0, 300),
       sizes=st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_nothing_is_evicted_and_the_budget_is_kept(budget, sizes):
    cache = Cache.create(len(sizes), budget)
    kept = {}
    for index, size in enumerate(sizes):
        data = bytes([index + 1]) * size
        room = sum(-(-len(data) // 16) * 16
                   for data in kept.values()) + size <= budget
        assert put(cache, index, data) is room
        if room:
            kept[index] = data
        for earlier in range(len(sizes)):
            found = get(cache, earlier)
            assert found == kept.get(earlier)
    assert sum(map(len, kept.values())) <= budget
    assert cache.statistics() == (len(kept), sum(map(len, kept.values())))
    cache.close()


def test_a_sample_that_two_put_at_once_takes_the_room_of_one():
    cache = Cache.create(2, 64)
    other = Cache(Segment(os.dup(cache.segment.fd)), 2)
    array = cache.segment.array

    def meanwhile(*arguments):      # room is reserved, nothing is written
        cache.segment.array = array
        assert other.get(0) is None
        assert other.statistics() == (0, 0)
        assert put(other, 0, b'2' * 48)
        return array(*arguments)
    cache.segment.array = meanwhile
    assert put(cache, 0, b'1' * 48)
    assert get(other, 0) == b'1' * 48
    assert put(other, 1, b'3' * 16)
    assert cache.statistics() == (2, 64)


WRITER = """
import sys
import numpy
from chainer_fp8pipe.images.reading import Cache
from chainer_fp8pipe.images.segment import Segment
cache = Cache(Segment(int(sys.argv[1])), 400)
for index in range(400):
    cache.put((index * int(sys.argv[2])) % 400, numpy.frombuffer(
        b'%d,' % index * 50, numpy.uint8))
"""


def test_processes_that_fill_a_cache_together_do_not_mix_their_samples():
    cache = Cache.create(400, 10 ** 6)
    writers = [subprocess.Popen(
        [sys.executable, '-c', WRITER, str(cache.segment.fd), str(step)],
        env=environment(), pass_fds=[cache.segment.fd]) for step in (1, 3, 7)]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0]
    for index in range(400):
        number = get(cache, index).partition(b',')[0]
        assert get(cache, index) == number + (b',' + number) * 49 + b','
    assert cache.statistics()[0] == 400


KILLED = """
import os, signal, sys
from chainer_fp8pipe.images.reading import Cache
from chainer_fp8pipe.images.segment import Segment
cache = Cache(Segment(int(sys.argv[1])), 2)
cache._lock.__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_while_it_holds_the_lock_leaves_it_open():
    cache = Cache.create(2, 100)
    killed = subprocess.run(
        [sys.executable, '-c', KILLED, str(cache.segment.fd)],
        env=environment(), pass_fds=[cache.segment.fd], timeout=300)
    assert killed.returncode == -9
    assert put(cache, 0, b'still')
    assert get(cache, 0) == b'still'


def test_threads_do_not_write_over_each_other():
    cache = Cache.create(400, 10 ** 6)

    def fill(first):
        for index in range(first, 400, 4):
            put(cache, index, bytes([index % 256]) * 100)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
    assert all(get(cache, index) == bytes([index % 256]) * 100
               for index in range(400))


def test_a_fork_in_the_middle_of_a_call_does_not_wait_for_it():
    cache = Cache.create(2, 100)
    cache._lock._threads.acquire()      # as another thread of the parent
    child = os.fork()
    if not child:
        os._exit(not put(cache, 0, b'child'))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache._lock._threads.release()
    assert get(cache, 0) == b'child'


def test_memory_is_not_taken_before_it_is_written():
    cache = Cache.create(10, 1 << 30)
    put(cache, 0, b'x' * 5000)
    # A kernel may take a huge page, and none takes all.
    assert os.fstat(cache.segment.fd).st_blocks * 512 < 1 << 29


# --- the shared memory that holds it

OTHER = """
import sys
import threading
from chainer_fp8pipe.images.segment import Segment, SegmentPlace
segment = Segment.open(SegmentPlace(*map(int, sys.argv[1:])))
segment.view(0, 3)[:] = b'abc'
"""


def test_only_the_same_memory_is_opened_by_another_process_of_the_node():
    segment, other = Segment.create(10), Segment.create(10)
    subprocess.run([sys.executable, '-c', OTHER,
                    *map(str, segment.place)], env=environment(),
                   check=True, timeout=300)
    assert bytes(segment.view(0, 4)) == b'abc\0'
    for fd in other.fd, 99999:
        assert Segment.open(segment.place._replace(fd=fd)) is None


@pytest.mark.parametrize('close', [True, False])
def test_memory_is_gone_with_the_last_that_refers_to_it(close):
    segment = Segment.create(5000)
    memory = {str(os.fstat(segment.fd).st_ino)}
    array = segment.array(0, (10,), numpy.int64)
    if close:
        segment.close()
    del segment
    array[:] = 3        # still there
    assert holders(memory) == {os.getpid()}
    del array
    assert not holders(memory)


HOLDER = """
import sys
import threading
from chainer_fp8pipe.images.segment import FileLock
with FileLock(int(sys.argv[1])):
    print('inside', flush=True)
    sys.stdin.readline()
"""


def test_one_process_waits_for_another():
    cache = Cache.create(1, 100)
    with subprocess.Popen(
            [sys.executable, '-c', HOLDER, str(cache.segment.fd)], text=True,
            pass_fds=[cache.segment.fd], env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == 'inside\n'
        thread = threading.Thread(target=put, args=(cache, 0, b'a'),
                                  daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        holder.stdin.write('\n')
        holder.stdin.flush()
        thread.join(300)
    assert get(cache, 0) == b'a'
