"""What rank 0 writes: the record of a run, and the page about it."""
from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import chainer
from mpi4py import MPI

from ..._version import __version__
from ...planning.job_plan import JobPlan, load_job_plan
from ...report.clocks import ClockLine
from ...report.launch_protocol import ENDED, is_launched
from ...report.record import (
    ClockReading,
    LinkReading,
    MemoryReading,
    PlannedStep,
    RunEnd,
    RunStart,
    SentBytes,
    TensorHealth,
)
from ...report.record_file import Part, RecordWriter, read_record
from ..extensions.reports import clipped_share
from .gathering import FromRank, Gathered
from .watching import CurveMeans, together

#: Seconds from one page to the next, and to the first: it takes about one.
_PAGES = 60.0

_PACKAGES = 'chainer', 'numpy', 'mpi4py', 'cupy', 'scipy', 'Pillow'
#: Beginnings of the names of variables that change how ranks run.
_VARIABLES = ('CHAINER_', 'CHAINERMN_', 'OMP_', 'OPENBLAS_', 'MKL_', 'CUDA_',
              'CUPY_', 'NCCL_', 'MPIR_CVAR_', 'MPICH_', 'OMPI_MCA_',
              'SLURM_JOB_ID', 'SLURM_NNODES', 'UCX_', 'FI_')
#: They tell a launcher's processes, and are of no use to a reader.
_PRIVATE = 'CHAINER_FP8PIPE_LAUNCH', 'CHAINER_FP8PIPE_ENDED'


class ReportWriting:
    """Writes the record of one start, and its page.

    Args:
        trainer: Of the training.
        iteration: Updates done when it began.
        ranks: Of the whole job.
        plan: As :class:`.RunReport` got it.
        filename: Of the page, in the result folder; None for none.
        most_events: See :class:`.RecordWriter`.

    Attributes:
        curves: Gets what each update reports.
    """

    def __init__(self, trainer: Any, iteration: int, ranks: int, plan: Any,
                 filename: str | None, most_events: int) -> None:
        self._trainer, self._iteration = trainer, iteration
        self._ranks, self._plan = ranks, plan
        self._filename, self._most_events = filename, most_events
        self._warned = False
        self._page_at = time.monotonic() + _PAGES
        self._readings: dict[int, list[ClockReading]] = {}
        self._clipped: dict[str, tuple[float, float]] = {}

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
            self._writer = RecordWriter(self._trainer.out,
                                        self._most_events)
        except OSError as error:
            self._warn(error)
            return None
        self._number = self._writer.starts
        begun = describe_start(self._trainer, self._number, self._iteration,
                               self._ranks, hosts, stages, there, origin)
        self.curves = CurveMeans(self._number, begun.iteration)
        parts: list[Part] = [begun]
        if planned is not None:
            parts.append(_planned(self._number, planned))
        parts += self._clocks(time.monotonic() - origin, clocks)
        self._attempt(lambda: self._writer.write(parts, time.time()))
        return self._number

    def write(self, gathered: Gathered, page: bool) -> None:
        """Writes what was gathered, and the page if it is wanted."""
        self._attempt(lambda: self._write(gathered))
        if page and time.monotonic() >= self._page_at:
            self._attempt(self._page)
            self._page_at = time.monotonic() + _PAGES

    def end(self, error: str) -> None:
        """Writes that the start has ended, and the last page."""
        end = RunEnd(self._number, time.time(),
                     self._trainer.updater.iteration, error)
        self._attempt(lambda: self._writer.write(
            [*self.curves.take(), end], time.time()))
        self._attempt(self._page)

    # --- details -------------------------------------------------------------

    def _attempt(self, action: Callable[[], None]) -> None:
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
            share = clipped_share(
                self._clipped, name, values.pop('clipped', 0.0),
                values.pop('encoded', 0.0))
            if share is not None:
                values['clipped'] = share
            found.append(TensorHealth(self._number, iteration, name, elements,
                                      values))
        return found

    def _page(self) -> None:
        if self._filename is None:
            return
        out = self._trainer.out
        from ...report.page import write_page
        try:
            write_page([read_record(out)],
                       os.path.join(out, self._filename))
        except ImportError as error:
            self._filename = None
            warnings.warn(
                f'the run is recorded, but there is no page of it: {error}, '
                f'and call "python -m chainer_fp8pipe report {out}"',
                stacklevel=2)


