"""Scripts in the usual styles of 2016 to 2019 as pipelines."""
import json
import os

import numpy as np
import pytest

from tests.ranks import run_script

FOLDER = os.path.join(os.path.dirname(__file__), 'usual_scripts')


def results(folder, name, ranks, *options):
    """The log, and the parameters in the end."""
    folder.mkdir()
    done = run_script(ranks, '-m', 'chainer_fp8pipe', 'run', *options,
                      os.path.join(FOLDER, f'{name}.py'), cwd=folder)
    assert done.returncode == 0, done.stderr
    return (json.loads((folder / 'result' / 'log').read_text()),
            dict(np.load(folder / 'result' / 'model.npz')))


@pytest.mark.parametrize(('name', 'ranks', 'micro_batches'), [
    ('call_links', 2, 4), ('sampling', 4, 2)])
def test_a_pipeline_gives_the_numbers_of_one_process(
        tmp_path, name, ranks, micro_batches):
    log, values = results(tmp_path / 'here', name, ranks, '--pipeline', 2,
                          '--micro-batches', micro_batches)
    other_log, others = results(tmp_path / 'serial', name, 0)
    assert len(log) == len(other_log) > 0
    for entry, other in zip(log, other_log, strict=True):
        assert entry.keys() == other.keys()
        for key in entry.keys() - {'elapsed_time'}:
            assert entry[key] == pytest.approx(other[key], 1e-3, 1e-3), key
    assert values.keys() == others.keys()
    for key, value in values.items():
        np.testing.assert_allclose(value, others[key], 1e-3, 1e-3,
                                   err_msg=key)
