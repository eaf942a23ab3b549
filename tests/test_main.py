"""``python -m chainer_fp8pipe run``, with a script that knows nothing of it.
"""
import importlib.util
import json
import re

import pytest

from tests.ranks import on_ranks, run_script
from tests.runs import run_here
from tests.test_run_pipeline import check_refusal

# In the style of ChainerMN's MNIST example, on data that needs no file.
SCRIPT = '''
import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions

parser = argparse.ArgumentParser()
parser.add_argument('--communicator', default='naive')
parser.add_argument('--epoch', type=int, default=2)
parser.add_argument('--out', default='result')
args = parser.parse_args()
comm = chainermn.create_communicator(args.communicator)
if comm.rank == 0:
    print('class', type(comm).__name__, getattr(comm, 'options', ''))
np.random.seed(comm.rank)
model = L.Classifier(chainer.Sequential(
    L.Linear(64, 32), F.relu, L.Linear(32, 10)))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.Adam(0.02), comm)
optimizer.setup(model)
if comm.rank == 0:
    random = np.random.RandomState(0)
    labels = random.randint(0, 10, 400).astype(np.int32)
    images = np.eye(10, 64, dtype=np.float32)[labels]
    images += 0.2 * random.rand(400, 64).astype(np.float32)
    data = chainer.datasets.TupleDataset(images, labels)
    train, test = chainer.datasets.split_dataset(data, 300)
else:
    train, test = None, None
train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
test = chainermn.scatter_dataset(test, comm, shuffle=True, seed=0)
train_iter = chainer.iterators.SerialIterator(train, 15)
test_iter = chainer.iterators.SerialIterator(
    test, 50, repeat=False, shuffle=False)
updater = training.StandardUpdater(train_iter, optimizer)
trainer = training.Trainer(updater, (args.epoch, 'epoch'), out=args.out)
evaluator = extensions.Evaluator(test_iter, model)
trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
if comm.rank == 0:
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/accuracy']))
trainer.run()
weights = sum(float(p.array.sum()) for p in model.params())
# In one piece: rank 0 may be printing a number meanwhile.
print('weights %d %r\\n' % (comm.rank, weights), end='')
'''


def run(ranks, folder, script, *options):
    (folder / 'train.py').write_text(script)
    return run_script(ranks, '-m', 'chainer_fp8pipe', 'run', *options,
                      'train.py', cwd=folder)


@pytest.mark.parametrize(('options', 'given', 'made'), [
    ('', '', 'NaiveCommunicator'),
    ('', '--communicator fp8', 'CodecCommunicator'),
    ('--communicator fp8 --warmup 3', '', 'CodecCommunicator.*warmup=3'),
    *(pytest.param(f'--communicator {name}', '', 'CodecCommunicator',
                   marks=pytest.mark.slow)
      for name in ('fp8_paper', 'float16'))])
@on_ranks(2)
def test_the_script_or_the_command_line_chooses_the_communicator(
        comm, tmp_path, options, given, made):
    done = run_here(comm, tmp_path, SCRIPT, *options.split(),
                    arguments=['--epoch', '9', *given.split()])
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r'weights \d (-?[\d.e+-]+)', done.stdout)
    assert first == second
    log = json.loads((tmp_path / 'result' / 'log').read_text())
    assert log[8]['validation/main/accuracy'] > 0.5     # chance is 0.1
    assert re.search(f'class {made}', done.stdout)
    assert bool(options) == ("' in place of 'naive'" in done.stderr)


_COMM = "import chainermn\ncomm = chainermn.create_communicator('naive')\n"


@pytest.mark.parametrize(('head', 'message'), [
    ('', 'creates no communicator, so each of the 2 ranks would train a '
     'model of its own'),
    ('from mpi4py import MPI', '')])
def test_a_script_without_a_communicator_is_refused_at_its_first_update(
        tmp_path, head, message):
    """Unless the script names mpi4py."""
    done = run(2, tmp_path, f'''
{head}
import chainer, numpy
x, t = numpy.ones((4, 3), 'f'), numpy.zeros(4, 'i')
model = chainer.links.Classifier(chainer.links.Linear(3, 2))
optimizer = chainer.optimizers.SGD().setup(model)
for _ in range(2):
    optimizer.update(model, x, t)
    print('an update')
''', '--communicator', 'fp8')
    assert done.stderr.count('chainer_fp8pipe run: ') == bool(message)
    assert message in done.stderr
    assert done.returncode == (2 if message else 0)
    assert done.stdout.count('an update') == (0 if message else 4)


@on_ranks(2)
def test_what_does_not_fit_script_or_ranks_is_refused_in_a_line(
        comm, tmp_path):
    for script, options, message in [
            (_COMM.replace('naive', 'hierarchical'), '',
             "no communicator 'hierarchical'; give --comm"),
            (_COMM, '--communicator fp8 --algorithm torus2d --shape 2x2',
             'a torus of shape 2x2 has 4 ranks, not 2; pass a shape'),
            (_COMM, '--warmup 8', "communicator 'naive' has no option")]:
        check_refusal(run_here(comm, tmp_path, script, *options.split()),
                      message)


@pytest.mark.skipif(importlib.util.find_spec('cupy') is not None,
                    reason='CuPy is installed')
@pytest.mark.parametrize(('options', 'said'), [
    (['--cpu'], '3.0 True'), ([], 'run --cpu" gives a script NumPy')])
def test_a_script_that_imports_cupy_gets_numpys_names(
        options, said, tmp_path):
    done = run(
        0, tmp_path,
        'import cupy, numpy, chainer\n'
        'x = chainer.backends.cuda.cupy.ones(3)\n'
        'print(x.sum(), chainer.backend.get_array_module(x) is numpy)\n'
        'assert cupy is not numpy\n', *options)
    assert said in done.stdout + done.stderr
    assert done.returncode == (0 if options else 1)
