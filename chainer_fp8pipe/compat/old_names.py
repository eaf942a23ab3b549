"""What libraries have removed, for code of Chainer's world alone."""
# Chainer's world has stopped: packages and scripts of 2016 to 2020 ask for
# numpy.float, scipy.misc.imread, Image.ANTIALIAS, collections.Iterable or
# array.ptp(), call float() of an array of one element, and make arrays of rows
# of several lengths.  To put all of that back into NumPy would change NumPy
# for everybody in the process, and a stand-in for the module numpy breaks "xp
# is numpy", by which such code tells a GPU from a CPU.  So the code that asks
# is changed, not what it asks: the source of a module is compiled with
# "numpy.float" as a call that gets the attribute and, only where there is
# none, takes it from _old_values; float(x) becomes a call that takes x's
# element where x is an array of one; and a call that NumPy, PyYAML or Chainer
# refuses with a known message is made again as it was meant.  Files, lines
# and columns stay as they are.
#
# A module gets this if it is a script under "run" or a helper of one, or of a
# package that imports or requires Chainer (_belongs).  For that the method is
# replaced by which Python gets a module's code from its file.  The price: such
# a module is compiled at each start.
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
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import numpy

from ._old_values import METHODS, OLD, REFUSED
from ._today import build_messages

#: Turns this off if its value is ``0``.
SWITCH = 'CHAINER_FP8PIPE_OLD_NAMES'
#: Has the path of the script for its workers.
MAIN = '_CHAINER_FP8PIPE_MAIN'
#: A builtin, which no module's list of its own names shows.
_ASKED = '__chainer_fp8pipe_old__'

#: What modules have got: pairs of their name and the old one.
used: dict[tuple[str, str], None] = {}


class _Old:
    """Answers a module's code, which gives its name and what it wants."""

    def attribute(self, user: str, owner: Any, name: str) -> Any:
        """``owner.name``, or what it was."""
        # Not by trying: NumPy warns of some names before it has none.
        if (isinstance(owner, types.ModuleType) and name not in vars(owner)
                and (full := f'{owner.__name__}.{name}') in OLD):
            return self._value(user, full)
        try:
            return getattr(owner, name)
        except AttributeError:
            for kind in type(owner).__mro__:
                full = f'{kind.__module__}.{kind.__qualname__}.{name}'
                if full in METHODS:
                    used[user, full] = None
                    found = functools.partial(METHODS[full], owner)
                    return found() if name == 'A' else found
            raise

    def imported(self, user: str, module: str, name: str) -> Any:
        """What ``from module import name`` gives, or gave."""
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
        full = f'{module}.{name}'
        with contextlib.suppress(ImportError):
            return importlib.import_module(full)
        return self._value(user, full)

    def module(self, user: str, name: str) -> types.ModuleType:
        """What ``import name`` gives, or gave."""
        try:
            return importlib.import_module(name)
        except ImportError:
            return self._value(user, name)

    def _value(self, user, full):
        used[user, full] = None
        return OLD[full]()

    def element(self, user: str, number: Any) -> Any:
        """The only element of an array that has one, else the number."""
        if (isinstance(number, numpy.ndarray)
                and number.ndim and number.size == 1):
            used[user, 'a number of an array of one element'] = None
            return number.item()
        return number

    def stored(self, user: str, value: Any, owner: Any, place: Any) -> None:
        """``owner[place] = value``, of an array of one element as well."""
        try:
            owner[place] = value
        except (TypeError, ValueError):
            if not isinstance(owner, numpy.ndarray):
                raise
            element = self.element(user, value)
            if element is value:
                raise
            owner[place] = element

    def has(self, user: str, owner: Any, name: str) -> bool:
        """``hasattr()`` of a name that Chainer has since given as None."""
        return getattr(owner, name, None) is not None

    def called(self, user: str, function: Any) -> Any:
        """A function that takes what it, or its library, now refuses."""
        home = getattr(function, '__module__', None) or type(
            getattr(function, '__self__', None)).__module__
        if home.partition('.')[0] not in ('chainer', 'numpy', 'yaml'):
            return function
        return functools.partial(self._call, user, function)

    def _call(self, user, function, /, *arguments, **options):
        try:
            return function(*arguments, **options)
        except (TypeError, ValueError) as error:
            for said, what, call in REFUSED:
                if said in str(error):
                    used[user, what] = None
                    return call(function, *arguments, **options)
            raise

    def messages(self, user: str, names: dict[str, Any],
                 serialized: bytes) -> None:
        """Makes the messages of a module that an old protoc has written."""
        used[user, 'descriptors made one by one'] = None
        build_messages(names, serialized)


