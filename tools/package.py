"""Builds what a package index takes, and tries it in empty environments.

The source distribution is built once, and from it a wheel by every supported
Python that is found; all are left in dist/.  auditwheel gives each wheel the
tag of the C libraries that it runs with: an index refuses one that says just
"linux".  The wheel is installed by the documented line into a virtual
environment that has nothing else, and trains on two ranks there.
"""
from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence

from .matrix import interpreters

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIST = ROOT / 'dist'
#: Not of the environment that is tried.
DROPPED = ('PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT', 'PYTHONPATH',
           'VIRTUAL_ENV')
JOB = """
import chainer_fp8pipe
import chainer
import chainermn
import numpy

comm = chainer_fp8pipe.create_communicator('fp8')
assert comm.size == 2
model = chainer.links.Linear(3, 2)
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm).setup(model)
for _ in range(3):
    model.cleargrads()
    y = model(numpy.full((4, 3), comm.rank + 1, 'f'))
    chainer.functions.sum(y * y).backward()
    optimizer.update()
weights = comm.gather_obj(model.W.array.tolist())
if comm.rank == 0:
    assert weights[0] == weights[1]
    print(chainer_fp8pipe.__file__)
"""


class PackageError(RuntimeError):
    """What was built lacks something, or a command failed."""


def run(*command: object, cwd: pathlib.Path = ROOT) -> str:
    """What a command prints.

    Raises:
        PackageError: It failed; with its output.
    """
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items()
             if name not in DROPPED} | {'OMP_NUM_THREADS': '1'})
    if done.returncode:
        raise PackageError(
            f'{done.stdout}\n{" ".join(map(str, command))} failed')
    return done.stdout


def documented_line(requirement: object, name: str = 'install-line') -> str:
    """A line of docs/installation.rst, for this in place of the checkout."""
    page = (ROOT / 'docs' / 'installation.rst').read_text()
    (line,) = re.findall(rf':name: {name}\n\n +(.+)\n', page)
    return line.replace("'.[", f"'{requirement}[")


def missing(names: Sequence[str], tracked: Sequence[str]) -> list[str]:
    """What a wheel lacks.

    Args:
        names: Of the files in the wheel.
        tracked: Those of the package in the checkout.

    Returns:
        Files of the checkout; a C source stands for what it is compiled to.
        Headers that only compilers of this package read are not missed.
    """
    held = set(names)
    lacks = []
    for path in map(pathlib.PurePosixPath, tracked):
        if path.suffix == '.c':
            stem = str(path).removesuffix('c')
            there = any(name.startswith(stem) and name.endswith('.so')
                        for name in held)
        else:
            there = str(path) in held or (
                path.suffix == '.h' and path.parts[1] not in (
                    'fp8', 'block_formats'))
        if not there:
            lacks.append(str(path))
    return lacks


def build_source() -> pathlib.Path:
    """The source distribution, alone in dist/, as an index would take it."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, '-m', 'build', '--sdist', '--outdir', DIST)
    (source,) = DIST.iterdir()
    check(source)
    return source


def check(distribution: pathlib.Path) -> None:
    """Raises PackageError where an index would not show the description."""
    run(sys.executable, '-m', 'twine', 'check', '--strict', distribution)


def why_not_portable() -> str:
    """What keeps wheels from getting a tag that an index takes; or nothing."""
    if not sys.platform.startswith('linux'):
        return 'auditwheel is for Linux'
    if importlib.util.find_spec('auditwheel') is None:
        return 'auditwheel is not installed'
    return ''


def portable(wheel: pathlib.Path) -> pathlib.Path:
    """The wheel for an index: tagged, and without what debuggers need.

    Args:
        wheel: As it was built.

    Returns:
        The other one, in a folder beside it; its tag names the oldest C
        library that has all that the compiled parts call.

    Raises:
        PackageError: auditwheel failed, as where more than the C library is
            needed.
    """
    folder = wheel.parent / 'portable'
    # Without a patcher no library can be copied into the wheel unnoticed.
    run(sys.executable, '-m', 'auditwheel', 'repair', '--strip', '--patcher',
        'none', '--wheel-dir', folder, wheel)
    (found,) = folder.glob('*.whl')
    return found


def try_on(interpreter: str, source: pathlib.Path,
           folder: pathlib.Path) -> pathlib.Path:
    """Builds the wheel with that Python, installs it, and runs two ranks.

    Args:
        interpreter: Its path.
        source: The source distribution.
        folder: An empty one, for the environment and for files.

    Returns:
        The wheel, which is left beside the source distribution.

    Raises:
        PackageError: A step failed.
    """
    run(interpreter, '-m', 'venv', folder / 'venv')
    binaries = folder / 'venv' / 'bin'
    run(binaries / 'python', '-m', 'pip', 'wheel', '--no-deps', '--wheel-dir',
        folder, source)
    (wheel,) = folder.glob('*.whl')
    if not why_not_portable():
        wheel = portable(wheel)
    check(wheel)
    lacks = missing(zipfile.ZipFile(wheel).namelist(), run(
        'git', 'ls-files', 'chainer_fp8pipe').splitlines())
    if lacks:
        raise PackageError(f'{wheel.name} lacks ' + ', '.join(lacks))
    run('bash', '-c', f'PATH="{binaries}:$PATH"; {documented_line(wheel)}',
        cwd=folder)
    run(binaries / 'python', '-m', 'pip', 'check')
    (folder / 'job.py').write_text(JOB)
    where = run(binaries / 'mpiexec', '-n', '2', binaries / 'python',
                'job.py', cwd=folder)
    if str(folder / 'venv') not in where:
        raise PackageError(f'the ranks have imported {where}')
    return shutil.copy(wheel, DIST / wheel.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--python', action='append', metavar='X.Y',
                        help='only this Python (repeatable)')
    wanted = parser.parse_args().python
    found = {minor: path for minor, path in interpreters().items()
             if not wanted or minor in wanted}
    if not found:
        sys.exit('Cannot package: no such Python was found')
    try:
        source = build_source()
        print(f'{source.stat().st_size / 1e6:6.2f} MB  {source.name}')
        if reason := why_not_portable():
            print(f'The wheels are for this machine, and no index takes them: '
                  f'{reason}')
        for minor, path in found.items():
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                wheel = try_on(path, source, pathlib.Path(folder).resolve())
            print(f'{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}: '
                  f'installed, ran on 2 ranks of Python {minor} '
                  f'({time.monotonic() - start:.0f} s)', flush=True)
    except PackageError as error:
        sys.exit(f'{error}\nCannot package: see above')


if __name__ == '__main__':
    main()
