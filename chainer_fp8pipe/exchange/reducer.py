"""The mean of a model's gradients over all ranks."""
# One machine for three moments of waiting.  An update's buckets are sent in
# the order that the model's exchange has; then they are waited for.
#
#   overlap=False           all are sent and waited for in mean().
#   overlap=True            from the third update on, buckets are sent during
#                           the backward pass by the exchange's thread, as
#                           soon as their gradients are final (ModelExchange);
#                           mean() sends the rest and waits for all.
#   overlap='next_forward'  mean() sends the rest and returns.  Who reads a
#                           parameter, usually the next forward pass, waits
#                           for that parameter's bucket, and updates the
#                           parameter then (DeferredUpdate).
#
# The results are the same bits in all three.
#
# Ranks agree once per update: a digest of names, shapes, dtypes, loss scale
# and number of updates, 16 bytes in one all-reduce (mpi/agreement).  With
# next_forward a rank that has sent everything does not wait for it: the
# answer is looked at before the first mean is used.  Beside that, codecs with
# scales find the largest of all ranks for each bucket; times are averaged
# after 5, 10, 20, ... updates; replicas are compared every 100.
#
# What is sent early may be wrong: gradients are changed after backward, or a
# rank has raised.  Then all ranks count what each has sent, send zeros for the
# rest, and drop the means, so that nothing is left on its way; where that
# cannot be, the communicator refuses to go on, on all ranks.
from __future__ import annotations

import contextlib
import functools
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..allreduce.engine import Bucket, Engine
from ..codecs import Codec, State, Tensors
from ..intercept import ready_gradients
from ..mpi.agreement import Agreement, Signature, raised_by_all
from ..mpi.watch import updates
from ..report.stream import EventStream
from .deferred_update import DeferredUpdate, Use
from .drift import ReplicaDrift, compare
from .gradients import SAME_MODEL, Gradients
from .lockstep import Lockstep
from .model_exchange import ModelExchange, Saved, Update
from .thread import exchange_thread

SAME_GRADIENTS = (SAME_MODEL + ' If some ranks do not use a parameter in '
                  'some updates, pass zero_fill=True to '
                  'create_multi_node_optimizer.')
_ONE_MODEL = ("overlap=True with algorithm='aggregator' is for one model; "
              'pass overlap=False')
_FINITE = ('Lower the learning rate, clip gradients, scale the loss, or pass '
           "nonfinite='pass' to create_communicator")

#: Is told of a parameter and of the array that will be its gradient.
Final = Callable[[chainer.Parameter, Any], None]


class NonfiniteMean(RuntimeError):
    """A mean is NaN or infinite, which the option ``nonfinite`` forbids."""


