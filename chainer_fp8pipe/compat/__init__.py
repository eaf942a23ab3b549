"""Chainer 7.8.1 on a current stack: its edits, its absence, and GPUs.

``install-chainer`` mends Chainer when it installs it (:mod:`._edits`); the
import of this module says so where that is due, and imports neither Chainer
nor CuPy.
"""
import importlib.util
import sys
import warnings
from importlib import metadata

from . import _absent as _absent
from ._edits import EDITS, digest

__all__ = ['CompatWarning', 'explain_no_gpu', 'is_mended', 'report',
           'require_gpu']


class CompatWarning(UserWarning):
    """The installed Chainer is not mended by this package."""


def is_mended() -> bool:
    """Whether Chainer is installed with the edits of this package."""
    try:
        return metadata.distribution('chainer').read_text('EDITS') == digest()
    except metadata.PackageNotFoundError:
        return False


def report() -> str:
    """For a bug report: versions, edits and their causes, old names."""
    versions = {found.metadata['Name'] or '': found.version
                for found in metadata.distributions()}
    names = sys.modules.get(f'{__name__}.old_names')
    return '\n'.join([
        'Python ' + sys.version.split()[0],
        *(f'{name} {versions.get(name, "not installed")}' for name in (
            'chainer', 'numpy', 'mpi4py',
            *sorted(name for name in versions if name.startswith('cupy')))),
        f'Chainer is{"" if is_mended() else " not"} mended; the edits:',
        *dict.fromkeys(f'{edit.file}: {edit.why}' for edit in EDITS),
        *(f'{user}: has got {name}, which is no more'
          for user, name in (names.used if names else ()))])


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


def _tell_of_an_unmended_chainer():
    command = 'install-chainer'
    try:
        found = metadata.version('chainer')
    except metadata.PackageNotFoundError:
        return          # the import of Chainer says so
    if not is_mended() and sys.argv[1:2] != [command]:
        warnings.warn(
            f'Chainer {found} is installed without the edits that this '
            'package makes in it for current Pythons; this line puts them '
            f'in:  python -m chainer_fp8pipe {command}', CompatWarning,
            stacklevel=4)


_tell_of_an_unmended_chainer()
