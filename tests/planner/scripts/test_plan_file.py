"""What is wrong with a plan's file is said, with file, field and remedy."""
import contextlib
import dataclasses
import json

from chainer_fp8pipe.planner.planned_job import PlannedJob
from chainer_fp8pipe.planner.scripts.plan_file import read_plan, read_together
from chainer_fp8pipe.planning.job.job_plan import Alternative, Trial

import pytest

from tests.planner.plans import replicas, stages
from tests.ranks import on_ranks

REMEDY = 'correct it, or make the plan again: python -m chainer_fp8pipe plan'


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / 'plan.json')


@pytest.mark.parametrize('plan', [
    replicas(), replicas(codec='naive'),
    stages(4, codec='fp8', options={'warmup': 3}),
    replicas(4, codec='float16', algorithm='torus2d', overlap='next_forward',
             options={'shape': (2, 2)})])
def test_a_plan_is_read_as_it_was_saved(path, plan):
    plan.save(path)
    assert read_plan(path) == PlannedJob(path).plan
    assert read_plan(path).as_dict() == plan.as_dict()


def changed(plan, where, value):
    """The file's content with another value somewhere; ``...``: without."""
    data = json.loads(json.dumps(plan.as_dict()))
    *above, name = where.split('/')
    part = data
    for key in above:
        part = part[int(key) if isinstance(part, list) else key]
    if value is ...:
        del part[name]
    else:
        part[int(name) if isinstance(part, list) else name] = value
    return data


def nodes(data, path=()):
    yield path
    for key in data if isinstance(data, dict) else range(
            len(data) if isinstance(data, list) else 0):
        yield from nodes(data[key], (*path, key))


@pytest.mark.parametrize('plan', [replicas(codec='fp8'), stages(4)])
def test_whatever_stands_in_a_file_is_a_plan_or_an_error_in_words(
        path, plan):
    plan = dataclasses.replace(
        plan, alternatives=(Alternative('ring', 'x', None, 'y'),),
        remarks=('r',), parts={'a': 1.0}, trials=(Trial('x', 1.0, 0.1),))
    values = (..., None, True, -1, 10 ** 9, float('inf'), float('nan'), '',
              'x', [], {}, [1, 2, 3])
    for place in nodes(plan.as_dict()):
        for value in values:
            data = {'': json.loads(json.dumps(plan.as_dict()))}
            part = data
            for key in ('', *place)[:-1]:
                part = part[key]
            if value is ...:
                del part[('', *place)[-1]]
            else:
                part[('', *place)[-1]] = value
            data = data.get('', {})
            with open(path, 'w') as file:
                json.dump(data, file)
            with contextlib.suppress(ValueError):
                found = read_plan(path)
                numbers = [found.seconds, found.spread, *found.memory,
                           *found.parts.values(), *(
                               one.seconds for one in found.trials)]
                assert all(0 <= one < float('inf') for one in numbers)
                assert str(found)


def test_a_cut_may_name_the_layers_of_a_divisible(path):
    plan = stages(2)
    cut = dataclasses.replace(plan.choice.cut, order=tuple(
        (group[0].rpartition('/')[0], *group)
        for group in plan.choice.cut.order))
    plan = dataclasses.replace(plan, choice=dataclasses.replace(
        plan.choice, cut=cut))
    plan.save(path)
    assert read_plan(path).choice.cut == cut


