"""What all ranks bring together for a report."""
from __future__ import annotations

import platform
import time
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ...mpi.agreement import raise_together
from ...mpi.measured.clock_offsets import clock_name, measure_offsets
from ...mpi.measured.pair_speed import PairSpeed, measure_pairs
from ...mpi.ranks import once
from ...report.process_memory import bytes_in
from ...report.record import RankInterval
from .watching import KeptEvents, UpdateTimes

#: Links and tensors are read at so many writes; from then on, as they are
#: many, at every so manieth.
_READINGS = 32


class Traffic(NamedTuple):
    """How a rank's gradients travel.

    Attributes:
        codec: In what.
        levels: Shares of the bytes by level.
        uncompressed: Bytes that an all-reduce in float32 would send.
        known: Whether sent bytes are counted; inside MPI they are not.
    """

    codec: str
    levels: dict[str, float]
    uncompressed: int
    known: bool


class FromRank(NamedTuple):
    """What one rank has to say about an interval.

    Attributes:
        interval: None: no update has ended in it.
        kept: Events of updates.
        resident: Bytes of the process now; 0: the system does not say.
        peak: The most bytes so far.
        gpu: Bytes used and held; None without a GPU.
        traffic: Of its communicator.
    """

    interval: RankInterval | None
    kept: list[KeptEvents]
    resident: int
    peak: int
    gpu: tuple[int, int] | None
    traffic: Traffic


class Gathered(NamedTuple):
    """What rank 0 has from all ranks.

    Attributes:
        iteration: Updates done.
        seconds: Since the start.
        ranks: What each has said.
        clocks: Offset and error of each rank's clock, in seconds.
        pairs: Speeds between hosts; None: not measured this time.
        tensors: Elements and values by tensor; None: not this time.
    """

    iteration: int
    seconds: float
    ranks: list[FromRank]
    clocks: list[tuple[float, float]]
    pairs: list[PairSpeed] | None
    tensors: dict[str, tuple[int, dict[str, float]]] | None


class ReportGathering:
    """Brings together what ranks have, on a communicator of its own.

    Make it on all ranks.

    Args:
        ranks: All that take part.
        trainer: Of the training.
        times: Of this rank.
        origin: When this rank's training began, by ``time.monotonic``.

    Attributes:
        comm: The ranks.
    """

    def __init__(self, ranks: MPI.Comm, trainer: Any, times: UpdateTimes,
                 origin: float) -> None:
        self.comm = once(ranks, 'RunReport', ranks.Dup)
        self._updater, self._times, self._origin = (
            trainer.updater, times, origin)
        grid = getattr(trainer.updater, 'grid', None)
        hosts, clocks, stages = zip(*self.comm.allgather((
            platform.node(), clock_name(),
            None if grid is None else grid.stage_index)), strict=True)
        self._hosts, self._clocks = hosts, [*clocks]
        self._stages = () if None in stages else stages
        self._start = self._gathered = 0
        self._codec = _traffic(trainer.updater).codec

    def begin(self, writing: Any, there: tuple[int, ...]) -> bool:
        """Has rank 0 begin the record; whether it can.

        Raises:
            ValueError: As :meth:`.ReportWriting.begin`, on all ranks.
        """
        clocks = measure_offsets(self.comm, self._clocks)
        start = self.comm.bcast(raise_together(
            self.comm, lambda: None if self.comm.rank else writing.begin(
                self._hosts, self._stages, there, self._origin, clocks),
            ValueError))
        self._start = start or 0
        return start is not None

    def gather(self) -> Gathered | None:
        """What all ranks have had since the last call, on rank 0."""
        clocks = measure_offsets(self.comm, self._clocks)
        self._gathered += 1
        reads = self._gathered <= _READINGS or not self._gathered % _READINGS
        pairs = measure_pairs(self.comm, [*self._hosts]) if reads else None
        tensors = _tensors(self._updater) if reads else None
        interval, kept = self._times.summary(self._start)
        # Where a warm-up has ended in the interval, both codecs count.
        traffic = _traffic(self._updater)
        before, self._codec = self._codec, traffic.codec
        if before != traffic.codec:
            traffic = traffic._replace(codec=f'{before}, then {self._codec}')
        ranks = self.comm.gather(FromRank(
            interval, kept, int(bytes_in('VmRSS') or 0),
            int(bytes_in('VmHWM') or 0), _gpu_memory(), traffic))
        if ranks is None:
            return None
        return Gathered(self._updater.iteration,
                        time.monotonic() - self._origin, ranks, clocks, pairs,
                        tensors)


def _communicator(updater: Any) -> Any:
    """The communicator of the main optimizer; None without one."""
    return getattr(updater.get_all_optimizers().get('main'), 'communicator',
                   None)


def _traffic(updater: Any) -> Traffic:
    communicator = _communicator(updater)
    if communicator is None:
        return Traffic('none', {}, 0, True)
    elements = sum(parameter.size for parameter
                   in updater.get_optimizer('main').target.params()
                   if parameter.array is not None)
    size = communicator.size
    uncompressed = 4 * elements * 2 * (size - 1) // size
    if not hasattr(communicator, 'sent_levels'):
        return Traffic(type(communicator).__name__, {'inside MPI': 1.0},
                       uncompressed, False)
    return Traffic(
        'float32' if communicator.is_warming_up else communicator.name,
        communicator.sent_levels(), uncompressed, True)


def _tensors(updater: Any) -> dict[str, tuple[int, dict[str, float]]]:
    """Elements and values of each tensor that is compressed."""
    communicator = _communicator(updater)
    if not hasattr(communicator, 'health'):
        return {}
    target = updater.get_optimizer('main').target
    health, found = communicator.health(target), {}
    for name, parameter in target.namedparams():
        if name in health and parameter.array is not None:
            values = dict(health[name])
            if parameter.grad is not None:
                flat = chainer.backends.cuda.to_cpu(
                    parameter.grad).reshape(-1)
                values['gradient'] = float(numpy.sqrt(flat @ flat))
            found[name] = parameter.size, values
    return found


def _gpu_memory() -> tuple[int, int] | None:
    if not chainer.backends.cuda.available:
        return None
    pool = chainer.backends.cuda.cupy.get_default_memory_pool()
    return pool.used_bytes(), pool.total_bytes()
