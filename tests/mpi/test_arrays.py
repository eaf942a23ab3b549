"""Arrays of one rank, on all others."""
import time

from chainer_fp8pipe.mpi.arrays import broadcast_arrays

import numpy
import pytest

from tests.ranks import on_ranks


def arrays():
    random = numpy.random.RandomState(0)
    return [random.randn(3, 4).astype('f'), numpy.arange(6, dtype='i'),
            numpy.array(2.5), numpy.zeros((0, 3), 'f'),
            numpy.array([True, False]), random.rand(4, 4)[::2, 1:],
            numpy.asfortranarray(random.rand(3, 2)).astype(numpy.float16)]


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('made', [arrays, list])
def test_all_ranks_get_the_values_and_arrays_of_the_first(comm, made):
    mine = comm.rank == 0
    value, found = broadcast_arrays(
        comm, {'form': (1, 'x')} if mine else None, made() if mine else None)
    assert value == {'form': (1, 'x')}
    for array, expected in zip(found, made(), strict=True):
        assert (array.shape, array.dtype) == (expected.shape,
                                              expected.dtype)
        numpy.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize('elements', [1 << 13, (1 << 13) + 1, 100_003,
                                      (1 << 21) + 5])
@on_ranks(2, 3, 4)
def test_large_arrays_arrive_whole(comm, elements):
    """In one frame, in some, and in larger ones, the last of them shorter."""
    big = numpy.arange(elements, dtype='d')
    _, (small, found) = broadcast_arrays(
        comm, None, [big[:3], big] if comm.rank == 0 else None)
    numpy.testing.assert_array_equal(found, big)
    numpy.testing.assert_array_equal(small, big[:3])


@on_ranks(3)
def test_no_rank_waits_for_a_neighbour_that_has_got_all(comm, tmp_path):
    """That calls MPI no more: it reads or computes, for however long."""
    big = numpy.arange(1 << 21, dtype='d')
    for number in range(20):
        comm.Barrier()
        broadcast_arrays(comm, None, [big] if comm.rank == 0 else None)
        returned = tmp_path / str(number)
        if comm.rank == 1:
            returned.touch()
        while comm.rank == 2 and not returned.exists():
            time.sleep(1e-3)


@pytest.mark.parametrize('changed', [0, 1])
@on_ranks(2)
def test_a_ranks_array_is_its_own(comm, changed):
    _, (found,) = broadcast_arrays(
        comm, None, [numpy.zeros(3)] if comm.rank == 0 else None)
    if comm.rank == changed:
        found[...] = 1
    comm.Barrier()
    assert found.tolist() == [float(comm.rank == changed)] * 3
