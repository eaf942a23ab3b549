"""Has code of Chainer's world get what NumPy, Chainer and others removed."""
# Attributes, calls and assignments of the kinds in the tables ask a function
# of this module, which does what was written and, only where that fails, what
# was meant; imports ask by an __import__ among the code's builtins.  Files,
# lines and columns stay.  So do numbers: the values are those that libraries
# gave, and a name that one has again (numpy.bool) is the library's.
import ast
import builtins
import collections.abc
import contextlib
import copy
import functools
import importlib
import importlib.machinery
import operator
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chainer
import numpy
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND
from chainer.optimizer_hooks import GradientClipping, WeightDecay

from . import _today

# --- names


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


def _called_as(kind):
    """A class of Chainer's functions that are called, as until Chainer 2."""
    def call(self, *inputs):
        outputs = copy.copy(self).apply(inputs)
        return outputs[0] if len(outputs) == 1 else outputs
    return type(kind.__name__, (kind,), {'__call__': call})


MaxPooling2D = functools.partial(_called_as(MaxPoolingND), 2)
NINF = -numpy.inf
asscalar = operator.methodcaller('item')
imp = types.SimpleNamespace(
    load_source=lambda name, path: importlib.machinery.SourceFileLoader(
        name, path).load_module(name),
    new_module=types.ModuleType, reload=importlib.reload)

