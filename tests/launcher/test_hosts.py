"""The hosts of a job, and what starts ranks on them."""
import shlex
import socket
import sys

from chainer_fp8pipe.launcher import hosts
from chainer_fp8pipe.launcher.hosts import (
    Starter,
    away,
    find_starter,
    read_hosts,
)

import pytest


@pytest.mark.parametrize(('text', 'found'), [
    ('127.0.0.1:2\n127.0.0.2:4\n', ['127.0.0.1', '127.0.0.2']),
    ('# mine\na slots=2  # old\n\n b-c\na', ['a', 'b-c']),
    ('#\n', 'names no host')])
def test_the_names_in_both_kinds_of_files_are_read(tmp_path, text, found):
    path = tmp_path / 'hosts'
    path.write_text(text)
    if isinstance(found, list):
        assert read_hosts(str(path)) == found
    else:
        with pytest.raises(ValueError, match=f'--hostfile {path}: {found}'):
            read_hosts(str(path))


def test_a_host_is_up_if_it_accepts_or_refuses(monkeypatch):
    assert away([]) == away(['127.0.0.1']) == []
    with socket.create_server(('127.0.0.1', 0)) as server:
        monkeypatch.setattr(hosts, '_SSH', server.getsockname()[1])
        assert away(['127.0.0.1', 'no-such-host.invalid']) == [
            'no-such-host.invalid']


# --- what starts ranks -------------------------------------------------------

SAID = {
    'MPICH': 'HYDRA build details:\n  Launchers available: ssh slurm\n',
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


def test_starters_are_looked_for_in_an_order(program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'bin' / 'python'))
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    (tmp_path / 'bin').mkdir()
    environment = {'PATH': str(tmp_path), 'SLURM_JOB_ID': '7'}
    with pytest.raises(ValueError, match='there is no mpiexec'):
        find_starter(environment)
    for name, family in (('mpirun', 'Open MPI'), ('mpiexec', 'MPICH'),
                         ('bin/mpiexec', 'MPICH'), ('srun', 'srun')):
        path = program(name, SAID[family])
        assert find_starter(environment) == Starter([path], family)
    del environment['SLURM_JOB_ID']
    assert find_starter(environment).family == 'MPICH'


@pytest.mark.parametrize(('says', 'message'), [
    ('lamboot 1.0', "says 'lamboot 1.0', which is"),
    (None, 'mpi does not run .*; correct MPIEXEC')])
def test_what_cannot_start_ranks_is_explained(
        program, tmp_path, says, message):
    if says:
        program('mpi', says)
    with pytest.raises(ValueError, match=message):
        find_starter({'MPIEXEC': shlex.quote(str(tmp_path / 'mpi'))})


@pytest.mark.parametrize(('family', 'hostfile', 'words'), [
    ('MPICH', '', ''), ('MPICH', 'h', '-f h'), ('Open MPI', '', ''),
    ('Open MPI', 'h', '--hostfile h -x NAME -x OTHER'),
    ('srun', '', '--kill-on-bad-exit=1 --quit-on-interrupt'),
    ('srun', 'h', '-F h --kill-on-bad-exit=1 --quit-on-interrupt'),
])
def test_a_command_line_names_ranks_and_hosts(family, hostfile, words):
    assert Starter(['mpi', '-o'], family).command(
        3, ['python', 'x'], hostfile, ['NAME', 'OTHER']) == [
        'mpi', '-o', '-n', '3', *words.split(), 'python', 'x']
