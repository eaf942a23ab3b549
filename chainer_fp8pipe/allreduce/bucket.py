"""Gradients that travel together, and the queue in which they wait."""
from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy
from mpi4py import MPI

from ..codecs import Codec, Coding, State, Tensors
from ..mpi.failure.waits import Wait, waiting
from ..mpi.forever import HeldRequest
from ..mpi.waiting import BRIEF, LONG, Pauses
from ..report.stream import EventStream
from .algorithm import PARTS, Algorithm

# Seconds; some frames come meanwhile.
_LITTLE = 1e-3


class Bucket:
    """A range of the fused vector whose mean is wanted, until that is there.

    Args:
        state: Of the wire's codec; its update has begun.
        tensors: The fused vector.
        wire: Of all of the vector; the mean replaces the contribution.
        start: First element of the range.
        stop: Last element plus one; None: all of the wire.
        coding: What the codec does in this update; None: :meth:`launch`
            finds it.
        encodes: Gradients are encoded frame by frame, before they are sent;
            or the wire holds the contribution already, or :meth:`launch`
            decides.
        decodes: Means may be written into the gradients frame by frame, as
            they come.
        contributes: False for a bucket that is sent only because other ranks
            wait for it: all zeros.
        number: Which of the model's buckets it is.

    Attributes:
        handle: What compiled code knows of the bucket; the executor's.
        passes: The wire is not written: frames are encoded, and their means
            decoded, in memory of the executor's.
        finished: The mean is in the wire, or decoded, and nothing is on its
            way.
        failure: Why the bucket was not launched; '' if nothing has gone
            wrong.
    """

    def __init__(self, state: State, tensors: Tensors, wire: numpy.ndarray,
                 start: int = 0, stop: int | None = None,
                 coding: Coding | None = None, encodes: bool = False,
                 decodes: bool = False, contributes: bool = True,
                 number: int = 0) -> None:
        self.state = state
        self.tensors = tensors
        self.wire = wire
        self.start = start
        self.stop = wire.size if stop is None else stop
        self.coding = coding
        self.encodes = encodes
        self.decodes = decodes
        self.handle: Any = None
        self.passes = False
        self.number = number
        self.finished = False
        self.failure = ''
        self._contributes = contributes
        self._algorithm: Algorithm | None = None
        self._arrive: Callable[[], None] | None = None
        self._proposed: numpy.ndarray | None = None
        self._request: HeldRequest | None = None
        self._means: list[tuple[int, int]] = []

    @property
    def name(self) -> str:
        """The bucket in a message."""
        names = self.tensors.names
        return f'bucket {self.number} ({names[0]}' + (
            f' and {len(names) - 1} more)' if names[1:] else ')')

    @property
    def codec(self) -> Codec:
        """Of the wire."""
        return self.state.codec

    # --- before the bucket travels ------------------------------------------

    def propose(self, comm: MPI.Comm, events: EventStream) -> int:
        """Asks all ranks for the codec's maxima; returns the bytes sent."""
        self._arrive = events.travel(self.tensors.names, (
            self.stop - self.start) * self.wire.itemsize)
        self._proposed = self.codec.propose(self.state, self.tensors)
        if self._proposed is None:
            return 0
        if not self._contributes:
            self._proposed[...] = 0
        # This cannot wait for others: they may be in their backward pass.
        self._request = HeldRequest(
            comm.Iallreduce(MPI.IN_PLACE, self._proposed, MPI.MAX),
            self._proposed)
        return self._proposed.nbytes

    def is_settled(self) -> bool:
        """Whether the maxima of all ranks are there."""
        return self._request is None or self._request.test()

    def launch(self, algorithm: Algorithm, until: int) -> None:
        """Hands the bucket to the algorithm, or more of it when called again.

        Args:
            algorithm: Makes the mean.
            until: As for :meth:`.Algorithm.submit`.
        """
        if self._algorithm:
            algorithm.resume(self, until)
            return
        if self.failure:        # what the codec keeps must not change twice
            raise RuntimeError(self.failure)
        self.coding = self.codec.step(
            self.state, self.tensors, self._proposed,
            algorithm.prescale(self.codec))
        # A GPU is done with all of it before frames would have left it.
        by_frame = algorithm.by_frame and self.tensors.xp is numpy
        if not self._contributes:
            self.wire.view(numpy.uint8)[...] = 0    # 0 in every format
        elif by_frame:
            self.encodes = True
        else:
            self.coding.encode(self.wire)
        self.decodes &= by_frame
        algorithm.submit(self, until)
        self._algorithm = algorithm

    # --- while the bucket travels -------------------------------------------

    def begin_decoding(self, tensors: Tensors) -> None:
        """From now on gradients may be overwritten, as means come.

        Args:
            tensors: As for :meth:`decode`.
        """
        if self._algorithm is None:
            self.tensors, self.decodes = tensors, True
        elif self.encodes:
            self.tensors = tensors
            self._algorithm.begin_decoding(self)

    def decoded(self) -> list[tuple[int, int]]:
        """Ranges of the fused vector whose means are in the gradients so far.

        Not while another thread works at the exchange.
        """
        if self.decodes and self.handle is not None:
            pairs = numpy.frombuffer(self.handle.decoded(), numpy.int64)
            self._means += [(start, stop) for start, stop
                            in pairs.reshape(-1, 2).tolist()]
        return self._means

    @property
    def wire_is_finite(self) -> bool:
        """Whether the mean as it has travelled has no NaN and no infinity."""
        assert self.coding is not None
        return (self.coding.wire_is_finite if self.passes
                else self.codec.is_finite(self.wire))

    # --- afterwards ----------------------------------------------------------

    def conclude(self) -> None:
        """Ends the bucket's way: the mean is there."""
        assert self.coding is not None
        self.coding.conclude()
        if self._arrive:
            self._arrive()
        self.finished = True        # other threads may go on from here

    def decode(self, tensors: Tensors) -> list[str]:
        """Writes means into gradients, if that has not been done.

        Args:
            tensors: The bucket, or as ``decodes`` was given, others of the
                same names and parameters.

        Returns:
            Names of tensors whose gradient is now not finite.
        """
        assert self.coding is not None
        if self.decodes:
            return self.coding.nonfinite
        self.coding.decode_into(tensors.gradients)
        return self.coding.decode(self.wire)


