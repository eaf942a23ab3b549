"""Stand-ins for arrays of other ranks: shape and dtype, no data."""
# A placeholder stands for a value that another rank computes.  Code between
# two functions may ask for its shape, dtype and type as of the real array; a
# look at the data is an error that names the user's line.  An operator, a
# method or a NumPy function of placeholders is a call like a function of
# Chainer's (`ArrayCall`): it is recorded, and gives placeholders.
#
# A placeholder is a plain object, which says by ``__class__`` that it is an
# array, and is none for C code.  So C code that wants the data (numpy.asarray,
# an index of another array, the right side of an assignment) asks for them by
# ``__array__``, which is the error.  C code that insists on a real ndarray
# raises a TypeError of its own.
from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy

from ..intercept.function_calls import current
from . import nested
from .calls import Source

#: Methods that give an array, without a look at the data.
_METHODS = frozenset((
    'astype', 'reshape', 'transpose', 'sum', 'prod', 'max', 'min', 'mean',
    'std', 'var', 'argmax', 'argmin', 'copy', 'ravel', 'flatten', 'dot',
    'any', 'all', 'clip', 'argsort', 'repeat', 'take', 'cumsum', 'cumprod',
    'swapaxes', 'squeeze', 'round', 'diagonal', 'conj', 'trace'))
#: Functions that need the shape only.
_OF_SHAPES = frozenset((
    numpy.zeros_like, numpy.ones_like, numpy.empty_like, numpy.shape,
    numpy.ndim, numpy.size, numpy.result_type, numpy.can_cast,
    numpy.common_type, numpy.min_scalar_type, numpy.iscomplexobj,
    numpy.isrealobj))
#: Functions that write files, or whose result's shape depends on floats.
_LOOKS = frozenset((
    numpy.nonzero, numpy.flatnonzero, numpy.argwhere, numpy.unique,
    numpy.setdiff1d, numpy.setxor1d, numpy.union1d, numpy.intersect1d,
    numpy.trim_zeros, numpy.save, numpy.savez, numpy.savez_compressed,
    numpy.savetxt))
_FLAGS = numpy.broadcast_to(numpy.zeros((), 'f'), ()).flags     # read-only


class PlaceholderError(RuntimeError):
    """Python looked at data that are on another rank."""


