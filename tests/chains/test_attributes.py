"""What forward passes change in attributes of links is put back."""
import collections
import functools
import random
import reprlib

from chainer_fp8pipe.chains.attributes import saved

import chainer
import numpy
import pytest


def array():
    return numpy.arange(3.)


def _set(link, value):
    link.kept = value


class Keeper:
    def __init__(self, kept):
        self.kept = kept

    @reprlib.recursive_repr()
    def __repr__(self):
        return f'Keeper({vars(self)})'


class Slots:
    __slots__ = 'kept', 'empty'

    def __init__(self, kept):
        self.kept = kept


class Items(list):
    other = None

    def __repr__(self):
        return f'Items({list(self)}, {self.other})'


def cyclic():
    first = Keeper(None)
    first.kept = [first, Keeper(1)]
    return first


def closed(generator):
    return lambda: generator.rand()


def draw(name, *arguments):
    return lambda link: getattr(link.kept, name)(*arguments)


#: An attribute's value, and how forward changes it.
CHANGES = {
    'array': (array(), lambda link: link.kept.__iadd__(1)),
    'not a number': (array() * numpy.nan, lambda link: link.kept.fill(0)),
    'an array of a list': ([array()], lambda link: link.kept[0].fill(0)),
    'an array of a tuple': ((1, array()), lambda link: link.kept[1].fill(0)),
    'an array of a variable': (
        chainer.Variable(array()), lambda link: link.kept.array.fill(0)),
    'an array in place of another': (
        array(), lambda link: _set(link, array())),
    'list': ([1, 2], lambda link: link.kept.append(3)),
    'a list in a dictionary': (
        {'a': [1]}, lambda link: link.kept['a'].append(2)),
    'dictionary': ({'a': 1}, lambda link: link.kept.update(b=2)),
    'counter': (collections.Counter('aab'),
                lambda link: link.kept.update('b')),
    'set': ({1, 2}, lambda link: link.kept.add(3)),
    'queue': (collections.deque([1, 2], 2),
              lambda link: link.kept.append(3)),
    'number': (1, lambda link: _set(link, 2)),
    'generator of NumPy': (numpy.random.RandomState(5), draw('rand')),
    'new generator of NumPy': (numpy.random.default_rng(5), draw('random')),
    'bits': (numpy.random.PCG64(5), draw('random_raw')),
    "generator of Python's": (random.Random(5), draw('gauss', 0, 1)),
    'in an object': (Keeper(numpy.random.RandomState(5)),
                     lambda link: link.kept.kept.rand()),
    'object': (Keeper(1), lambda link: _set(link.kept, 2)),
    'another attribute of an object': (
        Keeper(1), lambda link: setattr(link.kept, 'other', 2)),
    'object in a cycle': (cyclic(), lambda link: _set(link.kept.kept[1], 2)),
    'list with attributes': (
        Items([1]), lambda link: setattr(link.kept, 'other', 2)),
    'method': (Keeper(numpy.random.RandomState(5)).kept.rand,
               lambda link: link.kept()),
    'partial function': (
        functools.partial(numpy.random.RandomState(5).rand, 2),
        lambda link: link.kept()),
    'closure': (closed(numpy.random.RandomState(5)),
                lambda link: link.kept()),
    'slot': (Slots(numpy.random.RandomState(5)),
             lambda link: link.kept.kept.rand()),
    'attribute that was deleted': (1, lambda link: delattr(link, 'kept')),
}


@pytest.mark.parametrize('name', CHANGES)
def test_an_attribute_is_as_it_was_though_it_was_changed_in_place(name):
    value, change = CHANGES[name]
    link = chainer.Link()
    link.kept = value
    expected = repr(value)
    with saved({'/': link}) as before:
        first = change(link)
        if getattr(link, 'kept', value) is not value:
            assert before.replaced() == {('/', 'kept')}
    assert link.kept is value
    assert repr(link.kept) == expected
    second = change(link)           # and again
    assert repr(first) == repr(second)      # what was drawn, say
    before.put_back()
    assert repr(link.kept) == expected


def test_what_two_links_share_they_share_afterwards():
    one, other = chainer.Link(), chainer.Link()
    one.kept = other.kept = numpy.random.RandomState(0)
    with saved({'/': one, '/other': other}):
        drawn = one.kept.rand(), other.kept.rand()
    assert one.kept is other.kept
    assert drawn == (one.kept.rand(), other.kept.rand())


def test_an_attribute_that_was_not_there_goes():
    link = chainer.Link()
    with saved({'/': link}) as before:
        link.new = 1
        assert before.replaced() == {('/', 'new')}
    assert not hasattr(link, 'new')


def test_what_cannot_be_written_to_is_not_copied():
    link = chainer.Link()
    link.table = numpy.broadcast_to(numpy.zeros(1), (1 << 40,))
    with saved({'/': link}) as before:
        assert not before.replaced()
    assert link.table.shape == (1 << 40,)
