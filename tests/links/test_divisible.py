import copy
import gc
import weakref
from unittest import mock

from chainer_fp8pipe.links import Divisible, lazy
from chainer_fp8pipe.mpi.grid import ProcessGrid
from chainer_fp8pipe.pipeline.layers import LayerError

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import on_ranks

from .helpers import INPUT, Net, Rank, bits, linears, marks, stages


class Program2(Divisible):
    """As the paper prints it: without super().__init__()."""

    def __init__(self):
        self.append(L.Linear(3, 4))
        self.append(F.relu)
        self.append(L.Linear(4, 2))


def test_the_papers_program_2_divides_a_model():
    whole = Program2()
    first, second = whole.divide(0, 2), whole.divide(2, 3)
    assert type(first) is type(second) is Program2
    np.testing.assert_array_equal(second(first(INPUT)).array,
                                  whole(INPUT).array)


def test_a_part_is_named_by_the_indices_in_the_whole_model():
    whole = Net()
    part = whole.divide(1, 4)
    assert part[1] is whole[2]
    assert part.divide(2, 4).bounds == ((2, 4),)
    assert part.bounds == ((1, 4),)
    assert part.total == 5
    assert len(part) == 3
    assert part.layout is None
    assert [name for name, _ in part.namedparams()] == ['/2/W', '/2/b']
    assert [link.name for link in part.children()] == ['2']
    (piece,) = part.pieces
    assert [number for number, _ in piece] == [1, 2, 3]
    assert piece[0][1] is F.relu


@pytest.mark.parametrize(('start', 'end', 'error', 'message'), [
    (0, 6, IndexError, r'divide\(0, 6\) is out of range.*layers 0 to 4'),
    (-1, 2, IndexError, 'out of range'),
    (0, -1, IndexError, 'out of range'),
    (7, 9, IndexError, 'out of range'),
    (3, 3, ValueError, 'has no layers'),
    (3, 2, ValueError, 'has no layers'),
    (0.0, 2, TypeError, 'float'),
])
def test_bad_indices_name_the_range_and_the_layers(start, end, error,
                                                   message):
    with pytest.raises(error, match=message):
        Net().divide(start, end)
    with pytest.raises(IndexError, match='layers 1 to 3 of 5'):
        Net().divide(1, 4).divide(0, 2)


# --- stages ---------------------------------------------------------------

def test_stages_are_every_layer_once_in_order():
    parts = stages(Net, 2)
    assert [part.bounds for part in parts] == [((0, 2),), ((2, 5),)]
    assert {part.layout for part in parts} == {((0, 2), (2, 5))}
    assert all(type(part) is Net for part in parts)


def test_chunks_go_round_the_ranks():
    def make():
        return Divisible(*linears(8))

    first, second = stages(make, 2, chunks=2, balance='layers')
    assert first.bounds == ((0, 2), (4, 6))
    assert second.bounds == ((2, 4), (6, 8))
    assert second.layout == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert [[number for number, _ in piece] for piece in second.pieces] == [
        [2, 3], [6, 7]]
    assert [name for name, _ in second.namedlinks()] == [
        '/', '/2', '/3', '/6', '/7']
    with pytest.raises(RuntimeError, match='layers are missing between'):
        second(np.ones((1, 2), np.float32))


def test_a_process_grid_is_read_by_its_stage():
    class Grid(Rank):       # rank 3 of 4 is the second stage of a pipeline
        stage_index, stages = 1, 2

    part = Net().stage(Grid(3, 4), balance='layers')
    assert part.bounds == ((2, 5),)
    assert part.layout == ((0, 2), (2, 5))


@pytest.mark.parametrize(('size', 'chunks', 'message'), [
    (6, 1, '5 layers, too few for 6 ranks'),
    (2, 3, '5 layers, too few for the 6 chunks of 2 ranks with 3 each'),
    (2, 0, '1 chunk or more, not 0')])
def test_too_many_chunks_for_the_layers_are_an_error_on_all_ranks(
        size, chunks, message):
    for rank in range(size):
        with pytest.raises(ValueError, match=message):
            Net().stage(Rank(rank, size), chunks=chunks)


# --- what must not be cut apart ---------------------------------------------

