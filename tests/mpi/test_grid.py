"""Ranks on a grid of stages and replicas, and in groups that gather."""
import copy
import pickle
from unittest import mock

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.mpi import grid as module
from chainer_fp8pipe.mpi.grid import Group, ProcessGrid, grid_of, group_of
from chainer_fp8pipe.mpi.ranks import free_with_kept

import chainermn
import numpy as np
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

from .scarcity import communicators_left


@pytest.mark.parametrize('pipeline', [1, 2, 4])
@on_ranks(4)
def test_ranks_in_the_axes_are_stage_and_replica(comm, pipeline):
    grid = ProcessGrid(create_communicator('naive', comm), pipeline)
    assert (grid.stages, grid.replicas) == (pipeline, 4 // pipeline)
    ranks = [list(row) for row in grid.ranks]
    # One communicator holds one replica, the other one stage.
    assert grid.pipeline.allgather(comm.rank) == [
        row[grid.replica_index] for row in ranks]
    assert grid.data.allgather(comm.rank) == ranks[grid.stage_index]
    assert grid.pipeline.rank == grid.stage_index
    assert grid.data.rank == grid.replica_index
    grid.free()


@on_ranks(4)
def test_ranks_of_a_node_are_neighbours_in_a_pipeline(comm):
    with mock.patch.object(module, 'nodes_of', return_value=[0, 1, 0, 1]):
        grid = ProcessGrid(comm, 2)
    assert grid.ranks == [[0, 1], [2, 3]]
    assert grid.pipeline.allgather(comm.rank) == [
        comm.rank % 2, comm.rank % 2 + 2]
    grid.free()


@on_ranks(2)
def test_a_grid_that_was_freed_is_not_given_again(comm):
    grid = grid_of(comm)
    assert grid_of(comm) is grid
    grid.free()
    assert grid_of(comm).pipeline.allreduce(1) == 2
    grid_of(comm).free()


#: What is made, of arguments, and what is said of wrong ones.
MAKE = {'pipeline': ProcessGrid, 'group_size': group_of}
WRONG = [(3, '=3 does not divide the 4 ranks; it can be 1, 2 or 4'), *(
    (value, 'does not divide the 4 ranks') for value in (
        0, -2, 8, 2.0, True, '2')),
    # Of rank 3 alone.
    ({3: 4}, ' is 2 on rank 0 but 4 on rank 3')]


@on_ranks(4)
@pytest.mark.parametrize('name', MAKE)
@pytest.mark.parametrize(('value', 'message'), WRONG)
def test_bad_or_different_arguments_are_an_error_on_all_ranks(
        comm, name, value, message):
    if isinstance(value, dict):
        value = value.get(comm.rank, 2)
    with pytest.raises(ValueError, match=message) as raised:
        MAKE[name](comm, **{name: value})
    assert len(set(comm.allgather(str(raised.value)))) == 1


# --- groups ------------------------------------------------------------------

@on_ranks(4)
def test_a_group_gathers_of_consecutive_ranks(comm):
    outer = chainermn.create_communicator('naive', mpi_comm=comm)
    for given, groups in (
            ({}, [[0, 1, 2, 3]]), ({'group_size': 1}, [[0], [1], [2], [3]]),
            ({'group_size': 2}, [[0, 1], [2, 3]]),
            ({'group_size': np.int64(4)}, [[0, 1, 2, 3]])):
        group = group_of(outer, **given)
        for things in range(3), np.arange(10000.0), 'ab', [np.nan]:
            thing = comm.rank, things
            np.testing.assert_equal(group.gather(thing), next(
                [(rank, things) for rank in group] for group in groups
                if comm.rank in group))


def test_groups_are_of_the_ranks_of_a_communicator():
    with pytest.raises(TypeError, match='not a str; .*grid.data'):
        group_of('world')


@on_ranks(4)
def test_grids_and_groups_give_communicators_back(comm):
    grid = ProcessGrid(comm, 2)
    grid.free()
    grid.free()                 # once more does no harm
    assert group_of(comm, 1) is group_of(comm, 1) is not group_of(comm, 2)
    with communicators_left(comm, 10):
        for _ in range(20):     # more than fit if none were freed
            ProcessGrid(comm, 2).free()
            part = comm.Dup()
            group_of(part, 2)
            part.Free()


def test_copies_of_a_group_are_the_same_and_it_cannot_be_pickled():
    group = Group(MPI.COMM_SELF)
    assert copy.copy(group) is copy.deepcopy([group])[0] is group
    with pytest.raises(TypeError, match='save it with chainer.serializers'):
        pickle.dumps(group)


@on_ranks(2, 4)
def test_waiting_for_a_rank_that_gives_up_is_an_error(comm):
    group = group_of(comm)
    message = 'no more paper; make the model anew'
    if comm.rank == 1:
        group.give_up('no more paper')
    else:
        message = f'rank 1 of the group gave up: {message}'
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            group.gather(np.zeros(10000))
    # A new group of the same ranks knows nothing of it.
    again = group_of(comm)
    assert again is not group
    assert sum(again.gather(1)) == comm.size
    assert group_of(comm) is again
    # Nor does a later communicator receive what it has sent.
    parts = comm.Dup()
    group_of(parts).give_up('no more paper')
    free_with_kept(parts)
    later = [comm.Dup() for _ in range(4)]
    comm.Barrier()
    assert not any(one.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for one in later)
    for one in later:
        one.Free()
