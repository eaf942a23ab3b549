"""What ``install-chainer`` changes in Chainer 7.8.1, and why.

Chainer has no more releases, so what it needs on a current stack is edited
into its wheel, whose version becomes 7.8.1+today.  To pip that version is
7.8.1: requirements such as ``==7.8.1`` and ``>=6`` accept it.  Each edit is
small and does the same on every Python from 3.10 to 3.14 and every NumPy from
1.23 on.  What an edit needs more than a line of stands in :mod:`._today`,
which the wheel gets as ``chainer/_today.py``.
"""
from __future__ import annotations

import pathlib
import zlib
from typing import NamedTuple

CHAINER = '7.8.1'
TODAY = CHAINER + '+today'


class Edit(NamedTuple):
    """A fragment of a file, which must be there so often, and its successor.

    A fragment that ends in ``...`` goes on to the end of the file.
    """

    file: str
    fragment: str
    successor: str
    why: str
    times: int = 1


def _late(file, name, statement=None):
    return Edit(
        f'chainer/{file}.py', statement or f'    from scipy import {name}\n',
        f'{"" if statement == "import filelock" else "    "}'
        f'from chainer._today import {name}'
        + '\n' * (statement is None),
        'is imported when it is used: it took long, and few use it')


def _onnx(file):
    return Edit(
        f'onnx_chainer/{file}.py', 'from onnx.mapping import',
        'from chainer._today import', 'onnx 1.20 has no onnx.mapping')


_OLD_PYTHON = 'setuptools 82 has no pkg_resources, Python 3.12 no distutils'
_AT_EXIT = 'an iterator without finalize() hangs or raises when Python ends'
_CUPY = ("CuPy 14 moved half and float16 out of <cupy/carray.cuh>, and has no "
         'cuDNN to install')
_PROTOBUF = 'protobuf 4 makes no descriptors one by one'

