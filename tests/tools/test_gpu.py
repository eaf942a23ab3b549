"""``make gpu`` and ``make wheels`` where there is neither GPU nor network."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import wheels
from tools.gpu.plan import COMMUNICATORS, Plan

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = {
    'tools.gpu.bits': (['-m', 'tools.gpu.bits', '--dry'],
                       ['encode, nearest', 'int5 accumulate']),
    'gpu_kernels': (['benchmarks/gpu_kernels.py', '--dry', '--elements',
                     '1000', '--repeats', '2'],
                    ['copy (kernel)', 'e2m1 encode + residual']),
    'gpu_staging': (['benchmarks/gpu_staging.py', '--dry', '--repeats', '2'],
                    ['download, shared', 'download, two copies', 'int4'])}


def python(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, 'PYTHONPATH': str(ROOT)})


def test_without_wheels_the_remedy_is_named_and_reported(tmp_path):
    done = python('-m', 'tools.gpu', '--wheels', tmp_path / 'none', '--place',
                  tmp_path / 'made', '--out', tmp_path / 'out' / 'gpu.rst')
    assert done.returncode == 1
    assert 'holds no pip: run make wheels' in done.stderr
    assert 'holds no pip' in (tmp_path / 'out' / 'gpu.rst').read_text()
    assert not (tmp_path / 'made').exists()


def test_wheels_for_another_python_are_named_before_anything_is_made(
        tmp_path):
    for name in 'pip-1-py3-none-any', 'some-1-cp37-cp37-manylinux1_x86_64':
        (tmp_path / f'{name}.whl').touch()
    done = python('-m', 'tools.gpu', '--python', sys.executable, '--wheels',
                  tmp_path, '--place', tmp_path / 'made', '--out',
                  tmp_path / 'out' / 'gpu.rst')
    assert done.returncode == 1
    assert (f'is for Python 3.7, and {sys.executable} is '
            f'3.{sys.version_info[1]}: name another one with PYTHON='
            in done.stderr)
    assert not (tmp_path / 'made').exists()


@pytest.mark.parametrize('program', PROGRAMS)
def test_what_a_gpu_will_run_runs_on_a_stand_in(program):
    arguments, lines = PROGRAMS[program]
    done = python(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in lines:
        assert f'\n{line}' in done.stdout


def test_bits_that_differ_are_counted_and_shown(tmp_path):
    wrong = tmp_path / 'wrong.py'
    wrong.write_text(
        'import runpy, sys\nimport chainer_fp8pipe\n'
        'from chainer_fp8pipe.fp8 import kernels\n'
        'decode = kernels.decode\n'
        'kernels.decode = lambda: decode()._replace('
        "operation='value = e5m2_decode(code == 66 ? 67 : code);')\n"
        "sys.argv[1:] = ['--dry']\n"
        "runpy.run_module('tools.gpu.bits', run_name='__main__')\n")
    done = python(wrong)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stdout.splitlines()
               if line.startswith('decode ')]
    assert line.split()[1:4] == ['256', '1', '0']
    assert 'element 66 of out is 3.5 (0x40600000) in place of 3.0' in (
        done.stdout)


@pytest.mark.parametrize('dry', [False, True])
def test_every_communicator_is_in_the_plan(dry):
    from chainer_fp8pipe.communicators.factory import CHAINERMN
    from chainer_fp8pipe.communicators.options import FAMILIES
    assert {*FAMILIES, *CHAINERMN} <= set(COMMUNICATORS)
    steps = Plan(ROOT, Path(sys.executable), Path('wheels'), Path('out'),
                 dry).steps()
    names = [step.name for step in steps]
    assert len(names) == len(set(names))
    assert names[:4] == ['Bits', 'Tests', 'Kernels', 'Staging']
    assert {f'Communicator {name}' for name in COMMUNICATORS} < set(names)
    assert any('--dry' in step.command for step in steps) == dry
    (tests,) = [step for step in steps if step.name == 'Tests']
    assert {'tests/fp8/test_gpu.py', 'tests/codecs/test_device.py',
            'tests/block_formats/test_record_gpu.py'} <= set(tests.command)


def test_wheels_are_listed_by_size_and_have_a_limit():
    lines = wheels.table({'small': 10_000, 'large': 2_000_000}, 4e7)
    assert [line.split()[-1] for line in lines.splitlines()[:2]] == [
        'large', 'small']
    assert lines.endswith('2.01 MB  in all (at most 40)')


def test_what_is_built_does_not_count_as_checkout(tmp_path):
    (tmp_path / 'x.py').write_bytes(b'x' * 100)
    (tmp_path / 'x.so').write_bytes(b'x' * 1000)
    for folder in ('.git', '.venv', '.venv-gpu', 'wheels', 'result'):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'file').write_bytes(b'x' * 1000)
    assert wheels.tree_bytes(tmp_path) == 100
