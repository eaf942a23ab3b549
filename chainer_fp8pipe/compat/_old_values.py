"""What NumPy, SciPy, Pillow, onnx, Python and Chainer itself have removed.

The values are those that the libraries gave, so that no number changes; a
name that a library has again (numpy.bool) is the library's.
"""
import collections
import collections.abc
import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import math
import pkgutil
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from . import _today

#: By module: pairs of an old name and the one of the same module for it.
_RENAMED = {
    'numpy': '''
        AxisError=exceptions.AxisError
        ComplexWarning=exceptions.ComplexWarning
        RankWarning=exceptions.RankWarning
        VisibleDeprecationWarning=exceptions.VisibleDeprecationWarning
        Inf=inf Infinity=inf NaN=nan PINF=inf infty=inf bool8=bool_
        cfloat=complex128 complex_=complex128 float_=float64
        longfloat=longdouble singlecomplex=complex64 string_=bytes_
        unicode_=str_ alltrue=all cumproduct=cumprod mat=asmatrix product=prod
        round_=round row_stack=vstack sometrue=any trapz=trapezoid''',
    'PIL.Image': '''
        ANTIALIAS=Resampling.LANCZOS CUBIC=Resampling.BICUBIC
        LINEAR=Resampling.BILINEAR''',
    'matplotlib': 'cm.get_cmap=pyplot.get_cmap',
    'scipy': ' '.join(f'misc.{name}=special.{name}' for name in (
        'comb', 'factorial', 'factorial2', 'logsumexp')),
    'time': 'clock=process_time',
    # What Chainer 2 to 7 moved.
    'chainer': ' '.join(f'functions.{name}=links.{name}' for name in (
        'BatchNormalization', 'Bilinear', 'BinaryHierarchicalSoftmax',
        'Convolution2D', 'Deconvolution2D', 'EmbedID', 'Inception',
        'InceptionBN', 'Linear', 'MLPConvolution2D', 'NegativeSampling',
        'PReLU', 'Parameter')),
    'chainer.functions': '''
        pooling.max_pooling_2d=pooling.max_pooling_nd
        activation.lstm=rnn.lstm activation.slstm=rnn.slstm
        activation.tree_lstm=rnn.tree_lstm
        connection.n_step_gru=rnn.n_step_gru
        connection.n_step_lstm=rnn.n_step_lstm
        connection.n_step_rnn=rnn.n_step_rnn''',
    'chainer.links': ' '.join(f'connection.{name}=rnn.{name}' for name in (
        'gru', 'lstm', 'mgu', 'n_step_gru', 'n_step_lstm', 'n_step_rnn',
        'peephole', 'tree_lstm', 'zoneoutlstm')),
    'collections': ' '.join(
        f'{name}=abc.{name}' for name in collections.abc.__all__),
    'scipy.signal': ' '.join(
        f'{name}=windows.{name}' for name in (
            'bartlett', 'blackman', 'gaussian', 'hamming', 'hann', 'kaiser')),
}


_ArgSpec = collections.namedtuple(
    '_ArgSpec', 'args varargs keywords defaults')


@functools.cache
def _function_set():
    import chainer

    class FunctionSet(chainer.Chain):
        def __setattr__(self, name, value):
            with (self.init_scope() if isinstance(value, chainer.Link)
                  else contextlib.nullcontext()):
                super().__setattr__(name, value)

        def collect_parameters(self):
            return self
    return FunctionSet


@functools.cache
def _max_pooling_2d():
    from chainer.functions.pooling.max_pooling_nd import MaxPoolingND

    class MaxPooling2D(MaxPoolingND):
        def __init__(self, *arguments, **options):
            super().__init__(2, *arguments, **options)
    return MaxPooling2D


#: Full names, and what gives their values.
OLD: Mapping[str, Callable[[], Any]] = {
    **{f'numpy.{name}': functools.partial(lambda value: value, value)
       for name, value in {
           'NINF': -numpy.inf, 'asscalar': lambda a: a.item(), 'bool': bool,
           'complex': complex, 'float': float, 'int': int, 'long': int,
           'math': math, 'object': object, 'str': str, 'unicode': str,
       }.items()},
    **{f'{module}.{old}': functools.partial(
        pkgutil.resolve_name, f'{module}.{new}')
       for module, pairs in _RENAMED.items()
       for old, new in (pair.split('=') for pair in pairs.split())},
    'chainer.FunctionSet': _function_set,
    'chainer.functions.pooling.max_pooling_nd.MaxPooling2D': _max_pooling_2d,
    'onnx.mapping': _today.onnx_mapping,
    'pkg_resources': lambda: _today,
    'imp': lambda: types.SimpleNamespace(
        load_source=lambda name, path: importlib.machinery.SourceFileLoader(
            name, path).load_module(name),
        new_module=types.ModuleType, reload=importlib.reload),
    'inspect.getargspec': lambda: lambda function: _ArgSpec(
        *inspect.getfullargspec(function)[:4]),
    'fractions.gcd': lambda: math.gcd,
    'sklearn.externals.joblib': lambda: importlib.import_module('joblib'),
}


