"""All channels of one rank of a pipeline."""
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
from mpi4py import MPI

from ..channel.channel import Receiver, Sender
from ..mpi.ranks import nodes_of, once
from .block import Arrays
from .schedules import Kind


class _Shared:
    """The communicator that all pipelines on one communicator share."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm, self._nodes = comm, nodes_of(comm)
        self.tags = 0       # the next unused one
        self.spoilt = False

    def is_far(self, rank: int) -> bool:
        """Whether it is on another node than this rank."""
        return self._nodes[rank] != self._nodes[self.comm.rank]

    def free(self) -> None:
        # MPI gives the numbers of freed communicators to new ones, which
        # would receive what a failed step has left under way.
        if not self.spoilt:
            self.comm.Free()


class Channels:
    """Senders and receivers for the chunks of one rank.

    Boundary b lies between chunks b and b + 1.  The first tag is that of
    batches; then come two per boundary, for activations and for gradients;
    the last is that of predictions.

    Args:
        comm: The ranks of one pipeline; rank r has the chunks c with
            ``c % size == r``.  Every pipeline gets tags of its own: no
            message that an earlier one left under way can arrive here.
        chunks: The numbers of this rank's chunks.
        last: Number of the pipeline's last chunk.
        codec: Of activations and gradients: None (as they are) or ``'fp8'``.
        xp: ``numpy`` or ``cupy``: where received arrays lie.

    Attributes:
        senders: By kind of the action that sends and number of the chunk.
        receivers: By kind of the action that receives and number of the
            chunk.
        batch_in: From the rank before: batches.
        batch_out: To the next rank.
    """

    def __init__(self, comm: MPI.Comm, chunks: Iterable[int], last: int,
                 codec: str | None = None, xp: Any = numpy) -> None:
        self.senders: dict[tuple[Kind, int], Sender] = {}
        self.receivers: dict[tuple[Kind, int], Receiver] = {}
        self._shared: _Shared | None = None
        # From the last rank to the others: outputs of predictions.
        self._outputs: list[Sender] = []
        #: Of batches, from the stage before, and to the next one.
        self.batch_in: Receiver | None = None
        self.batch_out: Sender | None = None
        self._output: Receiver | None = None
        if comm.size == 1:
            return
        # Apart from whatever else is sent there.
        shared = once(comm, 'channels', lambda: _Shared(comm.Dup()))
        self._shared = shared
        comm, self._tag = shared.comm, shared.tags
        shared.tags += 2 * last + 2
        for chunk in chunks:
            if chunk > 0:
                self._open(comm, chunk, -1, codec, xp)
            if chunk < last:
                self._open(comm, chunk, +1, codec, xp)
        before, after = comm.rank - 1, comm.rank + 1
        if before >= 0:
            self.batch_in = Receiver(comm, before, self._tag,
                                     far=shared.is_far(before))
        if after < comm.size:
            self.batch_out = Sender(comm, after, self._tag,
                                    far=shared.is_far(after))
        end = last % comm.size
        tag = self._tag + 1 + 2 * last
        if comm.rank == end:
            self._outputs = [Sender(comm, rank, tag, far=shared.is_far(rank))
                             for rank in range(end)]
        else:
            self._output = Receiver(comm, end, tag, xp=xp,
                                    far=shared.is_far(end))

    def _open(self, comm: MPI.Comm, chunk: int, step: int,
              codec: str | None, xp: Any) -> None:
        other = (chunk + step) % comm.size
        activations = self._tag + 1 + 2 * (chunk if step > 0 else chunk - 1)
        gradients = activations + 1
        if step > 0:
            send, out = Kind.SEND_ACTIVATION, activations
            receive, into = Kind.RECEIVE_GRADIENT, gradients
        else:
            send, out = Kind.SEND_GRADIENT, gradients
            receive, into = Kind.RECEIVE_ACTIVATION, activations
        assert self._shared
        far = self._shared.is_far(other)
        self.senders[send, chunk] = Sender(comm, other, out, codec, far)
        self.receivers[receive, chunk] = Receiver(comm, other, into, codec,
                                                  xp, far)

    def expect(self, counts: Mapping[tuple[Kind, int], int]) -> None:
        """Gives each receiver the number of its messages in this step."""
        for key, count in counts.items():
            self.receivers[key].expect(count)

    def send_outputs(self, arrays: Arrays, ranks: Iterable[int]) -> None:
        """Sends from the last rank to others; waits until all has left."""
        for rank in ranks:
            self._outputs[rank].send(arrays)
        self.flush()

    def receive_outputs(self) -> Arrays:
        """Receives what the last rank sends to this one."""
        assert self._output is not None
        self._output.expect(1)
        return self._output.receive()

    def flush(self) -> None:
        """Waits until all that was sent has left."""
        for sender in self._all_senders():
            sender.flush()

    def fail(self, text: str) -> None:
        """Tells all neighbours that this rank cannot go on."""
        for receiver in self._all_receivers():
            receiver.cancel()
        for sender in self._all_senders():
            with contextlib.suppress(MPI.Exception):
                sender.fail(text)

    def spoil(self) -> None:
        """Has the communicator never freed; on all ranks of a failed step."""
        if self._shared:
            self._shared.spoilt = True

    def _all_senders(self) -> list[Sender]:
        batches = [self.batch_out] if self.batch_out else []
        return [*self.senders.values(), *self._outputs, *batches]

    def _all_receivers(self) -> list[Receiver]:
        output = [self._output] if self._output else []
        return [*self.receivers.values(), *output]
