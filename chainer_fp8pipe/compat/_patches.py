"""The patches: for each module of Chainer 7.8.1 its line, cause and remedy.

Some are for what would fail, and some for time, of which every rank needs its
own when it starts.

Deprecated in NumPy 2.5 but working, so not patched yet:
``links/activation/maxout.py:75`` (setting an array's shape),
``functions/math/fix.py:22`` (``numpy.fix``) and ``dataset/convert.py:322``
(a third positional argument of ``numpy.maximum``).
"""
import atexit
import builtins
import copy
import copyreg
import functools
import importlib
import importlib.util
import os
import pathlib
import sys
import types
import warnings
import weakref

import numpy

from . import _old_names
from ._hook import ImportPatch

PATCHES: dict[str, ImportPatch] = {}


def _patch(module, lines, cause, expects, needed):
    """Decorates the ``apply`` of a :class:`ImportPatch` and registers it."""
    def register(apply):
        PATCHES[module] = ImportPatch(
            module, lines, cause, expects, needed, apply)
        return apply
    return register


# --- names that NumPy has dropped --------------------------------------------

def _stand_in(module, **names) -> types.ModuleType:
    stand_in = types.ModuleType(module.__name__)
    vars(stand_in).update(
        names, __getattr__=functools.partial(getattr, module))
    return stand_in


def _numpy_lacks(name):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        return not hasattr(numpy, name)


_patch('chainer.functions.array.as_strided', '10,252',
       'numpy.sctypes was removed in NumPy 2.0', "np.sctypes['int']",
       lambda: _numpy_lacks('sctypes'))(_old_names.load)
_patch('chainer.functions.array.resize_images', '179-196',
       'numpy.float was removed in NumPy 1.24',
       'def compute_indices_and_weights(',
       lambda: _numpy_lacks('float'))(_old_names.load)


@_patch('chainer.distributions.categorical', '69-76',
        'numpy.meshgrid returns a tuple, no longer a list, since NumPy 2.0',
        'self.log_p[mg + [', lambda: isinstance(numpy.meshgrid([0]), tuple))
def _categorical(module, run):
    run()
    module.numpy = _stand_in(numpy, meshgrid=lambda *xi, **options: list(
        numpy.meshgrid(*xi, **options)))


# --- stricter numbers -------------------------------------------------------

def _refused(action):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        try:
            action()
        except (OverflowError, TypeError, ValueError):
            return True
    return False


@_patch('chainer.functions.array.pad_sequence', '55',
        'an integer that an unsigned array cannot hold raises since NumPy '
        '2.0, it used to wrap around',
        'y[i, l:] = self.padding',
        lambda: _refused(lambda: numpy.zeros(1, 'u1').fill(-1)))
def _pad_sequence(module, run):
    run()
    forward = module.PadSequence.forward

    @functools.wraps(forward)
    def with_wrapped_padding(self, xs):
        if isinstance(self.padding, int) and xs[0].dtype.kind in 'iu':
            self.padding = numpy.array(self.padding).astype(xs[0].dtype)
        return forward(self, xs)

    module.PadSequence.forward = with_wrapped_padding


@_patch('chainer.variable', '820',
        'arrays have a device, which is called cpu, since NumPy 2.0',
        "device = getattr(array, 'device', 'CPU')",
        lambda: hasattr(numpy.ndarray, 'device'))
def _variable(module, run):
    run()
    debug_print = module.Variable.debug_print

    @functools.wraps(debug_print)
    def in_capitals(self):
        return debug_print(self).replace('- device: cpu', '- device: CPU')

    module.Variable.debug_print = in_capitals


# --- what Chainer's master mends and no release has --------------------------

@_patch('chainer.functions.connection.deconvolution_2d', '340',
        'the arrays are passed where their shapes are due: backward raises '
        'where the input needs no gradient, as a generator\'s first layer',
        'self._set_cover_all(x, W)', lambda: True)
def _deconvolution_2d(module, run):
    run()
    node = module.Deconvolution2DFunction
    set_cover_all = node._set_cover_all

    @functools.wraps(set_cover_all)
    def from_shapes(self, x, W):
        set_cover_all(self, *(getattr(a, 'shape', a) for a in (x, W)))

    node._set_cover_all = from_shapes


