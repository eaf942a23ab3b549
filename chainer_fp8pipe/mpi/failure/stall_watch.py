"""Finds out that a job stands still, and which rank is the cause.

On each rank a thread looks every second whether the rank has finished an
update.  If it has not for too long, the thread asks those of the other ranks,
and the witnesses of nodes whose ranks do not answer.  The lowest rank that has
noticed judges: it has all ranks print where they are, names the cause, and
ends the job.  None of this uses MPI, which may be stuck, but for the end.
"""
from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing import connection
from typing import Any, NamedTuple

from mpi4py import MPI

from .dumped_stack import DumpedStack, dumped_stack
from .main_thread import stack
from .own_state import OwnState, Report, report_from
from .side_channel import Address, SideChannel
from .stall_cause import Cause, RankView, State, find_cause
from .stall_settings import EXIT_CODE, StallSettings
from .update_count import updates

_PERIOD = 1.0           # seconds between two looks, at most
_PART = 8               # periods in a limit, at least
_PEERS = 100            # ranks that may be asked in a second
_UNHEARD = 6            # periods without an answer
_LAST_WORDS = 0.5       # seconds for all ranks to print
_NEVER = -math.inf, None
_STANDING = State.WAITS, State.STOPPED, State.GONE
_STUCK = 20             # seconds that MPI_Abort may take


class Peer(NamedTuple):
    """A rank, as others know it.

    Attributes:
        rank: Of ``MPI.COMM_WORLD``.
        who: In words, with process and host.
        process: Its number.
        address: Of its side channel.
        witness: Of its node's witness; None: there is none.
    """

    rank: int
    who: str
    process: int
    address: Address
    witness: Address | None


class Observed(NamedTuple):
    """What a witness has said of a rank's process.

    Attributes:
        at: When.
        state: One letter, as in /proc; '' if the process is gone.
        stack: Of the main thread, where the rank cannot say itself.
    """

    at: float = -math.inf
    state: str = ''
    stack: DumpedStack | None = None


