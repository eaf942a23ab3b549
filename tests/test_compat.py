"""Chainer imports and works on whatever stack these tests run on.

Where the order of imports matters the test runs a fresh interpreter.
"""
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import types
import warnings
from importlib import metadata
from pathlib import Path

import chainer
import pytest

from tests.ranks import environment, on_ranks, run_script

SITE = Path(chainer.__file__).parent.parent

# What a user does that needs the edits of that module.
USES = {
    'chainer.functions.array.as_strided': '''
        import chainer.functions as F, numpy
        x = chainer.Variable(numpy.arange(4, dtype='f'))
        y = F.as_strided(x, (3, 2), (1, 1), 0)
        y.grad = numpy.ones((3, 2), 'f')
        y.backward()
        assert x.grad.tolist() == [1, 2, 2, 1]
        ''',
    'chainer.functions.array.resize_images': '''
        import numpy
        x = chainer.Variable(numpy.arange(16, dtype='f').reshape(1, 1, 4, 4))
        y = chainer.functions.resize_images(x, (2, 2))
        assert y.array.ravel().tolist() == [0, 3, 12, 15]
        y.grad = numpy.ones((1, 1, 2, 2), 'f')
        y.backward()
        assert x.grad.sum() == 4
        ''',
    'chainer.distributions.categorical': '''
        import numpy
        p = numpy.array([[.25, .75], [.5, .5]], 'f')
        found = chainer.distributions.Categorical(p=p).log_prob(
            numpy.array([1, 0]))
        assert abs(found.array - numpy.log([.75, .5])).max() < 1e-6
        ''',
    'chainer.functions.array.pad_sequence': '''
        import numpy
        y = chainer.functions.pad_sequence(
            [numpy.ones(2, 'u1'), numpy.ones(1, 'u1')], padding=-1)
        assert y.array.tolist() == [[1, 1], [1, 255]]
        ''',
    'chainer.functions.connection.deconvolution_2d': '''
        import numpy
        x = numpy.arange(8, dtype='f').reshape(2, 1, 2, 2)
        layer = chainer.links.Deconvolution2D(1, 1, 2, stride=2)
        layer.cleargrads()
        chainer.functions.sum(layer(x)).backward()
        assert (layer.W.grad == x.sum()).all()
        ''',
    'chainer.functions.math.erfinv': '''
        import numpy
        from scipy import io, special
        from chainer.datasets import svhn
        half, eye = numpy.full(1, .5, 'f'), numpy.eye(2, dtype='f')
        for name in 'erfcinv', 'erfcx', 'erfinv', 'ndtri':
            found = getattr(chainer.functions, name)(half).array
            assert found == getattr(special, name)(half), name
        normal = chainer.distributions.MultivariateNormal(
            loc=numpy.zeros(2, 'f'), scale_tril=eye)
        density = normal.log_prob(eye[0]).array
        assert abs(density + numpy.log(2 * numpy.pi) + .5) < 1e-6
        assert svhn.io.loadmat is io.loadmat
        ''',
    'chainer.functions.math.sparse_matmul': '''
        import numpy
        dense = numpy.array([[1, 0], [0, .5]], 'e')
        y = chainer.functions.sparse_matmul(
            chainer.utils.to_coo(dense), numpy.array([[2, 4], [8, 16]], 'e'))
        assert y.dtype == 'e' and y.array.tolist() == [[2, 4], [4, 8]]
        ''',
    'chainer.links.caffe.protobuf3.caffe_pb2': '''
        from chainer.links.caffe.protobuf3 import caffe_pb2
        net = caffe_pb2.NetParameter(name='a')
        net.layer.add(type='Convolution').convolution_param.pad.append(2)
        same = caffe_pb2.NetParameter.FromString(net.SerializeToString())
        assert same == net and same.layer[0].convolution_param.pad == [2]
        assert caffe_pb2.TRAIN == 0 and caffe_pb2.TEST == 1
        import chainer.exporters.caffe, chainer.links.caffe
        ''',
    'onnx_chainer.export': '''
        import numpy, onnx_chainer, warnings
        warnings.simplefilter('ignore')
        layer = chainer.links.Linear(3, 2)
        model = onnx_chainer.export(layer, numpy.ones((1, 3), 'f'))
        assert [node.op_type for node in model.graph.node] == ['Gemm']
        from onnx import numpy_helper
        arrays = [numpy_helper.to_array(a) for a in model.graph.initializer]
        assert any((a == layer.W.array).all() for a in arrays)
        ''',
    'chainer.serializers.hdf5': '''
        import h5py, numpy
        with h5py.File('in memory', 'w', driver='core',
                       backing_store=False) as file:
            saved = {'text': 'K\\xe4se', 'texts': ['a', 'b'], 'bytes': b'c',
                     'number': 3}
            for name, value in saved.items():
                file[name] = value
            load = chainer.serializers.HDF5Deserializer(file)
            assert load('text', '') == str(load('text', None)) == 'K\\xe4se'
            assert load('texts', None).tolist() == ['a', 'b']
            assert load('bytes', None).item() == b'c'
            assert load('number', 0) == 3
        ''',
    'chainer.testing.helper': '''
        import chainer.testing, unittest
        assert chainer.testing.with_requires('numpy>=1')(str) is str
        @chainer.testing.with_requires('numpy<1')
        class Skipped(unittest.TestCase):
            pass
        @chainer.testing.with_requires('no_such_distribution')
        class AlsoSkipped(unittest.TestCase):
            pass
        assert Skipped.__unittest_skip__ and AlsoSkipped.__unittest_skip__
        ''',
    'chainer.function_node': '''
        import numpy
        rows = numpy.arange(6, dtype='f').reshape(2, 3)
        for given in rows, chainer.Variable(rows):
            assert chainer.functions.concat(given, axis=0).shape == (6,)
        ''',
    'chainer.backends.cuda': '''
        from chainer import cuda
        try:
            cuda.cupy.zeros(3)
        except AttributeError as error:
            assert 'needs CuPy' in str(error) and 'numpy.zeros' in str(error)
        else:
            assert cuda.available
        assert cuda.get_device(-1) is cuda.DummyDevice
        device = chainer.get_device(-1)
        assert device < 0 and not device >= 0
        ''',
    'chainer.utils.type_check': '''
        import numpy
        one = chainer.Variable(numpy.ones(3, 'f'))
        try:
            chainer.functions.minimum(one, numpy.ones(3, 'd'))
        except chainer.utils.type_check.InvalidType as error:
            assert 'take its int() or float()' in str(error)
        ''',
    'chainer.iterators.multiprocess_iterator': '''
        class Data(list):
            def __getitem__(self, number):
                raise RuntimeError('of the data')
        batches = chainer.iterators.MultiprocessIterator(
            Data([1]), 1, n_processes=1)
        try:
            next(batches)
        except RuntimeError as error:
            assert 'of the data' in str(error)
        ''',
    'chainer.iterators.serial_iterator': '''
        batches = chainer.iterators.SerialIterator([1, 2, 3], 2, False, False)
        for _ in range(2):
            assert list(batches) == [[1, 2], [3]] and batches.epoch == 1
            batches.epoch = batches.current_position = 0
            batches.is_new_epoch = False
        ''',
    'chainer.functions.math.fix': '''
        import numpy
        warnings = __import__('warnings')
        warnings.simplefilter('error')
        assert chainer.functions.fix(numpy.full(1, -1.5, 'f')).array == -1
        ''',
    'chainermn.communicators._memory_utility': '''
        import numpy
        from chainermn.communicators import _memory_utility
        class Buffer:
            def to_device(self, array, size, offset, stream):
                assert array.dtype == 'e' and size == array.nbytes
                array[...] = offset
        params = [chainer.Parameter(numpy.zeros(n, 'f')) for n in (2, 1, 3)]
        params[0].grad, params[1].grad = params[0].array, params[1].array
        _memory_utility.unpack_params(params, 'grad', Buffer(), 'e', True)
        assert [p.grad.tolist() for p in params] == [[0, 0], [4], [6, 6, 6]]
        assert {p.grad.dtype.char for p in params} == {'f'}
        ''',
    'chainermn.extensions.observation_aggregator': '''
        import chainermn, numpy, types
        comm, seen = chainermn.create_communicator('naive'), []
        average = chainermn.extensions.ObservationAggregator(
            comm, 'loss', comm_trigger=lambda trainer: len(seen) == 2)
        for number in 1, 3:
            seen.append(chainer.Variable(numpy.array(number, 'f')))
            trainer = types.SimpleNamespace(observation={'loss': seen[-1]})
            average(trainer)
        assert trainer.observation['loss'].array == 2
        ''',
    'chainermn.links.batch_normalization': '''
        import chainermn, copy, warnings
        warnings.simplefilter('ignore', FutureWarning)  # "experimental"
        comm = chainermn.create_communicator('naive')
        link = chainermn.links.MultiNodeBatchNormalization(2, comm)
        copied = copy.deepcopy(link)
        assert copied.comm is link.comm and copied.gamma is not link.gamma
        assert (copied.gamma.array == link.gamma.array).all()
        ''',
    'chainermn.iterators.multi_node_iterator': '''
        import chainermn, numpy, warnings
        warnings.simplefilter('ignore', FutureWarning)  # "experimental"
        comm = chainermn.create_communicator('naive')
        data = list(numpy.arange(6, dtype='f'))
        serial = chainer.iterators.SerialIterator(
            data, 2, repeat=False, shuffle=False)
        batches = chainermn.iterators.create_multi_node_iterator(serial, comm)
        assert [list(b) for b in batches] == [[0, 1], [2, 3], [4, 5]]
        ''',
}


