"""Has ``as_strided`` find an array that came from another rank.

``chainer.functions.as_strided`` reads the memory that an array is a view of,
not the array (Chainer 7.8.1, chainer/functions/array/as_strided.py, function
``_get_base_array``, line 108).  What came in a message is a view of its bytes,
and ``as_strided`` made bytes of it.  While somebody holds the patch, an array
that is a view of another dtype is all of its memory; nothing else changes (see
:class:`.Patch`).  Another package's function in the same place is asked first,
and its answer kept where that has the array's dtype.
"""
from __future__ import annotations

import weakref
from typing import Any

from chainer.functions.array import as_strided

from .patching import Patch


def hold(owner: Any) -> None:
    """Keeps the function replaced as long as an object lives."""
    _PATCH.install()
    weakref.finalize(owner, _PATCH.remove)


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
