"""``python -m chainer_fp8pipe plan``, and what becomes of its plan."""
import os
import re
import time

from chainer_fp8pipe.planner.job_plan import JobPlan

import pytest

from tests.digits_runs import SCRIPT, check_log, log_of
from tests.ranks import run_script
from tests.test_main import SCRIPT as CHAINERMN


def run(folder, ranks, command, *arguments):
    return run_script(ranks, '-m', 'chainer_fp8pipe', command, *arguments,
                      cwd=folder)


def test_a_plain_script_is_planned_and_run_as_planned(tmp_path):
    arguments = SCRIPT, '--seed', '1', '--out', 'result'
    done = run(tmp_path, 2, 'plan', '--seconds', '1', '--codecs', 'float32',
               '-o', 'plan.json', *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('# epoch') == 1
    assert len(re.findall('^tried on 2 ranks, an update of 60 samples takes:',
                          done.stdout, re.M)) == 1
    for text in 'one process', '2 replicas, float32', '2 stages':
        assert f'trying {text}' in done.stderr
        assert text in done.stdout
    assert done.stderr.count('was left at its first update') == 1
    assert os.listdir(tmp_path) == ['plan.json']
    plan = JobPlan.load(str(tmp_path / 'plan.json'))
    assert (plan.ranks, plan.batch) == (2, 60)
    assert done.stdout.count('<- this plan') == 1
    assert f'{plan.choice}' in [one.way for one in plan.trials]

    serial = tmp_path / 'serial'
    for place, ranks, given in (
            tmp_path, plan.choice.ranks, ('--plan', 'plan.json')), (
            serial, 1, ()):
        os.makedirs(place, exist_ok=True)
        done = run(place, ranks, 'run', *given, *arguments)
        assert done.returncode == 0, done.stderr
    check_log(log_of(tmp_path), log_of(serial))


def test_a_chainermn_script_is_planned_with_replicas_and_run(tmp_path):
    (tmp_path / 'train.py').write_text(CHAINERMN)
    arguments = 'train.py', '--epoch', '2'
    done = run(tmp_path, 2, 'plan', '--seconds', '1', '-o', 'plan.json',
               *arguments, '--communicator', 'flat')
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('no pipeline is looked at') == 1
    plan = JobPlan.load(str(tmp_path / 'plan.json'))
    # 15 samples on each rank; the script as it is, is tried first.
    assert (plan.ranks, plan.batch, plan.choice.stages) == (2, 30, 1)
    tried = re.findall('trying (2 replicas, .*)', done.stderr)
    assert tried[0] == '2 replicas, flat'
    done = run(tmp_path, 2, 'run', '--plan', 'plan.json', *arguments)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r'weights \d (-?[\d.e+-]+)', done.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1


_FAILS = '''
import chainer, chainermn, numpy
import chainer.links as L
class Data(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 400
    def get_example(self, number):
        if {data} and comm.rank == 1 and number == 100:
            raise OSError('out of luck')
        return numpy.ones(4, 'f'), numpy.int32(0)
class Net(L.Classifier):
    calls = 0
    def forward(self, x, t):
        self.calls += 1
        if not {data} and comm.rank == 1 and self.calls == 4:
            raise OSError('out of luck')
        return super().forward(x, t)
comm = chainermn.create_communicator('naive')
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm).setup(Net(L.Linear(4, 3)))
updater = chainer.training.StandardUpdater(
    chainer.iterators.SerialIterator(Data(), 8, shuffle=False), optimizer)
try:
    chainer.training.Trainer(updater, (1, 'epoch')).run()
except OSError:
    print('caught')     # and the others wait
'''


@pytest.mark.parametrize('data', [True, False])
def test_one_rank_that_fails_in_a_trial_ends_all_with_its_error(
        tmp_path, data):
    (tmp_path / 'train.py').write_text(_FAILS.format(data=data))
    begin = time.monotonic()
    done = run(tmp_path, 2, 'plan', '-o', 'plan.json', 'train.py')
    assert time.monotonic() - begin < 100
    assert done.returncode not in (0, 75)
    assert done.stderr.count('OSError: out of luck') == 1
    assert not (tmp_path / 'plan.json').exists()
