"""Links of ranks, as messages tell."""
from chainer_fp8pipe.mpi.measured import measure_links

from tests.ranks import on_ranks


@on_ranks(1, 2, 3)
def test_links_are_the_same_on_all_ranks(comm):
    found = measure_links(comm)
    assert len(set(comm.allgather(found))) == 1
    if comm.size == 1:
        assert found == (0.0, float('inf'))
    else:
        assert 0 < found[0] < 60
        assert 1e3 < found[1] < 1e13