class StallWatch:
    """A thread that watches this rank, and asks others.

    Args:
        rank: This one.
        settings: The same on all ranks.
        channel: Of this rank; closed in the end.
        end: Ends the job: is called with a text and an exit code.
    """

    def __init__(self, rank: int, settings: StallSettings,
                 channel: SideChannel, end: Any) -> None:
        self._rank = rank
        self._settings = settings
        self._channel = channel
        self._end = end
        self._peers: dict[int, Peer] = {}
        self._witnesses: dict[Address, int] = {}    # numbers in the channel
        self._period = min(_PERIOD, settings.limit(0.0) / _PART)
        self._own: OwnState         # made when ranks are known
        self._answers: dict[int, tuple[float, Report]] = {}
        self._observed: dict[int, Observed] = {}
        self._asked_since: float | None = None
        self._heard: set[int] = set()
        self._left: set[int] = set()
        self._told = ''             # of this stall: '', 'warn' or 'end'
        self._owner = os.getpid()
        self._leaving = False
        self._thread = threading.Thread(
            target=self._run, name='watch for stalls', daemon=True)

    def know(self, peers: Iterable[Peer]) -> None:
        """Learns of ranks; the first call starts the thread."""
        # The thread has its own reference: nothing changes in its hands.
        known, witnesses = dict(self._peers), dict(self._witnesses)
        for peer in peers:
            known[peer.rank] = peer
            if peer.witness:
                witnesses.setdefault(peer.witness, -1 - len(witnesses))
        self._channel.know({rank: peer.address
                            for rank, peer in known.items()})
        self._channel.know({number: address
                            for address, number in witnesses.items()})
        self._peers, self._witnesses = known, witnesses
        self._period = max(self._period, len(self._peers) / _PEERS)
        self._own = OwnState(updates, _UNHEARD * self._period + 2.0)
        if not self._thread.is_alive():
            self._thread.start()
        # So that it is known later who can be heard at all.
        for rank in self._others():
            self._channel.send(rank, {'from': self._rank, 'kind': 'hello'})
        self._ask_witnesses()

    def leave(self, *_: Any) -> None:
        """Tells all ranks that this one ends in order; ends the thread."""
        if self._leaving or os.getpid() != self._owner:
            return
        self._leaving = True
        for rank in self._others():
            self._channel.send(rank, {'from': self._rank, 'kind': 'left'})
        self._channel.send(self._rank, {'from': self._rank, 'kind': 'wake'})
        self._thread.join(2 * _PERIOD)

    def _others(self) -> list[int]:
        return [rank for rank in sorted(self._peers) if rank != self._rank]

    def _ask_witnesses(self, silent: Iterable[int] = ()) -> None:
        """Asks for states, and for the stacks of ranks that are silent."""
        processes = [self._peers[rank].process for rank in silent]
        for number in self._witnesses.values():
            self._channel.send(number, {
                'from': number, 'token': self._channel.address.token,
                'stacks': processes})

    # --- the thread ----------------------------------------------------------

    def _run(self) -> None:
        next_look = time.monotonic()
        while not self._leaving:
            wait = max(0.0, min(next_look - time.monotonic(), self._period))
            connection.wait([self._channel], wait)
            for message in self._channel.receive():
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    self._hear(message)
            if time.monotonic() >= next_look and not self._leaving:
                next_look = time.monotonic() + self._period
                self._look()
        self._channel.close()

    def _hear(self, message: Mapping[str, Any]) -> None:
        sender, kind = message['from'], message['kind']
        now = time.monotonic()
        if kind == 'left':
            self._left.add(sender)
        elif kind == 'report':
            self._heard.add(sender)
            self._answers[sender] = now, report_from(dict(message))
            if message['asks']:
                self._send_report(sender, asks=False)
        elif kind == 'hello':
            self._heard.add(sender)
        elif kind == 'processes':
            for name, state, text in message['found']:
                if found := re.match(r'rank (\d+) of', name):
                    self._observed[int(found[1])] = Observed(
                        now, state, dumped_stack(text))
        elif kind == 'verdict':
            self._tell(message['action'])

    def _look(self) -> None:
        if not self._own.look():
            self._forget()
        limit = self._settings.limit(updates.usual_seconds())
        if self._own.idle < limit:
            self._forget()
            return
        if self._asked_since is None:
            self._asked_since = time.monotonic()
        for rank in self._others():
            self._send_report(rank, asks=True)
        self._ask_witnesses([
            rank for rank in self._others()
            if rank not in self._left
            and not self._is_new(self._answers.get(rank, _NEVER)[0])])
        self._judge(limit)

    def _forget(self) -> None:
        """Nothing stands still: what was known of a stall is over."""
        self._asked_since = None
        self._told = ''

    def _send_report(self, rank: int, asks: bool) -> None:
        self._channel.send(rank, {
            'from': self._rank, 'kind': 'report', 'asks': asks,
            **self._own.report()._asdict()})

    # --- the judgement -------------------------------------------------------

    def _judge(self, limit: float) -> None:
        """Looks at all ranks, unless a lower one does."""
        assert self._asked_since is not None
        if time.monotonic() - self._asked_since < _UNHEARD * self._period:
            return
        answers = {rank: report for rank, (at, report)
                   in self._answers.items() if self._is_new(at)}
        answers[self._rank] = self._own.report()
        if any(rank < self._rank and report.idle is not None
               and report.idle >= limit for rank, report in answers.items()):
            return
        if any(_moves(report, limit) for report in answers.values()):
            return
        views = [self._view(peer, answers.get(peer.rank))
                 for _, peer in sorted(self._peers.items())
                 if not _serves(answers.get(peer.rank))]
        # Where nobody waits, nobody is waited for: ranks end, or evaluate.
        if any(view.state in _STANDING for view in views):
            self._act(limit, views)

    def _act(self, limit: float, views: list[RankView]) -> None:
        cause = find_cause(views)
        # Others may be waited for that nobody here knows.
        is_certain = (cause.is_certain
                      and len(self._peers) == MPI.COMM_WORLD.size)
        is_broken = any(view.rank in cause.ranks and view.state is not
                        State.WAITS for view in views)
        if self._own.idle < limit * self._settings.patience(is_certain,
                                                            is_broken):
            return
        action = 'end' if self._settings.ends_if(is_certain) else 'warn'
        if self._told in (action, 'end'):
            return
        for rank in self._others():
            self._channel.send(rank, {'from': self._rank, 'kind': 'verdict',
                                      'action': action})
        self._tell(action)
        time.sleep(_LAST_WORDS)     # all others print before
        self._conclude(action, cause)

    def _conclude(self, action: str, cause: Cause) -> None:
        text = (f'\nchainer_fp8pipe: the job stands still: no rank has '
                f'finished an update for {self._own.idle:.0f} seconds; '
                f'{cause.text}')
        if action == 'warn':
            _print(text)
            return
        # MPI may be stuck, too.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback_later(_STUCK, exit=True)
        self._end(f'{text}ending all ranks with exit code {EXIT_CODE}\n',
                  EXIT_CODE)

    def _tell(self, action: str) -> None:
        """Prints where this rank is, once for each stall."""
        if self._told in (action, 'end'):
            return
        self._told = action
        report = self._own.report()
        who = self._peers[self._rank].who
        _print(f'\nchainer_fp8pipe: {who} has finished no update for '
               f'{self._own.idle:.0f} seconds ({report.updates} before); it '
               f'{State[report.state].value}, {report.details}\n{stack()}')

    def _is_new(self, at: float) -> bool:
        return time.monotonic() - at < _UNHEARD * self._period

    def _view(self, peer: Peer, report: Report | None) -> RankView:
        if report is not None:
            return RankView(peer.rank, peer.who, State[report.state],
                            report.details, report.waits_for, report.call,
                            report.updates)
        state, details, call = self._of_silent(peer)
        return RankView(peer.rank, peer.who, state, details, call=call)

    def _of_silent(self, peer: Peer) -> tuple[State, str, str]:
        """Names the state of a rank that does not answer, in words, and the
        call that it is in."""
        if peer.rank in self._left:
            return State.LEFT, 'its program has ended', ''
        seen = self._observed.get(peer.rank, Observed())
        if self._is_new(seen.at):
            return _of_process(seen)
        if peer.rank in self._heard or peer.rank in self._observed:
            return State.GONE, ('neither it nor the witness of its host '
                                'answers: the host or the way there is lost'
                                ), ''
        return State.SILENT, 'nothing was ever heard of it', ''