class BucketQueue:
    """Sends buckets through an all-reduce, in the order of submission.

    The order must be the same on all ranks.  While one bucket travels the
    next is encoded, and frames of several are under way, where the algorithm
    allows it.

    Args:
        comm: The ranks; the queue works on a duplicate.
        algorithm: Makes the means.
        events: Where to write what happens.
        listen: Called from time to time while :meth:`finish` waits; may
            raise.
    """

    def __init__(self, comm: MPI.Comm, algorithm: Algorithm,
                 events: EventStream,
                 listen: Callable[[], None] = lambda: None) -> None:
        self.algorithm = algorithm
        self._listen = listen
        self._comm = comm.Dup()
        self._events = events
        self._waiting: collections.deque[tuple[Bucket, int]] = (
            collections.deque())

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting and not self.algorithm.busy

    def submit(self, bucket: Bucket, until: int = PARTS) -> None:
        """Puts a bucket behind the others; does not wait.

        Args:
            bucket: What is to become its mean.
            until: As for :meth:`.Algorithm.submit`.
        """
        with self._events.section('encode'):
            self._events.sent(bucket.propose(self._comm, self._events))
        self.resume(bucket, until)

    def resume(self, bucket: Bucket, until: int = PARTS) -> None:
        """Puts more of a bucket behind the others."""
        self._waiting.append((bucket, until))

    def advance(self) -> bool:
        """Does what can be done without waiting; whether it was anything."""
        moved = self._launch()
        return self.algorithm.advance() or moved

    def work(self) -> bool:
        """Does what there is to do for a while; whether it was anything.

        Returns early when all is done, or another thread interrupts.
        """
        moved = self._launch()
        # While maxima are on their way, the caller polls them in turns.
        return self.algorithm.work(0.0 if self._waiting else LONG) or moved

    def interrupt(self) -> None:
        """Has :meth:`work` return; for other threads."""
        self.algorithm.interrupt()

    def finish(self, bucket: Bucket,
               beside: Callable[[], bool] | None = None) -> None:
        """Waits for a bucket.

        Args:
            bucket: One that was submitted, all of it.
            beside: Polled while waiting; does a little, and returns True
                while there is more to do.

        Raises:
            RuntimeError: The bucket could not be launched; that was an error
                then.
        """
        with waiting(self._waits):
            self._finish(bucket, beside)

    def _waits(self) -> list[Wait]:
        """What it waits for, the oldest bucket first."""
        return self.algorithm.waits() or [
            Wait(f'the maxima of {bucket.name} from all ranks')
            for bucket, _ in tuple(self._waiting)]

    def _finish(self, bucket: Bucket, beside: Callable[[], bool] | None
                ) -> None:
        pauses = Pauses()
        usual = LONG if beside is None else _LITTLE
        more = False
        while not bucket.finished:
            self._listen()
            if bucket.failure:
                raise RuntimeError(
                    'gradients could not be sent: ' + bucket.failure)
            if self._waiting:
                if self.advance():
                    pauses.restart()
                else:
                    pauses.pause(self.algorithm.patience)
            else:
                self.algorithm.work(0.0 if more else usual, BRIEF)
            more = beside is not None and beside()

    def _launch(self) -> bool:
        """Hands over the next bucket, if all ranks have its maxima."""
        if not self._waiting or not self._waiting[0][0].is_settled():
            return False
        with self._events.section('encode'):
            bucket, until = self._waiting.popleft()
            try:
                bucket.launch(self.algorithm, until)
            except BaseException as error:
                bucket.failure = bucket.failure or repr(error)
                raise
        return True

    def free(self) -> None:
        """Gives the duplicate back to MPI; the algorithm is left alone.

        Not while anything is on its way: a later communicator might find it.
        """
        if self.idle:
            self._comm.Free()
