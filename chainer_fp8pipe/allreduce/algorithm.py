"""What all all-reduce algorithms have in common."""
from __future__ import annotations

import abc
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy
from mpi4py import MPI

from ..codecs import Codec, Coding
from ..codecs.staging import empty_wire
from ..mpi.failure.waits import Wait
from ..report.stream import EventStream

if TYPE_CHECKING:
    from .bucket import Bucket

#: Into how many parts a bucket may be divided that goes in a bit at a time.
PARTS = 64


class Algorithm(abc.ABC):
    """Makes buckets their mean over all ranks.

    Here stands what an algorithm does that waits in :meth:`submit` until a
    bucket has arrived, so that nothing is ever left to be done.

    Args:
        comm: The ranks; the algorithm works on a duplicate, so that its
            messages cannot meet the caller's.
        events: Where to write what happens.

    Attributes:
        by_frame: The algorithm encodes and decodes frame by frame; others
            are given wires that are encoded.
        one_order: All buckets come in one order on all ranks, whatever model
            they are of.
        busy: Some bucket is not finished.
        patience: Seconds that may be slept without slowing anything down.
    """

    by_frame = False
    one_order = True
    busy = False
    patience = 0.0

    def __init__(self, comm: MPI.Comm, events: EventStream) -> None:
        self.comm = comm.Dup()
        self.events = events

    @abc.abstractmethod
    def allreduce(self, coding: Coding, wire: numpy.ndarray, start: int,
                  stop: int) -> None:
        """Leaves the mean of all ranks' wires in ``wire``, on every rank.

        Args:
            coding: Of the fused vector.
            wire: Of all of the vector, encoded; its range is replaced.
            start: First element of the range.
            stop: Last element plus one.
        """

    def prescale(self, codec: Codec) -> float:
        """The factor that gradients must carry when they are encoded.

        With 1 / ranks, as here, sums in the wire's own format cannot
        overflow.
        """
        return 1.0 / self.comm.size

    def share_inside(self, node: Collection[int]) -> float:
        """Which share of the bytes that this rank sends stays in its node.

        Where the algorithm does not know, as inside MPI, that of the node's
        other ranks among all others.

        Args:
            node: The ranks of this rank's node.
        """
        return (len(node) - 1) / max(self.comm.size - 1, 1)

    def empty_wire(self, xp: Any, size: int, dtype: Any) -> numpy.ndarray:
        """Memory on the host for wires of buckets.

        Args:
            xp: ``numpy`` or ``cupy``, where the gradients are.
            size: Entries.
            dtype: Of an entry.
        """
        return empty_wire(xp, size, dtype)

    def submit(self, bucket: Bucket, until: int = PARTS) -> Bucket:
        """Puts a bucket behind the others, and returns it.

        The order must be the same on all ranks.

        Args:
            bucket: What is to become its mean.
            until: How much of the bucket, in parts of :data:`PARTS`; the
                rest comes with :meth:`resume`, behind what is submitted
                until then.
        """
        assert bucket.coding is not None
        self.allreduce(bucket.coding, bucket.wire, bucket.start, bucket.stop)
        bucket.conclude()
        return bucket

    def resume(self, bucket: Bucket, until: int = PARTS) -> None:
        """Puts more of a bucket behind the others, as :meth:`submit` does."""
        assert bucket.finished

    def begin_decoding(self, bucket: Bucket) -> None:
        """Lets means be decoded as they come from now on."""
        assert bucket.finished

    def waits(self) -> list[Wait]:
        """What buckets wait for, the oldest first; any thread may ask."""
        return []

    def advance(self) -> bool:
        """Does what can be done without waiting; whether it was anything."""
        return False

    def work(self, seconds: float, brief: float = 0.0) -> bool:
        """Does what there is to do, and pauses in between.

        Returns when a bucket is finished, when there is none, when another
        thread calls :meth:`interrupt`, and at a pause after so many seconds.

        Args:
            seconds: See above; 0: without any pause.
            brief: Seconds of yielding the processor before a sleep; 0 where
                others have use for the processor.

        Returns:
            Whether anything was done.
        """
        return False

    def interrupt(self) -> None:        # noqa: B027
        """Makes :meth:`work` return; for other threads."""

    def chunks(self, size: int, codec: Codec) -> int:
        """Into how many chunks a bucket is cut, where most are made.

        Args:
            size: Entries of the bucket's wire.
            codec: Of the wire.
        """
        return 1

    def another(self) -> Algorithm:
        """A second one, whose buckets do not wait for those of this one.

        Only where :attr:`one_order` is False; call it on all ranks.
        """
        raise NotImplementedError

    def free(self) -> None:
        """Gives the duplicated communicator back to MPI.

        Not while anything is on its way: a later communicator might find it.
        """
        if not self.busy:
            self.comm.Free()
