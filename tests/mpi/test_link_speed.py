from chainer_fp8pipe.mpi.link_speed import measure_links

from mpi4py import MPI

from tests.ranks import on_ranks


@on_ranks(2, 3)
def test_all_ranks_hear_of_the_slowest_link(comm):
    speed = measure_links(comm)
    assert 0 < speed.latency < 1
    assert speed.bandwidth > 1e6
    assert set(comm.allgather(speed)) == {speed}


@on_ranks(1)
def test_one_rank_has_no_link(comm):
    assert measure_links(MPI.COMM_SELF) == (0.0, float('inf'))
