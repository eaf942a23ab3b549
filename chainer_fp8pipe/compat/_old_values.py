"""What NumPy, SciPy, Pillow, onnx, pkg_resources and Python have removed.

The values are those that the libraries gave, so that no number changes.
"""
import ast
import collections
import collections.abc
import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from . import _today

#: By module: pairs of an old name and the one of the same module for it.
_RENAMED = {
    'numpy': '''
        bool8=bool_ bytes0=bytes_ int0=intp object0=object_ str0=str_
        uint0=uintp void0=void
        AxisError=exceptions.AxisError
        ComplexWarning=exceptions.ComplexWarning
        RankWarning=exceptions.RankWarning
        TooHardError=exceptions.TooHardError
        VisibleDeprecationWarning=exceptions.VisibleDeprecationWarning
        DataSource=lib.npyio.DataSource byte_bounds=lib.array_utils.byte_bounds
        Inf=inf Infinity=inf NaN=nan PINF=inf infty=inf
        cfloat=complex128 clongfloat=clongdouble complex_=complex128
        float_=float64 longcomplex=clongdouble longfloat=longdouble
        singlecomplex=complex64 string_=bytes_ unicode_=str_
        alltrue=all cumproduct=cumprod issubsctype=issubdtype mat=asmatrix
        product=prod round_=round row_stack=vstack sometrue=any
        trapz=trapezoid''',
    'PIL.Image': '''
        ANTIALIAS=Resampling.LANCZOS CUBIC=Resampling.BICUBIC
        LINEAR=Resampling.BILINEAR''',
    'collections': ' '.join(
        f'{name}=abc.{name}' for name in collections.abc.__all__),
    'gevent': 'signal=signal_handler',
    'scipy.integrate':
        'cumtrapz=cumulative_trapezoid simps=simpson trapz=trapezoid',
    'scipy.linalg': 'pinv2=pinv',
    'scipy.signal': ' '.join(
        f'{name}=windows.{name}' for name in (
            'bartlett', 'blackman', 'gaussian', 'hamming', 'hann', 'kaiser')),
}


def _renamed(module: str, path: str) -> Any:
    return functools.reduce(
        getattr, path.split('.'), importlib.import_module(module))


def _asfarray(a, dtype=numpy.float64):
    """numpy.asfarray of NumPy 1."""
    dtype = numpy.dtype(dtype)
    return numpy.asarray(
        a, dtype if dtype.kind in 'fc' else numpy.float64)


def _in1d(ar1, ar2, assume_unique=False, invert=False):
    return numpy.isin(numpy.ravel(ar1), ar2, assume_unique, invert)


_ArgSpec = collections.namedtuple(
    '_ArgSpec', 'args varargs keywords defaults')


def _getargspec(function):
    return _ArgSpec(*inspect.getfullargspec(function)[:4])


# --- scipy.misc until SciPy 1.2

def _bytescale(data, cmin=None, cmax=None, high=255, low=0):
    data = numpy.asarray(data)
    if data.dtype == numpy.uint8:
        return data
    cmin = data.min() if cmin is None else cmin
    cmax = data.max() if cmax is None else cmax
    scaled = (data - cmin) * ((high - low) / ((cmax - cmin) or 1)) + low
    return (scaled.clip(low, high) + 0.5).astype(numpy.uint8)


def _toimage(arr, high=255, low=0, cmin=None, cmax=None):
    from PIL import Image
    arr = _bytescale(arr, cmin, cmax, high, low)
    if arr.ndim == 3 and {3, 4} & set(arr.shape):
        channel = arr.shape.index(3 if 3 in arr.shape else 4)
        arr = numpy.moveaxis(arr, channel, 2)
    elif arr.ndim != 2:
        raise ValueError(
            f"'arr' has the shape {arr.shape}, which is none of an image's")
    return Image.fromarray(numpy.ascontiguousarray(arr))


def _imread(name, flatten=False, mode=None):
    from PIL import Image
    with Image.open(name) as image:
        usual = {'1': 'L', 'P': 'RGBA' if 'transparency' in image.info
                 else 'RGB'}.get(image.mode, image.mode)
        image = image.convert(mode or usual)
        return numpy.array(image.convert('F') if flatten else image)


def _imsave(name, arr, format=None):
    _toimage(arr).save(name, format)


def _imresize(arr, size, interp='bilinear'):
    image = _toimage(arr)
    if isinstance(size, (int, numpy.integer)):
        size = size / 100
    if numpy.ndim(size):
        wanted = size[1], size[0]
    else:
        wanted = tuple((numpy.array(image.size) * size).astype(int))
    return numpy.array(image.resize(wanted, {
        'nearest': 0, 'lanczos': 1, 'bilinear': 2, 'bicubic': 3,
        'cubic': 3}[interp]))


class _Cast(dict):
    def __missing__(self, kind):
        return lambda array: numpy.asarray(array).astype(kind)


