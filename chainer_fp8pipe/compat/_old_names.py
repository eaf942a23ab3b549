"""Names that libraries have removed, for code of Chainer's world alone."""
# Chainer's world has stopped: packages and scripts of 2016 to 2020 ask for
# numpy.float, scipy.misc.imread, Image.ANTIALIAS, collections.Iterable or
# array.ptp(), call float() of an array of one element, and make arrays of rows
# of several lengths.  To put all of that back into NumPy would change NumPy
# for everybody in the process, and a stand-in for the module numpy breaks "xp
# is numpy", by which such code tells a GPU from a CPU.  So the code that asks
# is changed, not what it asks: the source of a module is compiled with
# "numpy.float" as a call that gets the attribute and, only where there is
# none, takes it from _old_values; float(x) becomes a call that takes x's
# element where x is an array of one, and numpy.array(x) one of objects where
# NumPy refuses x.  Files, lines and columns stay as they are.
#
# A module gets this if it belongs to Chainer's world, by its name or by what
# it or its importer imports (belongs), and if its source mentions one of the
# names.  The price: such a module is compiled at each start.
#
# The values are those that the libraries gave, so that no number changes; a
# name that a library has again (numpy.bool) is the library's.
import ast
import builtins
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import re
import runpy
import site
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from ._old_values import METHODS, OLD, version

#: Turns this off if its value is ``0``.
SWITCH = 'CHAINER_FP8PIPE_OLD_NAMES'
#: Has the path of the script for its workers.
MAIN = '_CHAINER_FP8PIPE_MAIN'
# Code that lists a module's variables (torch's settings) passes such names.
_ASKED = '__chainer_fp8pipe_old__'

#: What modules have got: pairs of their name and the old one.
used: dict[tuple[str, str], None] = {}


class _Old:
    """Answers a module's code that asks for something old."""

    def __init__(self, user: str) -> None:
        self._user = user

    def attribute(self, owner: Any, name: str) -> Any:
        """``owner.name``, or what it was."""
        # Not by trying: NumPy warns of some names before it has none.
        if (isinstance(owner, types.ModuleType) and name not in vars(owner)
                and (full := f'{owner.__name__}.{name}') in OLD):
            return self._value(full)
        try:
            return getattr(owner, name)
        except AttributeError:
            for kind in type(owner).__mro__:
                full = f'{kind.__module__}.{kind.__qualname__}.{name}'
                if full in METHODS:
                    used[self._user, full] = None
                    return functools.partial(METHODS[full], owner)
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
        """The only element of an array that has one, else the number."""
        if (isinstance(number, numpy.ndarray)
                and number.ndim and number.size == 1):
            used[self._user, 'float() of an array of one element'] = None
            return number.item()
        return number

    def maker(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes arrays, of what NumPy now refuses, too."""
        if any(function is maker for maker in _MAKERS) or type(getattr(
                function, '__self__', None)).__name__ == 'RandomState':
            return functools.partial(self._make, function)
        return function

    def _make(self, function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except (TypeError, ValueError) as error:
            refused = [row for row in _REFUSED if row[0] in str(error)]
            if not refused or not arguments:
                raise
        (_, what, change), = refused
        used[self._user, what] = None
        return function(change(arguments[0]), *arguments[1:], **options)

    def _value(self, full):
        used[self._user, full] = None
        return OLD[full]()


@functools.cache
def _refuses_arrays() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        try:
            float(numpy.ones(1))
        except TypeError:
            return True
    return False


@functools.cache
def _refuses_rows() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            numpy.array([[1], [1, 2]])
        except ValueError:
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
        elif (isinstance(node.func, ast.Attribute)
                and node.func.attr in _MAKER_NAMES and _refuses_rows()):
            node.func = _ask(node.func, 'maker', node.func)
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
            if not prefix and not name.asname and name.name in OLD:
                # Of "import a.b" the code has "a", and asks that for "b".
                name.name = name.name.partition('.')[0]
        old = [name for name in node.names if prefix + name.name in OLD]
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


_NAMES = {name.rpartition('.')[2] for name in (*OLD, *METHODS)}
_MENTIONS = re.compile(rb'\.\s*(?:%s)\b|\b(?:%s)\b' % tuple(
    '|'.join(sorted(names)).encode()
    for names in (_NAMES, _NAMES - {*dir(builtins), 'math'})))
_NUMBERS = re.compile(rb'\b(?:float|int)\(')
#: What makes an array of its first argument.
_MAKERS = (numpy.array, numpy.asarray, numpy.column_stack, numpy.dstack,
           numpy.hstack, numpy.stack, numpy.vstack)
_MAKER_NAMES = {'permutation', *(maker.__name__ for maker in _MAKERS)}
_MAKES = re.compile(rb'\.(?:%s)\(' % '|'.join(_MAKER_NAMES).encode())
#: What an error says, what it is about, and what NumPy took it for.
_REFUSED: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ('inhomogeneous', 'an array of rows of several lengths',
     lambda rows: numpy.array(rows, object)),
    ('arrays to stack', 'a stack of what an iterator gives', list))
#: What an old protoc wrote; protobuf 4 makes no descriptors one by one.
_OLD_PROTOC = re.compile(rb'^ *serialized_pb=_b\(', re.MULTILINE)


def code_of(source: bytes, path: str, name: str,
            namespace: dict[str, Any]) -> types.CodeType | None:
    """Compiles a module's source so that it asks for old names.

    Args:
        source: Of the module.
        path: Of its file.
        name: Of the module, for :func:`report`.
        namespace: In which the code will run.

    Returns:
        The code; None where the source mentions no old name.
    """
    if not (_MENTIONS.search(source)
            or _refuses_arrays() and _NUMBERS.search(source)
            or _refuses_rows() and _MAKES.search(source)):
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
        if _OLD_PROTOC.search(source) and protobuf_refuses():
            build_messages(module, source)
            return
        code = code_of(source, path, module.__name__, vars(module))
    if code is None:
        run()
    else:
        exec(code, vars(module))


def protobuf_refuses() -> bool:
    """Whether protobuf makes no descriptors one by one."""
    return int((version('protobuf') or '0').split('.')[0]) >= 4


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
    if os.environ.get(SWITCH) == '0' or not os.path.isfile(path):
        runpy.run_path(path, run_name='__main__')
        return
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    # Workers of spawn and forkserver run the module that this names.
    main.__spec__ = importlib.util.find_spec(f'{__package__}._worker_main')
    os.environ[MAIN] = os.path.abspath(path)
    run_main(path, vars(main))


def run_main(path: str, namespace: dict[str, Any]) -> None:
    """Runs a script in the namespace of a main module."""
    sys.argv[0] = namespace['__file__'] = path
    _modules.add(namespace['__name__'])
    with open(path, 'rb') as file:
        source = file.read()
    exec(code_of(source, path, namespace['__name__'], namespace)
         or compile(source, path, 'exec', dont_inherit=True), namespace)
