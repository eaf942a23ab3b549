"""``python -m chainer_fp8pipe export``: models as ONNX, run by onnxruntime."""
import sys
import textwrap
from pathlib import Path

import chainer_fp8pipe
from chainer_fp8pipe import export
from chainer_fp8pipe.training.extensions import Snapshot

import chainer
import numpy
import onnxruntime
import pytest
from chainer.training import extensions
from mpi4py import MPI

from tests.ranks import run_script

ROOT = Path(__file__).parent.parent
NETS = '''
import argparse, chainer, chainer.functions as F, chainer.links as L

argparse.ArgumentParser().parse_args()      # of the script's own options

class Net(chainer.Chain):
    def __init__(self, n_out=3, n_units=None):
        super().__init__()
        self.add_persistent('kept', None)
        with self.init_scope():
            self.l1 = L.Linear(None, n_units or 5)
            self.l2 = L.Linear(None, n_out)
    def forward(self, x):
        return self.l2(F.dropout(F.relu(self.l1(x))))

class Old(chainer.Chain):
    def __init__(self):
        super(Old, self).__init__(l1=L.Linear(4, 3))
    def __call__(self, x):
        return self.l1(x)

class Images(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, 4, 3)
            self.bn = L.BatchNormalization(4)
            self.out = L.Linear(None, 5)
    def forward(self, x):
        h = F.max_pooling_2d(F.relu(self.bn(self.conv(x))), 2)
        return F.softmax(self.out(F.dropout(h)))

class Attention(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(9, 6)
            self.q, self.k = L.Linear(6), L.Linear(6, 6)
    def forward(self, x, mask, scale=None):
        h = self.embed(x)
        a = F.matmul(self.q(h, n_batch_axes=2), self.k(h, n_batch_axes=2),
                     transb=True) + mask
        return {'weights': F.softmax(a, axis=2), 'sums': F.sum(h, axis=2)}

class Counting(chainer.Chain):
    """Remembers its last output."""
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.gru = L.StatefulGRU(4, 4)
    def forward(self, x):
        return self.gru(x), 2 * x

class Recurrent(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.lstm = L.LSTM(4, 4)
    def forward(self, x):
        return self.lstm(x)

def layers():
    return chainer.Sequential(L.Linear(4, 3), F.relu)

class Constant(Old):
    def __init__(self, of):
        super().__init__()
        self.of = of
    def __call__(self, x):
        return self.l1(x) / float(self.of(x.array))

def number():
    return 3

if __name__ == '__main__':
    raise SystemExit('this is what only a run does')
'''
BATCH = numpy.random.RandomState(0).randn(4, 4).astype('f')
IMAGES = numpy.random.RandomState(1).rand(2, 3, 8, 8).astype('f')
WORDS = (numpy.arange(6, dtype='i').reshape(2, 3),
         numpy.random.RandomState(2).randn(2, 3, 3).astype('f'))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command; gives the exit code, and all that is printed.

    The current folder has a module ``nets``, which each test imports anew,
    and an example.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    Path('nets.py').write_text(NETS)
    for name in 'Trainer.run', 'Variable.backward':
        Path(f'{name[:4]}.py').write_text(
            f'{NETS}\nfrom chainer.training import Trainer\n'
            f'from chainer import Variable\n{name}(None)')
    numpy.save('x.npy', BATCH)
    numpy.savez('two.npz', BATCH, BATCH)
    numpy.save('wide.npy', numpy.ones((2, 9), 'f'))
    numpy.save('pickled.npy', numpy.array([None]))

    def run(model, model_class, example='x.npy', *options):
        try:
            code = 0
            export.main([model, '--class', model_class, '--example',
                         example, '-o', 'out.onnx', *options])
        except SystemExit as refused:
            code = refused.code
        if isinstance(code, str):       # that Python prints
            return 1, code
        said = capsys.readouterr()
        return code, said.out + said.err
    yield run
    for name in 'nets', 'rewritten', 'Trai', 'Vari':
        sys.modules.pop(name, None)


def trained(model_class, *batch):
    """A model after some calls in training, whose file is written."""
    model = export.make_model(model_class)
    for _ in range(2):
        model(*map(chainer.Variable, batch))
    chainer.serializers.save_npz('model.npz', model)
    if hasattr(model, 'gru'):
        model.gru.reset_state()
    return model


def check(model, *batch):
    """That the file computes what the model does."""
    session = onnxruntime.InferenceSession('out.onnx')
    names = [one.name for one in session.get_inputs()]
    found = session.run(None, dict(zip(names, batch, strict=True)))
    with chainer.using_config('train', False):
        expected = model(*map(chainer.Variable, batch))
    if isinstance(expected, dict):
        assert [one.name for one in session.get_outputs()] == [*expected]
        expected = [*expected.values()]
    for one, other in zip(found, expected if isinstance(expected, list | tuple)
                          else [expected], strict=True):
        numpy.testing.assert_allclose(one, other.array, atol=1e-5)


@pytest.mark.parametrize(('model_class', 'batch'), [
    ('Net(n_units=7)', [BATCH]), ('Old', [BATCH]), ('Images', [IMAGES]),
    ('Attention', WORDS), ('Counting', [BATCH]),
    ('layers()', [BATCH])])
def test_a_file_computes_what_the_model_does(command, model_class, batch):
    model = trained(f'nets:{model_class}', *batch)
    numpy.savez('example.npz', *batch)
    code, said = command('model.npz', f'nets.py:{model_class}', 'example.npz')
    assert code == 0, said
    check(model, *batch)


