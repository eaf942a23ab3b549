"""A plan outlives the program that made it, and can be edited."""
import json

from chainer_fp8pipe.planning.calls import Position
from chainer_fp8pipe.planning.partition_plan import (
    PartitionPlan,
    Predicted,
    load_plan,
)

import pytest

PLAN = PartitionPlan(
    (('/a/W', '/a/b'), ('/c',), ('/d/W',)),
    (Position(1, 0), Position(1, 2), Position(2, 0)), 2,
    (True, False, False, True), 8, 'interleaved',
    Predicted(.5, (.1, .2, .1, .1), (1e6, 2e6), (10., 20., 30.)))
FIELDS = PLAN.as_dict()


def test_a_plan_comes_back_from_its_file(tmp_path):
    path = str(tmp_path / 'plan.json')
    PLAN.save(path)
    assert load_plan(path) == PLAN
    assert load_plan(json.loads(json.dumps(FIELDS))) == PLAN
    assert load_plan(PLAN) is PLAN
    assert load_plan({name: value for name, value in FIELDS.items()
                      if name != 'predicted'}).predicted == Predicted()


def test_a_parameter_belongs_to_the_chunk_that_begins_at_or_before_it():
    assert PLAN.homes() == {'/a/W': 0, '/a/b': 0, '/c': 1, '/d/W': 3}
    assert PLAN.chunks == 2


@pytest.mark.parametrize(('cut', 'expected'), [
    ({'before': '/a/b', 'calls_later': 3}, Position(0, 3)),
    ({'before': '/d/W'}, Position(2, 0))])
def test_a_cut_is_moved_by_naming_another_parameter(cut, expected):
    assert load_plan({**FIELDS, 'stages': 1, 'recompute': [False, False],
                      'cuts': [cut]}).cuts == (expected,)


@pytest.mark.parametrize(('changes', 'message'), [
    ({'cuts': [{'before': '/x', 'calls_later': 0}]},
     'cuts before /x, which is not in its order of parameters'),
    ({'cuts': FIELDS['cuts'][::-1]}, 'in the order of parameters'),
    ({'cuts': [FIELDS['cuts'][0]] * 3}, 'in the order of parameter'),
    ({'stages': 3}, '4 chunks cannot be on 3 stages equally'),
    ({'stages': 0}, '4 chunks cannot be on 0 stages equally'),
    ({'recompute': [True]}, 'recompute has 1 entries for 4 chunks'),
    ({'cuts': [{'calls_later': 0}]}, 'no plan: cuts.0.before is missing'),
    ({'cuts': 3}, 'this is no plan: cuts must be a list, not 3'),
    ({'stages': -1}, 'stages must be 0 or more, and finite'),
    ({'stages': True}, 'stages must be a whole number, not True'),
    ({'recompute': [0] * 4}, 'recompute.0 must be true or false, not 0'),
    ({'order': [[], ['/a/W']]}, 'has an empty group'),
    ({'predicted': {'colour': 1}}, 'predicted.colour is no field of a plan'),
])
def test_a_plan_that_contradicts_itself_says_how(changes, message):
    with pytest.raises(ValueError, match=message):
        load_plan({**FIELDS, **changes})


@pytest.mark.parametrize('name', list(FIELDS)[:-1])
def test_a_missing_entry_is_named(name):
    with pytest.raises(ValueError, match=f'no plan: {name} is missing'):
        load_plan({key: FIELDS[key] for key in FIELDS if key != name})


@pytest.mark.parametrize(('text', 'message'), [
    *[(text, 'no JSON: ') for text in ('', '{', 'cuts: []')],
    *[(text, 'no plan: ') for text in ('[]', '3', '"plan"', 'null')]])
def test_a_file_with_something_else_is_named(text, message, tmp_path):
    path = tmp_path / 'plan.json'
    path.write_text(text)
    with pytest.raises(ValueError, match=f'plan.json is {message}'):
        load_plan(str(path))
