"""Chainer 7.8.1 on a current stack: its edits, and its absence.

``install-chainer`` mends Chainer when it installs it (:mod:`._edits`); the
import of this module says so where that is due, and does not import Chainer.
"""
import sys
import warnings
from importlib import metadata

from . import _absent as _absent
from ._edits import TODAY

__all__ = ['CompatWarning']


class CompatWarning(UserWarning):
    """The installed Chainer is not mended by this package."""


def _tell_of_an_unmended_chainer():
    command = 'install-chainer'
    try:
        found = metadata.version('chainer')
    except metadata.PackageNotFoundError:
        return          # the import of Chainer says so
    if found != TODAY and sys.argv[1:2] != [command]:
        how = ('with other edits than those' if '+today' in found
               else 'without the edits')
        warnings.warn(
            f'Chainer {found} is installed {how} that this package '
            'makes in it for current Pythons; this line puts them '
            f'in:  python -m chainer_fp8pipe {command}', CompatWarning,
            stacklevel=4)


_tell_of_an_unmended_chainer()
