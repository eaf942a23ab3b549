from types import SimpleNamespace

from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.mpi.ranks import all_ranks

from tests.ranks import on_ranks


@on_ranks(2)
def test_a_communicator_a_grid_and_the_ranks_themselves_will_do(comm):
    import chainermn
    grid = ProcessGrid(comm, pipeline=2)
    wrapped = chainermn.create_communicator('naive', mpi_comm=comm)
    assert all_ranks(comm) is all_ranks(grid) is comm
    assert all_ranks(wrapped) is wrapped.mpi_comm
    grid.free()


def test_ranks_without_mpi_are_what_they_are():
    ranks = SimpleNamespace(rank=0, size=1)
    assert all_ranks(ranks) is ranks
