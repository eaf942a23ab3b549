"""Records of runs that never were, as real ones would be.

Ranks are replicas: each computes for its own time, then all exchange what
they have, which begins to go when the last rank is there and takes as long
as the slowest link.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from chainer_fp8pipe.report.events import BUCKETS, EXCHANGE, Event
from chainer_fp8pipe.report.record import (
    COMMUNICATION,
    ClockReading,
    CurvePoint,
    LinkReading,
    RankInterval,
    RecordedUpdate,
    RunEnd,
    RunRecord,
    RunStart,
    TensorHealth,
)

import numpy

#: Seconds of an update on an even run, by phase.
SECONDS = {'input': 0.2e-3, 'forward': 6e-3, 'backward': 11e-3,
           'encode': 0.8e-3, 'exchange': 4e-3, 'decode': 0.6e-3,
           'update': 1.5e-3, 'other': 0.4e-3}
OWN = [name not in COMMUNICATION for name in SECONDS]
PARAMETERS = {'/conv1/W': 4608, '/conv1/b': 64, '/fc2/W': 131072,
              '/fc2/b': 256, '/fc3/W': 2560, '/fc3/b': 10}
ELEMENTS = sum(PARAMETERS.values())
BYTES = {'fp8': 1, 'float16': 2, 'float32': 4, 'int4': 0.53125}
BANDWIDTH, LATENCY, BEGAN = 62.5e6, 60e-6, 1.75e9


@dataclass
class MadeUpRun:
    """What a made-up run is like."""

    name: str = 'result'
    ranks: int = 4
    ranks_per_host: int = 2
    epochs: int = 5
    updates: int = 60                   # of an epoch
    kept: int = 4                       # regular ones of these; 0: no events
    codec: str = 'fp8'
    slow: dict[int, float] = field(default_factory=dict)    # own work, times
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    input_seconds: float = SECONDS['input']
    noise: float = 0.05                 # deviation of each time's logarithm
    dies_at: tuple[int, ...] = ()       # goes on from the last epoch's end
    overlaps: bool = False              # exchange and backward pass
    seed: int = 0

    def record(self) -> RunRecord:
        self._random = numpy.random.default_rng(self.seed)
        self._record = RunRecord(self.name)
        self._wire = int(ELEMENTS * BYTES[self.codec])
        done, seconds = 0, 0.0
        for number, end in enumerate([*self.dies_at, math.inf]):
            done, seconds = self._run(number, done, seconds, end)
        return self._record

    def _run(self, number, done, before, dies_at):
        """One start; returns the updates and seconds it has saved."""
        record, now = self._record, 2.0
        record.starts.append(self._start(number, done, before))
        while done < self.epochs * self.updates:
            first, last = done + 1, done + self.updates
            if dies_at < last:
                record.last_seen = BEGAN + before + now
                return done, before + now
            laps = self._laps()
            ends = now + numpy.cumsum(laps.sum(axis=2).max(axis=1))
            slowest = int(laps.sum(axis=2)[:, 0].argmax())
            if self.kept:
                for place in sorted({0, 1, slowest, *range(
                        0, self.updates, max(1, self.updates // self.kept))}):
                    start = float(ends[place - 1]) if place else now
                    record.updates.append(RecordedUpdate(
                        number, first + place, place == slowest, tuple(sorted(
                            self._events(first + place, laps[place], start),
                            key=lambda event: event.start))))
            lasted, now, done = float(ends[-1]) - now, float(ends[-1]), last
            record.intervals += [
                self._interval(number, rank, first, last, laps[:, rank])
                for rank in range(self.ranks)]
            record.curves += self._curves(number, done, before + now, lasted)
            self._read(number, done, now)
        record.ends.append(RunEnd(number, BEGAN + before + now, done))
        record.last_seen = BEGAN + before + now
        return done, before + now

    def _host(self, rank):
        return rank // self.ranks_per_host

    def _start(self, number, done, before):
        return RunStart(
            number, BEGAN + before, done, self.ranks,
            tuple(f'node{self._host(rank)}' for rank in range(self.ranks)),
            command=('train.py', '--communicator', self.codec, '--batch',
                     '32'),
            versions={'Python': '3.12.3', 'chainer_fp8pipe': '0.1.0',
                      'chainer': '7.8.1', 'numpy': '2.2.1',
                      'mpi4py': '4.1.0', 'MPI': 'MPICH 4.3.0'},
            options={'communicator': self.codec, 'algorithm': 'direct',
                     'overlap': str(self.overlaps),
                     'updater': 'StandardUpdater',
                     'optimizer': 'MomentumSGD', 'batch of a rank': '32'},
            environment={'OMP_NUM_THREADS': '1', 'cpu': 'a CPU',
                         'cores': '2', 'memory': '8.3 GB'},
            launched=number if self.dies_at else None,
            reporting=tuple(range(self.ranks)), plan=f'{self.codec}, direct',
            planned={'forward and backward': 17.5e-3, 'exchange': 5.5e-3,
                     'update': 1.5e-3, 'other': 0.5e-3}, spread=0.1)

    def _laps(self):
        """Seconds of an epoch: updates x ranks x phases."""
        laps = numpy.array(
            [[[*SECONDS.values()]] * self.ranks] * self.updates)
        laps[..., 0] = self.input_seconds
        laps *= numpy.exp(self._random.normal(0, self.noise, laps.shape))
        for rank, factor in self.slow.items():
            laps[:, rank, OWN] *= factor
        exchange = [*SECONDS].index('exchange')
        laps[..., exchange] *= 1 / min([1, *self.links.values()])
        # The last to come is waited for.
        before = laps[..., :exchange].sum(axis=2)
        laps[..., exchange] = (
            before.max(axis=1, keepdims=True) - before
            + laps[..., exchange].max(axis=1, keepdims=True))
        return laps

    def _events(self, iteration, lap, start):
        """All ranks' phases, and two buckets, of which one may overlap."""
        for rank, seconds in enumerate(lap.tolist()):
            ends = start + numpy.cumsum(seconds)
            for name, begin, end in zip(SECONDS, [start, *ends], ends,
                                        strict=False):
                if name != 'other':
                    yield Event(
                        rank, name, float(begin), float(end),
                        iteration=iteration,
                        bytes=self._wire * (name == 'exchange'))
            half = float(ends[3] + seconds[4] / 2)
            begin = float(ends[2]) - self.overlaps * seconds[2] / 2
            for begins, end, about in (
                    (begin, half, '/fc3/W and 2 more'),
                    (float(ends[2]), float(ends[4]), '/conv1/W and 1 more')):
                yield Event(rank, 'bucket', begins, end, iteration=iteration,
                            lane=BUCKETS, bytes=self._wire // 2, about=about)
            if self.overlaps:
                yield Event(rank, 'encode', begin, begin + 3e-4,
                            iteration=iteration, lane=EXCHANGE)

    def _interval(self, number, rank, first, last, mine):
        level = ('between nodes' if self.ranks > self.ranks_per_host
                 else 'inside nodes')
        resident = 180_000_000 + 1_000_000 * rank + 2000 * last
        return RankInterval(
            number, rank, first, last, quartiles(mine.sum(axis=1)),
            quartiles(mine[:, OWN].sum(axis=1)),
            dict(zip(SECONDS, mine.mean(axis=0).tolist(), strict=True)),
            {'encode': 3e-4} if self.overlaps else {},
            {level: (self.codec, float(self._wire), 4.0 * ELEMENTS)},
            resident, resident + 30_000_000)

    def _curves(self, number, done, seconds, lasted):
        """Ten points of an epoch, the last with an evaluation."""
        for left in range(9, -1, -1):
            iteration = done - self.updates * left // 10
            epoch = iteration / self.updates
            loss = 0.1 + 2.2 * math.exp(-epoch / 2) * (
                1 + 0.05 * self._random.normal())
            values = {'main/loss': loss,
                      'main/accuracy': 1 - 0.9 * math.exp(-epoch)}
            if not left:
                values |= {'validation/main/loss': 1.1 * loss,
                           'validation/main/accuracy':
                           0.98 - 0.9 * math.exp(-epoch)}
            yield CurvePoint(number, iteration, epoch,
                             seconds - lasted * left / 10, values)

    def _read(self, number, done, now):
        """Clocks, links and tensors at an epoch's end."""
        record = self._record
        for rank in range(self.ranks):
            if rank:
                is_local = not self._host(rank)
                record.clocks.append(ClockReading(
                    number, rank, now,
                    0.0 if is_local else 1234.5 + 1e-6 * now,
                    0.0 if is_local else 24e-6))
            for other in range(self.ranks):
                if self._host(other) != self._host(rank):
                    factor = self.links.get((rank, other), 1.0) * math.exp(
                        self._random.normal(0, self.noise))
                    record.links.append(LinkReading(
                        number, done, rank, other, BANDWIDTH * factor,
                        LATENCY))
        for name, elements in PARAMETERS.items():
            record.tensors.append(TensorHealth(
                number, done, name, elements, {
                    'q': 0.02 * math.exp(0.1 * self._random.normal()),
                    'scale': 2.0 ** self._random.integers(-12, -8),
                    'clipped': 1e-5 * self._random.random(),
                    'residual': 1e-3 * math.sqrt(elements),
                    'gradient': 1e-2 * math.sqrt(elements)}))


def quartiles(numbers):
    return tuple(numpy.quantile(numbers, [0.25, 0.5, 0.75]).tolist())
