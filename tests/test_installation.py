"""The documented line works in a fresh environment; make names what lacks."""
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.test_absent import TRAIN

ROOT = Path(__file__).parent.parent


def run(command, cwd, environment):
    """Output of a shell command; shown if it fails."""
    done = subprocess.run(command, shell=True, cwd=cwd, env=environment,
                          text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, f'{command}\n{done.stdout}'
    return done.stdout


def listed_by_git(*options):
    """Files of the checkout; skips the test where git says nothing of it.

    As where it is not installed, the tree was unpacked from an archive, or
    belongs to somebody else.
    """
    try:
        listed = subprocess.run(
            ['git', 'ls-files', '-z', *options], cwd=ROOT,
            capture_output=True, text=True).stdout
    except OSError:
        listed = ''
    return [name for name in listed.split('\0') if name] or pytest.skip(
        'needs git, and a checkout')


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """The source distribution of a clone with uncommitted edits."""
    tree = tmp_path_factory.mktemp('tree')
    for name in listed_by_git('-co', '--exclude-standard'):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    run(f'{shlex.quote(sys.executable)} setup.py -q sdist', tree, os.environ)
    found, = (tree / 'dist').iterdir()
    return found


def documented_line(requirement, name='install-line'):
    """A line of docs/installation.rst, for this in place of the checkout."""
    page = (ROOT / 'docs' / 'installation.rst').read_text()
    line, = re.findall(rf':name: {name}\n\n +(.+)\n', page)
    return line.replace("'.[", f"'{requirement}[").replace(
        ' . ', f' {requirement} ')


def test_the_source_distribution_holds_every_file_of_the_package(source):
    with tarfile.open(source) as archive:
        names = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
        information = next(name for name in archive.getnames()
                           if name.endswith('/PKG-INFO'))
        metadata = archive.extractfile(information).read().decode()
    for name in (*listed_by_git('chainer_fp8pipe'), 'setup.py', 'LICENSE',
                 'README.md'):
        assert Path(name) in names
    # Links to files of the checkout would lead nowhere on an index.
    description = metadata.partition('\n\n')[2]
    assert '](' not in description
    assert 'create_communicator' in description


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(('line', 'first'), [
    ('install-line', 'python -m pip install --upgrade pip==23.2.1'),
    ('install-line', 'python -m pip install --upgrade pip'),
    ('install-line-uv', 'uv pip install packaging')])
def test_a_documented_line_installs_what_trains_on_two_ranks(
        source, tmp_path, line, first):
    if first.startswith('uv') and shutil.which('uv') is None:
        pytest.skip('uv is not installed')
    venv = tmp_path / 'venv'
    environment = {
        **{name: value for name, value in os.environ.items()
           if name not in ('PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT',
                           'PYTHONPATH')},
        'PATH': f'{venv / "bin"}{os.pathsep}{os.environ["PATH"]}',
        'VIRTUAL_ENV': str(venv), 'PIP_CACHE_DIR': str(tmp_path / 'cache')}
    run(f'{"uv" if first.startswith("uv") else sys.executable + " -m"} '
        f'venv {venv}', tmp_path, os.environ)
    got = subprocess.run(first, shell=True, env=environment, cwd=tmp_path,
                         capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f'the package index cannot be reached: {got.stderr}')
    assert 'DEPRECATION' not in run(
        documented_line(source, line), tmp_path, environment)
    shutil.copy(ROOT / 'tests' / 'two_ranks.py', tmp_path)
    found = run('mpiexec -n 2 python two_ranks.py', tmp_path, environment)
    assert found.startswith('7.8.1 ')
    assert str(venv) in found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_compiler_a_documented_line_installs_what_trains_alone(
        source, tmp_path):
    run(f'{sys.executable} -m venv {tmp_path / "venv"}', tmp_path, os.environ)
    # Nothing else on the path: no compiler and no mpiexec.
    alone = {'PATH': str(tmp_path / 'venv' / 'bin'), **{
        name: value for name, value in os.environ.items()
        if name.startswith('PIP_')}}
    run(documented_line(source, 'install-line-alone'), tmp_path, alone)
    (tmp_path / 'train.py').write_text(TRAIN)
    run('python train.py', tmp_path, alone)
    installed = run('python -m pip list', tmp_path, alone)
    assert 'mpi' not in installed
    run("""python -c '
import chainer_fp8pipe.formats, numpy
try:
    chainer_fp8pipe.formats.encode(numpy.ones(3, "f"), numpy.zeros(3, "B"))
except ImportError as error:
    assert "compiled part" in str(error)
else:
    raise AssertionError
'""", tmp_path, alone)


def test_the_recipe_of_a_container_has_the_documented_line():
    recipe = (ROOT / 'docs' / 'clusters' / 'Dockerfile').read_text()
    assert f'\nRUN {documented_line(".")} ' in recipe


# --- make ----------------------------------------------------------------

@pytest.mark.parametrize(('prepare', 'arguments', 'said'), [
    (lambda tree: None, ['PYTHON=no-python'],
     'Cannot set up: "no-python" does not run'),
    (lambda tree: None, [f'PYTHON={sys.executable}', 'CC=no-compiler'],
     'needs a C compiler, and there is no no-compiler'),
    (lambda tree: (tree / '.venv').mkdir(), [f'PYTHON={sys.executable}'],
     'not made by make'),
], ids=['no Python', 'no compiler', 'a foreign .venv'])
def test_make_names_what_keeps_it_from_setting_up(
        tmp_path, prepare, arguments, said):
    for name in ('Makefile', 'chainer_fp8pipe/compat/install_chainer.py',
                 'tools/check_python.py', 'setup.cfg', 'setup.py',
                 'pyproject.toml'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    prepare(tmp_path)
    done = subprocess.run(
        ['make', 'demo', *arguments], cwd=tmp_path, capture_output=True,
        text=True, env={name: value for name, value in os.environ.items()
                        if name not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS',
                                        'PYTHON')})
    assert done.returncode
    assert said in done.stderr
    assert 'Cannot set up: ' in done.stderr     # also for a step that failed
    assert not list(tmp_path.glob('.venv/.demo*'))
