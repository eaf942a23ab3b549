"""Chainer imports and works on whatever stack these tests run on.

Where the order of imports matters the test runs a fresh interpreter.
"""
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import types
import zipfile

from chainer_fp8pipe import compat
from chainer_fp8pipe.compat import _hook, _patches

import numpy
import pytest

from tests.ranks import run_script

NO_PKG_RESOURCES = "import sys; sys.modules['pkg_resources'] = None\n"

# What a user does that needs the patch of that module.
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
    'chainer.variable': '''
        import numpy
        said = chainer.Variable(numpy.ones(2, 'f')).debug_print()
        assert '- device: CPU' in said
        ''',
    'chainer.functions.connection.deconvolution_2d': '''
        import numpy
        x = numpy.arange(8, dtype='f').reshape(2, 1, 2, 2)
        layer = chainer.links.Deconvolution2D(1, 1, 2, stride=2)
        layer.cleargrads()
        chainer.functions.sum(layer(x)).backward()
        assert (layer.W.grad == x.sum()).all()
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
    'chainer.testing.doctest_helper': '''
        from chainer.testing import doctest_helper
        assert doctest_helper.skipif_requires_satisfied('numpy>=1')
        assert not doctest_helper.skipif_requires_satisfied('numpy<1')
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


def python(script, *options, ranks=0, **environment):
    """Runs a script in a fresh interpreter, or in one per rank."""
    if ranks:
        options += '-m', 'mpi4py'  # a rank that fails aborts the others
    return run_script(ranks, *options, '-c', textwrap.dedent(script),
                      env={**os.environ, **environment})


def used(*modules):
    """A script that uses what is patched in modules."""
    return ''.join(textwrap.dedent(USES[module]) for module in modules)


def passes(run):
    assert run.returncode == 0, run.stderr
    return run.stdout


def beside(folder):
    """For :func:`python`: with what is in a folder, too."""
    return {'PYTHONPATH': os.pathsep.join([str(folder), os.getcwd()])}


# --- imports -----------------------------------------------------------------

def test_imports_print_nothing_even_when_first_compiled(tmp_path):
    run = python('import chainer_fp8pipe, chainer, chainermn, chainer.testing',
                 '-X', f'pycache_prefix={tmp_path}')
    assert (passes(run), run.stderr) == ('', '')


@pytest.mark.parametrize('modules', [
    'chainermn', 'chainer.testing, chainermn', 'chainer.gradient_check'])
def test_any_module_of_chainer_may_come_first(modules):
    run = python('import chainer_fp8pipe, ' + modules)
    assert (passes(run), run.stderr) == ('', '')


def test_imports_load_nothing_that_few_use_and_leave_numpy_as_it_was():
    passes(python("""
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
        """, '-W', 'error'))


@pytest.mark.parametrize(('script', 'said'), [
    ('import chainer_fp8pipe; chainer_fp8pipe.no_such_name',
     'AttributeError: .*no_such_name'),
    # The package's own finder is alone.
    ("""
     import importlib.util, sys, chainer_fp8pipe
     sys.meta_path[1:] = []
     assert importlib.util.find_spec('chainer') is None
     import chainer
     """, 'ModuleNotFoundError: .*install-chainer'),
    ("""
     import importlib, sys, chainer_fp8pipe, chainer
     sys.modules['h5py'] = None
     del sys.modules['chainer.serializers.hdf5']
     hdf5 = importlib.import_module('chainer.serializers.hdf5')
     hdf5.load_hdf5('nowhere', None)
     """, 'RuntimeError: .*h5py is not installed'),
    ("""
     import sys, chainer_fp8pipe, numpy
     sys.modules['scipy'] = None
     import chainer
     chainer.functions.erfinv(numpy.zeros(1, 'f'))
     """, 'ImportError: .*SciPy is not available'),
])
def test_what_is_missing_is_named(script, said):
    run = python(script)
    assert run.returncode == 1
    assert re.search(f'(?s){said}', run.stderr)


# The least with which Chainer itself can be imported before the package.
SHIMS = """
import sys, types, warnings, numpy
warnings.simplefilter('ignore')
# Where the package is installed, Chainer would not come without it.
sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(
    finder, '__module__', '') != 'chainer_fp8pipe_startup']
if not hasattr(numpy, 'sctypes'):
    numpy.sctypes = {'int': [numpy.int32], 'float': [numpy.float32]}
check = types.ModuleType('chainer._environment_check')
check.check = lambda: None
sys.modules[check.__name__] = check
"""


