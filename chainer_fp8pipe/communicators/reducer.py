"""The mean of a model's gradients over all ranks."""
from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ..allreduce import Planned, Statistics
from ..allreduce.aggregated import Aggregated
from ..codecs import Codec
from ..exchange.exchange import Exchange, Transfer
from ..exchange.gradients import Gradients
from ..exchange.model_state import ModelState, ModelStates
from ..exchange.nonfinite import everywhere, must_be_finite
from ..exchange.parameter_checks import SAME_MODEL
from ..intercept import ready_gradients
from ..mpi.agreement import Agreement, Signature, agree
from ..overlap.bucket_sender import BucketSender
from ..overlap.exchange_thread import ExchangeThread
from ..overlap.late import Late, Sent
from .options import NEXT_FORWARD, ExchangeOptions

_SAME_GRADIENTS = (SAME_MODEL + ' If some ranks do not use a parameter in '
                   'some updates, pass zero_fill=True to '
                   'create_multi_node_optimizer.')
_BROKEN = ('an earlier update of this communicator failed after part of it '
           'had been exchanged; make a new communicator and load a snapshot')
_ONE_MODEL = ("overlap=True with algorithm='aggregator' is for one model; "
              'pass overlap=False')

#: Is told of a parameter and of the array that will be its gradient.
Final = Callable[[chainer.Parameter, Any], None]


class _Outcome(NamedTuple):
    codec: Codec
    nonfinite: list[str]    # parameters whose mean is NaN or infinite
    wire_is_finite: bool
    seconds: float          # that the exchange took


