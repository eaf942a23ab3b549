"""Steps of any replicas, against the package's simulator and all cuts."""
import itertools
import os
import subprocess
import sys

from tests.ranks import environment

from .test_partition_benchmark import _FOLDER, run


def in_benchmarks(code):
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code], capture_output=True,
        text=True, cwd=_FOLDER, timeout=300,
        env={**environment(), 'PYTHONPATH': os.pathsep.join(
            [str(_FOLDER), environment()['PYTHONPATH']])})
    assert done.returncode == 0, done.stderr
    return done.stdout


_MODEL = '''
from chainer_fp8pipe.planning.partition.cuts import CutProblem, Wire, evaluate
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.positions import order_of
from partition_replicas import Setting, compared, step_seconds
from tests.planning.traces import chain

calls, parameters = chain(*SECONDS, size=1000, parameters=PARAMETERS)
intervals = Intervals(calls, order_of(calls), parameters)
setting = Setting('', Wire(0., 1e6), 4.)
'''


def test_equal_replicas_are_as_fast_as_the_simulator_says():
    said = in_benchmarks(
        'SECONDS, PARAMETERS = (.1, .3, .2, .2, .4), 4\n' + _MODEL + '''
for stages, ends in (1, (5,)), (2, (3, 5)), (3, (2, 4, 5)):
    for replicas in 1, 2:
        step = step_seconds(intervals, setting, (replicas,) * stages, ends,
                            6, [False] * stages)
        cut = evaluate(intervals, CutProblem(
            stages, 6 // replicas, wire=setting.wire), ends)
        assert abs(step / cut.predicted.seconds - 1) < .01, (stages, replicas)
print('as fast')
''')
    assert said == 'as fast\n'


def test_a_call_that_dominates_gets_more_replicas():
    """Parameters are where it is not, so that replicas of all are slow."""
    said = in_benchmarks(
        'SECONDS, PARAMETERS = (.8, .1, .1), 4\n' + _MODEL + '''
from chainer_fp8pipe.planning.partition.calls import Parameter
name = list(parameters)[-1]
parameters[name] = Parameter((5_000_000,), parameters[name].dtype)
intervals = Intervals(calls, order_of(calls), parameters)
found = compared(intervals, setting, 3, 12)
print(found['uniform']['replicas'], found['any']['replicas'])
assert found['any']['seconds'] < .7 * found['uniform']['seconds']
''')
    assert said == '(1, 1, 1) (2, 1)\n'


def test_the_verdict_is_printed(tmp_path):
    said, rows = run(tmp_path, 'replicas', '--only', 'maxout', '--ranks',
                     '2', '3')
    assert 'In all, ' in said
    assert {(row['setting'], row['ranks']) for row in rows} == set(
        itertools.product({row['setting'] for row in rows}, (2, 3)))
