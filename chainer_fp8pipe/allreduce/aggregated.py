"""All-reduce through ranks that only sum: the workers' side.

Aggregators know no model and no step of the training.  Before each job,
worker 0 sends every aggregator an :class:`Order`, on a communicator of their
own; then aggregators run their part of the plan (:mod:`.serving`) as workers
do theirs.  Nothing else is said, so orders may pile up: several jobs can be
under way at a time.
"""
from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy
from mpi4py import MPI

from ..codecs import Codec, Part, State
from ..mpi.failure.abort import end_all_ranks
from ..mpi.finalizing import before_finalize, forget
from ..mpi.forever import HeldRequest
from ..mpi.waiting import wait_until
from ..report.stream import EventStream
from .algorithm import PARTS
from .bucket import Bucket
from .executor import Framing, PlanExecutor
from .plan import Plan

# Recipes that an aggregator remembers; there is one for each bucket.
_REMEMBERED = 256


class Setup(NamedTuple):
    """The first message to an aggregator."""

    plans: tuple[Plan, ...]
    framing: Framing


class Recipe(NamedTuple):
    """A codec, and what of tensors lies in a range; see Codec.relay."""

    codec: Codec
    parts: tuple[Part, ...]


class Order(NamedTuple):
    """A job.

    Attributes:
        length: Elements of its range.
        total: Elements of the whole fused vector.
        state: Number of the codec's state; residuals belong to it.
        slot: Number of the recipe.
        recipe: Comes when another one takes the number.
        gone: Numbers of states that are no more.
    """

    length: int
    total: int
    state: int
    slot: int
    recipe: Recipe | None
    gone: tuple[int, ...]


class Leave(NamedTuple):
    """The last message."""


class WorkerComm(MPI.Intracomm):
    """The workers of a communicator whose last ranks are aggregators.

    Attributes:
        everyone: All of them, for :class:`Aggregated` and nothing else.
            None where this is but a part of the workers.
    """

    everyone: MPI.Comm | None = None


class Orders:
    """Sends the aggregators their orders; worker 0 is rank 0 of ``comm``.

    The aggregators are the ranks behind the first ``workers``.
    """

    def __init__(self, comm: MPI.Comm, workers: int) -> None:
        self._comm = comm
        self._aggregators = range(workers, comm.size)
        self._sent: list[HeldRequest] = []
        self._states: weakref.WeakKeyDictionary[State, int] = (
            weakref.WeakKeyDictionary())
        self._numbered = 0
        self._gone: list[int] = []
        self._slots: dict[Recipe, int] = {}
        self._recipes = 0

    def order(self, bucket: Bucket) -> None:
        """Orders the aggregators' part of a bucket's all-reduce."""
        recipe = Recipe(bucket.codec, bucket.codec.parts(
            bucket.state, bucket.tensors, bucket.start, bucket.stop))
        slot = self._slots.get(recipe)
        new = slot is None
        if slot is None:
            if len(self._slots) == _REMEMBERED:     # the oldest makes room
                del self._slots[next(iter(self._slots))]
            slot = self._slots[recipe] = self._recipes % _REMEMBERED
            self._recipes += 1
        gone, self._gone[:] = tuple(self._gone), []
        self.send(Order(bucket.stop - bucket.start, bucket.tensors.size,
                        self._number(bucket.state), slot,
                        recipe if new else None, gone))

    def send(self, message: Setup | Order | Leave) -> None:
        """Starts to send; returns at once."""
        data = numpy.frombuffer(pickle.dumps(message), numpy.uint8)
        self._sent = [request for request in self._sent
                      if not request.test()]
        self._sent += [HeldRequest(self._comm.Isend(data, rank), data)
                       for rank in self._aggregators]

    def leave(self) -> None:
        """Tells aggregators to leave; waits until they have heard it."""
        self.send(Leave())
        for request in self._sent:
            wait_until(request.test)

    def _number(self, state: State) -> int:
        number = self._states.get(state)
        if number is None:
            number = self._states[state] = self._numbered
            self._numbered += 1
            weakref.finalize(state, self._gone.append, number).atexit = False
        return number


class Aggregated(PlanExecutor):
    """Makes a range of all workers' wires their mean, through aggregators.

    Aggregators are told to leave by :meth:`free`, or else when the program
    ends.

    Args:
        everyone: Workers and, as the last ranks, aggregators, each of which
            calls :func:`.serving.serve` with it.  It is used for nothing
            else, and given back to MPI in the end.
        plans: All of the same number of workers.
        events: Where to write what happens, but orders.
        framing: See there.
    """

    # Aggregators round at random by the number of the bucket.
    one_order = True

    def __init__(self, everyone: MPI.Comm, plans: Sequence[Plan],
                 events: EventStream, framing: Framing) -> None:
        self._everyone = everyone
        self._orders: Orders | None = None
        if everyone.rank == 0:
            self._orders = Orders(everyone, plans[0].workers)
            self._orders.send(Setup(tuple(plans), framing))
        super().__init__(everyone, plans, events, framing)
        before_finalize(self.leave_at_exit)
        _working.append(self)

    def submit(self, bucket: Bucket, until: int = PARTS) -> Bucket:
        assert until == PARTS       # aggregators take buckets one by one
        if self._orders and bucket.start < bucket.stop:
            self._orders.order(bucket)
        return super().submit(bucket)

    def free(self) -> None:
        """Finishes what is under way, and lets the aggregators leave."""
        self.run()
        self._leave()
        super().free()
        self._everyone.Free()

    def leave_at_exit(self) -> None:
        """Lets the aggregators leave when the program ends without free."""
        if self.busy:
            comm = MPI.COMM_WORLD
            end_all_ranks(f'\nrank {comm.rank} of {comm.size} left in the '
                          'middle of an all-reduce, ending all\n', 1)
        self._leave()

    def _leave(self) -> None:
        forget(self.leave_at_exit)
        if self in _working:
            _working.remove(self)
            if self._orders:
                self._orders.leave()


def dismiss(everyone: MPI.Comm, workers: int) -> None:
    """Lets aggregators leave that were never told what to do."""
    if everyone.rank == 0:
        Orders(everyone, workers).leave()
    everyone.Free()


# Those that aggregators serve.
_working: list[Aggregated] = []


def has_aggregators() -> bool:
    """Whether there are aggregators that serve this rank."""
    return bool(_working)
