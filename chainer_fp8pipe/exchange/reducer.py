"""Averages the gradients of all models of a communicator."""
# Two models (a generator and a discriminator) may have parameters of the same
# names; what is learnt from one must not be used for the other.  So a model's
# exchange is found by the model object, not by names.  A snapshot has no such
# object: who loads a state says which model it is for.
#
# A communicator's models share its ranks, its algorithm, and its turn, a lock.
# The main thread holds it while it averages gradients; the exchange's thread
# takes it in between, for one step at a time.
from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..allreduce.engine import Engine
from ..codecs import Codec
from ..intercept import ready_gradients
from ..mpi.watch import updates
from ..report.stream import EventStream
from .lockstep import Lockstep
from .model_exchange import ModelExchange, Saved
from .thread import exchange_thread

#: Called with a parameter and the array that will be its gradient.
Final = Callable[[chainer.Parameter, Any], None]


class Reducer:
    """Averages gradients of models.

    Args:
        comm: The ranks.
        algorithm: Makes buckets their mean.
        codec: Of gradients after the warm-up.
        events: Where to write what happens.
        options: The communicator's ``Options``, of which ``warmup``,
            ``bucket_bytes``, ``nonfinite`` and ``check_every`` count here.
        overlap: Buckets are sent during the backward pass.

    Attributes:
        ranks: The ranks, which hear when one of them raises alone.
        models: How many models' gradients were averaged.
        queues: Where models send their buckets, in the order in which all
            ranks have made them: models are sent early in an order of their
            own on each rank, so that each has its own.
    """

    def __init__(self, comm: MPI.Comm, algorithm: Engine, codec: Codec,
                 events: EventStream, options: Any, overlap: bool) -> None:
        self.ranks = Lockstep(comm)
        self.algorithm, self.codec, self.events = algorithm, codec, events
        self.options, self.overlap = options, overlap
        algorithm.listen = self.ranks.listen
        self.queues = [algorithm]
        self._exchanges: dict[int, ModelExchange] = {}  # by the model's id
        self.models = 0
        self._turn = threading.Lock()
        self._main_waits = False
        self._is_free = False

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """See :meth:`.CodecCommunicator.multi_node_mean_grad`."""
        with self.ranks.section():
            # All ranks come here with new models in the same order.
            exchange = self.known(model) or self._make(model, {})
            if exchange.number < 0:
                exchange.number = self.models
                self.models += 1
            exchange.mean(model, zero_fill)
            self.events.updates += 1
            updates.finished((id(self), exchange.number))

    @contextlib.contextmanager
    def announced(self, model: chainer.Link, loss_scale: float | None
                  ) -> Iterator[Final]:
        """See :meth:`.CodecCommunicator.announced`."""
        exchange = self.known(model) if self.overlap else None
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
        """Cancels a model's update under way; call it on all ranks."""
        if self.overlap:
            with self.ranks.section():
                self.withdraw(self.known(model))

    def withdraw(self, exchange: ModelExchange | None) -> bool:
        """Cancels an update that ranks may have begun; call it on all of them.

        What only some ranks have sent, the others answer with zeros, so that
        no message is left on its way.  If an exchange has failed, or the
        ranks' orders differ, the ranks are broken off instead.

        Returns:
            Whether any rank had sent anything.
        """
        with self.taken():
            mine = (0, False, None, 1.0) if exchange is None else (
                exchange.update.begun, bool(exchange.failure),
                exchange.signature, exchange.update.loss_scale or 1.0)
            begun, failures, signatures, factors = zip(
                *self.ranks.allgather(mine), strict=True)
            sent = max(begun)
            if any(failures) or (sent and len(set(signatures)) > 1):
                self.ranks.break_off()
            elif sent and exchange:
                exchange.send_zeros(sent, max(factors))
            if exchange:
                exchange.passes.averaged()
                exchange.end()
        return sent > 0

    def free(self) -> None:
        """Gives MPI's communicators, and the memory of wires, back."""
        self._is_free = True
        exchange_thread.drop(self)
        for exchange in self.exchanges:
            ready_gradients.unwatch(exchange)
            exchange.release()
        for queue in self.queues:
            queue.free()
        self.ranks.free()

    # --- models --------------------------------------------------------------

    @property
    def exchanges(self) -> list[ModelExchange]:
        """The exchanges of all models, the oldest first."""
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
        else:
            self._make(model, saved)

    def _make(self, model: chainer.Link, saved: Saved) -> ModelExchange:
        own, key = weakref.ref(self), id(model)     # no cycle

        def forget(dead: weakref.ref[chainer.Link]) -> None:
            reducer = own()
            # Another model may be there by now; a lock may be held.
            if reducer and not reducer.overlap and (
                    (found := reducer._exchanges.get(key))
                    and found.reference is dead):
                del reducer._exchanges[key]
        exchange = ModelExchange(weakref.ref(model, forget), self)
        exchange.load(saved)
        for key_of, dead in list(self._exchanges.items()):
            if dead.reference() is None:
                del self._exchanges[key_of]
                if not dead.busy and not dead.failure:
                    ready_gradients.unwatch(dead)
                else:       # its queue is not for others
                    self._exchanges[id(dead)] = dead
        self._exchanges[key] = exchange
        if self.overlap:
            ready_gradients.watch(exchange)
        return exchange

    def unused_queue(self) -> Engine:
        """An engine that no model uses on any rank; a new one if need be."""
        if not self.overlap or self.algorithm.one_order:
            return self.algorithm
        taken = [exchange.queue for exchange in self.exchanges]
        used = self.ranks.allgather([not queue.idle or queue in taken
                                     for queue in self.queues])
        place = [*map(any, zip(*used, strict=True)), False].index(False)
        if place == len(self.queues):
            self.queues.append(self.algorithm.another())
            self.queues[-1].listen = self.ranks.listen
        return self.queues[place]

    # --- turns of the main thread and of the exchange's ----------------------

    def wake(self) -> None:
        """Tells the exchange's thread that :meth:`step` has work."""
        exchange_thread.wake(self)
        for queue in self.queues:   # a step under way must see it, too
            queue.interrupt()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A ``with`` block during which the exchange's thread stands still."""
        if not self.overlap:
            yield               # there is none
            return
        try:
            self._main_waits = True
            for queue in self.queues:
                queue.interrupt()
            with self._turn:
                self._main_waits = False
                yield
        finally:        # also where the wait is interrupted
            self._main_waits = False

    @property
    def busy(self) -> list[ModelExchange]:
        """Those for which :meth:`step` has something to do."""
        return [] if self._is_free else [
            exchange for exchange in self.exchanges if exchange.busy]

    def step(self, alone: bool) -> bool:
        """Sends and receives a little, in the exchange's thread.

        Args:
            alone: No other reducer is busy, so that a step may take a while.

        Returns:
            Whether anything moved.
        """
        if self._main_waits or not self._turn.acquire(
                timeout=0.05 if alone else 1e-3):
            return False
        try:
            busy, moved = self.busy, False
            if not busy:
                return False
            self.events.hide()
            with self.events.section('exchange'):
                for exchange in busy:
                    try:
                        moved |= exchange.step(alone and len(busy) == 1)
                    except Exception:       # the main thread raises it
                        exchange.failure = traceback.format_exc()
            return moved
        finally:
            self._turn.release()


def threads_are_allowed(comm: MPI.Comm) -> bool:
    """Whether threads of all ranks may call MPI at any time."""
    level = numpy.array(MPI.Query_thread(), numpy.int32)
    comm.Allreduce(MPI.IN_PLACE, level, MPI.MIN)
    return int(level) >= MPI.THREAD_MULTIPLE