WRONG = [
    (replicas(), 'choice/codec', 'fp9',
     "codec must be one of 'float32', 'float16', 'fp8', 'int5', 'int4', "
     "'naive', not 'fp9'"),
    (replicas(codec='naive'), 'choice/overlap', True,
     "overlap and options: ChainerMN's naive has none"),
    (replicas(), 'choice/codec', 8, 'choice.codec must be a text, not 8'),
    (replicas(), 'choice/algorithm', 'tree',
     "algorithm must be one of 'direct', 'ring', 'torus2d', 'mpi_op', not"),
    (replicas(), 'choice/algorithm', 'aggregator',
     'algorithm must be one of '),
    (replicas(), 'choice/overlap', 'always', 'overlap must be one of'),
    (replicas(), 'choice/overlap', 1,
     'choice.overlap must be true, false or a text, not 1'),
    (replicas(), 'choice/options', {'warmup': 3},
     "communicator 'float32' has no option 'warmup'"),
    (replicas(codec='fp8'), 'choice/options', {'warmup': -1},
     'warmup must be at least 0, not -1'),
    (replicas(), 'choice/options', {'algorithm': 'ring'},
     "choice.options has 'algorithm', which is choice.algorithm"),
    (replicas(4, algorithm='torus2d'), 'choice/options', {'shape': [2, 3]},
     'choice.options.shape is 2 x 3, but there are 4 replicas'),
    (replicas(), 'choice/micro_batches', 0,
     'micro_batches must be a number of at least 1, not 0'),
    (replicas(), 'choice/micro_batches', 2.5,
     'choice.micro_batches must be a whole number, not 2.5'),
    (replicas(), 'choice/replicas', True,
     'choice.replicas must be a whole number, not True'),
    (replicas(), 'choice/replicas', 3, '1 stages x 3 replicas are not 2'),
    (replicas(), 'choice/stages', 2, '2 stages need a cut'),
    (replicas(), 'choice/tubes', 2, 'choice.tubes is no field of a plan'),
    (replicas(), 'choice', ..., 'choice is missing'),
    (replicas(), 'choice/overlap', ..., 'choice.overlap is missing'),
    (replicas(), 'batch', 1, 'batch 1 cannot be cut into'),
    (replicas(), 'batch', '60', "batch must be a whole number, not '60'"),
    (replicas(), 'memory_limit', '2 GiB', 'memory_limit must be a number or'),
    (replicas(), 'model', {'/W': 'big'}, 'model./W must be a list or null'),
    (replicas(), 'model', {'/W': [2, 'x']}, 'model./W.1 must be a whole'),
    (replicas(), 'predicted/seconds', None, 'predicted.seconds must be'),
    (replicas(), 'kind', 'a poem', 'this is no plan of a job'),
    (replicas(), 'kind', ..., 'this is no plan of a job'),
    (replicas(), 'format', 2, 'a plan of format 2; this version reads'),
    (stages(), 'choice/cut', None, '2 stages need a cut'),
    (stages(), 'choice/micro_batches', 5,
     'the cut is for 2 stages and 3 micro-batches'),
    (stages(batch=2), 'batch', 2, 'cannot be cut into choice.micro_batches'),
    (stages(), 'choice/cut/schedule', 'random',
     "there is no schedule 'random'"),
    (stages(), 'choice/cut/cuts/0/before', '/predictor/l9/W',
     'cuts before /predictor/l9/W, which is not in its order'),
    (stages(), 'choice/cut/cuts/0/calls_later', 'x',
     "choice.cut.cuts.0.calls_later must be a whole number, not 'x'"),
    (stages(), 'choice/cut/cuts/0', {'before': '/predictor/l2/W'},
     'choice.cut.cuts.0.calls_later is missing'),
    (stages(), 'choice/cut/cuts', [], '1 chunks cannot be on 2 stages'),
    (stages(), 'choice/cut/order/0/0', '/other/W',
     'choice.cut.order has /other/W, which is no parameter of the model'),
    (stages(), 'choice/cut/recompute', [False], 'recompute has 1 entries'),
]


@pytest.mark.parametrize('case', range(len(WRONG)))
def test_what_was_edited_wrongly_is_named(path, case):
    plan, where, value, message = WRONG[case]
    with open(path, 'w') as file:
        json.dump(changed(plan, where, value), file)
    check_refused(path, message)


def check_refused(path, message):
    with pytest.raises(ValueError, match='.') as caught:
        read_plan(path)
    text = str(caught.value)
    assert text.startswith(path)
    assert message in text
    assert REMEDY in text


@pytest.mark.parametrize(('content', 'message'), [
    (b'', 'is no JSON (Expecting value'),
    (b'{"format": 1, "kind": "plan of', 'is no JSON (Unterminated string'),
    (b'\xff\x00', 'is no JSON ('), (b'[1, 2]', 'this is no plan of a job'),
    (b'null', 'this is no plan of a job'),
])
def test_a_damaged_file_is_named(path, content, message):
    with open(path, 'wb') as file:
        file.write(content)
    check_refused(path, message)


def test_what_is_no_file_is_named(tmp_path):
    check_refused(str(tmp_path), 'cannot be read (Is a directory)')
    check_refused(str(tmp_path / 'no'), 'cannot be read (No such file')


def test_a_cut_of_partition_is_told_from_a_plan(path):
    stages().choice.cut.save(path)
    check_refused(path, "a cut of partition()'s is given to partition(plan=")


@on_ranks(2)
def test_the_first_rank_reads_for_all(comm, tmp_path):
    path = str(tmp_path / 'plan.json')
    if comm.rank == 0:
        replicas(codec='fp8').save(path)
    mine = path if comm.rank == 0 else str(tmp_path / 'not there')
    found = read_together(comm, mine)
    assert found.choice.codec == 'fp8'
    if comm.rank == 0:
        replicas(3).save(path)
    with pytest.raises(ValueError, match='plan is for 3 ranks, and there are'):
        read_together(comm, mine)
