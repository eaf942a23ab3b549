"""How plans are run: frames, lengths, dtypes, and messages nobody buffers."""
import ctypes
import gc
import platform
import threading
import weakref

from chainer_fp8pipe.allreduce.bucket import Bucket
from chainer_fp8pipe.allreduce.executor import Framing, PlanExecutor
from chainer_fp8pipe.allreduce.plan import Plan, direct
from chainer_fp8pipe.codecs import Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.report.stream import EventStream

import numpy
import pytest
from mpi4py import MPI

from benchmarks.codec_updates import begin
from tests.ranks import on_ranks

from .helpers import (
    CODECS,
    begin_on,
    exchange,
    mean_and_spread,
    plans,
    tensors_of,
)
from .library import Silence, unbuffered

NAMES = ['direct', 'ring', 'torus', 'two_level_direct_ring']


def planned(name, comm, frame_bytes=256, frames_in_flight=2,
            form='float32'):
    return PlanExecutor(comm, plans(name, comm.size), EventStream(),
                        Framing(frame_bytes, frames_in_flight, form))


def coding_of(codec, tensors, prescale=1.0):
    return begin(codec.init(), tensors, prescale=prescale)


def bucket_of(codec, tensors, wire, start=0, stop=None, prescale=1.0,
              **options):
    coding = coding_of(codec, tensors, prescale)
    return Bucket(coding.state, tensors, wire, start, stop, coding, **options)


@pytest.mark.parametrize('name', NAMES)
@on_ranks(2, 4, 6)
def test_nothing_depends_on_messages_that_mpi_buffers(comm, name):
    for sizes in ([5000], [1], [7]):
        for codec in CODECS.values():
            with unbuffered():
                made = planned(name, comm)
            _, result = exchange(made, codec(), comm,
                                 tensors_of(comm.rank, sizes))
            mean, magnitude = mean_and_spread(comm.size, sizes)
            assert abs(result - mean).max() <= 0.5 * magnitude.max()


@pytest.mark.parametrize('frame_bytes', [4, 1000, 1 << 60])
@pytest.mark.parametrize('frames_in_flight', [1, 3, 100])
@pytest.mark.parametrize('name', NAMES)
@on_ranks(4)
def test_frames_do_not_change_a_bit(comm, name, frame_bytes,
                                    frames_in_flight):
    results = [exchange(planned(name, comm, *framing), Fp8Ratio().init(), comm,
                        tensors_of(comm.rank, [1003, 1, 400]))[1]
               for framing in ((256, 2), (frame_bytes, frames_in_flight))]
    numpy.testing.assert_array_equal(*results)


@pytest.mark.parametrize('name', NAMES)
@on_ranks(3, 8)
def test_a_million_elements(comm, name):
    size = 1000003
    gradient = numpy.random.default_rng(comm.rank).normal(
        0, 1, size).astype(numpy.float32)
    mean = comm.allreduce(gradient.astype(float)) / comm.size
    tensors = Tensors(['/l0'], [gradient], [gradient])
    _, result = exchange(planned(name, comm, 1 << 16, 8),
                         Cast('float32').init(), comm, tensors)
    numpy.testing.assert_allclose(result, mean, rtol=0, atol=1e-6)


@on_ranks(4)
def test_a_part_of_the_vector_leaves_the_rest_alone(comm):
    made = planned('ring', comm)
    tensors = tensors_of(comm.rank, [1000])
    coding = coding_of(Cast('float32'), tensors)
    mean = comm.allreduce(tensors.gradients[0].astype(float)) / comm.size
    wire = tensors.gradients[0] * numpy.float32(made.prescale(coding.codec))
    before = wire.copy()
    made.allreduce(coding, wire, 100, 700)
    numpy.testing.assert_array_equal(wire[:100], before[:100])
    numpy.testing.assert_array_equal(wire[700:], before[700:])
    numpy.testing.assert_allclose(wire[100:700], mean[100:700], rtol=0,
                                  atol=1e-6)


@on_ranks(4)
def test_several_jobs_are_under_way_at_the_same_time(comm):
    made = planned('direct', comm)
    jobs = []
    for number in range(5):
        tensors = tensors_of(comm.rank, [3000], seed=number)
        wire = tensors.gradients[0] / numpy.float32(comm.size)
        jobs.append(made.submit(bucket_of(Cast('float32'), tensors, wire)))
        made.advance()
    while made.busy:
        made.advance()
    for number, job in enumerate(jobs):
        assert job.finished
        mean, _ = mean_and_spread(comm.size, [3000], seed=number)
        numpy.testing.assert_allclose(job.wire, mean, rtol=0, atol=1e-6)


@on_ranks(2)
def test_no_chunk_is_further_ahead_than_the_frames_in_flight(comm):
    """Or its tag might be that of one that is late."""
    # The third chunk never ends, the others do at once.
    library = Silence(lambda kind, rank, tag: tag != 2)
    with library.used():
        made = planned('direct', comm, frame_bytes=4, frames_in_flight=5)
    wire = numpy.zeros(1000, numpy.float32)
    made.submit(bucket_of(Cast('float32'), tensors_of(0, [1000]), wire))
    for _ in range(50):
        made.advance()
    assert {tag for _, _, tag in library.started} == set(range(2 + 5))
    assert made.busy


