"""Gradients that every rank can compute for every other rank."""
from chainer_fp8pipe.allreduce import Direct, MpiOp, Statistics, TwoLevel
from chainer_fp8pipe.codecs import Cast, Fp8Ratio, Tensors

import numpy

CODECS = {'float32': lambda: Cast('float32'),
          'float16': lambda: Cast('float16'),
          'fp8': lambda: Fp8Ratio(period=1)}
ALGORITHMS = ('direct', 'mpi_op', 'two_level_direct', 'two_level_mpi_op')


def tensors_of(rank, sizes, seed=0):
    """Gradients of ``rank``; the parameters are the same on all ranks."""
    gradients = numpy.random.default_rng((seed, rank, 1))
    parameters = numpy.random.default_rng((seed, 2))
    return Tensors(
        [f'/l{i}' for i in range(len(sizes))],
        [gradients.normal(0, 1, n).astype(numpy.float32) for n in sizes],
        [parameters.normal(0, 0.1, n).astype(numpy.float32) for n in sizes])


def mean_and_spread(size, sizes, seed=0):
    """Of all ranks' gradients, in float64: mean, and mean of magnitudes."""
    everyone = [numpy.concatenate(
        tensors_of(rank, sizes, seed).gradients or [numpy.zeros(0)]
    ).astype(float) for rank in range(size)]
    return numpy.mean(everyone, axis=0), numpy.mean(numpy.abs(everyone), 0)


def make(name, comm, node=2):
    """An algorithm; two-level ones pretend nodes of ``node`` ranks."""
    statistics = Statistics()
    kind = Direct if name.endswith('direct') else MpiOp
    if not name.startswith('two_level'):
        return kind(comm, statistics)
    node = node if comm.size % node == 0 else 1
    intra = comm.Split(comm.rank // node, comm.rank)
    inter = comm.Split(comm.rank % node, comm.rank)
    return TwoLevel(kind(intra, statistics, 'node'),
                    kind(inter, statistics, 'nodes'))


def exchange(algorithm, codec, comm, tensors):
    """One exchange; returns the wire and the decoded means, fused."""
    def maximum(array):
        from mpi4py import MPI
        comm.Allreduce(MPI.IN_PLACE, array, MPI.MAX)
    wire = numpy.empty(tensors.size, codec.wire_dtype)
    codec.begin(tensors, maximum)
    codec.encode(tensors, wire, algorithm.prescale)
    algorithm.allreduce(codec, tensors, wire, 0, tensors.size)
    codec.decode(tensors, wire)
    return wire, numpy.concatenate(tensors.gradients or [numpy.zeros(0)])
