"""The mean of a model's gradients, exchanged beside computation."""
from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..allreduce.engine import Algorithm, Bucket
from ..codecs import State, Tensors
from ..exchange.drift import ReplicaDrift, compare
from ..exchange.gradients import Gradients
from ..exchange.model_state import ModelState, ModelStates
from ..exchange.nonfinite import here, must_be_finite
from ..exchange.reducer import (
    ExchangeOutcome,
    Final,
    Reducer,
    Sent,
)
from ..intercept import ready_gradients
from ..mpi.agreement import Agreement, Signature
from ..report.stream import EventStream
from .bucket_sender import BucketSender
from .deferred_update import DeferredUpdate, Use
from .exchange_thread import ExchangeThread

_ONE_MODEL = ("overlap=True with algorithm='aggregator' is for one model; "
              'pass overlap=False')


class OverlappedReducer(Reducer):
    """Begins an exchange while the backward pass still goes on.

    Args:
        comm: The ranks.
        algorithm: Makes buckets their mean.
        models: What is remembered of each model.
        events: Where to write what happens.
        bucket_bytes: Bytes of float32 of gradients that travel together; 0:
            all.
        nonfinite: What to do about means that are not finite.
        check_every: Updates from one comparison of all replicas to the next;
            0: there is none.
        defers: An update returns before its exchange is over; parameters
            are updated when the next forward pass wants them.
    """

    def __init__(self, comm: MPI.Comm, algorithm: Algorithm,
                 models: ModelStates, events: EventStream,
                 bucket_bytes: int, nonfinite: str, check_every: int,
                 defers: bool) -> None:
        super().__init__(comm, algorithm, models, events, bucket_bytes,
                         nonfinite, check_every)
        self._defers = defers
        self._thread = ExchangeThread(events)
        # One for each model whose buckets are sent early, in the order in
        # which all ranks have made them.
        self._queues: list[Algorithm] = []
        self._unsettled: tuple[Agreement, BucketSender] | None = None
        self._withdrawn: Agreement | None = None

    def _mean(self, model: chainer.Link, zero_fill: bool) -> None:
        state = self._models.of(model)
        sender = self._thread.of(model, state)
        sender.complete()
        with self._events.section('exchange'):
            sender.update.thaw()
            gradients = Gradients(model, zero_fill)
            stage = sender.stage(gradients.sizes)
            settle = self._begin_to_agree(state, gradients, sender, stage)
            # Tied parameters share memory: an early update of one would
            # corrupt what the other's mean is decoded with.
            defers = (self._defers and stage == 'ready'
                      and not gradients.share_parameters)
            # Ranks that have sent all need not wait for the others' word.
            if gradients.problem or not (defers and sender.update.ready
                                         == len(sender.order.slices)):
                settle()
            if self._compares(state):
                settle()        # or not all ranks may come here
                try:
                    compare(model, state.updates, self._lockstep)
                except ReplicaDrift:
                    self._withdraw(sender)
                    raise
            state.see(gradients.loss_scale)
            if stage == 'new':
                sender.follow(gradients.sizes, self._bucket_bytes)
            outcome, seconds = self._exchange(
                state, gradients, sender, settle if defers else None)
            if stage != 'new':
                self._learn(sender, seconds, settle)
        self._finish(state, gradients, outcome,
                     write_back=sender.deferred is None)
        if self._defers and state.current is not outcome.state:
            sender.ready = False        # buckets will take another time

    def complete(self) -> None:
        self._thread.complete()

    @contextlib.contextmanager
    def announced(self, model: chainer.Link, loss_scale: float | None
                  ) -> Iterator[Final]:
        sender = self._thread.known(model)
        names: dict[int, str] = {}
        if sender and sender.announce(loss_scale):
            names = {id(parameter): name
                     for name, parameter in sender.parameters().items()}

        def final(parameter: chainer.Parameter, gradient: Any) -> None:
            if sender and id(parameter) in names:
                sender.final(names[id(parameter)], gradient)
        with ready_gradients.unwatched():
            yield final

    def discard(self, model: chainer.Link) -> None:
        with self._lockstep.section():
            sender = self._thread.known(model)
            if sender:
                sender.complete()
            self._settle_last()
            Agreement(self._lockstep.comm, Signature({
                'model': str(sender.number) if sender else 'not averaged yet'
            }), wait=self._lockstep.wait).wait()
            if sender:
                sender.update.thaw()
                self._withdraw(sender)

    def restart(self) -> None:
        self._thread.forget()

    def free(self) -> None:
        """Ends the thread and gives MPI's communicators back."""
        try:
            self.complete()
        finally:
            self._thread.close()
            for queue in self._queues:
                queue.free()
            super().free()

    # --- agreement -----------------------------------------------------------

    def _begin_to_agree(self, state: ModelState, gradients: Gradients,
                        sender: BucketSender, stage: str
                        ) -> Callable[[], None]:
        """Returns what raises if the ranks are not in agreement."""
        problem = gradients.problem or sender.problem(gradients)
        if state.number and self._algorithm.one_order:
            problem = problem or _ONE_MODEL
        gradients.problem = problem
        # Those of two models are settled in the order in which they were
        # begun: how is a matter of more collective calls.
        self._settle_last()
        agreement = self._agreement(
            state, gradients, overlap=stage, **{
                'the number of the model': str(state.number)})
        self._unsettled = agreement, sender
        return functools.partial(self._settle, agreement, sender)

    def _settle(self, agreement: Agreement, sender: BucketSender) -> None:
        """Raises if the ranks are not in agreement, each time."""
        try:
            agreement.wait()
        except ValueError:
            if self._withdrawn is not agreement:
                self._withdrawn = agreement
                # A deferred exchange cannot be cancelled.
                if self._withdraw(sender, sender.deferred is not None):
                    self._lockstep.break_off()
            raise

    def _settle_last(self) -> None:
        """As above, without raising: who looks at that model hears of it."""
        if self._unsettled:
            with contextlib.suppress(ValueError):
                self._settle(*self._unsettled)
            self._unsettled = None

    def _withdraw(self, sender: BucketSender, failed: bool = False) -> bool:
        """Ends what has begun of an update that is not to be.

        A rank may have sent what others have not: they send zeros in its
        place, so that nothing is left on its way; if any has ``failed``, all
        is left as it is.  Returns whether anything had been sent.
        """
        with self._thread.taken():
            number = sender.signature
            found = numpy.array([sender.update.begun,
                                 failed or bool(sender.failure),
                                 number, -number], numpy.int64)
            scale = numpy.array(sender.update.factor, numpy.float64)
            self._lockstep.allreduce(found, MPI.MAX)
            self._lockstep.allreduce(scale, MPI.MAX)
            sent, any_failed, largest, smallest = found.tolist()
            if any_failed or (sent and largest != -smallest):
                self._lockstep.break_off()      # and all is left as it is
            elif sent:
                sender.fill(sent, float(scale))
            sender.averaged()
        return sent > 0

    # --- the exchange --------------------------------------------------------

    def _exchange(self, state: ModelState, gradients: Gradients,
                  sender: BucketSender, settle: Callable[[], None] | None
                  ) -> tuple[ExchangeOutcome, float]:
        """One mean of all gradients, in place, and its seconds.

        With ``settle`` the mean is on its way; ``settle`` is then called
        before the mean is used.
        """
        kept, start = state.current, time.perf_counter()
        outcome, seconds = ExchangeOutcome(kept, [], True), 0.0
        with self._thread.taken():
            if sender.failure:      # since the ranks have begun to agree
                raise RuntimeError(
                    f'the exchange failed beside backward: {sender.failure}')
            queue = self._algorithm
            if sender.ready and sender.queue:
                queue = sender.queue
                sent = self._send_rest(gradients, sender)
            else:
                sent = self._send(state, gradients)
            if settle:
                self._defer(state, gradients, sender, queue, sent, settle)
            else:
                outcome = self._receive(kept, queue, sent)
                seconds = time.perf_counter() - start
            sender.averaged()
        return outcome, seconds

    def _send_rest(self, gradients: Gradients, sender: BucketSender
                   ) -> list[Sent]:
        """Sends what has not been sent early; returns all."""
        assert sender.queue
        parts = [gradients.part(names, sender.codec.grain)
                 for names in sender.order.buckets]
        for place, piece in enumerate(sender.order.slices):
            if place >= sender.update.begun and parts[piece.bucket].size:
                sender.send(piece, parts[piece.bucket], decodes=True)
                sender.queue.advance()
        sent = [Sent(parts[number], bucket)
                for number, bucket in sender.update.sent.items()]
        for tensors, bucket in sent:        # which backward could not let
            bucket.begin_decoding(tensors)
        return sent

    def _defer(self, state: ModelState, gradients: Gradients,
               sender: BucketSender, queue: Algorithm,
               sent: Sequence[Sent], settle: Callable[[], None]) -> None:
        """Lets parameters be waited for when they are wanted."""
        means = PendingMeans(
            sender, self._thread, queue, state.current, sent,
            gradients, must_be_finite(self._nonfinite, state),
            self._events, settle)
        parameters = sender.parameters()
        sender.defer(DeferredUpdate(gradients.parameters, means.finish,
                                    self._lockstep.tell), parameters)

    # --- the order of buckets ------------------------------------------------

    def _learn(self, sender: BucketSender, seconds: float,
               settle: Callable[[], None]) -> None:
        """Lets buckets be sent early from now on, and in what order.

        Args:
            sender: Of a model that is known.
            seconds: How long all its buckets together travelled; not used if
                they were sent early.
            settle: Raises if the ranks are not in agreement on this update.
        """
        is_first = not sender.ready
        is_time = sender.order.times.keep(sender.ready)
        if sender.queue is None:
            # Models are sent early in an order of their own on each rank, so
            # each has an executor of its own.
            sender.queue = (self._algorithm if self._algorithm.one_order
                            else self._unused_queue())
        sender.ready = True
        if self._algorithm.one_order:
            return
        if is_first:
            sender.seconds = seconds
        elif is_time and self._defers:
            settle()        # or not all ranks may come here
        else:
            return
        self._choose_order(sender, is_first)

    def _unused_queue(self) -> Algorithm:
        """One of a model that is no more on any rank, or a new one."""
        used = numpy.array([self._thread.uses(queue)
                            for queue in self._queues] + [False])
        self._lockstep.allreduce(used, MPI.LOR)
        place = int(numpy.flatnonzero(~used)[0])
        if place == len(self._queues):
            self._queues.append(self._listening(self._algorithm.another()))
        return self._queues[place]

    def _choose_order(self, sender: BucketSender, is_first: bool) -> None:
        """Chooses the order of buckets, the same on all ranks."""
        # A rank that is late with its first gradient has less time between
        # that and the next: the longest of these times are not those that
        # pass between the last rank's gradients, but their means nearly are.
        found = numpy.array([*sender.order.usual_times(), sender.seconds])
        self._lockstep.allreduce(found, MPI.SUM)
        *usual, sender.seconds = (found / self._lockstep.comm.size).tolist()
        if is_first or all(map(math.isfinite, usual)):
            sender.choose_order(usual, self._defers)