class Reducer:
    """What a communicator does to average gradients.

    Args:
        comm: The ranks.
        options: Checked options.
        algorithm: See :func:`.algorithms.make_algorithm`.
        models: What is remembered of each model.
        statistics: Counters to add to.
        overlap: Begin during backward; None: do not.
    """

    def __init__(self, comm: MPI.Comm, options: ExchangeOptions,
                 algorithm: Any, models: ModelStates, statistics: Statistics,
                 overlap: ExchangeThread | None) -> None:
        self._comm = comm
        self._options = options
        self._algorithm = algorithm
        self._models = models
        self._statistics = statistics
        self._overlap = overlap
        self._exchange = Exchange(comm, algorithm, statistics)
        self._is_broken = False

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """See :meth:`.CodecCommunicator.multi_node_mean_grad`."""
        if self._is_broken:
            raise RuntimeError(_BROKEN)
        state = self._models.of(model)
        early = self._overlap.of(model, state) if self._overlap else None
        if early:
            early.complete()
        with self._statistics.section('exchange'):
            if early:
                early.update.thaw()
            gradients = Gradients(model, zero_fill)
            stage = early.stage(gradients.sizes) if early else ''
            settle = self._begin_to_agree(state, gradients, early, stage)
            # Who looks at one of two parameters that are one array would have
            # it changed while the other one's mean is made with it.
            later = (self._defers and stage == 'ready'
                     and not gradients.share_parameters)
            # Ranks that have sent all need not wait for the others' word.
            if not (early and later and early.update.handed == len(
                    early.order) and not gradients.problem):
                settle()
            state.see(gradients.loss_scale)
            if early and stage == 'new':
                early.follow(gradients.sizes)
            outcome = self._averaged(state, gradients, early,
                                     settle if later else None)
            if early and stage != 'new':
                self._learn(early, outcome.seconds, settle)
        if outcome.nonfinite and must_be_finite(self._options.nonfinite,
                                                state):
            raise everywhere(self._comm, outcome.codec, outcome.nonfinite,
                             outcome.wire_is_finite)
        if not (early and early.deferred):
            gradients.write_back()
        state.warm_up.done += 1
        if early and self._defers and (
                state.warm_up.current is not outcome.codec):
            early.ready = False     # buckets will take another time
        self._statistics.updates += 1

    def complete(self) -> None:
        """Waits for what updates have left to be waited for."""
        if self._overlap:
            self._overlap.complete()

    @contextlib.contextmanager
    def announced(self, model: chainer.Link, loss_scale: float | None
                  ) -> Iterator[Final]:
        """See :meth:`.CodecCommunicator.announced`."""
        early = self._overlap.known(model) if self._overlap else None
        names: dict[int, str] = {}
        if early and early.announce(loss_scale):
            names = {id(parameter): name
                     for name, parameter in early.parameters().items()}

        def final(parameter: chainer.Parameter, gradient: Any) -> None:
            if early and id(parameter) in names:
                early.final(names[id(parameter)], gradient)
        with ready_gradients.unwatched():
            yield final

    def discard(self, model: chainer.Link) -> None:
        """Drops what has been sent of a model; call it on all ranks."""
        early = self._overlap.known(model) if self._overlap else None
        if early:
            early.complete()
        agree(self._comm, Signature({
            'model': str(early.number) if early else 'not averaged yet'}))
        if early:
            early.update.thaw()
            self._withdraw(early)

    def restart(self) -> None:
        """The models' states have been replaced."""
        if self._overlap:
            self._overlap.forget()

    def free(self) -> None:
        """Ends the thread and gives MPI's communicators back."""
        try:
            self.complete()
        finally:
            self._free()

    def _free(self) -> None:
        if self._overlap:
            for early in self._overlap.close():
                if early.exchange and early.exchange is not self._exchange:
                    early.exchange.algorithm.free()
                    early.exchange.free()
        self._exchange.free()
        self._algorithm.free()

    # --- before -------------------------------------------------------------

    def _begin_to_agree(self, state: ModelState, gradients: Gradients,
                        early: BucketSender | None, stage: str
                        ) -> Callable[[], None]:
        """Returns what raises if the ranks are not in agreement."""
        # A rank resumed from another snapshot must not go unseen.
        entries = {**gradients.entries,
                   'the number of updates': str(state.warm_up.done)}
        problem = gradients.problem
        if early:
            problem = problem or early.problem(gradients)
            if state.number and isinstance(self._algorithm, Aggregated):
                problem = problem or _ONE_MODEL
            entries['the number of the model'] = str(state.number)
            entries['overlap'] = stage
        gradients.problem = problem
        agreement = Agreement(self._comm, Signature(entries), problem,
                              _SAME_GRADIENTS)
        withdrawn = False

        def settle() -> None:
            nonlocal withdrawn
            try:
                agreement.wait()
            except ValueError:
                if early and not withdrawn:
                    withdrawn = True
                    # What is wanted later cannot be taken back.
                    self._is_broken = self._withdraw(
                        early, early.deferred is not None)
                raise
        return settle

    def _withdraw(self, early: BucketSender, failed: bool = False) -> bool:
        """Ends what has begun of an update that is not to be.

        A rank may have sent what others have not: they send zeros in its
        place, so that nothing is left on its way; if any has ``failed``, all
        is left as it is.  Returns whether anything had been sent.
        """
        assert self._overlap
        with self._overlap.taken():
            number = early.signature
            found = numpy.array([early.update.begun,
                                 failed or bool(early.failure),
                                 number, -number], numpy.int64)
            scale = numpy.array(early.update.factor)
            self._comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
            self._comm.Allreduce(MPI.IN_PLACE, scale, MPI.MAX)
            sent, any_failed, largest, smallest = found.tolist()
            if any_failed or (sent and largest != -smallest):
                self._is_broken = True      # and left as it is
            elif sent:
                early.fill(sent, float(scale))
            early.averaged()
        return self._is_broken or sent > 0

    # --- the exchange -------------------------------------------------------

    def _averaged(self, state: ModelState, gradients: Gradients,
                  early: BucketSender | None, settle: Callable[[], None] | None
                  ) -> _Outcome:
        """One mean of all gradients, in place.

        With ``settle`` it is on its way; that is then called before it is
        used.
        """
        codec, start = state.warm_up.current, time.perf_counter()
        turn = (self._overlap.taken() if self._overlap
                else contextlib.nullcontext())
        with turn:
            if early and early.ready and early.exchange:
                exchange = early.exchange
                sent = self._send_rest(gradients, early)
            else:
                exchange = self._exchange
                sent = self._send(state, gradients)
            if early and settle:
                self._defer(state, gradients, early, sent, settle)
                outcome = _Outcome(codec, [], True, 0.0)
            else:
                outcome = self._receive(codec, exchange, sent, start)
            if early:
                early.averaged()
        return outcome

    def _send(self, state: ModelState, gradients: Gradients) -> list[Sent]:
        """Sends all buckets."""
        assert gradients.tensors is not None        # or agree() had raised
        codec, sent = state.warm_up.current, []
        if gradients.tensors.size:
            codec.start(gradients.tensors.loss_scale)
        for number, names in enumerate(state.buckets(
                gradients.sizes, self._options.bucket_bytes)):
            part = gradients.part(names)
            if part.size:
                transfer = Transfer(codec, part, state.wire(
                    number, codec, part.xp, part.size), decodes=True)
                self._exchange.submit(transfer)
                self._exchange.advance()
                sent.append(Sent(part, transfer))
        return sent

    def _send_rest(self, gradients: Gradients, early: BucketSender
                  ) -> list[Sent]:
        """Sends what has not been sent early; returns all."""
        assert early.exchange
        parts = [gradients.part(names) for names in early.buckets]
        for place, piece in enumerate(early.order):
            if place >= early.update.begun and parts[piece.bucket].size:
                early.send(piece, parts[piece.bucket], decodes=True)
                early.exchange.advance()
        sent = [Sent(parts[number], transfer)
                for number, transfer in early.update.sent.items()]
        for tensors, transfer in sent:      # which backward could not let
            transfer.begin_decoding(tensors)
        return sent

    def _receive(self, codec: Codec, exchange: Exchange, sent: list[Sent],
                 start: float) -> _Outcome:
        nonfinite: list[str] = []
        wire_is_finite = True
        for tensors, transfer in sent:
            exchange.finish(transfer)
            with self._statistics.section('decode'):
                found = transfer.decode(tensors)
                if found:
                    wire_is_finite &= codec.is_finite(transfer.wire)
            nonfinite += found
        return _Outcome(codec, nonfinite, wire_is_finite,
                        time.perf_counter() - start)

    @property
    def _defers(self) -> bool:
        """Updates return before their exchange is over."""
        return bool(self._overlap) and self._options.overlap == NEXT_FORWARD

    def _defer(self, state: ModelState, gradients: Gradients,
               early: BucketSender,
               sent: list[Sent], settle: Callable[[], None]) -> None:
        """Lets parameters be waited for when they are wanted."""
        assert self._overlap
        assert early.exchange
        late = Late(early, self._overlap, early.exchange,
                    state.warm_up.current, sent, gradients,
                    must_be_finite(self._options.nonfinite, state),
                    self._statistics, settle)
        early.defer(gradients.parameters, late.finish)

    def _learn(self, early: BucketSender, seconds: float,
               settle: Callable[[], None]) -> None:
        """Lets buckets be sent early from now on, and in what order.

        Args:
            early: Of a model that is known.
            seconds: How long all its buckets together travelled; not used if
                they were sent early.
            settle: Raises if the ranks are not in agreement on this update.
        """
        is_first, is_time = not early.ready, early.observe()
        early.ready = True
        if isinstance(self._algorithm, Aggregated):
            # Aggregators round at random by the number of the job.
            early.exchange = self._exchange
            return
        if early.exchange is None:
            # Models are sent early in an order of their own on each rank, so
            # each has an executor of its own.
            same = self._algorithm
            early.exchange = Exchange(self._comm, Planned(
                self._comm, same.plans, self._statistics, same.framing),
                self._statistics)
        if is_first:
            early.seconds = seconds
        elif is_time and self._defers:
            settle()        # or not all ranks may come here
        else:
            return
        self._reckon(early, is_first)

    def _reckon(self, early: BucketSender, is_first: bool) -> None:
        """Chooses the order of buckets, the same on all ranks."""
        # A rank that is late with its first gradient has less time between
        # that and the next: the longest of these times are not those that
        # pass between the last rank's gradients, but their means nearly are.
        found = numpy.array([*early.observed(), early.seconds])
        self._comm.Allreduce(MPI.IN_PLACE, found)
        self._comm.Bcast(found)     # to the last bit
        *finals, seconds = (found / self._comm.size).tolist()
        if is_first or all(map(math.isfinite, finals)):
            early.reckon(finals, seconds if self._defers else None)