EDITS = (
    Edit('chainer/__init__.py', 'from chainer import _version\n',
         'try:\n'
         '    from chainer_fp8pipe.compat import old_names\n'
         'except ModuleNotFoundError:\n'
         '    pass\n'
         'else:\n'
         '    old_names.install()\n'
         'from chainer import _version\n',
         'packages that import Chainer get the names that libraries removed'),
    Edit('chainer/__init__.py', '_environment_check.check()',
         'from chainer import _today\n_today.put_moved_modules_back()',
         'modules moved since Chainer 4; the check knows no CuPy after 7'),
    Edit('chainer/_environment_check.py',
         'import numpy.distutils.system_info\nimport pkg_resources\n', '',
         _OLD_PYTHON),
    Edit('chainer/testing/helper.py', 'import pkg_resources\n',
         'from chainer import _today as pkg_resources\n', _OLD_PYTHON),
    Edit('chainer/testing/doctest_helper.py', 'import pkg_resources\n',
         'from chainer import _today as pkg_resources\n', _OLD_PYTHON),

    # --- NumPy
    Edit('chainer/functions/array/as_strided.py', "np.sctypes['int']}",
         '(np.int8, np.int16, np.int32, np.int64)}',
         'numpy.sctypes was removed in NumPy 2.0'),
    Edit('chainer/functions/array/as_strided.py',
         "gy.dtype not in np.sctypes['float']", "gy.dtype.kind != 'f'",
         'numpy.sctypes was removed in NumPy 2.0'),
    Edit('chainer/functions/array/resize_images.py', 'dtype=numpy.float)',
         'dtype=float)', 'numpy.float was removed in NumPy 1.24', 6),
    Edit('chainer/distributions/categorical.py', '[mg + [', '[list(mg) + [',
         'numpy.meshgrid returns a tuple since NumPy 2.0', 2),
    Edit('chainer/functions/array/pad_sequence.py',
         '        y = xp.empty(shape, xs[0].dtype)\n',
         '        y = xp.empty(shape, xs[0].dtype)\n'
         '        self.padding = numpy.array(self.padding).astype(y.dtype)\n',
         'an integer that an unsigned array cannot hold raises since NumPy '
         '2.0, it used to wrap around'),
    Edit('chainer/variable.py', "device = getattr(array, 'device', 'CPU')",
         "device = 'CPU' if xp is numpy else getattr(array, 'device', 'CPU')",
         'arrays have a device, which is called cpu, since NumPy 2.0'),
    Edit('chainer/functions/math/fix.py', 'xp.fix(x)', 'xp.trunc(x)',
         'NumPy 2.5 warns of numpy.fix'),
    Edit('chainer/dataset/convert.py',
         'numpy.maximum(shape, array.shape, shape)',
         'numpy.maximum(shape, array.shape, out=shape)',
         'NumPy 2.5 warns of a third argument without its name'),
    Edit('chainermn/communicators/_memory_utility.py',
         'v = xp.array(v, copy=False, dtype=transfer_dtype)',
         'v = xp.empty(v.shape, transfer_dtype)',
         'array(copy=False) raises in NumPy 2.0 and CuPy 14, it used to copy'),
    Edit('chainermn/iterators/multi_node_iterator.py', 'int(_size)',
         'int(numpy.ravel(_size)[0])',
         'int() of an array of one dimension raises since NumPy 2.4, on one '
         'rank while the others wait for it'),
    Edit('chainer/utils/type_check.py',
         "'Expect: {0}\\nActual: {1}'.format(expect, actual)",
         "'Expect: {0}\\nActual: {1}'.format(expect, actual)\n"
         '            from chainer import _today\n'
         '            msg += _today.hint(msg)',
         'NumPy 2 no longer lets the array decide the type of a product'),

    # --- modules that take long to import
    *(_late(f'functions/math/{name}', 'special')
      for name in ('erfcinv', 'erfcx', 'erfinv', 'ndtri')),
    _late('datasets/svhn', 'io'),
    _late('functions/math/sparse_matmul', 'sparse'),
    _late('distributions/multivariate_normal', 'scipy',
          '    import scipy.linalg'),
    _late('dataset/download', 'filelock', 'import filelock'),
    _late('serializers/hdf5', 'h5py', '    import h5py'),

    # --- SciPy, h5py, onnx and protobuf
    Edit('chainer/functions/math/sparse_matmul.py',
         '        raise RuntimeError(msg)\n',
         '        raise RuntimeError(msg)\n'
         '    if A_data.dtype == numpy.float16:\n'
         '        A_data = A_data.astype(numpy.float32)\n',
         'SciPy 1.15 refuses sparse float16'),
    Edit('chainer/serializers/hdf5.py', 'return numpy.asarray(dataset)',
         'return _today.read_hdf5(dataset)', 'h5py 3 reads strings as bytes'),
    Edit('chainer/serializers/hdf5.py', 'type(value)(numpy.asarray(dataset))',
         'type(value)(_today.read_hdf5(dataset))',
         'h5py 3 reads strings as bytes'),
    Edit('chainer/serializers/hdf5.py', 'from chainer import serializer\n',
         'from chainer import _today, serializer\n',
         'h5py 3 reads strings as bytes'),
    _onnx('export'), _onnx('functions/array'), _onnx('functions/math'),
    Edit('onnx_chainer/context.py', 'onnx.mapping.STORAGE',
         'chainer._today.STORAGE', 'onnx 1.20 has no onnx.mapping'),
    Edit('chainer/links/caffe/protobuf3/caffe_pb2.py',
         'from google.protobuf import reflection as _reflection\n',
         'from chainer import _today\n', _PROTOBUF),
    Edit('chainer/links/caffe/protobuf3/caffe_pb2.py',
         'DESCRIPTOR = _descriptor.FileDescriptor(\n', 'DESCRIPTOR = dict(\n',
         _PROTOBUF),
    Edit('chainer/links/caffe/protobuf3/caffe_pb2.py',
         '_sym_db.RegisterFileDescriptor(DESCRIPTOR)\n...',
         "_today.build_messages(globals(), DESCRIPTOR['serialized_pb'])\n",
         _PROTOBUF),

    # --- Python
    Edit('chainer/iterators/multiprocess_iterator.py',
         '= multiprocessing.Pool(', '= _today.workers().Pool(',
         'Python 3.14 no longer forks'),
    Edit('chainer/iterators/multiprocess_iterator.py',
         'def _initialize_loop(self):\n',
         'def _initialize_loop(self):\n'
         '        _today.end_with_python(self)\n', _AT_EXIT),
    Edit('chainer/iterators/multiprocess_iterator.py',
         'from chainer.dataset import iterator\n',
         'from chainer import _today\nfrom chainer.dataset import iterator\n',
         _AT_EXIT),
    Edit('chainer/iterators/multiprocess_iterator.py',
         'thread.setDaemon(True)', 'thread.daemon = True',
         'setDaemon() is deprecated since Python 3.10'),
    Edit('chainer/iterators/multithread_iterator.py',
         'self._pool = pool.ThreadPool(self.n_threads)',
         'self._pool = pool.ThreadPool(self.n_threads)\n'
         '                _today.end_with_python(self)', _AT_EXIT),
    Edit('chainer/iterators/multithread_iterator.py',
         'from chainer.dataset import iterator\n',
         'from chainer import _today\nfrom chainer.dataset import iterator\n',
         _AT_EXIT),
    Edit('chainermn/links/batch_normalization.py',
         'ret = copy.deepcopy(super(MultiNodeBatchNormalization, self))',
         'ret = memo[id(self)] = self.__class__.__new__(self.__class__)\n'
         '        vars(ret).update(copy.deepcopy(vars(self), memo))',
         'super() is copied as itself, and for ever, since Python 3.14'),

    # --- CuPy
    Edit('chainer/backends/cuda.py', 'if (not cudnn_enabled and',
         'if (_cupy_major < 14 and not cudnn_enabled and', _CUPY),
    Edit('chainer/backends/cuda.py',
         '    return cupy.RawKernel(code, name',
         "    if _cupy_major >= 14 and 'half' in code:\n"
         "        code = '#include <cupy/float16.cuh>\\n' + code\n"
         '    return cupy.RawKernel(code, name', _CUPY),
    Edit('chainer/backends/cuda.py', '    return cupy.ElementwiseKernel(\n',
         "    if _cupy_major >= 14 and 'float16' in operation:\n"
         "        kwargs['preamble'] = ('#include <cupy/float16.cuh>\\n'\n"
         "                              + kwargs.get('preamble', ''))\n"
         '    return cupy.ElementwiseKernel(\n', _CUPY),
    Edit('chainer/backends/cuda.py', '    cupy = object()\n',
         '    from chainer import _today\n    cupy = _today.NoCuPy(e)\n',
         "\"'object' object has no attribute\" does not name CuPy"),

    # --- faults of Chainer, some of which its master mends
    Edit('chainer/functions/connection/deconvolution_2d.py',
         'self._set_cover_all(x, W)', 'self._set_cover_all(x.shape, W.shape)',
         'backward raises where the input needs no gradient, as of a '
         "generator's first layer"),
    Edit('chainer/function_node.py', '    if not inputs:\n',
         '    if len(inputs) == 0:\n',
         'a Variable in place of a list of them has no truth'),
    Edit('chainer/iterators/multiprocess_iterator.py',
         '                batch_ret[0] = [self.dataset[idx] for idx in '
         'indices]\n',
         '                try:\n'
         '                    batch_ret[0] = [self.dataset[idx] '
         'for idx in indices]\n'
         '                except BaseException as error:\n'
         '                    batch_ret[0] = error\n',
         "a dataset's error in the first batch is raised, not printed"),
    Edit('chainer/iterators/multiprocess_iterator.py',
         '            batch = batch_ret[0]\n',
         '            batch = batch_ret[0]\n'
         '            if isinstance(batch, BaseException):\n'
         '                raise batch\n',
         "a dataset's error in the first batch is raised, not printed"),
    Edit('chainermn/extensions/observation_aggregator.py',
         'if isinstance(value, Variable):',
         'if chx.is_available() and isinstance(value, Variable):',
         'a Variable is sent to a device of ChainerX, which wheels lack'),

    # --- the wheel itself
    Edit('METADATA', f'Version: {CHAINER}\n', f'Version: {TODAY}\n',
         'another version than the one that an index has'),
    Edit('METADATA', 'Requires-Dist: setuptools\n',
         'Requires-Dist: packaging\n', _OLD_PYTHON),
)


def digest() -> str:
    """A hash of all edits; a mended wheel keeps it in its file EDITS."""
    here = pathlib.Path(__file__).parent
    return str(zlib.crc32(b''.join(
        (here / name).read_bytes() for name in ('_edits.py', '_today.py'))))


def edited(file: str, text: str) -> str:
    """The text of a file of Chainer, mended.

    Raises:
        ValueError: It is not the file of Chainer 7.8.1.
    """
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
    return text
