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
import operator
import pkgutil
import types
from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND
from chainer.optimizer_hooks import GradientClipping, WeightDecay

from . import _today


class FunctionSet(chainer.Chain):

    def __setattr__(self, name, value):
        with (self.init_scope() if isinstance(value, chainer.Link)
              else contextlib.nullcontext()):
            super().__setattr__(name, value)

    def collect_parameters(self):
        return self

    @property
    def parameters(self):
        return [one.array for one in self.params()]


class MaxPooling2D(MaxPoolingND):

    def __init__(self, *arguments, **options):
        super().__init__(2, *arguments, **options)


_ArgSpec = collections.namedtuple(
    '_ArgSpec', 'args varargs keywords defaults')


def getargspec(function):
    return _ArgSpec(*inspect.getfullargspec(function)[:4])


imp = types.SimpleNamespace(
    load_source=lambda name, path: importlib.machinery.SourceFileLoader(
        name, path).load_module(name),
    new_module=types.ModuleType, reload=importlib.reload)
NINF = -numpy.inf
asscalar = operator.methodcaller('item')

#: Where names were, where they or what is meant are now, and the names.
_MOVED = [
    ('numpy', 'builtins', 'bool complex float int long=int object str '
     'unicode=str'),
    ('numpy', 'numpy', """
        Inf=inf Infinity=inf NaN=nan PINF=inf infty=inf bool8=bool_
        cfloat=complex128 complex_=complex128 float_=float64
        longfloat=longdouble singlecomplex=complex64 string_=bytes_
        unicode_=str_ alltrue=all cumproduct=cumprod mat=asmatrix product=prod
        round_=round row_stack=vstack sometrue=any trapz=trapezoid"""),
    ('numpy', 'numpy.exceptions',
     'AxisError ComplexWarning RankWarning VisibleDeprecationWarning'),
    ('numpy', '', 'math'),
    ('numpy', __name__, 'NINF asscalar'),
    ('PIL.Image', 'PIL.Image.Resampling',
     'ANTIALIAS=LANCZOS CUBIC=BICUBIC LINEAR=BILINEAR'),
    ('matplotlib.cm', 'matplotlib.pyplot', 'get_cmap'),
    ('scipy.misc', 'scipy.special', 'comb factorial factorial2 logsumexp'),
    ('scipy.signal', 'scipy.signal.windows',
     'bartlett blackman gaussian hamming hann kaiser'),
    ('sklearn.externals', '', 'joblib'),
    ('collections', 'collections.abc', ' '.join(collections.abc.__all__)),
    ('fractions', 'math', 'gcd'),
    ('time', 'time', 'clock=process_time'),
    ('inspect', __name__, 'getargspec'),
    ('', __name__, 'imp'),
    ('', __package__, 'pkg_resources=_today'),
    # What Chainer 2 to 7 moved.
    ('chainer', __name__, 'FunctionSet'),
    ('chainer.functions', 'chainer.links', """
        BatchNormalization Bilinear BinaryHierarchicalSoftmax Convolution2D
        Deconvolution2D EmbedID Inception InceptionBN Linear
        MLPConvolution2D NegativeSampling PReLU Parameter"""),
    ('chainer.functions.pooling', 'chainer.functions.pooling',
     'max_pooling_2d=max_pooling_nd'),
    ('chainer.functions.pooling.max_pooling_nd', __name__, 'MaxPooling2D'),
    ('chainer.functions.activation', 'chainer.functions.rnn',
     'lstm slstm tree_lstm'),
    ('chainer.functions.connection', 'chainer.functions.rnn',
     'n_step_gru n_step_lstm n_step_rnn'),
    ('chainer.links.connection', 'chainer.links.rnn', """
        gru lstm mgu n_step_gru n_step_lstm n_step_rnn peephole tree_lstm
        zoneoutlstm"""),
]
#: Full names, and what gives their values.
OLD: Mapping[str, Callable[[], Any]] = {
    'onnx.mapping': _today.onnx_mapping,
    **{f'{was}.{old}'.lstrip('.'): functools.partial(
        pkgutil.resolve_name, f'{home}.{new or old}'.lstrip('.'))
       for was, home, names in _MOVED
       for old, _, new in (name.partition('=') for name in names.split())}}


def _size_of_box(box):
    return box[2] - box[0], box[3]


#: Methods, by their class's full name, and the property A.
METHODS: Mapping[str, Callable[..., Any]] = {
    'chainer.optimizer.Optimizer.zero_grads':
        lambda optimizer: optimizer.target.cleargrads(),
    'chainer.optimizer.Optimizer.clip_grads':
        lambda optimizer, norm: GradientClipping(norm)(optimizer),
    'chainer.optimizer.Optimizer.weight_decay': lambda optimizer, rate: [
        WeightDecay(rate)(None, one) for one in optimizer.target.params()],
    'numpy.ndarray.ptp': numpy.ptp,
    'numpy.ndarray.tostring': numpy.ndarray.tobytes,
    **dict.fromkeys((f'scipy.sparse._base.{kind}.A' for kind in (
        '_spbase', 'spmatrix')), lambda matrix: matrix.toarray()),
    **dict.fromkeys((f'pandas.{home}DataFrame.as_matrix' for home in (
        '', 'core.frame.')), lambda frame, columns=None: (
            frame if columns is None else frame[columns]).to_numpy()),
    'PIL.ImageDraw.ImageDraw.textsize': lambda draw, text, *a, **options:
        _size_of_box(draw.textbbox((0, 0), text, *a, **options)),
    **dict.fromkeys((f'PIL.ImageFont.{font}.getsize' for font in (
        'FreeTypeFont', 'ImageFont')), lambda font, text, *a, **options:
        _size_of_box(font.getbbox(text, *a, **options))),
}


# --- calls that are refused what they took

#: Arguments of Chainer 1: the setting that each has become, and its value.
_SETTINGS: Mapping[str, Callable[[Any], tuple[str, Any]]] = {
    'deterministic': lambda given: ('cudnn_deterministic', given),
    'test': lambda given: ('train', not given),
    'train': lambda given: ('train', given),
    'use_cudnn': lambda given: ('use_cudnn', 'auto' if given else 'never'),
}
#: The argument of today that each has become, and its value.
_ARGUMENTS: Mapping[str, Callable[[Any], tuple[str, Any]]] = {
    'bias': lambda given: ('initial_bias', given),
    'volatile': lambda given: ('requires_grad', given not in ('on', True)),
    'wscale': lambda given: (
        'initialW', chainer.initializers.LeCunNormal(given)),
}


def _of_chainer_1(function, /, *arguments, **options):
    with contextlib.ExitStack() as stack:
        for name in options.keys() & _SETTINGS:
            stack.enter_context(chainer.using_config(
                *_SETTINGS[name](options.pop(name))))
        old = dict(_ARGUMENTS[name](options.pop(name))
                   for name in [*options.keys() & _ARGUMENTS])
        return function(*arguments, **old | {    # today's names win
            name: given for name, given in options.items()
            if given is not None or name not in old})


#: Functions, and arguments of others, by their names.
CALLS = {'array', 'asarray', 'column_stack', 'dstack', 'float', 'fromstring',
         'hasattr', 'hstack', 'int', 'load', 'permutation', 'stack', 'vstack'}
DROPPED = {*_SETTINGS, *_ARGUMENTS, 'newshape'}
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
    ('argument is not supported anymore', _of_chainer_1),
    ('unexpected keyword argument', _of_chainer_1),
)
