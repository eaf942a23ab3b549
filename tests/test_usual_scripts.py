"""Scripts in the usual styles of 2016 to 2019 as pipelines."""
import pathlib

import numpy as np

from tests.digits_runs import check_log, log_of
from tests.ranks import on_ranks
from tests.runs import run_alone, run_here

FOLDER = pathlib.Path(__file__).parent / 'usual_scripts'
#: By the number of ranks: a script, and its micro-batches.
SCRIPTS = {2: ('call_links', 4), 4: ('sampling', 2)}


@on_ranks(*SCRIPTS)
def test_a_pipeline_gives_the_numbers_of_one_process(comm, tmp_path):
    name, micro_batches = SCRIPTS[comm.size]
    script = (FOLDER / f'{name}.py').read_text()
    done = run_here(comm, tmp_path, script, '--pipeline', 2,
                    '--micro-batches', micro_batches)
    assert done.returncode == 0, done.stderr
    if comm.rank:
        return
    alone = tmp_path / 'alone'
    run_alone(alone, script)
    check_log(log_of(tmp_path), log_of(alone), 1e-3)
    values, others = (dict(np.load(folder / 'result' / 'model.npz'))
                      for folder in (tmp_path, alone))
    assert values.keys() == others.keys()
    for key, value in values.items():
        np.testing.assert_allclose(value, others[key], 1e-3, 1e-3,
                                   err_msg=key)
