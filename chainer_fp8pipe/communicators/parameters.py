"""What a rank says of its parameters: what they are, and what is wrong."""
from __future__ import annotations

import functools
from typing import Any

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


def describe(parameter: chainer.Parameter) -> str:
    """Shape and dtype, and whether there is a gradient."""
    array = parameter.array
    if array is None:
        return 'not initialised'
    gradient = parameter.grad
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


def problem_of(name: str, parameter: chainer.Parameter) -> str:
    """Why this parameter cannot be exchanged; '' if it can."""
    if parameter.array is None:
        return ''
    for kind, array in (('parameter', parameter.array),
                        ('the gradient of parameter', parameter.grad)):
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


def different_devices(chosen: list[tuple[str, chainer.Parameter]]) -> str:
    """Which of these is not where the first one is; '' if all are."""
    if not chosen:
        return ''
    first_name, first = chosen[0]
    wanted = _device(first.array)
    for name, parameter in chosen:
        for kind, array in (('parameter', parameter.array),
                            ('the gradient of parameter', parameter.grad)):
            if _device(array) != wanted:
                return (f'{kind} {name} is on {_device(array)} but parameter '
                        f'{first_name} is on {wanted}; move the whole model '
                        'to one device (model.to_device)')
    return ''


def _device(array: Any) -> str:
    if isinstance(array, numpy.ndarray):
        return 'the CPU'
    return f'GPU {array.device.id}'