def test_a_link_on_both_sides_of_a_cut_is_an_error_that_names_both_layers():
    link = L.Linear(2, 2)
    model = Divisible(link, F.relu, L.Linear(2, 2), link)
    with pytest.raises(ValueError, match=(
            r'layer 0 \(Linear\) and layer 3 \(Linear\) share the link '
            'Linear')):
        model.divide(0, 2)
    for size in (2, 4):
        for rank in range(size):    # those that have neither as well
            with pytest.raises(ValueError, match='layer 0 .* and layer 3'):
                model.stage(Rank(rank, size))
    assert model.divide(1, 3).bounds == ((1, 3),)


def test_a_link_may_be_twice_on_one_rank():
    link = L.Linear(2, 2)
    model = Divisible(link, F.relu, link, L.Linear(2, 2))
    part = model.stage(Rank(0, 2), balance=[3, 1])
    assert len(list(part.params())) == 2


# --- any model, any cut -----------------------------------------------------

def plus(x, *more):
    """Lets a skip connection travel along: returns what it was given."""
    return (x + 1, *more)


def fork(x, *more):
    return (x, x * 0.5)


def join(x, *more):
    return x + sum(more)


LAYERS = {
    'lazy': lambda: lazy(L.Linear, 3, 3),
    'sized by its input': lambda: L.Linear(None, 3),
    'lazy, sized by its input': lambda: lazy(L.Linear, None, 3),
    'batch normalisation': lambda: lazy(L.BatchNormalization, 3),
    'nested': lambda: Divisible(lazy(L.Linear, 3, 3), F.tanh),
    'nested twice': lambda: Divisible(
        Divisible(lazy(L.Linear, 3, 3)), lazy(L.Linear, 3, 3)),
    'function': lambda: F.relu,
}


@st.composite
def models(draw):
    """How to make a model, so that it can be made again."""
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=2,
                          max_size=9))
    fork_at = draw(st.integers(0, len(names)))
    seed = draw(st.integers(0, 2 ** 33))

    def make():
        layers = [LAYERS[name]() for name in names]
        if fork_at < len(names):
            layers[fork_at:fork_at] = [fork, plus, join]
        return Divisible(*layers, seed=seed)
    return make


