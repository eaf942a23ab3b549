"""What holds for every algorithm with every codec."""
from chainer_fp8pipe.codecs import Fp8Ratio

import numpy
import pytest

from tests.ranks import on_ranks

from .helpers import (
    ALGORITHMS,
    CODECS,
    check_error_feedback,
    exchange,
    make,
    mean_and_spread,
    tensors_of,
)

SIZES = [1000, 0, 1, 37, 4000]

#: Largest share of the mean magnitude A by which an element may be off.
#: Nearest rounding errs by u (half a step): u of each gradient, u of the
#: mean of those: u A + u (A + u A), and once more with a second level.
#: Where sums are rounded too (mpi_op), once per sum, at most size + 2 times.
UNIT = {'float32': 2.0 ** -24, 'float16': 2.0 ** -11, 'fp8': 2.0 ** -3}


def bound(algorithm, codec, size):
    u = UNIT[codec]
    # One more level or sum, each of up to (1 + u) times the magnitude.
    roundings = {'direct': 2, 'ring': 2, 'torus': 2,
                 'two_level_direct_direct': 3}.get(algorithm, size + 3)
    if codec == 'float32' or (algorithm.endswith('_float16')
                              and codec == 'fp8'):
        # Sums are rounded in any case: each to float32, or to float16.
        u_sum = UNIT['float32' if codec == 'float32' else 'float16']
        return (1 + u) ** 3 * (1 + u_sum) ** (size + 3) - 1
    return (1 + u) ** roundings - 1


@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('algorithm', ALGORITHMS)
@on_ranks(1, 2, 3, 4, 6, 9)
def test_every_rank_has_the_mean_within_the_formats_bound_and_the_same_bits(
        comm, algorithm, codec):
    wire, result = exchange(make(algorithm, comm), CODECS[codec](), comm,
                            tensors_of(comm.rank, SIZES))
    mean, magnitude = mean_and_spread(comm.size, SIZES)
    # Values below the normal range of the wire (fp8: far below the
    # quantile; float16: 2^-14) lose absolute, not relative, precision.
    floor = {'float32': 0, 'float16': 2.0 ** -20, 'fp8': 2e-3}[codec]
    error = numpy.abs(result - mean)
    assert (error <= bound(algorithm, codec, comm.size) * magnitude * 1.001
            + floor + 1e-6).all()
    for other in comm.allgather(result.tobytes()):
        assert other == result.tobytes()
    for other in comm.allgather(wire.tobytes()):
        assert other == wire.tobytes()


@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('algorithm', ALGORITHMS)
@on_ranks(4)
def test_the_same_gradients_give_the_same_bits_again(comm, algorithm, codec):
    results = [exchange(make(algorithm, comm), CODECS[codec](), comm,
                        tensors_of(comm.rank, SIZES))[1] for _ in range(2)]
    numpy.testing.assert_array_equal(*results)


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
    sizes = [50000]
    _, result = exchange(make('direct', comm), CODECS['fp8'](), comm,
                         tensors_of(comm.rank, sizes))
    mean, _ = mean_and_spread(comm.size, sizes)
    error = numpy.linalg.norm(result - mean) / numpy.linalg.norm(mean)
    assert 0.02 < error < 0.102


@pytest.mark.parametrize('algorithm', ALGORITHMS)
@on_ranks(3, 4)
def test_nan_and_infinity_reach_every_rank(comm, algorithm):
    for codec in CODECS.values():
        tensors = tensors_of(comm.rank, [50])
        if comm.rank == 1:
            tensors.gradients[0][[7, 30]] = [numpy.nan, -numpy.inf]
        _, result = exchange(make(algorithm, comm), codec(), comm, tensors)
        assert numpy.isnan(result[7])
        assert result[30] == -numpy.inf
        assert numpy.isfinite(numpy.delete(result, [7, 30])).all()


@pytest.mark.parametrize('algorithm', ALGORITHMS)
@on_ranks(3, 4)
def test_stochastic_rounding_is_unbiased_and_the_same_on_all_ranks(
        comm, algorithm):
    size = 40000
    _, result = exchange(
        make(algorithm, comm),
        Fp8Ratio(rounding='stochastic', error_feedback=False).init(), comm,
        tensors_of(comm.rank, [size]))
    assert set(comm.allgather(result.tobytes())) == {result.tobytes()}
    mean, magnitude = mean_and_spread(comm.size, [size])
    # Of the error's share along the mean; each of the roundings errs by at
    # most 1/4 of a magnitude, independently for every element.
    slope = (result * mean).sum() / (mean * mean).sum()
    error = numpy.sqrt(((mean * magnitude) ** 2).sum()) / 4 * (
        comm.size + 2) / (mean * mean).sum()
    assert abs(slope - 1) < 4 * error
    assert error < 0.03


@pytest.mark.parametrize('algorithm', ALGORITHMS)
@pytest.mark.parametrize('sizes', [[], [0], [1], [3], [2, 2]])
@on_ranks(4)
def test_fewer_elements_than_ranks_are_legal(comm, algorithm, sizes):
    _, result = exchange(make(algorithm, comm), CODECS['float32'](), comm,
                         tensors_of(comm.rank, sizes))
    mean, _ = mean_and_spread(comm.size, sizes)
    numpy.testing.assert_allclose(result, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('algorithm', [
    'direct', 'ring_float16', 'torus_float16', 'two_level_direct_direct'])
@on_ranks(4)
def test_error_feedback_converges_over_50_exchanges(comm, algorithm):
    check_error_feedback(make(algorithm, comm), comm)


@on_ranks(1, 4)
def test_bytes_sent_are_those_of_reduce_scatter_and_allgather(comm):
    made = make('direct', comm)
    exchange(made, CODECS['fp8'](), comm, tensors_of(comm.rank, [4000]))
    assert made.events.bytes_sent == 2 * 4000 * (comm.size - 1) / comm.size