class _Asking(ast.NodeTransformer):
    """Has code ask an :class:`_Old` of the name ``_ASKED``."""

    def __init__(self, tree):
        nodes = list(ast.walk(tree))
        modules = {alias.asname or alias.name for node in nodes
                   if isinstance(node, ast.Import) for alias in node.names}
        # "np.float = float": the module has a remedy of its own.
        self._remedied = {
            node.attr for node in nodes if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id in modules}
        self._own = {getattr(node, 'name', None) or getattr(
            node, 'id', None) for node in nodes if isinstance(
                node, (ast.FunctionDef, ast.ClassDef)) or isinstance(
                    getattr(node, 'ctx', None), ast.Store)} | {
                        node.arg for node in nodes if isinstance(node, ast.arg)
                    } | {alias.asname or alias.name for node in nodes
                         if isinstance(node, ast.ImportFrom)
                         for alias in node.names}
        self._read = {node.id for node in nodes if isinstance(node, ast.Name)}

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if (node.attr not in _NAMES - self._remedied
                or not isinstance(node.ctx, ast.Load)):
            return node
        return _ask(node, 'attribute', node.value, ast.Constant(node.attr))

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, 'id', None)
        given = [keyword.arg for keyword in node.keywords]
        if name in {'float', 'int', 'hasattr'} - self._own:
            if len(node.args) == 1 and not given and not isinstance(
                    node.args[0], ast.Starred):
                node.args = [_ask(node, 'element', node.args[0])]
            elif name == 'hasattr' and len(node.args) == 2 and getattr(
                    node.args[1], 'value', None) in ('gamma', 'beta'):
                return _ask(node, 'has', *node.args)
        elif getattr(node.func, 'attr', None) in _CALLS or (
                _DROPPED & {*given}):
            node.func = _ask(node.func, 'called', node.func)
        elif 'newshape' in given and len(node.args) == 1:
            shape = node.keywords.pop(given.index('newshape'))
            node.args.append(shape.value)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        target = node.targets[0]
        if (len(node.targets) > 1 or not isinstance(target, ast.Subscript)
                or isinstance(node.value, ast.Constant)
                or any(isinstance(part, (ast.Slice, ast.Starred))
                       for part in ast.walk(target.slice))):
            return node
        return _at(node, ast.Expr(_ask(
            node, 'stored', node.value, target.value, target.slice)))

    def visit_Import(self, node):
        return self._replace(node, '', 'module')

    def visit_ImportFrom(self, node):
        if node.level:
            return node
        if node.names[0].name == '*':
            old = [ast.alias(name) for name in sorted(
                self._read - self._own - {*dir(builtins)})
                if f'{node.module}.{name}' in OLD]
            return [node, *(self._replace(_at(node, ast.ImportFrom(
                node.module, old, 0)), f'{node.module}.', 'imported',
                node.module) if old else ())]
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

    def _pattern(self, node):
        return node

    visit_MatchValue = visit_MatchClass = visit_MatchMapping = _pattern


def _ask(node, question, *arguments):
    return _at(node, ast.Call(
        ast.Attribute(ast.Name(_ASKED, ast.Load()), question, ast.Load()),
        [ast.Name('__name__', ast.Load()), *arguments], []))


def _at(node, new):
    return ast.fix_missing_locations(ast.copy_location(new, node))


_NAMES = {name.rpartition('.')[2] for name in (*OLD, *METHODS)}
#: Functions that are refused what they took, and arguments that are.
_CALLS = {'array', 'asarray', 'column_stack', 'dstack', 'fromstring', 'hstack',
          'load', 'permutation', 'stack', 'vstack'}
_DROPPED = {'deterministic', 'test', 'train', 'use_cudnn', 'volatile'}
_MENTIONS = re.compile(
    r'\b(?:{})\b|\.\s*(?:{})\b|\b(?:float|int)\(|\]\s*=|\bnewshape\b'
    r'|\b(?:{})\s*=|gamma|beta|\bserialized_pb\b'.format(
        '|'.join(sorted(_NAMES - {*dir(builtins), 'math', 'A'})),
        '|'.join(sorted(_NAMES | _CALLS)),
        '|'.join(sorted(_DROPPED))).encode())


def _code_of(source: bytes, path: str) -> types.CodeType | None:
    """Compiles a module's source so that it asks for what is old."""
    if not _MENTIONS.search(source):
        return None
    tree = ast.parse(source, path)
    tree = _messages_of(tree) or _Asking(tree).visit(tree)
    return compile(ast.fix_missing_locations(tree), path, 'exec',
                   dont_inherit=True)