def _closed(what: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise looked_at(self, what)
    return method


class Placeholder(nested.Dataless):
    """An array of ``xp``, NumPy or CuPy, without data.

    Args:
        source: The output of a call, or the path of the parameter, for which
            the placeholder stands.
        program: The :class:`.Program` with the call.
        scalar: Whether it stands for a NumPy number, not for an array:
            ``h * h.array.mean()`` calls another function than ``h * array``.
    """

    __array_priority__ = 100    # less than that of Variable
    __array__ = _closed('numpy.asarray, or an index of another array,')
    flags = _FLAGS

    def __init__(self, shape: tuple[int, ...], dtype: Any,
                 source: Source | str | None = None, xp: Any = numpy,
                 program: Any = None, scalar: bool = False) -> None:
        shape = tuple(map(int, shape))
        self.__dict__.update(
            shape=shape, dtype=numpy.dtype(dtype), ndim=len(shape),
            size=math.prod(shape), source=source, program=program,
            device='cpu' if xp is numpy else xp.cuda.Device(),
            xp=xp, scalar=scalar)

    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.itemsize)

    # Chainer asks isinstance(), which reads this.  mypy wants an attribute
    # that can be set, as object.__class__ is.
    @property   # type: ignore[misc]
    def __class__(self) -> Any:
        return self.dtype.type if self.scalar else self.xp.ndarray

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError('len() of unsized object')
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        if name in _METHODS:
            return lambda *args, **kwargs: recorded(
                _method(name), (self, *args), kwargs)
        if name in ('T', 'real', 'imag'):
            return recorded(getattr, (self, name), {})
        raise looked_at(self, f'.{name}')

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any,
                        out: Any = None, **options: Any) -> Any:
        if out is not None:
            options['out'] = out
        return recorded(ufunc if method == '__call__'
                        else getattr(ufunc, method), inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any,
                           kwargs: Any) -> Any:
        if function in _OF_SHAPES:
            return function(*[made_up(one) if is_placeholder(one) else one
                              for one in args], **kwargs)
        if function in _LOOKS:
            raise looked_at(self, f'numpy.{function.__name__}')
        return recorded(function, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        if any(one.dtype.kind == 'b' for one in nested.arrays(index)):
            raise looked_at(self, 'indexing by a condition')
        return recorded(operator.getitem, (self, index), {})

    def __repr__(self) -> str:
        return (f'<placeholder of {describe_source(self)}, {self.dtype} '
                f'{self.shape}>')

    __str__ = __repr__

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of a link has a placeholder that the link kept, by its name.
        if current() is not None or isinstance(self.source, str):
            raise looked_at(self, 'pickle')
        return Placeholder, (self.shape, self.dtype, describe_source(self))

    def __hash__(self) -> int:
        return id(self)


@functools.lru_cache(None)
def _method(name: str) -> Callable:
    def function(array: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(array, name)(*args, **kwargs)    # or of a number
    function.__name__ = name
    return function


def _operator(name: str, swapped: bool = False, in_place: bool = False
              ) -> Callable:
    function = getattr(operator, name)

    def method(self: Any, *others: Any) -> Any:
        if any(isinstance(other, chainer.Variable) for other in others):
            return NotImplemented
        if in_place and not self.scalar:    # of a number: another one
            raise looked_at(self, f'{name} in place')
        return recorded(function, (*others, self) if swapped
                       else (self, *others), {})
    return method


for _name in ('bool', 'float', 'int', 'index', 'complex', 'iter', 'contains',
              'round', 'copy', 'setitem', 'setattr'):
    setattr(Placeholder, f'__{_name}__', _closed(f'__{_name}__'))
for _name in ('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow',
              'matmul', 'and', 'or', 'xor', 'lshift', 'rshift'):
    setattr(Placeholder, f'__{_name}__', _operator(f'__{_name}__'))
    setattr(Placeholder, f'__r{_name}__',
            _operator(f'__{_name}__', swapped=True))
    setattr(Placeholder, f'__i{_name}__',
            _operator(f'__{_name}__', in_place=True))
for _name in ('lt', 'le', 'gt', 'ge', 'eq', 'ne', 'neg', 'pos', 'abs',
              'invert'):
    setattr(Placeholder, f'__{_name}__', _operator(f'__{_name}__'))

placeholder: Any = Placeholder


class Ahead(chainer.Variable):
    """An output of a call that is not made yet."""

    def unchain(self) -> None:
        """Becomes a variable of the array, which has no way back."""
        self.__class__ = chainer.Variable

    @property
    def array(self) -> Any:
        """A placeholder."""
        return self._data[0]

    @array.setter
    def array(self, value: Any) -> None:
        raise PlaceholderError(
            f'{user_line()}: an array that is assigned to a variable would '
            'change what one rank computes, and not the way back of another; '
            'write h + (value - h.array), or mark the function around it: '
            'chainer_fp8pipe.atomic(function)')

    data = array


def remade(form: Any, **changes: Any) -> Any:
    """A placeholder like another one; a fast way to make one."""
    made = object.__new__(Placeholder)
    made.__dict__.update(form.__dict__, **changes)
    return made


def is_placeholder(array: Any) -> bool:
    """Whether ``array`` has no data."""
    return type(array) is Placeholder


def recorded(function: Callable, args: Any, kwargs: Any) -> Any:
    """Has a function of placeholders recorded; placeholders of its results."""
    compute = getattr(current(), 'compute', None)
    if compute is None:
        raise looked_at(next(filter(is_placeholder, nested.leaves(
            (args, kwargs))[0])), getattr(function, '__name__', 'it'))
    return compute(function, args, kwargs)


def looked_at(array: Any, what: str) -> PlaceholderError:
    """The error for code that needs the data of a placeholder."""
    remedy = (
        "Call the updater's evaluate() or predict() on all ranks instead of "
        'the model or a part of it, read in the observation what it has '
        'reported, and save by training.extensions.save_whole_model()'
        if current() is None else
        "Compute with Chainer's functions, or move what looks into a link or "
        'function of its own, and mark that: '
        'chainer_fp8pipe.atomic(function)')
    return PlaceholderError(
        f'{user_line()}: {what} needs the value of {describe_source(array)}, '
        f'which is on another rank. {remedy}')


def describe_source(array: Any) -> str:
    """The name of a placeholder's value in messages."""
    return (f'parameter {array.source}' if array.program is None
            else array.program.describe(array.source))


_LIBRARIES = frozenset(('chainer', 'chainermn', 'numpy', 'cupy',
                        'chainer_fp8pipe', 'contextlib', 'copy'))


def frames_of_users(frame: Any) -> Iterator[Any]:
    """The frames outside of libraries, from this one outwards."""
    while frame is not None:
        name = frame.f_globals.get('__name__', '')
        if name.partition('.')[0] not in _LIBRARIES:
            yield frame
        frame = frame.f_back


def user_line() -> str:
    """Where the user's code is: the innermost line outside of libraries."""
    for frame in frames_of_users(sys._getframe(1)):
        return f'{frame.f_code.co_filename}:{frame.f_lineno}'
    return 'inside of Chainer'


# --- details -----------------------------------------------------------------

_SOME = numpy.random.RandomState(0).uniform(.01, .1, 10007)
_BITS = numpy.random.RandomState(0).randint(0, 2, 10007)
_BITS[:2] = 1, 0


def made_up(array: Any, otherwise: bool = False) -> Any:
    """An array of a placeholder's shape and dtype with values of no meaning.

    Floats differ from each other such that a matrix has an inverse and a
    Cholesky factor.  ``otherwise``: other values.
    """
    if array.scalar:
        return made_up(Placeholder((1,), array.dtype), otherwise)[0]
    xp = array.xp
    if array.dtype.kind == 'f':
        values = numpy.resize(_SOME, array.shape).astype(array.dtype)
        if array.ndim > 1 and array.shape[-1] == array.shape[-2]:
            diagonal = numpy.arange(array.shape[-1])
            values[..., diagonal, diagonal] = .9
        if otherwise:
            values *= values.dtype.type(-37)
    else:
        values = numpy.resize(_BITS * otherwise, array.shape).astype(
            array.dtype)
    return values if xp is numpy else xp.asarray(values)
