"""The documented pip line works in a fresh environment, with any pip."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / 'docs' / 'installation.rst'

IMPORT_ALL = """
import chainer_fp8pipe
import chainer
import chainermn
import chainer_fp8pipe.fp8._loops as loops
from chainer_fp8pipe.block_formats import record_kernels
assert record_kernels.source()      # of headers, fp8's among them
print(chainer.__version__, chainermn.__name__, loops.__file__)
"""


def documented_line():
    """The shell line under the name ``install-line`` in the docs."""
    match = re.search(
        r':name: install-line\n\n   (.+)\n\n', PAGE.read_text()
    )
    assert match, f'{PAGE} has no code block named install-line'
    return match.group(1)


def run(command, cwd, environment):
    """Output of a shell command; shown if it fails."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f'{command}\n{done.stdout}'
    return done.stdout


def copy_of_checkout(target):
    """What a clone would have, with uncommitted edits."""
    listed = subprocess.run(
        ['git', 'ls-files', '-z', '-co', '--exclude-standard'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip('needs a git checkout to copy the tree from')
    for name in filter(None, listed.stdout.split('\0')):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def cache_without_wheels(directory):
    """pip's cache of downloads; what it built itself must be built anew."""
    listed = subprocess.run(
        [sys.executable, '-m', 'pip', 'cache', 'dir'],
        capture_output=True,
        text=True,
    )
    directory.mkdir()
    for downloads in Path(listed.stdout.strip()).glob('http*'):
        (directory / downloads.name).symlink_to(downloads)
    return directory


def fresh_environment(directory, pip):
    """Environment variables as after activating a new venv with ``pip``."""
    subprocess.run([sys.executable, '-m', 'venv', directory], check=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name
        not in (
            'PIP_CONSTRAINT',
            'PIP_BUILD_CONSTRAINT',
            'PYTHONPATH',
            'VIRTUAL_ENV',
        )
    }
    environment = dict(
        inherited,
        PATH=f'{directory / "bin"}{os.pathsep}{os.environ["PATH"]}',
        PIP_CACHE_DIR=str(cache_without_wheels(directory / 'cache')),
    )
    got = subprocess.run(
        f'python -m pip install --retries 1 --upgrade {pip}',
        shell=True,
        env=environment,
        capture_output=True,
        text=True,
    )
    if got.returncode:
        pytest.skip(
            'the package index cannot be reached: '
            + (got.stderr.strip().splitlines() or ['no reason given'])[-1]
        )
    return environment


@pytest.mark.timeout(600)
@pytest.mark.parametrize('pip', [
    'pip==23.2.1', pytest.param('pip', marks=pytest.mark.skipif(
        'CI' in os.environ, reason='one pip a commit: each takes a minute'))])
def test_the_documented_line_installs_all_that_is_imported(tmp_path, pip):
    tree = copy_of_checkout(tmp_path / 'tree')
    environment = fresh_environment(tmp_path / 'venv', pip)
    report = run(documented_line(), tree, environment)
    assert 'DEPRECATION' not in report
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    script = elsewhere / 'script.py'
    script.write_text(IMPORT_ALL)
    found = run(f'python {script.name}', elsewhere, environment)
    assert found.startswith('7.8.1 chainermn')
    assert str(tmp_path / 'venv') in found


def make(arguments, cwd):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'PYTHON')
    }
    return subprocess.run(
        ['make', *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


def tree_for_make(tmp_path):
    """What ``make`` reads before it installs anything."""
    (tmp_path / 'tools').mkdir()
    for name in (
        'Makefile',
        'tools/check_python.py',
        'setup.cfg',
        'setup.py',
        'pyproject.toml',
        'constraints.txt',
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_python_that_does_not_run_is_named_in_one_line(tmp_path):
    result = make(['demo', 'PYTHON=no-python'], tree_for_make(tmp_path))
    first, last = result.stderr.splitlines()
    assert first.startswith('Cannot set up: "no-python" does not run')
    assert last.startswith('make: ***')
    assert not (tmp_path / '.venv').exists()


def test_a_missing_compiler_is_named_in_one_line(tmp_path):
    result = make(
        ['demo', f'PYTHON={sys.executable}', 'CC=no-compiler'],
        tree_for_make(tmp_path),
    )
    first, last = result.stderr.splitlines()
    assert first.startswith('Cannot set up: there is no C compiler')
    assert last.startswith('make: ***')
    assert not (tmp_path / '.venv').exists()


def test_an_environment_that_make_did_not_make_is_left_alone(tmp_path):
    tree = tree_for_make(tmp_path)
    (tree / '.venv').mkdir()
    (tree / '.venv' / 'mine').touch()
    result = make(['demo', f'PYTHON={sys.executable}'], tree)
    assert result.returncode
    assert 'not made by make' in result.stderr
    assert (tree / '.venv' / 'mine').exists()


def test_a_failed_installation_shows_why_and_leaves_no_stamp(tmp_path):
    tree = tree_for_make(tmp_path)
    (tree / 'pyproject.toml').write_text('[build-system]\nrequires = 3\n')
    result = make(['demo', f'PYTHON={sys.executable}'], tree)
    assert result.returncode
    assert 'build-system.requires' in result.stderr
    assert 'Cannot set up: the step above failed' in result.stderr
    assert not list((tree / '.venv').glob('.demo*'))
