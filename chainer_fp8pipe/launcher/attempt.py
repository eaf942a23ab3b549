"""One start of a job: its processes, from the first to the last."""
# A job runs until what started the ranks has ended.  Where a signal has come
# for the launcher, where ranks have said that one is dead or all stand still,
# or where all are done but something of theirs holds the job open, a signal is
# sent, and the next one has a time.  A job is abandoned when even what was
# killed does not end, as the system waits for a disk.  Whatever the way, what
# is left of its processes and shared memory is removed.
#
# Threads pass output on; the main one never waits for the terminal, which may
# be slow or stopped, so that a signal is heeded at any time.
from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .leftovers import end_job, is_running, kill_rest, remove_segments
from .output import JobOutput

_TICK = 0.5             # seconds between looks while nothing happens
_PATIENCE = 5.0         # for a job to end by itself after a rank has died
_LAST_WORDS = 0.5       # for a job's processes after that which started them
#: After a signal that has not ended a job the next one is sent, in so many
#: seconds: time to write a snapshot, as it is under Slurm and Kubernetes.
_FOLLOWED_BY = {signal.SIGINT: (10.0, signal.SIGTERM),
                signal.SIGHUP: (10.0, signal.SIGTERM),
                signal.SIGTERM: (30.0, signal.SIGKILL)}
_PIECE = 1 << 16
_STDOUT, _STDERR = 1, 2


def say(text: str) -> None:
    """Prints a line about the job, with the time."""
    show(f'chainer_fp8pipe launch: {time.strftime("%H:%M:%S")} {text}\n')


def show(text: str | bytes, stream: int = _STDERR) -> None:
    """Prints text as it is; a terminal that is gone does not matter."""
    rest = (text if isinstance(text, bytes)
            else text.encode(errors='replace'))
    with contextlib.suppress(OSError):
        while rest:
            try:
                # Not by sys.stderr: an interpreter that ends while another
                # thread writes there is aborted.
                rest = rest[os.write(stream, rest):]
            except BlockingIOError:     # the terminal is somebody else's, too
                room = select.poll()    # select() takes 1,024 files only
                room.register(stream, select.POLLOUT)
                room.poll()


class Interrupts:
    """A block in which signals wait to be asked for, and do nothing else.

    They do so also where this process has inherited that they are ignored or
    blocked, as shells have it for what runs in the background: who sends them
    to a launcher means it.  SIGHUP stays ignored under ``nohup``.

    Attributes:
        received: SIGINT, SIGTERM and SIGHUP, in their order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._numbers.add(signal.SIGHUP)

    def __enter__(self) -> Interrupts:
        # Where SIGCHLD is ignored, nobody learns of exit codes.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait(self, seconds: float) -> None:
        """Until a signal comes, that of a child's end among them."""
        while found := signal.sigtimedwait(self._numbers, seconds):
            seconds = 0.0
            if found.si_signo != signal.SIGCHLD:
                self.received.append(signal.Signals(found.si_signo))

    @staticmethod
    def forget() -> None:
        """Gives a new process signals as usual."""
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGQUIT:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Attempt:
    """Starts a job and watches it to its end.

    Args:
        command: What starts the ranks.
        environment: Of all processes, with the mark.
        mark: By which they are found.
        interrupts: Of the launcher, in their block.

    Attributes:
        output: What it has said.

    Raises:
        OSError: The command cannot be run.
    """

    def __init__(self, command: Sequence[str],
                 environment: Mapping[str, str], mark: str,
                 interrupts: Interrupts) -> None:
        self.output = JobOutput()
        self._mark, self._interrupts = mark, interrupts
        self._since = time.time()
        self._handed_on = 0     # of the launcher's signals
        #: When which signal is sent, if the job has not ended by then.
        self._next: tuple[float, signal.Signals] | None = None
        self._is_abandoned = False
        # A session of its own: the launcher alone says when to end.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=Interrupts.forget)
        self._pieces = 0        # of output, that have been passed on
        self._readers = [
            threading.Thread(target=self._relay, args=args, daemon=True)
            for args in ((self._process.stdout, _STDOUT),
                         (self._process.stderr, _STDERR))]
        for reader in self._readers:
            reader.start()

    def watch(self, tick: Callable[[], None], program: Sequence[str] = (),
              ranks: int = 0) -> int:
        """Waits for the end of the job, and clears up after it.

        What starts ranks waits also for processes that they have left
        behind.  The launcher does not, where it can see that all ranks have
        ended.

        Args:
            tick: Called twice a second or more often.
            program: What each rank runs; () if ranks are on other hosts.
            ranks: Their number.

        Returns:
            The exit code of the command, or 0 if all ranks have ended in
            order before.
        """
        are_done = False
        try:
            while self._process.poll() is None and not self._is_abandoned:
                self._interrupts.wait(_TICK)
                received = self._interrupts.received
                if len(received) > self._handed_on:
                    self._handed_on = len(received)
                    self._send(signal.SIGKILL if received[1:]
                               else received[0])
                elif self._next is None:
                    tick()
                    are_done = bool(program) and (
                        self.output.done == ranks
                        and not is_running(self._mark, list(program)))
                    if are_done:
                        self._process.send_signal(signal.SIGTERM)
                    if are_done or self.output.dead or self.output.stalled:
                        # Hydra waits for ever for a rank that is dead while
                        # a fork of it lives.
                        self._next = (time.monotonic() + _PATIENCE,
                                      signal.SIGKILL)
                elif time.monotonic() >= self._next[0]:
                    self._send(self._next[1])
        finally:
            self._clear_up()
        return 0 if are_done else (
            -signal.SIGKILL if self._process.returncode is None
            else self._process.returncode)

    def _relay(self, file: Any, stream: int) -> None:
        """Passes on what the job says, or prints, byte for byte."""
        decoder = codecs.getincrementaldecoder('utf-8')('replace')
        with file:
            while piece := os.read(file.fileno(), _PIECE):
                show(self.output.feed(decoder.decode(piece))
                     if stream == _STDERR else
                     self.output.feed_printed(piece), stream)
                self._pieces += 1

    def _send(self, number: signal.Signals) -> None:
        """Sends a signal, and plans the one that follows."""
        if number == signal.SIGKILL:
            self._next = None
            self._kill()
        else:
            self._process.send_signal(number)
            patience, then = _FOLLOWED_BY[number]
            self._next = time.monotonic() + patience, then

    def _kill(self) -> None:
        end_job(self._mark, 0)
        with contextlib.suppress(OSError):      # where none has a mark
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._is_abandoned = True

    def _clear_up(self) -> None:
        if self._process.poll() is None:        # an error of the launcher
            self._kill()
        if left := kill_rest(self._mark, _LAST_WORDS):
            say(f'processes {", ".join(map(str, left))} do not end, although '
                'they were killed: the system waits for something, such as a '
                'disk')
        for reader in self._readers:
            while reader.is_alive():
                before = self._pieces
                reader.join(_PATIENCE)
                if self._pieces == before:      # a stranger holds the pipe
                    break
        remove_segments(self._since)