def python(script, options=(), **variables):
    """Runs a script in a fresh interpreter."""
    return run_script(0, *options, '-c', textwrap.dedent(script),
                      env={**environment(), **variables})


def used(*modules):
    """A script that uses what is patched in modules."""
    return ''.join(textwrap.dedent(USES[module]) for module in modules)


def passes(run):
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- imports -----------------------------------------------------------------

def test_imports_load_nothing_that_few_use_and_leave_numpy_as_it_was():
    run = python("""
        import sys, numpy
        before = dict(vars(numpy))
        import chainer_fp8pipe
        assert not {'chainer', 'chainermn', 'mpi4py', 'cupy'} & {*sys.modules}
        import chainer, chainermn
        assert not {'scipy', 'h5py', 'filelock', 'numpy.distutils',
                    'pkg_resources', 'packaging', 'matplotlib'} & {
                        *sys.modules}
        added = set(vars(numpy)) - set(before)
        assert not added & {'float', 'sctypes'}, added
        import chainer.gradient_check, chainer.testing
        """, options=('-W', 'error'))
    assert (passes(run), run.stderr) == ('', '')


# --- edits -------------------------------------------------------------------

RANKS = 'chainermn.iterators.multi_node_iterator'


@pytest.mark.parametrize('module', [
    module for module in USES if module != RANKS])
