"""The benchmark of partitioned models runs, and tells right from wrong."""
import json
import os
import pathlib
import subprocess
import sys

from tests.ranks import environment

_FOLDER = pathlib.Path(__file__).parents[2] / 'benchmarks'


def run(tmp_path, *arguments):
    """What the benchmark prints, and its raw data."""
    path = tmp_path / 'rows.json'
    done = subprocess.run(
        [sys.executable, str(_FOLDER / 'partition.py'), *arguments,
         '--json', str(path)], capture_output=True, text=True, timeout=300,
        env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())['rows']


def test_models_are_compared_with_one_process(tmp_path):
    said, rows = run(tmp_path, 'models', '--only', 'maxout', '--ranks', '2')
    assert '1 of 1 models are right' in said
    assert {row['schedule'] for row in rows} == {
        'gpipe', '1f1b', 'zero_bubble', 'interleaved'}
    for row in rows:
        assert row['losses'] == row['expected']


def test_functions_are_cut_at_every_place(tmp_path):
    said, rows = run(tmp_path, 'functions', '--only', 'cholesky', 'dropout')
    assert '2 of 2 functions and links are right' in said
    assert min(row['cuts'] for row in rows) > 5


def test_every_function_has_a_call_or_a_reason():
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', '''if True:
            from partition_calls import CALLS, LEFT_OUT, F, L
            names = {name for module in (F, L) for name in dir(module)
                     if callable(getattr(module, name))
                     and not name.startswith('_')}
            print(names ^ {*CALLS, *LEFT_OUT})'''],
        capture_output=True, text=True, cwd=_FOLDER,
        env={**environment(), 'PYTHONPATH': os.pathsep.join(
            [str(_FOLDER), environment()['PYTHONPATH']])})
    assert done.stdout == 'set()\n', done.stderr