@_patch('chainermn.extensions.observation_aggregator', '49',
        'a Variable is sent to a device of ChainerX, which wheels lack',
        'value.to_device("native")',
        lambda: not importlib.import_module('chainerx').is_available())
def _observation_aggregator(module, run):
    run()
    module.Variable = ()        # no object is one: Variables travel as well


# --- h5py -------------------------------------------------------------------

@_patch('chainer.serializers.hdf5', '15,157,168',
        'h5py 3.0 reads strings as bytes, which str() makes "b\'...\'"; and '
        'import chainer would import it for all, a sixth of its time',
        'value = type(value)(numpy.asarray(dataset))',
        lambda: importlib.util.find_spec('h5py') is not None)
def _hdf5(module, run):
    _run_with(module, run, h5py=_OnDemand('h5py'))
    h5py = module.h5py

    def asarray(value, *args, **kwargs):
        # Values that were saved as bytes stay bytes, as with h5py 2.
        if isinstance(value, h5py.Dataset) and hasattr(
                value, 'asstr') and h5py.check_string_dtype(
                    value.dtype) == ('utf-8', None):
            return numpy.asarray(value.asstr()[()], object)
        return numpy.asarray(value, *args, **kwargs)

    module.numpy = _stand_in(numpy, asarray=asarray)


# --- modules that are gone ---------------------------------------------------

@functools.cache
def _imports(*names):
    # As a side effect, pkg_resources and numpy.distutils have then told of
    # their deprecation unheard, and do not tell again when Chainer asks.
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        warnings.filterwarnings('ignore', 'pkg_resources is deprecated')
        try:
            for name in names:
                importlib.import_module(name)
        except ImportError:
            return False
    return True


def _environment_check_is_useless():
    # It looks at macOS's BLAS, and at the versions of CuPy and iDeep.
    speaks = (sys.platform == 'darwin'
              or importlib.util.find_spec('ideep4py') is not None)
    return (not speaks or importlib.util.find_spec('cupy') is not None
            or not _imports('numpy.distutils.system_info', 'pkg_resources'))


@_patch('chainer._environment_check', '6-7,57',
        'numpy.distutils went with Python 3.12, pkg_resources with setuptools '
        '82; the check knows no CuPy after 7, and takes a fifth of a second',
        'def check():', _environment_check_is_useless)
def _environment_check(module, run):
    # chainer/__init__.py:96 needs nothing of it but this.
    module.check = lambda: None


for _name, _line in ('helper', '6'), ('doctest_helper', '3'):
    _patch(f'chainer.testing.{_name}', _line,
           'pkg_resources went with setuptools 82',
           'pkg_resources.WorkingSet()',
           lambda: not _imports('pkg_resources'))(_old_names.load)


@_patch('chainer.links.caffe.protobuf3.caffe_pb2', '33',
        'protobuf 4 makes no descriptors one by one, as this file does, which '
        'an old protoc has written; it reads the same serialized text whole',
        'serialized_pb=_b(',
        _old_names.protobuf_refuses)
def _caffe_pb2(module, run):
    _old_names.build_messages(
        module, module.__spec__.loader.get_source(module.__name__))


def _onnx_patch(module, lines, expects):
    _patch(f'onnx_chainer.{module}', lines,
           'onnx.mapping was removed in onnx 1.20; Chainer then says that '
           'onnx is not installed', expects,
           lambda: _imports('onnx') and not _imports('onnx.mapping'))(
               _old_names.load)


_onnx_patch('context', '13', 'onnx.mapping.STORAGE_TENSOR_TYPE_TO_FIELD')
_IMPORT = 'from onnx.mapping import NP_TYPE_TO_TENSOR_TYPE'
_onnx_patch('export', '12', _IMPORT)
_onnx_patch('functions.array', '6', _IMPORT)
_onnx_patch('functions.math', '2', _IMPORT)


# --- what few use and all would wait for -------------------------------------

class _OnDemand(types.ModuleType):
    """Imports the module of its name when something of it is used."""

    def __getattr__(self, name):
        return getattr(importlib.import_module(self.__name__), name)