@on_ranks(2)
def test_an_error_of_mpi_is_raised(comm):
    library = Silence(lambda *_: False)
    with library.used():
        made = planned('direct', comm)
    library.error = MPI.ERR_TRUNCATE
    wire = numpy.zeros(1000, numpy.float32)
    made.submit(bucket_of(Cast('float32'), tensors_of(0, [1000]), wire))
    with pytest.raises(MPI.Exception) as raised:
        made.run()
    assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE


@on_ranks(2)
def test_work_returns_when_time_is_over_or_somebody_interrupts_it(comm):
    with Silence(lambda *_: False).used():
        made = planned('direct', comm)
    assert not made.work(100)      # there is nothing to do
    wire = numpy.zeros(1000, numpy.float32)
    made.submit(bucket_of(Cast('float32'), tensors_of(0, [1000]), wire))
    assert made.work(0)            # messages have been started
    assert not made.work(0)
    made.interrupt()               # also before the call
    assert not made.work(100)
    threading.Timer(0.05, made.interrupt).start()
    assert not made.work(100)
    assert made.busy


@on_ranks(2)
def test_a_range_that_is_not_in_the_wire_is_an_error(comm):
    made = planned('direct', comm)
    tensors = tensors_of(0, [100])
    for size, start, stop, encodes in [
            (10, 0, 12, False), (10, -1, 5, False), (10, 6, 5, False),
            (120, 0, 120, True)]:
        wire = numpy.zeros(size, numpy.float32)
        with pytest.raises(ValueError, match='not in a wire'):
            made.submit(bucket_of(Cast('float32'), tensors, wire, start,
                                  stop, encodes=encodes))


@on_ranks(1, 2)
def test_a_finished_job_is_given_up_at_once(comm):
    """Gradients of every update wait for no garbage collector."""
    made = planned('direct', comm)
    for codec in CODECS.values():
        used = codec()
        tensors = tensors_of(0, [1000])
        coding = begin(used, tensors)
        job = Bucket(used, tensors, numpy.zeros(
            1000, used.codec.wire_dtype), coding=coding, encodes=True,
            decodes=True)
        made.allreduce(coding, job.wire, 0, 1000)
        made.submit(job)
        made.run()
        watched = weakref.ref(job)
        gc.disable()
        try:
            del job
            assert watched() is None
        finally:
            gc.enable()


@on_ranks(2)
def test_work_returns_in_time_while_there_is_always_something_to_do(comm):
    with Silence(lambda *_: True).used():
        made = planned('direct', comm, frame_bytes=4)
    wire = numpy.zeros(1000, numpy.float32)
    job = made.submit(bucket_of(Cast('float32'), tensors_of(0, [1000]), wire))
    assert made.work(0)
    assert not job.finished
    made.run()
    assert job.finished


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('codec', CODECS)
@on_ranks(1, 2, 4)
def test_frames_are_encoded_as_they_start_and_decoded_as_they_end(
        comm, name, codec):
    """With the bits of a vector that is encoded and decoded as a whole."""
    sizes = [1000, 0, 2037]
    results = []
    for whole in (True, False):
        made = planned(name, comm, frame_bytes=64)
        used = CODECS[codec]()
        tensors = tensors_of(comm.rank, sizes)
        before = numpy.concatenate(tensors.gradients)
        wire = numpy.zeros(3037, used.codec.wire_dtype)
        coding = begin_on(comm, used, tensors, made.prescale(used.codec))
        if whole:
            coding.encode(wire)
            made.allreduce(coding, wire, 0, 3037)
            coding.decode(wire)
        else:
            made.submit(Bucket(used, tensors, wire, coding=coding,
                               encodes=True, decodes=True))
            made.advance()
            # Some of them have not been looked at.
            numpy.testing.assert_array_equal(
                numpy.concatenate(tensors.gradients)[-1:], before[-1:])
            made.run()
            assert coding.nonfinite == []
            assert not wire.any()       # its memory is not even touched
        results.append(numpy.concatenate(tensors.gradients))
    numpy.testing.assert_array_equal(*results)


@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('later', [False, True])
@on_ranks(1, 2, 3)
def test_it_says_once_of_every_range_that_its_mean_is_there(
        comm, codec, later):
    """And what it says so of is the mean already."""
    made, used = planned('ring', comm, frame_bytes=64), CODECS[codec]()
    tensors = tensors_of(comm.rank, [1000, 0, 2037])
    coding = begin_on(comm, used, tensors, made.prescale(used.codec))
    job = made.submit(Bucket(
        used, tensors, numpy.zeros(3037, used.codec.wire_dtype),
        coding=coding, encodes=True, decodes=not later))
    counts = numpy.zeros(3037, int)
    early = numpy.full(3037, numpy.nan, 'f4')
    told = 0
    while True:
        made.work(0)
        gradients = numpy.concatenate(tensors.gradients)
        for start, stop in job.decoded()[told:]:
            counts[start:stop] += 1
            early[start:stop] = gradients[start:stop]
        told = len(job.decoded())
        if later and made.busy is False:
            assert not counts.any()
            later = False
            made.begin_decoding(job)
        elif job.finished:
            break
    assert (counts == 1).all()
    numpy.testing.assert_array_equal(
        early, numpy.concatenate(tensors.gradients))


