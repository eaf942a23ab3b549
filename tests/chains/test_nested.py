"""Arrays are found inside of Python's containers, and put back."""
import collections

from chainer_fp8pipe.chains import nested

import chainer
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

Pair = collections.namedtuple('Pair', ['left', 'right'])
_leaf = st.sampled_from([numpy.zeros(2), chainer.Variable(numpy.ones(3))])
_constant = st.sampled_from([None, 3, 'text', slice(1, 2), 2.5])
_value = st.recursive(_leaf | _constant, lambda inner: (
    st.lists(inner) | st.lists(inner).map(tuple)
    | st.dictionaries(st.sampled_from('abc'), inner)
    | st.builds(Pair, inner, inner)))


@given(_value)
def test_leaves_go_back_to_their_places(value):
    leaves, tree = nested.leaves(value)
    again = nested.rebuilt(tree, leaves)
    found, other = nested.leaves(again)
    assert repr(again) == repr(value)
    assert type(again) is type(value)
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in leaves]
    assert repr(other) == repr(tree)


def test_every_array_and_variable_is_a_leaf():
    x, y = numpy.zeros(2), chainer.Variable(numpy.zeros(3))
    found, tree = nested.leaves({'a': [x, 3], 'b': Pair((y,), 'text')})
    assert [id(leaf) for leaf in found] == [id(x), id(y)]
    assert nested.rebuilt(tree, [1, 2]) == {'a': [1, 3],
                                            'b': Pair((2,), 'text')}


def test_equal_structures_have_equal_signatures():
    def signature(value):
        return nested.signature(nested.leaves(value)[1])
    x, y = numpy.zeros(2), numpy.ones((3, 4))
    assert signature([x, {'a': 1}]) == signature([y, {'a': 1}])
    different = [signature(value) for value in (
        [x, {'a': 1}], [x, {'a': 2}], [x, {'b': 1}], (x, {'a': 1}),
        [{'a': 1}, x], [x, {'a': True}], [x, {'a': 1.0}], [x, x, {'a': 1}])]
    assert len(set(different)) == len(different)


def test_what_cannot_be_hashed_has_no_signature():
    with pytest.raises(TypeError):
        nested.signature(nested.leaves([{1, 2}])[1])
