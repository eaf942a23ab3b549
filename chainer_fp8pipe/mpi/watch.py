"""The watch over a job: a thread of each rank notices that all stand still."""
# A job stands still while ranks wait for others and nothing changes: no rank
# finishes an update, or begins or ceases to wait, and none that waits moves
# on.  Each rank's thread wakes once a second.  Where its rank has finished no
# update for some time, it asks the threads of all others what their ranks do
# (doing.py).  The lowest rank that asks judges, prints once what all have said
# and who has not answered, and ends the job with a code after which ``launch``
# starts it again.  That is for ranks that cannot go on.  A rank that may act,
# in any of its threads, may go on by itself: such a job is only warned, unless
# the user has set the time after which it ends.
#
# Threads talk by datagrams (UDP).  MPI would need MPI_THREAD_MULTIPLE, a
# communicator that all ranks make together, and a library that still answers
# when a link is down.  A datagram may be lost, so questions are asked again;
# one that does not carry the token of its receiver is not read.  A thread
# cannot answer while a library holds the interpreter.  To others that looks as
# if the rank was stopped or its host lost, so the limit is longer.
from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import secrets
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

from mpi4py import MPI

from .agreement import raise_together
from .doing import WAITS, WORKS, doing
from .finalizing import before_finalize
from .world import end_all_ranks

#: The environment variable with the seconds without an update after which a
#: job ends; 0: nothing is watched.
SECONDS = 'CHAINER_FP8PIPE_STALL'
#: Exit code of a job that stood still: a failure that may be over when the
#: job is started again (``EX_TEMPFAIL`` of ``<sysexits.h>``).
EXIT_CODE = 75
#: States beside those of doing.py, in words that follow a rank's name.
SILENT, LEFT = 'does not answer', 'has left the job'

_TICK = 1.0             # seconds between looks
_LATE = 5.0             # between two looks: this process itself was stopped
_LEAST = 30.0           # seconds without an update, at least
_UPDATES = 20           # usual updates without one
# So many times the limit is waited for while it is less certain that a job
# stands still.
_UNCLEAR = 4            # all wait
_WORK = 10              # a rank may act, or may be held by a library
_ANSWERS = 3.0          # seconds in which those that can answer have done so
_FRESH = 5.0            # seconds for which an answer holds
_GREETING = 4           # the lowest ranks know from the start who is heard
_GREETINGS = 30         # at most
_LAST = 64              # durations that are remembered of each kind
_SHOWN, _MOST_BYTES = 16, 60_000
_STUCK = 20.0           # seconds that MPI_Abort may take
_SIOCGIFADDR = 0x8915   # <linux/sockios.h>


class UpdateCount:
    """The updates that this rank has finished, and how long they take.

    Attributes:
        total: How many; written by the main thread alone.
    """

    def __init__(self) -> None:
        self.total = 0
        self._kind: Hashable = None
        self._at = 0.0
        self._after: dict[Hashable, collections.deque[float]] = {}

    def finished(self, kind: Hashable) -> None:
        """Counts an update.

        Args:
            kind: What follows an update of one kind takes regular times: a
                communicator's of one model, for example.
        """
        now = time.monotonic()
        if self.total:
            if len(self._after) > _LAST:        # a search makes new models
                self._after.clear()
            self._after.setdefault(
                self._kind, collections.deque(maxlen=_LAST)).append(
                    now - self._at)
        self._kind, self._at = kind, now
        self.total += 1

    def limit(self) -> float:
        """Seconds without an update that nobody expects.

        From the median time between an update of the latest kind and the
        next one, however long those of other kinds take, or rare they are.
        """
        usual = statistics.median(
            tuple(self._after.get(self._kind, ())) or (0.0,))
        return max(_LEAST, _UPDATES * usual)


#: Of this process.
updates = UpdateCount()


def watch(comm: MPI.Comm, role: str = '') -> None:
    """Watches these ranks from now on; call it on all of them.

    Args:
        comm: The ranks.
        role: This rank's part in the job for messages, such as ``'stage 0'``;
            '' keeps that of an earlier call, at first ``'worker'``.

    Raises:
        ValueError: The environment variable has no number of seconds; on all
            ranks.
    """
    if comm.size == 1:
        return
    seconds = comm.bcast(raise_together(comm, _seconds, ValueError))
    if seconds != 0:
        _own.role = role or _own.role
        _own.begin(comm.allgather(_own.card()), seconds)


def _seconds() -> float | None:
    text = os.environ.get(SECONDS, '').strip()
    with contextlib.suppress(ValueError):
        if not text or 0 <= float(text) < math.inf:
            return float(text) if text else None
    raise ValueError(f'the environment variable {SECONDS} must be seconds, '
                     f'0 or more, not {text!r}')


# --- the threads -------------------------------------------------------------

