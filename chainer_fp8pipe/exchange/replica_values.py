"""What of a parameter must be the same on all replicas, and its digest.

That is the parameter's value, and all that the next update makes of it besides
the gradient: the state of its update rule.
"""
from __future__ import annotations

import numbers
from typing import Any

import chainer
import numpy
import xxhash

_VALUE = 'the value'
_COPY = 'the float32 copy'
_COUNT = 'the count of updates'
_STATE = 'the optimizer\'s '        # and then the name in the state


def contents_of(parameter: chainer.Parameter) -> dict[str, Any]:
    """All parts by what they are called: arrays and plain values.

    A parameter that is not initialised has no value, one without update rule
    no more than that, and a rule has no state before its first update.
    """
    found: dict[str, Any] = {}
    if parameter.array is not None:
        found[_VALUE] = parameter.array
    rule = parameter.update_rule
    if rule is None:
        return found
    found[_COUNT] = rule.t
    # Of a float16 parameter, whose value is made from this one.
    if rule._fp32_param is not None and rule._fp32_param.array is not None:
        found[_COPY] = rule._fp32_param.array
    for name, value in (rule.state or {}).items():
        # Of other objects it is not known what makes them equal.
        if _is_array(value) or isinstance(value, (numbers.Number, str)):
            found[_STATE + name] = value
    return found


def digest(value: Any) -> int:
    """64 bits of a part: of its bytes, its dtype and its shape.

    NaN is as good as any other number, and 0 is not -0.

    Args:
        value: An array of NumPy's or CuPy's, or a plain value.
    """
    if not _is_array(value):
        return xxhash.xxh3_64_intdigest(repr(value).encode())
    host = _on_host(value)
    found = xxhash.xxh3_64(f'{host.dtype.str} {host.shape}'.encode())
    found.update(host.reshape(-1).view(numpy.uint8).data)
    return found.intdigest()


def _on_host(array: Any) -> numpy.ndarray:
    """The array, or a copy, in the host's memory and in C's order."""
    return numpy.asarray(chainer.backends.cuda.to_cpu(array), order='C')


def _is_array(value: Any) -> bool:
    return isinstance(value, (numpy.ndarray, chainer.backends.cuda.ndarray))
