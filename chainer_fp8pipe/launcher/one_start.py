"""One start of a job: its processes, from the first to the last."""
from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection

from .interrupts import Interrupts
from .job_output import JobOutput
from .leftovers import end_job, kill_rest, remove_segments

_TICK = 0.5             # seconds between looks while nothing happens
_PATIENCE = 5.0         # for a job to end by itself after a rank has died
_LAST_WORDS = 0.5       # for a job's processes after that which started them
_PIECE = 1 << 16


class OneStart:
    """Starts a job and watches it to its end.

    Args:
        command: What starts the ranks.
        environment: Of all processes, with the mark.
        mark: By which they are found.
        interrupts: Of the launcher.
        show: Is given what the job says on its standard error.

    Attributes:
        output: What it has said.

    Raises:
        OSError: The command cannot be run.
    """

    def __init__(self, command: Sequence[str],
                 environment: Mapping[str, str], mark: str,
                 interrupts: Interrupts, show: Callable[[str], None]) -> None:
        self.output = JobOutput()
        self._mark, self._interrupts, self._show = mark, interrupts, show
        self._since = time.time()
        self._handed_on = len(interrupts.received)
        self._deadline: float | None = None     # until which it should end
        self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
        # A group of its own: the launcher alone says when to end.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True)
        assert self._process.stderr
        self._errors = self._process.stderr.fileno()
        os.set_blocking(self._errors, False)
        self._watched = [self._errors, interrupts.wakes]

    def watch(self, tick: Callable[[], bool]) -> int:
        """Waits for the end of the job, and clears up after it.

        Args:
            tick: Called twice a second or more often; True: end the job.

        Returns:
            The exit code of the command.
        """
        try:
            while self._process.poll() is None:
                connection.wait(self._watched, _TICK)
                self._interrupts.clear()
                self._relay()
                self._hand_on()
                if tick() and self._deadline is None:
                    self._process.terminate()
                    self._deadline = time.monotonic() + _PATIENCE
                self._end_in_time()
        finally:
            self._clear_up()
        return self._process.returncode

    def _relay(self) -> None:
        """Passes on what the job has said."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._errors, _PIECE):
                if text := self.output.feed(self._decoder.decode(piece)):
                    self._show(text)
            self._watched = [self._interrupts.wakes]    # it is closed

    def _hand_on(self) -> None:
        """Hands a signal on once; a second one ends everything."""
        received = self._interrupts.received
        if len(received) == self._handed_on:
            return
        if len(received) == 1:
            self._handed_on = 1
            self._process.send_signal(received[0])
        else:
            self._handed_on = len(received)
            self._kill()

    def _end_in_time(self) -> None:
        """Ends a job that a dead rank has not ended.

        Hydra waits for ever for a rank that is dead while a fork of it lives.
        """
        if self._deadline is None:
            if self.output.dead or self.output.stalled:
                self._deadline = time.monotonic() + _PATIENCE
        elif time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        end_job(self._mark, 0)
        with contextlib.suppress(OSError):      # where none has a mark
            os.killpg(self._process.pid, signal.SIGKILL)

    def _clear_up(self) -> None:
        if self._process.poll() is None:        # an error of the launcher
            self._kill()
            self._process.wait()
        kill_rest(self._mark, _LAST_WORDS)
        self._relay()
        assert self._process.stderr
        self._process.stderr.close()
        remove_segments(self._since)
