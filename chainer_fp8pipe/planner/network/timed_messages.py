"""Times messages between ranks: streams, pings, and what a rank does.

The members of a round, whether they send or not, call a function together; it
begins when all of them are there.
"""
from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy

from ...mpi.waiting import BRIEF, give_way
from .link_rounds import Round, ends
from .peers import Peers, Pending

_FRAME, _PING, _PONG, _ANSWER, _WORK = range(32006, 32011)     # tags
_SMALLEST, _LARGEST = 1 << 14, 1 << 20      # bytes of a frame
_FRAMES = 16            # of a load, unless they were too small or too large
_UNDER_WAY = 16         # frames at a time
# Beyond what caches of a core hold: gradients are not in them either.
_MEMORY = 1 << 23       # bytes of a stream
_POLLS = 10             # after a nap
_SLEEP = 2e-5           # seconds; Linux makes about 75 us of it
#: A rank that yields the core gets it back late if other programs want it,
#: and then a link is idle.
BETWEEN_HOSTS = 2e-4
#: Ranks of one host copy messages themselves, and would wait for each other's
#: sleep.
INSIDE_HOSTS = BRIEF
_ALL_HERE = 1e-3        # seconds in which all members know of each other


class Load(NamedTuple):
    """What a stream carries: frames that follow each other."""

    frame: int          # bytes
    frames: int

    @classmethod
    def of(cls, size: int) -> Load:
        """About so many bytes."""
        frame = min(max(size // _FRAMES, _SMALLEST), _LARGEST)
        return cls(frame, max(size // frame, 1))

    def times(self, count: int) -> Load:
        """So many times as many frames."""
        return self._replace(frames=self.frames * count)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.frame * self.frames


def stream(peers: Peers, members: Sequence[int], messages: Round,
           load: Load, alert: float) -> list[float]:
    """Sends a load to each target while one comes from each source.

    No message waits for another one.

    Args:
        peers: The ranks.
        members: Those that call this.
        messages: From whom loads go to whom.
        load: The same for all.
        alert: Seconds without news for which ranks only yield the core
            between polls, before they sleep: :data:`BETWEEN_HOSTS` or
            :data:`INSIDE_HOSTS`.

    Returns:
        For each source, the seconds until the whole load was here.
    """
    sends, receives = _lanes(peers, messages, load)
    begin = _begin_together(peers, members)
    _carry(peers, receives + sends, alert)
    return [lane.end - begin for lane in receives]


def answered_stream(peers: Peers, members: Sequence[int], messages: Round,
                    load: Load) -> list[float]:
    """As :func:`stream`, but a short message answers every load.

    Ranks always sleep between polls, so that short loads and long ones are
    noticed equally late.

    Returns:
        For each target, the seconds until its answer was here: by one clock.
    """
    sends, receives = _lanes(peers, messages, load)
    _, answers = _lanes(peers, tuple(
        (target, source) for source, target in messages), Load(1, 1), _ANSWER)
    begin = _begin_together(peers, members)
    _carry(peers, receives + sends, 0.0)
    byte = numpy.zeros(1, numpy.uint8)
    sent = [peers.sender(_ANSWER)(byte, lane.rank) for lane in receives]
    _carry(peers, answers, 0.0)
    peers.wait(sent)
    return [lane.end - begin for lane in answers]


def ping(peers: Peers, members: Sequence[int], messages: Round,
         count: int) -> float:
    """Least seconds of a short message to this rank's one target.

    The target returns each message at once, as this rank does for its source;
    the seconds are half of those to and fro.  NaN: the rank has none.
    """
    peers.sync(members)
    for target, source in zip(*ends(messages, peers.rank), strict=True):
        return min(_to_and_fro(peers, target, source)
                   for _ in range(count)) / 2
    return math.nan


class Work(NamedTuple):
    """What messages took: of the processor, naps, and of a clock."""

    busy: float         # seconds of this thread on its core
    naps: int
    seconds: float


def work(peers: Peers, members: Sequence[int], load: Load, nap: float
         ) -> Work:
    """Sends frames to the next member, hears the one before, sleeps meanwhile.

    So a rank that waits for a link is not busy; polls would make it so.

    Args:
        peers: The ranks.
        members: On a ring.
        load: Each frame is a message.
        nap: Seconds to sleep before messages are asked for; 0: none.
    """
    place = members.index(peers.rank)
    target, source = members[place + 1 - len(members)], members[place - 1]
    out = numpy.ones(load.frame, numpy.uint8)
    heard = numpy.ones((load.frames, load.frame), numpy.uint8)
    send, receive = peers.sender(_WORK), peers.receiver(_WORK)
    peers.sync(members)
    since, naps = time.monotonic(), 0
    begin, busy = time.perf_counter(), time.thread_time()
    left = deque(receive(row, source) for row in heard)
    left.extend(send(out, target) for _ in range(load.frames))
    while left:
        if nap:
            time.sleep(nap)
            naps += 1
        for _ in range(_POLLS):
            # In their order, so that those which wait are not asked.
            while left and left[0].test():
                left.popleft()
            if not left:
                break
            give_way()
        peers.look(since, lambda: (source, target))
    return Work(time.thread_time() - busy, naps,
                time.perf_counter() - begin)


def nap_work(peers: Peers, nap: float) -> float:
    """Seconds for which a nap, and one look for messages, keep a rank busy."""
    data = numpy.zeros(1, numpy.uint8)
    begin = time.thread_time()
    request = peers.comm.Irecv(data, peers.rank, _WORK)
    time.sleep(nap)
    request.Test()
    seconds = time.thread_time() - begin
    request.Cancel()
    request.Wait()
    return seconds


def _to_and_fro(peers: Peers, target: int, source: int) -> float:
    out, back, heard, returned = numpy.zeros((4, 1), numpy.uint8)
    begin = time.perf_counter()
    asked = peers.receiver(_PING)(heard, source)
    answer = peers.receiver(_PONG)(returned, target)
    sent = [peers.sender(_PING)(out, target)]
    since, has_asked, seconds = time.monotonic(), False, 0.0
    while not (has_asked and seconds):
        if not has_asked and asked.test():
            has_asked = True
            sent.append(peers.sender(_PONG)(back, source))
        if not seconds and answer.test():
            seconds = time.perf_counter() - begin
        give_way()
        peers.look(since, lambda: (source, target))
    peers.wait(sent)
    return seconds


class _Lane:
    """Frames to one rank, or from one, some of them under way at a time."""

    def __init__(self, start: Callable[[numpy.ndarray, int], Pending],
                 rank: int, load: Load) -> None:
        slots = max(min(_MEMORY // load.frame, load.frames), 1)
        self._memory = numpy.ones((slots, load.frame), numpy.uint8)
        self._start, self.rank = start, rank
        self._count, self._begun = load.frames, 0
        self._under_way: deque[Pending] = deque()
        self.end = math.nan         # when the last one was through

    def begin(self) -> None:
        """Puts the first frame under way."""
        self._begin_next()

    def advance(self) -> bool:
        """Begins frames in place of those that are through; were there any?"""
        moved = False
        while self._under_way and self._under_way[0].test():
            self._under_way.popleft()
            moved = True
            # One more at a time: ranks that share a core, and begin to send
            # later than others, must not begin much later.
            for _ in range(2):
                if len(self._under_way) < _UNDER_WAY:
                    self._begin_next()
        if moved and not self._under_way:
            self.end = time.perf_counter()
        return moved

    def _begin_next(self) -> None:
        if self._begun < self._count:
            slot = self._memory[self._begun % len(self._memory)]
            self._under_way.append(self._start(slot, self.rank))
            self._begun += 1


def _begin_together(peers: Peers, members: Sequence[int]) -> float:
    """Waits until a time that is the same for all members, and returns it.

    They hear of each other at the same time, up to a latency or two.  The
    time is a little later: when one begins to send, another that shares its
    core must not be still about to hear.
    """
    peers.sync(members)
    begin = time.perf_counter() + _ALL_HERE
    time.sleep(_ALL_HERE)
    return begin


def _lanes(peers: Peers, messages: Round, load: Load,
           tag: int = _FRAME) -> tuple[list[_Lane], list[_Lane]]:
    """This rank's lanes to others, and from others."""
    targets, sources = ends(messages, peers.rank)
    return ([_Lane(peers.sender(tag), rank, load) for rank in targets],
            [_Lane(peers.receiver(tag), rank, load) for rank in sources])


def _carry(peers: Peers, lanes: Sequence[_Lane], alert: float) -> None:
    """Keeps all lanes going until everything is through."""
    since = time.monotonic()
    for lane in lanes:
        lane.begin()
    while any(math.isnan(lane.end) for lane in lanes):
        # A list: any() alone would stop at the first that moves.
        if any([lane.advance() for lane in lanes]):
            since = time.monotonic()
            continue
        if time.monotonic() < since + alert:
            give_way()
        else:
            time.sleep(_SLEEP)
        peers.look(since, lambda: [lane.rank for lane in lanes
                                   if math.isnan(lane.end)])
