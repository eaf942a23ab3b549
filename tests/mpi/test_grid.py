from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.mpi.grid import ProcessGrid

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

from .scarcity import communicators_left


@pytest.mark.parametrize('inside', ['pipeline', 'data', 'auto'])
@pytest.mark.parametrize('pipeline', [1, 2, 4])
@on_ranks(4)
def test_ranks_in_the_axes_are_stage_and_replica(comm, pipeline, inside):
    grid = ProcessGrid(comm, pipeline, inside)
    assert (grid.stages, grid.replicas) == (pipeline, 4 // pipeline)
    assert (grid.pipeline.size, grid.pipeline.rank) == (
        grid.stages, grid.stage_index)
    assert (grid.data.size, grid.data.rank) == (
        grid.replicas, grid.replica_index)
    # One communicator holds one replica, the other one stage.
    assert set(grid.pipeline.allgather(grid.replica_index)) == {
        grid.replica_index}
    assert set(grid.data.allgather(grid.stage_index)) == {grid.stage_index}
    assert grid.placement.ranks[grid.stage_index][
        grid.replica_index] == comm.rank
    grid.free()


@on_ranks(4)
def test_the_axes_change_places_with_the_bytes(comm):
    """Two nodes of two ranks; more bytes means the same node."""
    for pipeline_bytes, data_bytes, partner in ((8, 2, 'pipeline'),
                                                (2, 8, 'data')):
        grid = ProcessGrid(comm, 2, pipeline_bytes=pipeline_bytes,
                           data_bytes=data_bytes, ranks_per_node=2)
        near, far = ((grid.pipeline, grid.data) if partner == 'pipeline'
                     else (grid.data, grid.pipeline))
        assert near.allgather(comm.rank) == [comm.rank & 2, comm.rank | 1]
        assert far.allgather(comm.rank) == [comm.rank & 1, comm.rank | 2]
        grid.free()


@on_ranks(3)
def test_ranks_that_share_memory_or_so_many_as_are_said_are_a_node(comm):
    for given, nodes in (None, (0, 0, 0)), (2, (0, 0, 1)):
        grid = ProcessGrid(create_communicator('naive', comm), 3,
                           ranks_per_node=given)
        assert MPI.Comm.Compare(grid.comm, comm) in (
            MPI.IDENT, MPI.CONGRUENT)
        assert grid.placement.nodes == nodes
        assert grid.stage_index == comm.rank
        grid.free()


@on_ranks(4)
def test_communicators_are_given_back(comm):
    grid = ProcessGrid(comm, 2)
    grid.free()
    grid.free()                 # once more does no harm
    with communicators_left(comm, 10):
        for _ in range(20):     # more than fit if none were freed
            ProcessGrid(comm, 2).free()


@on_ranks(4)
def test_print_shows_where_ranks_are_and_what_moves(comm):
    grid = ProcessGrid(comm, 2, pipeline_bytes=6e6, data_bytes=2.5e6,
                       ranks_per_node=2)
    assert str(grid) == r'''
4 ranks on 2 nodes: 2 stages x 2 replicas (rank@node)
stage \ replica    0    1
              0  0@0  2@1
              1  1@0  3@1
pipeline axis: inside nodes; 12 MB per step
data axis: crosses between nodes; 5 MB per step, 5 MB of it between nodes
'''.strip()
    assert repr(grid) == (
        f'<ProcessGrid: rank {comm.rank} is stage {comm.rank % 2} of 2, '
        f'replica {comm.rank // 2} of 2>')
    grid.free()
    alone = ProcessGrid(comm, 4, ranks_per_node=2)
    assert str(alone).splitlines()[-2:] == [
        'pipeline axis: crosses between nodes', 'data axis: nothing to send']
    alone.free()


@on_ranks(4)
@pytest.mark.parametrize(('options', 'message'), [
    ({'pipeline': 3}, 'pipeline=3 does not divide the 4 ranks; it can be '
                      '1, 2 or 4'),
    *(({'pipeline': number}, 'it can be') for number in (0, -2, 8, None)),
    ({'inside': 'node'}, "'pipeline', 'data' or 'auto', not 'node'"),
    ({'pipeline_bytes': 5}, '5 and None'),
    ({'pipeline_bytes': -1, 'data_bytes': 1}, '-1'),
    ({'ranks_per_node': 0}, 'ranks_per_node must be'),
    # Of rank 3 alone, or of rank 1.
    ({3: {'pipeline': 4}}, 'pipeline is 2 on rank 0 but 4 on rank 3'),
    ({1: {'inside': 'data'}},
     "inside is 'auto' on rank 0 but 'data' on rank 1"),
])
def test_bad_or_different_arguments_are_an_error_on_all_ranks(
        comm, options, message):
    mine = options.get(comm.rank, {
        name: value for name, value in options.items() if name not in (1, 3)})
    with pytest.raises(ValueError, match=message) as raised:
        ProcessGrid(comm, **{'pipeline': 2, **mine})
    assert len(set(comm.allgather(str(raised.value)))) == 1