def test_chainer_may_be_imported_first():
    modules = ('chainer.functions.array.as_strided',
               'chainer.functions.array.resize_images',
               'chainer.distributions.categorical',
               'chainer.serializers.hdf5',
               'chainermn.communicators._memory_utility')
    passes(python(
        SHIMS + f'import chainer, chainermn, {", ".join(modules)}\n'
        "vars(numpy).pop('sctypes')\n"
        'import chainer_fp8pipe\n' + used(*modules)))


@pytest.mark.parametrize('first', [
    'chainer', 'chainermn', 'chainer.links', 'onnx_chainer'])
def test_chainer_comes_with_the_package_where_that_is_installed(first):
    # As the .pth file of an installation has it.
    passes(python('import chainer_fp8pipe_startup, sys\n'
                  f'import {first}\n'
                  "assert 'chainer_fp8pipe.compat' in sys.modules\n"
                  'import chainer; chainer.functions.as_strided'))


@pytest.mark.parametrize('gone', ['chainer_fp8pipe', 'numpy'])
def test_a_build_without_what_is_installed_is_left_alone(gone):
    # pip builds Chainer with the interpreter, .pth files included, of which
    # it hides what is installed; Chainer's setup.py imports a module that is
    # named after it.
    run = python(f"""
        import chainer_fp8pipe_startup, importlib.machinery, sys
        find = importlib.machinery.PathFinder.find_spec
        sys.meta_path[:] = [f for f in sys.meta_path if f.__module__ in (
            'chainer_fp8pipe_startup', '_frozen_importlib_external')]
        importlib.machinery.PathFinder.find_spec = (
            lambda name, *rest: None if name == {gone!r}
            else find(name, *rest))
        import chainerx_build_helper
    """)
    assert ("ModuleNotFoundError: No module named 'chainerx_build_helper'"
            in run.stderr)


def test_ranks_may_import_chainermn_first():
    passes(python(
        SHIMS + 'import chainer, chainermn, chainer_fp8pipe\n'
        + used('chainermn.iterators.multi_node_iterator'),
        ranks=2))


# --- patches -----------------------------------------------------------------

@pytest.mark.parametrize('module', USES)
def test_a_patch_is_applied_where_chainer_fails_without_it(module):
    if module.startswith('onnx_chainer'):
        pytest.importorskip('onnx')
    ranks = 2 if 'iterator' in module else 0
    use = 'import chainer\n' + used(module)
    without = python(
        'from chainer_fp8pipe.compat import _patches\n'
        f'del _patches.PATCHES[{module!r}]\n' + use, ranks=ranks)
    if ranks:
        passes(python('import chainer_fp8pipe\n' + use, ranks=ranks))
        importlib.import_module(module)
    else:
        exec(use, {})
    fails = without.returncode != 0
    assert (module in compat.applied()) == fails, without.stderr


def test_chainer_and_its_testing_work_without_setuptools():
    passes(python(
        NO_PKG_RESOURCES + 'import chainer_fp8pipe, chainer\n'
        + used('chainer.testing.helper', 'chainer.testing.doctest_helper')
        + "assert sys.modules['pkg_resources'] is None"))


def test_the_report_names_versions_causes_and_states():
    report = passes(python("""
        import chainer_fp8pipe, chainer
        print(chainer_fp8pipe.compat.report())
        """))
    assert f'numpy {numpy.__version__}' in report
    assert 'as_strided:10,252: ' in report
    assert 'multi_node_iterator:137: not imported' in report


# --- modules that are imported late ------------------------------------------

def test_what_chainer_has_of_scipy_works_when_it_is_used():
    passes(python("""
        import chainer_fp8pipe, chainer, numpy
        import chainer.functions as F
        from chainer.datasets import svhn
        half, eye = numpy.full(1, .5, 'f'), numpy.eye(2, dtype='f')
        matrix = chainer.utils.to_coo(eye[::-1].copy())
        normal = chainer.distributions.MultivariateNormal(
            loc=numpy.zeros(2, 'f'), scale_tril=eye)
        found = [f(half).array for f in (
            F.erfcinv, F.erfcx, F.erfinv, F.ndtri)]
        product = F.sparse_matmul(matrix, eye).array
        density = normal.log_prob(eye[0]).array
        load = svhn.io.loadmat
        from scipy import io, special
        for value, name in zip(
                found, ('erfcinv', 'erfcx', 'erfinv', 'ndtri'), strict=True):
            assert value == getattr(special, name)(half), name
        assert (product == eye[::-1]).all()
        assert abs(density + numpy.log(2 * numpy.pi) + .5) < 1e-6
        assert load is io.loadmat
        """))


