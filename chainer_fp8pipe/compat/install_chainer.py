"""``python -m chainer_fp8pipe install-chainer``: Chainer, in one command.

Chainer 7.8.1 exists only as a source distribution, and its ``setup.py``
imports ``pkg_resources``, which setuptools 81 removed.  An installer builds it
with the newest setuptools, and so fails.  The metadata of a package cannot say
what another one is to be built with; therefore Chainer is no requirement of
this package, and this command builds it with an older setuptools.
"""
from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from ._hook import CHAINER
from ._old_values import version

_REQUIREMENT = f'chainer=={CHAINER}'
_BUILT_WITH = 'setuptools<81\n'
_DESCRIPTION = f"""
Builds Chainer {CHAINER} with an older setuptools, and installs it beside this
package.  The installer is pip, or uv where the interpreter has no pip.  It
gets OPTIONS, as in

    python -m chainer_fp8pipe install-chainer --no-index --find-links wheels

pip is given them twice, for "pip wheel" and for "pip install".
"""


class InstallationError(RuntimeError):
    """Chainer could not be built or installed; says what failed."""


def install_chainer(options: Sequence[str] = ()) -> None:
    """Installs Chainer for this interpreter; does nothing where it is.

    Args:
        options: Of both ``pip wheel`` and ``pip install``, or of
            ``uv pip install``.

    Raises:
        InstallationError: There is no installer, or it failed.
    """
    if version('chainer') == CHAINER:
        print(f'Chainer {CHAINER} is installed already')
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if importlib.util.find_spec('pip'):
            wheel = build_wheel(folder, options)
            _call(_pip('install', *options, str(wheel)))
        # "uv run" names itself in UV, also where it is not on the path.
        elif uv := os.environ.get('UV') or shutil.which('uv'):
            _call([uv, 'pip', 'install', '--python', sys.executable,
                   '--build-constraints', str(_constraints(folder)),
                   *options, _REQUIREMENT])
        else:
            raise InstallationError(
                f'{sys.executable} has no pip, and there is no uv on the '
                'path: put it there, or install pip with "python -m '
                'ensurepip"')


def build_wheel(folder: pathlib.Path,
                options: Sequence[str] = ()) -> pathlib.Path:
    """Builds a wheel of Chainer with pip, which keeps it in its cache.

    The environment is left as it is: in ``pip install`` the constraint would
    replace its setuptools, too.

    Args:
        folder: Gets the wheel.
        options: Of ``pip wheel``.

    Returns:
        The wheel.

    Raises:
        InstallationError: pip failed.
    """
    with tempfile.TemporaryDirectory() as name:
        # As pip splits the variables at blanks, the path must be a URL.
        constraint = _constraints(pathlib.Path(name)).as_uri()
        _call(_pip('wheel', '--no-deps', '--wheel-dir', str(folder), *options,
                   _REQUIREMENT),
              # Else pip before 23.1 builds with the environment's setuptools,
              # which needs the package "wheel" there.
              PIP_USE_PEP517='1',
              # pip before 25.3 knows the first only, from 26.2 on it reads
              # the second for builds.
              **{variable: f'{os.environ.get(variable, "")} {constraint}'
                 for variable in ('PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT')})
    (wheel,) = folder.glob(f'chainer-{CHAINER}-*.whl')
    return wheel


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, '-m', 'pip', *arguments]


def _constraints(folder: pathlib.Path) -> pathlib.Path:
    path = folder / 'constraints.txt'
    path.write_text(_BUILT_WITH)
    return path


def _call(command: Sequence[str], **variables: str) -> None:
    """Runs an installer with these environment variables, too."""
    done = subprocess.run(command, env={**os.environ, **variables})
    if done.returncode:
        raise InstallationError(
            f'this failed, its output is above: {" ".join(command)}')


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog='python -m chainer_fp8pipe install-chainer', allow_abbrev=False,
        usage='%(prog)s [OPTIONS OF THE INSTALLER]', description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    _, options = parser.parse_known_args(arguments)
    try:
        install_chainer(options)
    except InstallationError as error:
        print(f'Cannot install Chainer: {error}', file=sys.stderr)
        return 1
    return 0
