"""What may stand in a file is what annotations say."""
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from chainer_fp8pipe.planning.stored import made, read_json, write_json

import pytest


@dataclasses.dataclass
class Inner:
    name: str
    size: float = 1.0


@dataclasses.dataclass
class Outer:
    count: int
    word: Literal['a', False, True] = 'a'
    inner: Inner | None = None
    sizes: tuple[float, ...] = ()
    pair: tuple[int, int] = (0, 0)
    by_name: Mapping[str, tuple[int, ...] | None] = dataclasses.field(
        default_factory=dict)
    anything: Any = None


@pytest.mark.parametrize(('data', 'expected'), [
    ({'count': 3}, Outer(3)),
    ({'count': 3, 'word': True, 'inner': {'name': 'x', 'size': 2}},
     Outer(3, True, Inner('x', 2.0))),
    ({'count': 0, 'sizes': [1, .5], 'pair': [1, 2], 'anything': [{}]},
     Outer(0, 'a', None, (1.0, .5), (1, 2), anything=[{}])),
    ({'count': 1, 'inner': Inner('y'), 'by_name': {'/W': [2], '/b': None}},
     Outer(1, 'a', Inner('y'), by_name={'/W': (2,), '/b': None}))])
def test_what_fits_is_made(data, expected):
    assert made(Outer, data) == expected


@pytest.mark.parametrize(('changes', 'message'), [
    ({'count': True}, 'count must be a whole number, not True'),
    ({'count': -1}, 'count must be 0 or more, and finite, not -1'),
    ({'count': 1.0}, 'count must be a whole number'),
    ({'word': 1}, "word must be one of 'a', False, True, not 1"),
    ({'inner': []}, 'inner must be an object'),
    ({'inner': {}}, 'inner.name is missing'),
    ({'inner': {'name': None}}, 'inner.name must be a text, not None'),
    ({'inner': {'name': '', 'size': float('nan')}}, 'inner.size must be 0 or'),
    ({'inner': {'name': '', 'colour': 1}}, 'inner.colour is no field'),
    ({'sizes': [1, 'x']}, r'sizes.1 must be a number'),
    ({'sizes': [1e400]}, 'sizes.0 must be 0 or more, and finite'),
    ({'sizes': [10 ** 400]}, 'sizes.0 must be 0 or more, and finite'),
    ({'pair': [1]}, 'pair must be a list of 2'),
    ({'by_name': {'/W': 3}}, r'by_name./W must be a list'),
    ({'by_name': []}, 'by_name must be an object')])
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        made(Outer, {'count': 1, **changes})


@pytest.mark.parametrize('data', [None, [], 3, 'x'])
def test_what_is_no_object_is_none(data):
    with pytest.raises(ValueError, match='the plan must be an object'):
        made(Outer, data)


def test_files(tmp_path):
    path = str(tmp_path / 'x.json')
    write_json(path, {'a': [1, None]})
    assert read_json(path) == {'a': [1, None]}
    (tmp_path / 'x.json').write_bytes(b'\xff{')
    with pytest.raises(ValueError, match=r'x.json is no JSON \(.*\); mend it'):
        read_json(path, 'mend it')
