"""Runs the tests of Chainer, and of packages that use it, on this package.

The distributions, which pip installs, have no tests: --source is a folder with
a checkout of each repository; a command that makes a missing one is printed.
Each project runs on the CPU in an environment of its own in .venv-ecosystem.
Of three and more parameters of a test of Chainer's kind, each pair of values
occurs in a case (CHAINER_TEST_PAIRWISE_PARAMETERIZATION=never: all products).
A test has 2 minutes.  Failures are counted by their reasons; one of no known
reason is listed, and the exit code is 1.
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
from typing import NamedTuple

from gpu import quietly

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / '.venv-ecosystem'


class Suite(NamedTuple):
    repository: str                     # of GitHub
    distribution: str
    tests: str = 'tests'                # in the repository
    needs: tuple[str, ...] = ()
    build: tuple[str, ...] = ()         # what setup.py takes from outside
    options: tuple[str, ...] = ()       # of pytest
    ranks: int = 1                      # that run it together


_CHAINER = Suite(
    'chainer/chainer', 'chainer==7.8.1', needs=(
        # The last onnxruntime for Python 3.10 reads no newer file.
        "onnx<1.18; python_version < '3.11'", 'h5py', 'matplotlib', 'onnx',
        'onnxruntime', 'pillow'))
_CYTHON = 'Cython', 'numpy', 'setuptools<81', 'wheel'
SUITES = {
    'chainer': _CHAINER._replace(tests='tests/chainer_tests'),
    'onnx_chainer': _CHAINER._replace(tests='tests/onnx_chainer_tests'),
    # Ranks would wait for one another where a single one fails.
    'chainermn': _CHAINER._replace(
        tests='tests/chainermn_tests', ranks=2,
        options=('-k', 'not chx and not chainerx and not autoload')),
    'chainercv': Suite(
        'chainer/chainercv', 'chainercv==0.13.1', build=_CYTHON,
        needs=('matplotlib', 'opencv-python-headless')),
    'chainerrl': Suite(
        'chainer/chainerrl', 'chainerrl==0.8.0', needs=('gym==0.19',),
        build=('setuptools<66', 'wheel<0.40')),
    'chainer-chemistry': Suite(
        'chainer/chainer-chemistry', 'chainer-chemistry==0.7.1',
        needs=('rdkit',)),
    'chainerui': Suite(
        'chainer/chainerui', 'chainerui==0.11.0', needs=(
            'flask<2.2', 'matplotlib', 'pillow', 'sqlalchemy<2',
            'werkzeug<2.1')),
    'chainer-mask-rcnn': Suite(
        'wkentaro/chainer-mask-rcnn', 'chainer-mask-rcnn==0.5.24',
        build=_CYTHON,
        needs=('chainercv==0.13.1', 'opencv-python-headless')),
}
SKIPPED = ('chainerx', 'cudnn', 'gpu', 'ideep', 'multi_gpu', 'slow', 'theano')
HOURS = 3       # for a suite
VERSIONS = ('import numpy, scipy, sys; print("Python", sys.version.split()[0],'
            ' "NumPy", numpy.__version__, "SciPy", scipy.__version__, end="")')
#: Reasons that are not this package's to mend, and what their errors say.
KNOWN = {
    'needs a download': r'Name or service not known|urlopen',
    'needs ffmpeg, pyglet or atari_py': 'ffmpeg|pyglet|atari_py',
    'the test itself expects a number that NumPy 2 refuses or rounds':
        r'test_pad_sequence.*out of bounds|test_det.*only 0-dimensional'
        r'|test_softmax_cross_entropy.*300000',
    'scikit-learn warns where the test expects an error':
        'test_roc_auc_evaluator_raise_value_error',
    'the test itself uses what pytest has removed':
        r'test_check_warning|relative tolerance for a scalar',
    'the test itself needs ~/.chainerui, or a log that others close':
        r'test_db_create|test_summary_timeout',
    'the test itself asks float32 for 1e-7, which is below its last bit':
        r'agents_tests.*Not equal to tolerance rtol=1e-07',
    # The last, as many a trace mentions it.
    'needs ChainerX': r'[Cc]hainer[Xx]',
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=(
        argparse.RawDescriptionHelpFormatter))
    parser.add_argument('suites', nargs='*', metavar='SUITE', choices=[
        [], *SUITES], help=f'of {", ".join(SUITES)} (default: all)')
    parser.add_argument('--source', type=os.path.abspath, required=True)
    parser.add_argument('--python', default=sys.executable)
    arguments = parser.parse_args()
    unknown = 0
    for name in arguments.suites or SUITES:
        suite = SUITES[name]
        checkout = Path(arguments.source) / suite.repository.split('/')[1]
        if not (checkout / suite.tests).is_dir():
            sys.exit('git clone --depth 1 --branch '
                     f'v{suite.distribution.partition("==")[2]} https://'
                     f'github.com/{suite.repository} {checkout}')
        python = prepare(arguments.python, checkout.parent, suite)
        unknown += show(name, run(python, checkout, suite), quietly(
            python, '-c', VERSIONS))
    sys.exit(bool(unknown))


def prepare(interpreter, source, suite):
    """The Python of an environment with a suite's distribution."""
    version = quietly(interpreter, '-c', 'import sys; print('
                      '*sys.version_info[:2], sep=".", end="")')
    home = HOME / version / suite.distribution
    python = home / 'bin' / 'python'
    pip = python, '-m', 'pip', 'install'
    if not (home / 'made').exists():
        print(f'Installing into {home} (1 to 3 minutes)', flush=True)
        quietly(interpreter, '-m', 'venv', '--clear', home)
        quietly(*pip, f'{ROOT}[mpich]', 'mock', 'pytest', 'pytest-timeout',
                'scipy', *suite.build)
        quietly(python, '-m', 'chainer_fp8pipe', 'install-chainer')
        os.environ['CFLAGS'] = '-I' + quietly(
            python, '-c', 'import numpy; print(numpy.get_include(), end="")')
        # ChainerCV's distribution has a C file for Python 3.10 at most.
        isolation = ['--no-build-isolation'] if suite.build else []
        quietly(*pip, *isolation, *(
            source / 'chainercv' if name.startswith('chainercv') else name
            for name in (*suite.needs, suite.distribution)))
        (home / 'made').touch()
    return python


