"""What holds for every algorithm with every codec."""
from chainer_fp8pipe.codecs import Fp8Paper, Fp8Ratio

import ml_dtypes
import numpy
import pytest

from tests.ranks import on_ranks

from .helpers import (
    CODECS,
    UNIT,
    check_mean,
    exchange,
    form_of,
    make,
    mean_and_spread,
    run,
    tensors_of,
    ways,
)
from .library import unbuffered

WAYS = [*ways()]
#: Those whose messages are all seen.
SEEN = 'direct', 'ring', 'torus2d', 'ring two', 'aggregator'
SIZES = [1000, 0, 1, 37, 4000]


def roundings_of(way, workers, codec):
    """Roundings on the way of a contribution, and the u of sums.

    A gradient and a mean are rounded, and the mean of a node.  Sums are
    rounded, too: to the form in which they travel or are held, or, by MPI
    and where a wire holds them, to the wire's format.
    """
    form, levels = form_of(way), 'two' in way.split()
    if way.startswith('mpi_op') or codec == 'float32':
        return (workers + 3, 0.0) if codec != 'float32' else (
            3, UNIT['float32'])
    return 2 + levels, UNIT['float16' if form == 'float16' else 'float32']


@pytest.mark.parametrize('way', WAYS)
@on_ranks(1, 2, 3, 4, 6, 9)
def test_every_rank_has_the_mean_within_the_formats_bound_and_the_same_bits(
        comm, way):
    def body(made, workers):
        for codec, init in CODECS.items():
            wire, result = exchange(made, init(), workers,
                                    tensors_of(workers.rank, SIZES))
            roundings, sums = roundings_of(way, workers.size, codec)
            check_mean(workers, result, codec, SIZES, roundings, sums=sums)
            assert set(workers.allgather(wire.tobytes())) == {wire.tobytes()}
    run(way, comm, body)


@pytest.mark.parametrize('way', WAYS)
@on_ranks(3, 4)
def test_again_nonfinite_and_few_elements(comm, way):
    """The same bits again; NaN and infinity arrive; any length is legal."""
    def body(made, workers):
        for codec in CODECS.values():
            results = [exchange(made, codec(), workers, tensors_of(
                workers.rank, SIZES))[1] for _ in range(2)]
            numpy.testing.assert_array_equal(*results)
            tensors = tensors_of(workers.rank, [50])
            if workers.rank == workers.size - 1:
                tensors.gradients[0][[7, 30]] = [numpy.nan, -numpy.inf]
            _, result = exchange(made, codec(), workers, tensors)
            assert numpy.isnan(result[7])
            assert result[30] == -numpy.inf
            assert numpy.isfinite(numpy.delete(result, [7, 30])).all()
        for sizes in ([], [0], [1], [3], [2, 2]):
            _, result = exchange(made, CODECS['float32'](), workers,
                                 tensors_of(workers.rank, sizes))
            mean, _ = mean_and_spread(workers.size, sizes)
            numpy.testing.assert_allclose(result, mean, rtol=1e-5, atol=1e-6)
    run(way, comm, body)


@pytest.mark.parametrize('way', SEEN)
@on_ranks(2, 4, 6)
def test_nothing_depends_on_messages_that_mpi_buffers(comm, way):
    def body(made, workers):
        for sizes in ([5000], [1], [7]):
            for codec in CODECS.values():
                _, result = exchange(made, codec(), workers,
                                     tensors_of(workers.rank, sizes))
                mean, magnitude = mean_and_spread(workers.size, sizes)
                assert abs(result - mean).max() <= 0.5 * magnitude.max()
    with unbuffered():
        run(way, comm, body, frame_bytes=256, frames_in_flight=2)


