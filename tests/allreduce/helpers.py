"""Gradients that every rank can compute for every other rank."""
from chainer_fp8pipe.allreduce.aggregator import Aggregated, WorkerComm, serve
from chainer_fp8pipe.allreduce.engine import Bucket, Engine
from chainer_fp8pipe.allreduce.mpi_op import MpiOp
from chainer_fp8pipe.allreduce.plan import Framing, plan_of
from chainer_fp8pipe.codecs import Tensors
from chainer_fp8pipe.report.stream import EventStream

import numpy
from mpi4py import MPI

from benchmarks.codec_updates import begin

from .plans import TABLE


def tensors_of(rank, sizes, seed=0, grain=1):
    """Gradients of ``rank``; the parameters are the same on all ranks."""
    gradients = numpy.random.default_rng((seed, rank, 1))
    parameters = numpy.random.default_rng((seed, 2))
    return Tensors(
        [f'/l{i}' for i in range(len(sizes))],
        [gradients.normal(0, 1, n).astype(numpy.float32) for n in sizes],
        [parameters.normal(0, 0.1, n).astype(numpy.float32) for n in sizes],
        grain=grain)


def mean_of(size, sizes, seed=0):
    """Of all ranks' gradients, in float64."""
    return numpy.mean([numpy.concatenate(
        tensors_of(rank, sizes, seed).gradients).astype(float)
        for rank in range(size)], axis=0)


def nodes_of(size, node):
    """Ranks in nodes of so many."""
    return [range(first, first + node) for first in range(0, size, node)]


def plan(way, size, node=2):
    """An algorithm's plan; with ``two`` (levels), nodes of so many ranks."""
    name, *levels = way.split()
    return plan_of(TABLE[name], nodes_of(size, node if levels else 1),
                   bool(levels), {'shape': (0, 0), 'aggregators': 1})


def make(way, comm, node=2, frame_bytes=512, frames_in_flight=3, **framing):
    """An engine; frames are tiny, so that there are many."""
    if way.startswith('mpi_op'):
        return MpiOp(comm, EventStream(), nodes_of(comm.size, node)
                     if 'two' in way else None)
    return Engine(comm, plan(way, comm.size, node), EventStream(), Framing(
        frame_bytes, frames_in_flight, **framing))


def on_workers(comm, body, frame_bytes=512):
    """``body(engine, workers)`` on the workers; the last rank serves.

    The communicator of the workers is for the body's own use.
    """
    everyone = comm.Dup()
    part = comm.Split(MPI.UNDEFINED if comm.rank == comm.size - 1 else 0)
    if part == MPI.COMM_NULL:
        serve(everyone)
        assert everyone == MPI.COMM_NULL
        return
    workers = WorkerComm(part)
    workers.everyone = everyone
    engine = Aggregated(workers, plan('aggregator', part.size), EventStream(),
                        Framing(frame_bytes))
    body(engine, part)
    engine.free()
    assert everyone == MPI.COMM_NULL
    part.Free()


def bucket_of(codec, tensors, wire=None, prescale=1.0, **options):
    """A bucket of one rank's own scales."""
    coding = begin(codec.init(), tensors, prescale=prescale)
    if wire is None:
        wire = numpy.zeros(tensors.size, codec.wire_dtype)
    return Bucket(coding.state, tensors, wire, **options)


def exchange(algorithm, state, tensors):
    """One exchange; returns the decoded means, fused."""
    state.codec.begin(state, 1.0)
    bucket = algorithm.submit(Bucket(state, tensors, numpy.empty(
        tensors.size, state.codec.wire_dtype), decodes=True))
    algorithm.finish(bucket)
    bucket.decode()
    return numpy.concatenate(tensors.gradients)
