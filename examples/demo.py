"""Shows in a minute what the package does, on four virtual hosts.

    python examples/demo.py

trains handwritten digits over four hosts with cables of 100 Mbit/s, in
float32, fp8 and int4, and then a model of which each rank holds a quarter.
The hosts are virtual ones of this machine (Linux, iproute2, MPICH; nobody
need be root); where there can be none, the ranks exchange in memory.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys

from chainer_fp8pipe.launcher.hosts import find_starter

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_TARGET = 98        # per cent


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', default=os.path.join('result', 'demo'),
                        help='directory for results (default: result/demo)')
    out = parser.parse_args().out
    os.makedirs(out, exist_ok=True)
    here = find_starter(os.environ).command(4, [])
    hosts = [sys.executable, '-m', 'chainer_fp8pipe.launcher.virtual_hosts',
             '--hosts', '4', '--rate', '100mbit', '--']
    tried = subprocess.run([*hosts, 'true'], capture_output=True, text=True)
    if reason := tried.returncode and tried.stderr.strip():
        print(f'No virtual hosts here ({reason}): times are those of ranks '
              'that exchange in memory.')
        hosts = here
    print('Training handwritten digits on 4 '
          + ('ranks of this machine' if reason else
             'virtual hosts with cables of 100 Mbit/s'), flush=True)
    digits, large = (os.path.join(out, name) for name in ('digits', 'large'))
    run([*hosts, sys.executable, script('demo_digits.py'), digits,
         str(_TARGET)])
    # Or its snapshots would have to be gone on from.
    shutil.rmtree(large, ignore_errors=True)
    print('\nTraining a model that no rank has the memory for, on 4 ranks',
          flush=True)
    run([*here, sys.executable, script('train_large.py'), '--epoch', '1',
         '--out', large])
    print_table(load(digits, 'summary.json'), load(large, 'held.json'),
                bool(reason))


def script(name):
    return os.path.join(_FOLDER, name)


def run(command):
    """Runs it; ends where it fails, in silence, as it has said why."""
    # A rank of MPICH's that waits takes a core from another one without.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={
        'MPIR_CVAR_ENABLE_HEAVY_YIELD': '1', 'OMP_NUM_THREADS': '1',
        'OPENBLAS_NUM_THREADS': '1', **os.environ})
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()     # mpiexec then ends its ranks
        process.wait()
        raise
    if code:
        sys.exit(code)


def load(*path):
    with open(os.path.join(*path)) as file:
        return json.load(file)


def print_table(runs, large, in_memory):
    """Five lines: what fp8 and int4 save, and what a pipeline does."""
    def row(title, values, remark=''):
        print(f'{title:26}' + ''.join(f'{value:>10}' for value in values)
              + f'  {remark}' * bool(remark))
    print()
    row('in memory' if in_memory else 'over 100 Mbit/s',
        [run['name'] for run in runs])
    row(f'seconds to {_TARGET} % accuracy', [
        'never' if run['final'] < _TARGET else
        f'{run["seconds"]:.1f}' for run in runs],
        f'4 {"ranks" if in_memory else "hosts"}, measured')
    row('kB sent per update', [f'{run["bytes"] / 1e3:.0f}' for run in runs],
        'by each rank')
    row('test accuracy [%]', [f'{run["final"]:.2f}' for run in runs],
        f'one image of {runs[0]["images"]} is '
        f'{100 / runs[0]["images"]:.2f} points')
    row('pipeline: MB a rank held', [f'{size / 1e6:.0f}'
                                     for size in large['held']],
        f'of {large["whole"] / 1e6:.0f} MB')


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
