"""What forward passes change in attributes of links is put back."""
import collections
import copy

from chainer_fp8pipe.chains.tracing.link_state import saved

import chainer
import numpy
import pytest


def array():
    return numpy.arange(3.)


def _set(link, value):
    link.kept = value


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
    'attribute that was deleted': (1, lambda link: delattr(link, 'kept')),
}


@pytest.mark.parametrize('name', CHANGES)
def test_an_attribute_is_as_it_was_though_it_was_changed_in_place(name):
    value, change = CHANGES[name]
    link = chainer.Link()
    link.kept = value
    expected = copy.deepcopy(value)
    with saved({'/': link}) as before:
        change(link)
        if hasattr(link, 'kept'):
            assert before.changed() == {('/', 'kept')}
    assert link.kept is value
    assert repr(link.kept) == repr(expected)
    change(link)            # and again
    before.put_back()
    assert repr(link.kept) == repr(expected)


def test_an_attribute_that_was_not_there_goes():
    link = chainer.Link()
    with saved({'/': link}) as before:
        link.new = 1
        assert before.changed() == {('/', 'new')}
    assert not hasattr(link, 'new')


def test_what_is_not_changed_is_not_said_to_be():
    link = chainer.Link()
    for name, (value, _) in CHANGES.items():
        if name != 'not a number':      # which is not equal to itself
            setattr(link, name, value)
    with saved({'/': link}) as before:
        assert not before.changed()


def test_what_cannot_be_written_to_is_not_copied():
    link = chainer.Link()
    link.table = numpy.broadcast_to(numpy.zeros(1), (1 << 40,))
    with saved({'/': link}) as before:
        assert not before.changed()
    assert link.table.shape == (1 << 40,)