@settings(max_examples=60)
@given(models(), st.data())
def test_parts_of_any_model_are_the_whole_bit_for_bit(make, data):
    """Names, initial values and what they compute."""
    whole = make()
    size = data.draw(st.integers(1, len(whole)))
    chunks = data.draw(st.integers(1, len(whole) // size))
    parts = stages(make, size, chunks=chunks, balance='layers')
    y = whole(INPUT)
    pieces = [(chunk * size + rank, piece)
              for rank, part in enumerate(parts)
              for chunk, piece in enumerate(part.pieces)]
    h = INPUT
    for _, piece in sorted(pieces, key=lambda pair: pair[0]):
        # A part per chunk, as such parts can be called.
        h = make().divide(piece[0][0], piece[-1][0] + 1)(
            *(h if isinstance(h, tuple) else (h,)))
    assert h.array.tobytes() == y.array.tobytes()
    fed = make()
    fed(INPUT)
    assert bits(fed) == bits(whole)
    built = [bits_of_known(part) for part in parts]
    names = [name for part in built for name in part]
    assert len(names) == len(set(names))
    assert {name: value for part in built for name, value in part.items()
            } == bits_of_known(make())


def bits_of_known(model):
    """Of the parameters that have a shape; None for the others."""
    return {name: None if parameter.array is None
            else parameter.array.tobytes()
            for name, parameter in model.namedparams()}


# --- what parts carry along -------------------------------------------------

def test_a_method_of_the_model_becomes_that_of_the_part():
    whole = Net()
    part = whole.divide(3, 5)
    whole.width, part.width = 1, 7
    assert part[0].__self__ is part
    assert whole[3].__self__ is whole


def test_a_part_keeps_the_users_attributes_but_no_other_layers_alive():
    class Holds(Divisible):
        def __init__(self):
            super().__init__()
            self.note = 'mine'
            self.first = L.Linear(2, 2)
            self.second = L.Linear(2, 2)
            self.both = [self.first, self.second]
            self.method = self.neither
            self.function = lambda x: (self, x)
            self.append(self.first)
            self.append(self.second)
            self.append(self.neither)

        def neither(self, x):
            return x

    whole = Holds()
    part = whole.divide(1, 3)
    first = weakref.ref(whole.first)
    assert part.note == 'mine'
    assert part.second is whole.second
    assert not hasattr(part, 'first')
    assert not hasattr(part, 'both')
    assert part.method.__self__ is part
    assert part.function(3) == (whole, 3)
    del whole, part.function        # which would keep it alive
    gc.collect()
    assert first() is None


def test_an_init_with_arguments_is_not_called_for_a_part():
    class Sized(Divisible):
        def __init__(self, width):
            super().__init__(*linears(3, width))

    assert type(Sized(2).divide(0, 2)) is Sized


# --- slices -----------------------------------------------------------------

def test_a_slice_is_a_part_by_positions():
    whole = Divisible(*linears(6))
    part = whole[1:5]
    assert part.bounds == ((1, 5),)
    assert marks(part) == [1, 2, 3, 4]
    assert part[1:3].bounds == ((2, 4),)
    assert whole[-2:].bounds == ((4, 6),)
    assert whole[:].bounds == ((0, 6),)
    whole[:].append(F.relu)         # all layers are no part
    assert len(whole[3:3]) == 0


def test_a_slice_over_several_chunks_has_several_runs():
    part = Divisible(*linears(8)).stage(Rank(0, 2), chunks=2)
    assert part.bounds == ((0, 2), (4, 6))
    assert part[1:4].bounds == ((1, 2), (4, 6))
    assert part[1:2].bounds == ((1, 2),)


def model():
    return Divisible(lazy(L.Linear, 4, 4), lazy(L.Linear, 4, 3, bad=1))


@on_ranks(1, 2)
@pytest.mark.parametrize('balance', ['layers', 'parameters'])
def test_a_layer_that_cannot_be_built_is_an_error_on_all_ranks(comm, balance):
    with pytest.raises(LayerError, match=r'layer 1 .* cannot be built: '
                                         'TypeError'):
        model().stage(comm, balance=balance)


@on_ranks(2)
def test_an_error_without_a_text_is_an_error_on_all_ranks(comm):
    def fail(part):
        raise AssertionError
    with mock.patch.object(Divisible, '_numbered_layers', fail), \
            pytest.raises(LayerError, match=r'rank 1: AssertionError\(\)'):
        Divisible(*linears(4)).stage(comm, balance='layers')


@on_ranks(4)
def test_a_layer_that_cannot_be_built_is_an_error_on_all_ranks_of_a_grid(comm):
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


@pytest.mark.parametrize('duplicate', [
    copy.deepcopy, lambda model: model.copy('copy'), lambda model: model.copy()
], ids=['deepcopy', 'copy', 'share'])
@pytest.mark.parametrize('cut', [lambda model: model,
                                 lambda model: model.divide(1, 4)])
def test_a_copy_is_of_the_class_and_has_the_same_values(duplicate, cut):
    model = cut(Net())
    found = duplicate(model)
    assert type(found) is Net
    assert found.bounds == model.bounds
    assert bits(found) == bits(model)
    assert all(one is not other for one, other in zip(
        found.params(), model.params(), strict=True))


def test_copies_share_arrays_in_mode_share_only():
    model = Divisible(L.Linear(2, 2), F.relu)
    shared, own = model.copy('share')[0].W, model.copy('copy')[0].W
    assert shared.array is model[0].W.array
    assert own.array is not model[0].W.array


@pytest.mark.parametrize(('act', 'message'), [
    (lambda: Divisible(L.Linear), 'is a class, not a layer'),
    (lambda: Divisible(3), 'must be callable'),
    (lambda: Net()[::2], 'consecutive'),
    (lambda: Net().divide(0, 3).stage(Rank(0, 2)), 'is a part already'),
    (lambda: Net().divide(1, 3).append(F.relu), 'is a part'),
    (lambda: Net().copy('init'), 'make the model anew'),
])
def test_what_a_model_cannot_do_is_an_error_with_the_remedy(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_layers_of_a_part_are_replaced():
    part = Net().divide(1, 3)
    part[0] = F.tanh
    assert part[0] is F.tanh
