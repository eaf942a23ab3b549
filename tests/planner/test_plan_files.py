"""Plans are files that people edit: what is wrong with them is said."""
import copy
import json

from chainer_fp8pipe.planner.planned_job import PlannedJob
from chainer_fp8pipe.planning.calls import Position
from chainer_fp8pipe.planning.job_plan import JobPlan, Timing
from chainer_fp8pipe.planning.partition_plan import (
    Cut,
    PartitionPlan,
    Predicted,
    load_plan,
)

import pytest

from tests.planner.plans import replicas, stages


def read_plan(source):
    return PlannedJob(source).plan


CUT = PartitionPlan(
    (('/a/W', '/a/b'), ('/c',), ('/d/W',)),
    (Cut('/c'), Cut('/c', 2), Cut('/d/W')), 2,
    (True, False, False, True), 8, 'interleaved',
    Predicted(.5, (.1, .2, .1, .1), (1e6, 2e6), (10., 20., 30.)))
REPLICAS, STAGES = replicas(2), stages(2)


def full(plan):
    """A plan with something in every field."""
    return JobPlan(**{**vars(plan), 'seconds': 1.0, 'spread': .1,
                      'parts': {'update': 1.0}, 'remarks': ('r',),
                      'memory_limit': 1e9, 'alternatives': (
                          Timing('x', reason='y'), Timing('z', 1.0)),
                      'trials': (Timing('t', 1.0, .1),)})


PLANS = [replicas(2), stages(4, codec='fp8', options={'warmup': 7}),
         full(replicas(3, overlap=True)), full(stages(2))]


@pytest.mark.parametrize(('plan', 'read'), [
    *((plan, read_plan) for plan in PLANS), (CUT, load_plan)])
def test_a_plan_survives_its_file(tmp_path, plan, read):
    path = str(tmp_path / 'plan.json')
    plan.save(path)
    assert read(path) == read(plan.as_dict()) == read(plan) == plan
    assert str(read(path)) == str(plan)


