"""All-reduce by plans."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy
from mpi4py import MPI

from ..codecs import Codec, Tensors
from ..mpi.forever import keep_forever
from ..report.statistics import Statistics
from .executor import PARTS, Executor
from .job import Job
from .plan import Plan
from .sums import in_wire_format


@dataclasses.dataclass(frozen=True)
class Framing:
    """How a vector is cut, and in which form it is summed.

    Attributes:
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.
        form: What partial sums travel in, one of :data:`.sums.FORMS`.
    """

    frame_bytes: int = 3 << 13
    frames_in_flight: int = 6
    form: str = 'float32'


class Planned:
    """Makes a range of all ranks' wires their mean, as plans say.

    Args:
        comm: The ranks; the algorithm works on a duplicate, so its messages
            cannot meet the caller's.
        plans: Run side by side, each on its share of the range.
        statistics: Counters to add to.
        framing: See there.
    """

    def __init__(self, comm: MPI.Comm, plans: Sequence[Plan],
                 statistics: Statistics, framing: Framing) -> None:
        self.comm = comm.Dup()
        self.plans = tuple(plans)
        self.framing = framing
        self.statistics = statistics
        self.executor = Executor(
            self.comm, plans, statistics, frame_bytes=framing.frame_bytes,
            frames_in_flight=framing.frames_in_flight, form=framing.form)

    def prescale(self, codec: Codec) -> float:
        """The factor that gradients must carry when they are encoded."""
        if in_wire_format(self.framing.form, codec):
            return 1.0 / self.plans[0].workers
        return 1.0

    def allreduce(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                  start: int, stop: int) -> None:
        """Leaves the mean of the whole range in ``wire``, on every rank."""
        self.submit(Job(codec, tensors, wire, start, stop))
        self.executor.run()

    def submit(self, job: Job, until: int = PARTS) -> Job:
        """Begins what :meth:`allreduce` does; others may be under way.

        The executor's ``run``, ``work`` or ``advance`` does the rest.

        Args:
            job: What is to be done.
            until: As :meth:`.Executor.submit`.

        Returns:
            The job.
        """
        self.executor.submit(job, until)
        return job

    def free(self) -> None:
        """Gives the duplicated communicator back to MPI."""
        if self.executor.busy:
            keep_forever(self.executor)
        self.comm.Free()
