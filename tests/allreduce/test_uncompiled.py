"""What is compiled, and what is done in Python instead, give the same bits."""
from chainer_fp8pipe.allreduce.bucket import Bucket
from chainer_fp8pipe.allreduce.executor import Framing, PlanExecutor
from chainer_fp8pipe.allreduce.sums import FORMS
from chainer_fp8pipe.codecs import Cast, Fp8Ratio
from chainer_fp8pipe.report.stream import EventStream

import numpy
import pytest
from mpi4py import MPI

from tests.codecs.helpers import begin
from tests.ranks import on_ranks

from .helpers import plans, tensors_of

SIZES = [1000, 0, 3, 2037]
OF_CODECS = {
    'float32': lambda: Cast('float32'),
    'nearest': lambda: Fp8Ratio(period=1),
    'truncate': lambda: Fp8Ratio(period=1, rounding='truncate'),
    'no feedback': lambda: Fp8Ratio(period=1, error_feedback=False),
    'clipping': lambda: Fp8Ratio(period=2, headroom=1.0)}


def spoiled(tensors, rank, kind):
    """Gradients and parameters that are hard to encode."""
    values = numpy.random.default_rng((rank, 7))
    first, last = tensors.gradients[0], tensors.gradients[-1]
    if kind == 'extreme':
        first *= 10.0 ** values.integers(-44, 38, first.size)
        first[values.integers(first.size, size=300)] = 0.0
        first[values.integers(first.size, size=300)] *= -0.0
    elif kind == 'nonfinite':
        first[5 + rank] = numpy.nan
        last[700 + 3 * rank] = numpy.inf if rank % 2 else -numpy.inf
        if rank == 1:
            tensors.parameters[2][1] = numpy.nan
    return tensors


def results(comm, name, form, make_codec, kind, early):
    """All that three updates leave behind."""
    made = PlanExecutor(comm, plans(name, comm.size), EventStream(),
                   Framing(300, 3, form))
    codec, found = make_codec(), []
    for update in range(3):
        tensors = spoiled(tensors_of(comm.rank, SIZES, update), comm.rank,
                          kind)
        wire = numpy.zeros(tensors.size, codec.wire_dtype)
        begin(codec, tensors, lambda array: comm.Allreduce(
            MPI.IN_PLACE, array, MPI.MAX))
        job = made.submit(Bucket(codec, tensors, wire, 0, tensors.size,
                              made.prescale(codec), decodes=not early))
        if early:
            made.run()
            assert job.finished
            made.begin_decoding(job)
        else:
            made.run()
        decoded = spoiled(tensors_of(comm.rank, SIZES, update), comm.rank,
                          kind)
        codec.decode(decoded, wire)
        for one, other in zip(tensors.gradients, decoded.gradients,
                              strict=True):
            numpy.testing.assert_array_equal(bits(one), bits(other))
        found += [wire, *tensors.gradients, job.nonfinite,
                  sorted(codec.nonfinite)]
    state = codec.state()
    found += [state[key] for key in sorted(state)]
    if isinstance(codec, Fp8Ratio):
        found.append(codec.report())
    return found, job


@pytest.mark.parametrize('kind', ['normal', 'extreme', 'nonfinite'])
@pytest.mark.parametrize('codec', OF_CODECS)
@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('name', ['direct', 'ring', 'torus',
                                  'two_level_direct_ring'])
@on_ranks(1, 4)
def test_compiled_code_leaves_the_bits_that_python_leaves(
        comm, name, form, codec, kind):
    for early in (False, True):
        with numpy.errstate(all='ignore'):
            compiled, job = results(comm, name, form, OF_CODECS[codec], kind,
                                    early)
            assert job.compiled
            with pytest.MonkeyPatch.context() as patch:
                for kind_of_codec in (Cast, Fp8Ratio):
                    patch.setattr(kind_of_codec, 'compiled',
                                  lambda *arguments: None)
                expected, job = results(comm, name, form, OF_CODECS[codec],
                                        kind, early)
            assert not job.compiled
        assert len(compiled) == len(expected)
        for one, other in zip(compiled, expected, strict=True):
            if isinstance(one, numpy.ndarray):
                numpy.testing.assert_array_equal(bits(one), bits(other))
            else:
                assert one == other


def bits(array):
    """Of a number that is not one, only that it is none."""
    if array.dtype == numpy.float32:
        array = numpy.where(numpy.isnan(array), numpy.float32('nan'), array)
    return array.reshape(-1).view(numpy.uint8)


@on_ranks(2)
def test_codecs_without_compiled_code_work_all_the_same(comm):
    for codec in (lambda: Cast('float16'),
                  lambda: Fp8Ratio(rounding='stochastic')):
        _, job = results(comm, 'direct', 'float32', codec, 'normal', False)
        assert not job.compiled


@on_ranks(1)
def test_a_gradient_that_cannot_be_overwritten_is_an_error(comm):
    made = PlanExecutor(comm, plans('direct', 1), EventStream(), Framing())
    for early in (True, False):
        codec, tensors = Cast('float32'), tensors_of(0, [100])
        tensors.gradients[0].flags.writeable = False
        wire = numpy.zeros(100, numpy.float32)
        job = Bucket(codec, tensors, wire, 0, 100, 1.0, decodes=not early)

        def exchange(job=job):
            made.submit(job)
            made.run()
            made.begin_decoding(job)
        with pytest.raises(ValueError, match='writeable|read-only'):
            exchange()
