"""``python -m chainer_fp8pipe plan``, and what becomes of its plan."""
import os
import re

from chainer_fp8pipe.planner.planned_job import PlannedJob

from tests.digits_runs import SCRIPT, check_log, log_of
from tests.planner.plans import SHAPES
from tests.ranks import run_script
from tests.test_main import SCRIPT as CHAINERMN


def run(folder, ranks, command, *arguments):
    return run_script(ranks, '-m', 'chainer_fp8pipe', command, *arguments,
                      cwd=folder)


def test_a_plain_script_is_planned_and_run_as_planned(tmp_path):
    arguments = SCRIPT, '--seed', '1', '--out', 'result'
    done = run(tmp_path, 2, 'plan', '--seconds', '1', '--codecs', 'float32',
               '--memory', '1GiB',
               '-o', 'plan.json', *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('# epoch') == 1
    assert len(re.findall(r'^an update of 60 samples on 2 ranks takes '
                          r'[\d.]+ ms \+- \d+ %, measured here',
                          done.stdout, re.M)) == 1
    for text in 'tried on these ranks', 'one process', '2 replicas, naive':
        assert text in done.stdout
    for text in ('measuring the model with a batch of 30',
                 'measuring float32 exchanges and links',
                 'was left at its first update'):
        assert done.stderr.count(text) == 1, text
    assert os.listdir(tmp_path) == ['plan.json']
    plan = PlannedJob(str(tmp_path / 'plan.json')).plan
    assert (plan.ranks, plan.batch) == (2, 60)
    assert {name: tuple(shape) for name, shape in plan.model.items()} == SHAPES
    assert f'{plan.choice}' in done.stdout

    serial = tmp_path / 'serial'
    for place, ranks, given in (tmp_path, 2, ('--plan', 'plan.json')), (
            serial, 1, ()):
        os.makedirs(place, exist_ok=True)
        done = run(place, ranks, 'run', *given, *arguments)
        assert done.returncode == 0, done.stderr
    check_log(log_of(tmp_path), log_of(serial))


def test_a_chainermn_script_is_planned_with_replicas_and_run(tmp_path):
    (tmp_path / 'train.py').write_text(CHAINERMN)
    arguments = 'train.py', '--epoch', '2'
    done = run(tmp_path, 2, 'plan', '--seconds', '1', '-o', 'plan.json',
               *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('no pipeline is looked at') == 1
    plan = PlannedJob(str(tmp_path / 'plan.json')).plan
    # 15 samples on each rank.
    assert (plan.ranks, plan.batch, plan.choice.stages) == (2, 30, 1)
    assert not [one for one in plan.alternatives
                if 'stages' in one.way]
    done = run(tmp_path, 2, 'run', '--plan', 'plan.json', *arguments)
    assert done.returncode == 0, done.stderr
    if plan.choice.codec != 'naive':
        assert f"overlap={plan.choice.overlap!r}" in done.stdout
    weights = re.findall(r'weights \d (-?[\d.e+-]+)', done.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1


def test_a_model_that_looks_at_values_is_planned_for_more_ranks(tmp_path):
    """A loop of updates, without a Trainer; the plan is for 4 ranks."""
    (tmp_path / 'train.py').write_text('''
import chainer, numpy as np
import chainer.functions as F
import chainer.links as L
class Net(L.Classifier):
    def forward(self, x, t):
        y = self.predictor(x)
        if float(y.array.max()) > 1e9:
            y = y * 0
        return F.softmax_cross_entropy(y, t)
data = [(np.full(3, n, 'f') / 16, np.int32(n % 2)) for n in range(16)]
optimizer = chainer.optimizers.Adam().setup(Net(L.Linear(None, 2)))
updater = chainer.training.StandardUpdater(
    chainer.iterators.MultithreadIterator(data, 8), optimizer)
chainer.serializers.save_npz('first', optimizer.target)
while updater.epoch < 1:
    updater.update()
    chainer.serializers.save_npz('last', optimizer.target)
''')
    done = run(tmp_path, 2, 'plan', '--seconds', '1', '--ranks', '4',
               '--batch', '20',
               '--codecs', 'float32,fp8', '-o', 'plan.json', 'train.py')
    assert done.returncode == 0, done.stderr
    assert 'measuring the model with a batch of 5' in done.stderr
    assert done.stderr.count('first is not written') == 1
    assert sorted(os.listdir(tmp_path)) == ['plan.json', 'train.py']
    plan = PlannedJob(str(tmp_path / 'plan.json')).plan
    assert (plan.ranks, plan.batch, plan.choice.replicas) == (4, 20, 4)
    assert any('no pipeline' in remark and 'train.py:' in remark
               for remark in plan.remarks)
    assert plan.choice.codec in ('float32', 'fp8')
