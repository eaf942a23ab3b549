"""Plans are files that people edit: what is wrong with them is said."""
import copy
import json

from chainer_fp8pipe.planner.planned_job import read_plan
from chainer_fp8pipe.planning.job_plan import JobPlan, Timing

import pytest

from tests.planner.plans import replicas, stages


def full(plan):
    """A plan with something in every field."""
    return JobPlan(**{**vars(plan), 'seconds': 1.0, 'spread': .1,
                      'parts': {'update': 1.0}, 'remarks': ('r',),
                      'memory_limit': 1e9, 'alternatives': (
                          Timing('x', reason='y'), Timing('z', 1.0)),
                      'trials': (Timing('t', 1.0, .1),)})


PLANS = [replicas(2), stages(4, codec='fp8', options={'warmup': 7}),
         full(replicas(3, overlap='next_forward')), full(stages(2))]


@pytest.mark.parametrize('plan', PLANS)
def test_a_plan_survives_its_file(tmp_path, plan):
    path = str(tmp_path / 'plan.json')
    plan.save(path)
    assert read_plan(path) == plan
    assert str(read_plan(path)) == str(plan)
    assert read_plan(plan.as_dict()) == plan


def edited(plan, where, value):
    data = copy.deepcopy(plan.as_dict())
    *path, last = where.split('.')
    inner = data
    for name in path:
        inner = inner[int(name) if name.isdigit() else name]
    inner[last] = value
    return data


REPLICAS, STAGES = replicas(2), stages(2)


@pytest.mark.parametrize(('plan', 'where', 'value', 'message'), [
    (REPLICAS, 'kind', 'cut', 'this is no plan of a job'),
    (REPLICAS, 'ranks', 0, '1 stages x 2 replicas are not 0|at least 1'),
    (REPLICAS, 'ranks', 3, '1 stages x 2 replicas are not 3 ranks'),
    (REPLICAS, 'batch', 1, 'batch 1 cannot be cut'),
    (REPLICAS, 'choice.codec', 'fp9', "choice.codec must be one of 'float32'"),
    (REPLICAS, 'choice.algorithm', 'star', 'choice.algorithm must be one of'),
    (REPLICAS, 'choice.overlap', 1, 'choice.overlap must be one of False'),
    (REPLICAS, 'choice.replicas', 0, 'replicas must be at least 1'),
    (REPLICAS, 'choice.stages', 2, '2 stages need a cut'),
    (REPLICAS, 'choice.colour', 1, 'choice.colour is no field of a plan'),
    (REPLICAS, 'choice.options', {'warm': 1}, "has no option 'warm'"),
    (REPLICAS, 'choice.options', {'overlap': True}, 'which is choice.overlap'),
    (REPLICAS, 'choice.options', {'frame_bytes': -1}, 'frame_bytes must be'),
    (replicas(4, algorithm='torus2d'), 'choice.options', {'shape': [3, 2]},
     'choice.options.shape is 3 x 2, but there are 4 replicas'),
    (replicas(2, codec='naive'), 'choice.overlap', True, 'naive has none'),
    (REPLICAS, 'seconds', -1, 'seconds must be 0 or more'),
    (REPLICAS, 'memory', [1e400], 'memory.0 must be 0 or more, and finite'),
    (REPLICAS, 'model', {'/W': [1.5]}, 'model./W.0 must be a whole number'),
    (STAGES, 'choice.cut', None, '2 stages need a cut'),
    (STAGES, 'choice.micro_batches', 2, 'the cut is for 2 stages and 3'),
    (STAGES, 'choice.cut.micro_batches', 10 ** 9, 'more than the samples'),
    (STAGES, 'choice.cut.schedule', '2f2b', '2f2b'),
    (STAGES, 'choice.cut.order', [['/predictor/l2/W', '/x']],
     'choice.cut.order has /x, which is no parameter'),
    (STAGES, 'choice.cut.order', [[]], 'order of parameters has an empty'),
    (STAGES, 'choice.cut.cuts', [{'before': '/y'}], 'cuts before /y'),
    (STAGES, 'choice.cut.recompute', [1, 0], 'recompute.0 must be true or')])
def test_what_cannot_be_carried_out_is_refused(tmp_path, plan, where, value,
                                               message):
    path = tmp_path / 'plan.json'
    path.write_text(json.dumps(edited(plan, where, value)))
    with pytest.raises(ValueError, match=message) as error:
        read_plan(str(path))
    assert str(error.value).startswith(f'{path}: ')
    assert 'correct it, or make the plan again' in str(error.value)


@pytest.mark.parametrize(('text', 'message'), [
    ('{', 'is no JSON'), ('[]', 'no plan of a job'), ('3', 'no plan of a job'),
    ('{"cuts": []}', r'given to partition\(plan=')])
def test_other_files(tmp_path, text, message):
    (tmp_path / 'plan.json').write_text(text)
    with pytest.raises(ValueError, match=message):
        read_plan(str(tmp_path / 'plan.json'))
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
    missing = object()
    for path in nodes(base):
        for value in (missing, None, True, 0, -1, 10 ** 9, 1e400, '', 'x',
                      [], {}, [1, 2, 3], float('nan')):
            data = copy.deepcopy(base)
            if not path:
                data = {} if value is missing else value
            else:
                inner = data
                for name in path[:-1]:
                    inner = inner[name]
                if value is missing:
                    del inner[path[-1]]
                else:
                    inner[path[-1]] = value
            try:
                str(read_plan(data))
            except ValueError:
                continue
            assert value is missing or value == value, path
            assert value not in (-1, 1e400), path


@pytest.mark.parametrize(('shapes', 'ranks', 'message'), [
    ({'/W': (2,)}, 2, ''), ({'/W': None}, None, ''),
    ({'/W': (2,)}, 3, 'the plan is for 2 ranks, and there are 3'),
    ({'/W': (3,)}, 2, r'/W has shape \(3,\), in the plan \(2,\)'),
    ({}, 2, '/W is only in the plan'),
    ({'/W': (2,), '/b': (1,)}, 2, '/b is only in the model')])
def test_for_which_jobs_a_plan_is(shapes, ranks, message):
    plan = replicas(2, model={'/W': (2,)})
    found = plan.problem(shapes, ranks)
    assert bool(found) == bool(message)
    if message:
        pytest.raises(ValueError, _raise, found).match(message)


def _raise(text):
    raise ValueError(text)
