"""Records of runs that never were, as files of ranks.

Ranks are replicas: each computes for its own time, then all exchange what
they have once the last one is there.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from chainer_fp8pipe.report.record import (
    COMMUNICATION,
    CurvePoint,
    RankInterval,
    RecordedUpdate,
    RecordWriter,
    RunEnd,
    RunStart,
)
from chainer_fp8pipe.report.stream import Event

import numpy

#: Seconds of an update on an even run, by phase.
SECONDS = {'input': 0.2e-3, 'forward': 6e-3, 'backward': 11e-3,
           'encode': 0.8e-3, 'exchange': 4e-3, 'decode': 0.6e-3,
           'update': 1.5e-3, 'other': 0.4e-3}
BEGAN = 1.75e9


@dataclass
class MadeUpRun:
    """A run; :meth:`write` makes its files.

    Attributes:
        ranks: How many.
        intervals: Of each rank, of 10 updates.
        slow: By rank, how many times as long its own work takes.
        phases: By name, seconds in place of :data:`SECONDS`.
        stages: The pipeline stage of each rank.
        noise: Relative spread of a rank's times, from interval to interval.
        ends: Of each start: '' in order, None killed, or its error.
        begins: The iteration at which each start begins.
    """

    ranks: int = 4
    intervals: int = 6
    slow: dict[int, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    noise: float = 0.0
    ends: tuple[str | None, ...] = ('',)
    begins: tuple[int, ...] = (0,)
    launched: bool = True
    warmup: str = '0'
    seed: int = 0

    def write(self, folder):
        """Writes the files of all ranks; returns the folder's path."""
        random = numpy.random.default_rng(self.seed)
        for rank in range(self.ranks):
            writer = RecordWriter(str(folder), rank)
            for place, (end, begin) in enumerate(zip(
                    self.ends, self.begins, strict=True)):
                time = BEGAN + 1000 * place
                writer.write([RunStart(
                    time, begin, self.ranks, f'host{rank}',
                    self.stages[rank] if self.stages else None,
                    {'command': 'train.py --fast', 'warmup': self.warmup},
                    place if self.launched else None)])
                last = self._updates(writer, rank, time, begin, random)
                if end is not None:
                    writer.write([RunEnd(time + 60, last, end)])
        return str(folder)

    def _updates(self, writer, rank, time, begin, random):
        for number in range(self.intervals):
            factor = self.slow.get(rank, 1.0) * (
                1 + self.noise * random.standard_normal())
            phases = {name: value * (1 if name in COMMUNICATION else factor)
                      for name, value in {**SECONDS, **self.phases}.items()}
            # All ranks take as long: the others wait.
            whole = sum(SECONDS.values()) * max([1, *self.slow.values()])
            phases['exchange'] += max(0.0, whole - sum(phases.values()))
            own = sum(value for name, value in phases.items()
                      if name not in COMMUNICATION)
            first, now = begin + 10 * number + 2, time + 10 * number
            if not rank:
                writer.write([CurvePoint(now, first + 9, number + 1.0, {
                    'main/loss': 2.0 / (number + 1),
                    'validation/main/accuracy': 0.5 + 0.05 * number})])
            writer.write([
                RankInterval(now, rank, first, first + 9, (0.98 * own, own),
                             phases, {}, {'fp8': 1e6}, {'fp8': 4e6}),
                RecordedUpdate(now, first, sum(phases.values()), tuple(events(
                    rank, self.slow.get(rank, 1.0), time)))])
        return begin + 10 * self.intervals + 1


def events(rank, factor, time):
    """Of an update of replicas, which all end their exchange together."""
    forward, backward = 0.006 * factor, 0.011 * factor
    at = time + 1
    yield Event(rank, 'forward', at, at + forward)
    yield Event(rank, 'backward', at + forward, at + forward + backward)
    yield Event(rank, 'exchange', at + forward + backward, at + 0.05)
    yield Event(rank, 'encode', at + 0.01, at + 0.012, beside=True)
    yield Event(rank, 'decode', at + 0.04, at + 0.042)      # inside
    yield Event(rank, 'update', at + 0.05, at + 0.052)
