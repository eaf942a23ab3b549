"""Simulated ranks: programs that compute, send and receive, on one cluster.

Pipelines (:mod:`.schedules.simulator`) and all-reduces
(:mod:`.allreduce.simulation`) are programs of the same engine, so that both
may run at the same time and share links and cores.

A rank may have several programs and does one thing at a time: one program goes
on until it waits for a message, then the one that has been ready for longest.
A send takes the rank no time; what a message costs the rank is a computation
before the send.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .clock import Clock
from .cluster import Cluster
from .cores import Cores, ProcessorSharing, RoundRobin
from .deadlock import Deadlock
from .network import Network


class Compute(NamedTuple):
    """Keeps the rank, and a core, busy.

    Attributes:
        seconds: Duration on a core that no other rank uses.
        label: If not None, the computation is one of :attr:`Engine.spans`.
    """

    seconds: float
    label: Any = None


class Send(NamedTuple):
    """Sends a message.

    Attributes:
        target: The rank that receives.
        size: Bytes.
        key: Names the message for the receiver; of several messages with one
            key, each is received once.
        blocks: The rank waits until the message has arrived.
        label: Of the span of a send that blocks, which begins when the link
            is free.
    """

    target: int
    size: float
    key: Hashable
    blocks: bool = False
    label: Any = None


class Receive(NamedTuple):
    """Waits for a message, while other programs of the rank go on.

    Attributes:
        key: Of the message; only one program waits for it at a time.
        label: What the error about a deadlock calls the action.
    """

    key: Hashable
    label: Any = None


class Signal(NamedTuple):
    """Wakes a program of any rank that receives the key, at once.

    So programs of one rank, or a rank and its exchange's thread, tell each
    other how far they are; it is no message and takes no time.
    """

    key: Hashable


class Flush(NamedTuple):
    """Waits until all that the program sent has left the rank.

    Then it is the turn of the rank's other programs.
    """


class Span(NamedTuple):
    """What kept a rank busy, with times in seconds."""

    rank: int
    label: Any
    start: float
    end: float


EngineAction = Compute | Send | Receive | Signal | Flush
#: Instead of an action: before the first one, and after a send that blocks.
_BEGIN, _SENDING = object(), object()


class Program:
    """Actions of one rank, one after the other.

    Attributes:
        rank: Number of the rank.
        action: The next one; None after the last one.
        ended: When the last action was through.
    """

    __slots__ = ('rank', 'action', 'actions', 'left', 'followers',
                 'send_began', 'ended')

    def __init__(self, rank: int, actions: Iterable[EngineAction]) -> None:
        self.rank = rank
        self.action: Any = _BEGIN
        self.actions: Iterator[EngineAction] = iter(actions)
        self.left = 0.0, 0      # when what was sent last leaves, and a ticket
        self.followers: list[Program] = []
        self.ended = 0.0
        self.send_began = 0.0   # on the first link, of a send that blocks


@dataclass(slots=True)
class _Rank:
    ready: deque[Program] = field(default_factory=deque)    # can go on
    busy: bool = False          # computes
    seconds: float = 0.0        # of computations so far


class Engine:
    """Ranks in simulated time.

    Args:
        cluster: Ranks, links and cores.
        cores: How much ranks slow each other down, where this was measured;
            None: they take turns on the cores that ``cluster`` names.

    Attributes:
        spans: All computations and blocking sends that have a label, by
            their ends.
    """

    def __init__(self, cluster: Cluster, cores: Cores | None = None) -> None:
        self.spans: list[Span] = []
        self._clock = Clock()
        self._network = Network(self._clock, cluster)
        self._cores: ProcessorSharing | RoundRobin = (
            ProcessorSharing(self._clock, self, cores) if cores
            else RoundRobin(self._clock, self, cluster))
        self._ranks = [_Rank() for _ in cluster.hosts]
        self._arrived: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, Program] = {}

    @property
    def seconds(self) -> float:
        """Seconds until the last event so far."""
        return self._clock.now

    @property
    def link_seconds(self) -> float:
        """For how long the busiest link was busy."""
        return max(self._network.busy.values(), default=0.0)

    @property
    def rank_seconds(self) -> float:
        """For how long the busiest rank computed."""
        return max(rank.seconds for rank in self._ranks)

    def add(self, rank: int, actions: Iterable[EngineAction],
            after: Program | None = None) -> Program:
        """Gives a rank a program, before :meth:`run`.

        Args:
            rank: Its number.
            actions: Asked for one by one, as late as possible.
            after: A program of the same rank that must have ended before;
                None: this one begins at once.
        """
        program = Program(rank, actions)
        if after is None:
            self._ranks[rank].ready.append(program)
        else:
            after.followers.append(program)
        return program

    def run(self) -> None:
        """Lets all programs run to their ends.

        Raises:
            Deadlock: Programs wait for messages that nobody sends.
        """
        for rank in range(len(self._ranks)):
            self.go_on(rank)
        self._clock.run()
        if self._waiting:
            raise Deadlock([
                (program.rank, program.action.label or program.action)
                for program in sorted(self._waiting.values(),
                                      key=lambda program: program.rank)])

    # --- ranks ---------------------------------------------------------------

    def go_on(self, rank: int) -> None:
        """Has a rank do what it can; see :class:`~.cores.Computing`."""
        state = self._ranks[rank]
        ready = state.ready
        while ready and not state.busy:
            program = ready[0]
            action = program.action
            kind = type(action)
            if kind is Compute:
                self._compute(state, program, action)
            elif kind is Receive:
                if self._arrived.get(action.key):
                    self._arrived[action.key] -= 1
                    self._advance(program)
                else:
                    self._waiting[action.key] = ready.popleft()
            elif action is _BEGIN:
                self._advance(program)
            else:
                ready.popleft()
                if kind is Flush:
                    self._flush(state, program)
                elif action is None:
                    program.ended = self._clock.now
                    ready.extend(program.followers)

    def computed(self, rank: int, start: float) -> None:
        """Ends a computation; see :class:`~.cores.Computing`."""
        state = self._ranks[rank]
        state.busy = False
        program = state.ready[0]
        label = program.action.label
        if label is not None:
            self.spans.append(Span(rank, label, start, self._clock.now))
        self._advance(program)

    def _compute(self, state: _Rank, program: Program, action: Compute
                 ) -> None:
        seconds = action.seconds
        if seconds:
            state.busy = True
            state.seconds += seconds
            self._cores.compute(program.rank, seconds)
        else:
            self.computed(program.rank, self._clock.now)

    def _advance(self, program: Program) -> None:
        """Goes to the next action; sends before that one leave now."""
        for action in program.actions:
            program.action = action
            if type(action) is Signal:
                self._clock.at(self._clock.now, self._arrive, action.key)
                continue
            if type(action) is not Send:
                return
            self._send(program, action)
            if action.blocks:
                program.action = _SENDING
                return
        program.action = None

    def _flush(self, state: _Rank, program: Program) -> None:
        """Puts a program back into the row, now or later."""
        program.action = _BEGIN
        if not self._clock.at_ticket(*program.left, self._resume, program):
            state.ready.append(program)

    def _resume(self, program: Program) -> None:
        self._ranks[program.rank].ready.append(program)
        self.go_on(program.rank)

    # --- messages ------------------------------------------------------------

    def _send(self, program: Program, action: Send) -> None:
        ticket = self._clock.ticket()
        if action.blocks:
            program.send_began, _ = self._network.send(
                program.rank, action.target, action.size,
                self._arrive_blocking, program, action)
        else:
            _, left = self._network.send(
                program.rank, action.target, action.size, self._arrive,
                action.key)
            program.left = max(program.left, (left, ticket))

    def _arrive(self, key: Hashable) -> None:
        self._arrived[key] = self._arrived.get(key, 0) + 1
        program = self._waiting.pop(key, None)
        if program is not None:
            self._resume(program)

    def _arrive_blocking(self, program: Program, action: Send) -> None:
        if action.label is not None:
            self.spans.append(Span(program.rank, action.label,
                                   program.send_began, self._clock.now))
        self._arrive(action.key)
        program.action = _BEGIN
        self._resume(program)