def distribution(folder, name, version):
    """Makes one to be found as if it was installed."""
    info = folder / f'{name}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(
        f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')


def test_another_chainer_gives_a_warning(tmp_path):
    distribution(tmp_path, 'chainer', '7.9.0')
    run = python('import chainer_fp8pipe', **beside(tmp_path))
    assert 'CompatWarning: Chainer 7.9.0 is installed' in run.stderr


def test_an_old_ideep_is_told_of_as_chainer_does(tmp_path):
    if not _patches._imports('numpy.distutils.system_info', 'pkg_resources'):
        pytest.skip("what Chainer's check imports is gone")
    (tmp_path / 'ideep4py.py').write_text('raise ImportError')
    distribution(tmp_path, 'ideep4py', '1.0')
    run = python('import chainer_fp8pipe, chainer', **beside(tmp_path))
    passes(run)
    assert 'iDeep (ideep4py) version 1.0 may not be' in run.stderr


# --- CuPy, as far as it can be seen without a GPU ----------------------------

@pytest.mark.parametrize('moved', [False, True])
def test_kernels_are_patched_where_cupy_moved_half(moved, tmp_path):
    headers = tmp_path / 'cupy/_core/include/cupy'
    headers.mkdir(parents=True)
    (tmp_path / 'cupy/__init__.py').write_text('raise ImportError')
    (headers / 'carray.cuh').write_text('class float16;')
    if moved:
        (headers / 'float16.cuh').write_text('class float16 {};')
    printed = passes(python("""
        import chainer_fp8pipe, chainer
        print('chainer.backends.cuda' in chainer_fp8pipe.compat.applied())
        """, **beside(tmp_path)))
    assert printed.split() == [str(moved)]


def test_only_kernels_with_half_get_its_header():
    module = types.ModuleType('cuda')
    vars(module).update(
        raw=lambda code, name: code,
        elementwise=lambda i, o, operation, name, **more: more,
        check_cuda_available=lambda: None)
    _patches.PATCHES['chainer.backends.cuda'].apply(module, lambda: None)
    header = '#include <cupy/float16.cuh>\n'
    assert module.raw('half x;', 'k') == header + 'half x;'
    assert module.raw('float x;', 'k') == 'float x;'
    assert module.elementwise('', '', 'float16 x;', 'k', preamble='p') == {
        'preamble': header + 'p'}
    assert module.elementwise('', '', 'float x;', 'k') == {}


def test_a_cupy_that_is_missing_or_fails_is_told_of(monkeypatch, tmp_path):
    (tmp_path / 'cupy.py').write_text(
        "raise ImportError('libcublas.so.13: cannot open')")
    run = python('import chainer_fp8pipe.compat as c; c.require_gpu()',
                 **beside(tmp_path))
    assert 'RuntimeError: No GPU can be used' in run.stderr
    assert 'libcublas.so.13: cannot open' in run.stderr.splitlines()[-1]
    monkeypatch.setitem(sys.modules, 'cupy', None)
    with pytest.raises(RuntimeError, match='chainer_fp8pipe.cuda13'):
        compat.require_gpu()


@pytest.mark.parametrize(('count', 'reason'), [
    (lambda: 0, 'has no GPU'), (lambda: 1 / 0, 'division by zero'),
    (lambda: 2, None)])
