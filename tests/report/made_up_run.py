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
_SECONDS = {'input': 0.2e-3, 'forward': 6e-3, 'backward': 11e-3,
            'encode': 0.8e-3, 'exchange': 4e-3, 'decode': 0.6e-3,
            'update': 1.5e-3, 'other': 0.4e-3}
_PARAMETERS = {'/conv1/W': 4608, '/conv1/b': 64, '/fc2/W': 131072,
               '/fc2/b': 256, '/fc3/W': 2560, '/fc3/b': 10}
_BYTES = {'fp8': 1, 'float16': 2, 'float32': 4, 'int4': 0.53125}
_BANDWIDTH, _LATENCY = 62.5e6, 60e-6
_BEGAN = 1.75e9


@dataclass
class MadeUpRun:
    """What a made-up run is like.

    Attributes:
        name: Of the run.
        ranks: How many.
        ranks_per_host: How many of them share a host, and its clock.
        epochs: How many.
        updates: Of an epoch.
        kept: Updates of an epoch whose events are kept as regular ones; 0:
            no events are kept at all.
        codec: Of the communicator.
        slow: By rank, how many times as long its own work takes.
        links: By pair of ranks, of the usual bandwidth.
        input_seconds: How long each rank waits for a batch.
        noise: Standard deviation of the logarithm of each time.
        dies_at: Updates after which the job is killed and started again
            from its last epoch's end.
        overlaps: Whether the exchange goes on beside the backward pass.
        seed: Of the noise.
    """

    name: str = 'result'
    ranks: int = 4
    ranks_per_host: int = 2
    epochs: int = 5
    updates: int = 60
    kept: int = 4
    codec: str = 'fp8'
    slow: dict[int, float] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    input_seconds: float = _SECONDS['input']
    noise: float = 0.05
    dies_at: tuple[int, ...] = ()
    overlaps: bool = False
    seed: int = 0

    def record(self) -> RunRecord:
        """The record of the whole run."""
        self._random = numpy.random.default_rng(self.seed)
        self._record = record = RunRecord(self.name)
        done, seconds = 0, 0.0
        for number, end in enumerate([*self.dies_at, None]):
            done, seconds = self._run(number, done, seconds, end)
        return record

    def _run(self, number: int, done: int, before: float,
             dies_at: int | None) -> tuple[int, float]:
        """One start; returns the updates and seconds it has saved."""
        record, now = self._record, 2.0
        record.starts.append(self._start(number, done, before))
        while done < self.epochs * self.updates:
            first, last = done + 1, done + self.updates
            if dies_at is not None and dies_at < last:
                record.last_seen = _BEGAN + before + now
                return done, before + now
            laps = self._laps()
            for place in self._kept(laps):
                at = now + float(
                    laps[:place].sum(axis=2).max(axis=1).sum())
                self._keep(number, first + place, laps[place], at,
                           place == laps.sum(axis=2)[:, 0].argmax())
            now += float(laps.sum(axis=2).max(axis=1).sum())
            done = last
            self._summarise(number, first, last, laps)
            self._curves(number, done, before + now, laps)
            self._read(number, done, now)
        record.ends.append(RunEnd(number, _BEGAN + before + now, done))
        record.last_seen = _BEGAN + before + now
        return done, before + now

    def _start(self, number: int, done: int, before: float) -> RunStart:
        return RunStart(
            number, _BEGAN + before, done, self.ranks,
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

    def _host(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def _laps(self) -> numpy.ndarray:
        """Seconds of an epoch: updates x ranks x phases of ``_SECONDS``."""
        laps = numpy.array(
            [[[*_SECONDS.values()]] * self.ranks] * self.updates)
        laps[..., 0] = self.input_seconds
        laps *= numpy.exp(self._random.normal(0, self.noise, laps.shape))
        own = [name not in COMMUNICATION for name in _SECONDS]
        for rank, factor in self.slow.items():
            laps[:, rank, own] *= factor
        exchange = [*_SECONDS].index('exchange')
        laps[..., exchange] *= 1 / min([1, *self.links.values()])
        # The last to come is waited for.
        before = laps[..., :exchange].sum(axis=2)
        laps[..., exchange] = (
            before.max(axis=1, keepdims=True) - before
            + laps[..., exchange].max(axis=1, keepdims=True))
        return laps

    def _kept(self, laps: numpy.ndarray) -> list[int]:
        if not self.kept:
            return []
        regular = range(0, self.updates, max(1, self.updates // self.kept))
        return sorted({0, 1, *regular, int(laps.sum(axis=2)[:, 0].argmax())})

    def _keep(self, number: int, iteration: int, lap: numpy.ndarray,
              start: float, is_slow: bool) -> None:
        events = []
        for rank, seconds in enumerate(lap.tolist()):
            now = start
            for name, length in zip(_SECONDS, seconds, strict=True):
                if name != 'other':
                    events.append(Event(
                        rank, name, now, now + length, iteration=iteration,
                        bytes=self._wire() if name == 'exchange' else 0))
                now += length
            events += self._beside(rank, iteration, start, seconds)
        events.sort(key=lambda event: event.start)
        self._record.updates.append(RecordedUpdate(
            number, iteration, bool(is_slow), tuple(events)))

    def _beside(self, rank: int, iteration: int, start: float,
                seconds: list[float]) -> list[Event]:
        """Two buckets, the first of which overlaps the backward pass."""
        before = start + sum(seconds[:3])
        ends = [before + seconds[3] + seconds[4] / 2,
                before + seconds[3] + seconds[4]]
        starts = [before - (seconds[2] / 2 if self.overlaps else 0), before]
        found = [Event(rank, 'bucket', began, end, iteration=iteration,
                       lane=BUCKETS, bytes=self._wire() // 2, about=about)
                 for began, end, about in zip(
                     starts, ends, ('/fc3/W and 2 more', '/conv1/W and 1 '
                                    'more'), strict=True)]
        if self.overlaps:
            found.append(Event(rank, 'encode', starts[0], starts[0] + 3e-4,
                               iteration=iteration, lane=EXCHANGE))
        return found

    def _wire(self) -> int:
        return int(sum(_PARAMETERS.values()) * _BYTES[self.codec])

    def _summarise(self, number: int, first: int, last: int,
                   laps: numpy.ndarray) -> None:
        own = [name not in COMMUNICATION for name in _SECONDS]
        level = ('between nodes' if self.ranks > self.ranks_per_host
                 else 'inside nodes')
        for rank in range(self.ranks):
            mine = laps[:, rank]
            resident = 180_000_000 + 1_000_000 * rank + 2000 * last
            self._record.intervals.append(RankInterval(
                number, rank, first, last, _quartiles(mine.sum(axis=1)),
                _quartiles(mine[:, own].sum(axis=1)),
                dict(zip(_SECONDS, mine.mean(axis=0).tolist(), strict=True)),
                {'encode': 3e-4} if self.overlaps else {},
                {level: (self.codec, float(self._wire()),
                         4.0 * sum(_PARAMETERS.values()))},
                resident, resident + 30_000_000))

    def _curves(self, number: int, done: int, seconds: float,
                laps: numpy.ndarray) -> None:
        parts, lasted = 10, float(laps.sum(axis=2).max(axis=1).sum())
        for part in range(parts):
            iteration = done - self.updates * (parts - 1 - part) // parts
            at = seconds - lasted * (parts - 1 - part) / parts
            epoch = iteration / self.updates
            loss = 0.1 + 2.2 * math.exp(-epoch / 2) * (
                1 + 0.05 * self._random.normal())
            values = {'main/loss': loss,
                      'main/accuracy': 1 - 0.9 * math.exp(-epoch)}
            if part == parts - 1:
                values |= {'validation/main/loss': 1.1 * loss,
                           'validation/main/accuracy':
                           0.98 - 0.9 * math.exp(-epoch)}
            self._record.curves.append(CurvePoint(
                number, iteration, epoch, at, values))

    def _read(self, number: int, done: int, now: float) -> None:
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
                        number, done, rank, other, _BANDWIDTH * factor,
                        _LATENCY))
        for name, elements in _PARAMETERS.items():
            record.tensors.append(TensorHealth(
                number, done, name, elements, {
                    'q': 0.02 * math.exp(0.1 * self._random.normal()),
                    'scale': 2.0 ** self._random.integers(-12, -8),
                    'clipped': 1e-5 * self._random.random(),
                    'residual': 1e-3 * math.sqrt(elements),
                    'gradient': 1e-2 * math.sqrt(elements)}))


def _quartiles(numbers: numpy.ndarray) -> tuple[float, float, float]:
    low, median, high = numpy.quantile(numbers, [0.25, 0.5, 0.75]).tolist()
    return low, median, high