#: Where names were, where they or what is meant are now, and the names.
_MOVED = [
    ('numpy', 'builtins', 'bool complex float int long=int object str '
     'unicode=str'),
    ('numpy', 'numpy', """
        Inf=inf Infinity=inf NaN=nan PINF=inf infty=inf bool8=bool_
        cfloat=complex128 complex_=complex128 float_=float64
        longfloat=longdouble singlecomplex=complex64 string_=bytes_
        unicode_=str_ int0=intp uint0=uintp in1d=isin alltrue=all
        cumproduct=cumprod mat=asmatrix product=prod round_=round
        row_stack=vstack sometrue=any trapz=trapezoid"""),
    ('numpy', 'numpy.exceptions',
     'AxisError ComplexWarning RankWarning VisibleDeprecationWarning'),
    ('numpy', '', 'math'),
    ('numpy', __name__, 'NINF asscalar'),
    ('numpy.lib', 'numpy', 'pad'),
    ('PIL.Image', 'PIL.Image',
     'ANTIALIAS=LANCZOS CUBIC=BICUBIC LINEAR=BILINEAR'),
    ('matplotlib.cm', 'matplotlib.pyplot', 'get_cmap'),
    ('scipy.misc', 'scipy.special', 'comb factorial factorial2 logsumexp'),
    ('scipy.signal', 'scipy.signal.windows',
     'bartlett blackman gaussian hamming hann kaiser'),
    ('sklearn.datasets', 'sklearn.datasets', 'fetch_mldata=fetch_openml'),
    ('sklearn.externals', '', 'joblib'),
    ('collections', 'collections.abc', ' '.join(collections.abc.__all__)),
    ('fractions', 'math', 'gcd'),
    ('time', 'time', 'clock=process_time'),
    ('inspect', 'inspect', 'getargspec=getfullargspec'),
    ('', __name__, 'imp'),
    ('', __package__, 'pkg_resources=_today'),
    (_today.__name__, 'packaging.version', 'parse_version=parse'),
    # What Chainer 2 to 7 moved.
    ('chainer', __name__, 'FunctionSet'),
    ('chainer.functions', 'chainer.links', """
        BatchNormalization Bilinear BinaryHierarchicalSoftmax Convolution2D
        Deconvolution2D EmbedID Inception InceptionBN Linear
        MLPConvolution2D NegativeSampling PReLU Parameter"""),
    ('chainer.functions', __name__, 'MaxPooling2D'),
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
_OLD: Mapping[str, Callable[[], Any]] = {
    'onnx.mapping': _today.onnx_mapping,
    **{f'chainer.functions.{kind.__name__}':
       functools.partial(_called_as, kind)
       for kind in chainer.FunctionNode.__subclasses__()
       if kind.__module__.startswith('chainer.functions.')},
    **{f'{was}.{old}'.lstrip('.'): functools.partial(
        pkgutil.resolve_name, f'{home}.{new or old}'.lstrip('.'))
       for was, home, names in _MOVED
       for old, _, new in (name.partition('=') for name in names.split())}}
_ASKED_FOR = {*_OLD, *(name.rpartition('.')[0] for name in _OLD)}


#: Methods and properties, by their class's full name.
_METHODS: Mapping[str, Any] = {
    'chainer.optimizer.Optimizer.zero_grads':
        lambda optimizer: optimizer.target.cleargrads(),
    'chainer.optimizer.Optimizer.clip_grads':
        lambda optimizer, norm: GradientClipping(norm)(optimizer),
    'chainer.optimizer.Optimizer.weight_decay': lambda optimizer, rate: [
        WeightDecay(rate)(None, one) for one in optimizer.target.params()],
    'chainer.variable.Variable.volatile': property(
        lambda variable: not variable.requires_grad),
    'numpy.ndarray.ptp': numpy.ptp,
    'numpy.ndarray.tostring': numpy.ndarray.tobytes,
    **dict.fromkeys((f'pandas.{home}DataFrame.as_matrix' for home in (
        '', 'core.frame.')), lambda frame: frame.to_numpy()),
    **dict.fromkeys((f'scipy.sparse._base.{kind}.A' for kind in (
        '_spbase', 'spmatrix')), property(lambda matrix: matrix.toarray())),
}
_NAMES = {name.rpartition('.')[2] for name in (*_OLD, *_METHODS)}


def attribute(owner: Any, name: str) -> Any:
    """``owner.name``, or what it was."""
    # Not by trying: NumPy warns of some names before it has none.
    if (isinstance(owner, types.ModuleType) and name not in vars(owner)
            and (full := f'{owner.__name__}.{name}') in _OLD):
        return _OLD[full]()
    try:
        return getattr(owner, name)
    except AttributeError:
        for kind in type(owner).__mro__:
            full = f'{kind.__module__}.{kind.__qualname__}.{name}'
            if full in _METHODS:
                return _METHODS[full].__get__(owner, kind)
        raise


def imported(name: str, namespace: Any = None, local: Any = None,
             names: Any = (), level: int = 0) -> Any:
    """``__import__``, also of what is old and from what has old names."""
    if level or name not in _ASKED_FOR:
        return __import__(name, namespace, local, names, level)
    # Not the old ones, as above.
    here = [one for one in names or () if f'{name}.{one}' not in _OLD]
    try:
        __import__(name, namespace, local, here)
        module = sys.modules[name]
    except ImportError:
        if name not in _OLD:
            raise
        module = _OLD[name]()
        if '.' in name:         # for "import a.b as c"
            sys.modules[name] = module
    if not names:
        return sys.modules[name.partition('.')[0]] if '.' in name else module
    asked: Any = _today.asking(name, functools.partial(attribute, module))
    public = [one for one in vars(module) if not one.startswith('_')]
    asked.__all__ = [*getattr(module, '__all__', public), *(
        one for full in _OLD for home, _, one in [full.rpartition('.')]
        if home == name and not hasattr(builtins, one))]
    return asked


def has(owner: Any, name: str) -> bool:
    """``hasattr``; a name that Chainer has since given as None is none."""
    return hasattr(owner, name) and not (
        name in ('gamma', 'beta') and getattr(owner, name) is None)


# --- what is refused

#: Old arguments: the setting or argument that each has become, and its value.
_DROPPED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    'bias': ('initial_bias', lambda given: given),
    'deterministic': ('cudnn_deterministic', bool),
    'invoke_before_training': ('call_before_training', bool),
    'newshape': ('shape', lambda given: given),
    'normed': ('density', bool),
    'test': ('train', operator.not_),
    'train': ('train', bool),
    'use_cudnn': ('use_cudnn', lambda given: 'auto' if given else 'never'),
    'volatile': ('requires_grad', lambda given: given not in ('on', True)),
    'wscale': ('initialW', chainer.initializers.LeCunNormal),
}


