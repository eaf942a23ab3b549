"""A rank that dies takes the others down, and is heard."""
import signal
import subprocess
import sys
import time

import pytest

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


def test_an_exception_on_one_rank_ends_all_with_its_traceback(script):
    done = run_script(3, script('raise ValueError("so it goes")'), timeout=300)
    assert done.returncode != 0
    assert 'rank 1 of 3 failed' in done.stderr
    assert 'ValueError: so it goes' in done.stderr
    assert 'line 6' in done.stderr


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


def test_an_interrupted_rank_ends_all_without_a_traceback(script):
    done = run_script(3, script('raise KeyboardInterrupt'), timeout=300)
    assert done.returncode != 0
    assert 'rank 1 of 3 interrupted' in done.stderr
    assert 'Traceback' not in done.stderr


def test_a_wrong_name_on_one_rank_ends_all(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(
        'import chainer_fp8pipe\n'
        'from mpi4py import MPI\n'
        "name = 'fp9' if MPI.COMM_WORLD.rank else 'fp8'\n"
        'chainer_fp8pipe.create_communicator(name)\n')
    done = run_script(2, path, timeout=300)
    assert done.returncode != 0
    assert "no communicator is called 'fp9'" in done.stderr


def test_a_killed_rank_ends_all(script):
    done = run_script(
        3, script('os.kill(os.getpid(), signal.SIGKILL)'), timeout=300)
    assert done.returncode != 0
    assert str(int(signal.SIGKILL)) in done.stdout + done.stderr
