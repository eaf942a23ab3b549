"""Lets Chainer 7.8.1 and ChainerMN import and work on a current stack.

Where the package is installed, ``import chainer`` imports this module first
(``chainer_fp8pipe.pth``).  It imports neither Chainer nor CuPy.  Every patch
belongs to one module of Chainer and acts when that module is imported, if a
trial shows that the installed libraries need it.

Limits:

- A process that finds this package by PYTHONPATH only must import it before
  Chainer; so must a child process that is spawned, not forked.
- Chainer's warnings about CuPy and iDeep versions are lost where
  ``chainer._environment_check`` is replaced.
"""
import importlib.util
import sys
from importlib import metadata

from . import _old_names
from ._hook import CompatWarning, install
from ._old_names import run_path
from ._old_values import version
from ._patches import PATCHES

__all__ = [
    'CompatWarning', 'applied', 'explain_no_gpu', 'report', 'require_gpu',
    'run_path']


def applied() -> tuple[str, ...]:
    """Names of the modules of Chainer patched so far in this process."""
    return tuple(p.module for p in PATCHES.values() if p.state == 'applied')


def report() -> str:
    """For a bug report: versions, patches and their causes, old names."""
    installed = {d.metadata['Name'] or '' for d in metadata.distributions()}
    return '\n'.join([
        'Python ' + sys.version.split()[0],
        *(f'{name} {version(name) or "not installed"}' for name in (
            'chainer', 'numpy', 'mpi4py', 'setuptools',
            *sorted(name for name in installed if name.startswith('cupy')))),
        *(f'{p.module}:{p.lines}: {p.state} ({p.cause})'
          for p in PATCHES.values()),
        *(f'{user}: has got {name}, which is no more'
          for user, name in _old_names.used)])


def explain_no_gpu() -> str | None:
    """Why Chainer cannot use a GPU here, with the remedy; None if it can.

    Chainer says nothing: its ``chainer.backends.cuda.available`` is False.
    """
    if importlib.util.find_spec('cupy') is None:
        return ("CuPy is not installed: pip install 'chainer_fp8pipe[cuda13]'"
                ' (or [cuda12], after the CUDA version of the driver)')
    from chainer.backends import cuda
    if not cuda.available:
        return ('CuPy is installed but does not import (are the CUDA libraries'
                ' there? They come with the extra chainer_fp8pipe[cuda13]): '
                f'{cuda._resolution_error}')
    try:
        count = cuda.cupy.cuda.runtime.getDeviceCount()
    except cuda.cupy.cuda.runtime.CUDARuntimeError as error:
        return f'CuPy is installed but finds no usable GPU: {error}'
    return None if count else 'CuPy is installed but this machine has no GPU'


def require_gpu() -> None:
    """Raises RuntimeError with the reason if Chainer cannot use a GPU."""
    reason = explain_no_gpu()
    if reason is not None:
        raise RuntimeError(f'No GPU can be used. {reason}')


install(PATCHES)