def test_a_machine_without_a_device_is_told_so(count, reason, monkeypatch):
    from chainer.backends import cuda
    runtime = types.SimpleNamespace(
        getDeviceCount=count, CUDARuntimeError=ZeroDivisionError)
    monkeypatch.setattr(cuda, 'available', True)
    monkeypatch.setattr(cuda, 'cupy', types.SimpleNamespace(
        cuda=types.SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
    found = compat.explain_no_gpu()
    assert found is None if reason is None else reason in found


# --- the import hook ---------------------------------------------------------

@pytest.fixture
def hooked(monkeypatch, tmp_path):
    """A patch for the module `hooked_module`, which lies in tmp_path."""
    monkeypatch.setattr(sys, 'meta_path', sys.meta_path[:])
    monkeypatch.delitem(sys.modules, 'hooked_module', raising=False)
    (tmp_path / 'hooked_module.py').write_text('value = 1')

    def apply(module, run):
        run()
        module.value += 1

    patch = _hook.ImportPatch(
        'hooked_module', '1', 'it is one too few', 'value = 1',
        lambda: True, apply)
    _hook.install({patch.module: patch})
    yield patch
    sys.modules.pop('hooked_module', None)


def on_the_path(folder, patch):
    patch.syspath_prepend(folder)


def zipped(folder, patch):
    with zipfile.ZipFile(folder / 'archive.zip', 'w') as file:
        file.writestr('hooked_module.py', 'value = 1')
    patch.syspath_prepend(folder / 'archive.zip')


def editable(folder, patch):
    class EditableFinder:  # as setuptools writes it: not on sys.path
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name == 'hooked_module':
                return importlib.util.spec_from_file_location(
                    name, folder / 'hooked_module.py')
            return None
    sys.meta_path.append(EditableFinder)


def asked_again(folder, patch):
    class AskingFinder:
        asking = False

        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name != 'hooked_module' or cls.asking:
                return None
            cls.asking = True
            return importlib.util.find_spec(name)
    sys.meta_path.insert(1, AskingFinder)
    patch.syspath_prepend(folder)


@pytest.mark.parametrize('how', [on_the_path, zipped, editable, asked_again])
def test_a_module_is_patched_once_however_it_is_found(
        hooked, monkeypatch, tmp_path, how):
    how(tmp_path, monkeypatch)
    import hooked_module
    assert (hooked_module.value, hooked.state) == (2, 'applied')


def test_a_changed_module_is_left_alone_with_a_warning(
        hooked, monkeypatch, tmp_path):
    (tmp_path / 'hooked_module.py').write_text('value = 10')
    hooked.expects = 'value = 1;'
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(compat.CompatWarning, match='one too few'):
        import hooked_module
    assert hooked_module.value == 10
    assert hooked.state.startswith('not applied')


def test_a_failing_import_raises_its_own_error_and_can_be_repeated():
    passes(python("""
        import sys, chainer_fp8pipe, chainermn
        sys.modules['mpi4py'] = None
        for _ in range(2):
            try:
                import chainermn.communicators._memory_utility
            except ImportError as error:
                assert 'mpi4py' in str(error), error
            else:
                raise AssertionError
        del sys.modules['mpi4py']
        """ + USES['chainermn.communicators._memory_utility'].replace(
            'import numpy', 'import numpy, chainer')))


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


@pytest.mark.parametrize('method', ['fork', 'forkserver', 'spawn'])
def test_a_multiprocess_iterator_works(method, tmp_path):
    run = run_group(tmp_path, f"""
        import multiprocessing
        import chainer_fp8pipe
        import chainer, numpy

        if __name__ == '__main__':
            multiprocessing.set_start_method({method!r})
            data = chainer.datasets.TupleDataset(
                numpy.arange(8, dtype='f').reshape(4, 2), numpy.arange(4))
            batches = chainer.iterators.MultiprocessIterator(
                data, 2, repeat=False, shuffle=False, n_processes=2)
            print([int(label) for batch in batches for _, label in batch])
            batches.finalize()
        """)
    assert (passes(run), run.stderr) == ('[0, 1, 2, 3]\n', '')


def test_a_multiprocess_iterator_forks_on_linux_where_nothing_is_chosen(
        tmp_path):
    # As before Python 3.14: a script without a guard, data without a pickle.
    run = run_group(tmp_path, """
        import sys
        import chainer_fp8pipe
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


@pytest.mark.parametrize(('name', 'patched'), [
    ('Multiprocess', True), ('Multithread', True),
    pytest.param('Multiprocess', False, marks=pytest.mark.skipif(
        sys.version_info < (3, 13), reason='may end by itself before 3.13'))])
def test_an_iterator_that_nobody_finalizes_ends_with_python(
        name, patched, tmp_path):
    module = f'chainer.iterators.{name.lower()}_iterator'
    limit = 100 if patched else 5       # seconds, all of which pass if not
    run = run_group(tmp_path, f"""
        import faulthandler
        from chainer_fp8pipe.compat._patches import PATCHES
        {'' if patched else f'del PATCHES[{module!r}]'}
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
            faulthandler.dump_traceback_later({limit}, exit=True)
        """)
    if patched:
        assert (passes(run), run.stderr) == ('updated\n', '')
    else:
        assert ('multiprocess_iterator.py", line 404 in terminate'
                if sys.version_info < (3, 14) else
                'cannot join thread at interpreter shutdown') in run.stderr
