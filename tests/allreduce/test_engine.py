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

from tests.ranks import on_ranks

from .helpers import (
    CODECS,
    average,
    begin_on,
    bucket_of,
    make,
    mean_and_spread,
    tensors_of,
)
from .library import Silence

NAMES = ['direct', 'ring', 'torus2d', 'ring two']
FLOAT = Cast('float32')


@on_ranks(4)
def test_several_buckets_are_under_way_at_the_same_time(comm):
    """Of any size: those that need more memory come after others."""
    made, buckets = make('direct', comm), []
    sizes = [3000, 10, 20_000, 500, 3000]
    for number, size in enumerate(sizes):
        tensors = tensors_of(comm.rank, [size], seed=number)
        wire = tensors.gradients[0] / numpy.float32(comm.size)
        buckets.append(made.submit(bucket_of(FLOAT, tensors, wire)))
        made.work()
    while not made.idle:
        made.work()
    for number, (size, bucket) in enumerate(zip(sizes, buckets, strict=True)):
        assert bucket.finished
        mean, _ = mean_and_spread(comm.size, [size], seed=number)
        numpy.testing.assert_allclose(bucket.wire, mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('codec', CODECS)
@on_ranks(1, 2, 4)
def test_frames_are_encoded_as_they_start_and_decoded_as_they_end(
        comm, name, codec):
    """With the bits of a vector that is encoded and decoded as a whole."""
    results = []
    for whole in (True, False):
        made = make(name, comm, frame_bytes=64)
        used = CODECS[codec]()
        tensors = tensors_of(comm.rank, [1000, 0, 2037])
        before = numpy.concatenate(tensors.gradients)
        wire = numpy.zeros(3037, used.codec.wire_dtype)
        coding = begin_on(comm, used, tensors, made.sums(used.codec).prescale)
        if whole:
            coding.encode(wire)
            average(made, coding, wire)
            coding.decode(wire)
        else:
            made.submit(Bucket(used, tensors, wire, encodes=True,
                               decodes=True))
            made.work()
            # Some of them have not been looked at.
            numpy.testing.assert_array_equal(
                numpy.concatenate(tensors.gradients)[-1:], before[-1:])
            made.finish_all()
            assert coding.nonfinite == []
            assert not wire.any()       # its memory is not even touched
        results.append(numpy.concatenate(tensors.gradients))
    numpy.testing.assert_array_equal(*results)


@pytest.mark.parametrize('codec', CODECS)
@on_ranks(1, 3)
def test_means_that_have_come_are_decoded_later_into_other_arrays(
        comm, codec):
    """Until then gradients are as they were."""
    found = []
    for later in (False, True):
        made, used = make('ring', comm, frame_bytes=64), CODECS[codec]()
        tensors = tensors_of(comm.rank, [1000, 0, 2037])
        before = [gradient.copy() for gradient in tensors.gradients]
        begin_on(comm, used, tensors, made.sums(used.codec).prescale)
        bucket = made.submit(Bucket(
            used, tensors, numpy.zeros(3037, used.codec.wire_dtype),
            encodes=True, decodes=not later))
        made.finish(bucket)
        if later:
            for gradient, kept in zip(tensors.gradients, before, strict=True):
                numpy.testing.assert_array_equal(gradient, kept)
            tensors.decode_into(before)
        assert bucket.decode() == []
        found.append(numpy.concatenate(bucket.tensors.gradients))
    numpy.testing.assert_array_equal(*found)


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

@on_ranks(1, 2)
def test_a_finished_bucket_is_given_up_at_once(comm):
    """Gradients of every update wait for no garbage collector."""
    made = make('direct', comm)
    for codec in CODECS.values():
        bucket = bucket_of(codec().codec, tensors_of(0, [1000]),
                           encodes=True, decodes=True)
        made.submit(bucket)
        made.finish_all()
        watched = weakref.ref(bucket)
        gc.disable()
        try:
            del bucket
            assert watched() is None
        finally:
            gc.enable()


@on_ranks(2)
def test_what_is_under_way_is_never_freed(comm):
    _, made = silent(comm, lambda *_: False)
    for codec in CODECS.values():
        tensors = tensors_of(comm.rank, [1000])
        bucket = bucket_of(codec().codec, tensors, encodes=True, decodes=True)
        made.submit(bucket)
        made.work(0)
        kept = [weakref.ref(array) for array in (
            *tensors.gradients, *tensors.parameters, bucket.wire)]
        del bucket, tensors
    del made
    gc.collect()
    assert all(array() is not None for array in kept)
