"""Scripts in the usual styles of 2016 to 2019, in all ways of running them.

Each works with the numbers of one process, or is refused in a line.
"""
import json
import os

import numpy as np
import pytest

from tests.ranks import run_script
from tests.test_run_pipeline import check_refusal as refused_in_a_line

FOLDER = os.path.join(os.path.dirname(__file__), 'usual_scripts')
#: By script: what --pipeline 2 refuses; '': it works.
SCRIPTS = {
    'call_links': '',
    'graph_network': "is ChainerMN's multi-node optimizer",
    'sampling': '',
    'segmentation': '',
    'transformer': '',
}
#: Those whose numbers depend on the micro-batch: batch normalisation, and
#: reports that are no means.
WHOLE_BATCHES = 'segmentation', 'transformer'
#: Those that one job of many scripts can show.
QUICK = 'call_links', 'graph_network', 'sampling'


def path_of(name):
    return os.path.join(FOLDER, f'{name}.py')


def run(folder, name, ranks, *options):
    folder.mkdir()
    return run_script(ranks, '-m', 'chainer_fp8pipe', 'run', *options,
                      path_of(name), cwd=folder)


def results(folder):
    """The log, where there is one, and the parameters in the end."""
    out, = [path for path in folder.iterdir()
            if (path / 'model.npz').exists()]
    log = []
    if (out / 'log').exists():
        log = json.loads((out / 'log').read_text())
    return log, dict(np.load(out / 'model.npz'))


@pytest.fixture(scope='module')
def serial(tmp_path_factory):
    """What a script leaves in one process, by its name."""
    found = {}

    def of(name):
        if name not in found:
            folder = tmp_path_factory.mktemp('serial')
            done = run_script(0, '-m', 'chainer_fp8pipe', 'run',
                              path_of(name), cwd=folder)
            assert done.returncode == 0, done.stderr
            found[name] = results(folder)
        return found[name]
    return of


def check(folder, expected, tolerance=1e-4, but=()):
    """Whether a run has left the numbers of another."""
    (log, values), (other_log, others) = results(folder), expected
    assert len(log) == len(other_log)
    for entry, other in zip(log, other_log, strict=True):
        assert entry.keys() == other.keys()
        for key in entry.keys() - {'elapsed_time', *but}:
            assert entry[key] == pytest.approx(
                other[key], rel=tolerance, abs=tolerance), key
    assert values.keys() == others.keys()
    for key, value in values.items():
        np.testing.assert_allclose(value, others[key], tolerance, tolerance,
                                   err_msg=key)


def check_refusal(done, message, folder):
    """Whether one line says why, and nothing was trained."""
    refused_in_a_line(done, message)
    assert not list(folder.rglob('log')) + list(folder.rglob('*.npz'))


def some(names):
    return [name if name in QUICK else pytest.param(
        name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize('name', some(SCRIPTS))
def test_a_pipeline_gives_the_numbers_of_one_process_or_refuses(
        tmp_path, name, serial):
    options = ['--micro-batches', '1'] * (name in WHOLE_BATCHES)
    done = run(tmp_path / 'here', name, 2, '--pipeline', 2, *options)
    message = SCRIPTS[name]
    if message:
        check_refusal(done, message, tmp_path / 'here')
        return
    assert done.returncode == 0, done.stderr
    check(tmp_path / 'here', serial(name))


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
@pytest.mark.parametrize('name', [
    name for name, refused in SCRIPTS.items() if not refused])
def test_micro_batches_and_replicas_give_the_losses_of_one_process(
        tmp_path, name, ranks, serial):
    if name == 'segmentation':
        pytest.skip('its batch normalisation sees micro-batches')
    done = run(tmp_path / 'here', name, ranks, '--pipeline', 2,
               '--micro-batches', 2)
    assert done.returncode == 0, done.stderr
    check(tmp_path / 'here', serial(name), 1e-3,
          ('main/perp', 'validation/main/perp'))


def test_a_communicator_gives_the_numbers_of_one_process(tmp_path, serial):
    """Its first updates are in float32, and the rest near it."""
    name = 'graph_network'
    own = 'main/loss', 'main/accuracy'      # of rank 0's share of the data
    for folder, options, tolerance in (
            ('here', (), 1e-4), ('fp8', ('--warmup', 1), 0.1)):
        done = run(tmp_path / folder, name, 2, '--communicator', 'fp8',
                   *options)
        assert done.returncode == 0, done.stderr
        check(tmp_path / folder, serial(name), tolerance, own)
