"""The mean of a model's gradients over all ranks."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chainer
from mpi4py import MPI

from ..allreduce.engine import Algorithm, Bucket
from ..codecs import State, Tensors
from ..intercept import ready_gradients
from ..mpi.agreement import Agreement, Signature
from ..mpi.failure.update_count import updates
from ..report.stream import EventStream
from .drift import compare
from .gradients import SAME_MODEL, Gradients
from .lockstep import Lockstep
from .model_state import ModelState, ModelStates
from .nonfinite import everywhere, must_be_finite

SAME_GRADIENTS = (SAME_MODEL + ' If some ranks do not use a parameter in '
                  'some updates, pass zero_fill=True to '
                  'create_multi_node_optimizer.')

#: Is told of a parameter and of the array that will be its gradient.
Final = Callable[[chainer.Parameter, Any], None]


class Sent(NamedTuple):
    """A bucket on its way, and where its means are wanted."""

    tensors: Tensors
    bucket: Bucket


class ExchangeOutcome(NamedTuple):
    """What an exchange came to.

    Attributes:
        state: Of the codec of the exchange.
        nonfinite: Parameters whose mean is NaN or infinite.
        wire_is_finite: No wire, which all ranks have alike, holds one.
    """

    state: State
    nonfinite: list[str]
    wire_is_finite: bool


class Reducer:
    """Averages gradients when they are all there, and waits for the means.

    Args:
        comm: The ranks.
        algorithm: Makes buckets their mean.
        models: What is remembered of each model.
        events: Where to write what happens.
        bucket_bytes: Bytes of float32 of gradients that travel together; 0:
            all.
        nonfinite: What to do about means that are not finite, see
            :func:`.must_be_finite`.
        check_every: Updates from one comparison of all replicas to the next;
            0: there is none.
    """

    def __init__(self, comm: MPI.Comm, algorithm: Algorithm,
                 models: ModelStates, events: EventStream,
                 bucket_bytes: int, nonfinite: str, check_every: int
                 ) -> None:
        self._lockstep = Lockstep(comm)
        self._algorithm = self._listening(algorithm)
        self._models = models
        self._events = events
        self._bucket_bytes = bucket_bytes
        self._nonfinite = nonfinite
        self._check_every = check_every

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """See :meth:`.CodecCommunicator.multi_node_mean_grad`."""
        with self._lockstep.section():
            self._mean(model, zero_fill)

    def _mean(self, model: chainer.Link, zero_fill: bool) -> None:
        state = self._models.of(model)
        with self._events.section('exchange'):
            gradients = Gradients(model, zero_fill)
            self._agreement(state, gradients).wait()
            if self._compares(state):
                compare(model, state.updates, self._lockstep)
            state.see(gradients.loss_scale)
            outcome = self._receive(state.current, self._algorithm,
                                    self._send(state, gradients))
        self._finish(state, gradients, outcome)

    def complete(self) -> None:
        """Waits for what updates have left to be waited for."""

    @contextlib.contextmanager
    def announced(self, model: chainer.Link, loss_scale: float | None
                  ) -> Iterator[Final]:
        """See :meth:`.CodecCommunicator.announced`."""
        with ready_gradients.unwatched():
            yield lambda parameter, gradient: None

    def discard(self, model: chainer.Link) -> None:
        """Drops what has been sent of a model; call it on all ranks."""

    def restart(self) -> None:
        """The models' states have been replaced."""

    def free(self) -> None:
        """Gives MPI's communicators, and the memory of wires, back."""
        self._algorithm.free()
        self._models.release()
        self._lockstep.free()

    # --- the parts of a mean -------------------------------------------------

    def _listening(self, algorithm: Algorithm) -> Algorithm:
        algorithm.listen = self._lockstep.listen
        return algorithm

    def _agreement(self, state: ModelState, gradients: Gradients,
                   **more: str) -> Agreement:
        """On what must be the same on all ranks before anything is sent."""
        # A rank resumed from another snapshot must not go unseen.
        return Agreement(self._lockstep.comm, Signature({
            **gradients.entries, 'the number of updates': str(state.updates),
            **more}), gradients.problem, SAME_GRADIENTS,
            wait=self._lockstep.wait)

    def _compares(self, state: ModelState) -> bool:
        """Whether all ranks compare their replicas now."""
        return bool(self._check_every and state.updates
                    and self._lockstep.comm.size > 1
                    and state.updates % self._check_every == 0)

    def _send(self, state: ModelState, gradients: Gradients) -> list[Sent]:
        """Sends all buckets."""
        assert gradients.tensors is not None        # or agree() had raised
        kept, sent = state.current, []
        codec = kept.codec
        if gradients.tensors.size:
            codec.begin(kept, gradients.tensors.loss_scale)
        for number, names in enumerate(state.buckets(
                gradients.sizes, self._bucket_bytes)):
            part = gradients.part(names, codec.grain)
            if part.size:
                bucket = Bucket(kept, part, state.wire(
                    number, codec, part.xp, part.size, self._algorithm),
                    decodes=True, number=number)
                self._algorithm.submit(bucket)
                self._algorithm.advance()
                sent.append(Sent(part, bucket))
        return sent

    def _receive(self, state: State, queue: Algorithm, sent: list[Sent]
                 ) -> ExchangeOutcome:
        """Waits for all buckets, and writes their means into gradients."""
        nonfinite: list[str] = []
        wire_is_finite = True
        for tensors, bucket in sent:
            queue.finish(bucket)
            with self._events.section('decode'):
                found = bucket.decode(tensors)
                if found:
                    wire_is_finite &= bucket.wire_is_finite
            nonfinite += found
        return ExchangeOutcome(state, nonfinite, wire_is_finite)

    def _finish(self, state: ModelState, gradients: Gradients,
                outcome: ExchangeOutcome, write_back: bool = True) -> None:
        """The exchange is over, or will be when parameters are wanted."""
        if outcome.nonfinite and must_be_finite(self._nonfinite, state):
            raise everywhere(self._lockstep, outcome.state, outcome.nonfinite,
                             outcome.wire_is_finite)
        if write_back:
            gradients.write_back()
        state.updates += 1
        self._events.updates += 1
        updates.finished((id(self), state.number))
