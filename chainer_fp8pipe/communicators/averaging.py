"""The mean of a model's gradients over all ranks."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chainer
import numpy
from mpi4py import MPI

from ..allreduce import Planned, Signature, Statistics, agree
from ..allreduce.aggregated import Aggregated
from ..codecs import Codec, Tensors
from . import backward_watch
from .early import Early
from .exchange import Exchange, Transfer
from .gradients import Gradients
from .model_state import ModelState, ModelStates
from .options import ExchangeOptions
from .overlap import Overlap
from .parameters import SAME_MODEL

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


class Averaging:
    """What a communicator does to average gradients.

    Args:
        comm: The ranks.
        options: Checked options.
        algorithm: See :func:`.composition.make_algorithm`.
        models: What is remembered of each model.
        statistics: Counters to add to.
        overlap: Begin during backward; None: do not.
    """

    def __init__(self, comm: MPI.Comm, options: ExchangeOptions,
                 algorithm: Any, models: ModelStates, statistics: Statistics,
                 overlap: Overlap | None) -> None:
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
        with self._statistics.section('exchange'):
            gradients = self._agreed(model, state, early, zero_fill)
            state.see(gradients.loss_scale)
            stage = early.stage(gradients.sizes) if early else ''
            if early and stage == 'new':
                early.follow(gradients.sizes)
            outcome = self._send(state, gradients, early)
            if early and stage == 'known':
                self._let_begin(early)
        if outcome.nonfinite and self._must_be_finite(state):
            self._raise_nonfinite(outcome)
        gradients.write_back()
        state.warm_up.done += 1
        self._statistics.updates += 1

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
        with backward_watch.unwatched():
            yield final

    def discard(self, model: chainer.Link) -> None:
        """Drops what has been sent of a model; call it on all ranks."""
        early = self._overlap.known(model) if self._overlap else None
        agree(self._comm, Signature({
            'model': str(early.number) if early else 'not averaged yet'}))
        if early:
            early.thaw()
            self._withdraw(early)

    def restart(self) -> None:
        """The models' states have been replaced."""
        if self._overlap:
            self._overlap.forget()

    def free(self) -> None:
        """Ends the thread and gives MPI's communicators back."""
        if self._overlap:
            for early in self._overlap.close():
                if early.exchange and early.exchange is not self._exchange:
                    early.exchange.algorithm.free()
                    early.exchange.free()
        self._exchange.free()
        self._algorithm.free()

    # --- before -------------------------------------------------------------

    def _agreed(self, model: chainer.Link, state: ModelState,
                early: Early | None, zero_fill: bool) -> Gradients:
        """The gradients, if all ranks are in agreement."""
        if early:
            early.thaw()
        gradients = Gradients(model, zero_fill)
        # A rank resumed from another snapshot must not go unseen.
        entries = {**gradients.entries,
                   'the number of updates': str(state.warm_up.done)}
        problem = gradients.problem
        if early:
            problem = problem or early.problem(gradients)
            if state.number and isinstance(self._algorithm, Aggregated):
                problem = problem or _ONE_MODEL
            entries['the number of the model'] = str(state.number)
            entries['overlap'] = early.stage(gradients.sizes)
        try:
            agree(self._comm, Signature(entries), problem, _SAME_GRADIENTS)
        except ValueError:
            if early:
                self._is_broken = self._withdraw(early)
            raise
        return gradients

    def _withdraw(self, early: Early) -> bool:
        """Ends what has begun of an update that is not to be.

        A rank may have sent what others have not: they send zeros in its
        place, so that nothing is left on its way.  Returns whether anything
        had been sent.
        """
        assert self._overlap
        with self._overlap.taken():
            number = early.signature
            found = numpy.array([len(early.update.sent), bool(early.failure),
                                 number, -number], numpy.int64)
            scale = numpy.array(early.loss_scale)
            self._comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
            self._comm.Allreduce(MPI.IN_PLACE, scale, MPI.MAX)
            sent, failed, largest, smallest = found.tolist()
            if failed or (sent and largest != -smallest):
                self._is_broken = True      # and left as it is
            elif sent:
                early.fill(sent, float(scale))
            early.averaged()
        return self._is_broken or sent > 0

    # --- the exchange -------------------------------------------------------

    def _send(self, state: ModelState, gradients: Gradients,
              early: Early | None) -> _Outcome:
        """One mean of all gradients, in place."""
        codec = state.warm_up.current
        assert gradients.tensors is not None        # or agree() had raised
        turn = (self._overlap.taken() if self._overlap
                else contextlib.nullcontext())
        with turn:
            exchange, started = self._exchange, False
            sent: dict[int, Transfer] = {}
            buckets = state.buckets(gradients.sizes,
                                    self._options.bucket_bytes)
            order = list(range(len(buckets)))
            if early and early.ready and early.exchange:
                exchange, order = early.exchange, early.order
                sent, started = early.update.sent, early.update.started
            if gradients.tensors.size and not started:
                codec.start(gradients.tensors.loss_scale)
            transfers = []
            for number in order:
                part = gradients.part(buckets[number])
                if not part.size:
                    continue
                if number not in sent:
                    sent[number] = Transfer(codec, part, state.wire(
                        number, codec, part.xp, part.size), decodes=True)
                    exchange.submit(sent[number])
                    exchange.advance()
                transfers.append((part, sent[number]))
            outcome = self._receive(codec, exchange, transfers)
            if early:
                early.averaged()
        return outcome

    def _receive(self, codec: Codec, exchange: Exchange,
                 transfers: list[tuple[Tensors, Transfer]]) -> _Outcome:
        nonfinite: list[str] = []
        wire_is_finite = True
        for tensors, transfer in transfers:
            exchange.finish(transfer)
            with self._statistics.section('decode'):
                found = transfer.decode(tensors)
                if found:
                    wire_is_finite &= codec.is_finite(transfer.wire)
            nonfinite += found
        return _Outcome(codec, nonfinite, wire_is_finite)

    def _let_begin(self, early: Early) -> None:
        """From the next update on, buckets may be sent early."""
        if isinstance(self._algorithm, Aggregated):
            # Aggregators round at random by the number of the job.
            early.exchange = self._exchange
        else:
            # Models are sent early in an order of their own on each rank, so
            # each has an executor of its own.
            early.order[:] = self._comm.bcast(early.observed_order())
            if early.exchange is None:
                same = self._algorithm
                early.exchange = Exchange(self._comm, Planned(
                    self._comm, same.plans, self._statistics, same.framing),
                    self._statistics)
        early.ready = True

    # --- NaN and infinity ---------------------------------------------------

    def _must_be_finite(self, state: ModelState) -> bool:
        if self._options.nonfinite == 'auto':
            return not state.scaling_is_dynamic
        return self._options.nonfinite == 'raise'

    def _raise_nonfinite(self, outcome: _Outcome) -> None:
        codec, nonfinite, wire_is_finite = outcome
        if wire_is_finite:      # so the others need not be here
            culprits = [f'the value of {nonfinite[0]}, or its product with '
                        'the ratio, is not finite on rank '
                        f'{self._comm.rank}']
        else:
            culprits = [
                f'{names[0]} is not finite in {codec.name} on rank {rank}'
                + (f' (and {len(names) - 1} more)' if names[1:] else '')
                for rank, names in enumerate(
                    self._comm.allgather(codec.nonfinite)) if names]
        text = '; '.join(culprits) or (
            f'the sum of the gradients of {nonfinite[0]} overflowed')
        raise RuntimeError(
            f'{text}. No parameter was updated. Lower the learning rate, '
            "clip gradients, scale the loss, or pass nonfinite='pass' to "
            'create_communicator.')
