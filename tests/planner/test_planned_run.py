"""``run --plan``: scripts are trained as a plan says, which was made by hand.
"""
from chainer_fp8pipe.planner.job_plan import JobPlan, Way

import pytest

from tests.digits_runs import SCRIPT, check_run
from tests.forks import run_in_forks, script_folders
from tests.planner.plans import replicas, stages
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
    (3, replicas(3, algorithm='ring', overlap=True)),
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


_HEAD = '''
import chainer, chainermn, numpy as np
import chainer.functions as F
import chainer.links as L
from chainer import training
data = [(np.full(3, n, 'f') / 16, np.int32(n % 2)) for n in range(16)]
class Net(L.Classifier):
    def forward(self, x, t):
        return F.softmax_cross_entropy(F.dropout(self.predictor(x)), t)
model = Net(L.Linear(3, 2))
optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
iterator = chainer.iterators.SerialIterator(data, 6)
'''


# --- what is refused --------------------------------------------------------

REFUSED = [
    ('print(1)', replicas(1), 'nothing to train as a pipeline'),
    ("""
class Looks(Net):
    def forward(self, x, t):
        float(self.predictor(x).array.max())
        return super().forward(x, t)
training.StandardUpdater(iterator, optimizer.setup(Looks(L.Linear(3, 2))))
""", replicas(1), 'script.py:16: __float__ needs the value'),
]


@pytest.fixture(scope='module')
def refusals(tmp_path_factory):
    """What is said to each script of REFUSED with its plan."""
    folders = script_folders(tmp_path_factory,
                             [_HEAD + lines for lines, _, _ in REFUSED])
    for folder, (_, plan, _) in zip(folders, REFUSED, strict=True):
        plan.save(str(folder / 'plan.json'))
    return run_in_forks(['run', '--plan', 'plan.json', 'script.py'], folders)


@pytest.mark.parametrize('case', range(len(REFUSED)))
def test_what_cannot_be_done_is_refused_in_one_line(refusals, case):
    done = refusals[case]
    assert done.returncode == 2, done.stderr
    assert len([line for line in done.stderr.splitlines()
                if REFUSED[case][2] in line]) == 1
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize(('before', 'message'), [
    (['--plan', 'plan.json', '--warmup', '2'], '--warmup does not go with '
     '--plan, as the plan says it; leave one of them out, or edit "choice"'),
    (['--plan', 'no.json'], 'no.json: No such file'),
    (['--plan', 'alone.json'], 'one process is for 1 rank, not 2; start'),
    (['--plan', 'plan.json'], 'plan.json has 2 stages, 3 micro-batches, 1f1b, '
     'and is of a script that creates no communicator')])
def test_all_ranks_refuse_together(tmp_path, before, message):
    """Other options, a plan that is not there, stages of a ChainerMN script.
    """
    stages(2).save(str(tmp_path / 'plan.json'))
    JobPlan(Way(), 2, 60).save(str(tmp_path / 'alone.json'))
    (tmp_path / 'train.py').write_text(CHAINERMN)
    done = run(tmp_path, 2, script='train.py', before=before)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