@dataclasses.dataclass
class Peer:
    """Another rank, as this one knows it.

    Attributes:
        rank: In its ``MPI.COMM_WORLD``.
        who: In words.
        addresses: Where its thread may be reached; that from which it was
            heard, once it was.
        token: It reads no datagram without.
        is_known: It was heard once.
        heard: When it last said what it does, and that.
    """

    rank: int
    who: str
    addresses: list[tuple[str, int]]
    token: str
    is_known: bool = False
    heard: tuple[float, dict[str, Any]] = -math.inf, {}
    has_left: bool = False


class Watch:
    """This rank's thread.

    Attributes:
        role: The rank's part in the job.
    """

    def __init__(self) -> None:
        self.role = 'worker'
        self._peers: dict[str, Peer] = {}
        self._seconds: float | None = None
        self._token = secrets.token_hex(8)
        self._socket: socket.socket | None = None
        self._has_ended = False
        self._state: Any = None     # what has to change, and since when it
        self._since = self._asks = 0.0          # has not; since when it asks
        self._asked = -math.inf     # when a lower rank last asked
        self._looks = 0
        self._has_told = False

    def card(self) -> dict[str, Any]:
        """How others find this rank."""
        world = MPI.COMM_WORLD
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind(('', 0))
        port = self._socket.getsockname()[1]
        return dict(rank=world.rank, token=self._token,
                    who=f'rank {world.rank} of {world.size} ({self.role}), '
                    f'process {os.getpid()} on host {os.uname().nodename},',
                    addresses=[(host, port) for host in _own_addresses()])

    def begin(self, cards: Sequence[dict[str, Any]], seconds: float | None
              ) -> None:
        """Watches more ranks; starts the thread."""
        is_first, self._seconds, self._looks = not self._peers, seconds, 0
        self._who = next(card['who'] for card in cards
                         if card['token'] == self._token)
        for card in cards:
            if (token := card['token']) in self._peers:
                self._peers[token].who = card['who']
            elif token != self._token:
                # At once: the thread may be looking at them.
                self._peers = {**self._peers, token: Peer(**card)}
        if is_first:
            before_finalize(self.end)
            threading.Thread(target=self._serve, name='watch',
                             daemon=True).start()

    def end(self) -> None:
        """Tells all others that this rank leaves in order."""
        self._has_ended = True
        for _ in range(2):          # datagrams may be lost
            for peer in self._peers.values():
                self._tell(peer, left=True)

    def _serve(self) -> None:
        looked = time.monotonic()
        while not self._has_ended:
            # What it looks at may change meanwhile.
            with contextlib.suppress(Exception):
                self._hear(looked + _TICK)
            now = time.monotonic()
            was_late, looked = now - looked > _LATE, now
            with contextlib.suppress(Exception):
                self._look(now, was_late)

    def _hear(self, end: float) -> None:
        assert self._socket
        while not self._has_ended and (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data, source = self._socket.recvfrom(1 << 16)
                said = json.loads(data)
                peer = self._peers[said['from']]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if said.get('to') != self._token:
                continue
            peer.is_known, peer.addresses = True, [source]
            if 'left' in said:
                peer.has_left = True
            elif 'judges' in said:
                if said['judges'] and (peer.rank, peer.token) < (
                        MPI.COMM_WORLD.rank, self._token):
                    self._asked = time.monotonic()
                self._tell(peer, **self._answer())
            else:
                peer.heard = time.monotonic(), said

    def _tell(self, peer: Peer, **said: Any) -> None:
        data = json.dumps({**said, 'from': self._token, 'to': peer.token}
                          ).encode()[:_MOST_BYTES]
        for address in peer.addresses:
            with contextlib.suppress(OSError):
                assert self._socket
                self._socket.sendto(data, tuple(address))

    def _answer(self) -> dict[str, Any]:
        """What this rank does."""
        found, quiet = doing(), time.monotonic() - self._since
        # It may have moved since its thread last looked: slow data are there.
        if (updates.total, found.state, found.moves) != self._state:
            quiet = 0.0
        return {**found._asdict(), 'rank': MPI.COMM_WORLD.rank,
                'who': self._who, 'quiet': quiet, 'updates': updates.total}

    def _look(self, now: float, was_late: bool) -> None:
        found = doing()
        state = updates.total, found.state, found.moves
        if was_late or state != self._state:
            self._state, self._since, self._has_told = state, now, False
        quiet = now - self._since
        limit = updates.limit() if self._seconds is None else self._seconds
        judges = quiet >= limit and now - self._asked >= _FRESH and bool(
            updates.total or any(peer.has_left
                                 for peer in self._peers.values()))
        self._asks = judges and (self._asks or now)
        # Whether datagrams come through at all is found out before.
        self._looks += 1
        greets = (self._looks <= _GREETINGS
                  and MPI.COMM_WORLD.rank < _GREETING)
        for peer in self._peers.values():
            if not peer.has_left and (judges or
                                      greets and not peer.is_known):
                self._tell(peer, judges=judges)
        if judges and now - self._asks >= _ANSWERS:
            self._judge(now, quiet, limit)

    def _judge(self, now: float, quiet: float, limit: float) -> None:
        views = [self._answer()]
        is_given = self._seconds is not None
        cannot_tell = False
        for peer in self._peers.values():
            if now - peer.heard[0] < _FRESH and not peer.has_left:
                views.append(peer.heard[1])
                continue
            cannot_tell |= not (peer.is_known or peer.has_left)
            views.append({
                'rank': peer.rank, 'who': peer.who, 'updates': -1,
                'quiet': math.inf, 'stack': '', 'call': '', 'waits_for': (),
                'state': LEFT if peer.has_left else SILENT,
                'words': '' if peer.has_left else
                'stopped, gone, held by a library, or its host is lost'})
        verdict = find_cause(sorted(views, key=lambda one: one['rank']),
                             limit, is_given)
        if verdict is None:
            return
        text, factor, ends = verdict
        if cannot_tell and not is_given:
            factor, ends = _WORK, False
        if quiet < limit * factor or self._has_told:
            return
        self._has_told = True
        text = ('\nchainer_fp8pipe: the job stands still: no rank has '
                f'finished an update for {quiet:.0f} seconds; {text}')
        if ends:
            _end(f'{text}ending all ranks with exit code {EXIT_CODE}\n')
        else:
            sys.stderr.write(f'{text}the job goes on, as it may go on by '
                             f'itself; {SECONDS}=N or --stall N ends it\n')
            sys.stderr.flush()


_own = Watch()


def _end(text: str) -> None:
    """Ends all ranks, from the thread."""
    # MPI may be stuck, too; launchers end the others on this exit.
    stuck = threading.Timer(_STUCK, os._exit, [EXIT_CODE])
    stuck.daemon = True
    stuck.start()
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        end_all_ranks(text, EXIT_CODE)
    else:
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _own_addresses() -> list[str]:
    """IPv4 addresses by which others may reach this host."""
    found = ['127.0.0.1']
    with contextlib.suppress(OSError), socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):      # it has none; not Linux
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR,
                                     struct.pack('40s', name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*dict.fromkeys(found)]


