"""How buckets are submitted and plans run: frames, errors, and memory."""
import ctypes
import gc
import platform
import threading
import weakref

from chainer_fp8pipe.allreduce.engine import Bucket
from chainer_fp8pipe.allreduce.mpi_op import MpiOp
from chainer_fp8pipe.codecs import Cast, Tensors
from chainer_fp8pipe.report.stream import EventStream

import numpy
import pytest
from mpi4py import MPI

from tests.codecs.helpers import CODECS
from tests.ranks import on_ranks

from .helpers import bucket_of, exchange, make, mean_of, tensors_of
from .library import Silence

FLOAT = Cast('float32')


@on_ranks(1, 2, 4)
def test_a_plan_of_ones_own_gives_the_mean(comm):
    made, state = make('tree', comm), FLOAT.init()
    for sizes in [1000, 0, 2037], [1], [3]:
        found = exchange(made, state, tensors_of(comm.rank, sizes))
        numpy.testing.assert_allclose(
            found, mean_of(comm.size, sizes), rtol=0, atol=1e-6)
        assert len(set(comm.allgather(found.tobytes()))) == 1


@pytest.mark.skipif(platform.machine() != 'x86_64',
                    reason='needs x86-64, whose MXCSR has the mode')
@on_ranks(2)
def test_a_mode_of_the_processor_that_loses_denormal_numbers_does_no_harm(
        comm):
    """Some libraries set it, maybe on one rank only."""
    made = make('ring', comm, frame_bytes=64)
    gradient = numpy.full(1000, 2e-41, numpy.float32)
    made.submit(bucket_of(FLOAT, Tensors(['/l0'], [gradient], [gradient]),
                          prescale=0.5, encodes=True, decodes=True))
    library, mode = ctypes.CDLL(None), ctypes.create_string_buffer(32)
    library.fegetenv(mode)
    before = mode.raw
    control = ctypes.c_uint.from_buffer(mode, 28)
    if comm.rank:
        control.value |= 0x8040
        library.fesetenv(mode)
    try:
        made.finish_all()
    finally:
        library.fesetenv(before)
    assert (gradient == numpy.float32(2e-41)).all()


# --- waiting, and what goes wrong --------------------------------------------

def silent(comm, through, **framing):
    library = Silence(through)
    with library.used():
        return library, make('direct', comm, **framing)


def submitted(made, size=1000):
    return made.submit(bucket_of(FLOAT, tensors_of(0, [size])))


@on_ranks(2)
def test_no_chunk_is_further_ahead_than_the_frames_in_flight(comm):
    """Or its tag might be that of one that is late."""
    # The third chunk never ends, the others do at once.
    library, made = silent(comm, lambda kind, rank, tag: tag != 2,
                           frame_bytes=4, frames_in_flight=5)
    submitted(made)
    for _ in range(50):
        made.work()
    assert {tag for _, _, tag in library.started} == set(range(2 + 5))
    assert not made.idle
    # Whoever watches is told what it waits for, and from whom.
    (wait, *_) = made.waits()
    assert 'frame 2 of bucket 0 (/l0)' in wait.text
    assert wait.ranks == tuple(comm.Get_group().Translate_ranks(
        [1 - comm.rank], MPI.COMM_WORLD.Get_group()))


@on_ranks(2)
def test_an_error_of_mpi_is_raised_and_nothing_goes_on(comm):
    library, made = silent(comm, lambda *_: False)
    library.error = MPI.ERR_TRUNCATE
    submitted(made)
    with pytest.raises(MPI.Exception) as raised:
        made.finish_all()
    assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
    with pytest.raises(RuntimeError, match='half done'):
        made.work()


@on_ranks(2)
def test_work_returns_when_time_is_over_or_somebody_interrupts_it(comm):
    _, made = silent(comm, lambda *_: False)
    assert not made.work(100)      # there is nothing to do
    submitted(made)
    assert made.work(0)            # messages have been started
    assert not made.work(0)
    made.interrupt()               # also before the call
    assert not made.work(100)
    threading.Timer(0.05, made.interrupt).start()
    assert not made.work(100)
    assert not made.idle
    # Also while there is always something to do.
    _, made = silent(comm, lambda *_: True, frame_bytes=4)
    bucket = submitted(made)
    assert made.work(0)
    assert not bucket.finished
    made.finish(bucket)
    assert bucket.finished


@on_ranks(2)
def test_a_wire_of_another_length_is_an_error(comm):
    made, tensors = make('direct', comm), tensors_of(0, [100])
    for size in 99, 101:
        made.submit(bucket_of(FLOAT, tensors, numpy.zeros(size, 'f4'),
                              encodes=True))
        with pytest.raises(ValueError, match='100 entries are not in a wire'):
            made.work()


class Broken(Cast):
    """Fails when a bucket is launched."""

    def step(self, *arguments):
        raise ZeroDivisionError('so it goes')


def test_nobody_waits_for_a_bucket_that_was_not_launched():
    values = [numpy.ones(3, 'f4')]
    made = MpiOp(MPI.COMM_SELF, EventStream())
    bucket = made.submit(Bucket(
        Broken('float32').init(), Tensors('a', values, values),
        numpy.zeros(3, 'f4')))
    with pytest.raises(ZeroDivisionError):
        made.work()
    with pytest.raises(RuntimeError, match=r'bucket 0 \(a\) could not be'):
        made.finish(bucket)
    made.free()


# --- memory ------------------------------------------------------------------

@on_ranks(2)
def test_a_bucket_is_freed_once_it_is_finished_and_never_before(comm):
    """Gradients of every update wait for no garbage collector."""
    for codec in CODECS.values():
        made, watched = make('direct', comm), []
        for ends in True, False:
            if not ends:
                _, made = silent(comm, lambda *_: False)
            tensors = tensors_of(0, [1000], grain=codec.grain)
            bucket = made.submit(bucket_of(
                codec, tensors, encodes=True, decodes=True))
            if ends:
                made.finish_all()
            else:
                made.work(0)
            watched.append([weakref.ref(one) for one in (
                bucket, bucket.wire, *tensors.gradients,
                *tensors.parameters)])
            gc.disable()
            del bucket, tensors
            try:
                assert (watched[-1][0]() is None) == ends
            finally:
                gc.enable()
        del made
        gc.collect()
        assert all(one() is not None for one in watched[-1])
