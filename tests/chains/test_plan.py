"""The table of a cut says who does how much, and can be read."""
import collections
import re
from types import SimpleNamespace

from chainer_fp8pipe.chains.calls import Value
from chainer_fp8pipe.chains.plan import (
    Cut,
    PartitionPlan,
    Predicted,
    table,
)

import numpy
import pytest

FLOAT = numpy.dtype('f')


def cut(stages, chunks=1, ties=1, again=False, replicas=1):
    """What a partition knows of a cut into that many parts."""
    parts = stages * chunks
    order = tuple((f'/predictor/encoder/{place}/self_attention/query/W',)
                  for place in range(parts))
    plan = PartitionPlan(
        order, tuple(Cut(group[0]) for group in order[1:]),
        stages, (again,) * parts, 8, 'interleaved',
        Predicted(.25, tuple(.01 + .001 * part for part in range(parts)),
                  tuple(1e9 + 1e8 * stage for stage in range(stages)),
                  (4096.,) * (parts - 1)))
    used = {part: [*order[part]] for part in range(parts)}
    tied = {}
    for number in range(ties if stages > 1 else 0):
        name = f'/predictor/words/{number}/W'
        parts_of = [number % 2, parts - 1]
        for part in parts_of:
            used[part].append(name)
        tied[name] = tuple(part % stages for part in parts_of)
    return SimpleNamespace(
        recorder=SimpleNamespace(undivided=lambda: ['link /a ...'] * again),
        plan=plan, placement=SimpleNamespace(used=used, ties=tied),
        crossing=[[('_ + _', Value((2, 32, 128), FLOAT, True))] * 5
                  for _ in range(parts - 1)],
        grid=SimpleNamespace(replicas=replicas, ranks=[
            [stage + stages * replica for replica in range(replicas)]
            for stage in range(stages)]))


def shown(part):
    return table(part, 'Translator', collections.defaultdict(
        lambda: Value((750_000,), FLOAT)))


FIRST = ('/predictor/encoder/{}/self_attention/query/W').format
PARTS = '_ + _ 2x32x128, _ + _ 2x32x128 and 3 more'


@pytest.mark.parametrize(('options', 'head', 'rows', 'notes'), [
    ({'stages': 3}, '3 stages', [
        ['0', '0', '30 %', '6 MB', '1 GB', f'164 kB: {PARTS}', FIRST(0)],
        ['1', '1', '33 %', '3 MB', '1.1 GB', f'164 kB: {PARTS}', FIRST(1)],
        ['2', '2', '36 %', '6 MB', '1.2 GB', FIRST(2)]],
     ['/predictor/words/0/W is on stages 0 and 2, which sum its gradient']),
    # Chunks of one rank are told apart, and all replicas named.
    ({'stages': 1, 'chunks': 2, 'replicas': 2, 'again': True},
     '1 stage x 2 replicas', [
        ['0.0', '0 1', '48 %', '3 MB', '1 GB', f'164 kB: {PARTS}',
         f'{FIRST(0)} (again)'],
        ['0.1', '0 1', '52 %', '3 MB', '1 GB', f'{FIRST(1)} (again)']],
     ['(again): keeps its inputs only, and runs forward twice',
      'link /a ...'])])
def test_a_line_says_who_does_how_much_and_what_crosses(
        options, head, rows, notes):
    title, names, *lines = shown(cut(**options)).splitlines()
    assert title.startswith(
        f'Translator: {head}, interleaved with 8 micro-batches, balance 0.9')
    assert title.endswith(', 250 ms a step predicted')
    columns = re.split(' {2,}', names)
    assert columns == ['stage', 'rank', 'time', 'parameters', 'memory',
                       'sends on', 'first parameter']
    assert [re.split(' {2,}', line) for line in lines[:len(rows)]] == rows
    for line, row in zip(lines, rows, strict=False):
        for place in (0, 3, 4, -1):     # a column begins below its name
            start = names.index(columns[place])
            assert line[start:].startswith(row[place])
    assert lines[len(rows):] == notes