@on_ranks(3, timeout=60)
def test_messages_of_neighbours_are_used_in_any_order(comm):
    """One plan waits for rank 2, another one goes on without it."""
    pair, whole = direct(2), direct(3)
    pair = Plan('of two', 3, 3, 2, (*pair.reduce, ()), (*pair.owned, ()), 2,
                (*pair.gather, ()))
    made = PlanExecutor(comm, (whole, pair), EventStream(), Framing(16, 2))
    tensors = tensors_of(comm.rank, [4000])
    wire = tensors.gradients[0] / numpy.float32(3)
    mean, _ = mean_and_spread(3, [4000])
    made.submit(bucket_of(Cast('float32'), tensors, wire))
    if comm.rank < 2:
        last, half = wire[-1], None
        while wire[-1] == last or half != wire[1999]:
            half = wire[1999]
            made.advance()
        assert made.busy
    comm.Barrier()
    made.run()
    numpy.testing.assert_allclose(wire[:2000], mean[:2000], rtol=0, atol=1e-6)


@on_ranks(2)
def test_what_is_under_way_is_never_freed(comm):
    """Nor what the threads read that encode and decode."""
    with Silence(lambda *_: False).used():
        made = planned('direct', comm)
    for codec in CODECS.values():
        used, tensors = codec(), tensors_of(comm.rank, [1000])
        job = Bucket(
            used, tensors, numpy.zeros(1000, used.codec.wire_dtype),
            coding=begin_on(comm, used, tensors, made.prescale(used.codec)),
            encodes=True, decodes=True)
        made.submit(job)
        made.work(0)
        kept = [weakref.ref(array) for array in (
            *tensors.gradients, *tensors.parameters)]
        wire = weakref.ref(job.wire)
        del job, tensors
    del made, used
    gc.collect()
    assert wire() is not None
    assert all(array() is not None for array in kept)


@on_ranks(2)
def test_a_second_thread_at_the_same_time_is_an_error(comm):
    with Silence(lambda *_: False).used():
        made = planned('direct', comm)
    made.submit(bucket_of(Cast('float32'), tensors_of(0, [10]),
                          numpy.zeros(10, numpy.float32)))
    thread = threading.Thread(target=made.work, args=(1.0,))
    thread.start()
    raised = False
    while thread.is_alive() and not raised:
        try:
            made.advance()
        except RuntimeError as error:
            raised = 'two threads' in str(error)
    thread.join()
    assert raised


@pytest.mark.skipif(platform.machine() != 'x86_64',
                    reason='the mode is set in a way of x86-64')
@pytest.mark.parametrize('threads', [1, 3])
@on_ranks(2)
def test_a_mode_of_the_processor_that_loses_denormal_numbers_does_no_harm(
        comm, threads):
    """Some libraries set it, maybe on one rank only."""
    made = PlanExecutor(comm, plans('ring', 2), EventStream(), Framing(
        64, 4, threads=threads))
    gradient = numpy.full(1000, 2e-41, numpy.float32)
    tensors = Tensors(['/l0'], [gradient], [gradient])
    made.submit(bucket_of(
        Cast('float32'), tensors, numpy.zeros(1000, numpy.float32),
        prescale=0.5, encodes=True, decodes=True))
    library, mode = ctypes.CDLL(None), ctypes.create_string_buffer(32)
    library.fegetenv(mode)
    before = mode.raw
    control = ctypes.c_uint.from_buffer(mode, 28)
    if comm.rank:
        control.value |= 0x8040
        library.fesetenv(mode)
    try:
        made.run()
    finally:
        library.fesetenv(before)
    assert (gradient == numpy.float32(2e-41)).all()


@on_ranks(3)
def test_tensors_that_are_not_finite_are_named_after_the_last_frame(comm):
    tensors = tensors_of(comm.rank, [500, 500, 500])
    if comm.rank == 1:
        tensors.gradients[0][77] = numpy.nan
        tensors.gradients[2][400] = numpy.inf
    made = planned('ring', comm)
    job = made.submit(bucket_of(
        Cast('float32'), tensors, numpy.empty(1500, numpy.float32),
        prescale=1 / 3, encodes=True, decodes=True))
    made.run()
    assert job.coding.nonfinite == ['/l0', '/l2']
    assert job.state.nonfinite == (
        ['the gradient of /l0', 'the gradient of /l2'] if comm.rank == 1
        else [])
