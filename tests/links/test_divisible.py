import gc
import io
import itertools
import weakref

from chainer_fp8pipe.chains.placeholder import is_placeholder
from chainer_fp8pipe.links import Divisible, lazy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from tests.ranks import on_ranks

from .helpers import INPUT, Net, bits, linears, stages

#: Layers of three stages.
MIDDLE = [1, 3, 1]


class Program2(Divisible):
    """As the paper prints it: without super().__init__()."""

    def __init__(self):
        self.append(L.Linear(3, 4))
        self.append(F.relu)
        self.append(L.Linear(4, 2))


def test_the_papers_program_2_is_cut():
    whole = Program2()
    first, second = whole.divide(0, 2), whole.divide(2, 3)
    assert type(first) is type(second) is Program2
    np.testing.assert_array_equal(second(first(INPUT)).array,
                                  whole(INPUT).array)


# --- stages ---------------------------------------------------------------

def test_stages_have_every_layer_once_and_chunks_go_round():
    parts = stages(Net, 2)
    assert [part.bounds for part in parts] == [((0, 2),), ((2, 5),)]
    assert {part.layout for part in parts} == {((0, 2), (2, 5))}
    assert all(type(part) is Net for part in parts)
    first, second = stages(lambda: Divisible(*linears(8)), 2, chunks=2,
                           balance='layers')
    assert first.bounds == ((0, 2), (4, 6))
    assert [link.name for link in first] == [*'01234567']
    assert second.layout == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert [[number for number, _ in piece] for piece in second.pieces] == [
        [2, 3], [6, 7]]
    with pytest.raises(RuntimeError, match='at a stretch'):
        second(np.ones((1, 2), np.float32))


class Fails(chainer.initializer.Initializer):
    def __init__(self, *said):
        self.error = ValueError(*said)

    def __call__(self, array):
        raise self.error


@pytest.mark.parametrize('said', [['no such values'], []])
@on_ranks(1, 2)
def test_values_that_cannot_be_drawn_are_an_error_on_all_ranks(comm, said):
    model = Divisible(lazy(L.Linear, 4, 4),
                      lazy(L.Linear, 4, 3, initialW=Fails(*said)))
    text = said[0] if said else 'ValueError'
    with pytest.raises(ValueError, match=f'{comm.size - 1}: .*{text}|all'):
        model.stage(comm)


#: What differs on the last rank, and what all ranks say.
DIFFERENT = {
    'fewer layers': (lambda last: dict(layers=2 if last else 4), 'layers'),
    'no layer': (lambda last: dict(layers=1 if last else 4),
                 'be cut into 1 chunks for each of 2'),
    'another width': (lambda last: dict(widths=[4, 4 + last, 4]),
                      r'parameter /0/W is float32 \(4, 4\) on rank 0 but '
                      r'float32 \(5, 4\) on rank 1'),
    'another function': (lambda last: dict(end=F.tanh if last else F.relu),
                         'layer 4 is relu on rank 0 but tanh on rank 1'),
    'another measure': (lambda last: dict(
        balance='parameters' if last else 'layers'), 'balance is layers on'),
    'wrong counts': (lambda last: dict(balance=[9] if last else [2, 3]),
                     r'rank 1: ValueError: balance=\[9\] does not fit'),
    'other chunks': (lambda last: dict(chunks=1 + last), 'chunks is 1 on'),
    'a text for chunks': (lambda last: dict(chunks='2' if last else 2),
                          'rank 1: TypeError'),
    'another seed': (lambda last: dict(seed=int(last)), 'seed of the model'),
    'a part': (lambda last: dict(part=last), 'is a part already'),
    'a forward of its own': (
        lambda last: dict(kind=OwnForward if last else Divisible),
        'OwnForward has a forward of its own'),
    'a call of its own': (lambda last: dict(kind=OwnCall),
                          'OwnCall has a __call__ of its own'),
    'a hook': (lambda last: dict(hook=last), 'add them to layers'),
    'a shared layer': (lambda last: dict(shared=True), 'share the Linear'),
    'an interrupt': (lambda last: dict(balance=Interrupting() if last else [
        2, 3]), 'KeyboardInterrupt'),
}


class Interrupting(list):
    def __iter__(self):
        raise KeyboardInterrupt


class OwnForward(Divisible):
    def forward(self, x):
        return super().forward(x / 10)


class OwnCall(Divisible):
    def __call__(self, x):
        return super().__call__(x / 10)


def different(comm, layers=4, widths=(4, 4, 4), end=F.relu, seed=0,
              kind=Divisible, part=False, hook=False, shared=False, **given):
    """A stage of a model of 5 layers, unless said otherwise."""
    widths = [*widths, 4, 4][:layers + 1]
    links = [L.Linear(*pair) for pair in itertools.pairwise(widths)]
    if shared:
        links[-1] = chainer.Sequential(links[0])
    model = kind(*links, end, seed=seed) if layers > 1 else kind(*links)
    if hook:
        model.add_hook(chainer.link_hooks.TimerHook())
    return (model.share(0, 1) if part else model).stage(comm, **given)


@pytest.mark.parametrize('case', DIFFERENT)
@on_ranks(2)
def test_what_is_wrong_or_other_on_one_rank_is_an_error_on_all(comm, case):
    options, said = DIFFERENT[case]
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        different(comm, **options(comm.rank == 1))
    if isinstance(caught.value, ValueError):
        caught.match(said)


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
    'lazy and nested': lambda: lazy(lambda: Divisible(
        L.Linear(3, 3), lazy(L.Linear, None, 3))),
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


