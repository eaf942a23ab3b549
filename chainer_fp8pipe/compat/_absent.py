"""Importing a part that is not installed names the line that brings it.

``pip install chainer_fp8pipe`` brings no MPI; no installer can bring Chainer;
and where there was no C compiler the package has no compiled parts.
"""
# A last finder is asked where no other has found a module.  So whoever imports
# it, this package, ChainerMN or a script, says the same, and no module of this
# package has to look first.
import importlib.abc
import importlib.machinery
import sys

_CHAINER = (
    '{} is not installed: installing chainer_fp8pipe does not bring Chainer, '
    'which no current setuptools can build; this command does:  '
    'python -m chainer_fp8pipe install-chainer')
_ONNX = ("{} is not installed; this line brings it:  "
         "python -m pip install 'chainer_fp8pipe[onnx]'")
_CUPY = ('cupy is not installed; where there is no GPU '
         '"python -m chainer_fp8pipe run --cpu" gives a script NumPy\'s names '
         "for it, and this line brings it:  python -m pip install "
         "'chainer_fp8pipe[cuda13]'")
_COMPILED = (
    'the compiled part {} is missing: chainer_fp8pipe was not, or could not '
    'be, compiled.  With a C compiler and Python.h (Debian, Ubuntu: '
    'apt install gcc python3-dev) this line builds it:  python -m pip install '
    '--force-reinstall --no-deps --no-cache-dir --no-binary chainer_fp8pipe '
    'chainer_fp8pipe  (of a checkout: pip install --no-deps --editable .)')

#: By module, what is said where it cannot be found.
ABSENT = {
    **{name: _CHAINER.format(name) for name in ('chainer', 'chainermn')},
    **{name: _ONNX.format(name) for name in ('onnx', 'onnxruntime')},
    'PIL': 'images are decoded with Pillow; this line brings it:  '
           "python -m pip install 'chainer_fp8pipe[images]'",
    'cupy': _CUPY,
    'mpi4py': 'mpi4py is not installed, and what works over ranks needs MPI; '
              'this line brings it:  '
              "python -m pip install 'chainer_fp8pipe[mpich]'  "
              '(with an MPI of your own: [mpi] in place of [mpich])',
    **{name: _COMPILED.format(name) for name in (
        'chainer_fp8pipe.formats._formats',
        'chainer_fp8pipe.allreduce._engine')},
}


class _Last(importlib.abc.MetaPathFinder):

    def find_spec(self, name, path, target=None):
        """Says what is absent, unless the caller asks whether it is there.

        Of a compiled part there is a module that says it when something of
        it is used, so that what does not use it works.
        """
        frame = sys._getframe(1)
        asked = (frame, frame.f_back)      # importlib.util.find_spec()
        if name not in ABSENT or any(
                f is not None and f.f_globals.get('__name__')
                == 'importlib.util' for f in asked):
            return None
        if name.startswith('chainer_fp8pipe.'):
            return importlib.machinery.ModuleSpec(name, _Absent())
        raise ModuleNotFoundError(ABSENT[name], name=name)


class _Absent(importlib.abc.Loader):
    """Loads a module that raises ImportError when something of it is used."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def missing(name):
            if name.startswith('__'):       # whoever looks at modules asks
                raise AttributeError(name)
            raise ImportError(ABSENT[module.__name__], name=module.__name__)
        module.__getattr__ = missing


sys.meta_path.append(_Last())
