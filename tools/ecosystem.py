"""Runs the test suites of Chainer's own distribution on this package.

No distribution has those tests: --source is a checkout of Chainer's
repository at v7.8.1, as "git clone --depth 1 --branch v7.8.1" makes.  Each
suite runs on the CPU in an environment of its own under .venv-ecosystem.  The
table counts failures by their reasons; a failure of no known reason is listed,
and the exit code is 1.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / '.venv-ecosystem'
NEEDED = ['h5py', 'matplotlib', 'mock', 'onnx', 'onnxruntime', 'pillow',
          'pytest', 'pytest-timeout', 'scipy']
#: By suite: the ranks that run it together.
SUITES = {'chainer': 1, 'onnx_chainer': 1, 'chainermn': 2}
SKIPPED = ('chainerx', 'cudnn', 'gpu', 'ideep', 'multi_gpu', 'slow', 'theano')
#: Reasons that are not this package's to mend, and what their errors say.
KNOWN = {
    'the test itself uses a name that NumPy has removed':
        r"module 'numpy' has no attribute|`np\.\w+` was removed",
    'the test itself expects a number that NumPy 2 refuses or rounds '
    'differently':
        r'test_pad_sequence.*out of bounds|test_det.*only 0-dimensional'
        r'|test_softmax_cross_entropy.*300000',
    'NumPy calls its device "cpu", which the test expects in capitals':
        r'test_debug_print|TestDebugPrint',
    'ChainerX is not built': r'[Cc]hainer[Xx]',
    'the test downloads a data set': r'Name or service not known|urlopen',
    'the test itself calls pytest.warns(None)': r'test_check_warning',
}
PLUGIN = 'import chainer_fp8pipe.compat\n'


def main():
    arguments = parse()
    tests = arguments.source / 'tests'
    if not (tests / 'chainer_tests').is_dir():
        sys.exit(f'--source {arguments.source} has no tests/chainer_tests: '
                 "name a checkout of Chainer's repository at v7.8.1")
    python = prepare(arguments.python)
    unknown = 0
    print(f'{"suite":14}{"passed":>8}{"failed":>8}  why', flush=True)
    for suite in arguments.suites or SUITES:
        cases = run(python, tests, suite, arguments.pairwise)
        unknown += show(suite, cases)
    sys.exit(bool(unknown))


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('suites', nargs='*', metavar='SUITE',
                        help=f'of {", ".join(SUITES)} (default: all)')
    parser.add_argument('--source', type=Path, required=True,
                        help="a checkout of Chainer's repository at v7.8.1")
    parser.add_argument('--python', default=sys.executable,
                        help='the interpreter (default: this one)')
    parser.add_argument('--pairwise', action='store_true',
                        help='pairs of parameters, no full products (a '
                             'tenth of the time)')
    arguments = parser.parse_args()
    if wrong := set(arguments.suites) - set(SUITES):
        parser.error(f'there is no suite {min(wrong)!r}')
    return arguments


def prepare(interpreter):
    """The Python of an environment with the package and what tests need."""
    version = subprocess.check_output(
        [interpreter, '-c', 'import sys; print(*sys.version_info[:2])'],
        text=True).split()
    home = HOME / '.'.join(version)
    python = home / 'bin' / 'python'
    if not python.exists():
        print(f'Installing into {home} (1 to 3 minutes)', flush=True)
        try:
            quietly(interpreter, '-m', 'venv', home)
            quietly(python, '-m', 'pip', 'install', f'{ROOT}[mpich]', *NEEDED)
            quietly(python, '-m', 'chainer_fp8pipe', 'install-chainer')
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
    return python


def quietly(*command):
    done = subprocess.run([str(part) for part in command], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f'{done.stdout}\nThis failed: {" ".join(map(str, command))}')


def run(python, tests, suite, pairwise):
    """The cases of a suite's first rank, as elements of XML."""
    folder = HOME / 'run'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / 'with_compat.py').write_text(PLUGIN)
    (folder / 'pytest.ini').write_text('[pytest]\nmarkers =\n' + ''.join(
        f'  {mark}: skipped\n' for mark in SKIPPED))
    command = ['-m', 'pytest', '-q', '-p', 'with_compat', '-p',
               'no:cacheprovider', '--timeout', '300', '--tb', 'short',
               '-c', folder / 'pytest.ini', '--rootdir', tests,
               '--continue-on-collection-errors', '-m',
               ' and '.join(f'not {mark}' for mark in SKIPPED)]
    if suite == 'chainermn':
        # Ranks would wait for one another where a single one fails.
        command += ['-k', 'not chx and not chainerx and not autoload']
    ranks = SUITES[suite]
    launcher = [python.parent / 'mpiexec', '-n', '1'] if ranks > 1 else []
    commands = []
    for rank in range(ranks):
        part = [python, *command, f'--junitxml={folder}/{rank}.xml',
                tests / f'{suite}_tests']
        commands += [*([':', '-n', '1'] if rank else []), *part]
    subprocess.run(
        [str(part) for part in [*launcher, *commands]], cwd=folder,
        stdout=(folder / 'output.txt').open('w'), stderr=subprocess.STDOUT,
        env={**os.environ, 'OMP_NUM_THREADS': '1',
             'PYTHONPATH': str(folder), 'MPLBACKEND': 'Agg',
             'CHAINER_TEST_PAIRWISE_PARAMETERIZATION':
                 'always' if pairwise else 'never'})
    if not (folder / '0.xml').exists():
        sys.exit(f'{suite} did not end: see {folder}/output.txt')
    return xml.etree.ElementTree.parse(folder / '0.xml').iter('testcase')


def show(suite, cases):
    """Prints a suite's rows; the number of failures of no known reason."""
    passed, reasons, unknown = 0, Counter(), []
    for case in cases:
        found = [part for part in case if part.tag in ('failure', 'error')]
        if not found:
            passed += not len(case)     # a skipped one has a child
            continue
        name = f'{case.get("classname")}::{case.get("name")}'
        text = f'{name}\n{found[0].text}'.replace('\n', ' ')
        reason = next((reason for reason, pattern in KNOWN.items()
                       if re.search(pattern, text)), None)
        reasons[reason or 'not known'] += 1
        if reason is None:
            unknown.append(f'    {name}: {found[0].get("message")}')
    print(f'{suite:14}{passed:8}{sum(reasons.values()):8}', *(
        f'\n{"":22}{count:8}  {reason}' for reason, count
        in reasons.most_common()), sep='', flush=True)
    print(*unknown, sep='\n', end='\n' if unknown else '')
    return len(unknown)


if __name__ == '__main__':
    main()