def test_chainer_works(module):
    if module.startswith('onnx_chainer'):
        pytest.importorskip('onnx')
    exec('import chainer\n' + used(module), {})


@on_ranks(2)
def test_a_multi_node_iterator_works(comm):
    with warnings.catch_warnings():     # ranks go on to other tests
        exec('import chainer\n' + used(RANKS), {})


def test_chainer_says_what_it_is():
    from packaging.requirements import Requirement
    for wanted in 'chainer==7.8.1', 'chainer>=6', 'chainer~=7.0':
        assert Requirement(wanted).specifier.contains(
            metadata.version('chainer'))


@pytest.mark.parametrize('version', ['7.8.1', '7.8.1+today.e0'])
def test_a_chainer_without_these_edits_is_told_so(version, tmp_path):
    info = tmp_path / f'chainer-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(
        f'Metadata-Version: 2.1\nName: chainer\nVersion: {version}\n')
    run = python('import chainer_fp8pipe', PYTHONPATH=os.pathsep.join(
        [str(tmp_path), os.getcwd()]))
    assert f'UserWarning: Chainer {version} is installed w' in run.stderr
    assert 'python -m chainer_fp8pipe install-chainer' in run.stderr


def test_chainer_and_its_testing_work_without_setuptools():
    passes(python(
        "import sys; sys.modules['pkg_resources'] = None\nimport chainer\n"
        + used('chainer.testing.helper')
        + "assert sys.modules['pkg_resources'] is None"))


