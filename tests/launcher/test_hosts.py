"""The hosts of a job, and what starts ranks on them."""
import shlex
import socket
import sys

from chainer_fp8pipe.launcher import hosts
from chainer_fp8pipe.launcher.hosts import (
    Starter,
    answering,
    find_starter,
    read_hosts,
)

import pytest


def hosts_in(tmp_path, text, ranks):
    path = tmp_path / 'hosts'
    path.write_text(text)
    return read_hosts(str(path), ranks)


@pytest.mark.parametrize(('text', 'ranks', 'found'), [
    ('127.0.0.1:2\n127.0.0.2:4\n', 6, {'127.0.0.1': 2, '127.0.0.2': 4}),
    ('# mine\n127.0.0.1 slots=2  # old\n\nlocalhost  slots = 2', 3,
     {'127.0.0.1': 2, 'localhost': 2}),
    # Without numbers they take equal shares.
    ('127.0.0.1\nlocalhost\n', 5, {'127.0.0.1': 3, 'localhost': 3})])
def test_both_kinds_of_files_are_read(tmp_path, text, ranks, found):
    assert list(hosts_in(tmp_path, text, ranks).items()) == [*found.items()]


@pytest.mark.parametrize(('text', 'message'), [
    ('localhost:2 b:2', r"line 1: 'localhost:2 b:2' is neither NAME, NAME:4"),
    ('\n', 'has room for 0 ranks, not for 8'),
    ('localhost:8\nlocalhost:8', "line 2: 'localhost:8' is named twice"),
    ('localhost:2\n127.0.0.1:1', 'has room for 3 ranks, not for 8'),
    ('localhost:8\na:0', "line 2: 'a:0' is neither"),
    ('localhost\nno-such-host.invalid:4',
     "line 2: 'no-such-host.invalid:4' has no address")])
def test_a_wrong_file_is_explained(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        hosts_in(tmp_path, text, 8)


def test_a_host_is_up_if_it_accepts_or_refuses(monkeypatch):
    assert answering({'127.0.0.1': 1}, 1) == ({'127.0.0.1': 1}, [])
    with socket.create_server(('127.0.0.1', 0)) as server:
        monkeypatch.setattr(hosts, '_SSH', server.getsockname()[1])
        assert answering({'127.0.0.1': 1}, 1) == ({'127.0.0.1': 1}, [])
    assert answering({'no-such-host.invalid': 1}, 1) == (
        None, ['no-such-host.invalid'])


@pytest.mark.parametrize(('away', 'ranks', 'shares'), [
    ('', 8, {'a': 2, 'b': 2, 'c': 4}), ('', 3, {'a': 2, 'b': 1}),
    ('a', 6, {'b': 2, 'c': 4}), ('a', 7, None), ('abc', 1, None)])
def test_hosts_that_answer_share_the_ranks(monkeypatch, away, ranks, shares):
    monkeypatch.setattr(hosts, '_is_up', lambda host: host not in away)
    assert answering({'a': 2, 'b': 2, 'c': 4}, ranks) == (shares, [*away])


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


@pytest.mark.parametrize('family', SAID)
def test_the_family_is_what_the_program_says(program, family):
    words = [program('mpi', SAID[family]), '--option']
    assert find_starter({'MPIEXEC': shlex.join(words)}) == Starter(
        words, family)


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


TWO = {'a': 2, 'b': 1}


@pytest.mark.parametrize(('family', 'shares', 'words'), [
    ('MPICH', {}, ''), ('MPICH', TWO, '-hosts a:2,b:1'),
    ('Open MPI', {}, ''),
    ('Open MPI', TWO, '--host a:2,b:1 -x NAME -x OTHER'),
    ('srun', {}, '--kill-on-bad-exit=1 --quit-on-interrupt'),
    ('srun', TWO, '--kill-on-bad-exit=1 --quit-on-interrupt --nodes=2 '
     '--nodelist=a,b'),
])
def test_a_command_line_names_ranks_and_hosts(family, shares, words):
    assert Starter(['mpi', '-o'], family).command(
        3, ['python', 'x'], shares, ['NAME', 'OTHER']) == [
        'mpi', '-o', '-n', '3', *words.split(), 'python', 'x']
