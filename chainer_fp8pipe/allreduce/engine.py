"""Submits buckets to an all-reduce, and waits for their means."""
# One thing goes through this module, a Bucket: gradients that travel together,
# from their submission until their means are there.
#
#     submit    the codec proposes maxima, which all ranks must know: they are
#               on their way (MPI_Iallreduce) while earlier buckets travel
#     launch    the maxima are there: the codec's step makes tables, and the
#               bucket goes in, behind those that went in before
#     work      compiled code moves frames, of several buckets at a time,
#               without the interpreter, until the seconds it is given are over
#     finish    polls the above until one bucket's mean is there
#
# The order of submission is the same on all ranks.  Gradients on the host are
# encoded when a frame is sent, and decoded when its mean has come: while a
# link is busy with one frame the processor works on others, and frames stay in
# its caches.  A GPU encodes the whole bucket before it goes in: it is done
# sooner than the frames would have left it.
#
# An engine runs plans (plan.py) in compiled code; _engine.c says how, and why
# it is not Python.  What can only wait inside MPI (mpi_op) is an engine
# without plans: a bucket is finished when it has gone in.
#
# What is under way belongs to MPI and to neighbours.  A Bucket's base is
# compiled and keeps all that compiled code has addresses of; the engine holds
# it until it is finished, even if its owner has dropped it.
from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ..codecs import Codec, State, Tensors
from ..mpi.finalizing import HeldRequest
from ..mpi.functions import exception, handle, library
from ..mpi.waiting import BRIEF, LONG, Pauses, Wait, waiting, world_ranks
from ..report.stream import EventStream
from . import _engine
from .memory import WIDEST, SharedMemory
from .plan import Framing, Opcode, Plan, Step, cut, steps_of

#: Seconds of work between two calls of what is done beside it.
LITTLE = 1e-3
# Elements of a message, whose length in bytes is an int of MPI.
_LARGEST = (1 << 31) // 4 - 1
# Numbers of instructions in compiled code.
_KINDS = {kind: number for number, kind in enumerate((
    Opcode.SEND_PARTIAL, Opcode.RECEIVE_PARTIAL, Opcode.ENCODE,
    Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT))}
_SENDS = Opcode.SEND_PARTIAL, Opcode.SEND_RESULT
# What an instruction of this number waits for.
_AWAITED = {_KINDS[Opcode.RECEIVE_PARTIAL]: 'the sum',
            _KINDS[Opcode.RECEIVE_RESULT]: 'the mean'}


class Bucket(_engine.Bucket):
    """Tensors whose mean is wanted, until that is there.

    Args:
        state: Of the wire's codec; its update has begun.
        tensors: The fused vector; means are written into its gradients.  If
            it has been coded, the wire holds the contribution already, unless
            ``encodes``.
        wire: Of the fused vector; the mean replaces the contribution.
        encodes: Gradients are encoded frame by frame, before they are sent.
        decodes: Means may be written into the gradients frame by frame, as
            they come.
        contributes: False for a bucket that is sent only because other ranks
            wait for it: all zeros.
        number: Which of the model's buckets it is.

    Attributes:
        codec: Of the wire.
        proposed: The codec's maxima, of all ranks when they have arrived;
            None if it needs none.
        is_submitted: The codec has proposed its maxima.
        is_prepared: Compiled code knows the bucket.
        finished: The mean is in the wire, or decoded, and nothing is on its
            way.
        failure: Why the bucket was not launched; '' if nothing has gone
            wrong.
        nonfinite: Names of tensors whose mean is not finite; None before
            :meth:`decode`.
    """

    def __init__(self, state: State, tensors: Tensors, wire: numpy.ndarray,
                 encodes: bool = False, decodes: bool = False,
                 contributes: bool = True, number: int = 0) -> None:
        self.state, self.codec = state, state.codec
        self.tensors, self.wire = tensors, wire
        self.encodes, self.decodes = encodes, decodes
        self.contributes, self.number = contributes, number
        self.is_submitted = self.is_prepared = self.finished = False
        self.failure = ''
        self.nonfinite: list[str] | None = None
        self.proposed: numpy.ndarray | None = None
        self.maxima: HeldRequest | None = None      # on their way
        self.arrive: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """The bucket in a message."""
        names = self.tensors.names
        return f'bucket {self.number} ({names[0]}' + (
            f' and {len(names) - 1} more)' if names[1:] else ')')

    @property
    def wire_is_finite(self) -> bool:
        """Whether the mean as it has travelled has no NaN and no infinity.

        After :meth:`decode`; on the host, the wire may not have been used.
        """
        return (self.tensors.wire_is_finite if self.tensors.xp is numpy
                else self.codec.is_finite(self.wire))

    def decode(self) -> list[str]:
        """Writes means into gradients, if that has not been done.

        Returns:
            Names of tensors whose gradient is now not finite.
        """
        if self.nonfinite is None:
            if not self.decodes:
                self.tensors.decode(self.wire)
            self.nonfinite = self.tensors.nonfinite
        return self.nonfinite


