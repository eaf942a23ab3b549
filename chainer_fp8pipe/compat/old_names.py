"""What libraries have removed, for code of Chainer's world alone."""
# Code of 2016 to 2020 asks for numpy.float, Image.ANTIALIAS or array.ptp(),
# calls float() of an array of one element, and makes arrays of rows of several
# lengths.  To put that back into NumPy would change it for everybody in the
# process, and a stand-in for the module breaks "xp is numpy", by which such
# code tells a GPU from a CPU.  So the code that asks is changed: its attribute
# names, imports, calls and assignments of the kinds in _old_values ask an
# _Old, which does what was written and, only where that fails, what was meant.
# Files, lines and columns stay as they are.
#
# A module gets this if it is a script under "run" or a helper of one, imports
# Chainer, or is of a package that requires it (_belongs).  For that the method
# is replaced by which Python gets a module's code from its file.  The price:
# such a module is compiled at each start.
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
from importlib import metadata
from typing import Any

import numpy

from ._old_values import CALLS, DROPPED, METHODS, OLD, REFUSED

#: Turns this off if its value is ``0``.
SWITCH = 'CHAINER_FP8PIPE_OLD_NAMES'
#: Has the path of the script for its workers.
MAIN = '_CHAINER_FP8PIPE_MAIN'
#: A builtin, which no module's list of its own names shows.
_ASKED = '__chainer_fp8pipe_old__'


class _Old:
    """Answers code of Chainer's world."""

    def attribute(self, owner: Any, name: str) -> Any:
        """``owner.name``, or what it was."""
        # Not by trying: NumPy warns of some names before it has none.
        if (isinstance(owner, types.ModuleType) and name not in vars(owner)
                and (full := f'{owner.__name__}.{name}') in OLD):
            return OLD[full]()
        try:
            return getattr(owner, name)
        except AttributeError:
            for kind in type(owner).__mro__:
                full = f'{kind.__module__}.{kind.__qualname__}.{name}'
                if full in METHODS:
                    found = functools.partial(METHODS[full], owner)
                    return found() if name == 'A' else found
            raise

    def imported(self, full: str) -> Any:
        """Imports a full name, an old one as what has taken its place."""
        module, _, name = full.rpartition('.')
        with contextlib.suppress(ImportError):
            return importlib.import_module(full)
        if full not in OLD:
            try:
                return self.attribute(self.imported(module), name)
            except AttributeError as error:
                raise ImportError(f'cannot import name {name!r} from '
                                  f'{module!r}', name=module) from error
        with contextlib.suppress(ImportError, ValueError):
            return self.attribute(importlib.import_module(module), name)
        return OLD[full]()

    def stored(self, value: Any, owner: Any, place: Any) -> None:
        """``owner[place] = value``, of an array of one element as well."""
        try:
            owner[place] = value
        except (TypeError, ValueError):
            if not (isinstance(owner, numpy.ndarray)
                    and isinstance(value, numpy.ndarray) and value.size == 1):
                raise
            owner[place] = value.item()

    def called(self, function: Any) -> Any:
        """A function that takes what it, or its library, now refuses."""
        if function is hasattr:
            return self._has
        home = getattr(function, '__module__', None) or type(
            getattr(function, '__self__', None)).__module__
        if home.partition('.')[0] not in (
                'builtins', 'chainer', 'numpy', 'yaml'):
            return function
        return functools.partial(self._call, function)

    def _has(self, owner, name):
        """A name that Chainer has since given as None is none."""
        return hasattr(owner, name) and not (
            name in ('gamma', 'beta') and getattr(owner, name) is None)

    def _call(self, function, /, *arguments, **options):
        try:
            return function(*arguments, **options)
        except (TypeError, ValueError) as error:
            for said, call in REFUSED:
                if said in str(error):
                    return call(function, *arguments, **options)
            raise


class _Asking(ast.NodeTransformer):
    """Has code ask an :class:`_Old` of the name ``_ASKED``."""

    def __init__(self, tree):
        nodes = list(ast.walk(tree))
        modules = {alias.asname or alias.name for node in nodes
                   if isinstance(node, ast.Import) for alias in node.names}
        # "np.float = float": the module has a remedy of its own.
        self._names = _NAMES - {
            node.attr for node in nodes if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id in modules}
        own = {getattr(node, 'asname', None) or getattr(
            node, 'name', getattr(node, 'id', None)) for node in nodes
            if isinstance(node, (ast.alias, ast.FunctionDef, ast.ClassDef))
            or isinstance(getattr(node, 'ctx', None), ast.Store)}
        self._read = {node.id for node in nodes if isinstance(node, ast.Name)
                      and not hasattr(builtins, node.id)} - own

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr not in self._names or not isinstance(node.ctx, ast.Load):
            return node
        return _ask(node, 'attribute', node.value, ast.Constant(node.attr))

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, 'id', getattr(node.func, 'attr', None))
        if name in CALLS or DROPPED & {one.arg for one in node.keywords}:
            node.func = _ask(node.func, 'called', node.func)
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
        return self._imported(node, '')

    def visit_ImportFrom(self, node):
        if node.level:
            return node
        if node.names[0].name == '*':
            old = [ast.alias(name) for name in sorted(self._read)
                   if f'{node.module}.{name}' in OLD]
            return [node, *(self.visit_ImportFrom(_at(node, ast.ImportFrom(
                node.module, old, 0))) if old else ())]
        return self._imported(node, f'{node.module}.')

    def _imported(self, node, prefix):
        """An import statement without what is old, which is asked for."""
        old = []
        for name in list(node.names):
            if not {prefix[:-1], prefix + name.name} & OLD.keys():
                continue
            if '.' in name.name and not name.asname:
                # Of "import a.b" the code has "a", and asks that for "b".
                name.name = name.name.partition('.')[0]
            else:
                node.names.remove(name)
                old.append(_at(node, ast.Assign(
                    [ast.Name(name.asname or name.name, ast.Store())],
                    _ask(node, 'imported',
                         ast.Constant(prefix + name.name)))))
        return [*([node] if node.names else ()), *old]

    def _pattern(self, node):
        return node

    visit_MatchValue = visit_MatchClass = visit_MatchMapping = _pattern


