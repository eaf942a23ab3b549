"""A cut as text: a line per chunk, columns one below the other."""
import re
from types import SimpleNamespace

from chainer_fp8pipe.chains.partitioned_chain import table
from chainer_fp8pipe.planning.calls import Position, Value
from chainer_fp8pipe.planning.partition_plan import (
    PartitionPlan,
    Predicted,
)

import numpy

ORDER = (('/enter/W', '/enter/b'), ('/middle/W',), ('/leave/W',))
SIZES = {'/enter/W': 1000, '/enter/b': 24, '/middle/W': 2_148_000,
         '/leave/W': 40}


def cut(stages=3, recompute=(False, True, False), ranks=((0,), (1,), (2,)),
        ties=(), predicted=True):
    """What :func:`table` asks a partition for."""
    figures = Predicted(.0123, (.004, .002, .004),
                        (16e6, 18_240_000, 400e6)[:stages],
                        (1600, 800)) if predicted else Predicted()
    plan = PartitionPlan(ORDER, (Position(1, 0), Position(2, 0)), stages,
                         recompute,
                4, '1f1b', figures)
    value = Value((25, 16), numpy.dtype('f'), True)
    return SimpleNamespace(
        plan=plan, title='Net', last=2, ties=dict(ties),
        grid=SimpleNamespace(
            replicas=len(ranks[0]),
            placement=SimpleNamespace(ranks=dict(enumerate(ranks)))),
        used={0: ['/enter/W', '/enter/b'], 1: ['/middle/W'],
              2: ['/leave/W']},
        crossing=[[('Tanh', value)], [('Linear', value)] * 3],
        parameter_bytes=SIZES.__getitem__)


def test_a_line_says_who_does_how_much_and_what_crosses():
    head, *lines, note = table(cut()).splitlines()
    assert head == ('Net: 3 stages, 1f1b with 4 micro-batches, '
                    'balance 0.83, 12.3 ms a step predicted')
    assert [re.split(' {2,}', line) for line in lines] == [
        ['stage', 'rank', 'time', 'parameters', 'memory', 'sends on',
         'first parameter'],
        ['0', '0', '40 %', '1.02 kB', '16 MB', '1.6 kB: Tanh 25x16',
         '/enter/W'],
        ['1', '1', '20 %', '2.15 MB', '18.2 MB',
         '4.8 kB: Linear 25x16, Linear 25x16 and 1 more',
         '/middle/W (again)'],
        ['2', '2', '40 %', '40 B', '400 MB', '/leave/W']]
    assert note == '(again): keeps its inputs only, and runs forward twice'


def test_what_is_in_a_column_begins_below_its_name():
    _, names, *lines, _ = table(cut()).splitlines()
    for name, expected in (
            ('parameters', ['1.02 kB', '2.15 MB', '40 B']),
            ('memory', ['16 MB', '18.2 MB', '400 MB']),
            ('first', ['/enter/W', '/middle/W (again)', '/leave/W'])):
        start = names.index(name)
        assert [re.split(' {2,}', line[start:])[0]
                for line in lines] == expected


def test_chunks_of_one_rank_are_told_apart():
    lines = table(cut(1, ranks=((0,),))).splitlines()[2:5]
    assert [line.split()[:2] for line in lines] == [
        ['0.0', '0'], ['0.1', '0'], ['0.2', '0']]


def test_all_replicas_of_a_stage_are_named():
    text = table(cut(ranks=((0, 3), (1, 4), (2, 5))))
    assert text.startswith('Net: 3 stages x 2 replicas, ')
    assert text.splitlines()[3].startswith('1      1 4   20 %')


def test_parameters_of_several_stages_are_named_below():
    lines = table(cut(recompute=(False,) * 3,
                      ties={'/enter/W': (0, 2)})).splitlines()
    assert lines[-1] == (
        '/enter/W is on stages 0 and 2, which sum its gradient')
    assert 'again' not in ''.join(lines)


def test_a_plan_without_predictions_has_a_table():
    """Somebody may have written it by hand."""
    head, _, line, *_ = table(cut(predicted=False)).splitlines()
    assert head == 'Net: 3 stages, 1f1b with 4 micro-batches'
    assert line.split()[:4] == ['0', '0', '1.02', 'kB']