class Engine:
    """Makes buckets their mean over all ranks, in the order of submission.

    It runs one or more plans side by side, each on its part of a bucket.
    Frames start in one order on all ranks; messages find theirs by their tag.
    Beside the wire, memory is needed for ``frames_in_flight`` frames of each
    block: of every message and, for wide sums, 4 bytes for each element.

    Args:
        comm: The ranks, as many as the plans have; the engine works on
            duplicates, so that its messages cannot meet the caller's.
        plans: The same on all ranks.
        events: Where to write what happens.
        framing: How vectors are cut and summed.
        workers: Those of the ranks that have gradients; None: all.

    Attributes:
        listen: Called from time to time while :meth:`finish` waits; may
            raise.
        by_frame: It encodes and decodes frame by frame; others exchange
            wires that are encoded.
        one_order: All buckets come in one order on all ranks, whatever model
            they are of.
    """

    by_frame = True
    one_order = False

    def __init__(self, comm: MPI.Comm, plans: Sequence[Plan],
                 events: EventStream, framing: Framing,
                 workers: MPI.Comm | None = None) -> None:
        self.comm = comm.Dup()
        self.plans, self.framing = tuple(plans), framing
        self.events = events
        self.listen: Callable[[], object] = lambda: None
        # Maxima are on their way at any time, and collective calls on one
        # communicator have one order.
        self._maxima = (workers or comm).Dup()
        # Buckets whose maxima are awaited.
        self._waiting: collections.deque[Bucket] = collections.deque()
        self._steps = [steps_of(plan, comm.rank) for plan in plans]
        # By size and kind of a wire; there are a few for each model.
        self._divided: dict[tuple[int, int, int], list[_Cut]] = {}
        self._workers = plans[0].workers if plans else comm.size
        self._contributes = comm.rank < self._workers
        self._world_ranks = world_ranks(self.comm)
        self._memory = SharedMemory(self.comm, self._steps, framing)
        mpi = library()
        self._compiled = _engine.Engine(
            exception, mpi.functions, mpi.sizes, handle(self.comm), mpi.byte,
            tuple((tuple(
                (_KINDS[step.action.kind], *step.action[1:], *step[1:], *place)
                for step, place in zip(steps, places, strict=True)),
                plan.blocks, self._contributes)
                for plan, steps, places in zip(
                    self.plans, self._steps, self._memory.places,
                    strict=True)), framing.frames_in_flight)

    # --- what callers use ----------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting and not self._compiled.busy

    def submit(self, bucket: Bucket) -> Bucket:
        """Puts a bucket behind the others; does not wait.

        Args:
            bucket: What is to become its mean.

        Returns:
            The bucket.
        """
        if bucket.tensors.codec is None and not bucket.is_submitted:
            bucket.is_submitted = True
            bucket.arrive = self.events.travel(
                bucket.tensors.names, bucket.wire.nbytes)
            with self.events.section('encode'):
                found = bucket.codec.propose(bucket.state, bucket.tensors)
            if found is not None:
                if not bucket.contributes:
                    found[...] = 0
                # This cannot wait for others, which may be in their backward
                # pass.
                bucket.maxima = HeldRequest(self._maxima.Iallreduce(
                    MPI.IN_PLACE, found, MPI.MAX), found)
                bucket.proposed = found
                self.events.sent(found.nbytes)
        self._waiting.append(bucket)
        return bucket

    def work(self, seconds: float = 0.0, brief: float = 0.0) -> bool:
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
        moved = self._launch()
        try:
            # While maxima are on their way, the caller polls them in turns.
            return self._compiled.run(
                0.0 if self._waiting else seconds, brief) or moved
        finally:
            self._collect()

    def interrupt(self) -> None:
        """Makes :meth:`work` return; for other threads."""
        self._compiled.interrupt()

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
        pauses = Pauses()
        usual = LONG if beside is None else LITTLE
        more = False
        with waiting(self.waits):
            while not bucket.finished:
                self.listen()
                if bucket.failure:
                    raise RuntimeError(
                        'gradients could not be sent: ' + bucket.failure)
                if not self._waiting:
                    self.work(0.0 if more else usual, BRIEF)
                elif self.work():
                    pauses.restart()
                else:
                    # A small part of what a frame takes to go through its
                    # plan: others in flight keep the links busy meanwhile.
                    pauses.pause(self._compiled.patience)
                more = beside is not None and beside()

    def finish_all(self) -> None:
        """Waits for all buckets."""
        while not self.idle:
            self.work(LONG, BRIEF)

    def waits(self) -> list[Wait]:
        """What buckets wait for, the oldest first; any thread may ask."""
        found = []
        for bucket, plan, frame, step, kind, peer in self._compiled.waits():
            of = f'frame {frame} of {bucket.name}' + (
                f', plan {plan}' if len(self.plans) > 1 else '')
            if kind in _AWAITED:
                rank = self._world_ranks[peer]
                found.append(Wait(f'{of} ({_AWAITED[kind]}, step {step}) from '
                                  f'rank {rank}', (rank,)))
            else:
                found.append(Wait(f'what was sent of {of} to be taken, in '
                                  f'step {step}'))
        return found or [Wait(f'the maxima of {bucket.name} from all ranks')
                         for bucket in tuple(self._waiting)]

    def free(self) -> None:
        """Gives the communicators back to MPI.

        Not while anything is on its way: a later communicator might find it.
        """
        if self.idle:
            self.comm.Free()
            self._maxima.Free()

    def another(self) -> Engine:
        """An engine whose buckets do not wait for those of this one.

        Call it on all ranks, and not where :attr:`one_order` is True.
        """
        return Engine(self.comm, self.plans, self.events, self.framing)

    def decode_into(self, bucket: Bucket, gradients: Sequence[Any]) -> None:
        """Has means written into these arrays: as they come, or by decode.

        Args:
            bucket: One that was submitted.
            gradients: Of the bucket's tensors.
        """
        bucket.tensors.decode_into(gradients)
        if not bucket.is_prepared:
            bucket.decodes = True

    # --- how a bucket goes in ------------------------------------------------

    def _launch(self) -> bool:
        """Lets the next bucket in, if all ranks have its maxima."""
        if not self._waiting or (
                (maxima := self._waiting[0].maxima) and not maxima.test()):
            return False
        with self.events.section('encode'):
            bucket = self._waiting.popleft()
            if bucket.failure:  # what the codec keeps must not change twice
                raise RuntimeError(bucket.failure)
            try:
                if bucket.tensors.codec is None:
                    self._code(bucket)
                self.prepare(bucket)
                bucket.is_prepared = True
                self._compiled.let_in(bucket)
            except BaseException as error:
                bucket.failure = repr(error)
                raise
        return True

    def _code(self, bucket: Bucket) -> None:
        """Has a bucket's codec make its step; encodes what goes in as such."""
        bucket.codec.step(bucket.state, bucket.tensors, bucket.proposed,
                          self.sums(bucket.codec).prescale)
        by_frame = self.by_frame and bucket.tensors.xp is numpy
        if not bucket.contributes:
            bucket.wire.view(numpy.uint8)[...] = 0      # 0 in every format
        elif by_frame:
            bucket.encodes = True
        else:
            bucket.tensors.encode(bucket.wire)
        bucket.decodes &= by_frame

    def prepare(self, bucket: Bucket) -> None:
        """Makes a bucket that has been coded ready to go in."""
        tensors = bucket.tensors
        if self._contributes and bucket.wire.size != tensors.size:
            raise ValueError(f'{tensors.size} entries are not in a wire of '
                             f'{bucket.wire.size}')
        sums = self.sums(bucket.codec)
        if bucket.decodes:
            tensors.decode_into(tensors.gradients)
        cuts = self._cuts(tensors.size, bucket.codec)
        means = tensors.means([] if sums.in_wire else [
            site for one in cuts for site in one.sites])
        given = []
        for one in cuts:
            given.append((*one[:4], means[:len(one.sites)]))
            means = means[len(one.sites):]
        self._compiled.prepare(
            bucket, tensors.tables, bucket.wire.view(numpy.uint8),
            sums.itemsize, sums.shrink, sums.in_wire, bucket.encodes,
            bucket.decodes, tuple(given))

    def _collect(self) -> None:
        """Records what compiled code has done, and ends finished buckets."""
        sent, encoding, decoding, finished = self._compiled.taken()
        self.events.sent(sent)
        self.events.divide(encode=encoding, decode=decoding)
        for bucket in finished:
            bucket.tensors.conclude()
            if bucket.arrive:
                bucket.arrive()
            bucket.finished = True      # other threads may go on from here

    def sums(self, codec: Codec) -> Sums:
        """How sums of a codec's wires are held and travel."""
        form, wire = self.framing.form, codec.wire_dtype
        if wire == numpy.float32:
            return Sums(True, wire.itemsize, 1.0, 1.0 / self._workers)
        if form == 'float16':
            return Sums(False, 2, 0.5 ** (self._workers - 1).bit_length())
        return Sums(False, 4, 1.0)

    def _cuts(self, size: int, codec: Codec) -> list[_Cut]:
        """Divides a wire among plans, and into frames."""
        grain, itemsize = codec.grain, codec.wire_dtype.itemsize
        assert 4 * grain <= WIDEST * itemsize
        found = self._divided.get((size, grain, itemsize))
        if found is None:
            most = max((step.action.stop - step.action.start
                        for steps in self._steps for step in steps), default=1)
            frame = max(1, min(self.framing.frame_bytes // itemsize,
                               _LARGEST // grain // most))
            parts = cut(0, size, len(self.plans) or 1)
            found = self._divided[size, grain, itemsize] = [
                _cut(number, plan.blocks, steps, parts[number:number + 2],
                     frame)
                for number, (plan, steps) in enumerate(zip(
                    self.plans, self._steps, strict=True))]
        return found


class Sums(NamedTuple):
    """How sums of wires are held and travel.

    Attributes:
        in_wire: In the wire itself: a sum of contributions that were divided
            by the number of workers is a mean, and cannot overflow.
        itemsize: Bytes of an element.
        shrink: The power of two that they carry: in float16, a sum of
            saturated values of so many workers would overflow; its 11
            significant bits lose little beside the 3 of fp8.
        prescale: The factor that gradients carry when they are encoded.
    """

    in_wire: bool
    itemsize: int
    shrink: float
    prescale: float = 1.0


class _Cut(NamedTuple):
    """How a bucket is cut for a plan.

    Attributes:
        start: First entry.
        stop: Last entry plus one.
        frame: Entries of a frame; no more than the longest block has.
        frames: Of the longest block.
        sites: Names of the places where means are encoded, each with the
            range whose means this rank encodes there.
    """

    start: int
    stop: int
    frame: int
    frames: int
    sites: tuple[tuple[str, tuple[int, int]], ...]


def _cut(number: int, blocks: int, steps: Sequence[Step],
         part: Sequence[int], frame: int) -> _Cut:
    first, last = part
    bounds = cut(first, last, blocks)
    longest = -(-(last - first) // blocks)
    means = [step.action for step in steps
             if step.action.kind is Opcode.ENCODE and not step.fresh]
    return _Cut(
        first, last, min(frame, longest), -(-longest // frame), tuple(
            (f'sum {number} {site}',
             (bounds[action.start], bounds[action.stop]))
            for site, action in enumerate(means)))
