"""What rank 0 writes: the record of a run, and the page about it."""
from __future__ import annotations

import os
import time
import warnings
from typing import Any

from ...planning.job.job_plan import JobPlan, load_job_plan
from ...report.clocks import ClockLine
from ...report.record import (
    ClockReading,
    LinkReading,
    MemoryReading,
    PlannedStep,
    RunEnd,
    SentBytes,
    TensorHealth,
)
from ...report.record_file import Part, RecordWriter, read_record
from ...report.update_times import together
from ..extensions.reports import ClippedShares
from .curve_means import CurveMeans
from .report_gathering import FromRank, Gathered
from .run_start import describe_start
from .write_schedule import WriteSchedule, epochs_done, training_length

#: Seconds from one page to the next, and to the first: it takes about one.
_PAGES = 60.0


class ReportWriting:
    """Writes the record of one start, and its page.

    Args:
        trainer: Of the training.
        begun: Updates and epochs done when it began.
        plan: As :class:`.RunReport` got it.
        filename: Of the page, in the result folder; None for none.
        most_events: See :class:`.RecordWriter`.
        ranks: Of the whole job.

    Attributes:
        curves: Gets what each update reports.
    """

    def __init__(self, trainer: Any, begun: tuple[int, float], plan: Any,
                 filename: str | None, most_events: int, ranks: int) -> None:
        self._out, self._plan, self._filename = trainer.out, plan, filename
        self._most_events, self._ranks = most_events, ranks
        self._warned = False
        self._step = 0.0
        self._page_at = time.monotonic() + _PAGES
        self._readings: dict[int, list[ClockReading]] = {}
        self._clipped = ClippedShares()
        self._schedule = WriteSchedule(
            *begun, training_length(trainer))
        self._trainer, self._begun = trainer, begun

    def begin(self, hosts: tuple[str, ...], stages: tuple[int, ...],
              there: tuple[int, ...], origin: float,
              clocks: list[tuple[float, float]]) -> int | None:
        """Begins the record, or goes on with it.

        Returns:
            The number of this start; None, with a warning: the folder cannot
            be written.

        Raises:
            ValueError: The plan is none, or another job's, or the folder has
                something else in it.
        """
        planned = None if self._plan is None else load_job_plan(
            getattr(self._plan, 'plan', self._plan))
        problem = planned and planned.problem(planned.model, self._ranks)
        if problem:
            raise ValueError(problem)
        try:
            self._writer = RecordWriter(self._out, self._most_events)
        except OSError as error:
            self._warn(error)
            return None
        self._number = self._writer.starts
        begun = describe_start(self._trainer, self._number, self._begun[0],
                               self._ranks, hosts, stages, there, origin)
        self._origin = origin
        self.curves = CurveMeans(self._number, begun.iteration)
        parts: list[Part] = [begun]
        if planned is not None:
            parts.append(_planned(self._number, planned))
        parts += self._clocks(time.monotonic() - origin, clocks)
        self._attempt(lambda: self._writer.write(parts, time.time()))
        return self._number

    def next(self, trainer: Any) -> tuple[int, int]:
        """The update after which the next write is, and the last update."""
        done, epochs = trainer.updater.iteration, epochs_done(trainer.updater)
        step = self._step or (
            time.monotonic() - self._origin) / max(done, 1)
        return (self._schedule.next(done, epochs, step),
                self._schedule.last(done, epochs))

    def write(self, gathered: Gathered, page: bool) -> None:
        """Writes what was gathered, and the page if it is wanted."""
        steps = [one.interval.step.mean for one in gathered.ranks
                 if one.interval is not None]
        self._step = max(steps, default=self._step)
        self._attempt(lambda: self._write(gathered))
        if page and time.monotonic() >= self._page_at:
            self._attempt(self._page)
            self._page_at = time.monotonic() + _PAGES

    def end(self, trainer: Any, error: str) -> None:
        """Writes that the start has ended, and the last page."""
        end = RunEnd(self._number, time.time(), trainer.updater.iteration,
                     error)
        self._attempt(lambda: self._writer.write(
            [*self.curves.take(), end], time.time()))
        self._attempt(self._page)

    # --- details -------------------------------------------------------------

    def _attempt(self, action: Any) -> None:
        """A training is worth more than its report."""
        try:
            action()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                'the report of this run cannot be written, and the '
                f'training goes on: {type(error).__name__}: {error}',
                RuntimeWarning, stacklevel=3)

    def _write(self, gathered: Gathered) -> None:
        number, done = self._number, gathered.iteration
        parts: list[Part] = [
            *self.curves.take(),
            *self._clocks(gathered.seconds, gathered.clocks)]
        for rank, one in enumerate(gathered.ranks):
            if one.interval is not None:
                parts += [one.interval, *self._sent(rank, one)]
            parts.append(MemoryReading(
                number, rank, done, gathered.seconds, one.resident, one.peak,
                *(one.gpu or (None, None))))
        parts += [LinkReading(number, done, pair.source, pair.target,
                              pair.bandwidth, pair.latency, False)
                  for pair in gathered.pairs or ()]
        parts += self._health(gathered.tensors or {}, done)
        self._writer.write(parts, time.time())
        kept = {rank: one.kept for rank, one in enumerate(gathered.ranks)}
        self._writer.write_updates(together(number, kept))

    def _clocks(self, seconds: float, clocks: list[tuple[float, float]]
                ) -> list[ClockReading]:
        found = []
        for rank, (ahead, error) in enumerate(clocks):
            if rank:
                before = self._readings.setdefault(rank, [])
                reading = ClockReading(
                    self._number, rank, seconds, ahead, error,
                    abs(ahead - ClockLine(before).expected(
                        seconds)) if before else 0.0)
                before.append(reading)
                del before[:-2]
                found.append(reading)
        return found

    def _sent(self, rank: int, one: FromRank) -> list[SentBytes]:
        interval, traffic = one.interval, one.traffic
        assert interval is not None
        nbytes = interval.bytes if traffic.known else traffic.uncompressed
        found = [(traffic.codec, level, share * nbytes,
                  share * traffic.uncompressed)
                 for level, share in traffic.levels.items()]
        found.append(('fp8' if interval.stage_bytes < interval.stage_arrays
                      else 'as they are', 'pipeline', interval.stage_bytes,
                      interval.stage_arrays))
        return [SentBytes(self._number, rank, interval.last, codec, level,
                          round(sent), round(whole),
                          interval.last - interval.first + 1)
                for codec, level, sent, whole in found if sent]

    def _health(self, tensors: dict[str, tuple[int, dict[str, float]]],
                iteration: int) -> list[TensorHealth]:
        """Of each tensor, with the share that was clipped of late."""
        found = []
        for name, (elements, values) in tensors.items():
            values = dict(values)
            share = self._clipped.since_last(
                name, values.pop('clipped', 0.0), values.pop('encoded', 0.0))
            if share is not None:
                values['clipped'] = share
            found.append(TensorHealth(self._number, iteration, name, elements,
                                      values))
        return found

    def _page(self) -> None:
        if self._filename is None:
            return
        from ...report.page import write_page
        try:
            write_page([read_record(self._out)],
                       os.path.join(self._out, self._filename))
        except ImportError as error:
            self._filename = None
            warnings.warn(
                f'the run is recorded, but there is no page of it: {error}, '
                f'and call "python -m chainer_fp8pipe report {self._out}"',
                stacklevel=2)


def _planned(number: int, plan: JobPlan) -> PlannedStep:
    return PlannedStep(number, str(plan.choice), plan.seconds, plan.spread,
                       dict(plan.parts))
