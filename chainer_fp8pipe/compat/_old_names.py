"""Names that libraries have removed, for code of Chainer's world alone."""
# Chainer's world has stopped: packages and scripts of 2016 to 2020 ask for
# numpy.float, scipy.misc.imread, Image.ANTIALIAS, collections.Iterable or
# array.ptp(), and call float() of an array of one element.  To put all of
# that back into NumPy would change NumPy for everybody in the process, and a
# stand-in for the module numpy breaks "xp is numpy", by which such code tells
# a GPU from a CPU.  So the code that asks is changed, not what it asks: the
# source of a module is compiled with "numpy.float" as a call that gets the
# attribute and, only where there is none, takes it from the tables below;
# float(x) becomes a call that takes x's element where x is an array of one.
# Files, lines and columns stay as they are.
#
# A module gets this if it belongs to Chainer's world, by its name or by what
# it or its importer imports (belongs), and if its source mentions one of the
# names.  The price: such a module is compiled at each start.
#
# The values are those that the libraries gave, so that no number changes; a
# name that a library has again (numpy.bool) is the library's.
import ast
import builtins
import collections.abc
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.resources
import importlib.util
import inspect
import math
import os
import re
import runpy
import site
import sys
import sysconfig
import time
import types
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import numpy

#: Turns this off if its value is ``0``.
SWITCH = 'CHAINER_FP8PIPE_OLD_NAMES'
_ASKED = '_chainer_fp8pipe_old'

