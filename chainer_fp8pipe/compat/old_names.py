"""What libraries have removed, for code of Chainer's world alone."""
# Code of 2016 to 2020 asks for numpy.float or array.ptp().  To put that back
# into NumPy would change it for everybody in the process, and a stand-in for
# the module breaks "xp is numpy", by which such code tells a GPU from a CPU.
# So the code that asks is changed (_old_code).
#
# That is a script under "run" with its helpers, a module that imports Chainer,
# and those after it of its package.  For it the method is replaced by which
# Python gets a module's code.  The price: it is compiled at each start.
import functools
import importlib.machinery
import importlib.util
import os
import re
import site
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

#: Has the path of the script for its workers.
MAIN = '_CHAINER_FP8PIPE_MAIN'

_IMPORTS_CHAINER = re.compile(
    rb'(?m)^\s*(?:import|from)\s+(?:chainer|chainermn|onnx_chainer)\b')
_NOT = {'chainer', 'chainermn', 'chainerx', 'onnx_chainer', 'chainer_fp8pipe'}
_INSTALLED = tuple(
    os.path.join(folder, '') for folder in
    {*(sysconfig.get_path(kind) for kind in ('stdlib', 'purelib', 'platlib')),
     *site.getsitepackages(), site.getusersitepackages()})
#: Packages, and modules of none, that import Chainer.
_world: set[str] = set()


def _belongs(name: str, path: str) -> bool:
    """Whether a module of this path, which is being imported, does."""
    package = name.partition('.')[0]
    chainer = getattr(sys.modules.get('chainer'), '__spec__', None)
    # What Chainer imports itself does not.
    if package in _NOT or getattr(chainer, '_initializing', False):
        return False
    is_helper = MAIN in os.environ and not path.startswith(_INSTALLED)
    if not (is_helper or package in _world or _IMPORTS_CHAINER.search(
            Path(path).read_bytes())):
        return False
    _world.add(package)
    return True


@functools.cache
def install() -> None:
    """Has modules of Chainer's world compiled so; import chainer calls it."""
    loader: Any = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def get_code_that_asks(self, name):     # of what is being imported
        module, path = sys.modules.get(name), self.path
        if getattr(module, '__loader__', None) is self and _belongs(
                name, path):
            from ._old_code import code_of
            return code_of(path, vars(module))
        return get_code(self, name)

    loader.get_code = get_code_that_asks


def run_path(path: str) -> None:
    """Runs a script as Python does; it and its helpers get old names."""
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    # Workers of spawn and forkserver run the module that this names.
    main.__spec__ = importlib.util.find_spec(__name__)
    os.environ[MAIN] = os.path.abspath(path)
    run_main(path, vars(main))


def run_main(path: str, namespace: dict[str, Any]) -> None:
    """Runs a script in the namespace of a main module."""
    from ._old_code import code_of
    install()
    sys.argv[0] = namespace['__file__'] = path
    exec(code_of(path, namespace), namespace)


def numpy_for_cupy() -> None:
    """Gives NumPy's names for CuPy's, to ``import cupy`` and to Chainer."""
    import numpy
    from chainer.backends import cuda

    from ._today import asking

    # Another module than numpy, or "xp is cupy" would choose a GPU.
    cuda.cupy = sys.modules['cupy'] = asking(
        'cupy', functools.partial(getattr, numpy))
    vars(cuda.cupy).update(asnumpy=numpy.asarray, __version__='0')


if __name__ == '__mp_main__':       # of a script's worker
    from chainer_fp8pipe.compat import old_names
    old_names.run_main(os.environ[MAIN], globals())
