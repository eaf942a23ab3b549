"""Fills wheels/ with what make gpu needs where nothing can be downloaded.

A machine with a GPU has a Python with CuPy and NumPy, a C compiler, and
perhaps no network.  What this package needs besides comes in a folder: wheels
for Python 3.12 on Linux, Chainer's built here because it has none, and the
digits of scikit-learn, which is too large to travel.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

from chainer_fp8pipe.compat.install_chainer import (
    InstallationError,
    build_wheel,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / 'wheels'
PYTHON = '3.12'
#: Any glibc from 2.17 to 2.28, which is that of 2018.
PLATFORMS = [f'manylinux_2_{minor}_x86_64' for minor in range(28, 16, -1)] + [
    'manylinux2014_x86_64', 'manylinux2010_x86_64', 'manylinux1_x86_64']
#: All of it, as pip must not choose for the Python that runs it here.
NEEDED = [
    # what installs
    'pip', 'setuptools',
    # what Chainer and this package need, less NumPy, which comes with CuPy
    'filelock', 'mpi4py', 'mpich', 'packaging', 'protobuf', 'six',
    'typing_extensions', 'xxhash',
    # what the tests need
    'hypothesis', 'iniconfig', 'ml_dtypes', 'pluggy', 'pygments', 'pytest',
    'pytest-timeout', 'sortedcontainers']
#: What builds and runs leave behind does not travel.
IGNORED = {'.git', 'build', 'dist', 'result', '__pycache__', 'wheels'}
LIMIT = 40e6


def pip(*arguments: str) -> None:
    """Runs pip, silently unless it fails."""
    done = subprocess.run(
        [sys.executable, '-m', 'pip', *arguments], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={'PIP_DISABLE_PIP_VERSION_CHECK': '1', **os.environ})
    if done.returncode:
        sys.exit(f'{done.stdout}\nCannot fill wheels/: pip {arguments[0]} '
                 'failed, its output is above')


def fill(folder: pathlib.Path) -> None:
    """Wheels and digits, in a folder that is empty before."""
    pip('download', '--no-deps', '--only-binary=:all:',
        '--implementation', 'cp', '--python-version', PYTHON,
        *(f'--platform={platform}' for platform in PLATFORMS),
        '--dest', str(folder), *NEEDED)
    try:
        chainer = build_wheel(folder, ['--quiet'])
    except InstallationError as error:
        sys.exit(f'Cannot fill wheels/: {error}')
    if not chainer.name.endswith('-py3-none-any.whl'):
        sys.exit('Cannot fill wheels/: the wheel of Chainer is for this '
                 'Python alone')
    sys.path.insert(0, str(ROOT / 'examples' / 'digits'))
    from data import save_digits
    save_digits(folder / 'digits.npz')


def tree_bytes(root: pathlib.Path) -> int:
    """Bytes of the checkout, less what git ignores."""
    total = 0
    for path, folders, files in os.walk(root):
        folders[:] = [name for name in folders
                      if name not in IGNORED and not name.startswith('.venv')]
        total += sum(os.lstat(os.path.join(path, name)).st_size
                     for name in files if not name.endswith('.so'))
    return total


def table(sizes: dict[str, int], limit: float) -> str:
    """One line per file, the largest first, and the sum with its limit."""
    lines = [f'{size / 1e6:8.2f} MB  {name}' for name, size in sorted(
        sizes.items(), key=lambda item: -item[1])]
    return '\n'.join([*lines, f'{sum(sizes.values()) / 1e6:8.2f} MB  in all '
                              f'(at most {limit / 1e6:g})'])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--limit', type=float, default=LIMIT, metavar='BYTES',
        help='most that wheels and checkout may have together (default: '
             '%(default)g)')
    limit = parser.parse_args().limit
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    fill(FOLDER)
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    sizes['(the checkout)'] = tree_bytes(ROOT)
    print(table(sizes, limit))
    if sum(sizes.values()) > limit:
        sys.exit('Too large to travel: leave out what the machine has, or '
                 'name another limit with --limit')


if __name__ == '__main__':
    main()
