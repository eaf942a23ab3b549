"""Command lines of the programs that start ranks, by fake ones."""
import shlex
import sys

from chainer_fp8pipe.launcher.hosts import Share, Starter, find_starter

import pytest

HERE = [Share('', 4)]
TWO = [Share('a', 2), Share('b', 1)]
SAID = {
    'Hydra': 'HYDRA build details:\n  Launchers available: ssh slurm\n',
    'Open MPI': 'mpirun (Open MPI) 4.1.4\n',
    'srun': 'slurm 23.11.4\n'}


@pytest.fixture
def program(tmp_path):
    def program(name, says):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nprintf "%s" "{says}"\n')
        path.chmod(0o755)
        return str(path)
    return program


@pytest.mark.parametrize('family', SAID)
def test_the_family_is_what_the_program_says(program, family):
    path = program('mpi', SAID[family])
    words = [path, '--option']
    assert find_starter({'MPIEXEC': shlex.join(words)}) == Starter(
        words, family)


def test_an_allocation_of_slurms_uses_srun(program, tmp_path, monkeypatch):
    program('srun', SAID['srun'])
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    environment = {'SLURM_JOB_ID': '7', 'PATH': str(tmp_path)}
    assert find_starter(environment) == Starter(['srun'], 'srun')
    path = program('mpiexec', SAID['Hydra'])
    assert find_starter(
        {**environment, 'MPIEXEC': shlex.quote(path)}).family == 'Hydra'


def test_the_one_beside_the_interpreter_comes_before_the_path(
        program, tmp_path, monkeypatch):
    program('mpirun', SAID['Open MPI'])
    elsewhere = {'PATH': str(tmp_path)}
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'bin' / 'python'))
    assert find_starter(elsewhere).words == [str(tmp_path / 'mpirun')]
    (tmp_path / 'bin').mkdir()
    path = program('bin/mpiexec', SAID['Hydra'])
    assert find_starter(elsewhere) == Starter([path], 'Hydra')


def test_what_cannot_start_ranks_is_explained(program, tmp_path,
                                              monkeypatch):
    path = program('mpi', 'lamboot 1.0')
    with pytest.raises(ValueError, match="says 'lamboot 1.0', which is"):
        find_starter({'MPIEXEC': shlex.quote(path)})
    with pytest.raises(ValueError, match='/nowhere does not run'):
        find_starter({'MPIEXEC': '/nowhere'})
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'bin' / 'python'))
    with pytest.raises(ValueError, match='there is no mpiexec'):
        find_starter({'PATH': str(tmp_path / 'bin')})


@pytest.mark.parametrize(('family', 'shares', 'words'), [
    ('Hydra', HERE, '-n 4'),
    ('Hydra', TWO, '-n 3 -hosts a:2,b:1'),
    ('Open MPI', HERE, '-n 4'),
    ('Open MPI', TWO, '-n 3 --host a:2,b:1 -x NAME -x OTHER'),
    ('srun', HERE, '--kill-on-bad-exit=1 --quit-on-interrupt -n 4'),
    ('srun', TWO, '--kill-on-bad-exit=1 --quit-on-interrupt -n 3 --nodes=2 '
     '--nodelist=a,b'),
])
def test_a_command_line_names_ranks_and_hosts(family, shares, words):
    assert Starter(['mpi', '-o'], family).command(
        shares, ['python', 'x'], ['NAME', 'OTHER']) == [
        'mpi', '-o', *words.split(), 'python', 'x']