# --- CuPy, as far as it can be seen without a GPU ----------------------------

def test_only_kernels_with_half_get_its_header_and_from_cupy_14(monkeypatch):
    from chainer.backends import cuda
    monkeypatch.setattr(cuda, 'check_cuda_available', lambda: None)
    monkeypatch.setattr(cuda, 'cupy', types.SimpleNamespace(
        RawKernel=lambda code, name: code,
        ElementwiseKernel=lambda i, o, operation, name, **more: more))
    header = '#include <cupy/float16.cuh>\n'
    raw, elementwise = (getattr(f, '__wrapped__', f) for f in (
        cuda.raw, cuda.elementwise))
    for major, included in (13, ''), (14, header):
        monkeypatch.setattr(cuda, '_cupy_major', major)
        assert raw('half x;', 'k') == included + 'half x;'
        assert raw('float x;', 'k') == 'float x;'
        assert elementwise('', '', 'float16 x;', 'k', preamble='p').get(
            'preamble') == included + 'p'
        assert elementwise('', '', 'float x;', 'k') == {}


# --- Chainer at work ---------------------------------------------------------

def run_group(place, text):
    """Runs a script with all its child processes in a group of their own."""
    script = place / 'script.py'
    script.write_text(textwrap.dedent(text))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, 'PYTHONPATH': os.getcwd()})
    try:
        process.wait(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    return subprocess.CompletedProcess(script, process.returncode, out, err)


def test_a_multiprocess_iterator_works_without_forking(tmp_path):
    run = run_group(tmp_path, """
        import multiprocessing
        import chainer

        if __name__ == '__main__':
            multiprocessing.set_start_method('forkserver')
            batches = chainer.iterators.MultiprocessIterator(
                [1, 2, 3, 4], 2, repeat=False, shuffle=False, n_processes=2)
            print(list(batches))
            batches.finalize()
        """)
    assert (passes(run), run.stderr) == ('[[1, 2], [3, 4]]\n', '')


def test_a_multiprocess_iterator_forks_on_linux_where_nothing_is_chosen(
        tmp_path):
    # As before Python 3.14: a script without a guard, data without a pickle.
    run = run_group(tmp_path, """
        import sys
        import chainer
        if sys.platform != 'linux':
            sys.exit()
        data = chainer.datasets.TransformDataset([1, 2, 3, 4], lambda x: -x)
        batches = chainer.iterators.MultiprocessIterator(
            data, 2, repeat=False, shuffle=False, n_processes=2)
        assert list(batches) == [[-1, -2], [-3, -4]]
        batches.finalize()
        """)
    assert (passes(run), run.stderr) == ('', '')


@pytest.mark.parametrize('name', ['Multiprocess', 'Multithread'])
def test_an_iterator_that_nobody_finalizes_ends_with_python(name, tmp_path):
    run = run_group(tmp_path, f"""
        import faulthandler
        import chainer, numpy

        if __name__ == '__main__':
            batches = chainer.iterators.{name}Iterator([
                (numpy.ones(2, 'f'), numpy.int32(0)) for _ in range(9)], 2, 2)
            model = chainer.links.Classifier(chainer.links.Linear(2, 3))
            optimizer = chainer.optimizers.SGD().setup(model)
            trainer = chainer.training.Trainer(
                chainer.training.StandardUpdater(batches, optimizer))
            trainer.updater.update()
            print('updated')
            faulthandler.dump_traceback_later(100, exit=True)
        """)
    assert (passes(run), run.stderr) == ('updated\n', '')