def classifier():
    model = trained('nets:Net', BATCH)
    chainer.serializers.save_npz('classifier.npz',
                                 chainer.links.Classifier(model))
    return model


def train(snapshot):
    """A classifier that a Trainer trains for an update, with a snapshot."""
    model = chainer.links.Classifier(export.make_model('nets:Net'))
    optimizer = chainer.optimizers.Adam().setup(model)
    data = [(row, numpy.int32(n % 3)) for n, row in enumerate(BATCH)]
    trainer = chainer.training.Trainer(chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 4), optimizer),
        (1, 'iteration'), out='.')
    trainer.extend(snapshot, trigger=(1, 'iteration'))
    # It keeps None until it has fired.
    trainer.extend(
        lambda trainer: None, name='best',
        trigger=chainer.training.triggers.MinValueTrigger(
            'main/loss', (2, 'iteration')))
    trainer.run()
    return model.predictor


@pytest.mark.parametrize(('make', 'file', 'place'), [
    (classifier, 'classifier.npz', 'predictor/'),
    (lambda: train(extensions.snapshot()), 'snapshot_iter_1',
     'updater/model:main/predictor/'),
    (lambda: train(Snapshot(chainer_fp8pipe.create_communicator(
        'float32', MPI.COMM_SELF), directory='saved')),
     'saved/snapshot_iter_1.ranks/rank0of1.npz',
     'updater/model:main/predictor/')])
def test_the_model_is_found_in_any_snapshot(command, make, file, place):
    model = make()
    code, said = command(file, 'nets.py:Net')
    assert code == 0, said
    assert f'{file}, {place}: 4 parameters' in said
    check(model, BATCH)


@pytest.mark.parametrize(('file', 'model_class', 'example', 'said'), [
    ('model.npz', 'nets.py', 'x.npy', 'write it as in train.py:Net'),
    ('model.npz', 'nowhere.py:Net', 'x.npy', "No module named 'nowhere'"),
    ('model.npz', 'nets:Nett', 'x.npy', "'Nett' is not defined"),
    ('model.npz', 'nets:number()', 'x.npy', 'nets:number() is no Link'),
    ('model.npz', 'nets:Net(4)', 'x.npy', 'has 0 models with the names'),
    ('model.npz', 'nets:Old', 'x.npy', '--class (l1/W, l1/b)'),
    ('nothing.npz', 'nets:Net', 'x.npy', 'No such file or directory'),
    ('nets.py', 'nets:Net', 'x.npy', 'pickled (object)'),
    ('model.npz', 'nets:Net', 'pickled.npy', 'allow_pickle=False'),
    ('model.npz', 'nets:Net', 'two.npz', 'positional arguments'),
    ('model.npz', 'Trai.py:Net', 'x.npy', "below if __name__ == '__main"),
    ('model.npz', 'Vari.py:Net', 'x.npy', "below if __name__ == '__main"),
    ('model.npz', 'nets:Net', 'wide.npy', 'InvalidType'),
    ('model.npz', 'nets:Recurrent', 'x.npy', 'LSTM'),    # not in ONNX
    ('model.npz', 'nets:Net --exmaple', 'x.npy', 'arguments: --exmaple')])
def test_what_is_wrong_is_named(command, file, model_class, example, said):
    trained('nets:Recurrent' if 'Rec' in model_class else 'nets:Net', BATCH)
    name, *options = model_class.split()
    code, found = command(file, name, example, *options)
    assert code == 2
    assert said in found
    assert not list(Path().glob('out.onnx*'))


def test_links_as_the_documentation_writes_them_take_the_old_file(command):
    page = (ROOT / 'docs/export.rst').read_text()
    code = page[page.index('   import chainer.functions as F'):
                page.index('Limits:')]
    Path('rewritten.py').write_text(textwrap.dedent(code) + """
import chainer
class Net(chainer.Chain):
    def __init__(self, links):
        super().__init__()
        with self.init_scope():
            self.lstm = links.LSTM(4, 5)
            self.norm = links.LayerNormalization(5)
    def forward(self, x):
        for t in range(3):
            h = self.lstm(x[:, t])
        return self.norm(h)
import rewritten
""")
    words = numpy.random.RandomState(0).randn(2, 3, 4).astype('f')
    numpy.save('words.npy', words)
    model = trained('rewritten.py:Net(L)', words)
    model.lstm.reset_state()
    code, said = command('model.npz', 'rewritten.py:Net(rewritten)',
                         'words.npy')
    assert code == 0, said
    check(model, words)


@pytest.mark.parametrize('of', ['x.sum()', 'abs(x).max()', '(x ** 2).sum()'])
def test_a_constant_of_the_example_is_no_proof(command, of):
    Path('out.onnx').write_bytes(b'of an earlier run')
    model_class = f'nets:Constant(lambda x: {of})'
    trained(model_class, BATCH)
    code, said = command('model.npz', model_class)
    assert code == 1
    assert 'Not proven: values drawn anew differ' in said
    assert Path('out.onnx').read_bytes() == b'of an earlier run'


def test_the_command_starts_as_no_rank(command, tmp_path):
    """And does not run the script."""
    trained('nets:Net', BATCH)
    done = run_script(
        0, '-X', 'importtime', '-m', 'chainer_fp8pipe', 'export', 'model.npz',
        '--class', 'nets.py:Net()', '--example', 'x.npy', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'model.onnx: ' in done.stdout
    assert 'mpi4py' not in done.stderr
    assert Path('model.onnx').is_file()