def _of_old(function, /, *arguments, trigger=None, **options):
    with contextlib.ExitStack() as stack:
        for old in options.keys() & _DROPPED:
            name, value = _DROPPED[old]
            given = value(options.pop(old))
            if hasattr(chainer.config, name):
                stack.enter_context(chainer.using_config(name, given))
            elif options.get(name) is None:     # today's names win
                options[name] = given
        made = function(*arguments, **options)
    if trigger is not None:         # of a snapshot
        made.trigger = trigger
    return made


#: Functions that are asked about, and those that get such an argument.
_CALLS = {'array', 'asarray', 'column_stack', 'dropout', 'dstack', 'float',
          'fromstring', 'hstack', 'int', 'load', 'permutation', 'stack',
          'vstack'}
_ARGUMENTS = {*_DROPPED, 'trigger'}
#: What an error says, and the call as it was meant.
_REFUSED: tuple[tuple[str, Callable[..., Any]], ...] = (
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
    ("'Loader'", lambda function, stream: importlib.import_module(
        'yaml').safe_load(stream)),
    ('dropout() takes from 1 to 2', lambda function, x, ratio, train:
     _of_old(function, x, ratio, train=train)),
    ('argument is not supported anymore', _of_old),
    ('has been removed since Chainer', _of_old),
    ('unexpected keyword argument', _of_old),
)


def called(function: Any) -> Any:
    """A function that takes what it, or its library, now refuses."""
    home = getattr(function, '__module__', None) or type(
        getattr(function, '__self__', None)).__module__
    if home.partition('.')[0] not in ('builtins', 'chainer', 'numpy', 'yaml'):
        return function
    return functools.partial(_call, function)


def _call(function, /, *arguments, **options):
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError) as error:
        for said, call in _REFUSED:
            if said in str(error):
                return call(function, *arguments, **options)
        raise


def stored(value: Any, owner: Any, place: Any) -> None:
    """``owner[place] = value``, of an array of one element as well."""
    try:
        owner[place] = value
    except (TypeError, ValueError):
        if not (isinstance(owner, numpy.ndarray)
                and isinstance(value, numpy.ndarray) and value.size == 1):
            raise
        owner[place] = value.item()


# --- code

class _Builtins(dict):
    """Those of edited code; others are Python's, as they are now."""

    def __missing__(self, name: str) -> Any:
        return vars(builtins)[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(builtins, name)


_BUILTINS = _Builtins({'__import__': imported, 'hasattr': has, **{
    f'__old_{one.__name__}__': one for one in (attribute, called, stored)}})


class _Asking(ast.NodeTransformer):

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr not in _NAMES or not isinstance(node.ctx, ast.Load):
            return node
        return _ask(node, attribute, node.value, ast.Constant(node.attr))

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, 'id', getattr(node.func, 'attr', None))
        if name in _CALLS or _ARGUMENTS & {one.arg for one in node.keywords}:
            node.func = _ask(node.func, called, node.func)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        target = node.targets[0]
        if (len(node.targets) > 1 or not isinstance(target, ast.Subscript)
                or isinstance(node.value, ast.Constant)
                or any(isinstance(part, (ast.Slice, ast.Starred))
                       for part in ast.walk(target.slice))):
            return node
        return ast.copy_location(ast.Expr(_ask(
            node, stored, node.value, target.value, target.slice)), node)

    def _pattern(self, node):
        return node

    visit_MatchValue = visit_MatchClass = visit_MatchMapping = _pattern


def _ask(node, question, *arguments):
    return ast.copy_location(ast.Call(ast.Name(
        f'__old_{question.__name__}__', ast.Load()), [*arguments], []), node)


def code_of(path: str, namespace: dict[str, Any]) -> types.CodeType:
    """Compiles a file, for a namespace whose builtins it sets, to ask so."""
    namespace['__builtins__'] = _BUILTINS
    source = Path(path).read_bytes()
    with contextlib.suppress(RecursionError):   # of sums of hundreds
        tree = _Asking().visit(ast.parse(source, path))
        return compile(ast.fix_missing_locations(tree), path, 'exec',
                       dont_inherit=True)
    return compile(source, path, 'exec', dont_inherit=True)