def _planned(number: int, plan: JobPlan) -> PlannedStep:
    return PlannedStep(number, str(plan.choice), plan.seconds, plan.spread,
                       dict(plan.parts))


# --- what a job is -----------------------------------------------------------

def describe_start(trainer: Any, number: int, iteration: int, ranks: int,
                   hosts: tuple[str, ...], stages: tuple[int, ...],
                   reporting: tuple[int, ...], origin: float) -> RunStart:
    """The start of this job; call it on rank 0.

    Args:
        trainer: Of the training that begins.
        number: Of the start.
        iteration: Updates done before.
        ranks: Of the whole job.
        hosts: Of each rank.
        stages: Of each rank; () without a pipeline.
        reporting: Ranks whose data there will be.
        origin: What ``time.monotonic`` showed at the start.
    """
    ended = json.loads(os.environ.get(ENDED, '[]'))
    return RunStart(
        number, time.time() - (time.monotonic() - origin), iteration, ranks,
        hosts, stages, tuple(sys.argv), _versions(), describe_options(trainer),
        _environment(), len(ended) if is_launched() else None,
        ended[-1] if ended else '', reporting, origin)


def describe_options(trainer: Any) -> dict[str, str]:
    """How the training is set up, in words."""
    updater = trainer.updater
    found = {'updater': type(updater).__name__}
    for name, optimizer in updater.get_all_optimizers().items():
        suffix = '' if name == 'main' else f' {name}'
        actual = getattr(optimizer, 'actual_optimizer', optimizer)
        found[f'optimizer{suffix}'] = type(actual).__name__
        found[f'hyperparameters{suffix}'] = _hyperparameters(actual)
        target = actual.target
        found[f'model{suffix}'] = (
            f'{type(target).__name__}, {_elements(target)} parameters')
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None:
            found[f'communicator{suffix}'] = getattr(
                communicator, 'name', type(communicator).__name__)
            if hasattr(communicator, 'options'):
                found |= {option: str(value) for option, value
                          in vars(communicator.options).items()}
    if (schedule := getattr(updater, 'schedule', None)) is not None:
        found |= {'schedule': schedule.name, 'stages': str(schedule.stages),
                  'micro-batches': str(schedule.micro_batches)}
    if (grid := getattr(updater, 'grid', None)) is not None:
        found['replicas'] = str(grid.replicas)
    for name, iterator in getattr(updater, '_iterators', {}).items():
        found[f'iterator {name}'] = type(iterator).__name__
        if isinstance(getattr(iterator, 'batch_size', None), int):
            found[f'batch of a rank, {name}'] = str(iterator.batch_size)
    return found


def _hyperparameters(optimizer: Any) -> str:
    return ', '.join(f'{name}={value:g}' for name, value in sorted(
        optimizer.hyperparam.get_dict().items())
        if isinstance(value, (int, float)))


def _elements(target: Any) -> int:
    return sum(parameter.size for parameter in target.params()
               if parameter.array is not None)


def _versions() -> dict[str, str]:
    found = {'Python': platform.python_version(),
             'chainer_fp8pipe': __version__, 'chainer': chainer.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found['MPI'] = MPI.Get_library_version().replace('\0', '').split('\n')[0]
    found['system'] = platform.platform()
    return found


def _environment() -> dict[str, str]:
    found = {name: value for name, value in sorted(os.environ.items())
             if name.startswith(_VARIABLES) and name not in _PRIVATE}
    found['cpu'] = _processor()
    found['cores'] = str(len(os.sched_getaffinity(0))
                         if hasattr(os, 'sched_getaffinity')
                         else os.cpu_count())
    if hasattr(os, 'sysconf') and 'SC_PHYS_PAGES' in os.sysconf_names:
        nbytes = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
        found['memory'] = f'{nbytes / 1e9:.1f} GB'
    return found


def _processor() -> str:
    try:
        with open('/proc/cpuinfo') as file:
            for line in file:
                if line.startswith('model name'):
                    return line.partition(':')[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