#: By module: pairs of an old name and the one of the same module for it.
_RENAMED = {
    'numpy': '''
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


# --- onnx.mapping until onnx 1.19

@functools.cache
def _mapping() -> types.ModuleType:
    from onnx import helper
    numbers = {dtype: helper.np_dtype_to_tensor_dtype(dtype)
               for dtype in map(numpy.dtype, '?bBhHiIlLqQefdFDO')}
    mapping = types.ModuleType('onnx.mapping')
    vars(mapping).update(
        NP_TYPE_TO_TENSOR_TYPE=numbers,
        TENSOR_TYPE_TO_NP_TYPE={n: dtype for dtype, n in numbers.items()},
        STORAGE_TENSOR_TYPE_TO_FIELD={
            n: helper.tensor_dtype_to_field(n) for n in numbers.values()})
    return mapping


# --- pkg_resources until setuptools 81

class ResolutionError(Exception):
    """pkg_resources.ResolutionError."""


class _WorkingSet:
    def require(self, *requirements):
        # Few need it, and it takes as long as a third of NumPy.
        from packaging.requirements import Requirement
        for wanted in map(Requirement, requirements):
            try:
                found = metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                found = None
            if found is None or not wanted.specifier.contains(
                    found, prereleases=True):
                raise ResolutionError(f'{wanted}, found {found}')


def _resource_filename(package, name):
    return str(importlib.resources.files(package).joinpath(name))


@functools.cache
def _pkg_resources() -> types.ModuleType:
    module = types.ModuleType('pkg_resources')
    vars(module).update(
        DistributionNotFound=metadata.PackageNotFoundError,
        ResolutionError=ResolutionError, WorkingSet=_WorkingSet,
        get_distribution=metadata.distribution,
        require=_WorkingSet().require, resource_filename=_resource_filename)
    return module


#: Full names, and what gives their values.
_OLD: Mapping[str, Callable[[], Any]] = {
    **{f'numpy.{name}': functools.partial(lambda value: value, value)
       for name, value in {
           'NINF': -numpy.inf, 'NZERO': -0.0, 'PZERO': 0.0,
           'asfarray': _asfarray, 'asscalar': lambda a: a.item(),
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
    'onnx.mapping': _mapping,
    **{f'onnx.mapping.{name}': functools.partial(
        lambda name: getattr(_mapping(), name), name)
       for name in ('NP_TYPE_TO_TENSOR_TYPE', 'TENSOR_TYPE_TO_NP_TYPE',
                    'STORAGE_TENSOR_TYPE_TO_FIELD')},
    'pkg_resources': _pkg_resources,
    'fractions.gcd': lambda: math.gcd,
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


#: Methods, by their class's full name.
_METHODS: Mapping[str, Callable[..., Any]] = {
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
#: What modules have got: pairs of their name and the old one.
used: dict[tuple[str, str], None] = {}


class _Old:
    """What the code of a module asks."""

    def __init__(self, user: str) -> None:
        self._user = user

    def attribute(self, owner: Any, name: str) -> Any:
        """``owner.name``, or what it was."""
        # Not by trying: NumPy warns of some names before it has none.
        if (isinstance(owner, types.ModuleType) and name not in vars(owner)
                and (full := f'{owner.__name__}.{name}') in _OLD):
            return self._value(full)
        try:
            return getattr(owner, name)
        except AttributeError:
            for kind in type(owner).__mro__:
                full = f'{kind.__module__}.{kind.__qualname__}.{name}'
                if full in _METHODS:
                    used[self._user, full] = None
                    return functools.partial(_METHODS[full], owner)
            raise

    def imported(self, module: str, name: str) -> Any:
        """What ``from module import name`` gives, or gave."""
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
        full = f'{module}.{name}'
        with contextlib.suppress(ImportError):
            return importlib.import_module(full)
        return self._value(full)

    def module(self, name: str) -> types.ModuleType:
        """What ``import name`` gives, or gave."""
        try:
            return importlib.import_module(name)
        except ImportError:
            return self._value(name)

    def element(self, number: Any) -> Any:
        """What float() or int() gets: an array's only element, or itself."""
        if (isinstance(number, numpy.ndarray)
                and number.ndim and number.size == 1):
            used[self._user, 'float() of an array of one element'] = None
            return number.item()
        return number

    def _value(self, full):
        used[self._user, full] = None
        return _OLD[full]()


@functools.cache
def _refuses_arrays() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        try:
            float(numpy.ones(1))
        except TypeError:
            return True
    return False


class _Asking(ast.NodeTransformer):
    """Has code ask an :class:`_Old` of the name ``_ASKED``."""

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr not in _NAMES or not isinstance(node.ctx, ast.Load):
            return node
        return _ask(node, 'attribute', node.value, ast.Constant(node.attr))

    def visit_Call(self, node):
        self.generic_visit(node)
        if (isinstance(node.func, ast.Name) and len(node.args) == 1
                and node.func.id in ('float', 'int') and not node.keywords
                and not isinstance(node.args[0], ast.Starred)
                and _refuses_arrays()):
            node.args = [_ask(node, 'element', node.args[0])]
        return node

    def visit_Import(self, node):
        return self._replace(node, '', 'module')

    def visit_ImportFrom(self, node):
        if node.level:
            return node
        return self._replace(node, f'{node.module}.', 'imported', node.module)

    def _replace(self, node, prefix, question, *of):
        """An import statement without what is old, which is asked for."""
        for name in node.names:
            if not prefix and not name.asname and name.name in _OLD:
                # Of "import a.b" the code has "a", and asks that for "b".
                name.name = name.name.partition('.')[0]
        old = [name for name in node.names if prefix + name.name in _OLD]
        if not old:
            return node
        node.names = [name for name in node.names if name not in old]
        return [*([node] if node.names else []), *(
            _at(node, ast.Assign(
                [ast.Name(name.asname or name.name, ast.Store())],
                _ask(node, question, *map(ast.Constant, (*of, name.name)))))
            for name in old)]

    def visit_MatchValue(self, node):
        return node


def _ask(node, question, *arguments):
    return _at(node, ast.Call(
        ast.Attribute(ast.Name(_ASKED, ast.Load()), question, ast.Load()),
        list(arguments), []))


def _at(node, new):
    return ast.fix_missing_locations(ast.copy_location(new, node))


_NAMES = {name.rpartition('.')[2] for name in (*_OLD, *_METHODS)}
_MENTIONS = re.compile(rb'\.\s*(?:%s)\b|\b(?:%s)\b' % tuple(
    '|'.join(sorted(names)).encode()
    for names in (_NAMES, _NAMES - {*dir(builtins), 'math'})))
_NUMBERS = re.compile(rb'\b(?:float|int)\(')
#: What an old protoc wrote; protobuf 4 makes no descriptors one by one.
_OLD_PROTOC = re.compile(rb'^ *serialized_pb=_b\(', re.MULTILINE)


def code_of(source: bytes, path: str, name: str,
            namespace: dict[str, Any]) -> types.CodeType | None:
    """What is to be run in place of a module's own code.

    Args:
        source: Of the module.
        path: Of its file.
        name: Of the module, for :func:`report`.
        namespace: In which the code will run.

    Returns:
        The code, or None: its own will do.
    """
    if not (_MENTIONS.search(source)
            or _refuses_arrays() and _NUMBERS.search(source)):
        return None
    namespace[_ASKED] = _Old(name)
    return compile(_Asking().visit(ast.parse(source, path)), path, 'exec',
                   dont_inherit=True)


def load(module: types.ModuleType, run: Callable[[], None]) -> None:
    """Runs a module's code, which may ask for old names.

    Args:
        module: To be filled.
        run: Runs its code as it is.
    """
    loader = module.__loader__
    code = None
    if isinstance(loader, importlib.machinery.SourceFileLoader):
        path = loader.get_filename(module.__name__)
        source = loader.get_data(path)
        if _OLD_PROTOC.search(source) and _protobuf_refuses():
            build_messages(module, source)
            return
        code = code_of(source, path, module.__name__, vars(module))
    if code is None:
        run()
    else:
        exec(code, vars(module))


def _protobuf_refuses():
    try:
        version = metadata.version('protobuf')
    except metadata.PackageNotFoundError:
        return False
    return int(version.split('.')[0]) >= 4


def build_messages(module: types.ModuleType, source: bytes) -> None:
    """Fills a module that an old protoc has written with its messages.

    protobuf 4 makes no descriptors one by one, as these files do; it reads
    the same serialized text whole.
    """
    from google.protobuf import descriptor_pool
    from google.protobuf.internal import builder
    text: Any = next(
        keyword.value for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) for keyword in node.keywords
        if keyword.arg == 'serialized_pb')
    serialized = ast.literal_eval(text.args[0])     # of _b(text)
    names = vars(module)
    file = names['DESCRIPTOR'] = descriptor_pool.Default().AddSerializedFile(
        serialized.encode('latin1'))
    builder.BuildMessageAndEnumDescriptors(file, names)
    builder.BuildTopDescriptorsAndMessages(file, module.__name__, names)


# --- which modules belong to Chainer's world

_IMPORTS_CHAINER = re.compile(
    rb'^\s*(?:import|from)\s+(?:chainer|onnx_chainer)', re.MULTILINE)
_NOT = {'chainer', 'chainermn', 'chainerx', 'onnx_chainer', 'chainer_fp8pipe',
        'chainer_fp8pipe_startup'}
_INSTALLED = tuple(
    os.path.join(folder, '') for folder in
    {*(sysconfig.get_path(kind) for kind in ('stdlib', 'purelib', 'platlib')),
     *site.getsitepackages(), site.getusersitepackages()})


def _is_installed(path: str | None) -> bool:
    return path is not None and path.startswith(_INSTALLED)


_packages: set[str] = set()
_modules: set[str] = set()


def belongs(name: str, spec: importlib.machinery.ModuleSpec,
            importer: Mapping[str, Any]) -> bool:
    """Whether a module belongs to Chainer's world, which is being imported.

    Args:
        name: Of the module.
        spec: Where it was found.
        importer: The globals of the code that imports it.
    """
    if os.environ.get(SWITCH) == '0':
        return False
    package = name.partition('.')[0]
    if package in _NOT or not isinstance(
            spec.loader, importlib.machinery.SourceFileLoader):
        return False
    path = spec.origin or ''
    installed = _is_installed(path)
    if 'chainer' in package or package in _packages:
        found = True
    elif installed and _is_installed(importer.get('__file__')):
        return False        # what numpy imports is not read
    else:
        found = (not installed and importer.get('__name__') in _modules
                 or bool(_IMPORTS_CHAINER.search(spec.loader.get_data(path))))
    if found:
        _modules.add(name)
        if installed:
            _packages.add(package)
    return found


def run_path(path: str) -> None:
    """Runs a script as Python does; it and its helpers get old names."""
    if os.environ.get(SWITCH) != '0' and os.path.isfile(path):
        main = types.ModuleType('__main__')
        main.__file__ = path
        _modules.add('__main__')
        with open(path, 'rb') as file:
            code = code_of(file.read(), path, '__main__', vars(main))
        if code is not None:
            sys.argv[0] = path
            sys.modules['__main__'] = main
            exec(code, vars(main))
            return
    runpy.run_path(path, run_name='__main__')
