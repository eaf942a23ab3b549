"""Which hosts a job may have now, and when those that were away are back."""
from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence

from .hosts import Probe, Share, answering, lay_out
from .saved_progress import SavedProgress

#: Seconds between looks for hosts that were away.
_LOOK = 30.0


class HostWatch:
    """Gives each start the hosts that answer.

    Args:
        room: How many ranks each host may have.
        ranks: Of the whole job.
        fewest: Ranks that may go on while hosts are away.
        multiple: The number of ranks is a multiple of it.
        probe: Tells whether a host answers.
        say: Prints a line for the user.

    Attributes:
        wants_all_back: Whether a job ends so that all hosts take part again.
    """

    def __init__(self, room: Sequence[Share], ranks: int, fewest: int,
                 multiple: int, probe: Probe,
                 say: Callable[[str], None]) -> None:
        self._room, self._ranks, self._fewest = room, ranks, fewest
        self._multiple, self._probe, self._say = multiple, probe, say
        self._away: list[str] = []
        self._are_back = False
        self._question: concurrent.futures.Future[set[str]] | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._asked = 0.0
        self._saved = SavedProgress()
        self._said: set[str] = set()        # since the last start
        self.wants_all_back = False

    def shares(self) -> list[Share] | None:
        """What each host gets in the next start; None: too few answer."""
        hosts = [share.host for share in self._room if share.host]
        there = answering(hosts, self._probe) if hosts else set()
        if hosts and not there:
            self._say_once('no host answers; perhaps it is the question that '
                           'they do not answer (--probe)')
            there = set(hosts)
        self._away = [host for host in hosts if host not in there]
        if self._away:
            self._say_once('without an answer: ' + ', '.join(self._away))
        shares = lay_out([share for share in self._room
                          if share.host not in self._away],
                         self._ranks, self._multiple)
        count = sum(share.ranks for share in shares)
        if count < self._fewest:
            self._say_once(
                f'the hosts that answer have room for {count} ranks, and '
                f'{self._fewest} are needed (--min-ranks); asking again')
            return None
        return shares

    def begin(self, saved: SavedProgress) -> None:
        """Call it at a start, with what is saved by then."""
        self._said.clear()
        self._are_back = self.wants_all_back = False
        self._asked = time.monotonic()
        self._saved = saved

    def look(self, saved: Callable[[], SavedProgress]) -> bool:
        """Whether to end the job now, so that all hosts take part again.

        That is just after a snapshot, when nothing of the work is lost.
        Call it again and again while the job runs.

        Args:
            saved: Says what is saved by now.
        """
        if not self._away or self.wants_all_back:
            return self.wants_all_back
        if not self._are_back:
            self._ask()
            if self._are_back:
                self._saved = saved()
            return False
        if (now := saved()) > self._saved:
            self._say(f'{", ".join(self._away)} back, and {now.path} is '
                      'there: starting again with all')
            self.wants_all_back = True
        return self.wants_all_back

    def close(self) -> None:
        """Waits for no answer any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _say_once(self, text: str) -> None:
        """Hosts that are away are asked every few seconds."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _ask(self) -> None:
        """Asks those that were away, in a thread, as that may take long."""
        if self._question is None:
            if time.monotonic() - self._asked >= _LOOK:
                self._asked = time.monotonic()
                self._question = self._pool.submit(
                    answering, self._away, self._probe)
        elif self._question.done():
            there = self._question.result()
            self._question = None
            self._are_back = there >= set(self._away)
            if self._are_back:
                self._say(f'{", ".join(self._away)} answers again; all take '
                          'part from the next snapshot on')
