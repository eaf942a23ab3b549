"""Jobs that end otherwise than by their last line, seen from outside."""
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import uuid

from tests.images.processes import eventually, is_alive
from tests.ranks import end_with_parent, environment, mpiexec

SCRIPT = """
import contextlib, os, signal, sys, threading, time
import chainer_fp8pipe
from chainer_fp8pipe import ProcessGrid, create_communicator
from chainer_fp8pipe.mpi.failure.abort import abort_on_exception
from chainer_fp8pipe.mpi.failure.watch import watch
from mpi4py import MPI
world = MPI.COMM_WORLD

{functions}

def wait_for_ever():
    MPI.COMM_SELF.Dup().Recv(bytearray(1), 0)

def until_watched():
    while not is_watched(os.getpid()):
        time.sleep(0.02)
    world.Barrier()

def die(rank, how):
    # In a thread, as the rank is to be deep in MPI by then.
    until_watched()
    if world.rank == rank:
        os.write(1, f'{{os.getpid()}} will die\\n'.encode())
        threading.Timer(0.1, how).start()
    wait_for_ever()

{body}
"""


def watchdogs():
    """Processes of all watchdogs that there are."""
    found = []
    for name in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(
                f'/proc/{name}/cmdline') as file:
            if 'failure.watchdog' in file.read():
                found.append(name)
    return found


def is_watched(pid):
    """Whether a watchdog has opened a process."""
    for name in watchdogs():
        with contextlib.suppress(OSError):
            for fd in os.listdir(f'/proc/{name}/fdinfo'):
                with open(f'/proc/{name}/fdinfo/{fd}') as file:
                    if f'Pid:\t{pid}\n' in file.read():
                        return True
    return False


class Job:
    """What a script does on several ranks, and the processes that come of it.

    Args:
        path: Where the script is written.
    """

    def __init__(self, path):
        self._path = path
        self._mark = f'TEST_OF_WATCHDOG={uuid.uuid4()}'
        name, _, value = self._mark.partition('=')
        self.environment = {**environment(), name: value}

    def start(self, ranks, body, command=()):
        """The launcher of a job whose script has this body."""
        self._path.write_text(SCRIPT.format(
            functions=inspect.getsource(watchdogs)
            + inspect.getsource(is_watched), body=body))
        return subprocess.Popen(
            [*mpiexec(ranks), sys.executable, *command, str(self._path)],
            env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent)

    def run(self, ranks, body, command=()):
        """Its exit code, output and errors; leaves nothing behind."""
        launcher = self.start(ranks, body, command)
        output, errors = launcher.communicate(timeout=300)
        assert self.leaves_nothing()
        return launcher.returncode, output, errors

    def processes(self):
        """Those that are alive."""
        found = []
        for name in filter(str.isdigit, os.listdir('/proc')):
            with contextlib.suppress(OSError), open(
                    f'/proc/{name}/environ') as file:
                if self._mark in file.read() and is_alive(name):
                    found.append(int(name))
        return found

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leaves_nothing(self):
        return eventually(lambda: not self.processes())
