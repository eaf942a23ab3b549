"""Sends buckets through an all-reduce, several at a time."""
from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy
from mpi4py import MPI

from ..allreduce import Planned, Statistics
from ..allreduce.executor import PARTS
from ..allreduce.job import Job
from ..codecs import Codec, Tensors
from ..mpi.waiting import BRIEF, LONG, Pauses

# Seconds; some frames come meanwhile.
_LITTLE = 1e-3


class Transfer:
    """One bucket on its way.

    Args:
        codec: Its update has been started.
        tensors: The bucket.
        wire: Of as many elements; the mean will be in it.
        real: False for one that is sent only because other ranks wait for
            it: all zeros.
        decodes: The gradients may be overwritten as means come.

    Attributes:
        finished: The mean is in the wire, and nothing is on its way.
        failure: Why it was not launched; '' if nothing has gone wrong.
    """

    def __init__(self, codec: Codec, tensors: Tensors, wire: numpy.ndarray,
                 real: bool = True, decodes: bool = False) -> None:
        self.codec = codec
        self.tensors = tensors
        self.wire = wire
        self.real = real
        self._decodes = decodes
        self._proposed: numpy.ndarray | None = None
        self._request: MPI.Request | None = None
        self._job: Job | None = None
        self._algorithm: Any = None
        self._done = False
        self._means: list[tuple[int, int]] = []
        self.failure = ''

    @property
    def finished(self) -> bool:
        return self._done or self._job is not None and self._job.finished

    def propose(self, comm: MPI.Comm) -> int:
        """Asks all ranks for the codec's maxima; how many bytes that is."""
        self._proposed = self.codec.propose(self.tensors)
        if self._proposed is None:
            return 0
        if not self.real:
            self._proposed[...] = 0
        # This cannot wait for others: they may be in their backward pass.
        self._request = comm.Iallreduce(MPI.IN_PLACE, self._proposed, MPI.MAX)
        return self._proposed.nbytes

    def is_settled(self) -> bool:
        """Whether the maxima are there."""
        return self._request is None or self._request.Test()

    def launch(self, algorithm: Any, until: int) -> None:
        """Encodes the bucket and hands it to the algorithm.

        Args:
            algorithm: See :class:`Exchange`.
            until: How much of it, as :meth:`Exchange.submit`; more when this
                is called again.
        """
        if self._job:
            algorithm.executor.resume(self._job, until)
            return
        self._algorithm = algorithm
        self.codec.settle(self.tensors, self._proposed)
        prescale = algorithm.prescale(self.codec)
        # A GPU is done with all of it before frames would have left it.
        by_frame = (isinstance(algorithm, Planned)
                    and self.tensors.xp is numpy)
        if not self.real:
            self.wire[...] = 0      # which is 0 in every format
        elif not by_frame:
            self.codec.encode(self.tensors, self.wire, prescale)
        parts = self.codec, self.tensors, self.wire, 0, self.wire.size
        if isinstance(algorithm, Planned):
            self._job = algorithm.submit(Job(
                *parts, prescale if self.real and by_frame else None,
                by_frame and self._decodes), until)
        else:
            algorithm.allreduce(*parts)
            self._done = True

    def begin_decoding(self, tensors: Tensors) -> None:
        """From now on gradients may be overwritten, as means come.

        Args:
            tensors: As for :meth:`decode`.
        """
        self.tensors, self._decodes = tensors, True
        if self._job and self._job.encodes:
            self._job.tensors = tensors
            self._algorithm.executor.begin_decoding(self._job)

    def wait(self, seconds: float) -> None:
        """Waits until it is finished, or so long.

        It has been launched, all of it.
        """
        if self._job:
            self._algorithm.executor.work(seconds, BRIEF)

    def means(self) -> list[tuple[int, int]]:
        """Ranges of the bucket whose means are in the gradients so far.

        Not while another thread works at the exchange.
        """
        if self._job and self._job.decodes:
            self._means += self._job.decoded()
        return self._means

    def nonfinite(self) -> list[str]:
        """Names of tensors in which a mean so far is not finite."""
        return self._job.nonfinite if self._job else []

    def decode(self, tensors: Tensors) -> list[str]:
        """Writes means into gradients, if that has not been done.

        Args:
            tensors: The bucket, or as ``decodes`` was given, others of the
                same names and parameters.

        Returns:
            Names of tensors whose gradient is now not finite.
        """
        if self._job and self._job.decodes:
            return self._job.nonfinite
        return self.codec.decode(tensors, self.wire)


