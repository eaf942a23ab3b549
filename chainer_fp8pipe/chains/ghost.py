"""Arrays that stand for values of other ranks: shape and dtype, no data.

A ghost is an array of the device's own class with one element that all
indices share, so that whatever asks for shape, dtype or type goes on as with
the real array.  A look at the data is an error that names the user's line.
NumPy code applied to a ghost gives a derived ghost: the arithmetic is done by
the rank that uses the result, with the real values.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import chainer
import numpy

from ..planning.calls import Source
from . import nested

#: Attributes that say nothing about the data.
_OPEN = frozenset(('shape', 'dtype', 'ndim', 'size', 'nbytes', 'itemsize',
                   'strides', 'flags', 'device'))
#: Methods whose results have a shape that follows from shapes.
_LATER = frozenset((
    'astype', 'reshape', 'transpose', 'sum', 'prod', 'max', 'min', 'mean',
    'std', 'var', 'argmax', 'argmin', 'copy', 'ravel', 'flatten', 'dot',
    'any', 'all', 'clip', 'argsort', 'repeat', 'take', 'cumsum', 'cumprod',
    'swapaxes', 'squeeze', 'round', 'diagonal', 'conj', 'trace'))
#: Ways to the data that are not the class's methods.
_INTERFACES = frozenset(('__array_interface__', '__array_struct__',
                         '__cuda_array_interface__', '__dlpack__'))
#: Functions that need the shape only.
_LIKE = frozenset((numpy.zeros_like, numpy.ones_like, numpy.empty_like,
                   numpy.full_like))
_TEXTS = frozenset((numpy.array2string, numpy.array_repr, numpy.array_str))
_SHAPES = frozenset((numpy.shape, numpy.ndim, numpy.size))
#: Functions whose result's shape depends on the data, or that write.
_UNKNOWN = frozenset((numpy.nonzero, numpy.flatnonzero, numpy.argwhere,
                      numpy.unique, numpy.array_equal, numpy.allclose,
                      numpy.copyto, numpy.put, numpy.place, numpy.putmask))


class Recipe(NamedTuple):
    """How NumPy makes a derived ghost's value of others."""

    function: Callable
    leaves: tuple[Any, ...]
    tree: Any
    sources: tuple[Source, ...]


class GhostError(RuntimeError):
    """Python looked at data that are on another rank."""


