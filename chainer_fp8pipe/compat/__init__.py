"""Lets Chainer 7.8.1 and ChainerMN import and work on a current stack.

Importing this module is enough, before or after ``chainer``.  It imports
neither Chainer nor CuPy: every patch belongs to one module of Chainer and
acts when that module is imported (at once if it already is), and only if the
installed Python, NumPy, setuptools or CuPy need it, which is found by trying.
Some make importing Chainer faster: SciPy is imported when it is first used.
A patch that does not find the code it was written for leaves the module alone
and gives a :class:`CompatWarning`.  ``print(compat.report())`` shows, for a
bug report, what was done.

Nothing stays on the ``numpy`` module: ``numpy.sctypes`` is there while one
module of Chainer is imported, and the modules that want a name which NumPy
has dropped see a stand-in for ``numpy`` of their own.

Limits:

- A child process that is spawned, not forked, must import this package
  itself.  It does if the main script imports it at its top, outside of
  ``if __name__ == '__main__'``; code given by ``python -c`` or typed at a
  prompt is not run again in the child.
- CuPy 14: the float16 GPU kernels of ``F.resize_images`` (backward),
  ``F.negative_sampling`` and ``L.BinaryHierarchicalSoftmax`` do not compile.
- Chainer's warnings about CuPy and iDeep versions are lost where
  ``chainer._environment_check`` is replaced.
"""
import sys
from importlib import metadata

from ._gpu import explain_no_gpu, require_gpu
from ._hook import CompatWarning, install, version
from ._patches import PATCHES

__all__ = [
    'CompatWarning', 'applied', 'explain_no_gpu', 'report', 'require_gpu']


def applied() -> tuple[str, ...]:
    """Names of the modules of Chainer patched so far in this process."""
    return tuple(p.module for p in PATCHES.values() if p.state == 'applied')


def report() -> str:
    """Versions, and the state and cause of each patch, for a bug report."""
    lines = ['Python ' + sys.version.split()[0]]
    lines += [f'{name} {version(name) or "not installed"}' for name in (
        'chainer', 'numpy', 'mpi4py', 'setuptools', *_cupy_distributions())]
    lines += [f'{p.module}:{p.lines}: {p.state} ({p.cause})'
              for p in PATCHES.values()]
    return '\n'.join(lines)


def _cupy_distributions():
    names = {d.metadata['Name'] for d in metadata.distributions()}
    return sorted(name for name in names if name and name.startswith('cupy'))


install(PATCHES)
