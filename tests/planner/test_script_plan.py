"""Which scripts ``plan`` takes, and what it says to the others."""
import pytest

from tests.forks import run_in_forks, script_folders

_HEAD = '''
import chainer, chainermn, numpy as np, os
import chainer.functions as F
import chainer.links as L
from chainer import training
data = [(np.full(3, n, 'f') / 16, np.int32(n % 2)) for n in range(16)]
model = L.Classifier(L.Linear(3, 2))
optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
iterator = chainer.iterators.SerialIterator(data, 6)
def train(iterator=iterator, optimizer=optimizer, **given):
    updater = training.StandardUpdater(iterator, optimizer, **given)
    training.Trainer(updater, (4, 'iteration'), out='result').run()
    os.mkdir('went on')
'''

REFUSED = [
    ('training.StandardUpdater(iterator, optimizer)',
     'has ended without training'),
    ('training.StandardUpdater(iterator, optimizer)\ntrain()',
     'makes a second updater'),
    ('class Mine(training.Updater):\n'
     '    def get_all_optimizers(self): return {}\n'
     '    def connect_trainer(self, trainer): pass\n'
     'training.Trainer(Mine()).run()', 'trains with a Mine'),
    ("train(optimizer={'a': optimizer, 'b': optimizer})",
     'has the optimizers a, b;'),
    ('training.StandardUpdater(iterator, chainer.optimizers.SGD()).update()',
     'call optimizer.setup(model) before making'),
    ('train(loss_func=lambda x, t: F.sum(x))',
     'a loss function of its own, <lambda>'),
    ('train(converter=lambda batch, device: [x for x, _ in batch] + '
     '[np.zeros(9)])', 'must all have the samples of one batch'),
    ('optimizer.update(model, *chainer.dataset.concat_examples(data))\n'
     'os.mkdir("went on")', 'in a loop of its own'),
    ('model.log = open(os.devnull)\ntrain()',
     'no way to train this model could be tried: '),
]


@pytest.fixture(scope='module')
def refusals(tmp_path_factory):
    """What each script of REFUSED says, and its folder."""
    folders = script_folders(tmp_path_factory,
                             [_HEAD + lines for lines, _ in REFUSED])
    return list(zip(run_in_forks(
        ['plan', '--seconds', '1', '-o', 'plan.json', 'script.py'], folders),
        folders, strict=True))


@pytest.mark.parametrize('case', range(len(REFUSED)))
def test_what_cannot_be_planned_is_refused_in_one_line(refusals, case):
    done, folder = refusals[case]
    assert done.returncode == 2, done.stderr
    assert REFUSED[case][1] in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith('chainer_fp8pipe plan: ')
    assert 'Traceback' not in done.stderr
    assert not (folder / 'plan.json').exists()
    assert not (folder / 'went on').exists()
