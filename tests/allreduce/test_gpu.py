"""Gradients on a GPU meet in the node's memory, with the bits of the CPU.

The GPU is a stand-in, but for the tests that are marked.
"""
import contextlib
import gc
import warnings

from chainer_fp8pipe.allreduce.engine import Bucket
from chainer_fp8pipe.allreduce.memory import node_memory
from chainer_fp8pipe.codecs import BlockScaled, Cast, Fp8Ratio, Tensors

import numpy
import pytest

from tests.codecs import fake_cupy
from tests.exchange.jobs import exchange_of
from tests.ranks import on_ranks

from .helpers import bits, make, spoiled, tensors_of

SIZES = [1000, 0, 3, 2037]
CODECS = {
    'float32': lambda: Cast('float32'), 'float16': lambda: Cast('float16'),
    'fp8': lambda: Fp8Ratio(period=2, headroom=1.0),
    'fp8 without feedback': lambda: Fp8Ratio(error_feedback=False),
    'stochastic': lambda: Fp8Ratio(rounding='stochastic'),
    'truncate': lambda: Fp8Ratio(rounding='truncate'),
    'int4': BlockScaled, 'e2m1': lambda: BlockScaled('e2m1'),
    'int5 without feedback': lambda: BlockScaled('int5', False)}
PLANS = 'direct', 'ring', 'torus', 'two_level_direct_ring'


@contextlib.contextmanager
def stand_in():
    """CuPy's, and what puts arrays there; memory is locked by it only."""
    with fake_cupy.installed() as cupy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_memory(), 'refused', False)
        yield cupy, fake_cupy.ndarray
        gc.collect()
        assert not cupy.cuda.runtime.registered


@contextlib.contextmanager
def graphics_card():
    """CuPy, and what puts arrays there."""
    import cupy
    yield cupy, cupy.asarray


@contextlib.contextmanager
def host():
    yield numpy, numpy.asarray


class Job:
    """A model's exchanges, as a communicator carries them out.

    Args:
        comm: The ranks.
        name: Of the plans.
        form: What partial sums travel in.
        codec: Of the model.
        framing: More of it.
    """

    def __init__(self, comm, name, form, codec, **framing):
        self.algorithm = make(f'{name}_{form}', comm,
                              **{'frame_bytes': 300, **framing})
        self.state = exchange_of(codec)
        self.state.queue = self.algorithm

    def update(self, tensors):
        """Makes gradients their mean; returns the bucket."""
        kept = self.state.codec_state
        codec = kept.codec
        codec.begin(kept, 1.0)
        bucket = Bucket(kept, tensors, self.state.wire(
            0, tensors.xp, tensors.size), decodes=True)
        self.algorithm.finish(self.algorithm.submit(bucket))
        self.found = bucket.decode()
        return bucket

    def close(self):
        self.algorithm.free()
        self.state.release()


def moved(tensors, to):
    return Tensors(tensors.names, list(map(to, tensors.gradients)),
                   list(map(to, tensors.parameters)), grain=tensors.grain)


def back(array):
    return array if isinstance(array, numpy.ndarray) else array.get()


def results(comm, place, name, form, make_codec, kind='normal', sizes=SIZES,
            **framing):
    """All that three updates leave behind; and the last bucket."""
    with place() as (_, to), numpy.errstate(all='ignore'):
        codec, found = make_codec(), []
        job = Job(comm, name, form, codec, **framing)
        for number in range(3):
            tensors = moved(spoiled(tensors_of(
                comm.rank, sizes, number, codec.grain), comm.rank, kind), to)
            bucket = job.update(tensors)
            found += [*map(back, tensors.gradients), job.found,
                      not job.found or bucket.wire_is_finite,
                      sorted(job.state.codec_state.nonfinite)]
        state = job.state.codec_state.save()
        found += [state[key] for key in sorted(state)]
        if isinstance(codec, Fp8Ratio):
            found.append(codec.report(job.state.codec_state))
        job.close()
        del bucket      # it has a wire
    return found


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, numpy.ndarray):
            numpy.testing.assert_array_equal(bits(one), bits(other))
        else:
            assert one == other


def check(comm, place, name, form, codec, kind='normal', **framing):
    """Compares with the CPU."""
    if form == 'wire' and CODECS[codec]().grain > 1:
        return      # no sums of records; options refuse it
    assert_same(
        results(comm, place, name, form, CODECS[codec], kind, **framing),
        results(comm, host, name, form, CODECS[codec], kind))


@pytest.mark.parametrize('codec', CODECS)
@on_ranks(1, 4)
def test_means_residuals_and_reports_are_those_of_the_cpu(comm, codec):
    for name, form, kind, framing in [
            ('direct', 'float32', 'extreme', {'threads': 3}),
            ('direct', 'wire', 'nonfinite', {'shared_memory': False}),
            ('ring', 'float16', 'normal', {}),
            ('torus', 'float32', 'nonfinite', {}),
            ('two_level_direct_ring', 'wire', 'normal', {})]:
        check(comm, stand_in, name, form, codec, kind, **framing)


