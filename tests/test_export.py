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
import chainer, chainer.functions as F, chainer.links as L

class Net(chainer.Chain):
    def __init__(self, n_out=3, n_units=None):
        super().__init__()
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
        return {'weights': F.softmax(a, axis=2),
                'sums': (F.sum(h, axis=2), None, [F.mean(a, axis=2)])}

class Counting(chainer.Chain):
    """Remembers its last output."""
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.gru = L.StatefulGRU(4, 4)
    def forward(self, x):
        return {'y': self.gru(x), 'x': x}

class Recurrent(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.lstm = L.LSTM(4, 4)
            self.norm = L.LayerNormalization(4)
    def forward(self, x):
        h = self.lstm(x)
        return F.cosh(self.norm(h))

class Constant(Old):
    def __call__(self, x):
        return self.l1(x) * float(x.array.sum())

class Centred(Old):
    def __call__(self, x):
        return self.l1(x - x.array.mean())

class Largest(Old):
    def __call__(self, x):
        return self.l1(x) / float(abs(x.array).max())

class Norm(Old):
    def __call__(self, x):
        return self.l1(x) / float((x.array ** 2).sum())

class Picky(Old):
    def __call__(self, x):
        if x.array[0, 0] < 1:
            raise ValueError('too small')
        return self.l1(x)

class NoVariable(Old):
    def __call__(self, x):
        return self.l1(x).array

class Unused(Old):
    def __init__(self):
        super().__init__()
        self.add_link('rest', L.Linear(None, 2))

class Nothing(Unused):
    def __call__(self, x):
        return self.rest(x)

def number():
    return 3

class Two(Net):
    def forward(self, x, other):
        return super().forward(x + other)

if __name__ == '__main__':
    raise SystemExit('this is what only a run does')
'''
BATCH = numpy.random.RandomState(0).randn(4, 4).astype('f')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Has a module ``nets``, which each test imports anew, and an example."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    (tmp_path / 'nets.py').write_text(NETS)
    numpy.save('x.npy', BATCH)
    yield tmp_path
    for name in 'nets', 'trains', 'exits', 'broken', 'rewritten':
        sys.modules.pop(name, None)


@pytest.fixture
def command(folder, capsys):
    """Runs the command; gives the exit code, and all that is printed."""
    def run(model, model_class, example='x.npy', *options):
        try:
            code = export.main([model, '--class', model_class, '--example',
                                example, '-o', 'out.onnx', *options])
        except SystemExit as refused:
            code = refused.code
        said = capsys.readouterr()
        return code, said.out + said.err
    return run


def trained(model_class, *batch, name='model.npz'):
    """A model after some calls in training, whose snapshot is written."""
    model = export.make_model(model_class)
    for _ in range(2):
        model(*map(chainer.Variable, batch))
    chainer.serializers.save_npz(name, model)
    if hasattr(model, 'gru'):
        model.gru.reset_state()
    return model


def computed(*batch):
    session = onnxruntime.InferenceSession('out.onnx')
    names = [one.name for one in session.get_inputs()]
    return dict(zip([one.name for one in session.get_outputs()], session.run(
        None, dict(zip(names, batch, strict=True))), strict=True))


IMAGES = numpy.random.RandomState(1).rand(2, 3, 8, 8).astype('f')
WORDS = (numpy.arange(6, dtype='i').reshape(2, 3),
         numpy.random.RandomState(2).randn(2, 3, 3).astype('f'))


@pytest.mark.parametrize('opset', ['7', '11'])
@pytest.mark.parametrize(('model_class', 'batch'), [
    ('Net(n_units=7)', [BATCH]), ('Old', [BATCH]), ('Images', [IMAGES]),
    ('Attention', WORDS), ('Counting', [BATCH]), ('Unused', [BATCH])])
def test_a_file_computes_what_the_model_does(
        command, model_class, batch, opset):
    model = trained(f'nets:{model_class}', *batch)
    numpy.savez('example.npz', *batch)
    code, said = command('model.npz', f'nets.py:{model_class}', 'example.npz',
                         '--opset', opset)
    assert code == 0, said
    assert f'opset {opset}' in said
    with chainer.using_config('train', False):
        expected = dict(export._outputs(
            model(*map(chainer.Variable, batch)), ''))
    if 'x' in expected:     # is the input's name
        expected['x_output'] = expected.pop('x')
    found = computed(*batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert f'output {name}: float32 {value.shape}' in said
        numpy.testing.assert_allclose(found[name], value.array, atol=1e-6)


@pytest.mark.parametrize(('model_class', 'batch'), [
    ('Net', [BATCH]), ('Images', [IMAGES]), ('Attention', WORDS)])
def test_any_batch_is_left_open(command, model_class, batch):
    model = trained(f'nets:{model_class}', *batch)
    numpy.savez('example.npz', *batch)
    code, said = command('model.npz', f'nets:{model_class}', 'example.npz',
                         '--any-batch')
    assert code == 0, said
    larger = [numpy.concatenate([array] * 3) for array in batch]
    with chainer.using_config('train', False):
        expected = dict(export._outputs(
            model(*map(chainer.Variable, larger)), ''))
    for name, value in computed(*larger).items():
        numpy.testing.assert_allclose(value, expected[name].array, atol=1e-6)


# --- where a model is in a file ----------------------------------------------

def train(snapshot):
    """A classifier that a Trainer trains for an update, with a snapshot."""
    model = chainer.links.Classifier(export.make_model('nets:Net'))
    optimizer = chainer.optimizers.Adam().setup(model)
    data = [(row, numpy.int32(n % 3)) for n, row in enumerate(BATCH)]
    trainer = chainer.training.Trainer(chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 4), optimizer),
        (1, 'iteration'), out='.')
    trainer.extend(snapshot, trigger=(1, 'iteration'))
    trainer.run()
    return model.predictor


def saved(model, name='classifier.npz'):
    model = chainer.links.Classifier(model)
    chainer.serializers.save_npz(name, model)


def snapshot_of_the_package():
    comm = chainer_fp8pipe.create_communicator('float32', MPI.COMM_SELF)
    return Snapshot(comm, directory='saved')


@pytest.mark.parametrize(('kind', 'file', 'place'), [
    ('model', 'model.npz', ''),
    ('classifier', 'classifier.npz', 'predictor/'),
    ('trainer', 'snapshot_iter_1', 'updater/model:main/predictor/'),
    ('package', 'saved/snapshot_iter_1.ranks/rank0of1.npz',
     'updater/model:main/predictor/'),
])
def test_the_model_is_found_in_any_snapshot(command, kind, file, place):
    if kind in ('model', 'classifier'):
        model = trained('nets:Net', BATCH)
        saved(model)
    else:
        model = train(extensions.snapshot() if kind == 'trainer'
                      else snapshot_of_the_package())
    code, said = command(file, 'nets.py:Net')
    assert code == 0, said
    assert f'{file}{place and ", below " + place}: 4 parameters' in said
    with chainer.using_config('train', False):
        numpy.testing.assert_allclose(
            computed(BATCH)['output'], model(BATCH).array, atol=1e-6)


def test_of_several_models_one_is_chosen(command):
    models = {name: trained('nets:Old', BATCH) for name in 'ab'}
    numpy.savez('two.npz', **{
        f'{name}/{key.strip("/")}': value.array
        for name, model in models.items()
        for key, value in model.namedparams()})
    code, said = command('two.npz', 'nets:Old')
    assert code == 2
    assert 'has such models below a/, b/; choose one with --path' in said
    code, said = command('two.npz', 'nets:Old', 'x.npy', '--path', 'b')
    assert code == 0, said
    numpy.testing.assert_allclose(
        computed(BATCH)['output'], models['b'](BATCH).array, atol=1e-6)


# --- what is wrong -----------------------------------------------------------

WRONG = [
    # class, example, options, what is said
    ('nets.py', 'x.npy', '', "--class: write 'nets.py' as in train.py:Net"),
    ('nowhere.py:Net', 'x.npy', '', 'there is no script nowhere.py'),
    ('nowhere:Net', 'x.npy', '', "No module named 'nowhere'"),
    ('nets:Nett', 'x.npy', '', "'Nett' is not defined; did you mean Net?"),
    ('nets:zzz', 'x.npy', '', '; its links are Net(n_out=3, n_un'),
    ('nets:Net(', 'x.npy', '', 'SyntaxError'),
    ('nets:Net(n_uints=3)', 'x.npy', '', '; its links are Net(n_out='),
    ('nets:number()', 'x.npy', '', 'this is a int, and no Chain or other'),
    ('trains.py:Net', 'x.npy', '', 'trains.py, line 5: trainer.run(): '),
    ('trains.py:Net', 'x.npy', '', 'belongs under "if __name__ == '),
    ('exits.py:Net', 'x.npy', '', 'SystemExit: 3; what it is to do when'),
    ('broken.py:Net', 'x.npy', '', 'broken.py, line 1: 1 / 0: ZeroDivision'),
    ('nets:Net(4)', 'x.npy', '', 'l2/b has (3,) in the file, (4,) in'),
    ('nets:Old', 'x.npy', '', 'the model has no l2/W, l2/b'),
    ('nets:Unused', 'x.npy', '', 'there are no rest/W, rest/b, and the'),
    ('nets:Net', 'x.npy', '--path updater', 'nothing below updater/'),
    ('nets:Net', 'nothing.npy', '', 'nothing.npy cannot be read: No such'),
    ('nets:Net', 'text.npy', '', 'text.npy cannot be read'),
    ('nets:Net', 'pickled.npy', '',
     'pickled.npy cannot be read: it is no .npy or .npz of numbers'),
    ('nets:Net', 'two.npz', '', 'has arr_0, arr_1, and forward takes (x)'),
    ('nets:Net', 'named.npz', '', 'has x, y, and forward takes (x)'),
    ('nets:Two', 'x.npy', '', "(x, other): missing a required arg"),
    ('nets:Net', 'wide.npy', '', 'nets.py, line 11: return self.l2(F.dropout('
     'F.relu(self.l1(x)))): InvalidType: '),
    ('nets:Net', 'wide.npy', '', '(x: float32 (2, 9))'),
    ('nets:NoVariable', 'x.npy', '', 'no Variable as output, but ndarray'),
    ('nets:Nothing', 'x.npy', '', 'have no value in the file: /rest/W'),
    ('nets:Net', 'x.npy', '--opset 6', '--opset: invalid choice'),
    ('nets:Net', 'x.npy', '--tolerance 2', '--tolerance: 2.0 is no part of 1'),
    ('nets:Net', 'x.npy', '-o nowhere/out.onnx', 'there is no folder nowhere'),
    ('nets:Net', 'x.npy', '--exmaple x', 'did you mean --example?'),
]


@pytest.fixture
def wrong(folder):
    head = 'import chainer\nfrom nets import Net\n'
    (folder / 'trains.py').write_text(head + """
trainer = chainer.training.Trainer.__new__(chainer.training.Trainer)
trainer.run()
""")
    (folder / 'exits.py').write_text('raise SystemExit(3)')
    (folder / 'broken.py').write_text('1 / 0')
    (folder / 'text.npy').write_text('no array')
    numpy.save('pickled.npy', numpy.array([None]))
    numpy.savez('two.npz', BATCH, BATCH)
    numpy.savez('named.npz', x=BATCH, y=BATCH)
    numpy.save('wide.npy', numpy.ones((2, 9), 'f'))


@pytest.mark.parametrize(
    'line', WRONG, ids=[f'{one[0]} {one[3][:20]}' for one in WRONG])
def test_what_is_wrong_is_named(wrong, command, folder, line):
    model_class, example, options, expected = line
    trained('nets:' + {'nets:Nothing': 'Unused', 'nets:NoVariable': 'Old'
                       }.get(model_class, 'Net'), BATCH)
    code, said = command('model.npz', model_class, example, *options.split())
    assert code == 2
    assert expected in said
    assert said.endswith('--help)\n')
    assert not list(folder.glob('out.onnx*'))


@pytest.mark.parametrize(('file', 'expected'), [
    ('x.npy', 'x.npy is one array, and no file of save_npz'),
    ('nets.py', 'nets.py cannot be read: '),
    ('damaged.npz', 'damaged.npz'),
])
def test_a_wrong_file_is_named(command, folder, file, expected):
    trained('nets:Old', BATCH)
    bytes_ = bytearray((folder / 'model.npz').read_bytes())
    bytes_[80] ^= 255
    (folder / 'damaged.npz').write_bytes(bytes_)
    code, said = command(file, 'nets:Old')
    assert code == 2
    assert expected in said


def test_functions_without_a_counterpart_are_named_with_their_lines(
        command, folder):
    trained('nets:Recurrent', BATCH)
    code, said = command('model.npz', 'nets.py:Recurrent', 'x.npy',
                         '--opset', '7')
    assert code == 1
    assert 'h = self.lstm(x): LSTM\n' in said
    assert ': LayerNormalization\n' in said
    assert ': Cosh: RuntimeError: ONNX-Chainer cannot convert' in said
    assert not list(folder.glob('*.onnx*'))


def test_links_as_the_documentation_writes_them_take_the_old_file(
        command, folder):
    page = (ROOT / 'docs/export.rst').read_text()
    code = page[page.index('   import chainer.functions as F'):
                page.index('Limits:')]
    (folder / 'rewritten.py').write_text(textwrap.dedent(code) + """
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
                         'words.npy', '--any-batch')
    assert code == 0, said
    numpy.testing.assert_allclose(
        computed(words)['output'], model(words).array, atol=1e-5)


@pytest.mark.parametrize('name', ['Constant', 'Centred', 'Largest', 'Norm'])
def test_a_constant_of_the_example_is_no_proof(command, folder, name):
    (folder / 'out.onnx').write_bytes(b'of an earlier run')
    trained(f'nets:{name}', BATCH)
    code, said = command('model.npz', f'nets:{name}', 'x.npy')
    assert code == 1
    assert 'output differs with values drawn anew' in said
    assert 'It is right for the example only' in said
    assert (folder / 'out.onnx.unproven').is_file()


@pytest.mark.parametrize(('wrong_by', 'tolerance', 'is_proof'), [
    (0, 0, True), (1e-3, 0, False), (1e-3, .01, True), (.1, .01, False),
    (.1, .5, True), (numpy.nan, .5, False)])
def test_the_tolerance_is_a_part_of_the_largest_value(
        folder, capsys, wrong_by, tolerance, is_proof):
    x = {'x': numpy.arange(1, 5, dtype='f')}
    graph = export.convert(chainer.Sequential(chainer.functions.relu), x)
    case = export._Case('the example', x, {
        'output': x['x'] + numpy.float32(4 * wrong_by)})
    assert export.prove(graph, [case], tolerance) is is_proof
    assert ('Not proven: output differs' in capsys.readouterr().out
            ) is not is_proof


def test_an_example_that_works_alone_is_said_to(command):
    trained('nets:Picky', BATCH)
    code, said = command('model.npz', 'nets:Picky')
    assert code == 0
    assert 'too small; so the proof is for the example only' in said


def test_a_file_that_cannot_be_written_leaves_nothing(command, folder):
    (folder / 'out.onnx').mkdir()
    trained('nets:Old', BATCH)
    code, said = command('model.npz', 'nets:Old')
    assert code == 2
    assert '-o: out.onnx cannot be written: ' in said
    assert not list(folder.glob('*.partial'))


def test_the_command_starts_as_no_rank(folder):
    """And does not run the script."""
    trained('nets:Net', BATCH)
    done = run_script(
        0, '-X', 'importtime', '-m', 'chainer_fp8pipe', 'export', 'model.npz',
        '--class', 'nets.py:Net()', '--example', 'x.npy', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert 'model.onnx: ' in done.stdout
    assert 'mpi4py' not in done.stderr
    assert (folder / 'model.onnx').is_file()
