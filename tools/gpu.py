"""All that waits for a GPU, on a machine that perhaps has no network.

    python tools/gpu.py wheels          # here: fill wheels/ (make wheels)
    python tools/gpu.py run PYTHON      # there: result/gpu.txt (make gpu)

That machine has Python 3.12 with CuPy and NumPy, and a C compiler.  Wheels of
the rest come in wheels/; Chainer's is built here, as there is none.
"""
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WHEELS, PLACE = ROOT / 'wheels', ROOT / '.venv-gpu'
REPORT = ROOT / 'result' / 'gpu.txt'
#: Any glibc until 2.28, which is that of 2018.
PLATFORMS = [f'--platform=manylinux{version}_x86_64' for version in (
    *(f'_2_{minor}' for minor in range(28, 16, -1)), 2014, 2010, 1)]
#: All of it, as pip must not choose for the Python that runs it here.
NEEDED = [      # NumPy comes with CuPy
    'pip', 'setuptools', 'filelock', 'mpi4py', 'mpich', 'packaging',
    'protobuf', 'six', 'typing_extensions', 'xxhash', 'hypothesis',
    'iniconfig', 'ml_dtypes', 'pluggy', 'pygments', 'pytest', 'pytest-timeout',
    'sortedcontainers']
#: Ranks, of which 0 is no job, and what is run.
STEPS = [
    (0, '-m pytest -q -m gpu tests'),
    *((ranks, f'examples/train_digits.py --communicator {name} '
       '--device @cupy:0 --epoch 4 --out result/gpu/digits')
      for ranks in (2, 4) for name in ('float32', 'fp8', 'int4', 'float16'))]


def wheels() -> None:
    """Fills the folder anew, and says how large it is."""
    sys.path.insert(0, str(ROOT))
    from chainer_fp8pipe.compat.install_chainer import build_wheel
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir()
    quietly(sys.executable, '-m', 'pip', 'download', '--no-deps',
            '--only-binary=:all:', '--implementation', 'cp',
            '--python-version', '3.12', '--dest', WHEELS, *PLATFORMS, *NEEDED)
    build_wheel(WHEELS, ['--quiet'])
    for path in sorted(WHEELS.iterdir()):
        print(f'{path.stat().st_size / 1e6:8.2f} MB  {path.name}')


def run(python: str) -> int:
    """Unpacks the wheels, runs the steps, and writes the report."""
    if not WHEELS.is_dir():
        sys.exit('wheels/ is missing: make wheels fills it with a network')
    shutil.rmtree(PLACE, ignore_errors=True)
    pip, = WHEELS.glob('pip-*.whl')
    quietly(python, pip / 'pip', 'install', '--no-index', '--no-deps',
            '--ignore-installed', '--prefix', PLACE, *WHEELS.glob('*.whl'))
    # Debian has it below PLACE/local.
    packages, library, launcher = (str(next(PLACE.rglob(name))) for name in (
        'mpi4py', 'libmpi.so.12', 'mpiexec'))
    os.environ.pop('MPIEXEC', None)
    os.environ.update(
        OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1', PYTHONFAULTHANDLER='1',
        PYTHONPATH=os.pathsep.join([str(ROOT), os.path.dirname(packages)]),
        MPI4PY_LIBMPI=library, PATH=os.pathsep.join([
            os.path.dirname(launcher), os.environ['PATH']]))
    quietly(python, 'setup.py', '-q', 'build_ext', '--inplace')
    quietly(python, '-c', 'import cupy; cupy.zeros(1)')
    REPORT.parent.mkdir(exist_ok=True)
    failed = 0
    with REPORT.open('w') as report:
        for ranks, arguments in STEPS:
            job = f'mpiexec -n {ranks} ' * bool(ranks)
            start = time.monotonic()
            done = subprocess.run(
                ['timeout', '150', *job.split(), python,
                 *arguments.split()], cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            failed += bool(done.returncode)
            line = (f'{job}{arguments}: exit status {done.returncode}, '
                    f'{time.monotonic() - start:.0f} s')
            print(line, flush=True)
            print(f'== {line}\n{done.stdout}', file=report, flush=True)
    print(f'report: {REPORT}')
    return failed


def quietly(*command: object) -> str:
    """What a command prints, shown only where the command fails."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f'{done.stdout}\n{" ".join(map(str, command))} failed')
    return done.stdout


if __name__ == '__main__':
    sys.exit(wheels() if sys.argv[1:] == ['wheels'] else
             run(sys.argv[2]) if sys.argv[1:2] == ['run'] else __doc__)