def _of_process(seen: Observed) -> tuple[State, str, str]:
    """What a rank does whose threads do not answer, by its process."""
    if seen.state == 'T':
        return State.STOPPED, '', ''
    if seen.state in ('', 'Z', 'X'):
        return State.GONE, 'its process has ended', ''
    if seen.state == 't':
        return State.SILENT, 'a debugger holds its process', ''
    if seen.stack is None:
        return State.SILENT, (
            f'its process is there (state {seen.state}), but a library keeps '
            'the interpreter from other threads'), ''
    where = f'{seen.stack.place}\n{seen.stack.text.rstrip()}'
    if seen.stack.call:
        call = f'MPI: {seen.stack.call}'
        return State.WAITS, f'in {call}; at {where}', f'{call} {where}'
    return State.SILENT, ('a library keeps the interpreter from other '
                          f'threads, at {where}'), ''


def _serves(report: Report | None) -> bool:
    """Whether a rank makes no updates, but sums for those that do."""
    return (report is not None and report.idle is None
            and report.state == State.WAITS.name)


def _moves(report: Report, limit: float) -> bool:
    """Whether a rank has moved on, or waits for something that moves."""
    if report.idle is None:         # it makes no updates
        return False
    return report.idle < limit / 2 or (
        report.state == State.WAITS.name and report.still < limit / 2)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):      # it is closed
        sys.stderr.write(text)
        sys.stderr.flush()


_watch: StallWatch | None = None


def watch_stalls(comm: MPI.Comm, who: str, witness: Address | None,
                 settings: StallSettings, end: Any) -> None:
    """Watches these ranks; call it on all of them.

    Args:
        comm: The ranks.
        who: This rank in words.
        witness: Of this node.
        settings: Those of the lowest rank count, and of the first call.
        end: See :class:`StallWatch`.
    """
    global _watch
    rank = MPI.COMM_WORLD.rank
    settings = comm.bcast(settings)
    if settings.seconds == 0:
        return
    if _watch is None:
        _watch = StallWatch(rank, settings, SideChannel(), end)
        atexit.register(_watch.leave)
        # A program may call MPI_Finalize itself, see witness.py.
        MPI.COMM_SELF.Set_attr(
            MPI.Comm.Create_keyval(delete_fn=_watch.leave), None)
    _watch.know(comm.allgather(Peer(
        rank, who, os.getpid(), _watch._channel.address, witness)))
