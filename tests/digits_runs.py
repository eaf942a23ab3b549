"""Runs of ``train_digits_serially.py``, and what they must have written."""
import json
import os

import numpy as np
import pytest

from tests.ranks import run_script

SCRIPT = os.path.join(os.path.dirname(__file__), 'train_digits_serially.py')


class SerialRuns:
    """The script on one rank, once for the same arguments."""

    def __init__(self, tmp_path_factory):
        self._factory, self._folders = tmp_path_factory, {}

    def __call__(self, *arguments):
        """The folder in which the script has run with its arguments."""
        if arguments not in self._folders:
            folder = self._factory.mktemp('serial')
            done = run_script(1, '-m', 'chainer_fp8pipe', 'run', SCRIPT,
                              *arguments, cwd=folder)
            assert done.returncode == 0, done.stderr
            self._folders[arguments] = folder
        return self._folders[arguments]


def log_of(folder, out='result'):
    """The rows of LogReport's file, without times."""
    with open(folder / out / 'log') as file:
        return [{key: value for key, value in row.items()
                 if key != 'elapsed_time'} for row in json.load(file)]


def check_log(found, expected, tolerance=1e-5):
    assert [sorted(row) for row in found] == [sorted(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=tolerance)


def check_files(folder, expected):
    """What save_npz wrote for model, part of the model and optimizer."""
    for name in 'whole', 'predictor', 'optimizer':
        with np.load(folder / 'result' / f'{name}.npz') as found, \
                np.load(expected / 'result' / f'{name}.npz') as other:
            assert sorted(found) == sorted(other)
            for key in found:
                np.testing.assert_allclose(found[key], other[key], rtol=1e-4,
                                           atol=1e-6)
