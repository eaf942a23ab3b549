"""All that waits for a GPU, on a machine that perhaps has no network.

    python tools/gpu.py wheels      # here: fill wheels/ (make wheels)
    python tools/gpu.py run         # there: into result/gpu.txt (make gpu)

A machine with a GPU has a Python with CuPy and NumPy, a C compiler, and
perhaps no network.  What this package needs besides comes in wheels/, for
Python 3.12 on Linux: Chainer's wheel is built here because it has none, and
the digits of scikit-learn, which is too large to travel, come as a file.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WHEELS, PLACE = ROOT / 'wheels', ROOT / '.venv-gpu'
REPORT = ROOT / 'result' / 'gpu.txt'
#: Any glibc from 2.17 to 2.28, which is that of 2018.
PLATFORMS = [f'manylinux_2_{minor}_x86_64' for minor in range(28, 16, -1)] + [
    'manylinux2014_x86_64', 'manylinux2010_x86_64', 'manylinux1_x86_64']
#: All of it, as pip must not choose for the Python that runs it here.
NEEDED = [
    'pip', 'setuptools',
    # what Chainer and this package need, less NumPy, which comes with CuPy
    'filelock', 'mpi4py', 'mpich', 'packaging', 'protobuf', 'six',
    'typing_extensions', 'xxhash',
    # what the tests need
    'hypothesis', 'iniconfig', 'ml_dtypes', 'pluggy', 'pygments', 'pytest',
    'pytest-timeout', 'sortedcontainers']
# Read by every Python of the environment when it starts.  CuPy looks for the
# CUDA libraries in what site.getsitepackages() says, which knows nothing of
# what is added later.
START_UP = '''import pathlib, site
inherited = pathlib.Path(__file__).with_name('inherited.txt')
places = inherited.read_text().split(chr(10))[:-1]
own = site.getsitepackages
site.getsitepackages = lambda prefixes=None: [*own(prefixes), *places]
for place in places:
    site.addsitedir(place)
'''
_SITES = ('import sys; print(*[path for path in sys.path if path.endswith('
          '("site-packages", "dist-packages"))], sep="\\n")')
_EXAMPLE = ('--device', '@cupy:0', '--root', str(WHEELS), '--epoch', '4')
#: What is run, with its ranks; 0 is no job of ranks.
STEPS = [
    ('bits and tests', 0, ['-m', 'pytest', '-q', '-m', 'gpu', 'tests']),
    ('kernels', 0, ['benchmarks/gpu.py']),
    *((f'digits, {ranks} ranks', ranks, [
        'examples/digits/train_digits.py', '--link', '0', *_EXAMPLE,
        '--out', f'result/gpu/digits-{ranks}', '--communicator', 'float32',
        'fp8', 'fp8:overlap=next_forward', 'int4', 'float16'])
      for ranks in (2, 4)),
    ('pipeline, 2 stages x 2 replicas', 4, [
        'examples/pipeline/train_pipeline.py', *_EXAMPLE, '--out',
        'result/gpu/pipeline', '--pipeline', '2'])]


def wheels() -> None:
    """Fills the folder anew, and says how large it is."""
    sys.path[:0] = [str(ROOT), str(ROOT / 'examples' / 'digits')]
    from chainer_fp8pipe.compat.install_chainer import build_wheel
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir()
    _run(sys.executable, '-m', 'pip', 'download', '--no-deps',
         '--only-binary=:all:', '--implementation', 'cp', '--python-version',
         '3.12', *(f'--platform={platform}' for platform in PLATFORMS),
         '--dest', WHEELS, *NEEDED)
    build_wheel(WHEELS, ['--quiet'])
    from data import save_digits
    save_digits(WHEELS / 'digits.npz')
    for path in sorted(WHEELS.iterdir()):
        print(f'{path.stat().st_size / 1e6:8.2f} MB  {path.name}')


def run(python: str) -> int:
    """Makes an environment, runs the steps in it, and writes the report."""
    made = _environment(python)
    _run(made, '-c', 'import chainer_fp8pipe; from chainer_fp8pipe.compat '
         'import explain_no_gpu; raise SystemExit(explain_no_gpu() or 0)')
    variables = {
        **{name: value for name, value in os.environ.items()
           if name not in ('MPIEXEC', 'MPI4PY_LIBMPI', 'VIRTUAL_ENV')},
        'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
        'PYTHONPATH': str(ROOT), 'PYTHONFAULTHANDLER': '1',
        'PATH': f'{PLACE / "bin"}{os.pathsep}{os.environ["PATH"]}'}
    REPORT.parent.mkdir(exist_ok=True)
    failed = 0
    with REPORT.open('w') as report:
        for name, ranks, arguments in STEPS:
            launcher = ['mpiexec', '-n', str(ranks)] if ranks else []
            start = time.monotonic()
            done = subprocess.run(
                ['timeout', '150', *launcher, str(made), *arguments],
                cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT)
            failed += bool(done.returncode)
            line = (f'{name}: exit status {done.returncode}, '
                    f'{time.monotonic() - start:.0f} s')
            print(line, flush=True)
            report.write(f'== {line}\n{done.stdout}\n')
            report.flush()
    print(f'report: {REPORT}')
    return failed


def _environment(python: str) -> pathlib.Path:
    """An interpreter that sees the packages of another, and the wheels."""
    pip = next(WHEELS.glob('pip-*.whl'), None)
    if pip is None:
        sys.exit(f'{WHEELS} holds no pip: run make wheels where there is a '
                 'network, and bring the folder here')
    shutil.rmtree(PLACE, ignore_errors=True)
    # Debian's venv has no pip; and "system" would be the packages of the
    # interpreter that a virtual environment was made from, not its own.
    _run(python, '-m', 'venv', '--without-pip', PLACE)
    made = PLACE / 'bin' / 'python'
    own = pathlib.Path(_run(made, '-c', _SITES).split()[0])
    (own / 'inherited.txt').write_text(_run(python, '-c', _SITES))
    (own / 'start_up.py').write_text(START_UP)
    (own / 'start_up.pth').write_text('import start_up\n')
    for what in (['setuptools', 'mpich', 'pytest', 'pytest-timeout',
                  'hypothesis', 'ml_dtypes'],
                 ['--editable', '.[chainer,mpi]']):
        _run(made, pip / 'pip', 'install', '--no-index', '--find-links',
             WHEELS, '--no-build-isolation', '--no-cache-dir', *what)
    return made


def _run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f'{done.stdout}\n{" ".join(map(str, command))} failed')
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['wheels', 'run'])
    parser.add_argument('--python', default=shutil.which('python3'),
                        help='the interpreter that has CuPy (default: '
                        'python3)')
    options = parser.parse_args()
    if options.what == 'wheels':
        wheels()
    else:
        sys.exit(run(options.python))


if __name__ == '__main__':
    main()
