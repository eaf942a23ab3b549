"""What libraries have removed, for code of Chainer's world alone."""
# Code of 2016 to 2020 asks for numpy.float, Image.ANTIALIAS or array.ptp(),
# calls float() of an array of one element, and makes arrays of rows of several
# lengths.  To put that back into NumPy would change it for everybody in the
# process, and a stand-in for the module breaks "xp is numpy", by which such
# code tells a GPU from a CPU.  So the code that asks is changed (_old_code).
#
# A module gets this if it is a script under "run" or a helper of one, imports
# Chainer, or is of a package that requires it (_belongs).  For that the method
# is replaced by which Python gets a module's code from its file.  The price:
# such a module is compiled at each start.
import functools
import importlib.machinery
import importlib.util
import os
import re
import runpy
import site
import sys
import sysconfig
import types
from importlib import metadata
from typing import Any

#: Turns this off if its value is ``0``.
SWITCH = 'CHAINER_FP8PIPE_OLD_NAMES'
#: Has the path of the script for its workers.
MAIN = '_CHAINER_FP8PIPE_MAIN'

_IMPORTS_CHAINER = re.compile(
    rb'^\s*(?:import|from)\s+(?:chainer|chainermn|onnx_chainer)\b',
    re.MULTILINE)
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
    # What Chainer imports itself does not, wherever it lies.
    if package in _NOT or getattr(chainer, '_initializing', False):
        return False
    if path.startswith(_INSTALLED):
        return (package not in sys.stdlib_module_names
                and _requires_chainer(package))
    if package not in _world and MAIN not in os.environ:
        with open(path, 'rb') as file:
            if not _IMPORTS_CHAINER.search(file.read()):
                return False
    _world.add(package)
    return True


@functools.cache
def _requires_chainer(package):
    try:
        required = metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return False
    return any(re.match(r'chainer(?![\w.-])', one) for one in required)


@functools.cache
def install() -> bool:
    """Has modules of Chainer's world compiled so; import chainer calls it.

    Returns:
        Whether it is not turned off.
    """
    loader: Any = importlib.machinery.SourceFileLoader
    get_code, is_on = loader.get_code, os.environ.get(SWITCH) != '0'

    @functools.wraps(get_code)
    def get_code_that_asks(self, name):
        path = self.get_filename(name)
        if _belongs(name, path):
            from ._old_code import code_of
            return code_of(self.get_data(path), path)
        return get_code(self, name)

    if is_on:
        loader.get_code = get_code_that_asks
    return is_on


def run_path(path: str) -> None:
    """Runs a script as Python does; it and its helpers get old names."""
    if not install():
        runpy.run_path(path, run_name='__main__')
        return
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
    with open(path, 'rb') as file:
        source = file.read()
    exec(code_of(source, path), namespace)


def numpy_for_cupy() -> None:
    """Gives NumPy's names for CuPy's, to ``import cupy`` and to Chainer."""
    import numpy
    from chainer.backends import cuda

    def missing(name):
        if hasattr(numpy, name):
            return getattr(numpy, name)
        raise AttributeError(f'cupy.{name} is not in NumPy, whose names '
                             '"run --cpu" gives for those of CuPy')
    # Another module than numpy, or "xp is cupy" would choose a GPU.
    cuda.cupy = sys.modules['cupy'] = types.ModuleType('cupy')
    vars(cuda.cupy).update(__getattr__=missing, asnumpy=numpy.asarray,
                           __version__='0')


if __name__ == '__mp_main__':       # of a script's worker
    from chainer_fp8pipe.compat import old_names
    old_names.run_main(os.environ[MAIN], globals())
