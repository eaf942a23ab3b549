"""``run --plan``: scripts are trained as a plan says, which was made by hand.
"""
from chainer_fp8pipe.planner.job_plan import JobPlan, Way

import pytest

from tests.digits_runs import SCRIPT, check_run
from tests.planner.plans import stages
from tests.ranks import run_script
from tests.test_main import SCRIPT as CHAINERMN


def run(folder, ranks, *arguments, plan=None, script=SCRIPT, before=()):
    """``run --plan`` on so many ranks, in a folder with the plan."""
    if plan is not None:
        plan.save(str(folder / 'plan.json'))
        before = ['--plan', 'plan.json', *before]
    return run_script(ranks, '-m', 'chainer_fp8pipe', 'run', *before, script,
                      *arguments, cwd=folder)


@pytest.mark.parametrize(('ranks', 'plan'), [
    # A batch of 50 is not of equally many samples for each.
    (3, JobPlan(Way(3, None, 'float32', {
        'algorithm': 'ring', 'overlap': True}), 3, 60)),
    (4, stages(4, algorithm='direct'))])
def test_the_log_and_the_files_are_those_of_a_serial_run(
        tmp_path, serial, ranks, plan):
    arguments = '--seed', '1', '--hooks', '--batchsize', '50'
    done = run(tmp_path, ranks, *arguments, plan=plan)
    check_run(done, tmp_path, serial(*arguments))
    assert done.stderr.count(f'run: as planned: {plan.choice}') == 1
    if plan.choice.stages > 1:      # the cut is the plan's
        first, second = (line for line in done.stderr.splitlines()
                         if '/W' in line and line[0] in '01')
        assert first.endswith('/predictor/l1/W')
        assert second.endswith('/predictor/l2/W, forward twice')


@pytest.mark.parametrize(('before', 'message', 'script'), [
    (['--plan', 'plan.json', '--warmup', '2'], '--warmup does not go with '
     '--plan, as the plan says it; leave one of them out, or edit "choice"',
     CHAINERMN),
    (['--plan', 'no.json'], 'no.json: No such file', CHAINERMN),
    (['--plan', 'alone.json'], 'one process is for 1 rank, not 2; start',
     CHAINERMN),
    (['--plan', 'plan.json'], 'plan.json has 2 stages, 3 micro-batches, 1f1b, '
     'and is of a script that creates no communicator', CHAINERMN),
    (['--plan', 'plan.json'], 'without a chainer.training', 'print(1)')])
def test_all_ranks_refuse_together(tmp_path, before, message, script):
    """Other options, a plan that is not there, another kind of script."""
    stages(2).save(str(tmp_path / 'plan.json'))
    JobPlan(Way(), 2, 60).save(str(tmp_path / 'alone.json'))
    (tmp_path / 'train.py').write_text(script)
    done = run(tmp_path, 2, script='train.py', before=before)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
