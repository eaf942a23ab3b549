"""The documented line works in a fresh environment, with any pip."""
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tools.package import DROPPED, JOB, documented_line, missing

ROOT = Path(__file__).parent.parent

IMPORT_ALL = """
import chainer_fp8pipe
import chainer
import chainermn
import chainer_fp8pipe.fp8._loops as loops
from chainer_fp8pipe.block_formats import record_kernels
assert record_kernels.source()      # of headers, fp8's among them
print(chainer.__version__, chainermn.__name__, loops.__file__)
"""


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


def listed_by_git(*options):
    """Files of the checkout; skips the test where git says nothing of it.

    As where it is not installed, the tree was unpacked from an archive, or
    belongs to somebody else.
    """
    try:
        listed = subprocess.run(
            ['git', 'ls-files', '-z', *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout
    except OSError:
        listed = ''
    names = [name for name in listed.split('\0') if name]
    return names or pytest.skip('needs git, and a checkout')


def copy_of_checkout(target):
    """What a clone would have, with uncommitted edits."""
    for name in listed_by_git('-co', '--exclude-standard'):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def source_distribution(target):
    """That of a copy of the checkout."""
    tree = copy_of_checkout(target / 'tree')
    run(f'{shlex.quote(sys.executable)} setup.py -q sdist', tree, os.environ)
    (found,) = (tree / 'dist').iterdir()
    return found


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


def variables_for(directory):
    """Environment variables as after activating this venv."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in DROPPED
    }
    return dict(
        inherited,
        PATH=f'{directory / "bin"}{os.pathsep}{os.environ["PATH"]}',
        VIRTUAL_ENV=str(directory),
    )


def fresh_environment(directory, pip):
    """Environment variables as after activating a new venv with ``pip``."""
    subprocess.run([sys.executable, '-m', 'venv', directory], check=True)
    environment = dict(
        variables_for(directory),
        PIP_CACHE_DIR=str(cache_without_wheels(directory / 'cache')),
    )
    needs_index(
        f'python -m pip install --retries 1 --upgrade {pip}', environment
    )
    return environment


def needs_index(command, environment):
    """Runs what downloads; skips the test where that fails."""
    got = subprocess.run(
        command,
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


def tracked_files():
    return listed_by_git('chainer_fp8pipe')


def test_the_source_distribution_holds_every_file_of_the_package(tmp_path):
    with tarfile.open(source_distribution(tmp_path)) as archive:
        names = [
            Path(*Path(name).parts[1:]) for name in archive.getnames()
        ]
        information = next(
            name for name in archive.getnames() if name.endswith('/PKG-INFO')
        )
        metadata = archive.extractfile(information).read().decode()
    for name in (*tracked_files(), 'setup.py', 'LICENSE', 'README.md'):
        assert Path(name) in names
    # Links to files of the checkout would lead nowhere on an index.
    description = metadata.partition('\n\n')[2]
    assert '](' not in description
    assert 'create_communicator' in description


@pytest.mark.parametrize(
    'lost', ['fp8/_loops.so', 'py.typed', 'fp8/e5m2.h']
)
def test_what_a_wheel_lacks_is_found(lost):
    files = ['fp8/_loops.c', 'fp8/e5m2.h', 'py.typed', 'images/jpeg/cut.h']
    tracked = [f'chainer_fp8pipe/{name}' for name in files]
    built = [
        f'chainer_fp8pipe/{name}'
        for name in ('fp8/_loops.so', 'fp8/e5m2.h', 'py.typed')
    ]
    assert missing(built, tracked) == []
    built.remove(f'chainer_fp8pipe/{lost}')
    assert missing(built, tracked) == [
        f'chainer_fp8pipe/{lost}'.replace('.so', '.c')
    ]


def check_training(directory, environment):
    """What is installed imports, and trains on two ranks."""
    directory.mkdir()
    home = str(directory.parent / 'venv')
    (directory / 'script.py').write_text(IMPORT_ALL)
    found = run('python script.py', directory, environment)
    assert found.startswith('7.8.1 chainermn')
    assert home in found
    (directory / 'job.py').write_text(JOB)
    found = run('mpiexec -n 2 python job.py', directory, environment)
    assert home in found


@pytest.mark.timeout(600)
@pytest.mark.parametrize('pip', [
    'pip==23.2.1', pytest.param('pip', marks=pytest.mark.skipif(
        'CI' in os.environ, reason='one pip a commit: each takes a minute'))])
def test_the_documented_line_installs_what_trains_on_two_ranks(tmp_path, pip):
    source = source_distribution(tmp_path)
    environment = fresh_environment(tmp_path / 'venv', pip)
    report = run(documented_line(source), tmp_path, environment)
    assert 'DEPRECATION' not in report
    check_training(tmp_path / 'elsewhere', environment)
    assert 'No broken requirements' in run(
        'python -m pip check', tmp_path, environment
    )


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    'CI' in os.environ or shutil.which('uv') is None,
    reason='needs uv, and is for no commit: it takes a minute')
def test_the_line_for_uv_installs_what_trains_on_two_ranks(tmp_path):
    source = source_distribution(tmp_path)
    environment = variables_for(tmp_path / 'venv')
    run(f'uv venv --python {shlex.quote(sys.executable)} venv', tmp_path,
        environment)
    needs_index('uv pip install packaging', environment)
    run(documented_line(source, 'install-line-uv'), tmp_path, environment)
    check_training(tmp_path / 'elsewhere', environment)
    assert 'packages are compatible' in run(
        'uv pip check', tmp_path, environment
    )


def test_the_recipe_of_a_container_has_the_documented_line():
    recipe = (ROOT / 'docs' / 'clusters' / 'Dockerfile').read_text()
    assert f'\nRUN {documented_line(".")} ' in recipe
    assert 'CONSTRAINT' not in recipe


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
    for name in (
        'Makefile',
        'chainer_fp8pipe/compat/install_chainer.py',
        'tools/check_python.py',
        'setup.cfg',
        'setup.py',
        'pyproject.toml',
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
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
