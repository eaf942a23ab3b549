"""What a rank says of its parameters: what they are, and what is wrong."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chainer
import numpy

#: What to do about a difference.
SAME_MODEL = ('Build the same model on all ranks: same layers, same names, '
              'same order.')


def distinct_parameters(model: chainer.Link
                        ) -> list[tuple[str, chainer.Parameter]]:
    """Names and parameters in the order of names, shared ones once."""
    seen: set[int] = set()
    found = []
    for name, parameter in sorted(model.namedparams(),
                                  key=lambda item: item[0]):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found.append((name, parameter))
    return found


class Found(NamedTuple):
    """A parameter as an update finds it."""

    name: str
    parameter: chainer.Parameter
    array: Any          # None: it is not initialised
    gradient: Any       # None: there is none


def arrays_of(parameter: chainer.Parameter) -> tuple[Any, Any]:
    """Array and gradient, each None if there is none.

    Chainer looks at several things each time that it is asked for them.
    """
    array = parameter.array
    # What is not initialised may not be asked for its gradient.
    return array, None if array is None else parameter.grad


def describe(array: Any, gradient: Any) -> str:
    """Shape and dtype, and whether there is a gradient."""
    if array is None:
        return 'not initialised'
    return _text(array.dtype, array.shape,
                 None if gradient is None else gradient.dtype)


@functools.lru_cache(4096)      # asked for at every update
def _text(dtype: numpy.dtype, shape: tuple[int, ...],
          gradient: numpy.dtype | None) -> str:
    text = f'{dtype.name} {shape}'
    if gradient is None:
        return f'{text} without gradient'
    if gradient != dtype:
        return f'{text} with a gradient of {gradient.name}'
    return text


def problem_of(name: str, value: Any, gradient: Any) -> str:
    """Why this parameter cannot be exchanged; '' if it can."""
    if value is None:
        return ''
    for kind, array in (('parameter', value),
                        ('the gradient of parameter', gradient)):
        if array is None:
            continue
        if not _is_supported(array):
            return (f'{kind} {name} is a {type(array).__module__}.'
                    f'{type(array).__name__}; it must be a NumPy or a CuPy '
                    'array (model.to_device)')
        if array.dtype.kind != 'f':
            return (f'{kind} {name} has dtype {array.dtype.name}; only '
                    'float16, float32 and float64 can be averaged (register '
                    'it as a persistent value instead)')
    return ''


def _is_supported(array: Any) -> bool:
    return isinstance(array, (numpy.ndarray, chainer.backends.cuda.ndarray))


def different_devices(chosen: Sequence[Found]) -> str:
    """Which of these is not where the first one is; '' if all are."""
    kinds = {type(array) for found in chosen
             for array in (found.array, found.gradient)}
    if kinds <= {numpy.ndarray}:
        return ''
    first = chosen[0]
    wanted = _device(first.array)
    for found in chosen:
        for kind, array in (('parameter', found.array),
                            ('the gradient of parameter', found.gradient)):
            if _device(array) != wanted:
                return (f'{kind} {found.name} is on {_device(array)} but '
                        f'parameter {first.name} is on {wanted}; move the '
                        'whole model to one device (model.to_device)')
    return ''


def _device(array: Any) -> str:
    if isinstance(array, numpy.ndarray):
        return 'the CPU'
    return f'GPU {array.device.id}'