def _ask(node, question, *arguments):
    return _at(node, ast.Call(
        ast.Attribute(ast.Name(_ASKED, ast.Load()), question, ast.Load()),
        [*arguments], []))


def _at(node, new):
    return ast.fix_missing_locations(ast.copy_location(new, node))


_NAMES = {name.rpartition('.')[2] for name in (*OLD, *METHODS)}


def _code_of(source: bytes, path: str) -> types.CodeType:
    """Compiles a module's source so that it asks for what is old."""
    with contextlib.suppress(RecursionError):   # of sums of hundreds
        tree = ast.parse(source, path)
        return compile(_Asking(tree).visit(tree), path, 'exec',
                       dont_inherit=True)
    return compile(source, path, 'exec', dont_inherit=True)


# --- which modules belong to Chainer's world

_IMPORTS_CHAINER = re.compile(
    rb'^\s*(?:import|from)\s+(?:chainer|chainermn|onnx_chainer)\b',
    re.MULTILINE)
_NOT = {'chainer', 'chainermn', 'chainerx', 'onnx_chainer', 'chainer_fp8pipe'}
_INSTALLED = tuple(
    os.path.join(folder, '') for folder in
    {*(sysconfig.get_path(kind) for kind in ('stdlib', 'purelib', 'platlib')),
     *site.getsitepackages(), site.getusersitepackages()})
#: Packages, and modules of none, that import Chainer.
_world: set[str] = set()


def _belongs(name: str, path: str) -> bool:
    """Whether a module of this path, which is being imported, does."""
    package = name.partition('.')[0]
    if package in _NOT:
        return False
    if path.startswith(_INSTALLED):
        return (package not in sys.stdlib_module_names
                and _requires_chainer(package))
    if package not in _world and MAIN not in os.environ:
        with open(path, 'rb') as file:
            if not _IMPORTS_CHAINER.search(file.read()):
                return False
    _world.add(package)
    return True


@functools.cache
def _requires_chainer(package):
    try:
        required = metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return False
    return any(re.match(r'chainer(?![\w.-])', one) for one in required)


def install() -> None:
    """Has modules of Chainer's world compiled so; import chainer calls it."""
    if os.environ.get(SWITCH) == '0' or hasattr(builtins, _ASKED):
        return
    setattr(builtins, _ASKED, _Old())
    loader: Any = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    @functools.wraps(get_code)
    def get_code_that_asks(self, name):
        path = self.get_filename(name)
        if _belongs(name, path):
            return _code_of(self.get_data(path), path)
        return get_code(self, name)

    loader.get_code = get_code_that_asks


def run_path(path: str) -> None:
    """Runs a script as Python does; it and its helpers get old names."""
    install()
    if not hasattr(builtins, _ASKED) or not os.path.isfile(path):
        runpy.run_path(path, run_name='__main__')
        return
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    # Workers of spawn and forkserver run the module that this names.
    main.__spec__ = importlib.util.find_spec(__name__)
    os.environ[MAIN] = os.path.abspath(path)
    run_main(path, vars(main))


def run_main(path: str, namespace: dict[str, Any]) -> None:
    """Runs a script in the namespace of a main module."""
    install()
    sys.argv[0] = namespace['__file__'] = path
    with open(path, 'rb') as file:
        source = file.read()
    exec(_code_of(source, path), namespace)


def numpy_for_cupy() -> None:
    """Gives NumPy's names for CuPy's, to ``import cupy`` and to Chainer."""
    from chainer.backends import cuda

    def missing(name):
        if hasattr(numpy, name):
            return getattr(numpy, name)
        raise AttributeError(f'cupy.{name} is not in NumPy, whose names '
                             '"run --cpu" gives for those of CuPy')
    # Another module than numpy, or "xp is cupy" would choose a GPU.
    cuda.cupy = sys.modules['cupy'] = types.ModuleType('cupy')
    vars(cuda.cupy).update(__getattr__=missing, asnumpy=numpy.asarray,
                           __version__='0')


if __name__ == '__mp_main__':       # of a script's worker
    run_main(os.environ[MAIN], globals())