def edited(data, where, value):
    """The content of a plan with a field set, or without it (...)."""
    data = json.loads(json.dumps(data))
    *path, last = where.split('.')
    inner = data
    for name in path:
        inner = inner[int(name) if name.isdigit() else name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(('plan', 'where', 'value', 'message'), [
    (REPLICAS, 'kind', 'cut', 'this is no plan of a job'),
    (REPLICAS, 'ranks', 0, '1 stages x 2 replicas are not 0|at least 1'),
    (REPLICAS, 'ranks', 3, '1 stages x 2 replicas are not 3 ranks'),
    (REPLICAS, 'batch', 1, 'batch 1 cannot be cut'),
    (REPLICAS, 'choice.codec', 'fp9', "choice.codec must be one of 'float32'"),
    (REPLICAS, 'choice.algorithm', 'star', 'choice.algorithm must be one of'),
    (REPLICAS, 'choice.overlap', 1, 'choice.overlap must be true or false'),
    (REPLICAS, 'choice.replicas', 0, 'replicas must be at least 1'),
    (REPLICAS, 'choice.stages', 2, '2 stages need a cut'),
    (REPLICAS, 'choice.colour', 1, 'choice.colour is no field of a plan'),
    (REPLICAS, 'choice.options', [], 'choice.options must be an object'),
    (REPLICAS, 'choice.options', {'warm': 1}, "has no option 'warm'"),
    (REPLICAS, 'choice.options', {'overlap': True}, 'which is choice.overlap'),
    (REPLICAS, 'choice.options', {'frame_bytes': -1}, 'frame_bytes must be'),
    (replicas(4, algorithm='torus2d'), 'choice.options', {'shape': [3, 2]},
     'choice.options.shape is 3 x 2, but there are 4 replicas'),
    (replicas(2, codec='naive'), 'choice.overlap', True, 'naive has none'),
    (REPLICAS, 'choice', ..., 'choice is missing'),
    (REPLICAS, 'seconds', -1, 'seconds must be 0 or more'),
    (REPLICAS, 'memory', [1e400], 'memory.0 must be 0 or more, and finite'),
    (REPLICAS, 'memory', [10 ** 400], 'memory.0 must be 0 or more, and fin'),
    (REPLICAS, 'memory', ['x'], 'memory.0 must be a number'),
    (REPLICAS, 'model', {'/W': [1.5]}, 'model./W.0 must be a whole number'),
    (full(REPLICAS), 'trials.0.way', ..., 'trials.0.way is missing'),
    (full(REPLICAS), 'trials.0.way', None, 'way must be a text, not None'),
    (STAGES, 'choice.cut', None, '2 stages need a cut'),
    (STAGES, 'choice.micro_batches', 2, 'the cut is for 2 stages and 3'),
    (STAGES, 'choice.cut.micro_batches', 10 ** 9, 'the cut is for 2 stages'),
    (STAGES, 'choice.cut.schedule', '2f2b', '2f2b'),
    (STAGES, 'choice.cut.order', [['/predictor/l2/W', '/x']],
     'choice.cut.order has /x, which is no parameter'),
    (STAGES, 'choice.cut.order', [[]], 'order of parameters has an empty'),
    (STAGES, 'choice.cut.cuts', [{'before': '/y'}], 'cuts before /y'),
    (STAGES, 'choice.cut.recompute', [1, 0], 'recompute.0 must be true or')])
def test_a_job_that_cannot_be_carried_out_is_refused(tmp_path, plan, where,
                                                     value, message):
    path = tmp_path / 'plan.json'
    path.write_text(json.dumps(edited(plan.as_dict(), where, value)))
    with pytest.raises(ValueError, match=message) as error:
        read_plan(str(path))
    assert str(error.value).startswith(f'{path}: ')
    assert 'correct it, or make the plan again' in str(error.value)


CUTS = CUT.as_dict()['cuts']


@pytest.mark.parametrize(('where', 'value', 'message'), [
    ('cuts.0.before', '/x', 'cuts before /x, which is not in its order'),
    ('cuts.0.before', ..., 'the plan: cuts.0.before is missing'),
    ('cuts', CUTS[::-1], 'in the order of parameters'),
    ('cuts', CUTS[:1] * 3, 'in the order of parameters'),
    ('cuts', 3, 'the plan: cuts must be a list, not 3'),
    ('stages', 3, '4 chunks cannot be on 3 stages equally'),
    ('stages', 0, '4 chunks cannot be on 0 stages equally'),
    ('stages', -1, 'stages must be 0 or more, and finite'),
    ('stages', True, 'stages must be a whole number, not True'),
    ('stages', 1.0, 'stages must be a whole number'),
    ('recompute', [True], 'recompute has 1 entries for 4 chunks'),
    ('order', [[], ['/a/W']], 'has an empty group'),
    ('predicted.colour', 1, 'predicted.colour is no field of a plan'),
    ('predicted', [], 'predicted must be an object'),
    *((name, ..., f'the plan: {name} is missing')
      for name in list(CUT.as_dict())[:-1])])
def test_a_cut_that_contradicts_itself_says_how(where, value, message):
    with pytest.raises(ValueError, match=message):
        load_plan(edited(CUT.as_dict(), where, value))


@pytest.mark.parametrize(('cut', 'expected'), [
    ({'before': '/a/b', 'calls_later': 3}, Position(0, 3)),
    ({'before': '/d/W'}, Position(2, 0))])
def test_a_cut_is_moved_by_naming_another_parameter(cut, expected):
    assert load_plan({**CUT.as_dict(), 'stages': 1, 'cuts': [cut],
                      'recompute': [False, False]}).positions == (expected,)


def test_a_parameter_belongs_to_the_chunk_that_begins_at_or_before_it():
    assert CUT.homes() == {'/a/W': 0, '/a/b': 0, '/c': 1, '/d/W': 3}
    assert CUT.chunks == 2


@pytest.mark.parametrize(('text', 'of_a_job', 'of_a_cut'), [
    ('{', 'is no JSON .*again', 'is no JSON .*again'),
    ('', 'is no JSON', 'is no JSON'), ('\ud800', 'is no JSON', 'is no JSON'),
    *((text, 'this is no plan of a job', 'json: the plan must be an object')
      for text in ('[]', '3', '"plan"', 'null')),
    ('{"cuts": []}', r'given to partition\(plan=', 'order is missing')])
def test_other_files(tmp_path, text, of_a_job, of_a_cut):
    path = tmp_path / 'plan.json'
    path.write_bytes(text.encode(errors='surrogatepass'))
    for read, message in (read_plan, of_a_job), (load_plan, of_a_cut):
        with pytest.raises(ValueError, match=message):
            read(str(path))
    with pytest.raises(ValueError, match='no.json cannot be read'):
        read_plan(str(tmp_path / 'no.json'))


def nodes(data, path=()):
    yield path
    if isinstance(data, (dict, list)):
        for key in (data if isinstance(data, dict) else range(len(data))):
            yield from nodes(data[key], (*path, key))


@pytest.mark.parametrize('plan', PLANS[2:])
def test_no_edit_raises_another_error_or_passes_with_an_absurd_value(plan):
    base = json.loads(json.dumps(plan.as_dict()))
    for path in nodes(base):
        for value in (..., None, True, 0, -1, 10 ** 9, 1e400, '', 'x', [], {},
                      [1, 2, 3], float('nan')):
            data = {'': copy.deepcopy(base)}
            inner = data
            for name in ('', *path)[:-1]:
                inner = inner[name]
            if value is ...:
                del inner[('', *path)[-1]]
            else:
                inner[('', *path)[-1]] = value
            try:
                str(read_plan(data.get('', {})))
            except ValueError:
                continue
            assert value is ... or value == value, path
            assert value not in (-1, 1e400), path


@pytest.mark.parametrize(('shapes', 'ranks', 'message'), [
    ({'/W': (2,)}, 2, ''), ({'/W': None}, None, ''),
    ({'/W': (2,)}, 3, 'the plan is for 2 ranks, and there are 3'),
    ({'/W': (3,)}, 2, '/W has shape (3,), in the plan (2,)'),
    ({}, 2, '/W is only in the plan'),
    ({'/W': (2,), '/b': (1,)}, 2, '/b is only in the model')])
def test_for_which_jobs_a_plan_is(shapes, ranks, message):
    found = replicas(2, model={'/W': (2,)}).problem(shapes, ranks)
    assert bool(found) == bool(message)
    assert message in found
