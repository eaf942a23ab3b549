"""What all ranks bring together for a record, and what rank 0 writes."""
# All that is collective is in begin() and write(); files are rank 0's, and one
# that cannot be written is a warning, as a training is worth more than its
# report.  end() has no messages, as other ranks may have failed.
from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..._version import __version__
from ...mpi.agreement import raise_together
from ...mpi.measured import clock_name, measure_offsets, measure_pairs
from ...mpi.ranks import core_numbers, once
from ...planning.job_plan import load_job_plan
from ...report.launch_protocol import ENDED, LAUNCHED, is_launched
from ...report.quantities import bytes_in, number
from ...report.record import (
    PIPELINE,
    ClockReading,
    LinkReading,
    Part,
    RecordWriter,
    RunEnd,
    RunStart,
    TensorHealth,
    read_record,
)
from ...report.verdict import text, verdict
from ..extensions.reports import clipped_share
from .watching import CurveMeans, UpdateTimes, together

#: Links and tensors are read at each of the first so many writes, and then
#: once in so many: of all writes, their readings would swell the record.
_READINGS = 32
#: Seconds from one page to the next, and to the first: it takes about one.
_PAGES = 60.0


class Recorder:
    """Records one start of a run, on a communicator of its own.

    Make it on all ranks.

    Args:
        ranks: All that take part.
        trainer: Of the training.
        times: Of this rank.
        origin: When this rank's training began, by ``time.monotonic``.
        filename: Of the page, in the result folder; None for none.
        prints: Whether the verdict is printed at the end.

    Attributes:
        comm: The ranks.
        curves: Gets what each update reports; None but on rank 0.
    """

    def __init__(self, ranks: MPI.Comm, trainer: Any, times: UpdateTimes,
                 origin: float, filename: str | None, prints: bool) -> None:
        self.comm = once(ranks, 'RunReport', ranks.Dup)
        self.curves: CurveMeans | None = None
        self._trainer, self._updater = trainer, trainer.updater
        self._times, self._origin, self._filename = times, origin, filename
        self._prints = prints
        grid = getattr(trainer.updater, 'grid', None)
        hosts, clocks, stages = zip(*self.comm.allgather((
            platform.node(), clock_name(),
            None if grid is None else grid.stage_index)), strict=True)
        self._hosts, self._clocks = hosts, [*clocks]
        self._stages = () if None in stages else stages
        self._writes, self._warned = 0, False
        self._page_at = time.monotonic() + _PAGES
        self._codec = _codec(_communicator(self._updater))
        self._clipped: dict[str, tuple[float, float]] = {}

    def begin(self, there: tuple[int, ...], ranks: int, iteration: int,
              plan: Any) -> bool:
        """Begins the record, or goes on with it; call it on all ranks.

        Args:
            there: Ranks that take part.
            ranks: Of the whole job.
            iteration: Updates done when the training began.
            plan: As :class:`.RunReport` got it; on rank 0.

        Returns:
            Whether there is a record; if not, rank 0 has warned.

        Raises:
            ValueError: The plan is none, or another job's, or the folder has
                something else in it; on all ranks.
        """
        start = self.comm.bcast(raise_together(
            self.comm, lambda: None if self.comm.rank else self._open(
                there, ranks, iteration, plan), ValueError))
        self._number = start.number if start is not None else 0
        clocks = self._read_clocks()
        if start is not None and not self.comm.rank:
            self.curves = CurveMeans(self._number, iteration)
            self._write([start, *clocks])
        return start is not None

    def write(self, page: bool) -> None:
        """Writes what all ranks have had since the last call.

        Args:
            page: Whether the page is wanted, if it is due.
        """
        clocks = self._read_clocks()
        self._writes += 1
        reads = self._writes <= _READINGS or not self._writes % _READINGS
        pairs = measure_pairs(self.comm, [*self._hosts]) if reads else []
        communicator = _communicator(self._updater)
        health = (communicator.health(self._updater.get_optimizer(
            'main').target) if reads and hasattr(communicator, 'health')
            else {})
        interval, sent, kept = self._times.summary(self._number)
        if interval is not None:
            used, held = _gpu_memory()
            interval = interval._replace(
                sent=self._sent(*sent), resident=int(bytes_in('VmRSS') or 0),
                peak=int(bytes_in('VmHWM') or 0), gpu_used=used,
                gpu_held=held)
        everyone = self.comm.gather((interval, kept))
        if everyone is None:
            return
        assert self.curves is not None
        self._write([
            *self.curves.take(), *clocks,
            *(one for one, _ in everyone if one is not None),
            *(LinkReading(self._number, self._updater.iteration, pair.source,
                          pair.target, pair.bandwidth, pair.latency)
              for pair in pairs),
            *self._tensors(health),
            *together([kept for _, kept in everyone])])
        if page and time.monotonic() >= self._page_at:
            self._attempt(self._page)
            self._page_at = time.monotonic() + _PAGES

    def end(self, error: str) -> None:
        """Writes that the start has ended, and the last page; on rank 0."""
        if self.curves is not None:
            self._write([*self.curves.take(), RunEnd(
                self._number, time.time(), self._updater.iteration, error)])
            self._attempt(self._page)
            if self._prints and not error:
                self._attempt(self._print)

    # --- rank 0 --------------------------------------------------------------

    def _open(self, there: tuple[int, ...], ranks: int, iteration: int,
              plan: Any) -> RunStart | None:
        """What this start is; None: the folder cannot be written."""
        plan = None if plan is None else load_job_plan(plan)
        if problem := plan and plan.problem(plan.model, ranks):
            raise ValueError(problem)
        try:
            self._writer = RecordWriter(self._trainer.out)
        except OSError as error:
            self._warn(error)
            return None
        ended = json.loads(os.environ.get(ENDED, '[]'))
        start = RunStart(
            self._writer.starts,
            time.time() - (time.monotonic() - self._origin), iteration, ranks,
            self._hosts, self._stages, tuple(sys.argv), _versions(),
            _options(self._updater), _environment(),
            len(ended) if is_launched() else None, ended[-1] if ended else '',
            there, self._origin)
        return start if plan is None else start._replace(
            plan=str(plan.choice), planned=dict(plan.parts),
            spread=plan.spread)

    def _write(self, parts: list[Part]) -> None:
        self._attempt(lambda: self._writer.write(parts, time.time()))

    def _attempt(self, action: Callable[[], None]) -> None:
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

    def _print(self) -> None:
        out = self._trainer.out
        print(text(verdict(read_record(out))))
        if self._filename is not None:
            print(f'page: {os.path.join(out, self._filename)}')

    def _page(self) -> None:
        if self._filename is None:
            return
        from ...report.page import write_page
        out = self._trainer.out
        path = os.path.join(out, self._filename)
        try:
            write_page([read_record(out)], path)
        except ImportError as error:
            self._filename = None
            warnings.warn(
                f'the run is recorded, but there is no page of it: {error}, '
                f'and call "python -m chainer_fp8pipe report {out}"',
                stacklevel=2)

    def _tensors(self, health: dict[str, dict[str, float]]
                 ) -> Iterator[TensorHealth]:
        """Of each tensor, with the share that was clipped of late."""
        if not health:
            return
        for name, parameter in self._updater.get_optimizer(
                'main').target.namedparams():
            if name not in health or parameter.array is None:
                continue
            values = dict(health[name])
            share = clipped_share(
                self._clipped, name, values.pop('clipped', 0.0),
                values.pop('encoded', 0.0))
            if share is not None:
                values['clipped'] = share
            if parameter.grad is not None:
                flat = chainer.backends.cuda.to_cpu(
                    parameter.grad).reshape(-1)
                values['gradient'] = float(numpy.sqrt(flat @ flat))
            yield TensorHealth(self._number, self._updater.iteration, name,
                               parameter.size, values)

    # --- each rank -----------------------------------------------------------

    def _read_clocks(self) -> list[ClockReading]:
        """How far ranks' clocks are ahead; call it on all ranks."""
        found = measure_offsets(self.comm, self._clocks)
        now = time.monotonic() - self._origin
        return [ClockReading(self._number, rank, now, *reading)
                for rank, reading in enumerate(found) if rank]

    def _sent(self, gradients: float, to_stages: float, whole: float
              ) -> dict[str, tuple[str, float, float]]:
        """See :attr:`.RankInterval.sent`; mean bytes of an update.

        That is of gradients, of messages to other stages, of arrays in these.
        """
        communicator = _communicator(self._updater)
        levels: dict[str, float] = {}
        # Where a warm-up has ended in the interval, both codecs count.
        before, self._codec = self._codec, _codec(communicator)
        codec = (self._codec if before == self._codec
                 else f'{before}, then {self._codec}')
        uncompressed = 0.0
        if communicator is not None:
            size = communicator.size
            # Elements of 4 bytes, which go out and come back.
            uncompressed = 8.0 * (size - 1) / size * _elements(
                self._updater.get_optimizer('main').target)
            if hasattr(communicator, 'sent_levels'):
                levels = communicator.sent_levels()
            else:       # ChainerMN's, in which nothing is counted
                levels, gradients = {'inside MPI': 1.0}, uncompressed
        found = {level: (codec, share * gradients, share * uncompressed)
                 for level, share in levels.items()}
        found[PIPELINE] = ('fp8' if to_stages < whole else 'as they are',
                           to_stages, whole)
        return {level: one for level, one in found.items() if one[1]}