# --- the cause ---------------------------------------------------------------

def find_cause(views: Sequence[dict[str, Any]], limit: float, is_given: bool
               ) -> tuple[str, float, bool] | None:
    """The cause, from what is known of all ranks.

    Args:
        views: Of all ranks: what :class:`~.doing.Doing` has, and ``rank``,
            ``who``, ``updates`` and ``quiet``.
        limit: Seconds without an update.
        is_given: By the user, who then has the job end in any case.

    Returns:
        Lines about it; how many limits must be over; and whether the job
        ends then.  None if it does not stand still.
    """
    # Without those that make no updates, but sum for those that do.
    found = [view for view in views
             if view['updates'] or view['state'] != WAITS]
    if any(view['quiet'] < limit for view in found):
        return None
    left, silent, busy = ([view for view in found if view['state'] == state]
                          for state in (LEFT, SILENT, WORKS))
    awaited = {rank for view in found for rank in view['waits_for']}
    if left and len(left) + len(busy) == len(found):
        return None         # nobody waits: the last one plots, say
    if left and not busy:
        return _said(found, left, 'which others wait for'), 1, True
    if silent:
        return (_said(found, silent, 'behind which others wait'),
                _UNCLEAR if is_given else _WORK, True)
    if busy:
        named = [view for view in busy if view['rank'] in awaited] or busy
        return (_said(found, named, 'behind which others wait'),
                1 if is_given else _WORK, is_given)
    # All ranks wait: who waits in another call than those behind it?
    groups: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)
    for view in found:
        groups[view['call'], view['words'], view['updates']].append(view)
    largest = max(groups.values(), key=len, default=[])
    others = [view for view in found if view not in largest]
    cause, why = [view for view in found if view['rank'] in awaited
                  and not view['waits_for']], (
        'for which others wait, in another call')
    if not cause and len(largest) > len(others) > 0:
        cause, why = others, 'in another call than the others'
    if not cause:
        why = 'all ranks wait for each other in ' + (
            'different calls' if others else
            'the same place: a message was lost, or a link is down')
    return _said(found, cause, why), 1 if is_given else _UNCLEAR, True


def _said(views: Sequence[dict[str, Any]], cause: Sequence[dict[str, Any]],
          why: str) -> str:
    """Lines: the cause, and what each rank does."""
    names = ', '.join(str(view['rank']) for view in cause[:_SHOWN])
    head = (f'the cause: rank{"s" * (len(cause) > 1)} {names}, {why}:\n'
            if cause else f'{why}:\n')
    shown = [*cause, *(view for view in views if view not in cause)]
    return head + ''.join(
        f'  {view["who"]} {view["state"]}'
        + f': {view["words"]}' * bool(view['words']) + '\n'
        + view['stack'] * (view in cause) for view in shown[:_SHOWN]
    ) + f'  and {len(shown) - _SHOWN} more\n' * (len(shown) > _SHOWN)
