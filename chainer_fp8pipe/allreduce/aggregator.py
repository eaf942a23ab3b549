"""All-reduce through ranks that only sum: workers' and aggregators' sides."""
# Worker 0 sends each aggregator what to do, on a communicator of their own:
# first the plan and the framing, then an Order before each bucket, in the end
# ().  Aggregators run their part of the plan as workers do theirs, and orders
# may pile up: several buckets can be under way at a time.
#
# Aggregators encode means without parameters (Codec.relay) and give up what
# that leaves out.  Frames are summed as they arrive, and sent back at once
# (cut-through, paper 003), unless one has a whole vector (store and forward).
from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ..codecs import Codec
from ..mpi.finalizing import HeldRequest, before_finalize, forget
from ..mpi.waiting import BRIEF, Pauses, wait_until
from ..mpi.world import end_all_ranks
from ..report.stream import EventStream
from .engine import Bucket, Engine
from .plan import Framing, Plan

# Seconds to sleep at most while there are no orders.
_IDLE = 1e-3


class Order(NamedTuple):
    """A bucket, as aggregators know it.

    Attributes:
        codec: Of its wire.
        sizes: Elements of its tensors.
    """

    codec: Codec
    sizes: tuple[int, ...]


class WorkerComm(MPI.Intracomm):
    """The workers of a communicator whose last ranks are aggregators.

    Attributes:
        everyone: All of them, for :class:`Aggregated` and nothing else.
            None where this is but a part of the workers.
    """

    everyone: MPI.Comm | None = None


class Aggregated(Engine):
    """Makes all workers' wires their mean, through aggregators.

    Aggregators are told to leave by :meth:`free`, or else when the program
    ends.

    Args:
        comm: The workers; ``comm.everyone`` has, as the last ranks,
            aggregators, each of which calls :func:`serve` with it.  It is
            used for nothing else, and given back to MPI in the end.
        plan: Of these workers.
        events: Where to write what happens, but orders.
        framing: See there.
    """

    def __init__(self, comm: WorkerComm, plan: Plan,
                 events: EventStream, framing: Framing) -> None:
        assert comm.everyone is not None
        self._everyone = comm.everyone
        self._sent: list[HeldRequest] = []
        self._first = comm.size         # of the aggregators
        self._tell((plan, framing))
        super().__init__(self._everyone, plan, events, framing, comm)
        before_finalize(self.leave_at_exit)
        _working.append(self)

    def prepare(self, bucket: Bucket) -> None:
        super().prepare(bucket)
        if self.comm.rank == 0 and bucket.tensors.size:
            self._tell(Order(bucket.state.codec, tuple(bucket.tensors.sizes)))

    def free(self) -> None:
        """Lets the aggregators leave; ends all if a bucket is under way."""
        self.leave_at_exit()
        super().free()
        self._everyone.Free()

    def leave_at_exit(self) -> None:
        """Lets the aggregators leave when the program ends without free."""
        if not self.idle:
            comm = MPI.COMM_WORLD
            end_all_ranks(f'\nrank {comm.rank} of {comm.size} left in the '
                          'middle of an all-reduce, ending all\n', 1)
        self._leave()

    def _leave(self) -> None:
        forget(self.leave_at_exit)
        if self in _working:
            _working.remove(self)
            self._tell(())
            for request in self._sent:
                wait_until(request.test)

    def _tell(self, message: tuple) -> None:
        """Starts to send to all aggregators, on worker 0; returns at once."""
        if self._everyone.rank == 0:
            self._sent = [request for request in self._sent
                          if not request.test()]
            self._sent += _send(self._everyone, self._first, message)


# Those that aggregators serve.
_working: list[Aggregated] = []


def has_aggregators() -> bool:
    """Whether there are aggregators that serve this rank."""
    return bool(_working)


def dismiss(everyone: MPI.Comm, workers: int) -> None:
    """Lets aggregators leave that were never told what to do."""
    if everyone.rank == 0:
        for request in _send(everyone, workers, ()):
            wait_until(request.test)
    everyone.Free()


def serve(everyone: MPI.Comm) -> None:
    """Sums for the workers until they let this rank go.

    For each flight it uses a frame, another per worker, and 4 bytes for each
    element.  Where a frame is a vector, with A aggregators, this is 1 / A of
    all workers' wires and of 4 bytes per parameter.

    Args:
        everyone: As :class:`WorkerComm` has it; given back to MPI in the end.
    """
    pauses = Pauses()
    while (setup := _receive(everyone)) is None:
        pauses.pause(_IDLE)
    if setup:
        _sum(everyone, *setup)
    everyone.Free()


def _sum(everyone: MPI.Comm, plan: Plan, framing: Framing) -> None:
    engine = Engine(everyone, plan, EventStream(), framing, MPI.COMM_SELF)
    pauses = Pauses()
    while (order := _receive(everyone)) != ():
        if order:
            tensors = order.codec.relay(order.sizes)
            engine.submit(Bucket(tensors.state, tensors, numpy.empty(
                0, order.codec.wire_dtype)))
        if engine.work(_IDLE, BRIEF) or order:
            pauses.restart()
        elif engine.idle:
            pauses.pause(_IDLE)
    # What was sent last may still be on its way to slower workers.
    engine.finish_all()
    engine.free()


def _send(everyone: MPI.Comm, workers: int, message: tuple
          ) -> list[HeldRequest]:
    data = numpy.frombuffer(pickle.dumps(message), numpy.uint8)
    return [HeldRequest(everyone.Isend(data, rank), data)
            for rank in range(workers, everyone.size)]


def _receive(everyone: MPI.Comm) -> Any:
    """Worker 0's next message; None if it is not there yet."""
    status = MPI.Status()
    message = everyone.Improbe(0, 0, status)
    if message is None:
        return None
    data = numpy.empty(status.Get_count(MPI.BYTE), numpy.uint8)
    message.Recv(data)
    return pickle.loads(data.tobytes())
