"""Every supported Python that is found: make matrix, and make package."""
import pathlib
import sys

import nox

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The first NumPy with wheels for that Python, but none before 1.23.
OLDEST = {'3.10': '1.23.5', '3.11': '1.23.5', '3.12': '1.26.0',
          '3.13': '2.1.0', '3.14': '2.3.2'}
TESTS = ['tests/test_compat.py', 'tests/formats', 'tests/allreduce']
nox.options.envdir = str(ROOT / '.nox')
nox.options.error_on_missing_interpreters = False


@nox.session(python=list(OLDEST))
@nox.parametrize('numpy', ['oldest', 'newest'])
def matrix(session, numpy):
    """Import and quick tests, with the oldest and the newest NumPy."""
    session.chdir(ROOT)
    # Chainer once needed pkg_resources at run time; its last setuptools.
    versions = ['numpy'] if numpy == 'newest' else [
        f'numpy=={OLDEST[session.python]}', 'setuptools<81']
    session.install('--editable', '.[mpich]', 'h5py', 'hypothesis',
                    'ml_dtypes', 'pytest', 'pytest-timeout', 'scipy',
                    *versions)
    session.run('python', '-m', 'chainer_fp8pipe', 'install-chainer')
    session.run('python', '-m', 'pytest', '-q', '-m', 'not slow',
                *(session.posargs or TESTS))


@nox.session(python=list(OLDEST))
def package(session):
    """dist/: the source, and a wheel that has trained on two ranks."""
    session.chdir(ROOT)
    session.install('auditwheel', 'build', 'twine')
    built = pathlib.Path(session.create_tmp()) / 'built'
    session.run('python', '-m', 'build', '--outdir', str(built), str(ROOT))
    wheel, = built.glob('*.whl')
    if sys.platform.startswith('linux'):
        # The tag names the oldest C library that has what is called: an index
        # refuses one that says just "linux".  Without a patcher no library
        # can be copied into the wheel unnoticed.
        session.run('auditwheel', 'repair', '--strip', '--patcher', 'none',
                    '--wheel-dir', str(built / 'tagged'), str(wheel))
        wheel, = (built / 'tagged').glob('*.whl')
    source, = built.glob('*.tar.gz')
    session.run('twine', 'check', '--strict', str(wheel), str(source))
    fresh = built / 'venv' / 'bin'
    session.run('python', '-m', 'venv', str(fresh.parent))
    session.chdir(built)
    for command in (
            f'python -m pip install {wheel}[mpich]',
            'python -m chainer_fp8pipe install-chainer',
            'python -m pip check',
            f'mpiexec -n 2 {fresh}/python {ROOT}/tests/two_ranks.py'):
        session.run(*f'{fresh}/{command}'.split(), external=True, env={
            'PATH': f'{fresh}:{session.env.get("PATH")}', 'PYTHONPATH': ''})
    (ROOT / 'dist').mkdir(exist_ok=True)
    for path in wheel, source:
        (ROOT / 'dist' / path.name).write_bytes(path.read_bytes())
