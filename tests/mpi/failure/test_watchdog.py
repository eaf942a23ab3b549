"""A watchdog that comes late to the cores names who has died first.

It is stopped here while ranks end, which are processes of this test, so that
nothing depends on how busy the processors are.
"""
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from chainer_fp8pipe.mpi.failure import watch, watchdog
from chainer_fp8pipe.mpi.failure.stall import StallSettings

import pytest

from tests.ranks import end_with_parent

pytestmark = pytest.mark.skipif(not hasattr(os, 'pidfd_open'),
                                reason='there is no watchdog here')
#: A rank sends its standard input to the watchdog, line by line.
RANK = '''
import socket, sys
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(b'\\0' + sys.argv[1].encode())
for message in sys.stdin:
    line.send(message.encode())
    print(flush=True)
'''


def process(stack, *command, **options):
    found = stack.enter_context(subprocess.Popen(
        [sys.executable, *command], preexec_fn=end_with_parent, **options))
    stack.callback(found.kill)
    return found


class Node:
    """A watchdog that can be stopped, and ranks that can be killed."""

    def __init__(self, stack, ranks):
        self._stack = stack
        lines = stack.enter_context(socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET))
        lines.bind('')
        lines.listen()
        self._name = lines.getsockname()[1:].decode()
        self.ranks = {rank: self._rank() for rank in ranks}
        job = watchdog.WatchdogJob(
            0, self.ranks[0].pid, len(ranks), StallSettings(0.0),
            lines.fileno(), -1, '')
        self.watchdog = process(
            stack, '-c', watch._START, os.path.dirname(os.path.dirname(
                watch.__file__)), json.dumps(job), pass_fds=[lines.fileno()],
            stderr=subprocess.PIPE, text=True)
        for rank in ranks:
            self.say(rank, rank=rank, who=f'rank {rank}', dump=None)

    def _rank(self):
        return process(self._stack, '-c', RANK, self._name, text=True,
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, number, **message):
        rank = self.ranks[number]
        rank.stdin.write(json.dumps(message) + '\n')
        rank.stdin.flush()
        rank.stdout.readline()

    def kill(self, rank):
        """Kills a rank, and leaves it unwaited for, as a launcher may."""
        pid = self.ranks[rank].pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def knows_all(self):
        """Waits until it watches all processes of ranks."""
        folder = pathlib.Path(f'/proc/{self.watchdog.pid}/fdinfo')
        watched = 0
        while watched < len(self.ranks):
            with contextlib.suppress(OSError):  # a file that it has closed
                watched = sum('Pid:' in file.read_text()
                              for file in folder.iterdir())
            time.sleep(0.01)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as made:
        yield made


def test_of_two_deaths_that_are_seen_at_once_the_first_is_named(stack):
    """Though the other rank had said something before."""
    node = Node(stack, range(3))
    node.knows_all()
    node.watchdog.send_signal(signal.SIGSTOP)
    node.say(1, updates=1)
    node.kill(2)
    node.kill(1)
    node.watchdog.send_signal(signal.SIGCONT)
    assert 'rank 2 was killed by SIGKILL' in node.watchdog.communicate()[1]