class _Ghost:
    """What ghosts of all kinds of arrays have in common."""

    source: Source | str | None = None      # a parameter's name; None: derived
    recipe: Recipe | None = None
    traced: Any = None                      # whose call numbers these are

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        raise looked_at(self, f'.{name}')

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any,
                        out: Any = None, **options: Any) -> Any:
        if out is not None or method == 'at':
            raise looked_at(self, f'numpy.{ufunc.__name__}(out=...)')
        return derived(ufunc if method == '__call__'
                       else _UfuncMethod(ufunc, method), inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any,
                           kwargs: Any) -> Any:
        if function in _LIKE:
            return function(_made_up(self), *args[1:], **{
                'order': 'C', 'subok': False, **kwargs})
        if function in _SHAPES:
            return function(_stand_in(self), *args[1:], **kwargs)
        if function in _TEXTS:
            return repr(self)
        if function in _UNKNOWN:
            raise looked_at(self, f'numpy.{function.__name__}')
        return derived(function, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        if any(nested.array_of(item).dtype.kind == 'b'
               for item in nested.leaves(index)[0]):
            raise looked_at(self, 'indexing by a condition')
        return derived(_get_item, (self, index), {})

    def __repr__(self) -> str:
        return (f'<ghost of {describe_source(self)}, {self.dtype} '
                f'{self.shape}>')

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise looked_at(self, 'pickle')

    def __hash__(self) -> int:
        return id(self)


def _closed(name: str) -> Callable:
    def method(self: Any, *_: Any, **__: Any) -> Any:
        raise looked_at(self, name)
    return method


for _name in (
        'setitem', 'bool', 'float', 'int', 'index', 'complex', 'iter',
        'contains', 'copy', 'deepcopy', 'array_wrap', 'iadd', 'isub', 'imul',
        'itruediv', 'ifloordiv', 'imod', 'ipow', 'iand', 'ior', 'ixor'):
    setattr(_Ghost, f'__{_name}__', _closed(f'__{_name}__'))


@functools.lru_cache(None)
def _class(base: type) -> type:
    """Ghosts of an array class; what needs the data is closed.

    Open attributes are the array's own, in C: every function reads shapes.
    """
    own: dict[str, Any] = {'T': property(
        lambda self: derived(numpy.transpose, (self,), {}))}
    for name in dir(base):
        if name in _LATER:
            own[name] = _later(name)
        elif name in _INTERFACES or not (
                name.startswith('__') or name in _OPEN or name in own):
            own[name] = _shut(name)
    return type('Ghost', (_Ghost, base), own)


def _later(name: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return derived(_method(name), (self, *args), kwargs)
    return method


def _shut(name: str) -> property:
    def look(self: Any) -> Any:
        raise looked_at(self, f'.{name}')
    return property(look)


def ghost(shape: tuple[int, ...], dtype: Any,
          source: Source | str | None = None, xp: Any = numpy,
          trace: Any = None) -> Any:
    """An array without data.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        source: Which call's output, or which parameter, has the value.
        xp: ``numpy`` or ``cupy``: whose array class the ghost has.
        trace: Whose call numbers ``source`` means.
    """
    dtype = numpy.dtype(dtype)
    array: Any
    if xp is numpy:
        array = numpy.ndarray.__new__(
            _class(numpy.ndarray), shape, dtype, _poison(dtype), 0,
            (0,) * len(shape))
    else:
        array = _device_ghost(shape, dtype, xp)
    array.source, array.traced = source, trace
    return array


def is_ghost(array: Any) -> bool:
    """Whether ``array`` has no data."""
    return isinstance(array, _Ghost)


def sources(array: Any) -> tuple[Source, ...]:
    """The calls' outputs that an array is made of; () for a real one."""
    if not is_ghost(array):
        return ()
    if array.recipe is not None:
        return array.recipe.sources
    return (array.source,) if isinstance(array.source, Source) else ()


def derived(function: Callable, args: Any, kwargs: Any) -> Any:
    """A ghost of what NumPy would make of ghosts."""
    leaves, tree = nested.leaves((args, kwargs))
    shape, dtype, xp = _result(function, leaves, tree)
    ghosts = [nested.array_of(leaf) for leaf in leaves
              if is_ghost(nested.array_of(leaf))]
    result = ghost(shape, dtype, None, xp, ghosts[0].traced)
    result.recipe = Recipe(function, tuple(leaves), tree, tuple(
        dict.fromkeys(one for array in ghosts for one in sources(array))))
    return result


def evaluated(recipe: Recipe, values: list[Any]) -> Any:
    """What a recipe makes of real arrays."""
    args, kwargs = nested.rebuilt(recipe.tree, values)
    result = recipe.function(*args, **kwargs)
    return numpy.asarray(result) if numpy.isscalar(result) else result


def made_up(array: Any) -> Any:
    """An array of a ghost's shape and dtype with values of no meaning.

    The values differ from each other, so that a matrix of them has an
    inverse, and a Cholesky factor.
    """
    return _made_up(array)


def looked_at(array: Any, what: str) -> GhostError:
    """The error for code that needs the data of a ghost."""
    return GhostError(
        f'{user_line()}: {what} needs the value of {describe_source(array)}, '
        'which is on another rank. Compute with Chainer\'s functions, or '
        'mark the function around it: chainer_fp8pipe.atomic(function)')


def is_poison(error: IndexError) -> bool:
    """Whether an index was out of bounds because a ghost has no data."""
    return any(f'index {_poison(numpy.dtype(kind))} is' in str(error)
               for kind in 'iqIQ')


def used_as_index(error: IndexError) -> GhostError:
    """The error for a ghost that was an index of another array."""
    place: Any = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    return GhostError(
        f'{_user_line(place.tb_frame)}: an index needs a value which is on '
        'another rank. Mark the function around it: '
        'chainer_fp8pipe.atomic(function), or use chainer.functions')


def describe_source(array: Any) -> str:
    """What a message calls the value of a ghost."""
    if array.recipe is not None:
        return 'an array made of ' + ' and '.join(
            _said(source, array.traced) for source in array.recipe.sources)
    return _said(array.source, array.traced)


def user_line() -> str:
    """Where the user's code is: the innermost line outside of libraries."""
    return _user_line(sys._getframe(1))


def _user_line(frame: Any) -> str:
    while frame is not None:
        module = frame.f_globals.get('__name__', '')
        if module.partition('.')[0] not in ('chainer', 'chainermn', 'numpy',
                                            'cupy', 'chainer_fp8pipe',
                                            'contextlib', 'copy'):
            return f'{frame.f_code.co_filename}:{frame.f_lineno}'
        frame = frame.f_back
    return 'inside of Chainer'


# --- details -----------------------------------------------------------------

class _UfuncMethod:
    """``numpy.add.reduce`` and its like, which compare equal."""

    def __init__(self, ufunc: Any, method: str) -> None:
        self._key = ufunc, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(*self._key)(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UfuncMethod) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Method:
    """An array's method, by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(array, self._name)(*args, **kwargs)


_method = functools.lru_cache(None)(_Method)


def _get_item(array: Any, index: Any) -> Any:
    return array[index]


class condition:
    """A ``with`` block in which ghosts of conditions read as one value.

    NumPy does not ask before it indexes a plain array by a ghost.

    Args:
        value: True or False.

    Attributes:
        made: How many ghosts of conditions were made inside.
    """

    def __init__(self, value: bool) -> None:
        self._poison = numpy.full((), value)
        self._poison.flags.writeable = False
        self.made = 0

    def __enter__(self) -> condition:
        self._before = _conditions[0]
        _conditions[0] = self
        return self

    def __exit__(self, *_: Any) -> None:
        _conditions[0] = self._before

    def poison(self) -> numpy.ndarray:
        """The one element of such a ghost."""
        self.made += 1
        return self._poison


_conditions = [condition(False)]


def _poison(dtype: numpy.dtype) -> numpy.ndarray:
    return (_conditions[0].poison() if dtype.kind == 'b'
            else _poison_of(dtype))


@functools.lru_cache(None)
def _poison_of(dtype: numpy.dtype) -> numpy.ndarray:
    """What C code finds that reads a ghost all the same.

    All ghosts share it: C code that writes must fail.
    """
    poison = numpy.zeros((), dtype)
    if dtype.kind in 'fc':
        poison[...] = numpy.nan
    elif dtype.kind == 'i':
        poison[...] = numpy.iinfo(dtype).min
    elif dtype.kind == 'u':
        poison[...] = numpy.iinfo(dtype).max
    poison.flags.writeable = False
    return poison


def _device_ghost(shape: tuple[int, ...], dtype: numpy.dtype, xp: Any) -> Any:
    one = xp.empty((), dtype)
    one.fill(_poison(dtype).item())
    return xp.broadcast_to(one, shape).view(array_class=_class(xp.ndarray))


_SOME = numpy.random.RandomState(0).uniform(.01, .1, 10007)


def _made_up(array: Any) -> Any:
    xp = _module(array)
    if array.dtype.kind == 'f':
        values = numpy.resize(_SOME, array.shape).astype(array.dtype)
        if array.ndim > 1 and array.shape[-1] == array.shape[-2]:
            diagonal = numpy.arange(array.shape[-1])
            values[..., diagonal, diagonal] = .9
        return values if xp is numpy else xp.asarray(values)
    return xp.zeros(array.shape, array.dtype)


def _stand_in(array: Any) -> numpy.ndarray:
    return numpy.broadcast_to(numpy.zeros((), array.dtype), array.shape)


def _module(array: Any) -> Any:
    return numpy if isinstance(array, numpy.ndarray) else (
        chainer.backend.get_array_module(array))


#: Shapes and dtypes of results that were found out before.
_known: dict[Any, tuple[tuple[int, ...], Any, Any]] = {}


def _result(function: Callable, leaves: list[Any], tree: Any
            ) -> tuple[tuple[int, ...], Any, Any]:
    arrays = [nested.array_of(leaf) for leaf in leaves]
    key: Any
    try:
        key = None
        # The values of a real index decide about the result's shape.
        if (all(map(is_ghost, arrays))
                or isinstance(function, numpy.ufunc)):
            key = (function, nested.signature(tree), tuple(
                (array.shape, array.dtype, type(array)) for array in arrays))
        found = _known.get(key)
    except TypeError:
        key = found = None
    if found is None:
        args, kwargs = nested.rebuilt(tree, [
            _made_up(array) if is_ghost(array) else array
            for array in arrays])
        value = function(*args, **kwargs)
        if isinstance(value, (tuple, list)):
            raise GhostError(
                f'{user_line()}: {getattr(function, "__name__", function)} '
                'returns several arrays, of which ghosts cannot be made; use '
                'Chainer\'s function, or chainer_fp8pipe.atomic')
        array = numpy.asarray(value) if numpy.isscalar(value) else value
        found = array.shape, array.dtype, _module(array)
        if key is not None:
            if len(_known) > 4096:
                _known.clear()
            _known[key] = found
    return found


def _said(source: Source | str | None, trace: Any) -> str:
    if isinstance(source, Source) and trace is not None:
        return trace.describe(source)
    return f'parameter {source}' if isinstance(source, str) else str(source)
