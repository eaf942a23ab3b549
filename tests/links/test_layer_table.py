import functools

from chainer_fp8pipe.links import Divisible, lazy

import chainer
import chainer.functions as F
import chainer.links as L

from .helpers import Rank


def deep(pairs=32):
    model = Divisible()
    for _ in range(pairs):
        model.append(lazy(L.Linear, 100, 100))
        model.append(F.relu)
    return model


def lines(model):
    return [' '.join(line.split()) for line in str(model).splitlines()]


def test_a_small_model_has_a_line_for_each_layer():
    model = Divisible(
        lazy(L.Linear, 2, 3), F.relu, L.Linear(3, 2),
        functools.partial(F.leaky_relu, slope=0.1), F.elu,
        lambda x: x, chainer.Chain(a=L.Linear(2, 2)), L.Linear(None, 2))
    assert lines(model) == [
        'Divisible: 8 layers, 23 parameters and more',
        '0 Linear(in_size=2, out_size=3, nobias=False) 9',
        '1 relu',
        '2 Linear(in_size=3, out_size=2, nobias=False) 8',
        '3 leaky_relu(slope=0.1)',
        '4 elu',
        '5 <lambda>',
        '6 Chain 6',
        '7 Linear(in_size=None, out_size=2, nobias=False) ?']


def test_a_stage_shows_where_every_layer_is_and_its_own_mark():
    class Net(Divisible):
        pass

    part = Net(*deep(2)).stage(Rank(1, 2))
    assert lines(part) == [
        'Net: layers 2 to 3 of 4, 20,200 parameters',
        'stage 0, rank 0: layers 0 to 1',
        '0 Linear(in_size=100, out_size=100, nobias=False) 10,100',
        '1 relu',
        'stage 1, rank 1 (here): layers 2 to 3',
        '2 Linear(in_size=100, out_size=100, nobias=False) 10,100',
        '3 relu']


def test_chunks_are_shown_in_the_models_order():
    titles = [line for line in lines(deep(8).stage(Rank(1, 2), chunks=2))
              if 'stage' in line]
    assert titles == [
        'stage 0, rank 0: layers 0 to 3',
        'stage 1, rank 1 (here): layers 4 to 7',
        'stage 0, rank 0: layers 8 to 11',
        'stage 1, rank 1 (here): layers 12 to 15']


def test_a_grid_has_stages_but_not_ranks():
    class Grid(Rank):
        stage_index, stages = 0, 2

    assert lines(deep(2).stage(Grid(1, 4)))[1] == (
        'stage 0 (here): layers 0 to 1')


def test_models_without_layers_and_without_knowledge_can_be_shown():
    assert repr(deep().stage(Rank(0, 2), chunks=2)) == (
        '<Divisible: layers 0 to 15 and layers 32 to 47 of 64>')
    link = L.Linear(1, 1)       # at two places it counts once
    assert lines(Divisible(link, link))[0] == (
        'Divisible: 2 layers, 2 parameters')
    cut = str(Divisible(functools.partial(F.relu, 'x' * 100)))
    assert cut.splitlines()[1].endswith('...')
    assert str(Divisible()) == 'Divisible: 0 layers, 0 parameters'
    assert lines(Divisible(L.Linear(None, 1)))[0] == (
        'Divisible: 1 layer, 0 parameters and more')