def _messages_of(tree):
    """A module of protoc's: the messages that it imports, and its own."""
    text = next((keyword.value for node in tree.body
                 if isinstance(node, ast.Assign)
                 and isinstance(node.value, ast.Call)
                 for keyword in node.value.keywords
                 if keyword.arg == 'serialized_pb'), None)
    if text is None or int(metadata.version('protobuf').split('.')[0]) < 4:
        return None
    value = ast.literal_eval(text.args[0] if isinstance(
        text, ast.Call) else text)          # _b('...') or b'...'
    serialized = value if isinstance(value, bytes) else value.encode('latin1')
    tree.body = [*(node for node in tree.body if isinstance(
        node, (ast.Import, ast.ImportFrom)) and any(
            alias.name.endswith('_pb2') for alias in node.names)),
        ast.Expr(_ask(tree.body[0], 'messages', ast.Call(
            ast.Name('globals', ast.Load()), [], []),
            ast.Constant(serialized)))]
    return tree


# --- which modules belong to Chainer's world

_IMPORTS_CHAINER = re.compile(
    rb'^\s*(?:import|from)\s+(?:chainer|chainermn|onnx_chainer)\b',
    re.MULTILINE)
_NOT = {'chainer', 'chainermn', 'chainerx', 'onnx_chainer', 'chainer_fp8pipe'}
_INSTALLED = tuple(
    os.path.join(folder, '') for folder in
    {*(sysconfig.get_path(kind) for kind in ('stdlib', 'purelib', 'platlib')),
     *site.getsitepackages(), site.getusersitepackages()})
#: Installed packages, and modules that are not installed.
_packages: set[str] = set()
_modules: set[str] = set()


def _belongs(name: str, path: str, importer: Mapping[str, Any]) -> bool:
    """Whether a module of this path, which is being imported, does.

    Args:
        name: Of the module.
        path: Of its file.
        importer: The globals of the code that imports it.
    """
    package = name.partition('.')[0]
    if package in _NOT:
        return False
    if package in _packages:
        return True
    installed = path.startswith(_INSTALLED)
    if installed and (importer.get('__file__') or '').startswith(
            _INSTALLED) and importer.get(
                '__name__', '').partition('.')[0] not in _packages:
        return False        # what numpy imports is not read
    with open(path, 'rb') as file:
        found = (not installed and importer.get('__name__') in _modules
                 or installed and _requires_chainer(package)
                 or bool(_IMPORTS_CHAINER.search(file.read())))
    if found:
        (_packages if installed else _modules).add(
            package if installed else name)
    return found


def _requires_chainer(package):
    try:
        required = metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return False
    return any(re.match(r'chainer(?![\w.-])', one) for one in required)


def _importer(frame):
    """The globals of the code whose import statement led to a frame."""
    while frame is not None and frame.f_globals.get(
            '__name__', '').partition('.')[0] == 'importlib':
        frame = frame.f_back
    return frame.f_globals if frame else {}


def install() -> None:
    """Has modules of Chainer's world compiled so; import chainer calls it."""
    if os.environ.get(SWITCH) == '0' or hasattr(builtins, _ASKED):
        return
    setattr(builtins, _ASKED, _Old())
    loader: Any = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    @functools.wraps(get_code)
    def get_code_that_asks(self, name):
        path, code = self.get_filename(name), None
        if _belongs(name, path, _importer(sys._getframe(1))):
            code = _code_of(self.get_data(path), path)
        return code or get_code(self, name)

    loader.get_code = get_code_that_asks


def run_path(path: str) -> None:
    """Runs a script as Python does; it and its helpers get old names."""
    install()
    if not hasattr(builtins, _ASKED) or not os.path.isfile(path):
        runpy.run_path(path, run_name='__main__')
        return
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    # Workers of spawn and forkserver run the module that this names.
    main.__spec__ = importlib.util.find_spec(f'{__package__}._worker_main')
    os.environ[MAIN] = os.path.abspath(path)
    run_main(path, vars(main))


def run_main(path: str, namespace: dict[str, Any]) -> None:
    """Runs a script in the namespace of a main module."""
    install()
    sys.argv[0] = namespace['__file__'] = path
    _modules.add(namespace['__name__'])
    with open(path, 'rb') as file:
        source = file.read()
    exec(_code_of(source, path)
         or compile(source, path, 'exec', dont_inherit=True), namespace)
