"""Runs quick tests on every supported Python, with oldest and newest NumPy.

Each pair has a virtual environment in .venv-matrix, which the next run uses
again.  Chainer once needed setuptools at run time: the environments with the
oldest NumPy have it, those with the newest have not.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / '.venv-matrix'
# The first NumPy with wheels for that Python, but none before 1.23.
OLDEST = {'3.10': '1.23.5', '3.11': '1.23.5', '3.12': '1.26.0',
          '3.13': '2.1.0'}
REQUIREMENTS = ['h5py', 'hypothesis', 'ml_dtypes', 'mpich', 'pytest',
                'pytest-timeout', 'scipy']
TESTS = ['tests/test_compat.py', 'tests/fp8', 'tests/allreduce']
COLUMNS = ['Python', 'NumPy', 'mpi4py', 'setuptools', 'passed', 'failed',
           'skipped', 'seconds']
ENVIRONMENT = {**os.environ, 'PIP_DISABLE_PIP_VERSION_CHECK': '1',
               'OMP_NUM_THREADS': '1'}
VERSIONS = """
import sys
from importlib import metadata
print(sys.version.split()[0])
for name in 'numpy', 'mpi4py', 'setuptools':
    try:
        print(metadata.version(name))
    except metadata.PackageNotFoundError:
        print('no')
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('tests', nargs='*', default=TESTS,
                        help='what pytest runs (default: %(default)s)')
    parser.add_argument('--python', action='append', choices=OLDEST,
                        metavar='X.Y', help='only this Python (repeatable)')
    parser.add_argument('--numpy', choices=['oldest', 'newest'],
                        help='only this NumPy')
    parser.add_argument('--fresh', action='store_true',
                        help='make the virtual environments anew')
    return parser.parse_args()


def run(*command, **options):
    """The finished process; standard output and error together in stdout."""
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def must(*command):
    done = run(*command)
    if done.returncode:
        sys.stdout.write(done.stdout)
        raise RuntimeError(' '.join(map(str, command)) + ' failed')
    return done.stdout


def interpreters():
    """Path of the newest interpreter found of each supported minor version."""
    found = {}
    on_path = [shutil.which(f'python{minor}') for minor in OLDEST]
    pyenv = Path.home().glob('.pyenv/versions/*/bin/python')
    for path in [*filter(None, on_path), *pyenv]:
        done = run(path, '-c', 'import sys; print(*sys.version_info[:3])')
        version = re.fullmatch(r'(\d+) (\d+) (\d+)\n', done.stdout)
        if version is None:  # such as pyenv's shim of a version not chosen
            continue
        major, minor, patch = map(int, version.groups())
        name = f'{major}.{minor}'
        if name in OLDEST and (name not in found or found[name][0] < patch):
            found[name] = patch, path
    return {name: found[name][1] for name in OLDEST if name in found}


def prepare(interpreter, minor, age, fresh):
    """The interpreter of the pair's environment, made if it is not there."""
    place = HOME / f'{minor}-{age}'
    python = place / 'bin' / 'python'
    wanted = ['--editable', '.', *REQUIREMENTS, 'numpy' + (
        f'=={OLDEST[minor]}' if age == 'oldest' else '')]
    sources = sorted((ROOT / 'chainer_fp8pipe').rglob('*.[ch]'))
    made_of = '\n'.join([str(interpreter), *wanted, *(
        (ROOT / name).read_text() for name in (
            'setup.cfg', 'setup.py', *sources))])
    stamp = place / '.made_of'
    if not fresh and stamp.exists() and stamp.read_text() == made_of:
        # The compiled part lies in the tree, and may have been cleaned.
        done = run(python, '-c', 'import chainer_fp8pipe.fp8')
        if done.returncode == 0:
            return python
    print('  installing', flush=True)
    shutil.rmtree(place, ignore_errors=True)
    must(interpreter, '-m', 'venv', place)
    pip = python, '-m', 'pip'
    must(*pip, 'install', *wanted)
    must(python, '-m', 'chainer_fp8pipe', 'install-chainer')
    if age == 'oldest':
        # The last that has pkg_resources, of which Chainer is aware.
        must(*pip, 'install', 'setuptools<81')
    else:
        must(*pip, 'uninstall', '--yes', 'setuptools')
    stamp.write_text(made_of)
    return python


def test(python, tests):
    """Numbers of tests passed, failed and skipped; shows what failed."""
    must(python, '-W', 'error', '-c',
         'import chainer_fp8pipe, chainer, chainermn')
    results = python.parent.parent / 'results.xml'
    results.unlink(missing_ok=True)
    done = run(python, '-m', 'pytest', '-q', '-p', 'no:cacheprovider',
               f'--junitxml={results}', *tests)
    if done.returncode:
        sys.stdout.write(done.stdout)
    if not results.exists():
        raise RuntimeError('pytest did not run')
    suite = xml.etree.ElementTree.parse(results).getroot()[0]
    total, skipped, *bad = (int(suite.get(key) or 0) for key in (
        'tests', 'skipped', 'failures', 'errors'))
    failed = sum(bad) or int(done.returncode != 0)
    return total - sum(bad) - skipped, failed, skipped


def row(interpreter, minor, age, options):
    start = time.monotonic()
    versions = [minor, age, '', '']
    try:
        python = prepare(interpreter, minor, age, options.fresh)
        versions = must(python, '-c', VERSIONS).split()
        results = test(python, options.tests)
    except RuntimeError as error:
        print(f'  {error}')
        results = '', 'set-up', ''
    return [*versions, *results, round(time.monotonic() - start)]


def main():
    options = arguments()
    chosen = {minor: path for minor, path in interpreters().items()
              if minor in (options.python or OLDEST)}
    if not chosen:
        sys.exit('No Python of ' + ', '.join(OLDEST) + ' found')
    rows = []
    for minor, interpreter in chosen.items():
        for age in [options.numpy] if options.numpy else ['oldest', 'newest']:
            print(f'Python {minor}, {age} NumPy', flush=True)
            rows.append(row(interpreter, minor, age, options))
    print()
    for line in [COLUMNS, *rows]:
        print(''.join(f'{cell!s:>11}' for cell in line))
    for minor in [minor for minor in OLDEST if minor not in chosen]:
        print(f'Python {minor}: not run')
    sys.exit(any(line[COLUMNS.index('failed')] for line in rows))


if __name__ == '__main__':
    main()