def _scipy_can_wait():
    return ('scipy' not in sys.modules
            and importlib.util.find_spec('scipy') is not None)


def _run_with(module, run, **found):
    """Runs a module that finds stand-ins where it imports these names."""
    def import_(name, *arguments, **options):
        stand_in = found.get(name.partition('.')[0])
        return stand_in or builtins.__import__(name, *arguments, **options)
    # For this module alone: a stand-in in sys.modules would be found by a
    # thread that imports the real one meanwhile.
    module.__builtins__ = {**vars(builtins), '__import__': import_}
    run()


def _run_with_scipy_on_demand(module, run, part):
    scipy = types.ModuleType('scipy')
    setattr(scipy, part, _OnDemand(f'scipy.{part}'))
    _run_with(module, run, scipy=scipy)


def _scipy_when_used(module, lines, part, expects):
    _patch(module, lines, f'scipy.{part} is imported by import chainer, '
           'and all of SciPy that it uses takes a quarter of a second',
           expects, _scipy_can_wait)(
               functools.partial(_run_with_scipy_on_demand, part=part))


for _name in 'erfcinv', 'erfinv', 'ndtri':
    _scipy_when_used(f'chainer.functions.math.{_name}', '2', 'special',
                     'from scipy import special')
_scipy_when_used('chainer.functions.math.erfcx', '4', 'special',
                 'from scipy import special')
_scipy_when_used('chainer.distributions.multivariate_normal', '25', 'linalg',
                 'import scipy.linalg')
_scipy_when_used('chainer.datasets.svhn', '5', 'io', 'from scipy import io')


@_patch('chainer.functions.math.sparse_matmul', '11,68,75',
        'SciPy 1.15 refuses sparse float16 (products are made in float32); '
        'its import takes a quarter of a second', 'sparse.coo_matrix((A_data',
        lambda: importlib.util.find_spec('scipy') is not None)
def _sparse_matmul(module, run):
    _run_with_scipy_on_demand(module, run, 'sparse')
    sparse = module.sparse

    def coo_matrix(content, **options):
        data, places = content
        if data.dtype == numpy.float16:
            data = data.astype(numpy.float32)
        return sparse.coo_matrix((data, places), **options)

    module.sparse = _stand_in(sparse, coo_matrix=coo_matrix)


_patch('chainer.dataset.download', '6', 'filelock is imported by import '
       'chainer, an eighth of its time, and locks downloads only',
       'with filelock.FileLock(lock_path):',
       lambda: importlib.util.find_spec('filelock') is not None)(
           functools.partial(_run_with, filelock=_OnDemand('filelock')))


# --- processes ---------------------------------------------------------------

def _pool_as_before(*args, **kwargs):
    """A pool of processes that are forked on Linux, where nothing is chosen.

    Python 3.14 starts them by a server, which runs a script again that has no
    ``if __name__ == '__main__'`` and wants data that can be pickled.  A script
    that has used multiprocessing before has chosen that without a word.
    """
    import multiprocessing
    method = multiprocessing.get_start_method(allow_none=True) or (
        'fork' if sys.platform == 'linux' else None)
    return multiprocessing.get_context(method).Pool(*args, **kwargs)


def _finalized_when_python_ends(name, lines, expects, begins):
    # When Python ends, multiprocessing is half gone (until 3.12), a stopped
    # daemon thread is called alive (3.13), or must not be joined (from 3.14).
    @_patch(f'chainer.iterators.{name.lower()}_iterator', lines,
            'Python 3.14 no longer forks; an iterator without finalize() '
            'hangs or raises when Python ends',
            expects, lambda: True)
    def apply(module, run):
        run()
        iterators: weakref.WeakSet = weakref.WeakSet()
        iterator_type = getattr(module, f'{name}Iterator')
        begin = getattr(iterator_type, begins)
        owner = os.getpid()

        @functools.wraps(begin)
        def begin_noted(self):
            iterators.add(self)
            return begin(self)

        def finalize_all():
            if os.getpid() == owner:    # the pools are not a forked child's
                for iterator in list(iterators):
                    iterator.finalize()

        if hasattr(module, 'multiprocessing'):
            module.multiprocessing = _stand_in(
                module.multiprocessing, Pool=_pool_as_before)
        setattr(iterator_type, begins, begin_noted)
        atexit.register(finalize_all)


