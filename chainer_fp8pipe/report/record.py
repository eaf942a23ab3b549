"""The record of a run: what a report shows, as pure data.

A run is what has been written into one folder: one start of a job or, where
ranks died and a launcher started the job again, several.
:mod:`.record_file` writes the parts of a record while the run goes on, and
reads them.

Seconds of a start count from that start, on the clock of its rank 0; a
reader has already put the events of other ranks on that clock.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .events import Event

#: Into what the time of a step goes, in the order of a picture.  The exchange
#: includes waiting for slower ranks; ``other`` is what no section of an update
#: covers, ``between`` what passes from an update to the next: evaluation,
#: snapshots, other extensions.
PHASES = ('input', 'forward', 'recompute', 'backward', 'backward_weight',
          'encode', 'exchange', 'decode', 'send', 'receive', 'update',
          'other', 'between')

#: Phases in which a rank may wait for another.
COMMUNICATION = ('exchange', 'send', 'receive')

#: Why the events of an update were kept.
FIRST, REGULAR, SLOW = 'first', 'regular', 'slow'


class RunStart(NamedTuple):
    """The job was started.

    Attributes:
        number: 0 for the first start in this folder, then 1, 2, ...
        time: Seconds since 1970, UTC.
        iteration: Updates done before; above 0 if the run went on from a
            snapshot.
        ranks: How many there are.
        hosts: The host of each rank.
        stages: The pipeline stage of each rank; () if there is no pipeline.
        command: Of rank 0: the program and its arguments.
        versions: By name: Python, this package, Chainer, NumPy, MPI, ...
        options: By name, in words: communicator, codec, algorithm, overlap,
            updater, optimizer, batch size, schedule, ...
        environment: Variables that change how ranks run, by name, and
            ``'cpu'``, ``'cores'``, ``'memory'`` of rank 0's host.
        launched: How often the launcher had started the job before; None
            without a launcher.
        after: What the launcher says has ended the start before; ''.
        reporting: Ranks whose data the record has; all but where only some
            were given the extension.
        origin: What the clock of rank 0 (``time.monotonic``) showed.
    """

    number: int
    time: float
    iteration: int
    ranks: int
    hosts: tuple[str, ...]
    stages: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    options: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    launched: int | None = None
    after: str = ''
    reporting: tuple[int, ...] = ()
    origin: float = 0.0


class RunEnd(NamedTuple):
    """A start ended in an orderly way; one that was killed has no end.

    Attributes:
        start: Number of the start.
        time: Seconds since 1970, UTC.
        iteration: Updates done.
        error: What was raised, on rank 0; '' if nothing was.
    """

    start: int
    time: float
    iteration: int
    error: str = ''


class CurvePoint(NamedTuple):
    """The means, over some updates, of values that the training reported.

    Attributes:
        start: Number of the start.
        iteration: The last of these updates.
        epoch: Passes over the data so far, with the part of the last one.
        seconds: Of training so far, earlier starts included.
        values: By name, such as ``'main/loss'`` and
            ``'validation/main/accuracy'``; finite or not.
    """

    start: int
    iteration: int
    epoch: float
    seconds: float
    values: Mapping[str, float]


class Spread(NamedTuple):
    """How some numbers are spread.

    Attributes:
        low: The lower quartile.
        median: The middle.
        high: The upper quartile.
        mean: The mean.
        most: The largest.
    """

    low: float
    median: float
    high: float
    mean: float
    most: float


class RankInterval(NamedTuple):
    """What a rank did in all updates between two writes of the record.

    Attributes:
        start: Number of the start.
        rank: The rank.
        first: The first update.
        last: The last update.
        step: Seconds from the end of an update to the end of the next.
        own: Seconds of a step but for :data:`COMMUNICATION`, in which it
            waits for nobody.
        phases: Mean seconds of an update by phase, see :data:`PHASES`; their
            sum is ``step.mean``.
        hidden: Mean seconds of an update of what the exchange's thread did
            beside, by phase.
        bytes: Of gradients sent in an update, the mean.
        stage_bytes: The same of messages to other stages.
        stage_arrays: Bytes of the arrays in these.
    """

    start: int
    rank: int
    first: int
    last: int
    step: Spread
    own: Spread
    phases: Mapping[str, float]
    hidden: Mapping[str, float] = {}
    bytes: float = 0.0
    stage_bytes: float = 0.0
    stage_arrays: float = 0.0


class SentBytes(NamedTuple):
    """What a rank sent in an update.

    Attributes:
        start: Number of the start.
        rank: The rank.
        iteration: The update.
        codec: In what gradients travelled, such as ``'fp8'``; during a
            warm-up ``'float32'``.
        level: ``'inside nodes'``, ``'between nodes'``; ``'pipeline'``:
            activations and their gradients.
        bytes: Handed to MPI.
        uncompressed: Bytes that the same would be in float32.
        updates: Bytes are the means of so many updates.
    """

    start: int
    rank: int
    iteration: int
    codec: str
    level: str
    bytes: int
    uncompressed: int
    updates: int = 1


class ClockReading(NamedTuple):
    """How far a rank's clock is ahead of rank 0's.

    Attributes:
        start: Number of the start.
        rank: The rank.
        seconds: When it was measured.
        offset: Seconds that the rank's clock is ahead.
        error: The offset is right to so many seconds: half of the shortest
            round trip of the messages that measured it; 0 for ranks that
            have rank 0's clock, as those of one host.
        drift: Seconds that the offset was away from what the readings
            before had let expect; 0 for the first one.
    """

    start: int
    rank: int
    seconds: float
    offset: float
    error: float
    drift: float = 0.0


class LinkReading(NamedTuple):
    """How fast messages went from one rank to another.

    Attributes:
        start: Number of the start.
        iteration: After which update.
        source: The rank that sent.
        target: The rank that received.
        bandwidth: Bytes per second of a long message.
        latency: Seconds of a short message.
        is_local: Whether both ranks are on one host.
    """

    start: int
    iteration: int
    source: int
    target: int
    bandwidth: float
    latency: float
    is_local: bool


class TensorHealth(NamedTuple):
    """What compression does to a tensor, on rank 0.

    Attributes:
        start: Number of the start.
        iteration: After which update.
        name: Of the parameter, such as ``'/l1/W'``.
        elements: How many it has.
        values: By name, as far as the codec has them: ``'scale'``, ``'q'``
            (the quantile that set it), ``'clipped'`` (share of elements
            since the last reading), ``'residual'`` (2-norm of what error
            feedback keeps), ``'gradient'`` (2-norm of the mean gradient).
    """

    start: int
    iteration: int
    name: str
    elements: int
    values: Mapping[str, float]


class MemoryReading(NamedTuple):
    """Memory of a rank, in bytes.

    Attributes:
        start: Number of the start.
        rank: The rank.
        iteration: After which update.
        seconds: When.
        resident: Of the process, now.
        peak: Of the process, the most so far.
        gpu_used: Of arrays on the GPU; None without one.
        gpu_held: Of the pool that they are in; None without one.
    """

    start: int
    rank: int
    iteration: int
    seconds: float
    resident: int
    peak: int
    gpu_used: int | None = None
    gpu_held: int | None = None


class PlannedStep(NamedTuple):
    """What a plan predicts of an update.

    Attributes:
        start: Number of the start.
        description: The configuration that was chosen, in words.
        seconds: Of an update.
        spread: Relative, of these seconds.
        parts: Seconds by name, which add up to the whole.
        measured: The same parts as they are, of the slowest rank; {} until
            they are known.
        bytes: That a rank sends; None if the plan does not say.
    """

    start: int
    description: str
    seconds: float
    spread: float
    parts: Mapping[str, float]
    measured: Mapping[str, float] = {}
    bytes: float | None = None


class RecordedUpdate(NamedTuple):
    """The events of one update on all ranks.

    Attributes:
        start: Number of the start.
        iteration: The update.
        why: :data:`FIRST`, :data:`REGULAR` or :data:`SLOW`.
        events: By their start, on rank 0's clock.
    """

    start: int
    iteration: int
    why: str
    events: tuple[Event, ...]


@dataclass
class RunRecord:
    """All that is known of a run; lists are in the order of time.

    Attributes:
        name: Of the run: its folder.
        starts: At least one, but for a folder that has nothing but the file
            of ``LogReport``.
        ends: Of those starts that ended in an orderly way.
        curves: Points of one line: where a start went on from a snapshot,
            points of earlier starts after that are left out.
        intervals: Of all ranks.
        sent: Bytes of chosen updates, of all ranks.
        clocks: Readings of all ranks but 0.
        links: Readings of pairs of ranks.
        tensors: Readings of tensors.
        memory: Readings of all ranks.
        plans: At most one for each start.
        updates: Whose events were kept.
        left_out: How many updates had their events dropped again, so that
            the record stays within its limits.
        last_seen: Seconds since 1970 of the last write.
        remarks: What is missing in the record and why, in words.
    """

    name: str
    starts: list[RunStart] = field(default_factory=list)
    ends: list[RunEnd] = field(default_factory=list)
    curves: list[CurvePoint] = field(default_factory=list)
    intervals: list[RankInterval] = field(default_factory=list)
    sent: list[SentBytes] = field(default_factory=list)
    clocks: list[ClockReading] = field(default_factory=list)
    links: list[LinkReading] = field(default_factory=list)
    tensors: list[TensorHealth] = field(default_factory=list)
    memory: list[MemoryReading] = field(default_factory=list)
    plans: list[PlannedStep] = field(default_factory=list)
    updates: list[RecordedUpdate] = field(default_factory=list)
    left_out: int = 0
    last_seen: float = 0.0
    remarks: list[str] = field(default_factory=list)

    def stages(self, start: int) -> tuple[int, ...]:
        """The pipeline stage of each rank in a start; () if there is none."""
        return next((one.stages for one in self.starts
                     if one.number == start), ())


#: By part, as plans name them, the phases that it is made of.
PHASES_OF_PARTS = {
    'forward and backward': ('forward', 'recompute', 'backward',
                             'backward_weight'),
    'waiting for stages': ('send', 'receive'),
    'exchange': ('encode', 'exchange', 'decode'),
    'update': ('update',),
    'other': ('input', 'other', 'between')}


def measured_parts(intervals: Iterable[RankInterval]) -> dict[str, float]:
    """Seconds of a step by part, in the newest interval; {} without one.

    Args:
        intervals: Of all ranks in one start; the rank that takes longest
            counts.
    """
    found = list(intervals)
    if not found:
        return {}
    newest = max(interval.last for interval in found)
    slowest = max((interval for interval in found if interval.last == newest),
                  key=lambda interval: interval.step.median)
    parts = {part: sum(slowest.phases.get(name, 0.0) for name in phases)
             for part, phases in PHASES_OF_PARTS.items()}
    return {part: seconds for part, seconds in parts.items() if seconds}
