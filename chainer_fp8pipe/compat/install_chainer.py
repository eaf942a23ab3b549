"""Builds Chainer 7.8.1 with an older setuptools, edits and installs it.

Its setup.py imports pkg_resources, which setuptools 81 removed: pip builds it
with the newest setuptools, and so fails; and what it would install does not
import with NumPy 2.  Therefore Chainer is no requirement of chainer_fp8pipe.
pip gets OPTIONS, but --user and the like only where it installs, as in

    python -m chainer_fp8pipe install-chainer --no-index --find-links wheels
"""
# So it is with ChainerCV, whose file of C is for Python 3.10 at most.
from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from ._edits import CHAINER, EDITS, TODAY, edited

#: In place of that file; on a GPU the rest of its way is for CuPy 7.
_NO_C = '''\
def _nms_gpu_post(*arguments):
    raise NotImplementedError('on a GPU: give it the boxes of cuda.to_cpu()')
'''


def _without_c(place):
    (place / 'chainercv/utils/bbox/_nms_gpu_post.py').write_text(_NO_C)


def _mended(place):
    information = place / f'chainer-{TODAY}.dist-info'
    (place / f'chainer-{CHAINER}.dist-info').rename(information)
    path = information / 'METADATA'
    path.write_text(path.read_text().replace(
        f'\nVersion: {CHAINER}\n', f'\nVersion: {TODAY}\n'))
    for file in {edit.file for edit in EDITS}:
        path = (information if file == 'METADATA' else place) / file
        try:
            path.write_text(edited(file, path.read_text()))
        except (OSError, ValueError) as error:
            sys.exit(f'Cannot install Chainer: {error}')
    shutil.copy(pathlib.Path(__file__).with_name('_today.py'),
                place / 'chainer')


#: Options of pip's that say how to install, which building has not.
_INSTALLING = frozenset((
    '-U', '--upgrade', '-I', '--ignore-installed', '--force-reinstall',
    '--user', '--no-compile', '--break-system-packages'))


def build_wheel(folder: str | os.PathLike[str], options: Sequence[str] = (),
                requirement: str = f'chainer=={CHAINER}',
                mend: Callable[[pathlib.Path], None] = _mended,
                **variables: str) -> pathlib.Path:
    """Builds a wheel, by default that of the mended Chainer; where it is.

    ``mend`` changes what was built, which is in the folder that it is given.
    """
    options = [one for one in options if one not in _INSTALLING]
    with tempfile.TemporaryDirectory() as name:
        tools, built, place = (
            pathlib.Path(name) / part for part in ('tools', 'built', 'place'))
        _run('pip', 'install', '--target', str(tools), *options,
             'setuptools<81', 'wheel')
        _run('pip', 'wheel', '--no-deps', '--no-build-isolation', *options,
             '--wheel-dir', str(built), requirement, PYTHONPATH=str(tools),
             **variables)
        for wheel in built.iterdir():
            shutil.unpack_archive(wheel, place, 'zip')
        mend(place)
        _run('wheel', 'pack', str(place), '--dest-dir', str(folder),
             PYTHONPATH=str(tools))
    wheel, = pathlib.Path(folder).glob('chainer*.whl')
    return wheel


def _run(*arguments: str, **variables: str) -> None:
    command = [sys.executable, '-m', *arguments]
    if arguments[0] == 'pip' and not importlib.util.find_spec('pip'):
        sys.exit(f'Cannot install Chainer: {sys.executable} has no pip, which '
                 '"python -m ensurepip" or "uv pip install pip" brings')
    if subprocess.run(command, env={**os.environ, **variables}).returncode:
        sys.exit('Cannot install Chainer: this failed, its output is above: '
                 + ' '.join(command))


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog='python -m chainer_fp8pipe install-chainer', allow_abbrev=False,
        usage='%(prog)s [--with chainercv] [OPTIONS OF PIP]',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--with', choices=['chainercv'], action='append',
                        default=[], dest='others', metavar='NAME',
                        help='chainercv, which pip alone cannot build, too')
    given, options = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        _run('pip', 'install', '--no-deps', *options,
             str(build_wheel(folder, options)))
        _run('pip', 'install', *options, f'chainer=={TODAY}')   # what it needs
    if given.others:
        with tempfile.TemporaryDirectory() as folder:
            _run('pip', 'install', *options, str(build_wheel(
                folder, options, 'chainercv==0.13.1', _without_c,
                CC='true', LDSHARED='true')))       # compiles nothing
    return 0