def run(python, checkout, suite):
    """The cases of a suite's first rank, as elements of XML."""
    folder = python.parent.parent / 'run' / Path(suite.tests).name
    shutil.rmtree(folder, ignore_errors=True)
    # Without the package itself, which would be found before the installed.
    shutil.copytree(checkout, folder, ignore=lambda place, names: [
        name for name in names if place == str(checkout) and name != 'tests'
        and (checkout / name / '__init__.py').exists()])
    # pytest compiles tests itself if it rewrites their assertions; they then
    # have no old names.
    command = ['-m', 'pytest', '-q', '-p', 'chainer',
               '--assert', 'plain', '-p', 'no:cacheprovider',
               '--timeout', '120', '--session-timeout', f'{HOURS * 3600}',
               '--tb', 'short', '-c', os.devnull, '--rootdir', folder,
               '--continue-on-collection-errors', *suite.options, '-m',
               ' and '.join(f'not {mark}' for mark in SKIPPED)]
    # A worker that a test has left keeps Python from its end.
    commands = ['timeout', f'{HOURS * 3600 + 600}']
    if suite.ranks > 1:
        commands += [python.parent / 'mpiexec', '-n', '1']
    for rank in range(suite.ranks):
        commands += [*([':', '-n', '1'] if rank else []), python, *command,
                     f'--junitxml={folder}/{rank}.xml', folder / suite.tests]
    subprocess.run(
        [str(part) for part in commands], cwd=folder,
        stdout=(folder / 'output.txt').open('w'), stderr=subprocess.STDOUT,
        env={'CHAINER_TEST_PAIRWISE_PARAMETERIZATION': 'always', **os.environ,
             'OMP_NUM_THREADS': '1', 'PYTHONPATH': '', 'MPLBACKEND': 'Agg',
             # What needs a download fails at once.
             'http_proxy': 'http://localhost:9', 'no_proxy': 'localhost',
             'https_proxy': 'http://localhost:9'})
    if not (folder / '0.xml').exists():
        sys.exit(f'It did not end: see {folder}/output.txt')
    return xml.etree.ElementTree.parse(folder / '0.xml').iter('testcase')


def show(suite, cases, versions):
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
            message = found[0].get('message').partition('\n')[0]
            unknown.append(f'    {name}: {message}')
    print(f'{suite}, {versions}: {passed} passed, '
          f'{sum(reasons.values())} failed', *(
              f'{count:8}  {reason}' for reason, count
              in reasons.most_common()), *unknown, sep='\n', flush=True)
    return len(unknown)


if __name__ == '__main__':
    main()
