"""What the ranks do when, measured or simulated."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

#: Names of the events in which a rank computes.
COMPUTATION = ('forward', 'recompute', 'backward', 'backward_weight',
               'update')

#: Names of the events in which a rank is busy with messages.
COMMUNICATION = ('send', 'receive', 'exchange', 'encode', 'decode')

#: Name of the events in which a rank does nothing but wait.
WAITING = 'wait'

#: Lanes of what goes on beside a rank's main thread: the thread that
#: exchanges gradients, and buckets on their way.
EXCHANGE, BUCKETS = LANES = 'exchange thread', 'buckets'

#: Events that a Chrome trace has at most, unless told otherwise.
MOST_IN_TRACE = 100_000

#: Micro-batch, boundary, whether an activation -> rank -> events.
_Messages = dict[tuple[int | None, int, bool], dict[int, list['Event']]]

#: Rank, number of the lane (0: main thread), row in the lane.
_Place = tuple[int, int, int]


class Event(NamedTuple):
    """What a rank did from when to when.

    Attributes:
        rank: The rank.
        name: One of :data:`COMPUTATION` or :data:`COMMUNICATION`,
            :data:`WAITING`, ``'bucket'`` (a bucket of gradients travels) or
            ``'compression'`` (a codec's state).  ``backward_weight`` is the
            weight half of a backward pass where that runs on its own,
            ``backward`` then the input half.
        start: In seconds, on one clock for all ranks.
        end: In seconds.
        micro_batch: Its number, if the event is about one.
        chunk: Its number in the whole model, if the event is about one.
        iteration: The number of the update, if known.
        lane: ``''`` for the main thread, or one of :data:`LANES`.
        bytes: Handed to MPI meanwhile; of a bucket, those of its wire.
        about: The tensors of a bucket or of a codec's state.
        values: Names and numbers, such as a codec's.
    """

    rank: int
    name: str
    start: float
    end: float
    micro_batch: int | None = None
    chunk: int | None = None
    iteration: int | None = None
    lane: str = ''
    bytes: int = 0
    about: str = ''
    values: tuple[tuple[str, float], ...] = ()


def idle_share(events: Iterable[Event]) -> float:
    """The share of all ranks' time in which they do not compute.

    The time is that from the first event's start to the last event's end,
    both of main threads.  Communication counts as idle, as long as a rank
    does nothing else.

    Args:
        events: Of all ranks; events of computation do not overlap on a rank.

    Returns:
        Between 0 and 1; 0 where nothing took any time.
    """
    events = [event for event in events if not event.lane]
    if not events:
        return 0.0
    span = (max(event.end for event in events)
            - min(event.start for event in events))
    busy = sum(event.end - event.start for event in events
               if event.name in COMPUTATION)
    ranks = len({event.rank for event in events})
    return max(0.0, 1.0 - busy / (span * ranks)) if span else 0.0


def part_waits(events: Iterable[Event]) -> list[Event]:
    """Cuts each ``'receive'`` in two where its message began to be sent.

    What was measured as a receive is mostly waiting for another rank that
    computes.  It becomes ``'wait'`` until that rank starts its ``'send'``,
    and ``'receive'`` from then on.  A receive whose send is not among the
    events stays as it is.

    Args:
        events: Measured, in any order.

    Returns:
        The events by their start.
    """
    events = sorted(events, key=lambda event: (event.start, event.end))
    return split_waits(events, {receive: send.start for receive, send
                           in sends_of(events).items()})


def split_waits(events: Iterable[Event], until: Mapping[Event, float],
           waiting: Callable[[Event, float], Event] | None = None
           ) -> list[Event]:
    """Cuts events into a ``'wait'`` and what follows.

    Args:
        events: In any order.
        until: For some of the events, until when they wait.
        waiting: Gives the wait of an event until a time; None: the event's
            own fields with another name.

    Returns:
        The events by their start.
    """
    parts: list[Event] = []
    for event in events:
        cut = until.get(event, event.start)
        if cut <= event.start:          # as of most events
            parts.append(event)
            continue
        cut = min(cut, event.end)
        if cut > event.start:
            parts.append(waiting(event, cut) if waiting else
                         event._replace(name=WAITING, end=cut))
        if cut < event.end or cut == event.start:
            parts.append(event._replace(start=cut))
    return sorted(parts, key=lambda event: (event.start, event.end))


def chrome_trace(events: Iterable[Event], most: int = MOST_IN_TRACE
                 ) -> dict[str, Any]:
    """The events as Chrome trace: a row per rank, and one per lane beside.

    Write it with :func:`json.dump` and open it at ``chrome://tracing`` or in
    Perfetto.  Buckets that travel at the same time have rows of their own.

    Args:
        events: In any order; receives are parted by :func:`part_waits`.
        most: Events that are written at most: the first updates that have
            no more, and one at least.  Some 20 MB, which viewers open.

    Returns:
        The "JSON object format" of the Trace Event Format: times in
        microseconds from the first event on, rounded to nanoseconds.  Its
        ``otherData`` says which updates were left out, if any.
    """
    events, left_out = _whole_updates(part_waits(events), most)
    origin = events[0].start if events else 0.0
    rows: list[dict[str, Any]] = [
        {'ph': 'M', 'pid': 0, 'name': 'process_name',
         'args': {'name': 'pipeline'}}]
    placed = in_rows(events)
    # A rank's main thread has the rank as its number.
    numbers = {place: number for number, place in enumerate(sorted(
        {place for _, place in placed}, key=lambda place: (
            bool(place[1]), place)))}
    for order, (rank, lane, row) in enumerate(sorted(numbers)):
        number = numbers[rank, lane, row]
        name = f'rank {rank}' + (f': {LANES[lane - 1]}' if lane else '')
        rows += [{'ph': 'M', 'pid': 0, 'tid': number, 'name': 'thread_name',
                  'args': {'name': name + (f' {row}' if row else '')}},
                 {'ph': 'M', 'pid': 0, 'tid': number,
                  'name': 'thread_sort_index', 'args': {'sort_index': order}}]
    return {'traceEvents': rows + [_row(event, origin, numbers[place])
                                   for event, place in placed],
            'displayTimeUnit': 'ms',
            **({'otherData': {'left out': left_out}} if left_out else {})}


def _whole_updates(events: list[Event], most: int
                   ) -> tuple[list[Event], str]:
    """Events of the first updates, and what is left out, in words."""
    updates: dict[int | None, int] = {}
    for event in events:
        updates[event.iteration] = updates.get(event.iteration, 0) + 1
    kept: set[int | None] = set()
    count = 0
    for iteration, size in updates.items():
        if kept and count + size > most:
            break
        kept.add(iteration)
        count += size
    if len(kept) == len(updates):
        return events, ''
    gone = ', '.join(str(iteration) for iteration in updates
                     if iteration not in kept)
    return ([event for event in events if event.iteration in kept],
            f'{len(events) - count} events of updates {gone}: there are '
            f'{most} at most')


def in_rows(events: Iterable[Event]) -> list[tuple[Event, _Place]]:
    """Gives each bucket the first row that no other one is in meanwhile."""
    found: list[tuple[Event, _Place]] = []
    ends: dict[int, list[float]] = {}       # by rank, of the rows' last ones
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        row = 0
        if event.lane == BUCKETS:
            rows = ends.setdefault(event.rank, [])
            row = next((number for number, end in enumerate(rows)
                        if end <= event.start), len(rows))
            rows[row:row + 1] = [event.end]
        found.append((event, (
            event.rank, ('', *LANES).index(event.lane), row)))
    return found


def sends_of(events: list[Event]) -> dict[Event, Event]:
    """For each ``'receive'`` the ``'send'`` of its message, if known.

    Args:
        events: By their start.
    """
    sends = _messages(events, 'send')
    sent: dict[Event, Event] = {}
    for message, receivers in _messages(events[::-1], 'receive').items():
        senders = sends.get(message, {})
        if len(senders) != len(receivers):
            continue
        # Replicas of a stage are in the order of those of its neighbour.
        for source, target in zip(sorted(senders), sorted(receivers),
                                  strict=True):
            for send, receive in zip(
                    senders[source], receivers[target][::-1], strict=False):
                sent[receive] = send
    return sent


def _messages(events: list[Event], name: str) -> _Messages:
    """Sends in order of time, or receives against it, by what they carry.

    An activation follows the forward pass that made it, or comes before the
    one that needs it; so do gradients with backward passes.
    """
    found: _Messages = {}
    latest: dict[tuple[int, int | None, int | None], str] = {}
    for event in events:
        place = event.rank, event.micro_batch, event.chunk
        if event.name in COMPUTATION:
            latest[place] = event.name
        elif event.name == name and event.chunk is not None:
            upward = latest.get(place) == 'forward'
            boundary = event.chunk - (upward != (name == 'send'))
            found.setdefault((event.micro_batch, boundary, upward), {}
                             ).setdefault(event.rank, []).append(event)
    return found


def _row(event: Event, origin: float, thread: int) -> dict[str, Any]:
    # Both ends are rounded, so that events that meet do not overlap.
    start, end = (round((time - origin) * 1e6, 3)
                  for time in (event.start, event.end))
    number = '' if event.micro_batch is None else f' {event.micro_batch}'
    details = {'rank': event.rank, 'lane': event.lane or None,
               'micro_batch': event.micro_batch, 'chunk': event.chunk,
               'iteration': event.iteration, 'bytes': event.bytes or None,
               'about': event.about or None, **dict(event.values)}
    return {'ph': 'X', 'pid': 0, 'tid': thread,
            'name': event.name + number, 'cat': event.name, 'ts': start,
            'dur': round(end - start, 3),
            'args': {name: value for name, value in details.items()
                     if value is not None}}
