"""A look at a model changes copies of what links keep in attributes."""
import collections
import random

from chainer_fp8pipe.chains.attributes import generators_of, on_copies

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

    def __repr__(self):
        return f'Keeper({self.kept})'


def draw(name, *arguments):
    return lambda link: getattr(link.kept, name)(*arguments)


#: An attribute's value, and how forward changes it.
CHANGES = {
    'array': (array(), lambda link: link.kept.__iadd__(1)),
    'list': ([1, 2], lambda link: link.kept.append(3)),
    'a list in a dictionary': (
        {'a': [1]}, lambda link: link.kept['a'].append(2)),
    'counter': (collections.Counter('aab'),
                lambda link: link.kept.update('b')),
    'generator of NumPy': (numpy.random.RandomState(5), draw('rand')),
    'new generator of NumPy': (numpy.random.default_rng(5), draw('random')),
    "generator of Python's": (random.Random(5), draw('gauss', 0, 1)),
    'in an object': (Keeper(numpy.random.RandomState(5)),
                     lambda link: link.kept.kept.rand()),
    'beside what cannot be copied': (
        [1], lambda link: (link.kept.append(2), link.file)[:0]),
    'attribute that was deleted': (1, lambda link: delattr(link, 'kept'))}


@pytest.mark.parametrize('name', CHANGES)
def test_an_attribute_is_as_it_was(name):
    value, change = CHANGES[name]
    link = chainer.Link()
    link.kept, link.file = value, (one for one in ())
    links, expected = {'/': link}, repr(value)
    with on_copies(links):
        first = change(link)
    assert link.kept is value
    assert repr(link.kept) == expected
    second = change(link)           # and again
    assert repr(first) == repr(second)      # what was drawn, say


def test_what_two_links_share_they_share_in_copies():
    one, other = chainer.Link(), chainer.Link()
    one.kept = other.kept = numpy.random.RandomState(0)
    links = {'/': one, '/other': other}
    assert any(found is one.kept for found in generators_of(links))
    with on_copies(links):
        assert one.kept is other.kept
        drawn = one.kept.rand(), other.kept.rand()
    assert drawn == (one.kept.rand(), other.kept.rand())


def test_what_cannot_be_written_to_is_not_copied():
    link = chainer.Link()
    link.table = numpy.broadcast_to(numpy.zeros(1), (1 << 40,))
    with on_copies({'/': link}):
        assert link.table.shape == (1 << 40,)