class PendingMeans:
    """Means of one update, each of which is waited for when it is wanted.

    Until then the exchange's thread goes on with them.

    Args:
        sender: Of the same model.
        thread: Which exchanges them meanwhile.
        queue: Where the buckets are.
        state: Of the codec of this update.
        sent: The buckets.
        gradients: Of the model.
        must_be_finite: Whether NaN and infinity are errors.
        events: Where to write what happens.
        settle: Raises if the ranks are not in agreement on this update.
    """

    def __init__(self, sender: BucketSender, thread: ExchangeThread,
                 queue: Algorithm, state: State, sent: Sequence[Sent],
                 gradients: Gradients, must_be_finite: bool,
                 events: EventStream, settle: Callable[[], None]) -> None:
        self._sender = sender
        self._thread = thread
        self._queue = queue
        self._state = state
        self._sent = {name: one for one in sent for name in one.tensors.names}
        self._gradients = gradients
        self._must_be_finite = must_be_finite
        self._events = events
        self._settle = settle
        self._nonfinite: dict[Bucket, list[str]] = {}

    def finish(self, name: str, use: Use | None = None) -> None:
        """Waits for a parameter's bucket; its gradient is then the mean.

        Args:
            name: Of the parameter.
            use: Is given parts of the mean, as they come, if they are where
                the gradient is; others come without.

        Raises:
            ValueError: The ranks are not in agreement.
            RuntimeError: The exchange failed, or a mean of the bucket is NaN
                or infinite.
        """
        if name not in self._sent:      # it has no elements
            return
        tensors, bucket = self._sent[name]
        if bucket not in self._nonfinite:
            with self._events.section('exchange'):
                self._settle()
                # The thread may be in the middle of something longer, or fail
                # until it is taken.
                if not bucket.finished and not self._sender.failure:
                    with self._thread.taken():
                        if not self._sender.failure:
                            self._queue.finish(bucket, use and self._feeder(
                                name, tensors, bucket, use))
                if self._sender.failure:
                    raise RuntimeError('the exchange failed beside the '
                                       f'training: {self._sender.failure}')
                with self._events.section('decode'):
                    self._nonfinite[bucket] = bucket.decode(tensors)
        if self._nonfinite[bucket] and self._must_be_finite:
            raise here(self._state, self._nonfinite[bucket][0])
        self._gradients.write_back(name)

    def _feeder(self, name: str, tensors: Tensors, bucket: Bucket, use: Use
                ) -> Callable[[], bool] | None:
        """Feeds decoded ranges to the update; True while any remain."""
        if not self._gradients.is_in_place(name):
            return None
        number = tensors.names.index(name)
        gradient = tensors.gradients[number]
        given = 0

        def feed() -> bool:
            nonlocal given
            ranges = bucket.decoded()
            if given == len(ranges) or (
                    self._must_be_finite and bucket.coding
                    and bucket.coding.nonfinite):
                return False        # there is none, or it will be an error
            with self._events.section('update'):
                used = False
                while given < len(ranges) and not used:
                    part = tensors.elements(number, *ranges[given])
                    given += 1
                    if part.start < part.stop:
                        used = use(part.start, part.stop, gradient)
            return given < len(ranges)
        return feed
