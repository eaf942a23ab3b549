"""Runs of ``train_digits_serially.py``, and what they must have written."""
import functools
import json
import os

import numpy as np
import pytest

from tests.ranks import run_script

SCRIPT = os.path.join(os.path.dirname(__file__), 'train_digits_serially.py')


@pytest.fixture(scope='session')
def serial(tmp_path_factory):
    """The folder in which the script has run alone, with its arguments."""
    @functools.cache
    def run(*arguments):
        folder = tmp_path_factory.mktemp('serial')
        done = run_script(1, '-m', 'chainer_fp8pipe', 'run', SCRIPT,
                          *arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
        return folder
    return run


def log_of(folder, out='result'):
    """The rows of LogReport's file, without times."""
    with open(folder / out / 'log') as file:
        return [{key: value for key, value in row.items()
                 if key != 'elapsed_time'} for row in json.load(file)]


def check_log(found, expected, tolerance=1e-5):
    assert [sorted(row) for row in found] == [sorted(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=tolerance)


def check_run(done, folder, expected, drawn=()):
    """The files of a serial run; one rank prints."""
    assert done.returncode == 0, done.stderr
    check_log(log_of(folder), log_of(expected))
    # What save_npz wrote for model, part of the model and optimizer.
    for name in 'whole', 'predictor', 'optimizer':
        with np.load(folder / 'result' / f'{name}.npz') as found, \
                np.load(expected / 'result' / f'{name}.npz') as other:
            assert sorted(found) == sorted(other)
            for key in found:
                np.testing.assert_allclose(found[key], other[key], rtol=1e-4,
                                           atol=1e-6)
    assert set(os.listdir(folder / 'result')) == {
        *os.listdir(expected / 'result'), *drawn} - {'cg.dot', 'cg.png'}
    for text in '# epoch: 2', 'epoch       main/loss', '# done':
        assert done.stdout.count(text) == 1, text