class Exchange:
    """Makes buckets their mean over all ranks.

    Buckets go in the order in which they are submitted, which must be the
    same on all ranks.  While one travels the next is encoded, and frames of
    several are under way.  Algorithms without plans do one after the other,
    and wait.

    Args:
        comm: The ranks; it works on a duplicate.
        algorithm: See :func:`.algorithms.make_algorithm`.
        statistics: Counters to add to.
    """

    def __init__(self, comm: MPI.Comm, algorithm: Any,
                 statistics: Statistics) -> None:
        self.algorithm = algorithm
        self._comm = comm.Dup()
        self._statistics = statistics
        self._waiting: collections.deque[tuple[Transfer, int]] = (
            collections.deque())

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting and not (
            isinstance(self.algorithm, Planned)
            and self.algorithm.executor.busy)

    def chunks(self, size: int, itemsize: int) -> int:
        """Into how many chunks a bucket is cut; 1: it goes as a whole."""
        if isinstance(self.algorithm, Planned):
            return self.algorithm.executor.chunks(size, itemsize)
        return 1

    def submit(self, transfer: Transfer, until: int = PARTS) -> None:
        """Puts a bucket behind the others; does not wait.

        Args:
            transfer: The bucket.
            until: How much of it, in parts of
                :data:`~chainer_fp8pipe.allreduce.executor.PARTS`.
        """
        with self._statistics.section('encode'):
            self._statistics.bytes_sent += transfer.propose(self._comm)
        self.resume(transfer, until)

    def resume(self, transfer: Transfer, until: int = PARTS) -> None:
        """Puts more of a bucket behind the others."""
        self._waiting.append((transfer, until))

    def advance(self) -> bool:
        """Does what can be done without waiting; whether it was anything."""
        moved = self._launch()
        if isinstance(self.algorithm, Planned):
            moved |= self.algorithm.executor.advance()
        return moved

    def work(self) -> bool:
        """Does what there is to do for a while; whether it was anything.

        Returns early when all is done, or :meth:`interrupt` is called.
        """
        moved = self._launch()
        if isinstance(self.algorithm, Planned):
            # What has still to be settled wants a look, again and again.
            moved |= self.algorithm.executor.work(
                0.0 if self._waiting else LONG)
        return moved

    def interrupt(self) -> None:
        """Has :meth:`work` return; for other threads."""
        if isinstance(self.algorithm, Planned):
            self.algorithm.executor.interrupt()

    def finish(self, transfer: Transfer,
               beside: Callable[[], bool] | None = None) -> None:
        """Waits for a bucket.

        Args:
            transfer: The bucket.
            beside: Is called from time to time, and does a little; whether
                there is more to do.

        Raises:
            RuntimeError: It could not be launched; that was an error then.
        """
        pauses = Pauses()
        usual = LONG if beside is None else _LITTLE
        more = False
        while not transfer.finished:
            if transfer.failure:
                raise RuntimeError(
                    'gradients could not be sent: ' + transfer.failure)
            if self._waiting:
                if self.advance():
                    pauses.restart()
                else:
                    pauses.pause(self._patience)
            else:
                transfer.wait(0.0 if more else usual)
            more = beside is not None and beside()

    def _launch(self) -> bool:
        """Hands over the next bucket, if all ranks have its maxima."""
        if not self._waiting or not self._waiting[0][0].is_settled():
            return False
        with self._statistics.section('encode'):
            transfer, until = self._waiting.popleft()
            try:
                transfer.launch(self.algorithm, until)
            except BaseException as error:
                transfer.failure = repr(error)
                raise
        return True

    @property
    def _patience(self) -> float:
        """Seconds that may be slept without slowing anything down."""
        return (self.algorithm.executor.patience
                if isinstance(self.algorithm, Planned) else 0.0)

    def free(self) -> None:
        """Gives the duplicate back to MPI; the algorithm is left alone."""
        self._comm.Free()
