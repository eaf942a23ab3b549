import json
import pickle

from chainer_fp8pipe.training.snapshots.file import (
    LARGEST,
    MOST_PARTS,
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
        numpy.float32) | st.integers(-9, 9).map(numpy.int8)
    | st.lists(st.floats(width=16), max_size=3).map(
        lambda numbers: numpy.array(numbers, 'f2')),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.integers(), inner,
                      max_size=3), max_leaves=8)


def same(one, other):
    """Classes, too, which ``==`` leaves out."""
    assert type(one) is type(other)
    assert getattr(one, 'shape', 0) == getattr(other, 'shape', 0)
    assert repr(one) == repr(other)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value):
    same(from_json(to_json(value)), value)


@pytest.mark.parametrize('value', [
    {'a': [1, (2, None)]}, 2 ** 70, float('inf'), numpy.float64(0.1),
    numpy.datetime64('2026-11-25'), numpy.arange(6).reshape(2, 3),
    ])
def test_kinds_and_shapes_come_back(value):
    same(from_json(to_json(value)), value)


def test_a_value_is_readable():
    assert json.loads(to_json({'best': 0.5, 'at': (3, None)})) == {
        'dict': [{'tuple': ['best', 0.5]}, {'tuple': ['at', {'tuple': [3, None]}]}]}


@pytest.mark.parametrize(('value', 'match'), [
    (print, 'an object of class builtin'), ({1, 2}, 'of class set'),
    (b'x', 'of class bytes'), ([True, pickle], 'of class module'),
    ('x' * LARGEST, f'takes {LARGEST + 2} bytes as JSON'),
    ([0] * MOST_PARTS, f'more than {MOST_PARTS} parts'),
    ([numpy.zeros(LARGEST)], f'an array in it has {8 * LARGEST} bytes'),
    (numpy.zeros(2, [('a', 'f4')]), 'of class ndarray')])
def test_what_cannot_be_saved_is_named(value, match):
    with pytest.raises(TypeError, match=match):
        to_json(value)


def test_a_list_in_itself_is_an_error():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match='nested too deeply'):
        to_json(value)


@pytest.mark.parametrize('text', [
    b'', b'{}', b'{"dict":[[[1],2]]}', b'{"tuple":1}', b'{"eval":"1"}',
    b'{"number":["<U9999999","00"]}', b'{"number":["O","00"]}',
    b'{"array":["<f4",[9999999999999],"00000000"]}',
    b'{"objects":[[9999999999999],[1]]}', b'\xff', b'[' * 60000,
    b'1' * (LARGEST + 1)])
def test_another_text_is_damage(text):
    with pytest.raises(ValueError, match="no JSON of a snapshot's"):
        from_json(text)


@pytest.mark.parametrize(('dtype', 'expected'), [
    ('f4', True), ('U3', True), ('M8[s]', True), ('?', True), ('O', False),
    ('f4,f4', False), ('V3', False)])
def test_numbers_texts_and_times_are_plain(dtype, expected):
    assert is_plain(numpy.dtype(dtype)) == expected
