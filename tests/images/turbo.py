"""JPEGs that Pillow does not write, by libturbojpeg's own compressor."""
from __future__ import annotations

from ctypes import POINTER, byref, c_int, c_size_t, c_void_p, string_at

from chainer_fp8pipe.images import libturbojpeg

import numpy
import pytest
from hypothesis import strategies as st

needs_turbo = pytest.mark.skipif(
    libturbojpeg.library() is None,
    reason='there is no libturbojpeg 3: pip install turbojpeg')

_COMPRESS, _RGB = 0, 0
_QUALITY, _SUBSAMPLING, _OPTIMISE, ARITHMETIC = 3, 4, 11, 14
RESTART_ROWS = 19
SUBSAMPLINGS = {'4:4:4': 0, '4:2:2': 1, '4:2:0': 2, 'grey': 3, '4:4:0': 4,
                '4:1:1': 5, '4:4:1': 6}


def turbo_jpeg(pixels, subsampling='4:2:0', quality=90, optimise=False,
               more=()):
    """The bytes of a JPEG of (H, W, 3) uint8 pixels.

    ``more`` are parameters of ``turbojpeg.h`` that are set to 1.
    """
    tj = libturbojpeg.library()
    tj.tj3Set.argtypes = c_void_p, c_int, c_int
    tj.tj3Compress8.argtypes = (
        c_void_p, c_void_p, c_int, c_int, c_int, c_int, POINTER(c_void_p),
        POINTER(c_size_t))
    tj.tj3Free.argtypes = c_void_p,
    pixels = numpy.ascontiguousarray(pixels)
    height, width = pixels.shape[:2]
    handle, data, size = tj.tj3Init(_COMPRESS), c_void_p(), c_size_t()
    parameters = {_QUALITY: quality, _SUBSAMPLING: SUBSAMPLINGS[subsampling],
                  _OPTIMISE: int(optimise),
                  **dict.fromkeys(more, 1)}
    for name, value in parameters.items():
        assert tj.tj3Set(handle, name, value) == 0
    assert tj.tj3Compress8(handle, pixels.ctypes.data, width, 0, height, _RGB,
                           byref(data), byref(size)) == 0
    found = string_at(data, size.value)
    tj.tj3Free(data)
    tj.tj3Destroy(handle)
    return found


def boxes(width, height):
    """Left, top, width and height of any part."""
    return st.tuples(st.integers(0, width - 1), st.integers(0, height - 1)
                     ).flatmap(lambda corner: st.tuples(
                         *map(st.just, corner),
                         st.integers(1, width - corner[0]),
                         st.integers(1, height - corner[1])))


def decoded(data, width, height, box, shrink):
    """A copy of what the library decodes, or None."""
    found = libturbojpeg.Decompressor().decode(data, width, height, box,
                                               shrink)
    return None if found is None else found.copy()
