"""Samples and their cache, in one process and in several."""
import os
import pickle
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

from chainer_fp8pipe.images.decoding import ImageError, create_decoder
from chainer_fp8pipe.images.memory import Segment
from chainer_fp8pipe.images.reading import Cache, Reader, find_images

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import run_script, start_script

from .folders import crop, make_folder, spoil
from .pictures import jpeg, photograph
from .processes import holders

every_kind = pytest.mark.parametrize('kind', [None, 'memory', 'decoded'])


def reader(root, kind=None, budget=10 ** 6, seed=5):
    table = find_images(str(root))
    cache = None if kind is None else Cache.create(len(table), budget)
    return Reader(table, crop(), create_decoder('pillow'), kind, cache, seed)


def read(source, sample, epoch=0):
    out = numpy.zeros((3, 8, 8), numpy.uint8)
    source.read(sample, epoch, out)
    return out


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root')


def test_random_numbers_depend_on_seed_epoch_and_sample_alone(root):
    one, other = reader(root), reader(root)
    first = read(one, 3, 2)
    read(one, 4, 2)
    read(other, 7, 0)
    assert (read(other, 3, 2) == first).all()
    assert (read(one, 3, 1) != first).any()
    assert (read(reader(root, seed=6), 3, 2) != first).any()
    # Red is the sample's number, green and blue its crop.
    assert (read(one, 4, 2)[1:] != first[1:]).any()


@pytest.mark.parametrize('kind', ['memory', 'decoded'])
def test_a_cached_sample_is_read_without_its_file_and_others_from_theirs(
        root, kind):
    plain = reader(root)
    source = reader(root, kind, 2 * reader(root, kind).kept_bytes(0) + 32)
    expected = [[read(plain, sample, epoch) for sample in range(12)]
                for epoch in range(3)]
    for epoch in range(2):
        assert numpy.array_equal([read(source, sample, epoch)
                                  for sample in range(12)], expected[epoch])
    assert source.cache.statistics()[0] == 2
    for sample in range(12):
        os.remove(source.table.path(sample))
    assert (read(source, 1, 2) == expected[2][1]).all()
    for of, sample in (source, 5), (plain, 1):
        with pytest.raises(FileNotFoundError):
            read(of, sample)


def test_pixels_do_not_depend_on_what_the_cache_has_room_for(tmp_path):
    os.makedirs(tmp_path / 'class')
    (tmp_path / 'class' / 'photograph.jpg').write_bytes(jpeg(photograph()))
    full, ample = reader(tmp_path, 'decoded', 10), reader(tmp_path, 'decoded')
    ways = [[read(source, 0, epoch) for epoch in range(2)]
            for source in (full, ample, reader(tmp_path),
                           reader(tmp_path, 'memory'))]
    assert [of.cache.statistics()[0] for of in (full, ample)] == [0, 1]
    assert numpy.array_equal(ways[0], ways[1])
    assert numpy.array_equal(ways[2], ways[3])
    # A decoder that is asked for a part alone shrinks it otherwise.
    assert not numpy.array_equal(ways[0], ways[2])


class SizeAndDecode:
    """A user's decoder."""

    def __init__(self):
        decoder = create_decoder('pillow')
        self.size, self.decode = decoder.size, decoder.decode


@every_kind
def test_a_users_decoder_needs_size_and_decode_only(root, kind):
    source, plain = reader(root, kind), reader(root)
    source.decoder = SizeAndDecode()
    for _ in range(2):
        assert (read(source, 3) == read(plain, 3)).all()


@every_kind
def test_without_a_transform_it_is_the_whole_image(root, kind):
    source = reader(root, kind)
    source.transform = None
    for _ in range(2):
        image = source.draw(4, numpy.random.default_rng(0))
        assert (image.shape, image.dtype) == ((3, 24, 20), numpy.uint8)
        assert (image[0] == 4).all()
        assert image.flags.c_contiguous


@every_kind
def test_an_error_names_the_file_and_can_be_sent(root, kind):
    source = reader(root, kind)
    path = source.table.path(3)
    spoil(path)
    for _ in range(2):
        with pytest.raises(ImageError) as caught:
            read(source, 3)
        error = pickle.loads(pickle.dumps(caught.value))
        assert str(error) == f'{path}: {error.reason}'
        assert error.path == path


# --- the cache

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
    cache.segment.close()
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
    assert [get(cache, index) for index in range(len(sizes))] == [
        kept.get(index) for index in range(len(sizes))]
    assert cache.statistics() == (len(kept), sum(map(len, kept.values())))
    cache.segment.close()


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


def child(code, segment, *arguments, **options):
    """A process that has a cache of 400 samples in some memory."""
    return start_script(
        0, '-c', 'import os, sys, numpy\n'
        'from chainer_fp8pipe.images.memory import Segment\n'
        'from chainer_fp8pipe.images.reading import Cache\n'
        'cache = Cache(Segment(int(sys.argv[1])), 400)\n' + code,
        segment.fd, *arguments, pass_fds=[segment.fd], **options)


def test_processes_that_fill_a_cache_together_do_not_mix_their_samples():
    cache = Cache.create(400, 10 ** 6)
    writers = [child(
        'for index in range(400):\n'
        '    cache.put(index * int(sys.argv[2]) % 400, numpy.frombuffer(\n'
        '        b"%d," % index * 50, numpy.uint8))',
        cache.segment, step) for step in (1, 3, 7)]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0]
    for index in range(400):
        number = get(cache, index).partition(b',')[0]
        assert get(cache, index) == (number + b',') * 50
    assert cache.statistics()[0] == 400


def test_one_process_waits_for_another_and_goes_on_when_that_is_killed():
    cache = Cache.create(400, 1000)
    with child('with cache._locked():\n'
               '    print(flush=True)\n'
               '    sys.stdin.readline()', cache.segment,
               stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == '\n'
        thread = threading.Thread(target=put, args=(cache, 0, b'a'),
                                  daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        holder.kill()
        thread.join(300)
    assert get(cache, 0) == b'a'


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
    cache._threads.acquire()        # as another thread of the parent
    pid = os.fork()
    if not pid:
        os._exit(not put(cache, 0, b'child'))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    cache._threads.release()
    assert get(cache, 0) == b'child'


# --- the shared memory that holds it

def test_memory_is_not_taken_before_it_is_written():
    cache = Cache.create(10, 1 << 30)
    put(cache, 0, b'x' * 5000)
    # A kernel may take a huge page, and none takes all.
    assert os.fstat(cache.segment.fd).st_blocks * 512 < 1 << 29


def test_only_the_same_memory_is_opened_by_another_process_of_the_node():
    segment, other = Segment.create(10), Segment.create(10)
    run_script(0, '-c', 'import sys\n'
               'from chainer_fp8pipe.images.memory import Segment\n'
               'segment = Segment.open(tuple(map(int, sys.argv[1:])))\n'
               'segment.array(0, (3,), "u1")[:] = 97, 98, 99',
               *segment.place, check=True)
    assert segment.array(0, (4,), 'u1').tobytes() == b'abc\0'
    pid, _, *file = segment.place
    for fd in other.fd, 99999:
        assert Segment.open((pid, fd, *file)) is None


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
