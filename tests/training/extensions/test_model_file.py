from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.training.extensions import save_whole_model

import chainer
import pytest

from tests.ranks import on_ranks
from tests.training.updaters.networks import Normalised, dataset

from ..trainers import bits


def trained():
    """The whole model, with running statistics of its own."""
    model = Normalised()
    with chainer.using_config('train', True):
        model(dataset(8)[0])
    return model


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / 'model.npz')


@pytest.mark.parametrize(('pipeline', 'chunks'), [(1, 1), (2, 1), (2, 3)])
@on_ranks(2, 4)
def test_the_whole_model_is_in_the_file(comm, pipeline, chunks, path):
    grid = ProcessGrid(comm, pipeline)
    whole = trained()
    save_whole_model(
        path, whole.stage(grid, balance='layers', chunks=chunks),
        comm if pipeline == comm.size else grid)
    # Complete when the call returns, on whichever rank.
    loaded = Normalised()
    chainer.serializers.load_npz(path, loaded)
    assert bits(loaded) == bits(whole)
    part = Normalised().stage(comm, balance='layers')
    chainer.serializers.load_npz(path, part)
    parts = comm.allgather(bits(part))
    assert {key: value for one in parts for key, value in one.items()
            } == bits(whole)
    grid.free()


@on_ranks(1, 4)
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(comm, path):
    grid = ProcessGrid(comm, min(2, comm.size))
    with pytest.raises(RuntimeError, match='rank.*No such file'):
        save_whole_model(f'{path}/there/model.npz',
                         trained().stage(grid, balance='layers'), grid)
    grid.free()
