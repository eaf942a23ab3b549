"""Compiles code of Chainer's world so that it gets what libraries removed."""
# Attribute names, imports, calls and assignments of the kinds in _old_values
# ask a function of this module, which does what was written and, only where
# that fails, what was meant.  Files, lines and columns stay as they are.
import ast
import builtins
import contextlib
import functools
import importlib
import sys
import types
from typing import Any

import numpy

from ._old_values import CALLS, DROPPED, METHODS, OLD, REFUSED

_NAMES = {name.rpartition('.')[2] for name in (*OLD, *METHODS)}
#: This module, as a builtin, which no module's list of its own names shows.
_ASKED = '__chainer_fp8pipe_old__'
setattr(builtins, _ASKED, sys.modules[__name__])


def attribute(owner: Any, name: str) -> Any:
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


def imported(full: str) -> Any:
    """Imports a full name, an old one as what has taken its place."""
    module, _, name = full.rpartition('.')
    with contextlib.suppress(ImportError):
        return importlib.import_module(full)
    if full not in OLD:
        try:
            return attribute(imported(module), name)
        except AttributeError as error:
            raise ImportError(f'cannot import name {name!r} from {module!r}',
                              name=module) from error
    with contextlib.suppress(ImportError, ValueError):
        return attribute(importlib.import_module(module), name)
    return OLD[full]()


def stored(value: Any, owner: Any, place: Any) -> None:
    """``owner[place] = value``, of an array of one element as well."""
    try:
        owner[place] = value
    except (TypeError, ValueError):
        if not (isinstance(owner, numpy.ndarray)
                and isinstance(value, numpy.ndarray) and value.size == 1):
            raise
        owner[place] = value.item()


def called(function: Any) -> Any:
    """A function that takes what it, or its library, now refuses."""
    if function is hasattr:
        # A name that Chainer has since given as None is none.
        return lambda owner, name: hasattr(owner, name) and not (
            name in ('gamma', 'beta') and getattr(owner, name) is None)
    home = getattr(function, '__module__', None) or type(
        getattr(function, '__self__', None)).__module__
    if home.partition('.')[0] not in ('builtins', 'chainer', 'numpy', 'yaml'):
        return function
    return functools.partial(_call, function)


def _call(function, /, *arguments, **options):
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError) as error:
        for said, call in REFUSED:
            if said in str(error):
                return call(function, *arguments, **options)
        raise


class _Asking(ast.NodeTransformer):
    """Has code ask this module, by the name ``_ASKED``."""

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
        return _ask(node, attribute, node.value, ast.Constant(node.attr))

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, 'id', getattr(node.func, 'attr', None))
        if name in CALLS or DROPPED & {one.arg for one in node.keywords}:
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
        return _at(node, ast.Expr(_ask(
            node, stored, node.value, target.value, target.slice)))

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
                    _ask(node, imported, ast.Constant(prefix + name.name)))))
        return [*([node] if node.names else ()), *old]

    def _pattern(self, node):
        return node

    visit_MatchValue = visit_MatchClass = visit_MatchMapping = _pattern


def _ask(node, question, *arguments):
    return _at(node, ast.Call(ast.Attribute(
        ast.Name(_ASKED, ast.Load()), question.__name__, ast.Load()),
        [*arguments], []))


def _at(node, new):
    return ast.fix_missing_locations(ast.copy_location(new, node))


def code_of(source: bytes, path: str) -> types.CodeType:
    """Compiles a module's source so that it asks for what is old."""
    with contextlib.suppress(RecursionError):   # of sums of hundreds
        tree = ast.parse(source, path)
        return compile(_Asking(tree).visit(tree), path, 'exec',
                       dont_inherit=True)
    return compile(source, path, 'exec', dont_inherit=True)
