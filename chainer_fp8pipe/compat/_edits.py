"""What ``install-chainer`` changes in Chainer 7.8.1, and why.

What the last release needs on a current stack is edited into its wheel, whose
version becomes 7.8.1+today and a digest; requirements such as ``==7.8.1`` and
``>=6`` accept it.  An edit does the same on every Python from 3.10 to 3.14 and
every NumPy from 1.23 on.  What needs more than a line stands in
:mod:`._today`, which the wheel gets as ``chainer/_today.py``.
"""
from __future__ import annotations

import hashlib
import os
import re
from typing import NamedTuple

CHAINER = '7.8.1'


class Edit(NamedTuple):
    """A fragment of a module, which must be there so often, and its successor.
    """

    module: str
    fragment: str       # that ends in "...": to the end of the file
    successor: str
    times: int = 1

    @property
    def file(self) -> str:
        return ('METADATA' if self.module == 'METADATA'
                else self.module.replace('.', '/') + '.py')


_MULTIPROCESS = 'chainer.iterators.multiprocess_iterator'
_CAFFE = 'chainer.links.caffe.protobuf3.caffe_pb2'

#: By reason.
_EDITS: dict[str, list[tuple]] = {
    'packages that import Chainer get the names that libraries removed': [
        ('chainer.__init__', 'from chainer import _version\n',
         'import contextlib\n'
         'with contextlib.suppress(ModuleNotFoundError):\n'
         '    from chainer_fp8pipe.compat import old_names\n'
         '    old_names.install()\n'
         'from chainer import _version\n')],
    'the check knows no CuPy after 7': [
        ('chainer.__init__', '_environment_check.check()', '')],
    'setuptools 82 has no pkg_resources, Python 3.12 no distutils': [
        ('chainer._environment_check',
         'import numpy.distutils.system_info\nimport pkg_resources\n', ''),
        *((f'chainer.testing.{module}', 'import pkg_resources\n',
           'from chainer import _today as pkg_resources\n')
          for module in ('helper', 'doctest_helper')),
        ('METADATA', 'Requires-Dist: setuptools\n',
         'Requires-Dist: packaging\n')],

    # --- NumPy
    'numpy.sctypes was removed in NumPy 2.0': [
        ('chainer.functions.array.as_strided', "np.sctypes['int']}",
         '(np.int8, np.int16, np.int32, np.int64)}'),
        ('chainer.functions.array.as_strided',
         "gy.dtype not in np.sctypes['float']", "gy.dtype.kind != 'f'")],
    'numpy.float was removed in NumPy 1.24': [
        ('chainer.functions.array.resize_images', 'dtype=numpy.float)',
         'dtype=float)', 6)],
    'numpy.meshgrid returns a tuple since NumPy 2.0': [
        ('chainer.distributions.categorical', '[mg + [', '[list(mg) + [', 2)],
    'an integer that an unsigned array cannot hold raises since NumPy 2.0, it '
    'used to wrap around': [
        ('chainer.functions.array.pad_sequence',
         '        y = xp.empty(shape, xs[0].dtype)\n',
         '        y = xp.empty(shape, xs[0].dtype)\n'
         '        self.padding = '
         'numpy.array(self.padding).astype(y.dtype)\n')],
    'NumPy 2.5 warns of numpy.fix, and of a third argument without its name': [
        ('chainer.functions.math.fix', 'xp.fix(x)', 'xp.trunc(x)'),
        ('chainer.dataset.convert',
         'numpy.maximum(shape, array.shape, shape)',
         'numpy.maximum(shape, array.shape, out=shape)')],
    'array(copy=False) raises in NumPy 2.0 and CuPy 14, it used to copy': [
        ('chainermn.communicators._memory_utility',
         'v = xp.array(v, copy=False, dtype=transfer_dtype)',
         'v = xp.empty(v.shape, transfer_dtype)')],
    'int() of an array of one dimension raises since NumPy 2.4, on one rank '
    'while the others wait for it': [
        ('chainermn.iterators.multi_node_iterator', 'int(_size)',
         'int(numpy.ravel(_size)[0])')],
    'NumPy 2 no longer lets the array decide the type of a product': [
        ('chainer.utils.type_check',
         "'Expect: {0}\\nActual: {1}'.format(expect, actual)",
         "'Expect: {0}\\nActual: {1}'.format(expect, actual)\n"
         '            msg += _today.hint(msg)')],

    # --- other libraries
    'is imported when it is used: it took long, and few use it': [
        *((f'chainer.{module}', f'{statement}\n',
           f'{name} = _today.late({of!r})\n')
          for module, statement, name, of in (
              *((f'functions.math.{name}', 'from scipy import special',
                 'special', 'scipy.special')
                for name in ('erfcinv', 'erfcx', 'erfinv', 'ndtri')),
              ('datasets.svhn', 'from scipy import io', 'io', 'scipy.io'),
              ('functions.math.sparse_matmul', 'from scipy import sparse',
               'sparse', 'scipy.sparse'),
              ('distributions.multivariate_normal', 'import scipy.linalg',
               'scipy', 'scipy'),
              ('serializers.hdf5', 'import h5py', 'h5py', 'h5py'),
              ('dataset.download', 'import filelock', 'filelock',
               'filelock')))],
    'SciPy 1.15 refuses sparse float16': [
        ('chainer.functions.math.sparse_matmul',
         '        raise RuntimeError(msg)\n',
         '        raise RuntimeError(msg)\n'
         '    if A_data.dtype == numpy.float16:\n'
         '        A_data = A_data.astype(numpy.float32)\n')],
    'h5py 3 reads strings as bytes': [
        ('chainer.serializers.hdf5', 'return numpy.asarray(dataset)',
         'return _today.read_hdf5(dataset)'),
        ('chainer.serializers.hdf5', 'type(value)(numpy.asarray(dataset))',
         'type(value)(_today.read_hdf5(dataset))')],
    'onnx 1.20 has no onnx.mapping': [
        *((f'onnx_chainer.{module}', 'from onnx.mapping import',
           'from chainer._today import')
          for module in ('export', 'functions.array', 'functions.math')),
        ('onnx_chainer.context', 'onnx.mapping.STORAGE',
         'chainer._today.STORAGE')],
    'protobuf 4 makes no descriptors one by one': [
        (_CAFFE, 'DESCRIPTOR = _descriptor.FileDescriptor(\n',
         'DESCRIPTOR = dict(\n'),
        (_CAFFE, '_sym_db.RegisterFileDescriptor(DESCRIPTOR)\n...',
         'from google.protobuf import descriptor_pool\n'
         'from google.protobuf.internal import builder as _make\n'
         'DESCRIPTOR = descriptor_pool.Default().AddSerializedFile('
         "DESCRIPTOR['serialized_pb'])\n"
         '_make.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())\n'
         '_make.BuildTopDescriptorsAndMessages('
         'DESCRIPTOR, __name__, globals())\n')],

    # --- Python
    'Python 3.14 no longer forks': [
        (_MULTIPROCESS, '= multiprocessing.Pool(',
         '= _today.workers().Pool(')],
    'an iterator without finalize() hangs or raises when Python ends': [
        (_MULTIPROCESS, 'def _initialize_loop(self):\n',
         'def _initialize_loop(self):\n'
         '        _today.end_with_python(self)\n'),
        ('chainer.iterators.multithread_iterator',
         'self._pool = pool.ThreadPool(self.n_threads)',
         'self._pool = pool.ThreadPool(self.n_threads)\n'
         '                _today.end_with_python(self)')],
    'super() is copied as itself, and for ever, since Python 3.14': [
        ('chainermn.links.batch_normalization',
         'ret = copy.deepcopy(super(MultiNodeBatchNormalization, self))',
         'ret = memo[id(self)] = self.__class__.__new__(self.__class__)\n'
         '        vars(ret).update(copy.deepcopy(vars(self), memo))')],

    # --- CuPy
    'CuPy 14 has no cuDNN to install': [
        ('chainer.backends.cuda', 'if (not cudnn_enabled and',
         'if (_cupy_major < 14 and not cudnn_enabled and')],
    'CuPy 14 moved half and float16 out of <cupy/carray.cuh>': [
        ('chainer.backends.cuda', '    return cupy.RawKernel(code, name',
         "    if _cupy_major >= 14 and 'half' in code:\n"
         "        code = '#include <cupy/float16.cuh>\\n' + code\n"
         '    return cupy.RawKernel(code, name'),
        ('chainer.backends.cuda', '    return cupy.ElementwiseKernel(\n',
         "    if _cupy_major >= 14 and 'float16' in operation:\n"
         "        kwargs['preamble'] = ('#include <cupy/float16.cuh>\\n'\n"
         "                              + kwargs.get('preamble', ''))\n"
         '    return cupy.ElementwiseKernel(\n')],
    "\"'object' object has no attribute\" does not name CuPy": [
        ('chainer.backends.cuda', '    cupy = object()\n',
         '    from chainer import _today\n    cupy = _today.no_cupy(e)\n')],

    'Chainer 6 made objects of what were numbers, -1 on a CPU': [
        ('chainer._backend', 'class Device(object):\n',
         'class Device(_today.Numbered):\n'),
        ('chainer.backends.cuda', '            check_cuda_available()\n'
         '            return Device(arg)\n',
         '            return get_device_from_id(arg)\n')],
    'Chainer 5 made properties of what tutorials of Chainer 4 set': [
        *(('chainer.iterators.serial_iterator',
           f'    @property\n    def {name}(self):\n'
           f'        return self._state.{name}\n',
           f'    {name} = _today.of_state({name!r})\n')
          for name in ('current_position', 'epoch', 'is_new_epoch'))],

    # --- faults of Chainer, some of which its master mends
    'backward raises where the input needs no gradient, as of a generator\'s '
    'first layer': [
        ('chainer.functions.connection.deconvolution_2d',
         'self._set_cover_all(x, W)',
         'self._set_cover_all(x.shape, W.shape)')],
    'a Variable in place of a list of them has no truth': [
        ('chainer.function_node', '    if not inputs:\n',
         '    if len(inputs) == 0:\n')],
    "a dataset's error in the first batch is raised, not printed": [
        (_MULTIPROCESS,
         '                batch_ret[0] = [self.dataset[idx] for idx in '
         'indices]\n',
         '                try:\n'
         '                    batch_ret[0] = [self.dataset[idx] '
         'for idx in indices]\n'
         '                except BaseException as error:\n'
         '                    batch_ret[0] = error\n'),
        (_MULTIPROCESS, '            batch = batch_ret[0]\n',
         '            batch = batch_ret[0]\n'
         '            if isinstance(batch, BaseException):\n'
         '                raise batch\n')],
    'a Variable is sent to a device of ChainerX, which wheels lack': [
        ('chainermn.extensions.observation_aggregator',
         'if isinstance(value, Variable):',
         'if chx.is_available() and isinstance(value, Variable):')],
}

EDITS = [Edit(*edit) for edits in _EDITS.values() for edit in edits]
#: By its digest, a Chainer with the edits of another version is noticed.
with open(os.path.join(os.path.dirname(__file__), '_today.py'), 'rb') as _file:
    TODAY = f'{CHAINER}+today.e' + hashlib.sha256(
        repr(EDITS).encode() + _file.read()).hexdigest()[:7]


def edited(file: str, text: str) -> str:
    """A file's text, mended; ValueError if it is not Chainer 7.8.1's."""
    for edit in EDITS:
        if edit.file != file:
            continue
        fragment, rest = edit.fragment, ''
        if fragment.endswith('...'):
            fragment = fragment.removesuffix('...')
            text, found, rest = text.partition(fragment)
            text += found
        if text.count(fragment) != edit.times:
            raise ValueError(
                f'{file} is not the one of Chainer {CHAINER}: it has '
                f'{text.count(fragment)} times {fragment!r}')
        text = text.replace(fragment, edit.successor)
    if '_today.' in text and 'import _today' not in text:
        text = re.sub(r'\A(from __future__ .*\n)?',
                      r'\1from chainer import _today\n', text, count=1)
    return text
