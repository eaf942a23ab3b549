"""The grid that is returned is the best one of the table."""
from chainer_fp8pipe import choose_grid
from chainer_fp8pipe.chains.partition import predict_layouts
from chainer_fp8pipe.planning import DoesNotFit

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks

EXAMPLE = (numpy.ones((2, 20), 'f'), numpy.zeros(2, 'i'))


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(
                *[L.Linear(20, 20) for _ in range(6)])

    def forward(self, x, t):
        for layer in self.layers:
            x = F.tanh(layer(x))
        return F.softmax_cross_entropy(x, t)


@on_ranks(4)
def test_all_ranks_get_the_same_predictions(comm):
    model = Net()
    found = predict_layouts(model, EXAMPLE, comm)
    assert {(one.stages, one.replicas) for one in found} == {
        (1, 4), (2, 2), (4, 1)}
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds)
    assert set(map(str, comm.allgather(found))) == {str(found)}
    # The model is as it was.
    assert model.layers[0].W.array.shape == (20, 20)


@on_ranks(2)
def test_the_first_rank_prints_the_table(comm):
    import contextlib
    import io
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        grid = choose_grid(Net(), EXAMPLE, comm, codec='float32')
    assert grid.stages * grid.replicas == 2
    lines = said.getvalue().splitlines()
    if comm.rank:
        assert lines == []
    else:
        assert lines[1].startswith(f'{grid.stages} x {grid.replicas}')
    grid.free()


@on_ranks(2)
def test_what_no_layout_fits_into_is_an_error_on_all_ranks(comm):
    with pytest.raises(DoesNotFit, match='no layout of 2 ranks: no cut'):
        choose_grid(Net(), EXAMPLE, comm, memory='1 kB', show=False)


@on_ranks(2)
def test_codecs_are_named(comm):
    with pytest.raises(ValueError, match='codec must be one of fp8, float16'):
        choose_grid(Net(), EXAMPLE, comm, codec='fp4')