@pytest.mark.gpu
@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('name', PLANS)
@on_ranks(4)
def test_so_they_are_on_a_gpu(comm, name, codec, real):
    check(comm, graphics_card, name, 'float32', codec)
    check(comm, graphics_card, name, 'float32', codec, shared_memory=False)


@on_ranks(2)
def test_a_wire_crosses_once_to_the_shared_memory_and_once_back(comm):
    """And nothing else does, but for the parameters of means."""
    with stand_in() as (cupy, to):
        runtime, codec = cupy.cuda.runtime, Cast('float16')
        job = Job(comm, 'direct', 'float32', codec)
        job.update(moved(tensors_of(comm.rank, SIZES), to))
        wire = job.state.wire(0, cupy, sum(SIZES))
        assert node_memory().holds(wire)
        assert runtime.holds(wire)
        at = wire.ctypes.data
        assert runtime.calls == [
            ('register', at), ('to host', at), ('to device', at)]
        runtime.calls.clear()
        job.update(moved(tensors_of(comm.rank, SIZES), to))
        assert runtime.calls == [('to host', at), ('to device', at)]
        runtime.calls.clear()
        del wire
        job.close()
        gc.collect()
        assert runtime.calls == [('unregister', at)]


@on_ranks(2)
def test_every_model_has_memory_of_its_own_until_it_is_gone_or_larger(comm):
    with stand_in() as (cupy, to):
        registered = cupy.cuda.runtime.registered
        job = Job(comm, 'direct', 'float32', Fp8Ratio())
        first, second = job.state, exchange_of(Fp8Ratio())
        second.queue = job.algorithm
        for seed, (state, sizes, expected) in enumerate([
                (first, [5000], [5000]), (second, [9000], [5000, 9000]),
                (first, [4000], [5000, 9000]), (first, [6000], [6000, 9000]),
                (second, [10, 20], [6000, 9000])]):
            job.state = state
            tensors = tensors_of(comm.rank, sizes, seed)
            moving = moved(tensors, to)
            job.update(moving)
            del moving
            gc.collect()
            assert sorted(registered.values()) == expected
        second.release()
        gc.collect()
        assert sorted(registered.values()) == [6000]
        job.state = first
        job.close()
        gc.collect()
        assert not registered


@pytest.mark.parametrize('name', PLANS)
@on_ranks(4)
def test_where_one_rank_cannot_register_all_get_the_same(comm, name):
    """It warns once, and copies as before."""
    with stand_in() as (cupy, to), warnings.catch_warnings(
            record=True) as warned:
        warnings.simplefilter('always')
        cupy.cuda.runtime.refuses = comm.rank == 1
        job = Job(comm, name, 'float32', Fp8Ratio())
        for number, sizes in enumerate((SIZES, [70_000])):
            tensors = moved(tensors_of(comm.rank, sizes, number), to)
            job.update(tensors)
            means = [back(one).tobytes() for one in tensors.gradients]
            assert len(set(map(tuple, comm.allgather(means)))) == 1
        assert len(warned) == (comm.rank == 1)
        assert all('ulimit -l' in str(one.message) for one in warned)
        job.close()


@on_ranks(2, 4)
def test_of_parameters_only_those_cross_whose_means_a_rank_makes(comm):
    with stand_in() as (cupy, to):
        copied = []
        job = Job(comm, 'direct', 'float32', Fp8Ratio())
        tensors = moved(tensors_of(comm.rank, SIZES), to)
        get = fake_cupy.ndarray.get

        def note(array, out=None):
            if out is not None and out.dtype == numpy.float32:
                copied.append(out.size)
            return get(array, out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_cupy.ndarray, 'get', note)
            job.update(tensors)
        assert comm.allreduce(sum(copied)) == sum(SIZES)
        assert max(comm.allgather(sum(copied))) <= sum(SIZES) // comm.size + 1
        job.close()


def bytes_for_chunks(comm, name, refuses):
    """Of node memory, beside wires, in an update of 100,000 elements."""
    asked = []
    with stand_in() as (cupy, to), pytest.MonkeyPatch.context() as patch:
        cupy.cuda.runtime.refuses = refuses
        empty = node_memory().empty

        def note(nbytes):
            asked.append(nbytes)
            return empty(nbytes)
        patch.setattr(node_memory(), 'empty', note)
        job = Job(comm, name, 'wire', Cast('float32'), frame_bytes=1 << 20)
        wire = job.state.wire(0, cupy, 100_000)
        assert node_memory().holds(wire) != refuses
        asked.clear()
        job.update(moved(tensors_of(comm.rank, [100_000]), to))
        del wire
        job.close()
    return sum(asked)


@pytest.mark.filterwarnings('ignore:CUDA cannot register')
@pytest.mark.parametrize('name', ['direct', 'ring', 'two_level_direct_ring'])
@on_ranks(4)
def test_neighbours_read_what_the_gpu_has_written_where_it_lies(comm, name):
    """Sums are made in the wire: chunks need memory for messages only."""
    assert bytes_for_chunks(comm, name, refuses=True) > 200_000
    assert bytes_for_chunks(comm, name, refuses=False) < 4096