def _communicator(updater: Any) -> Any:
    """The communicator of the main optimizer; None without one."""
    return getattr(updater.get_all_optimizers().get('main'), 'communicator',
                   None)


def _codec(communicator: Any) -> str:
    if not hasattr(communicator, 'sent_levels'):
        return type(communicator).__name__
    return ('float32' if communicator.is_warming_up else communicator.name)


def _gpu_memory() -> tuple[int | None, int | None]:
    """Bytes used and held."""
    if not chainer.backends.cuda.available:
        return None, None
    pool = chainer.backends.cuda.cupy.get_default_memory_pool()
    return pool.used_bytes(), pool.total_bytes()


# --- what a job is, in words -------------------------------------------------

_PACKAGES = 'chainer', 'numpy', 'mpi4py', 'cupy', 'scipy', 'Pillow'
#: Beginnings of the names of variables that change how ranks run.
_VARIABLES = ('CHAINER_', 'CHAINERMN_', 'OMP_', 'OPENBLAS_', 'MKL_', 'CUDA_',
              'CUPY_', 'NCCL_', 'MPIR_CVAR_', 'MPICH_', 'OMPI_MCA_',
              'SLURM_JOB_ID', 'SLURM_NNODES', 'UCX_', 'FI_')
#: They tell a launcher's processes, and are of no use to a reader.
_PRIVATE = LAUNCHED, ENDED


def _options(updater: Any) -> dict[str, str]:
    """How the training is set up, in words."""
    found = {'updater': type(updater).__name__}
    for name, optimizer in updater.get_all_optimizers().items():
        suffix = '' if name == 'main' else f' {name}'
        actual = getattr(optimizer, 'actual_optimizer', optimizer)
        found[f'optimizer{suffix}'] = type(actual).__name__
        found[f'hyperparameters{suffix}'] = _hyperparameters(actual)
        target = actual.target
        found[f'model{suffix}'] = (
            f'{type(target).__name__}, {_elements(target):,} parameters')
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None:
            found[f'communicator{suffix}'] = getattr(
                communicator, 'name', type(communicator).__name__)
            if hasattr(communicator, 'options'):
                found |= {option: str(value) for option, value
                          in vars(communicator.options).items()
                          if option != 'name'}
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
    return ', '.join(f'{name}={number(value)}' for name, value in sorted(
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
    found['cores'] = str(len(core_numbers()))
    if hasattr(os, 'sysconf') and 'SC_PHYS_PAGES' in os.sysconf_names:
        nbytes = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
        found['memory'] = f'{nbytes / 1e9:.1f} GB'
    return found


def _processor() -> str:
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
        for line in file:
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()