def _hooks():
    return importlib.import_module('chainer.optimizer_hooks')


def _size_of_box(box):
    return box[2] - box[0], box[3]


#: Methods, by their class's full name, and the property A.
METHODS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys((f'scipy.sparse._base.{kind}.A' for kind in (
        '_spbase', 'spmatrix')), lambda matrix: matrix.toarray()),
    'chainer.optimizer.Optimizer.zero_grads':
        lambda optimizer: optimizer.target.cleargrads(),
    'chainer.optimizer.Optimizer.clip_grads': lambda optimizer, norm:
        _hooks().GradientClipping(norm)(optimizer),
    'chainer.optimizer.Optimizer.weight_decay': lambda optimizer, rate: [
        _hooks().WeightDecay(rate)(None, one)
        for one in optimizer.target.params()],
    'numpy.ndarray.ptp': numpy.ptp,
    **dict.fromkeys((f'pandas.{home}DataFrame.as_matrix' for home in (
        '', 'core.frame.')), lambda frame, columns=None: (
            frame if columns is None else frame[columns]).to_numpy()),
    'numpy.ndarray.tostring': numpy.ndarray.tobytes,
    'PIL.ImageDraw.ImageDraw.textsize': lambda draw, text, *a, **options:
        _size_of_box(draw.textbbox((0, 0), text, *a, **options)),
    **{f'PIL.ImageFont.{font}.getsize': lambda font, text, *a, **options:
       _size_of_box(font.getbbox(text, *a, **options))
       for font in ('FreeTypeFont', 'ImageFont')},
}


# --- calls that are refused what they took

#: Arguments of Chainer 1: the setting that each has become, and its value.
_CONFIGURES: Mapping[str, Callable[[Any], tuple[str, Any]]] = {
    'deterministic': lambda given: ('cudnn_deterministic', given),
    'test': lambda given: ('train', not given),
    'train': lambda given: ('train', given),
    'use_cudnn': lambda given: ('use_cudnn', 'auto' if given else 'never'),
}
#: Functions, and arguments of others, by their names.
CALLS = {'array', 'asarray', 'column_stack', 'dstack', 'float', 'fromstring',
         'hasattr', 'hstack', 'int', 'load', 'permutation', 'stack', 'vstack'}
DROPPED = {*_CONFIGURES, 'bias', 'newshape', 'volatile', 'wscale'}


def _of_chainer_1(function, /, *arguments, **options):
    import chainer
    if options.pop('volatile', None) in ('on', True):
        options['requires_grad'] = False
    if 'wscale' in options:
        options['initialW'] = chainer.initializers.LeCunNormal(
            options.pop('wscale'))
    if 'bias' in options:
        options['initial_bias'] = options.pop('bias')
    with contextlib.ExitStack() as stack:
        for name in options.keys() & _CONFIGURES:
            stack.enter_context(chainer.using_config(
                *_CONFIGURES[name](options.pop(name))))
        return function(*arguments, **options)


#: What an error says, and the call as it was meant.
REFUSED: tuple[tuple[str, Callable[..., Any]], ...] = (
    ('inhomogeneous', lambda function, rows, *arguments, **options: function(
        numpy.array(rows, object), *arguments, **options)),
    ('arrays to stack', lambda function, rows, *arguments, **options: function(
        list(rows), *arguments, **options)),
    ('avoid copy', lambda function, *arguments, **options: function(
        *arguments, **{**options, 'copy': None})),
    ('0-dimensional arrays', lambda function, array: function(
        array.item() if array.size == 1 else array)),
    ('binary mode of fromstring', lambda function, text, dtype=float, count=-1,
     sep='': numpy.frombuffer(text, dtype, count).copy()),
    ("'newshape'", lambda function, a, newshape, **options: function(
        a, newshape, **options)),
    ("'Loader'", lambda function, stream: importlib.import_module(
        'yaml').safe_load(stream)),
    *((said, _of_chainer_1) for said in (
        'argument is not supported anymore', 'unexpected keyword argument')),
)
