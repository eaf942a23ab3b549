"""The environment of the steps, made without a network.

Its packages are those of the Python that has CuPy, wherever they are, and
what ``wheels/`` adds to them.
"""
from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from .steps import DUMP_AFTER

#: What is installed besides this package and what it needs.
PACKAGES = ('setuptools', 'mpich', 'pytest', 'pytest-timeout', 'hypothesis',
            'ml_dtypes')
# Read by every Python of the environment when it starts, ranks included.  CuPy
# looks for the CUDA libraries in what site.getsitepackages() says, which knows
# nothing of what is added later.
START_UP = f"""import faulthandler, os, pathlib, site
seconds = os.environ.get({DUMP_AFTER!r})
if seconds:
    faulthandler.dump_traceback_later(float(seconds), exit=True)
inherited = pathlib.Path(__file__).with_name('inherited.txt')
places = inherited.read_text().split(chr(10))[:-1]
own = site.getsitepackages
site.getsitepackages = lambda prefixes=None: [*own(prefixes), *places]
for place in places:
    site.addsitedir(place)
"""
_PLACES = ('import site, sys; print(*[path for path in sys.path if path and '
           'path.endswith(("site-packages", "dist-packages"))], sep="\\n")')


def find_python(wanted: str = '') -> str:
    """The interpreter to build on: the one named, or one that has CuPy."""
    if wanted:
        return wanted
    candidates = [sys.executable, *filter(None, map(shutil.which, (
        'python3', 'python3.13', 'python3.12', 'python3.11', 'python3.10')))]
    for python in candidates:
        if not subprocess.run(
                [python, '-c', 'import importlib.util as u; '
                 'raise SystemExit(u.find_spec("cupy") is None)'],
                stderr=subprocess.DEVNULL).returncode:
            return python
    return candidates[0]


def make(python: str, place: pathlib.Path, root: pathlib.Path,
         wheels: pathlib.Path) -> pathlib.Path:
    """Makes the environment anew and returns its interpreter.

    Args:
        python: Whose packages it sees.
        place: Where; removed first.
        root: The checkout, which is installed editable.
        wheels: The folder that ``make wheels`` fills.

    Raises:
        subprocess.CalledProcessError: With the output of what failed.
        FileNotFoundError: ``wheels`` is not there, or is for other Pythons.
    """
    (pip,) = list(wheels.glob('pip-*.whl')) or [None]
    if pip is None:
        raise FileNotFoundError(
            f'{wheels} holds no pip: run make wheels where there is a '
            'network, and bring the folder here')
    check_version(python, wheels, root)
    shutil.rmtree(place, ignore_errors=True)
    # Debian's venv has no pip; and "system" would be the packages of the
    # interpreter that a virtual environment was made from, not its own.
    _run([python, '-m', 'venv', '--without-pip', str(place)], root)
    made = place / 'bin' / 'python'
    own = pathlib.Path(_run([str(made), '-c', _PLACES], root).split()[0])
    places = _run([python, '-c', _PLACES], root)
    (own / 'inherited.txt').write_text(places)
    (own / 'start_up.py').write_text(START_UP)
    (own / 'start_up.pth').write_text('import start_up\n')
    install(made, pip, wheels, root, [*PACKAGES])
    install(made, pip, wheels, root, ['--editable', '.[chainer]'])
    return made


def check_version(python: str, wheels: pathlib.Path,
                  root: pathlib.Path) -> None:
    """Raises FileNotFoundError where compiled wheels are for other Pythons."""
    has = {found[1] for path in wheels.glob('*.whl') if (
        found := re.search(r'-cp3(\d+)-cp3\1-', path.name))}
    minor = _run([python, '-c', 'import sys; print(sys.version_info[1])'],
                 root).strip()
    if has and minor not in has:
        raise FileNotFoundError(
            f'{wheels} is for Python 3.{", 3.".join(sorted(has))}, and '
            f'{python} is 3.{minor}: name another one with PYTHON=')


def install(python: pathlib.Path, pip: pathlib.Path, wheels: pathlib.Path,
            root: pathlib.Path, what: Sequence[str]) -> None:
    """Installs from the folder alone, pip itself included."""
    _run([str(python), str(pip / 'pip'), 'install', '--no-index',
          '--find-links', str(wheels), '--no-build-isolation',
          '--disable-pip-version-check', '--no-cache-dir', *what], root)


def _run(command: Sequence[str], folder: pathlib.Path) -> str:
    # What the caller's variables name may not be there.
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(('PIP_', 'PYTHONPATH'))}
    return subprocess.run(
        [*command], cwd=folder, env=environment, text=True, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def main() -> None:
    python, place, root, wheels = sys.argv[1:]
    try:
        print(make(python, *map(pathlib.Path, (place, root, wheels))))
    except subprocess.CalledProcessError as error:
        sys.exit(f'{error.stdout}\n{" ".join(error.cmd)} failed')
    except FileNotFoundError as error:
        sys.exit(str(error))


if __name__ == '__main__':
    main()