def _load_source(name, path):
    """imp.load_source until Python 3.11."""
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Full names, and what gives their values.
OLD: Mapping[str, Callable[[], Any]] = {
    **{f'numpy.{name}': functools.partial(lambda value: value, value)
       for name, value in {
           'NINF': -numpy.inf, 'NZERO': -0.0, 'PZERO': 0.0,
           'asfarray': _asfarray, 'asscalar': lambda a: a.item(),
           'cast': _Cast(),
           'complex': complex, 'float': float, 'in1d': _in1d, 'int': int,
           'long': int, 'math': math, 'object': object, 'safe_eval':
               ast.literal_eval, 'str': str, 'unicode': str, 'bool': bool,
           'msort': functools.partial(numpy.sort, axis=0),
           'issubclass_': lambda a, b: (
               isinstance(a, type) and issubclass(a, b)),
           'sctypes': {
               'int': [numpy.int8, numpy.int16, numpy.int32, numpy.int64],
               'uint': [numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64],
               'float': [numpy.float16, numpy.float32, numpy.float64,
                         numpy.longdouble],
               'complex': [numpy.complex64, numpy.complex128,
                           numpy.clongdouble],
               'others': [bool, object, bytes, str, numpy.void]},
       }.items()},
    **{f'{module}.{old}': functools.partial(_renamed, module, new)
       for module, pairs in _RENAMED.items()
       for old, new in (pair.split('=') for pair in pairs.split())},
    **{f'scipy.misc.{name}': functools.partial(
        _renamed, 'scipy.special', name)
       for name in ('comb', 'factorial', 'factorial2', 'logsumexp')},
    'scipy.misc.bytescale': lambda: _bytescale,
    'scipy.misc.imread': lambda: _imread,
    'scipy.misc.imresize': lambda: _imresize,
    'scipy.misc.imsave': lambda: _imsave,
    'scipy.misc.toimage': lambda: _toimage,
    'onnx.mapping': _today.onnx_mapping,
    **{f'onnx.mapping.{name}': functools.partial(getattr, _today, name)
       for name in ('NP_TYPE_TO_TENSOR_TYPE', 'TENSOR_TYPE_TO_NP_TYPE',
                    'STORAGE_TENSOR_TYPE_TO_FIELD')},
    'pkg_resources': lambda: _today,
    'imp': lambda: types.SimpleNamespace(
        load_source=_load_source, new_module=types.ModuleType,
        reload=importlib.reload),
    'fractions.gcd': lambda: math.gcd,
    'matplotlib.cm.get_cmap': lambda: importlib.import_module(
        'matplotlib.pyplot').get_cmap,
    'inspect.getargspec': lambda: _getargspec,
    'sklearn.externals.joblib': lambda: importlib.import_module('joblib'),
    'time.clock': lambda: time.process_time,
}


def _itemset(array, *place_and_value):
    *place, value = place_and_value
    if place and not isinstance(place[0], tuple):
        place = [numpy.unravel_index(place[0], array.shape)]
    array[place[0] if place else (0,) * array.ndim] = value


def _size_of_box(box):
    return box[2] - box[0], box[3]


def _with_config(function, /, *arguments, **options):
    """Calls what is Chainer's with what arguments of Chainer 1 meant."""
    import chainer
    with contextlib.ExitStack() as stack:
        for name, given in list(options.items()):
            if name not in _CONFIGURES:
                continue
            del options[name]
            setting, value = _CONFIGURES[name](given)
            if setting:
                stack.enter_context(chainer.using_config(setting, value))
            elif value:
                options['requires_grad'] = False
        return function(*arguments, **options)


_CONFIGURES: Mapping[str, Callable[[Any], tuple[str, Any]]] = {
    'deterministic': lambda given: ('cudnn_deterministic', given),
    'test': lambda given: ('train', not given),
    'train': lambda given: ('train', given),
    'use_cudnn': lambda given: ('use_cudnn', 'auto' if given else 'never'),
    'volatile': lambda given: ('', given in ('on', True)),
}
#: What an error says, what it is about, and the call as it was meant.
REFUSED: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ('inhomogeneous', 'an array of rows of several lengths',
     lambda function, rows, *arguments, **options: function(
         numpy.array(rows, object), *arguments, **options)),
    ('arrays to stack', 'a stack of what an iterator gives',
     lambda function, rows, *arguments, **options: function(
         list(rows), *arguments, **options)),
    ('avoid copy', 'array(copy=False)',
     lambda function, *arguments, **options: function(
         *arguments, **{**options, 'copy': None})),
    ('binary mode of fromstring', 'fromstring() of bytes',
     lambda function, text, dtype=float, count=-1, sep='':
         numpy.frombuffer(text, dtype, count).copy()),
    ("'Loader'", 'yaml.load() without a loader',
     lambda function, stream: importlib.import_module(
         'yaml').safe_load(stream)),
    ('argument is not supported anymore', 'an argument of Chainer 1',
     _with_config),
)

#: Methods, by their class's full name, and the property A.
METHODS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys((f'scipy.sparse._base.{kind}.A' for kind in (
        '_spbase', 'spmatrix')), lambda matrix: matrix.toarray()),
    'chainer.optimizer.Optimizer.zero_grads':
        lambda optimizer: optimizer.target.cleargrads(),
    'numpy.ndarray.itemset': _itemset,
    'numpy.ndarray.newbyteorder': lambda array, order='S': array.view(
        array.dtype.newbyteorder(order)),
    'numpy.ndarray.ptp': numpy.ptp,
    'numpy.ndarray.tostring': numpy.ndarray.tobytes,
    'PIL.ImageDraw.ImageDraw.textsize': lambda draw, text, *a, **options:
        _size_of_box(draw.textbbox((0, 0), text, *a, **options)),
    **{f'PIL.ImageFont.{font}.getsize': lambda font, text, *a, **options:
       _size_of_box(font.getbbox(text, *a, **options))
       for font in ('FreeTypeFont', 'ImageFont')},
}
