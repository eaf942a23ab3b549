"""The table of a cut says who does how much, and can be read."""
import collections
import re
from types import SimpleNamespace

from chainer_fp8pipe.chains import partitioned
from chainer_fp8pipe.chains.calls import Value
from chainer_fp8pipe.chains.plan import PartitionPlan

import numpy
import pytest

ORDER = ('/embed/W',), ('/body/W', '/body/b')


def shown(monkeypatch, stages, again):
    """Of a model that is cut before its second layer, on two replicas."""
    plan = PartitionPlan(ORDER, ((1, 0),), stages, (again,) * 2, 8,
                         'interleaved', (.01, .03), (1e9, 1.1e9)[:stages],
                         (4096.,))
    monkeypatch.setattr(
        partitioned, 'parameters_of', lambda names: collections.defaultdict(
            lambda: Value((750_000,), numpy.dtype('f'))))
    part = SimpleNamespace(
        recorder=SimpleNamespace(undivided=lambda: ['link /a ...'] * again),
        plan=plan, names=None, placement=SimpleNamespace(
            used={0: ['/embed/W'], 1: [*ORDER[1], '/embed/W']},
            ties={} if stages == 1 else {'/embed/W': (0, 1)}),
        name_of=lambda chunk: f'stage {chunk}',
        grid=SimpleNamespace(replicas=2, ranks=[[0, 2], [1, 3]]))
    return partitioned.table(part, 'Translator').splitlines()


@pytest.mark.parametrize(('options', 'head', 'rows', 'notes'), [
    ((2, False), '2 stages', [
        ['0', '0 2', '25 %', '3 MB', '1 GB', '4.1 kB', '/embed/W'],
        ['1', '1 3', '75 %', '9 MB', '1.1 GB', '/body/W']],
     ['/embed/W is on stages 0 and 1, which sum its gradient']),
    ((1, True), '1 stage', [
        ['0', '0 2', '25 %', '3 MB', '1 GB', '4.1 kB',
         '/embed/W, forward twice'],
        ['1', '0 2', '75 %', '9 MB', '1 GB', '/body/W, forward twice']],
     ['link /a ...'])])
def test_a_line_says_who_does_how_much_and_what_crosses(
        monkeypatch, options, head, rows, notes):
    title, names, *lines = shown(monkeypatch, *options)
    assert title == (f'Translator: {head} x 2 replicas, interleaved with 8 '
                     'micro-batches')
    assert re.split(' {2,}', names) == [
        'stage', 'rank', 'time', 'parameters', 'memory', 'sends on',
        'first parameter']
    assert [re.split(' {2,}', line) for line in lines[:2]] == rows
    assert lines[2:] == notes
