"""Gradients that every rank can compute for every other rank."""
from chainer_fp8pipe.allreduce.aggregator import Aggregated, WorkerComm, serve
from chainer_fp8pipe.allreduce.engine import Bucket, Engine
from chainer_fp8pipe.allreduce.mpi_op import MpiOp
from chainer_fp8pipe.allreduce.plan import (
    FORMS,
    Framing,
    Opcode,
    plan_of,
    steps_of,
)
from chainer_fp8pipe.codecs import Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.report.stream import EventStream

import numpy
from mpi4py import MPI

from benchmarks.codec_updates import begin

from .plans import TABLE, usual_plan

CODECS = {'float32': lambda: Cast('float32').init(),
          'float16': lambda: Cast('float16').init(),
          'fp8': lambda: Fp8Ratio(period=1).init()}
#: Half a step of a code, as a share of its value; and what values below the
#: normal range of the wire lose (fp8: far below the quantile).
UNIT = {'float32': 2.0 ** -24, 'float16': 2.0 ** -11, 'fp8': 2.0 ** -3}
FLOOR = {'float32': 1e-6, 'float16': 2.0 ** -20 + 1e-6, 'fp8': 2e-3}


def tensors_of(rank, sizes, seed=0, grain=1):
    """Gradients of ``rank``; the parameters are the same on all ranks."""
    gradients = numpy.random.default_rng((seed, rank, 1))
    parameters = numpy.random.default_rng((seed, 2))
    return Tensors(
        [f'/l{i}' for i in range(len(sizes))],
        [gradients.normal(0, 1, n).astype(numpy.float32) for n in sizes],
        [parameters.normal(0, 0.1, n).astype(numpy.float32) for n in sizes],
        grain=grain)


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


def bits(array):
    """Of a number that is not one, only that it is none."""
    if array.dtype.kind == 'f':
        array = numpy.where(numpy.isnan(array), array.dtype.type('nan'),
                            array)
    return array.reshape(-1).view(numpy.uint8)


def mean_and_spread(size, sizes, seed=0):
    """Of all ranks' gradients, in float64: mean, and mean of magnitudes."""
    everyone = [numpy.concatenate(
        tensors_of(rank, sizes, seed).gradients or [numpy.zeros(0)]
    ).astype(float) for rank in range(size)]
    return numpy.mean(everyone, axis=0), numpy.mean(numpy.abs(everyone), 0)


def check_mean(comm, result, codec, sizes, roundings, seed=0, sums=0.0):
    """The mean within the format's bound, with the same bits on all ranks.

    A rounding errs by u, half a step: u of each gradient and u of the mean of
    those are u A + u (A + u A) of the mean magnitude A, for 2 roundings.
    ``sums`` is the u of as many sums as there are ranks.
    """
    mean, magnitude = mean_and_spread(comm.size, sizes, seed)
    bound = ((1 + UNIT[codec]) ** roundings
             * (1 + sums) ** (comm.size + 3) - 1)
    assert (abs(result - mean)
            <= 1.001 * bound * magnitude + FLOOR[codec]).all()
    assert set(comm.allgather(result.tobytes())) == {result.tobytes()}


def ways():
    """All algorithms, in nodes, too, with all forms of sums that travel.

    A way is words: an algorithm, ``two`` (levels), a form, a number of
    aggregators.
    """
    for row in TABLE.values():
        for levels in ('', ' two')[:1 + row.two_level]:
            travel = any(
                step.summed and step.action.kind is Opcode.SEND_PARTIAL
                for plan in [usual_plan(row, 4)] if plan
                for rank in range(plan.ranks)
                for step in steps_of(plan, rank))
            for form in FORMS if travel else ['float32']:
                yield f'{row.name}{levels} {form}'
    yield 'aggregator 2'


def nodes_of(size, node):
    """Ranks in nodes of so many, or each alone where that does not divide."""
    node = node if size % node == 0 else 1
    return [range(first, first + node) for first in range(0, size, node)]


def plan(way, size, node=2):
    """The plan of a way for workers in nodes of so many."""
    name, *words = way.split()
    levels = 'two' in words
    return plan_of(TABLE[name], nodes_of(size, node if levels else 1),
                   levels and size % node == 0,
                   {'shape': (0, 0), 'aggregators': servers(way)})


def servers(way):
    """How many ranks of a way only sum."""
    name, *words = way.split()
    return TABLE[name].has_servers * (1 + ('2' in words))


def form_of(way):
    """In which partial sums travel."""
    return next((form for form in FORMS if form in way.split()), 'float32')


def make(way, comm, node=2, frame_bytes=512, frames_in_flight=3, **framing):
    """An engine; two levels pretend nodes of ``node`` ranks.

    Frames are tiny, so that there are many.
    """
    name, *words = way.split()
    if TABLE[name].plan is None:
        return MpiOp(comm, EventStream(), nodes_of(comm.size, node)
                     if 'two' in words else None)
    return Engine(comm, plan(way, comm.size, node), EventStream(), Framing(
        frame_bytes, frames_in_flight, form_of(way), **framing))


def on_workers(comm, body, way='aggregator', **framing):
    """``body(engine, workers)`` on the workers; the last ranks serve.

    The communicator of the workers is for the body's own use.
    """
    count = comm.size - servers(way)
    everyone = comm.Dup()
    part = comm.Split(0 if comm.rank < count else MPI.UNDEFINED)
    if comm.rank >= count:
        serve(everyone)
        assert everyone == MPI.COMM_NULL
        return None
    workers = WorkerComm(part)
    workers.everyone = everyone
    engine = Aggregated(workers, plan(way, count), EventStream(), Framing(
        **{'frame_bytes': 512, 'form': form_of(way), **framing}))
    result = body(engine, part)
    engine.free()
    assert everyone == MPI.COMM_NULL
    part.Free()
    return result


def run(way, comm, body, **framing):
    """``body(engine, workers)``, on the workers if some ranks only sum."""
    if not servers(way):
        return body(make(way, comm, **framing), comm)
    return (on_workers(comm, body, way, **framing)
            if comm.size > servers(way) else None)


def begin_on(comm, state, tensors, prescale=1.0):
    """Begins an update of these ranks; its coding."""
    return begin(state, tensors, lambda array: comm.Allreduce(
        MPI.IN_PLACE, array, MPI.MAX), prescale)


def bucket_of(codec, tensors, wire=None, prescale=1.0, **options):
    """A bucket of one rank's own scales."""
    coding = begin(codec.init(), tensors, prescale=prescale)
    if wire is None:
        wire = numpy.zeros(tensors.size, codec.wire_dtype)
    return Bucket(coding.state, tensors, wire, **options)


def average(algorithm, coding, wire):
    """Makes a wire the mean of all ranks' wires."""
    algorithm.finish(algorithm.submit(Bucket(
        coding.state, coding, wire)))


def exchange(algorithm, state, comm, tensors):
    """One exchange; returns the wire and the decoded means, fused."""
    wire = numpy.empty(tensors.size, state.codec.wire_dtype)
    coding = begin_on(comm, state, tensors,
                      algorithm.sums(state.codec).prescale)
    coding.encode(wire)
    average(algorithm, coding, wire)
    coding.decode(wire)
    coding.conclude()
    return wire, numpy.concatenate(tensors.gradients or [numpy.zeros(0)])
