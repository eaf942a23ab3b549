"""Runs everything that waits for a GPU, and writes result/gpu.rst.

``make gpu`` calls it.  Each step has a process and a time of its own, and
none keeps the next from running.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import sys
import time

from . import environment
from .plan import Plan
from .report import report
from .steps import Outcome, Step, run, run_all

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NO_GPU = 3      # what tools.gpu.device ends with


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--python', default='', metavar='PATH',
        help='the interpreter that has CuPy (default: the first one found)')
    parser.add_argument(
        '--seconds', type=float, default=465, metavar='N',
        help='when all must have ended (default: %(default)s)')
    parser.add_argument(
        '--only', default='', metavar='TEXT',
        help='the steps with this in their name')
    parser.add_argument(
        '--dry', action='store_true',
        help='without a GPU: everything on the CPU, and little of it')
    parser.add_argument('--wheels', type=pathlib.Path, default=ROOT / 'wheels',
                        help='what make wheels has filled')
    parser.add_argument('--place', type=pathlib.Path,
                        default=ROOT / '.venv-gpu',
                        help='where the environment is made')
    parser.add_argument('--out', type=pathlib.Path,
                        default=ROOT / 'result' / 'gpu.rst',
                        help='the report (default: result/gpu.rst)')
    return parser.parse_args()


def main() -> int:
    options = arguments()
    end = time.monotonic() + options.seconds
    results = options.out.parent / 'gpu'
    results.mkdir(parents=True, exist_ok=True)
    about = {'Date': datetime.date.today().isoformat()}
    outcomes = [make_environment(options, end)]
    if outcomes[0].state != 'done':
        options.out.write_text(report(about, outcomes, 1, str(ROOT)))
        sys.stderr.write(outcomes[0].output + outcomes[0].errors)
        print(f'No environment: {outcomes[0].why}', file=sys.stderr)
        return 1
    python = options.place / 'bin' / 'python'
    variables = step_variables(options.place)
    found = run(Step('Device', '', [str(python), '-m', 'tools.gpu.device'],
                     60), end, str(ROOT), variables)
    if found.state != 'done' and not (
            options.dry and found.why == f'exit status {NO_GPU}'):
        reason = found.errors.strip().split('\n')[-1]
        print(f'No GPU: {reason or found.why}', file=sys.stderr)
        return 1
    about.update(json.loads(found.output.strip().split('\n')[-1]))
    if options.dry:
        about['GPU'] = 'none: a try on the CPU (--dry)'
    steps = [step for step in Plan(ROOT, python, options.wheels.resolve(),
                                   results.resolve(), options.dry).steps()
             if options.only in step.name]

    def after(outcome: Outcome) -> None:
        outcomes.append(outcome)
        options.out.write_text(
            report(about, outcomes, 1 + len(steps), str(ROOT)))
        show(outcome)
    run_all(steps, end, str(ROOT), variables, after)
    print(f'Report: {options.out}')
    return int(any(outcome.state != 'done' and not outcome.step.missing
                   for outcome in outcomes))


def make_environment(options: argparse.Namespace, end: float) -> Outcome:
    """The first step, on the Python that has CuPy."""
    python = environment.find_python(options.python)
    outcome = run(Step(
        'Environment', 'An environment on the Python that has CuPy, with '
        'what the folder of wheels adds, and this package compiled.',
        [sys.executable, '-m', 'tools.gpu.environment', python,
         str(options.place.absolute()), str(ROOT),
         str(options.wheels.resolve())], 180),
        end, str(ROOT), dict(os.environ))
    show(outcome)
    return outcome


def step_variables(place: pathlib.Path) -> dict[str, str]:
    """One BLAS thread per rank, this tree's package, and no other MPI."""
    kept = {name: value for name, value in os.environ.items()
            if name not in ('MPIEXEC', 'MPI4PY_LIBMPI', 'VIRTUAL_ENV')}
    return {**kept, 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
            'PYTHONPATH': str(ROOT), 'PYTHONFAULTHANDLER': '1',
            'PYTHONUNBUFFERED': '1',
            'PATH': f'{place.absolute() / "bin"}{os.pathsep}'
                    f'{os.environ["PATH"]}'}


def show(outcome: Outcome) -> None:
    """One line per step, as it ends."""
    print(f'{outcome.state:12}{outcome.seconds:7.1f} s  {outcome.step.name}'
          + (f': {outcome.why}' if outcome.why else ''), flush=True)


if __name__ == '__main__':
    sys.exit(main())
