"""A rank that dies takes the others down, and is heard."""
import re
import subprocess
import sys
import time

from chainer_fp8pipe.mpi.agreement import raise_together
from chainer_fp8pipe.mpi.failure import abort
from chainer_fp8pipe.planning.sizes import parse_bytes

import pytest
from mpi4py import MPI

from tests.ranks import end_with_parent, environment, run_script

SCRIPT = """
import os, signal, sys
import chainer_fp8pipe
comm = chainer_fp8pipe.create_communicator('fp8')
if comm.rank == 1:
    {how}
comm.mpi_comm.Barrier()         # the others wait for ever
comm.mpi_comm.Barrier()
"""


@pytest.fixture
def script(tmp_path):
    def write(how):
        path = tmp_path / 'script.py'
        path.write_text(SCRIPT.format(how=how))
        return path
    return write


@pytest.mark.parametrize(('how', 'said', 'traces'), [
    ('raise ValueError("so it goes")',
     r'(?s)rank 1 of 3 failed.*line 6.*ValueError: so it goes', 1),
    ('raise KeyboardInterrupt', 'rank 1 of 3 interrupted', 0),
    ("chainer_fp8pipe.create_communicator('fp9')",
     "no communicator is called 'fp9'", 1),
])
def test_whatever_ends_one_rank_ends_all_and_is_said(
        script, how, said, traces):
    done = run_script(3, script(how))
    assert done.returncode != 0
    assert re.search(said, done.stdout + done.stderr)
    assert done.stderr.count('Traceback') == traces


def test_ranks_that_raise_the_same_are_counted(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(
        'import chainer_fp8pipe\n'
        "comm = chainer_fp8pipe.create_communicator('fp8')\n"
        "raise ValueError('so it goes' if comm.rank < 3 else 'otherwise')\n")
    done = run_script(4, path)
    assert done.returncode != 0
    assert done.stderr.count('ValueError: so it goes') <= 1
    assert done.stderr.count('Traceback') <= 2
    if 'rank 0 of 4 failed' in done.stderr:     # not if rank 3 was first
        assert 'ranks 1-2 raised the same' in done.stderr


def of_a_check():
    """What a check of the package raises about the user's arguments."""
    try:
        parse_bytes('much')
    except ValueError as error:
        return error


def of_the_users_own_code():
    """What a script's class raises that the package has called."""
    try:
        raise_together(MPI.COMM_SELF, lambda: int('x'))
    except RuntimeError as error:
        return error


def test_an_error_of_the_users_own_is_told_from_a_check():
    check = of_a_check()
    assert abort.of_the_user(check) is None
    check.is_shown = True
    assert abort.shown(check) == (
        "ValueError: 'much' is no size; write it as in 300 MB or 2 GiB\n")
    found = abort.of_the_user(of_the_users_own_code())
    assert type(found) is ValueError


def test_what_leads_to_the_users_code_is_not_shown():
    said = abort.shown(of_the_users_own_code())
    assert said.count('Traceback') == 2
    assert 'agreement.py' not in said
    assert "int('x')" in said
    with pytest.raises(RuntimeError) as raised:     # of the package's own
        raise_together(MPI.COMM_SELF, lambda: parse_bytes('much'))
    said = abort.shown(raised.value)
    assert said.count('Traceback') == 1
    assert said.endswith("write it as in 300 MB or 2 GiB\n")


def test_nothing_ends_before_the_launcher_has_read_why():
    """It forgets what is in its pipes when a job ends."""
    with subprocess.Popen(
            [sys.executable, '-c',
             'from chainer_fp8pipe.mpi.failure import abort\n'
             'abort._PATIENCE = 1e9\n'
             'print("ready", flush=True)\n'
             'abort.end_all_ranks("so it goes", 3)'], env=environment(),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=end_with_parent) as rank:
        assert rank.stdout.readline() == 'ready\n'
        time.sleep(2)
        assert rank.poll() is None
        _, printed = rank.communicate(timeout=300)
    assert rank.returncode == 3
    assert 'so it goes' in printed
