"""All-reduce through ranks that only sum: the aggregators' side."""
from __future__ import annotations

import pickle

import numpy
from mpi4py import MPI

from ..codecs import State
from ..mpi.waiting import BRIEF, Pauses
from ..report.stream import EventStream
from .aggregated import Leave, Order, Recipe, Setup
from .bucket import Bucket
from .executor import PlanExecutor

_IDLE = 1e-3        # seconds to sleep at most while there are no orders


def serve(everyone: MPI.Comm) -> None:
    """Sums for the workers until they let this rank go.

    Sums are made chunk by chunk as frames arrive, and sent back at once
    (cut-through, paper 003), unless the framing puts a whole vector into one
    frame: then nothing leaves before all of it is summed (store and
    forward).

    With A aggregators, each uses per parameter 1 / A of the wire's bytes (1
    for fp8, 2, 4) and, for fp8 with error feedback, of another 4; and for
    each chunk in flight a frame per worker and 4 bytes for each of its
    elements.  The wire is addressed as a whole, but no more of it is touched.
    Where a frame is a vector this is, besides, 1 / A of all workers' wires
    and of 4 bytes per parameter.  All but the residuals' 4 bytes is there
    twice for a moment when a job begins before the last has left.

    Args:
        everyone: As :class:`.Aggregated`'s; given back to MPI in the end.
    """
    pauses = Pauses()
    while (setup := _receive(everyone)) is None:
        pauses.pause(_IDLE)
    if isinstance(setup, Setup):
        _Service(everyone, setup).run()
    everyone.Free()


def _receive(everyone: MPI.Comm) -> Setup | Order | Leave | None:
    """Worker 0's next message; None if it is not there yet."""
    status = MPI.Status()
    message = everyone.Improbe(0, 0, status)
    if message is None:
        return None
    data = numpy.empty(status.Get_count(MPI.BYTE), numpy.uint8)
    message.Recv(data)
    return pickle.loads(data.tobytes())


class _Service:
    """Works on orders; ``setup`` is what worker 0 sent first."""

    def __init__(self, everyone: MPI.Comm, setup: Setup) -> None:
        self._everyone = everyone
        self._executor = PlanExecutor(everyone, setup.plans, EventStream(),
                                      setup.framing)
        self._recipes: dict[int, Recipe] = {}
        self._states: dict[int, State] = {}
        self._wires = _Wires()

    def run(self) -> None:
        executor = self._executor
        pauses = Pauses()
        while not isinstance(order := _receive(self._everyone), Leave):
            if isinstance(order, Order):
                self._begin(order)
            if executor.work(_IDLE, BRIEF) or order:
                pauses.restart()
            elif not executor.busy:
                pauses.pause(_IDLE)
        # What was sent last may still be on its way to slower workers.
        executor.run()
        executor.free()

    def _begin(self, order: Order) -> None:
        for number in order.gone:
            self._states.pop(number, None)
        recipe = order.recipe or self._recipes[order.slot]
        self._recipes[order.slot] = recipe
        codec = recipe.codec
        if order.state not in self._states:
            self._states[order.state] = codec.init()
        state, dtype = self._states[order.state], codec.wire_dtype
        coding = codec.relay(state, recipe.parts, self._everyone.rank)
        memory = self._wires.take(order.length * dtype.itemsize,
                                  order.total * dtype.itemsize)
        self._wires.lend(memory, self._executor.submit(Bucket(
            state, coding.tensors, memory.view(dtype), 0, order.length,
            coding)))


class _Wires:
    """Memory for wires that is used again.

    What is kept is no more than one fused vector of the latest job's codec,
    so that nothing is left of the float32 wires when the warm-up is over.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[numpy.ndarray, Bucket]] = []
        self._spare: list[numpy.ndarray] = []

    def take(self, size: int, keep: int) -> numpy.ndarray:
        """Memory of ``size`` bytes; keeps ``keep`` bytes of what is spare."""
        self._spare += [memory for memory, bucket in self._lent
                        if bucket.finished]
        self._lent = [entry for entry in self._lent if not entry[1].finished]
        while sum(memory.nbytes for memory in self._spare) > keep:
            del self._spare[0]
        for index, memory in enumerate(self._spare):
            if memory.nbytes == size:
                return self._spare.pop(index)
        return numpy.empty(size, numpy.uint8)

    def lend(self, memory: numpy.ndarray, bucket: Bucket) -> None:
        """Leaves the memory to a bucket until that is finished."""
        self._lent.append((memory, bucket))
