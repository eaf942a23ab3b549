"""The hosts of a job, and what starts ranks on them."""
import re
import shlex
import socket
import sys

from chainer_fp8pipe.launcher import hosts
from chainer_fp8pipe.launcher.hosts import (
    Share,
    Starter,
    answering,
    find_starter,
    lay_out,
    probe_for,
    read_hosts,
    slurm_hosts,
)

import pytest

THREE = [Share('a', 2), Share('b', 2), Share('c', 4)]


def hosts_in(tmp_path, text, ranks):
    path = tmp_path / 'hosts'
    path.write_text(text)
    return read_hosts(str(path), ranks)


@pytest.mark.parametrize(('text', 'ranks', 'shares'), [
    ('a:2\nb:2\nc:4\n', 8, THREE),
    ('a slots=2\nb  slots = 2 max_slots=9\nc slots=4', 8, THREE),
    ('# mine\na:2   # old\n\nb:2\nc slots=4\n', 8, THREE),
    # Without numbers they take equal shares.
    ('10.0.0.1\nnode-2.example.org\n', 5,
     [Share('10.0.0.1', 3), Share('node-2.example.org', 3)]),
])
def test_both_kinds_of_files_are_read(tmp_path, text, ranks, shares):
    assert hosts_in(tmp_path, text, ranks) == shares
    with pytest.raises(ValueError, match='--hostfile .*nowhere'):
        read_hosts(str(tmp_path / 'nowhere'), ranks)


@pytest.mark.parametrize(('text', 'message'), [
    ('a:2 b:2', r"line 1: 'a:2 b:2' is neither NAME, NAME:4 nor"),
    ('\n', 'names no host'), ('a:8\na:8', 'names a twice'),
    ('a:2\nb:1', 'has room for 3 ranks, not for 8'),
    ('b:8\na:0', "line 2: 'a:0' has no room for a rank"),
    ('a slots=00', 'has no room for a rank'),
])
def test_a_wrong_file_is_explained(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        hosts_in(tmp_path, text, 8)


@pytest.mark.parametrize(('tasks', 'ranks', 'shares'), [
    ('2(x2),4', 8, THREE),
    ('1(x3)', 6, [Share('a', 2), Share('b', 2), Share('c', 2)])])
def test_an_allocation_of_slurms_says_its_hosts(tmp_path, monkeypatch, tasks,
                                                ranks, shares):
    scontrol = tmp_path / 'scontrol'
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames a,[b-c]" ] '
                        '&& printf "a\\nb\\nc\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    assert slurm_hosts({'SLURM_JOB_NODELIST': 'a,[b-c]',
                        'SLURM_TASKS_PER_NODE': tasks}, ranks) == shares


@pytest.mark.parametrize(('away', 'ranks', 'shares'), [
    ('', 8, [('a', 2), ('b', 2), ('c', 4)]),
    ('', 3, [('a', 2), ('b', 1)]),
    ('a', 6, [('b', 2), ('c', 4)]),
    ('a', 7, None), ('abc', 1, None),
])
def test_hosts_that_answer_share_the_ranks(away, ranks, shares):
    room = [share for share in THREE if share.host not in away]
    assert lay_out(room, ranks) == shares


def test_a_host_answers_if_it_accepts_or_refuses(monkeypatch):
    with socket.create_server(('127.0.0.1', 0)) as server:
        monkeypatch.setattr(hosts, '_SSH', server.getsockname()[1])
        assert probe_for(None)('127.0.0.1')
    assert probe_for(None)('127.0.0.1')
    assert not probe_for(None)('no-such-host.invalid')


def test_a_probe_may_be_a_command(monkeypatch):
    probe = probe_for('test {} = up')
    assert probe('up')
    assert not probe('down')
    assert not probe_for('/nowhere/probe {}')('up')
    monkeypatch.setattr(hosts, '_SECONDS', 0.1)
    assert not probe_for('sleep {}')('1000')


@pytest.mark.parametrize(('ranks', 'away', 'shares', 'words'), [
    (8, '', [Share('a', 4), Share('b', 4)], ''),
    (4, 'a', [Share('b', 4)], 'without an answer: a'),
    (8, 'a', None, 'without an answer: a; the others have not room for 8'),
    (4, 'ab', None, 'no host answers; .*--probe.*; asking again')])
def test_hosts_that_do_not_answer_are_left_out_if_enough_are_left(
        ranks, away, shares, words):
    found, said = answering([Share('a', 4), Share('b', 4)], ranks,
                            lambda host: host not in away)
    assert found == shares
    assert re.match(words or '$', said)


def test_a_job_without_hosts_of_its_own_asks_nobody():
    assert answering([Share('', 4)], 4, lambda host: 1 / 0) == (
        [Share('', 4)], '')


# --- what starts ranks -------------------------------------------------------

HERE = [Share('', 4)]
TWO = [Share('a', 2), Share('b', 1)]
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
    path = program('mpiexec', SAID['MPICH'])
    assert find_starter(
        {**environment, 'MPIEXEC': shlex.quote(path)}).family == 'MPICH'


def test_the_one_beside_the_interpreter_comes_before_the_path(
        program, tmp_path, monkeypatch):
    program('mpirun', SAID['Open MPI'])
    elsewhere = {'PATH': str(tmp_path)}
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'bin' / 'python'))
    assert find_starter(elsewhere).words == [str(tmp_path / 'mpirun')]
    (tmp_path / 'bin').mkdir()
    path = program('bin/mpiexec', SAID['MPICH'])
    assert find_starter(elsewhere) == Starter([path], 'MPICH')


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
    ('MPICH', HERE, '-n 4'),
    ('MPICH', TWO, '-n 3 -hosts a:2,b:1'),
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
