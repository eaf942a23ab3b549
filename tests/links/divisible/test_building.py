from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.pipeline.layers import LayerError

import chainer.links as L
import pytest

from tests.ranks import on_ranks


def model():
    return Divisible(lazy(L.Linear, 4, 4), lazy(L.Linear, 4, 3, bad=1))


@on_ranks(1, 2)
@pytest.mark.parametrize('balance', ['layers', 'parameters'])
def test_a_layer_that_cannot_be_built_is_an_error_on_all_ranks(comm, balance):
    with pytest.raises(LayerError, match=r'layer 1 .* cannot be built: '
                                         'TypeError'):
        model().stage(comm, balance=balance)


@on_ranks(4)
def test_so_it_is_on_all_ranks_of_a_grid(comm):
    grid = ProcessGrid(comm, pipeline=2)
    with pytest.raises(LayerError, match='rank 1: .*; rank 3: layer 1'):
        model().stage(grid, balance='layers')
    grid.free()


def test_a_communicator_that_only_counts_is_enough():
    class Comm:
        rank, size = 0, 2
    part = Divisible(lazy(L.Linear, 4, 4), lazy(L.Linear, 4, 3)).stage(
        Comm(), balance='layers')
    assert part.bounds == ((0, 1),)
