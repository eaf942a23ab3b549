"""The stream of events of one rank: what happens is written here, once."""
# Seconds and bytes are always added up; sections are kept only in the lists of
# those who asked.  A step has some ten of them, between arrays that empty the
# caches: each call of a function and each object costs a microsecond.  So a
# section is kept as it is, and becomes an event when somebody looks.
from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any, NamedTuple

#: Seconds between two events that are one: a thread that polls makes many.
_GAP = 100e-6


class Event(NamedTuple):
    """What a rank did from when to when.

    Names are ``'input'``, ``'forward'``, ``'recompute'``, ``'backward'``,
    ``'backward_weight'``, ``'update'``, ``'send'``, ``'receive'``,
    ``'exchange'``, ``'encode'`` and ``'decode'``.  ``backward_weight`` is the
    weight half of a backward pass that runs on its own.
    """

    rank: int
    name: str
    start: float            # in seconds, on one clock for all ranks
    end: float
    micro_batch: int | None = None
    chunk: int | None = None            # its number in the whole model
    beside: bool = False    # in the thread that exchanges, not the main one
    bytes: int = 0          # handed to MPI meanwhile


class EventStream:
    """Adds up seconds and bytes, and keeps sections for those who ask.

    Attributes:
        updates: Exchanges finished.
        bytes_sent: Bytes of wires and scales that this rank handed to MPI,
            over all updates; without the agreement's 16 bytes and
            ``bcast_data``.  Of ``MPI_Allreduce``, those of a reduce-scatter
            and an all-gather.
        stage_bytes: Bytes of messages to other stages of a pipeline.
        stage_arrays: Bytes of the arrays in them, before a codec.
        seconds: By section over all updates, among them ``'encode'``,
            ``'exchange'`` (with waiting for slower ranks) and ``'decode'``.
            Time in an inner section does not count for the outer one.
        hidden: The same, of the thread that called :meth:`hide`.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.bytes_sent = self.stage_bytes = self.stage_arrays = 0
        self.seconds: dict[str, float] = defaultdict(
            float, encode=0.0, exchange=0.0, decode=0.0)
        self.hidden = self.seconds.copy()
        self._keeping: tuple[list[Section], ...] = ()
        self._thread = _Thread(self.seconds)

    def keep(self) -> list[Section]:
        """A list to which what follows is appended, for :func:`events_of`."""
        kept: list[Section] = []
        self._keeping = (*self._keeping, kept)
        return kept

    def keep_no_more(self, kept: list[Section]) -> None:
        """Appends nothing more to that list, if it did."""
        self._keeping = tuple(
            other for other in self._keeping if other is not kept)

    def hide(self) -> None:
        """From now on, this thread's sections count as hidden."""
        self._thread.beside = True
        self._thread.counted = self.hidden

    def section(self, name: str, micro_batch: int | None = None,
                chunk: int | None = None) -> Section:
        """Times a ``with`` block, with the fields of :class:`Event`."""
        return Section(self, name, micro_batch, chunk)

    def sent(self, count: int) -> None:
        """Adds bytes that were handed to MPI, in the innermost section."""
        self.bytes_sent += count
        if self._thread.open:
            self._thread.open[-1].bytes += count

    def carried(self, count: int, whole: int) -> None:
        """Adds a message's bytes to another stage, and those of its arrays."""
        self.stage_bytes += count
        self.stage_arrays += whole
        if self._thread.open:
            self._thread.open[-1].bytes += count

    def divide(self, **seconds: float) -> None:
        """Gives sections, by name, seconds of the one that is open."""
        thread = self._thread
        for name, amount in seconds.items():
            thread.counted[name] += amount
            if thread.open:
                thread.counted[thread.open[-1].name] -= amount


def stream_of(*owners: Any) -> EventStream:
    """The stream in which one of them writes, as ``events``, or a new one."""
    return next((owner.events for owner in owners if isinstance(
        getattr(owner, 'events', None), EventStream)), EventStream())


class Section:
    """A ``with`` block that is timed; see :meth:`EventStream.section`."""

    __slots__ = ('_stream', 'beside', 'bytes', 'chunk', 'end', 'micro_batch',
                 'name', 'start')

    def __init__(self, stream: EventStream, name: str,
                 micro_batch: int | None, chunk: int | None) -> None:
        self._stream = stream
        self.name = name
        self.micro_batch = micro_batch
        self.chunk = chunk
        self.bytes = 0

    # These two call no method of the stream, as each call counts.

    def __enter__(self) -> None:
        thread = self._stream._thread
        now = self.start = time.monotonic()
        sections = thread.open
        if sections:
            thread.counted[sections[-1].name] += now - thread.since
        thread.since = now
        sections.append(self)

    def __exit__(self, *exception: object) -> None:
        stream, now = self._stream, time.monotonic()
        thread = stream._thread
        sections = thread.open
        thread.counted[sections.pop().name] += now - thread.since
        thread.since = now
        for outer in sections:
            if outer.name == self.name:     # and will be the event
                outer.bytes += self.bytes
                return
        self.end, self.beside = now, thread.beside
        for kept in stream._keeping:
            kept.append(self)


class _Thread(threading.local):
    """The sections that a thread is in, innermost last.

    ``since`` is when the innermost one began, or went on, and ``counted`` the
    seconds that it adds to.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.open: list[Section] = []
        self.since = 0.0
        self.counted = seconds
        self.beside = False


def events_of(kept: list[Section], rank: int, origin: float) -> list[Event]:
    """The events of sections that a stream has kept, by their ends.

    ``origin`` is what this rank's ``time.monotonic`` says at time zero; what
    began before is left out.
    """
    found: list[Event] = []
    place = -1      # of the last event of the thread that exchanges
    for one in kept:
        if one.start < origin:
            continue
        event = Event(rank, one.name, one.start - origin, one.end - origin,
                      one.micro_batch, one.chunk, one.beside, one.bytes)
        if event.beside:
            if place >= 0 and event.name == (last := found[place]).name and (
                    0 <= event.start - last.end < _GAP):
                found[place] = last._replace(
                    end=event.end, bytes=last.bytes + event.bytes)
                continue
            place = len(found)
        found.append(event)
    return found
