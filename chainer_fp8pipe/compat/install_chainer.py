"""Builds Chainer 7.8.1 with an older setuptools, edits and installs it.

Its setup.py imports pkg_resources, which setuptools 81 removed: an installer
builds it with the newest setuptools, and so fails; and what it would install
does not import with NumPy 2.  Therefore Chainer is no requirement of
chainer_fp8pipe.  The installer is pip, or uv where the interpreter has no pip.
It gets OPTIONS whenever it is called, as in

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

#: In place of that file: its import needs the name, and on a GPU the rest of
#: its way is for CuPy 7.
_NO_C = '''\
def _nms_gpu_post(*arguments):
    raise NotImplementedError(
        'non_maximum_suppression() of boxes on a GPU is gone: give it those '
        'of chainer.backends.cuda.to_cpu()')
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


def build_wheel(folder: str | os.PathLike[str], options: Sequence[str] = (),
                requirement: str = f'chainer=={CHAINER}',
                mend: Callable[[pathlib.Path], None] = _mended,
                **variables: str) -> pathlib.Path:
    """Builds a wheel, by default that of the mended Chainer; where it is.

    Args:
        folder: Gets the wheel.
        options: Of the installer.
        requirement: What is built, with an older setuptools.
        mend: Changes what was built, which is in the folder that it is given.
        variables: Of the build's environment.
    """
    with tempfile.TemporaryDirectory() as name:
        tools, place = (pathlib.Path(name) / part for part in ('tools', 'it'))
        _install('--target', str(tools), *options, 'setuptools<81', 'wheel')
        _install('--target', str(place), '--no-deps', '--no-compile',
                 '--no-build-isolation', *options, requirement,
                 PYTHONPATH=str(tools), **variables)
        mend(place)
        for made in ('INSTALLER', 'REQUESTED', 'direct_url.json'):
            for path in place.glob(f'*.dist-info/{made}'):
                path.unlink()
        _run([sys.executable, '-m', 'wheel', 'pack', str(place),
              '--dest-dir', str(folder)], PYTHONPATH=str(tools))
    wheel, = pathlib.Path(folder).glob('chainer*.whl')
    return wheel


def _install(*arguments: str, **variables: str) -> None:
    """Runs the installer; where it fails, the process ends with code 1."""
    if importlib.util.find_spec('pip'):
        command = [sys.executable, '-m', 'pip', 'install', *arguments]
        variables['PIP_USE_PEP517'] = '1'       # of pip before 23.1
    # "uv run" names itself in UV, also where it is not on the path.
    elif uv := os.environ.get('UV') or shutil.which('uv'):
        command = [uv, 'pip', 'install', '--python', sys.executable,
                   *arguments]
    else:
        sys.exit(f'Cannot install Chainer: {sys.executable} has no pip, and '
                 'there is no uv on the path: put it there, or install pip '
                 'with "python -m ensurepip"')
    _run(command, **variables)


def _run(command: list[str], **variables: str) -> None:
    done = subprocess.run(command, env={**os.environ, **variables})
    if done.returncode:
        sys.exit('Cannot install Chainer: this failed, its output is above: '
                 + ' '.join(command))


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog='python -m chainer_fp8pipe install-chainer', allow_abbrev=False,
        usage='%(prog)s [--with chainercv] [OPTIONS OF THE INSTALLER]',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--with', choices=['chainercv'], action='append',
                        default=[], dest='others', metavar='NAME',
                        help='chainercv, which pip alone cannot build, too')
    given, options = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        _install('--no-deps', *options, str(build_wheel(folder, options)))
    _install(*options, f'chainer=={TODAY}')     # what it needs
    if given.others:
        with tempfile.TemporaryDirectory() as folder:
            _install(*options, str(build_wheel(
                folder, options, 'chainercv==0.13.1', _without_c,
                CC='true', LDSHARED='true')))       # compiles nothing
    return 0
