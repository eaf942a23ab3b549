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

ORDER = ('/embed/W',), ('/body/W', '/body/b')


def shown(stages, again, replicas):
    """Of a model that is cut before its second layer."""
    plan = PartitionPlan(ORDER, (Cut('/body/W'),), stages, (again,) * 2, 8,
                         'interleaved', Predicted(
                             (.01, .03), (1e9, 1.1e9)[:stages], (4096.,)))
    part = SimpleNamespace(
        recorder=SimpleNamespace(undivided=lambda: ['link /a ...'] * again),
        plan=plan, placement=SimpleNamespace(
            used={0: ['/embed/W'], 1: [*ORDER[1], '/embed/W']},
            ties={} if stages == 1 else {'/embed/W': (0, 1)}),
        grid=SimpleNamespace(replicas=replicas, ranks=[
            [stage + stages * replica for replica in range(replicas)]
            for stage in range(stages)]))
    return table(part, 'Translator', collections.defaultdict(
        lambda: Value((750_000,), numpy.dtype('f')))).splitlines()


@pytest.mark.parametrize(('options', 'head', 'rows', 'notes'), [
    ((2, False, 1), '2 stages', [
        ['0', '0', '25 %', '3 MB', '1 GB', '4.1 kB', '/embed/W'],
        ['1', '1', '75 %', '9 MB', '1.1 GB', '/body/W']],
     ['/embed/W is on stages 0 and 1, which sum its gradient']),
    # Chunks of one rank are told apart, and all replicas named.
    ((1, True, 2), '1 stage x 2 replicas', [
        ['0.0', '0 1', '25 %', '3 MB', '1 GB', '4.1 kB', '/embed/W (again)'],
        ['0.1', '0 1', '75 %', '9 MB', '1 GB', '/body/W (again)']],
     ['(again): keeps its inputs only, and runs forward twice',
      'link /a ...'])])
def test_a_line_says_who_does_how_much_and_what_crosses(
        options, head, rows, notes):
    title, names, *lines = shown(*options)
    assert title == (f'Translator: {head}, interleaved with 8 micro-batches, '
                     'balance 0.67')
    assert re.split(' {2,}', names) == [
        'stage', 'rank', 'time', 'parameters', 'memory', 'sends on',
        'first parameter']
    assert [re.split(' {2,}', line) for line in lines[:2]] == rows
    assert lines[2:] == notes
