"""``run --cpu``: a script that imports CuPy gets NumPy's names."""
import sys
import types
from typing import Any

import numpy


class _CuPy(types.ModuleType):
    """Another module than numpy, or "xp is cupy" would choose a GPU."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(numpy, name):
            return getattr(numpy, name)
        raise AttributeError(f'cupy.{name} is not in NumPy, whose names '
                             '"run --cpu" gives for those of CuPy')


def stand_in() -> None:
    """Gives NumPy's names for CuPy's, to ``import cupy`` and to Chainer."""
    from chainer.backends import cuda
    cuda.cupy = sys.modules['cupy'] = _CuPy('cupy')
    vars(cuda.cupy).update(asnumpy=numpy.asarray, __version__='0')
