"""One start of a job: its processes, from the first to the last."""
# A job runs until what started the ranks has ended.  It is killed where a
# signal for the launcher, which is handed on, does not end it in time, where a
# rank is dead or all stand still, and where all are done but something of
# theirs holds it open.  If the launcher is killed, Linux tells what started
# the ranks to end them.
#
# All processes of a job, whatever sessions they have moved to, have a mark in
# their environment, NAME=value, by which they are found in /proc, where it is.
#
# Threads pass output on; the main one never waits for the terminal, which may
# be slow or stopped, so that a signal is heeded at any time.
from __future__ import annotations

import contextlib
import ctypes
import glob
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from .output import (
    STDERR,
    STDOUT,
    Ending,
    JobOutput,
    Lines,
    ending_of,
    say,
    show,
)

TICK = 0.1              # seconds between looks
_PATIENCE = 5.0         # for a job to end by itself after a rank has died
_LAST_WORDS = 0.5       # for a job's processes after that which started them
_DONE = 60.0            # for what ranks do after the script
#: For a job that has got a signal: time to write a snapshot, as it is under
#: Slurm and Kubernetes.
_GRACE = 30.0
#: Seconds after which a process that was killed is left to the system: one
#: that waits for a dead disk may never end.
_KILLED = 10.0
_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)  # Linux has it


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """A block in which signals are only noted, in a list that it gives.

    They are SIGINT and SIGTERM, also where this process has inherited that
    they are ignored or blocked, as shells have it for what runs in the
    background: who sends them to a launcher means it.
    """
    received: list[signal.Signals] = []
    before = {number: signal.signal(number, lambda number, frame:
                                    received.append(signal.Signals(number)))
              for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    # Where SIGCHLD is ignored, nobody learns of exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def run_job(command: Sequence[str], environment: Mapping[str, str], mark: str,
            ranks: int, has_hosts: bool, received: Sequence[signal.Signals]
            ) -> Ending:
    """Starts a job, watches it to its end, and clears up after it.

    The environment has the mark, by which the job's processes are found.  Of
    the signals that are received the first is handed on, and another one
    kills the job.  ``has_hosts`` is that of :func:`ending_of`.
    """
    at, output = time.time(), JobOutput()
    # A session of its own: the launcher alone says when to end.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
    relays = [threading.Thread(target=_relay, args=args, daemon=True)
              for args in ((output, process.stdout, STDOUT),
                           (output, process.stderr, STDERR))]
    for relay in relays:
        relay.start()
    sent, deadline = 0, math.inf
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(TICK)
            if len(received) > sent:
                sent, deadline = len(received), time.monotonic() + _GRACE
                if sent > 1:
                    break
                process.send_signal(received[0])
            elif deadline == math.inf and (
                    output.cause or output.done == ranks):
                # Hydra waits for ever for a rank that is dead, or done, while
                # a child of it lives.
                deadline = time.monotonic() + (
                    _PATIENCE if output.cause else _DONE)
    finally:
        is_late = process.poll() is None
        kill_rest(mark, 0 if is_late else _LAST_WORDS)
        if process.poll() is None:          # where none has a mark
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_PATIENCE)
        for relay in relays:    # a stranger may hold the pipe for ever
            relay.join(_GRACE)
    code = process.poll()
    if is_late and output.done == ranks:
        code = 0
    elif code == 0 and not output.done:
        say('no rank has come to the end of the script, though the exit code '
            'is 0: one may have called os._exit()')
    return ending_of(output, -signal.SIGKILL if code is None else code,
                     has_hosts)._replace(at=at, seconds=time.time() - at)


def _relay(output: JobOutput, file: IO[bytes], to: int) -> None:
    """Passes a stream of a job on, while the launcher learns from it."""
    lines = Lines(output.look)
    with file:
        while piece := os.read(file.fileno(), 1 << 16):
            show(lines.feed(piece), to)


def marked(mark: str) -> list[int]:
    """The living processes of a job, other than this one."""
    found = []
    for path in glob.glob('/proc/[0-9]*/environ'):
        # A process that is dead but not waited for has no environment.
        with contextlib.suppress(OSError), open(path, 'rb') as file:
            if mark.encode() in file.read().split(b'\0'):
                found.append(int(path.split('/')[2]))
    return [*{*found} - {os.getpid()}]


def kill_rest(mark: str, patience: float) -> None:
    """Kills what has not ended by itself after ``patience`` seconds."""
    end = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < end + _KILLED:
        for pid in left if time.monotonic() >= end else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(TICK / 10)
