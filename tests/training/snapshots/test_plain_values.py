import json
import pickle

from chainer_fp8pipe.training.snapshots.plain_values import (
    from_json,
    is_plain,
    to_json,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5)
    | st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False).map(
        numpy.float32) | st.integers(-9, 9).map(numpy.int8),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.integers(), inner,
                      max_size=3), max_leaves=8)


def objects(*items):
    value = numpy.empty(len(items), object)
    for place, item in enumerate(items):
        value[place] = item
    return value


def same(one, other):
    """Classes, too, which ``==`` leaves out."""
    assert one.shape == other.shape
    assert repr(one.tolist()) == repr(other.tolist())


@given(st.lists(VALUES, max_size=4))
def test_objects_come_back_as_they_were(items):
    value = objects(*items)
    same(from_json(to_json(value)), value)


@pytest.mark.parametrize('value', [
    numpy.array(None), numpy.array({'a': [1, (2, None)]}), numpy.array(2**70),
    numpy.array([[1, None], ['a', 2.5]]), numpy.array([float('inf'), None])])
def test_every_shape_comes_back(value):
    assert value.dtype == object
    same(from_json(to_json(value)), value)


def test_a_value_is_readable():
    value = numpy.array({'best': 0.5, 'at': (3, None)})
    assert json.loads(to_json(value).item()) == {
        'shape': [], 'items': [{'dict': [
            ['best', 0.5], ['at', {'tuple': [3, None]}]]}]}


@pytest.mark.parametrize(('value', 'match'), [
    (numpy.array(print), 'print> is of class builtin'),
    (objects({1, 2}), 'of class set'), (objects(b'x'), 'of class bytes'),
    (objects(True, pickle), 'of class module'),
    (objects('x' * 70000), 'takes 70026 bytes as JSON'),
    (numpy.zeros(2, [('a', 'f4')]), 'dtype .*f4.* are not saved')])
def test_what_cannot_be_saved_is_named(value, match):
    assert not is_plain(value)
    with pytest.raises(TypeError, match=match):
        to_json(value)


def test_a_list_in_itself_is_an_error():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match='nested too deeply'):
        to_json(objects(value))


@pytest.mark.parametrize('text', [
    b'', b'null', b'[]', b'{}', b'{"shape":[],"items":[]}',
    b'{"shape":[-1,-1],"items":[1]}', b'{"shape":[2],"items":[1]}',
    b'{"shape":[],"items":[{"dict":[[[1],2]]}]}',
    b'{"shape":[],"items":[{"tuple":1}]}',
    b'{"shape":[],"items":[{"eval":"1"}]}',
    b'{"shape":[],"items":[{}]}', b'{"shape":"","items":[1,2]}',
    b'{"shape":[],"items":[{"number":["<U9999999","00"]}]}',
    b'{"shape":[],"items":[{"number":["O","00"]}]}',
    b'{"shape":[9999999999999],"items":[1]}', b'\xff', b'[' * 60000])
def test_another_text_is_damage(text):
    with pytest.raises(ValueError, match="no JSON of a snapshot's"):
        from_json(numpy.array(text))
