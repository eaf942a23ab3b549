"""All that waits for a GPU, on a machine that perhaps has no network.

    python tools/gpu.py wheels          # here: fill wheels/ (make wheels)
    python tools/gpu.py run PYTHON      # there: result/gpu.txt (make gpu)

A machine with a GPU has a Python with CuPy and NumPy, a C compiler, and
perhaps no network.  What this package needs besides comes in wheels/, for
Python 3.12 on Linux: Chainer's wheel is built here because it has none, and
the digits of scikit-learn, which is too large to travel, come as a file.
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
# Read by every Python of the environment when it starts.  CuPy looks for the
# CUDA libraries in what site.getsitepackages() says, which knows nothing of
# what is added later.
START_UP = '''import site
places, own = {places!r}, site.getsitepackages
site.getsitepackages = lambda prefixes=None: [*own(prefixes), *places]
for place in places:
    site.addsitedir(place)
'''
_DIGITS = '--device @cupy:0 --root wheels --epoch 4 --out result/gpu/'
#: Ranks, of which 0 is no job, and what is run.
STEPS = [
    (0, '-m pytest -q -m gpu tests'),
    (0, 'benchmarks/gpu.py'),
    *((ranks, 'examples/digits/train_digits.py --link 0 --communicator float32'
       ' fp8 fp8:overlap=next_forward int4 float16 '
       f'{_DIGITS}digits-{ranks}') for ranks in (2, 4)),
    (4, f'examples/pipeline/train_pipeline.py --pipeline 2 {_DIGITS}pipeline')]


def wheels() -> None:
    """Fills the folder anew, and says how large it is."""
    sys.path[:0] = [str(ROOT), str(ROOT / 'examples' / 'digits')]
    from chainer_fp8pipe.compat.install_chainer import build_wheel
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir()
    quietly(sys.executable, '-m', 'pip', 'download', '--no-deps',
            '--only-binary=:all:', '--implementation', 'cp',
            '--python-version', '3.12', '--dest', WHEELS, *PLATFORMS, *NEEDED)
    build_wheel(WHEELS, ['--quiet'])
    from data import save_digits
    save_digits(WHEELS / 'digits.npz')
    for path in sorted(WHEELS.iterdir()):
        print(f'{path.stat().st_size / 1e6:8.2f} MB  {path.name}')


def run(python: str) -> int:
    """Makes an environment, runs the steps in it, and writes the report."""
    made = _environment(python)
    quietly(made, '-c', 'from chainer_fp8pipe.compat import explain_no_gpu; '
            'raise SystemExit(explain_no_gpu() or 0)')
    variables = {
        **{name: value for name, value in os.environ.items()
           if name not in ('MPIEXEC', 'MPI4PY_LIBMPI', 'VIRTUAL_ENV')},
        'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
        'PYTHONPATH': str(ROOT), 'PYTHONFAULTHANDLER': '1',
        'PATH': f'{PLACE / "bin"}{os.pathsep}{os.environ["PATH"]}'}
    REPORT.parent.mkdir(exist_ok=True)
    failed = 0
    with REPORT.open('w') as report:
        for ranks, arguments in STEPS:
            command = f'mpiexec -n {ranks} ' * bool(ranks) + (
                f'{made.relative_to(ROOT)} {arguments}')
            start = time.monotonic()
            done = subprocess.run(
                ['timeout', '150', *command.split()], cwd=ROOT, env=variables,
                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            failed += bool(done.returncode)
            line = (f'{command}: exit status {done.returncode}, '
                    f'{time.monotonic() - start:.0f} s')
            print(line, flush=True)
            print(f'== {line}\n{done.stdout}', file=report, flush=True)
    print(f'report: {REPORT}')
    return failed


def _environment(python: str) -> pathlib.Path:
    """An interpreter that sees the packages of another, and the wheels."""
    if not WHEELS.is_dir():
        sys.exit(f'{WHEELS} is missing: run make wheels where there is a '
                 'network, and bring the folder here')
    pip, = WHEELS.glob('pip-*.whl')
    shutil.rmtree(PLACE, ignore_errors=True)
    # Debian's venv has no pip; and "system" would be the packages of the
    # interpreter that a virtual environment was made from, not its own.
    quietly(python, '-m', 'venv', '--without-pip', PLACE)
    made = PLACE / 'bin' / 'python'
    sites, own = ([
        path for path in quietly(
            one, '-c', 'import sys; print(*sys.path, sep="\\n")').splitlines()
        if path.endswith(('site-packages', 'dist-packages'))]
        for one in (python, made))
    start_up = pathlib.Path(own[0]) / 'start_up.py'
    start_up.write_text(START_UP.format(places=sites))
    start_up.with_suffix('.pth').write_text('import start_up\n')
    for what in ('setuptools mpich pytest pytest-timeout hypothesis ml_dtypes',
                 '--editable .[chainer,mpi]'):
        quietly(made, pip / 'pip', 'install', '--no-index', '--find-links',
                WHEELS, '--no-build-isolation', '--no-cache-dir',
                *what.split())
    return made


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