@on_ranks(4)
def test_the_fp8_means_root_mean_square_error_is_that_of_two_roundings(comm):
    """Normal data, nearest, float32 sums.

    Between 2^k and 2^(k+1) codes are 2^k / 4 apart and the error is uniform
    in +-2^k / 8, so its root mean square is at most 2^k / (8 sqrt(3)) =
    0.0722 of the value.  Errors of P gradients are independent, like the
    gradients, so their mean errs by 0.0722 of the mean; encoding the mean
    adds as much: sqrt(2) * 0.0722 = 0.102 in all.  (Less in fact, as values
    above 2^k have the same error.)
    """
    _, result = exchange(make('direct', comm), CODECS['fp8'](), comm,
                         tensors_of(comm.rank, [50000]))
    mean, _ = mean_and_spread(comm.size, [50000])
    error = numpy.linalg.norm(result - mean) / numpy.linalg.norm(mean)
    assert 0.02 < error < 0.102


@pytest.mark.parametrize('way', [
    'direct', 'ring float16', 'torus2d float16', 'direct two'])
@on_ranks(4)
def test_error_feedback_converges_over_50_exchanges(comm, way):
    """The mean of 50 exchanges is nearer than that without."""
    def body(made, workers):
        mean, _ = mean_and_spread(workers.size, [4000])
        errors = []
        for feedback in (True, False):
            state, total = Fp8Ratio(error_feedback=feedback).init(), 0.0
            for _ in range(50):
                _, result = exchange(made, state, workers,
                                     tensors_of(workers.rank, [4000]))
                total = total + result.astype(float)
            errors.append(numpy.linalg.norm(total / 50 - mean))
        assert errors[0] < errors[1] / 5
    run(way, comm, body)


# --- the fp8 paper's arithmetic, rank by rank, against ml_dtypes -------------

def truncated(values):
    """float32 to the upper byte of the nearest half, saturated."""
    values = numpy.clip(values, -57344, 57344).astype(numpy.float32)
    codes = values.astype(numpy.float16).view(numpy.uint16) >> 8
    return codes.astype(numpy.uint8)


def value(codes):
    return codes.view(ml_dtypes.float8_e5m2).astype(numpy.float32)


def paper(size, per_node, q):
    """Lines 15 to 26 of Algorithm 1 for all ranks at once."""
    ranks = [tensors_of(rank, [600]) for rank in range(size)]
    weight = abs(ranks[0].parameters[0]) + numpy.float32(1e-5)
    scale = numpy.float32(57344 / q / per_node)
    codes = [truncated(t.gradients[0] / weight * scale) for t in ranks]
    nodes = []
    for node in range(size // per_node):
        total = codes[node * per_node]
        for other in codes[node * per_node + 1:(node + 1) * per_node]:
            total = truncated(value(total) + value(other))
        nodes.append(truncated(value(total) / (size // per_node)))
    total = nodes[0]
    for other in nodes[1:]:
        total = truncated(value(total) + value(other))
    return value(total) * numpy.float32(q / 57344) * weight


@pytest.mark.parametrize('per_node', [2, 4])
@on_ranks(4)
def test_two_levels_are_algorithm_1_with_truncation(comm, per_node):
    state = Fp8Paper().init()
    _, result = exchange(make('mpi_op two', comm, node=per_node),
                         state, comm, tensors_of(comm.rank, [600]))
    expected = paper(4, per_node, state.codec.report(state)['/l0'].q)
    # Only a division that rounds differently may move an element by a step.
    same = numpy.isclose(result, expected, rtol=1e-5, atol=0)
    assert same.mean() > 0.995


@on_ranks(4)
def test_truncation_shrinks_a_sum_of_equal_signs(comm):
    """Why the paper's way is not the default."""
    def ratio(algorithm, codec):
        tensors = tensors_of(comm.rank, [5000])
        tensors.gradients[0][...] = abs(tensors.gradients[0])
        expected = comm.allreduce(tensors.gradients[0].astype(float))
        _, result = exchange(make(algorithm, comm), codec.init(), comm,
                             tensors)
        return result.sum() * comm.size / expected.sum()
    assert ratio('mpi_op', Fp8Paper(quantile=1.0)) < 0.85
    assert 0.99 < ratio('direct', Fp8Ratio()) < 1.01
