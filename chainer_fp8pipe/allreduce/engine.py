"""Submits buckets to an all-reduce, and waits for their means."""
# A Bucket is gradients that travel together, from submission to mean:
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
# encoded when a frame is sent, and decoded when its mean has come; a GPU
# encodes the whole bucket before it goes in.  What can only wait inside MPI
# (mpi_op) has no plan: a bucket is finished when it has gone in.
#
# MPI, neighbours and compiled code know addresses of a bucket under way.  The
# engine holds it until it is finished; one that is dropped never frees it.
from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from ctypes import c_double, c_float, c_int, c_int64, c_size_t, c_ssize_t
from ctypes import c_void_p as pointer
from typing import NamedTuple

import numpy
from mpi4py import MPI

from .. import formats
from ..codecs import Codec, State, Tensors
from ..mpi.finalizing import HeldRequest, keep_forever
from ..mpi.ranks import handle, library
from ..mpi.waiting import BRIEF, LONG, Pauses, Wait, waiting, world_ranks
from ..report.stream import EventStream
from .memory import WIDEST, SharedMemory
from .plan import Framing, Opcode, Plan, cut, steps_of

_library = formats.library('allreduce._engine')
_library.engine_patience.restype = c_double

# Elements of a message, whose length in bytes is an int of MPI.
_LARGEST = (1 << 31) // 4 - 1
# Numbers of instructions in compiled code.
_KINDS = {kind: number for number, kind in enumerate((
    Opcode.SEND_PARTIAL, Opcode.RECEIVE_PARTIAL, Opcode.ENCODE,
    Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT))}
# What an instruction of this number waits for.
_AWAITED = {_KINDS[Opcode.RECEIVE_PARTIAL]: 'the sum',
            _KINDS[Opcode.RECEIVE_RESULT]: 'the mean'}
# Errors that are not MPI's.
_NO_MEMORY, _OUT_OF_STEP = -1, -2
_STEP = numpy.dtype([
    *((name, 'i4') for name in (
        'kind', 'peer', 'start', 'stop', 'summed', 'fresh', 'is_last',
        'gathered', 'copies')),
    *((name, 'i8') for name in ('mail', 'data', 'stride'))], align=True)


class _Bucket(ctypes.Structure):
    """See ``_engine.c``."""

    _fields_ = (
        ('coding', pointer), ('means', pointer), ('wire', pointer),
        ('size', c_int64), ('frame', c_int64), ('frames', c_int64),
        ('begun', c_int64), ('finished', c_int64), ('behind', pointer),
        ('sum_size', c_size_t), ('shrink', c_float), ('in_wire', c_int),
        ('encodes', c_int), ('decodes', c_int))


class _Engine(ctypes.Structure):
    """See ``_engine.c``; what is only its own is ``rest``."""

    _fields_ = (
        ('send', pointer), ('receive', pointer), ('testsome', pointer),
        ('request_size', c_size_t), ('status_size', c_size_t),
        ('comm', c_ssize_t), ('byte', c_ssize_t), ('steps', pointer),
        ('places', pointer), ('steps_count', c_int), ('blocks', c_int),
        ('contributes', c_int), ('in_flight', c_int),
        ('waiting', pointer), ('started', c_int64), ('oldest', c_int64),
        ('duration', c_double), ('bytes_sent', c_int64),
        ('encoding', c_double), ('decoding', c_double), ('error', c_int),
        ('found', c_int), ('statuses', pointer), ('interrupted', c_int),
        ('rest', c_int64 * 16))


