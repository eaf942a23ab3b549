"""``python -m chainer_fp8pipe install-chainer``: Chainer, in one command.

Chainer 7.8.1 exists only as a source distribution, and its ``setup.py``
imports ``pkg_resources``, which setuptools 81 removed.  An installer builds it
with the newest setuptools, and so fails; and what it would install does not
import with NumPy 2.  Therefore Chainer is no requirement of this package.
This command has Chainer built with an older setuptools into a temporary
folder, edits it there (:mod:`._edits`), and installs the wheel of the result.
"""
from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

from . import is_mended
from ._edits import CHAINER, EDITS, TODAY, digest, edited

_DESCRIPTION = f"""
Builds Chainer {CHAINER} with an older setuptools, edits it for this Python,
and installs it as {TODAY}.  The installer is pip, or uv where the interpreter
has no pip.  It gets OPTIONS whenever it is called, as in

    python -m chainer_fp8pipe install-chainer --no-index --find-links wheels
"""
#: What --with brings.
_OTHERS = ('chainercv',)


class InstallationError(RuntimeError):
    """Chainer could not be built or installed; says what failed."""


def install_chainer(options: Sequence[str] = ()) -> None:
    """Installs Chainer for this interpreter; does nothing where it is.

    Args:
        options: Of ``pip install``, or of ``uv pip install``.

    Raises:
        InstallationError: There is no installer, or it failed.
    """
    if is_mended():
        print(f'Chainer {TODAY} is installed already')
        return
    with tempfile.TemporaryDirectory() as folder:
        # Without it pip keeps a wheel of the same version with older edits.
        _install('--force-reinstall', '--no-deps', *options,
                 str(build_wheel(pathlib.Path(folder), options)))
    _install(*options, f'chainer=={TODAY}')     # what it needs


def build_wheel(folder: pathlib.Path,
                options: Sequence[str] = ()) -> pathlib.Path:
    """Builds the wheel of the mended Chainer.

    Args:
        folder: Gets the wheel.
        options: Of the installer.

    Returns:
        The wheel.

    Raises:
        InstallationError: The installer failed, or brought another Chainer.
    """
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        _install('--no-deps', '--target', name, *options,
                 f'chainer=={CHAINER}')
        for file in {edit.file for edit in EDITS}:
            path = place / file
            if file == 'METADATA':
                path = place / f'chainer-{CHAINER}.dist-info' / file
            try:
                path.write_text(edited(file, path.read_text()))
            except (OSError, ValueError) as error:
                raise InstallationError(str(error)) from error
        shutil.copy(pathlib.Path(__file__).with_name('_today.py'),
                    place / 'chainer')
        information = place / f'chainer-{TODAY}.dist-info'
        (place / f'chainer-{CHAINER}.dist-info').rename(information)
        (information / 'EDITS').write_text(digest())
        return _zipped(place, information, folder)


def _zipped(place, information, folder):
    """The wheel of what a folder has."""
    wheel = folder / f'{information.stem}-py3-none-any.whl'
    for made in ('INSTALLER', 'RECORD', 'REQUESTED', 'direct_url.json'):
        (information / made).unlink(missing_ok=True)
    record = []
    with zipfile.ZipFile(wheel, 'w', zipfile.ZIP_DEFLATED) as file:
        for path in sorted(place.rglob('*')):
            name = path.relative_to(place).as_posix()
            if path.is_file() and path.suffix != '.pyc':
                content = path.read_bytes()
                file.writestr(name, content)
                of_it = base64.urlsafe_b64encode(
                    hashlib.sha256(content).digest()).rstrip(b'=').decode()
                record.append(f'{name},sha256={of_it},{len(content)}')
        name = f'{information.name}/RECORD'
        file.writestr(name, '\n'.join([*record, f'{name},,', '']))
    return wheel


def install_chainercv(options: Sequence[str] = ()) -> None:
    """Installs ChainerCV, whose file of C is for Python 3.10 at most.

    It has one function, of which the wheel gets one in Python.
    """
    with tempfile.TemporaryDirectory() as name:
        tools, place = pathlib.Path(name) / 'tools', pathlib.Path(name) / 'cv'
        _install('--target', str(tools), *options, _BUILT_WITH, 'wheel')
        _install('--target', str(place), '--no-deps', '--no-build-isolation',
                 *options, 'chainercv==0.13.1', PYTHONPATH=str(tools),
                 CC='true', LDSHARED='true')    # compiles nothing
        shutil.copy(pathlib.Path(__file__).with_name('_nms_gpu_post.py'),
                    place / 'chainercv' / 'utils' / 'bbox')
        information, = place.glob('*.dist-info')
        _install(*options, str(_zipped(place, information, tools)))


_BUILT_WITH = 'setuptools<81'


def _install(*arguments: str, **variables: str) -> None:
    """Runs the installer, which builds with an older setuptools."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / 'constraints.txt'
        path.write_text(f'{_BUILT_WITH}\n')
        if importlib.util.find_spec('pip'):
            command = [sys.executable, '-m', 'pip', 'install', *arguments]
            # Else pip before 23.1 builds with the environment's setuptools,
            # which needs the package "wheel" there.
            variables['PIP_USE_PEP517'] = '1'
            # pip before 25.3 knows the first only, from 26.2 on it reads the
            # second for builds.  As it splits the variables at blanks, the
            # path must be a URL.
            for name in 'PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT':
                variables[name] = (
                    f'{os.environ.get(name, "")} {path.as_uri()}')
        # "uv run" names itself in UV, also where it is not on the path.
        elif uv := os.environ.get('UV') or shutil.which('uv'):
            command = [uv, 'pip', 'install', '--python', sys.executable,
                       '--build-constraints', str(path), *arguments]
        else:
            raise InstallationError(
                f'{sys.executable} has no pip, and there is no uv on the '
                'path: put it there, or install pip with "python -m '
                'ensurepip"')
        done = subprocess.run(command, env={**os.environ, **variables})
    if done.returncode:
        raise InstallationError(
            f'this failed, its output is above: {" ".join(command)}')


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog='python -m chainer_fp8pipe install-chainer', allow_abbrev=False,
        usage='%(prog)s [--with chainercv] [OPTIONS OF THE INSTALLER]',
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--with', choices=[*_OTHERS], action='append',
                        default=[], dest='others', metavar='NAME',
                        help='a package that pip alone cannot build, too: '
                        + ', '.join(_OTHERS))
    given, options = parser.parse_known_args(arguments)
    try:
        install_chainer(options)
        if given.others:
            install_chainercv(options)
    except InstallationError as error:
        print(f'Cannot install Chainer: {error}', file=sys.stderr)
        return 1
    return 0