class Reducer:
    """Averages gradients of models.

    Args:
        comm: The ranks.
        algorithm: Makes buckets their mean.
        codec: Of gradients after the warm-up.
        warm_up: Updates in float32.
        events: Where to write what happens.
        bucket_bytes: Bytes of float32 of gradients that travel together; 0:
            all.
        nonfinite: Means that are NaN or infinite are errors (``'raise'``),
            are not (``'pass'``), or are unless the loss is scaled dynamically
            (``'auto'``).
        check_every: Updates from one comparison of all replicas to the next;
            0: there is none.
        overlap: ``False``, ``True`` or ``'next_forward'``, see above.
    """

    def __init__(self, comm: MPI.Comm, algorithm: Engine, codec: Codec,
                 warm_up: int, events: EventStream, bucket_bytes: int,
                 nonfinite: str, check_every: int, overlap: bool | str
                 ) -> None:
        self._lockstep = Lockstep(comm)
        self._algorithm = algorithm
        self.codec, self._warm_up = codec, warm_up
        self._events = events
        self._bucket_bytes = bucket_bytes
        self._nonfinite = nonfinite
        self._check_every = check_every
        self._overlap = overlap
        self._defers = overlap == 'next_forward'
        # By the model's id.
        self._exchanges: dict[int, ModelExchange] = {}
        self._averaged = 0      # models
        # One for each model whose buckets are sent early, in the order in
        # which all ranks have made them: models are sent early in an order of
        # their own on each rank.
        self._queues = [self._listening(algorithm)]
        self._unsettled: tuple[Agreement, ModelExchange] | None = None
        self._withdrawn: Agreement | None = None
        self._turn = threading.Lock()
        self._main_waits = False
        self._is_free = False

    def complete(self) -> None:
        """Waits for what updates have left to be waited for."""
        with contextlib.ExitStack() as stack:
            for exchange in self.exchanges:     # even after one has raised
                stack.callback(exchange.complete)

    @contextlib.contextmanager
    def announced(self, model: chainer.Link, loss_scale: float | None
                  ) -> Iterator[Final]:
        """See :meth:`.CodecCommunicator.announced`."""
        exchange = self.known(model) if self._overlap else None
        names: dict[int, str] = {}
        if exchange and exchange.announce(loss_scale):
            names = {id(parameter): name
                     for name, parameter in exchange.parameters().items()}

        def final(parameter: chainer.Parameter, gradient: Any) -> None:
            if exchange and id(parameter) in names:
                exchange.final(names[id(parameter)], gradient)
        with ready_gradients.unwatched():
            yield final

    def discard(self, model: chainer.Link) -> None:
        """Drops what has been sent of a model; call it on all ranks."""
        if not self._overlap:
            return
        with self._lockstep.section():
            exchange = self.known(model)
            if exchange:
                exchange.complete()
                exchange.update.thaw()
            self._settle_last()
            self._withdraw(exchange)

    def free(self) -> None:
        """Gives MPI's communicators, and the memory of wires, back."""
        try:
            self.complete()
        finally:
            self._is_free = True
            exchange_thread.drop(self)
            for exchange in self.exchanges:
                ready_gradients.unwatch(exchange)
                exchange.release()
            for queue in self._queues:
                queue.free()
            self._lockstep.free()

    # --- a mean --------------------------------------------------------------

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """See :meth:`.CodecCommunicator.multi_node_mean_grad`."""
        with self._lockstep.section():
            exchange = self._of(model)
            exchange.complete()
            with self._events.section('exchange'):
                exchange.update.thaw()
                gradients = Gradients(model, zero_fill)
                is_new = (exchange.queue is None
                          or gradients.sizes != exchange.sizes)
                # Tied parameters share memory: an early update of one would
                # corrupt what the other's mean is decoded with.
                defers = (self._defers and exchange.ready and not is_new
                          and not gradients.share_parameters)
                settle = self._agree(exchange, gradients, is_new, defers)
                if self._check_every:
                    self._compare_sometimes(exchange, model, settle)
                exchange.see(gradients.loss_scale)
                if is_new:
                    exchange.follow(gradients.sizes, self._bucket_bytes)
                    exchange.queue = exchange.queue or self._unused_queue()
                state, update = exchange.current, exchange.update
                self._exchange(exchange, gradients, settle if defers else None)
                if self._overlap and not is_new:
                    self._learn(exchange, settle)
            if not defers:
                if any(update.nonfinite.values()) and self._must_be_finite(
                        exchange):
                    raise self._nonfinite_error(state, update)
                gradients.write_back()
            exchange.updates += 1
            self._events.updates += 1
            updates.finished((id(self), exchange.number))
            if self._defers and exchange.current is not state:
                exchange.ready = False      # buckets will take another time

    def _exchange(self, exchange: ModelExchange, gradients: Gradients,
                  settle: Callable[[], None] | None) -> None:
        """Sends the rest; waits, or with ``settle`` leaves that for later."""
        with self.taken():
            if exchange.failure:    # since the ranks have begun to agree
                raise RuntimeError('the exchange failed beside backward: '
                                   f'{exchange.failure}')
            start = time.perf_counter()
            exchange.send_rest(gradients)
            if settle:
                self._defer(exchange, gradients, settle)
            else:
                for bucket in exchange.update.tensors:
                    self._receive(exchange, exchange.update, bucket)
                if not exchange.ready:
                    exchange.seconds = time.perf_counter() - start
            exchange.averaged()

    def _receive(self, exchange: ModelExchange, update: Update,
                 bucket: Bucket, beside: Callable[[], bool] | None = None
                 ) -> None:
        """Waits for a bucket's mean, and writes it into the gradients."""
        assert exchange.queue is not None
        if not bucket.finished:
            exchange.queue.finish(bucket, beside)
        with self._events.section('decode'):
            update.nonfinite[bucket] = bucket.decode(update.tensors[bucket])

    def _must_be_finite(self, exchange: ModelExchange) -> bool:
        """Whether an update must not go on with a mean that is not finite."""
        if self._nonfinite == 'auto':
            return not exchange.scaling_is_dynamic
        return self._nonfinite == 'raise'

    def _nonfinite_error(self, state: State, update: Update
                         ) -> NonfiniteMean:
        """The same error on all ranks, before any parameter is updated."""
        buckets = [bucket for bucket, names in update.nonfinite.items()
                   if names]
        name = update.nonfinite[buckets[0]][0]
        # All ranks have the wires alike, so that the others are not here.
        if all(bucket.wire_is_finite for bucket in buckets):
            return NonfiniteMean(
                f'the value of {name}, or its product with the ratio, is '
                f'not finite on rank {self._lockstep.comm.rank}. No parameter '
                f'was updated here. {_FINITE}.')
        culprits = [
            f'{found[0]} is not finite in {state.codec.name} on rank {rank}'
            + (f' (and {len(found) - 1} more)' if found[1:] else '')
            for rank, found in enumerate(
                self._lockstep.allgather(state.nonfinite)) if found]
        text = '; '.join(culprits) or (
            f'the sum of the gradients of {name} overflowed')
        return raised_by_all(NonfiniteMean(
            f'{text}. No parameter was updated. {_FINITE}.'))

    # --- means that are waited for at an access ------------------------------

    def _defer(self, exchange: ModelExchange, gradients: Gradients,
               settle: Callable[[], None]) -> None:
        """Leaves the means to whoever looks at a parameter first.

        Until then the exchange's thread goes on with them.
        """
        update, state = exchange.update, exchange.current
        must_be_finite = self._must_be_finite(exchange)
        bucket_of = {name: bucket for bucket, tensors in update.tensors.items()
                     for name in tensors.names}

        def finish(name: str, use: Use | None) -> None:
            bucket = bucket_of.get(name)
            if bucket is None:      # the parameter has no elements
                return
            if bucket not in update.nonfinite:
                with self._events.section('exchange'):
                    settle()
                    beside = (self._feeder(update.tensors[bucket], bucket,
                                           name, use, must_be_finite)
                              if use and gradients.is_in_place(name) else None)
                    # The thread may be in the middle of something longer, or
                    # fail until it is taken.
                    with (contextlib.nullcontext() if bucket.finished
                          or exchange.failure else self.taken()):
                        if exchange.failure:
                            raise RuntimeError(
                                'the exchange failed beside the training: '
                                f'{exchange.failure}')
                        self._receive(exchange, update, bucket, beside)
            if update.nonfinite[bucket] and must_be_finite:
                raise _error_at_access(update.nonfinite[bucket][0], state)
            gradients.write_back(name)

        exchange.defer(DeferredUpdate(
            gradients.parameters, finish, self._lockstep.tell),
            gradients.parameters)

    def _feeder(self, tensors: Tensors, bucket: Bucket, name: str, use: Use,
                must_be_finite: bool) -> Callable[[], bool]:
        """Feeds decoded ranges to the update; True while any remain."""
        number = tensors.names.index(name)
        gradient = tensors.gradients[number]
        given = 0

        def feed() -> bool:
            nonlocal given
            ranges = bucket.decoded()
            if given == len(ranges) or (must_be_finite and bucket.coding
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

    # --- models --------------------------------------------------------------

    # Two models (a generator and a discriminator) may have parameters of the
    # same names; what is learnt from one must not be used for the other.  So
    # a model is known by itself.  Whoever saves a state knows what its model
    # is for, and gives it to the model that is for the same.

    @property
    def exchanges(self) -> list[ModelExchange]:
        """Of all models, in the order in which they came."""
        return list(self._exchanges.values())

    def known(self, model: chainer.Link) -> ModelExchange | None:
        """The exchange of ``model``; None if it is new."""
        found = self._exchanges.get(id(model))
        return found if found and found.reference() is model else None

    def load(self, model: chainer.Link, saved: Saved) -> None:
        """Gives a model what :meth:`.ModelExchange.save` returned."""
        exchange = self.known(model)
        if exchange:
            exchange.load(saved)
            return
        exchange = self._make(model)
        exchange.load(saved)
        self._remember(model, exchange)

    def _of(self, model: chainer.Link) -> ModelExchange:
        """The exchange of ``model``, whose gradients are to be averaged.

        All ranks must come here with new models in the same order.
        """
        exchange = self.known(model)
        if exchange is None:
            exchange = self._make(model)
            self._remember(model, exchange)
        if exchange.number < 0:
            exchange.number = self._averaged
            self._averaged += 1
        return exchange

    def _make(self, model: chainer.Link) -> ModelExchange:
        own, key = weakref.ref(self), id(model)     # no cycle

        def wake() -> None:
            reducer = own()
            if reducer:     # whose thread's step ends, to see what is new
                exchange_thread.wake(reducer)
                for exchange in reducer.exchanges:
                    if exchange.queue:
                        exchange.queue.interrupt()

        def forget(dead: weakref.ref[chainer.Link]) -> None:
            reducer = own()
            # Another model may be there by now; a lock may be held.
            if reducer and not reducer._overlap and (
                    (found := reducer._exchanges.get(key))
                    and found.reference is dead):
                del reducer._exchanges[key]
        return ModelExchange(weakref.ref(model, forget), self.codec,
                             self._warm_up, wake)

    def _remember(self, model: chainer.Link, exchange: ModelExchange) -> None:
        for key, dead in list(self._exchanges.items()):
            if dead.reference() is None:
                with contextlib.suppress(Exception):    # nobody's concern
                    dead.complete()
                del self._exchanges[key]
                if dead.idle and not dead.failure:
                    ready_gradients.unwatch(dead)
                else:       # its queue is not for others
                    self._exchanges[id(dead)] = dead
        self._exchanges[id(model)] = exchange
        if self._overlap:
            ready_gradients.watch(exchange)

    # --- agreement -----------------------------------------------------------

    def _agree(self, exchange: ModelExchange, gradients: Gradients,
               is_new: bool, defers: bool) -> Callable[[], None]:
        """Returns what raises if the ranks are not in agreement.

        That is called before, unless this rank has sent all and its means are
        waited for later: then it need not wait for the others' word.
        """
        entries = {**gradients.entries,
                   # A rank resumed from another snapshot must not go unseen.
                   'the number of updates': str(exchange.updates),
                   'the number of the model': str(exchange.number)}
        if self._overlap:
            entries['overlap'] = ('new' if is_new else 'ready'
                                  if exchange.ready else 'known')
            problem = gradients.problem or exchange.problem(gradients)
            if exchange.number and self._algorithm.one_order:
                problem = problem or _ONE_MODEL
            gradients.problem = problem
        # Those of two models are settled in the order in which they were
        # begun: how is a matter of more collective calls.
        if self._unsettled:
            self._settle_last()
        agreement = Agreement(
            self._lockstep.comm, Signature(entries), gradients.problem,
            SAME_GRADIENTS, wait=self._lockstep.wait)
        if not self._overlap:
            agreement.wait()
            return agreement.wait
        self._unsettled = agreement, exchange
        settle = functools.partial(self._settle, agreement, exchange)
        if gradients.problem or not (
                defers and exchange.update.ready == len(exchange.slices)):
            settle()
        return settle

    def _settle(self, agreement: Agreement, exchange: ModelExchange) -> None:
        """Raises if the ranks are not in agreement, each time."""
        try:
            agreement.wait()
        except ValueError:
            if self._withdrawn is not agreement:
                self._withdrawn = agreement
                # A deferred exchange cannot be cancelled.
                if self._withdraw(exchange, exchange.deferred is not None):
                    self._lockstep.break_off()
            raise

    def _settle_last(self) -> None:
        """As above, without raising: who looks at that model hears of it."""
        if self._unsettled:
            with contextlib.suppress(ValueError):
                self._settle(*self._unsettled)
            self._unsettled = None

    def _withdraw(self, exchange: ModelExchange | None, failed: bool = False
                  ) -> bool:
        """Ends what has begun of an update that is not to be.

        A rank may have sent what others have not: they send zeros in its
        place, so that nothing is left on its way; if any has ``failed``, all
        is left as it is.  Returns whether anything had been sent.
        """
        with self.taken():
            mine = (0, failed, None, 1.0) if exchange is None else (
                exchange.update.begun, failed or bool(exchange.failure),
                exchange.signature, exchange.update.loss_scale or 1.0)
            begun, failures, signatures, factors = zip(
                *self._lockstep.allgather(mine), strict=True)
            sent = max(begun)
            if any(failures) or (sent and len(set(signatures)) > 1):
                self._lockstep.break_off()      # and all is left as it is
            elif sent and exchange:
                exchange.send_zeros(sent, max(factors))
            if exchange:
                exchange.averaged()
        return sent > 0

    def _compare_sometimes(self, exchange: ModelExchange,
                           model: chainer.Link, settle: Callable[[], None]
                           ) -> None:
        """Raises ReplicaDrift where replicas differ, when it is time."""
        if (not exchange.updates or exchange.updates % self._check_every
                or self._lockstep.comm.size == 1):
            return
        settle()        # or not all ranks may come here
        try:
            compare(model, exchange.updates, self._lockstep)
        except ReplicaDrift:
            if self._overlap:
                self._withdraw(exchange)
            raise

    # --- queues, and the order of buckets ------------------------------------

    def _listening(self, algorithm: Engine) -> Engine:
        algorithm.listen = self._lockstep.listen
        return algorithm

    def _unused_queue(self) -> Engine:
        """One of a model that is no more on any rank, or a new one."""
        if not self._overlap or self._algorithm.one_order:
            return self._queues[0]
        used = numpy.array(
            [not queue.idle or any(exchange.queue is queue
                                   for exchange in self.exchanges)
             for queue in self._queues] + [False])
        self._lockstep.allreduce(used, MPI.LOR)
        place = int(numpy.flatnonzero(~used)[0])
        if place == len(self._queues):
            self._queues.append(self._listening(self._algorithm.another()))
        return self._queues[place]

    def _learn(self, exchange: ModelExchange, settle: Callable[[], None]
               ) -> None:
        """Lets buckets be sent early from now on, and in what order.

        The order is the same on all ranks.
        """
        is_first = not exchange.ready
        is_time = exchange.times.keep(exchange.ready)
        exchange.ready = True
        if self._algorithm.one_order or not (
                is_first or is_time and self._defers):
            return
        settle()        # or not all ranks may come here
        # A rank that is late with its first gradient has less time between
        # that and the next: the longest of these times are not those that
        # pass between the last rank's gradients, but their means nearly are.
        found = numpy.array([*exchange.times.usual(sorted(exchange.sizes)),
                             exchange.seconds])
        self._lockstep.allreduce(found, MPI.SUM)
        exchange.choose_order((found / self._lockstep.comm.size).tolist(),
                              is_first, self._defers)

    # --- turns ---------------------------------------------------------------

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A ``with`` block during which the exchange's thread stands still."""
        try:
            self._main_waits = True
            for exchange in tuple(self._exchanges.values()):
                if exchange.queue:
                    exchange.queue.interrupt()
            with self._turn:
                self._main_waits = False
                yield
        finally:        # also where the wait is interrupted
            self._main_waits = False

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return not self._is_free and any(
            not exchange.idle and not exchange.failure
            for exchange in self.exchanges)

    def step(self, alone: bool) -> bool:
        """What the exchange's thread does; whether anything moved.

        Args:
            alone: No other reducer is busy, so that a step may take a while.
        """
        if self._main_waits or not self._turn.acquire(
                timeout=0.05 if alone else 1e-3):
            return False
        try:
            if self._is_free:
                return False
            self._events.hide()
            busy = [exchange for exchange in self.exchanges
                    if not exchange.idle]
            moved = False
            with self._events.section('exchange'):
                for exchange in busy:
                    try:
                        moved |= exchange.step(alone and len(busy) == 1)
                    except Exception:       # the main thread raises it
                        exchange.failure = traceback.format_exc()
            return moved
        finally:
            self._turn.release()


def _error_at_access(name: str, state: State) -> NonfiniteMean:
    """The error of a rank that has looked at a mean, maybe alone."""
    reason = ('it is not so on this rank, but on another, or the sum '
              'overflowed')
    if state.nonfinite:
        reason = (f'{state.nonfinite[0]} is not finite in '
                  f'{state.codec.name} on this rank')
    return raised_by_all(NonfiniteMean(     # each at its own look
        f'the mean of the gradients of {name} is not finite: {reason}. '
        'Other parameters may have been updated: go on from a snapshot, '
        f'with a new model and communicator. {_FINITE}; with overlap=True '
        'no parameter is updated, and all ranks name the rank'))


def threads_are_allowed(comm: MPI.Comm) -> bool:
    """Whether threads of all ranks may call MPI at any time."""
    level = numpy.array(MPI.Query_thread(), numpy.int32)
    comm.Allreduce(MPI.IN_PLACE, level, MPI.MIN)
    return int(level) >= MPI.THREAD_MULTIPLE
