"""Has ``as_strided`` find an array that came from another rank.

``chainer.functions.as_strided`` reads the memory that an array is a view of,
not the array (Chainer 7.8.1, chainer/functions/array/as_strided.py, function
``_get_base_array``, line 108).  An array that came in a message is a view of
the message's bytes, which ``as_strided`` would return.  While an object holds
the patch (see :class:`.Patch`), the memory of an array that is a view of
another dtype is the array itself.  Another package's patch is asked first,
and its answer is kept if that has the array's dtype.
"""
from __future__ import annotations

from typing import Any

from chainer.functions.array import as_strided

from .patching import Patch


def _base(original: Any) -> Any:
    def base(array: Any) -> Any:
        found = original(array)
        if found.dtype == array.dtype:
            return found
        # Chainer's buffer must be contiguous: axes as they lie in memory.
        order = sorted(range(array.ndim),
                       key=lambda axis: -abs(array.strides[axis]))
        whole = array.transpose(order)
        return whole if whole.flags.c_contiguous else found
    return base


_PATCH = Patch(as_strided, '_get_base_array', _base)
hold = _PATCH.hold