_finalized_when_python_ends(
    'Multiprocess', '403', 'while self._thread.is_alive():',
    '_initialize_loop')
_finalized_when_python_ends(
    'Multithread', '88', 'pool.terminate()', '_invoke_prefetch')


# --- CuPy 14 -----------------------------------------------------------------

def _half_moved():
    spec = importlib.util.find_spec('cupy')
    if spec is None or spec.origin is None:
        return False
    headers = pathlib.Path(spec.origin).parent / '_core/include/cupy'
    return ((headers / 'float16.cuh').exists()
            and 'float16.cuh' not in (headers / 'carray.cuh').read_text())


@_patch('chainer.backends.cuda', '584,622',
        'CuPy 14 moved half and float16 out of <cupy/carray.cuh>, and has no '
        'cuDNN to install',
        'def raw(code, name, *args, **kwargs):', _half_moved)
def _cuda(module, run):
    # Sought in chainermn/communicators/_memory_utility.py:290,362 and chainer/
    # training/updaters/multiprocess_parallel_updater.py:300,393; line 151 asks
    # to install cuDNN.
    run()
    header = '#include <cupy/float16.cuh>\n'
    raw, elementwise = module.raw, module.elementwise

    @functools.wraps(raw)
    def raw_with_half(code, name, *args, **kwargs):
        return raw(header + code if 'half' in code else code,
                   name, *args, **kwargs)

    @functools.wraps(elementwise)
    def elementwise_with_float16(
            in_params, out_params, operation, name, **kwargs):
        if 'float16' in operation:
            kwargs['preamble'] = header + kwargs.get('preamble', '')
        return elementwise(in_params, out_params, operation, name, **kwargs)

    module.raw = raw_with_half
    module.elementwise = elementwise_with_float16
    module.check_cuda_available._already_warned = True


# --- ChainerMN ---------------------------------------------------------------

def _raises(error, action):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        try:
            action()
        except error:
            return True
    return False


@_patch('chainermn.communicators._memory_utility', '211',
        'array(copy=False) raises in NumPy 2.0 and CuPy 14, it used to copy',
        'v = xp.array(v, copy=False, dtype=transfer_dtype)',
        # True of NumPy and CuPy alike: CuPy 14 needs NumPy 2.
        lambda: _raises(ValueError, lambda: numpy.array(
            numpy.zeros(1, 'f'), copy=False, dtype='e')))
def _memory_utility(module, run):
    run()

    def unpack_params(params, attr_name, buffer, transfer_dtype, zero_fill,
                      stream=None):
        """Copies a buffer's pieces into the params' arrays, cast as needed."""
        offset = 0
        for param in params:
            array = getattr(param, attr_name)
            if attr_name == 'grad' and array is None and zero_fill:
                array = param.xp.empty_like(param.data)
                param.grad = array
            received = array.astype(transfer_dtype, copy=False)
            buffer.to_device(received, received.nbytes, offset, stream)
            offset += received.nbytes
            if received is not array:
                array[...] = received.astype(array.dtype)

    module.unpack_params = unpack_params


@_patch('chainermn.links.batch_normalization', '141',
        'super() is copied as itself, and for ever, since Python 3.14',
        'copy.deepcopy(super(MultiNodeBatchNormalization, self))',
        lambda: super in copyreg.dispatch_table)
def _batch_normalization(module, run):
    run()

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        for name, value in vars(self).items():
            vars(copied)[name] = (
                value if name == 'comm' else copy.deepcopy(value, memo))
        return copied
    module.MultiNodeBatchNormalization.__deepcopy__ = __deepcopy__


@_patch('chainermn.iterators.multi_node_iterator', '137',
        'int() of an array of one dimension raises since NumPy 2.4, on one '
        'rank while the others wait for it',
        'int(_size)',
        lambda: _raises(TypeError, lambda: int(numpy.zeros(1))))
def _multi_node_iterator(module, run):
    run()
    module.int = lambda x: int(x.item() if hasattr(x, 'item') else x)
