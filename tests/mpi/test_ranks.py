"""Communicators, what is kept with them, and the cores of ranks."""
from types import SimpleNamespace

from chainer_fp8pipe.mpi import all_ranks, ranks
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.mpi.ranks import cores_each, once, own_cores, pools_of
from chainer_fp8pipe.training.updater import PipelineUpdater

import chainer
import chainermn
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, dataset

from .scarcity import communicators_left


@on_ranks(2)
def test_a_communicator_a_grid_and_the_ranks_themselves_will_do(comm):
    grid = ProcessGrid(comm, pipeline=2)
    wrapped = chainermn.create_communicator('naive', mpi_comm=comm)
    assert all_ranks(comm) is all_ranks(grid) is comm
    assert all_ranks(wrapped) is wrapped.mpi_comm
    without_mpi = SimpleNamespace(rank=0, size=1)
    assert all_ranks(without_mpi) is without_mpi
    grid.free()


@on_ranks(2)
def test_once_makes_an_object_per_communicator(comm):
    other = comm.Dup()
    made = [once(one, 'list', list) for one in (comm, comm, other)]
    assert made[0] is made[1]
    assert made[0] is not made[2]
    other.Free()


@on_ranks(2)
def test_there_can_be_more_pipelines_than_mpi_has_communicators(comm):
    with communicators_left(comm, 30):
        for _ in range(40):
            updater = PipelineUpdater(
                chainer.iterators.SerialIterator(
                    chainer.datasets.TupleDataset(*dataset(4)), 4),
                chainer.optimizers.SGD().setup(Plain().stage(comm)), comm,
                micro_batches=2)
        updater.update()


@pytest.mark.parametrize(('cores', 'pools'), [
    ([{0}, {1}, {0}, {1}], [0, 1, 0, 1]),
    ([{0, 1}, {0, 1}], [0, 0]),
    ([{2}, {1}, {0}], [0, 1, 2]),
    # The last rank meets both.
    ([{0}, {1}, {0, 1}], [0, 0, 0]),
    ([{3}, {0}, {1}, {0, 1}], [0, 1, 1, 1]),
])
def test_ranks_with_a_core_in_common_are_in_a_pool(cores, pools):
    assert pools_of(cores) == pools


def cores(*numbers, machine='a'):
    return frozenset((machine, number) for number in numbers)


@pytest.mark.parametrize(('every', 'expected'), [
    # Free to run on all eight.
    ([cores(*range(8))] * 4, [2] * 4),
    # Bound to some of their own.
    ([cores(0, 1, 2), cores(3, 4, 5), cores(6), cores(7)], [3, 3, 1, 1]),
    # More ranks than cores.
    ([cores(0, 1)] * 4, [1] * 4),
    # Other machines have other cores of the same numbers.
    ([cores(0, 1), cores(0, 1), cores(0, 1, machine='b'),
      cores(4, 5, 6, machine='c')], [1, 1, 2, 3]),
])
@on_ranks(4)
def test_ranks_share_the_cores_that_they_have_in_common(comm, every, expected):
    assert {number for _, number in own_cores()} == ranks.core_numbers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, 'own_cores', lambda: every[comm.rank])
        patch.setattr(ranks, '_LOCAL_RANKS', ())
        patch.setattr(ranks.os, 'cpu_count', lambda: 8)
        assert cores_each(comm) == expected[comm.rank]


@on_ranks(2)
def test_ranks_of_other_communicators_count_where_the_launcher_says_so(comm):
    """Two stages of a pipeline, each with replicas of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, 'own_cores', lambda: cores(*range(8)))
        patch.setattr(ranks.os, 'cpu_count', lambda: 8)
        for name in ranks._LOCAL_RANKS:
            patch.delenv(name, raising=False)
        for said, expected in (None, 4), ('4', 2), ('64', 1):
            if said:
                patch.setenv('MPI_LOCALNRANKS', said)
            assert cores_each(comm) == expected


@pytest.mark.parametrize(('said', 'threads'), [({}, 4), (
    {'OPENBLAS_NUM_THREADS': '3'}, 3)])
@on_ranks(2)
def test_blas_gets_the_cores_of_a_rank_unless_the_user_says_how_many(
        comm, said, threads):
    with pytest.MonkeyPatch.context() as patch, threadpool_limits(3, 'blas'):
        patch.setattr(ranks, 'own_cores', lambda: cores(*range(8)))
        patch.setattr(ranks.os, 'cpu_count', lambda: 8)
        patch.setenv('MPI_LOCALNRANKS', '2')
        for name in ranks._THREADS:
            patch.delenv(name, raising=False)
        for name, value in said.items():
            patch.setenv(name, value)
        ranks.share_cores.__wrapped__()
        assert {pool['num_threads'] for pool in threadpool_info()
                if pool['user_api'] == 'blas'} == {threads}
