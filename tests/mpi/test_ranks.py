"""Communicators, what is kept with them, and the cores of ranks."""
from types import SimpleNamespace

from chainer_fp8pipe.mpi import all_ranks, ranks, torus_shape
from chainer_fp8pipe.mpi.grid import ProcessGrid

import chainermn
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from tests.ranks import on_ranks


@on_ranks(2)
def test_a_communicator_a_grid_and_the_ranks_themselves_will_do(comm):
    grid = ProcessGrid(comm, pipeline=2)
    wrapped = chainermn.create_communicator('naive', mpi_comm=comm)
    assert all_ranks(comm) is all_ranks(grid) is comm
    assert all_ranks(wrapped) is wrapped.mpi_comm
    without_mpi = SimpleNamespace(rank=0, size=1)
    assert all_ranks(without_mpi) is without_mpi
    grid.free()


@pytest.mark.parametrize(('usable', 'here', 'expected'), [
    (8, None, 8), (8, '4', 2), (8, '64', 1),
    (3, '2', 3),        # bound to some of its own
    (1, '4', 1)])
def test_a_rank_has_its_share_of_the_cores_that_it_may_use(
        monkeypatch, usable, here, expected):
    """Two stages of a pipeline count, each with replicas of its own."""
    monkeypatch.setattr(ranks.os, 'sched_getaffinity',
                        lambda pid: {*range(usable)})
    monkeypatch.setattr(ranks.os, 'cpu_count', lambda: 8)
    for name in ranks._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    if here:
        monkeypatch.setenv('MPI_LOCALNRANKS', here)
    assert ranks.own_cores() == expected


@pytest.mark.parametrize(('said', 'threads'), [({}, 4), (
    {'OPENBLAS_NUM_THREADS': '3'}, 3)])
@on_ranks(2)
def test_blas_gets_the_cores_of_a_rank_unless_the_user_says_how_many(
        comm, said, threads):
    with pytest.MonkeyPatch.context() as patch, threadpool_limits(3, 'blas'):
        patch.setattr(ranks.os, 'sched_getaffinity',
                      lambda pid: {*range(8)})
        patch.setattr(ranks.os, 'cpu_count', lambda: 8)
        patch.setenv('MPI_LOCALNRANKS', '2')
        for name in ranks._THREADS:
            patch.delenv(name, raising=False)
        for name, value in said.items():
            patch.setenv(name, value)
        ranks.share_cores.__wrapped__()
        assert {pool['num_threads'] for pool in threadpool_info()
                if pool['user_api'] == 'blas'} == {threads}


@pytest.mark.parametrize(('ranks', 'per_node', 'shape'), [
    (12, 1, (3, 4)), (12, 12, (3, 4)), (12, 5, (3, 4)), (7, 1, (1, 7)),
    (1, 1, (1, 1)), (32, 8, (4, 8)), (10, 5, (2, 5)), (12, 0, (3, 4))])
def test_a_torus_has_a_row_per_node_or_is_nearly_square(ranks, per_node,
                                                        shape):
    assert torus_shape(ranks, per_node) == shape
