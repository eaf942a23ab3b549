"""Which scripts ``plan`` takes, and what it says to the others."""
from tests.ranks import on_ranks
from tests.runs import run_here

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
     'os.mkdir("went on")', 'let a loop of its own'),
    ('model.log = open(os.devnull)\ntrain()',
     'no way to train this model could be tried: '),
]


@on_ranks(1)
def test_what_cannot_be_planned_is_refused_in_one_line(comm, tmp_path):
    for number, (lines, message) in enumerate(REFUSED):
        folder = tmp_path / str(number)
        done = run_here(comm, folder, _HEAD + lines, '--seconds', '1', '-o',
                        'plan.json', command='plan')
        assert done.returncode == 2, done.stderr
        assert message in done.stderr.splitlines()[-1]
        assert done.stderr.splitlines()[-1].startswith(
            'chainer_fp8pipe plan: ')
        assert 'Traceback' not in done.stderr
        assert not (folder / 'plan.json').exists()
        assert not (folder / 'went on').exists()