@settings(max_examples=20)
@given(models(), st.data())
def test_parts_of_any_model_are_the_whole_bit_for_bit(make, data):
    """Names, initial values and what they compute."""
    whole = make()
    size = data.draw(st.integers(1, len(whole)))
    chunks = data.draw(st.integers(1, len(whole) // size))
    parts = stages(make, size, chunks=chunks, balance='layers')
    y = whole(INPUT)
    h = INPUT,
    for number in range(len(parts[0].layout)):
        for _, layer in parts[number % size].pieces[number // size]:
            h = layer(*h)
            h = h if isinstance(h, tuple) else (h,)
    assert h[0].array.tobytes() == y.array.tobytes()
    parts = stages(make, size, chunks=chunks, balance='layers')
    fed = make()
    fed(INPUT)
    assert bits(fed) == bits(whole)
    names = [name for part in parts for name in bits(part)]
    assert len(names) == len(set(names))
    assert {name: value for part in parts
            for name, value in bits(part).items()} == bits(make())


@pytest.mark.parametrize('save', [
    lambda model: chainer.serializers.save_npz(io.BytesIO(), model),
    lambda model: chainer.serializers.DictionarySerializer().save(model),
    lambda model: chainer.serializers.save_npz(
        io.BytesIO(), chainer.optimizers.SGD().setup(model))])
def test_a_stage_is_not_saved_as_if_it_were_the_model(save):
    part, _ = stages(Net, 2)
    with pytest.raises(RuntimeError, match='has a part of Net only.*'
                                           'save_whole_model'):
        save(part)
    save(Net().share(0, 1))       # has all


# --- lazy layers ---------------------------------------------------------

def test_nothing_is_drawn_before_it_is_used():
    model = Net()
    part = model.share(1, 3, MIDDLE)
    assert repr(part) == '<Net: layers 1 to 3 of 5>'
    assert repr(model.share(0, 3, MIDDLE)) == '<Net: layers 0 of 5>'
    assert [', on stage' in line for line in str(part).splitlines()] == [
        False, True, False, False, False, True, False]
    model.cleargrads()
    assert all(is_placeholder(one._data[0]) for one in model.params())
    assert len(bits(part)) == 2
    assert [is_placeholder(one._data[0]) for one in model.params()] == [
        True, True, False, False, True, True]
    assert [is_placeholder(one._data[0]) for one in Net().stage(
        MPI.COMM_SELF).params()] == [False] * 6


def test_initial_values_depend_on_seed_and_index_only():
    def model(count, seed=0):
        return Divisible(*[lazy(L.Linear, 2, 2) for _ in range(count)],
                         seed=seed)

    whole = bits(model(4))
    assert len(set(whole.values())) == 5        # all biases are zero
    assert bits(model(6)).items() >= whole.items()
    assert bits(model(4, seed=1))['/0/W'] != whole['/0/W']


# --- what parts carry along -------------------------------------------------

def test_a_method_of_the_model_becomes_that_of_the_part():
    whole = Net()
    part = whole.share(1, 2, [3, 2])
    whole.width, part.width = 1, 7
    assert part[3].function.__self__ is part
    assert whole[3].function.__self__ is whole


def test_a_part_keeps_the_users_attributes_and_lets_other_layers_go():
    whole = Divisible(L.Linear(2, 2), L.Linear(2, 2))
    whole.note = 'mine'
    part = whole.share(1, 2)
    first = weakref.ref(whole[0])
    assert (part.note, part[1]) == ('mine', whole[1])
    del whole
    gc.collect()
    assert first() is None


def test_copies_share_arrays_in_mode_share_only():
    link = L.Linear(2, 2)
    model = Divisible(link, F.relu, link)
    for mode in 'share', 'copy':
        found = model.copy(mode)
        assert (found[0].W.array is link.W.array) == (mode == 'share')
        assert found[2].function is found[0] is not link


@pytest.mark.parametrize(('act', 'error', 'message'), [
    (lambda: Divisible(L.Linear), ValueError, 'must be callable.*no class'),
    (lambda: Divisible(3), ValueError, 'must be callable'),
    (lambda: Divisible()(INPUT), RuntimeError, 'has no layers'),
    *((lambda given=given: lazy(given), TypeError,
       'a class or function that makes a layer')
      for given in (5, L.Linear(3, 2))),
    *((lambda size=size, chunks=chunks: Net().share(0, size, chunks=chunks),
       ValueError, f'into {chunks} chunks for each of {size} ranks: a chunk '
       'has 1 layer') for size, chunks in ((6, 1), (2, 3), (2, 0))),
    *((lambda run=run: Net().divide(*run), ValueError, 'has no layers')
      for run in ((2, 2), (-1, 2), (3, 6))),
    (lambda: Net().share(0, 2).append(F.relu), ValueError,
     'keep their numbers'),
    (lambda: Net().share(0, 2).add_hook(chainer.link_hooks.TimerHook()),
     ValueError, 'add them to layers'),
    (lambda: Net().insert(1, F.relu), ValueError, 'keep their numbers'),
    (lambda: Net().pop(), ValueError, 'make a new model of others'),
    (lambda: Net().copy('init'), ValueError, 'make the model anew'),
    *[(lambda register=register: register(Net()), TypeError,
       'Net holds layers only.*append') for register in (
        lambda model: model.init_scope(),
        lambda model: model.add_param('W', (2, 2)),
        lambda model: model.add_persistent('mean', 3),
        lambda model: model.register_persistent('width'))]])
def test_what_a_model_cannot_do_is_an_error_with_the_remedy(act, error,
                                                            message):
    with pytest.raises(error, match=message):
        act()

