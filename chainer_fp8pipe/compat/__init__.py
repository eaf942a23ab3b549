"""What is not installed, or not as this package needs it, says how to get it.

``pip install chainer_fp8pipe`` brings no MPI, no Chainer, and, where there was
no C compiler, no compiled parts.
"""
# A last finder is asked where no other has found a module.  So it is the same
# for whoever imports it: this package, ChainerMN or a script.
import glob
import importlib.machinery
import sys
import warnings
from typing import Any

from ._edits import TODAY

_INSTALL = 'python -m chainer_fp8pipe install-chainer'
_CHAINER = (
    '{0} is not installed: installing chainer_fp8pipe does not bring Chainer, '
    'which no current setuptools can build; this command does:  ' + _INSTALL)
_LINE = ("{0} is not installed{2}; this line brings it:  "
         "python -m pip install 'chainer_fp8pipe[{1}]'")
_COMPILED = (
    'the compiled part {0} is missing: chainer_fp8pipe was not, or could not '
    'be, compiled.  With a C compiler and Python.h (Debian, Ubuntu: '
    'apt install gcc python3-dev) this line builds it:  python -m pip install '
    '--force-reinstall --no-deps --no-cache-dir --no-binary chainer_fp8pipe '
    'chainer_fp8pipe  (of a checkout: pip install --no-deps --editable .)')

#: By module, what is said where it cannot be found.
ABSENT = {name: text.format(name, *more) for name, text, *more in (
    ('chainer', _CHAINER), ('chainermn', _CHAINER),
    ('onnx', _LINE, 'onnx', ''), ('onnxruntime', _LINE, 'onnx', ''),
    ('PIL', _LINE, 'images', ', which decodes images'),
    ('cupy', _LINE, 'cuda13', ': where there is no GPU "python -m '
     'chainer_fp8pipe run --cpu" gives a script NumPy\'s names for it'),
    ('mpi4py', _LINE + '  (with an MPI of your own: [mpi] in place of '
     '[mpich])', 'mpich', ', and what works over ranks needs MPI'),
    ('chainer_fp8pipe.formats._formats', _COMPILED),
    ('chainer_fp8pipe.allreduce._engine', _COMPILED))}


class LastFinder:
    """Says what is absent, unless the caller asks whether it is there.

    A module stands in for a compiled part, and says it when it is used.
    """

    def find_spec(self, name, path, target=None):
        if name not in ABSENT or (
                sys._getframe(2).f_globals['__name__'] == 'importlib.util'):
            return None
        if name.startswith('chainer_fp8pipe.'):
            loader: Any = self
            return importlib.machinery.ModuleSpec(name, loader)
        raise ModuleNotFoundError(ABSENT[name], name=name)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def missing(name):
            if name.startswith('__'):       # whoever looks at modules asks
                raise AttributeError(name)
            raise ImportError(ABSENT[module.__name__], name=module.__name__)
        module.__getattr__ = missing


def _tell_of_an_unmended_chainer():
    # By names, as the import of importlib.metadata takes ten times as long.
    found = [name[8:].rpartition('.')[0].partition('-py')[0]
             for folder in sys.path for name in glob.glob(
                 'chainer-*-info', root_dir=folder or '.')]
    if found and found[0] != TODAY and 'install-chainer' not in sys.argv:
        warnings.warn(
            f'Chainer {found[0]} is installed without the edits of this '
            f'version of chainer_fp8pipe; this line puts them in:  {_INSTALL}',
            stacklevel=4)


sys.meta_path.append(LastFinder())
_tell_of_an_unmended_chainer()
