"""Signals that tell the launcher to end, and those that wake it."""
from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Interrupts:
    """A block in which signals are counted and do nothing else.

    Attributes:
        received: SIGINT, SIGTERM and SIGHUP, in their order.
        wakes: A file that becomes readable with every signal, that of a
            child's end among them; :meth:`clear` empties it.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wakes, self._end = os.pipe()
        for file in self.wakes, self._end:
            os.set_blocking(file, False)

    def __enter__(self) -> Interrupts:
        self._wakeup = signal.set_wakeup_fd(self._end,
                                            warn_on_full_buffer=False)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._count)
            for number in (*_ENDING, signal.SIGCHLD)
            # Such as that of a terminal under nohup.
            if signal.getsignal(number) != signal.SIG_IGN}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.wakes)
        os.close(self._end)

    def clear(self) -> None:
        """Empties the file."""
        try:
            while os.read(self.wakes, 4096):
                pass
        except BlockingIOError:
            pass

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.received.append(number)