class Bucket:
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
        maxima: What the codec has proposed, and the request that makes it the
            maximum of all ranks; None if it needs none.
        compiled: The bucket in compiled code.
        finished: The mean is in the wire, or decoded, and nothing is on its
            way.
    """

    def __init__(self, state: State, tensors: Tensors, wire: numpy.ndarray,
                 encodes: bool = False, decodes: bool = False,
                 contributes: bool = True, number: int = 0) -> None:
        self.state, self.tensors, self.wire = state, tensors, wire
        self.encodes, self.decodes = encodes, decodes
        self.contributes, self.number = contributes, number
        self.maxima: tuple[numpy.ndarray, HeldRequest] | None = None
        self.compiled = _Bucket()
        self.finished = False

    @property
    def name(self) -> str:
        """The bucket in a message."""
        names = self.tensors.names
        return f'bucket {self.number} ({names[0]}' + (
            f' and {len(names) - 1} more)' if names[1:] else ')')

    def decode(self) -> list[str]:
        """Writes means into gradients, if that has not been done.

        Returns:
            Names of tensors whose gradient is now not finite.
        """
        if not self.decodes:
            self.tensors.decode(self.wire)
        return self.tensors.nonfinite


class _Program:
    """A rank's part of a plan, as compiled code has it.

    Attributes:
        longest: Blocks of the longest message.
        encoded: Ranges of blocks whose means this rank encodes, by site.
        compiled: The engine in compiled code, which the others are for.
    """

    def __init__(self, comm: MPI.Comm, plan: Plan | None, framing: Framing
                 ) -> None:
        steps = steps_of(plan, comm.rank) if plan else []
        actions = [step.action for step in steps]
        self.longest = max((one.stop - one.start for one in actions),
                           default=1)
        self.encoded = [(one.start, one.stop) for one, step
                        in zip(actions, steps, strict=True)
                        if one.kind is Opcode.ENCODE and not step.fresh]
        self._memory = SharedMemory(comm, steps, framing)
        self._table = numpy.array([
            (_KINDS[action.kind], *action[1:], *flags, place.copies,
             *place[:3]) for (action, *flags), place
            in zip(steps, self._memory.places, strict=True)], _STEP)
        # Sums of blocks in a row lie side by side, as in messages.
        blocks = plan.blocks if plan else 0
        self._places = numpy.zeros(blocks + 1, 'i4')
        for one in actions:
            if one.kind is Opcode.RECEIVE_PARTIAL:
                self._places[one.start + 1:one.stop + 1] = 1
        self._places.cumsum(out=self._places)
        mpi = library()
        self.compiled = _Engine(
            *mpi.functions, *mpi.sizes, handle(comm), mpi.byte,
            self._table.ctypes.data, self._places.ctypes.data, len(steps),
            blocks, not plan or comm.rank < plan.workers,
            framing.frames_in_flight)
        if not _library.engine_open(ctypes.byref(self.compiled)):
            raise MemoryError


class Engine:
    """Makes buckets their mean over all ranks, in the order of submission.

    Beside the wire, memory is needed for ``frames_in_flight`` frames of each
    block: of every message and, for wide sums, 4 bytes for each element.

    Args:
        comm: The ranks, as many as the plan has; it is duplicated.
        plan: The same on all ranks; None: of :class:`.MpiOp`.
        events: Where to write what happens.
        framing: How vectors are cut and summed.
        workers: Those of the ranks that have gradients; None: all.

    Attributes:
        listen: Called from time to time while :meth:`finish` waits; may
            raise.
        by_frame: It encodes and decodes frame by frame; others exchange
            wires that are encoded.
    """

    by_frame = True

    def __init__(self, comm: MPI.Comm, plan: Plan | None,
                 events: EventStream, framing: Framing,
                 workers: MPI.Comm | None = None) -> None:
        self.comm = comm.Dup()
        self.plan, self.framing = plan, framing
        self.events = events
        self.listen: Callable[[], object] = lambda: None
        # Maxima are on their way at any time, and collective calls on one
        # communicator have one order.
        self._maxima = (workers or comm).Dup()
        # Buckets whose maxima are awaited, and by address those in compiled
        # code.
        self._waiting: collections.deque[Bucket] = collections.deque()
        self._under_way: dict[int, Bucket] = {}
        self._world_ranks = world_ranks(self.comm)
        self._program = _Program(self.comm, plan, framing)
        self._compiled = self._program.compiled

    def __del__(self) -> None:
        program = getattr(self, '_program', None)
        if program and self._under_way:
            keep_forever((program, self._under_way))
        elif program:
            _library.engine_close(ctypes.byref(program.compiled))

    # --- what callers use ----------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting and not self._under_way

    def submit(self, bucket: Bucket) -> Bucket:
        """Puts a bucket behind the others, and returns it; does not wait."""
        if bucket.tensors.state is None:
            with self.events.section('encode'):
                found = bucket.state.codec.propose(
                    bucket.state, bucket.tensors)
            if found is not None:
                if not bucket.contributes:
                    found[...] = 0
                # This cannot wait for others, which may be in their backward
                # pass.
                bucket.maxima = found, HeldRequest(self._maxima.Iallreduce(
                    MPI.IN_PLACE, found, MPI.MAX), found)
                self.events.sent(found.nbytes)
        self._waiting.append(bucket)
        return bucket

    def work(self, seconds: float = 0.0, brief: float = 0.0) -> bool:
        """Does what there is to do, and pauses in between.

        Returns when a bucket is finished, when there is none, when another
        thread calls :meth:`interrupt`, and at a pause after so many seconds.
        One thread at a time may call it.

        Args:
            seconds: See above; 0: without any pause.
            brief: Seconds of yielding the processor before a sleep; 0 where
                others have use for the processor.

        Returns:
            Whether anything was done.
        """
        launched, compiled = self._launch(), self._compiled
        # After an error what came of half a step would look like a mean.
        if compiled.error:
            raise RuntimeError(
                'an earlier error has left an all-reduce half done')
        # While maxima are on their way, the caller polls them in turns.
        moved = _library.engine_run(
            ctypes.byref(compiled),
            c_double(0.0 if self._waiting else seconds), c_double(brief))
        self._collect()
        if moved >= 0:
            return bool(moved) or launched
        if compiled.error == _NO_MEMORY:
            raise MemoryError
        if compiled.error == _OUT_OF_STEP:
            raise RuntimeError('a rank of this node exchanges something else')
        raise MPI.Exception(compiled.error)

    def interrupt(self) -> None:
        """Makes :meth:`work` return; for other threads."""
        self._compiled.interrupted = 1

    def finish(self, bucket: Bucket) -> None:
        """Waits for a bucket that was submitted.

        Raises:
            RuntimeError: It could not be launched; that was an error then.
        """
        pauses = Pauses()
        with waiting(self.waits):
            while not bucket.finished:
                self.listen()
                if self.idle:
                    raise RuntimeError(f'{bucket.name} could not be sent')
                if not self._waiting:
                    self.work(LONG, BRIEF)
                elif self.work():
                    pauses.restart()
                else:
                    # A small part of what a frame takes to go through its
                    # plan: others in flight keep the links busy meanwhile.
                    pauses.pause(_library.engine_patience(
                        ctypes.byref(self._compiled)))

    def finish_all(self) -> None:
        """Waits for all buckets."""
        with waiting(self.waits):
            while not self.idle:
                self.work(LONG, BRIEF)

    def waits(self) -> list[Wait]:
        """What buckets wait for, the oldest first; any thread may ask."""
        found = []
        states = numpy.zeros((self.framing.frames_in_flight, 5), 'i8')
        _library.engine_waits(ctypes.byref(self._compiled),
                              pointer(states.ctypes.data))
        for address, frame, step, kind, peer in sorted(states.tolist()):
            bucket = self._under_way.get(address)
            if bucket is None:
                continue
            of = f'frame {frame} of {bucket.name}'
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

    # --- how a bucket goes in ------------------------------------------------

    def _launch(self) -> bool:
        """Lets the next bucket in, if all ranks have its maxima."""
        if not self._waiting or (
                (maxima := self._waiting[0].maxima) and not maxima[1].test()):
            return False
        with self.events.section('encode'):
            bucket = self._waiting.popleft()
            if bucket.tensors.state is None:
                self._code(bucket)
            self.prepare(bucket)
            address = ctypes.addressof(bucket.compiled)
            self._under_way[address] = bucket
            _library.engine_let_in(
                ctypes.byref(self._compiled), pointer(address))
        return True

    def _code(self, bucket: Bucket) -> None:
        """Has a bucket's codec make its step; encodes what goes in as such."""
        codec = bucket.state.codec
        codec.step(bucket.state, bucket.tensors,
                   bucket.maxima and bucket.maxima[0],
                   self.sums(codec).prescale)
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
        tensors, codec = bucket.tensors, bucket.state.codec
        compiled, program = self._compiled, self._program
        if compiled.contributes and bucket.wire.size != tensors.size:
            raise ValueError(f'{tensors.size} entries are not in a wire of '
                             f'{bucket.wire.size}')
        sums = self.sums(codec)
        if bucket.decodes:
            tensors.decode_into(tensors.gradients)
        blocks, itemsize = max(compiled.blocks, 1), codec.wire_dtype.itemsize
        assert 4 * tensors.grain <= WIDEST * itemsize
        longest = -(-tensors.size // blocks)
        frame = max(1, min(self.framing.frame_bytes // itemsize, longest,
                           _LARGEST // tensors.grain // program.longest))
        bounds = cut(0, tensors.size, blocks)
        # Each site with the range whose means this rank encodes there.
        means = tensors.means([] if sums.in_wire else [
            (f'sum 0 {site}', (bounds[start], bounds[stop]))
            for site, (start, stop) in enumerate(program.encoded)])
        bucket.compiled = _Bucket(
            ctypes.addressof(tensors.coding), means.ctypes.data,
            bucket.wire.ctypes.data, tensors.size, frame,
            -(-longest // frame) if compiled.blocks else 0, 0, 0, None,
            sums.itemsize, sums.shrink, sums.in_wire, bucket.encodes,
            bucket.decodes)

    def _collect(self) -> None:
        """Records what compiled code has done, and ends finished buckets."""
        compiled = self._compiled
        self.events.sent(compiled.bytes_sent)
        self.events.divide(encode=compiled.encoding, decode=compiled.decoding)
        compiled.bytes_sent = 0
        compiled.encoding = compiled.decoding = 0.0
        for address, bucket in list(self._under_way.items()):
            if bucket.compiled.finished < bucket.compiled.frames:
                continue
            del self._under_way[address]
            bucket.tensors.conclude()
            bucket.finished = True      # other threads may go on from here

    def sums(self, codec: Codec) -> Sums:
        """How sums of a codec's wires are held and travel."""
        workers = self.plan.workers if self.plan else self.comm.size
        wire = codec.wire_dtype
        if wire == numpy.float32:
            return Sums(True, wire.itemsize, 1.0, 1.0 / workers)
        if self.framing.form == 'float16':
            return Sums(False, 2, 0.5 ** (workers - 1).bit_length())
        return Sums(False, 4, 1.0)


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
