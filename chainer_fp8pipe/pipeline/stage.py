"""One rank of a pipeline: its parts of the model, and its neighbours."""
# A schedule says what each rank does, one action after the other; `Stage`
# does that: it runs the parts of the model that are here, forward and
# backward, and hands on what they make.  It knows nothing of models: a part
# takes arrays and gives arrays and a `Tape` for the way back, whether it is
# some calls of a traced Chain or some layers of a `Divisible`.
#
# The graph is cut between parts.  So activations and their gradients cross
# between ranks as between chunks of one rank, and a gradient of a parameter
# is final as soon as the last micro-batch is through the parts that use it:
# it goes into the exchange while earlier parts are still computed.
#
# Sends do not wait, and receives are posted ahead, as the schedule says how
# many will come.  A rank that fails tells its neighbours through the channels
# in place of what they wait for; they pass it on in the same way.
#
# A mean over a batch is not the mean of its micro-batches' means where one is
# shorter or labels are ignored.  So each micro-batch is weighted by its number
# of samples, or of labels that are not ignored (`weights_of`, `MeanLoss`).
#
# A chunk that recomputes keeps the inputs of a micro-batch only, and runs
# forward again before backward (Griewank and Walther, Algorithm 799; Chen et
# al. 2016, where it is called checkpointing of activations).  What it draws is
# seeded by its place, and running averages are left alone the second time.
from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import chainer
import numpy
from mpi4py import MPI

from ..channel.channel import Receiver, Sender
from ..intercept.function_calls import hold, unchecked
from ..mpi.ranks import nodes_of, once
from ..report.stream import EventStream
from .backprop import Arrays, GradientSums, Tape
from .batch_statistics import BatchStatistics, recomputing, why_once
from .layers import LayerError, blame
from .randomness import Place
from .schedules import Action, Kind, Schedule

_SENDS = Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT
_RECEIVES = Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT


class Part(Protocol):
    """A part of a model that is one chunk of a pipeline.

    Attributes:
        name: In messages.
        parameters: Those that the part uses on this rank.
        links: All of the part.
        statistics: Where to note those of batch normalisations that no link
            hook sees.
    """

    statistics: BatchStatistics
    name: str
    parameters: list[chainer.Parameter]
    links: list[chainer.Link]

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """Runs forward, as Chainer's configuration says.

        Args:
            micro_batch: Its number in the step.
            inputs: Arrays that cross the boundary before the part.
            place: Where in the training the part runs; it fills in the layer.

        Returns:
            The tape for backward, and the outputs.
        """

    def normalises(self, micro_batch: int) -> bool:
        """Whether batch normalisations may run for a micro-batch."""

    def keeps(self, link: chainer.Link) -> bool:
        """Whether a link's running values, if it has any, are this part's."""


class MeanLoss:
    """The mean of the losses of micro-batches, and where backward begins.

    The last chunk's output is the loss of a micro-batch, itself a mean.

    Attributes:
        sum: Of losses times their weights.
        weight: The sum of these weights.
    """

    sum = weight = 0.0

    def begin(self, weights: list[float], total: float,
              loss_scale: float | None) -> None:
        """Starts a batch.

        Args:
            weights: Of the micro-batches.
            total: Sum of all weights in the mean, of other replicas too.
            loss_scale: Factor of all gradients; None for 1.
        """
        self._weights, self._total = weights, total or 1.0
        self._scale = 1.0 if loss_scale is None else loss_scale
        self._losses: dict[int, Any] = {}
        self.sum = self.weight = 0.0

    def forward(self, micro_batch: int, outputs: Arrays) -> None:
        """Takes the loss of a micro-batch."""
        loss, = outputs
        self._losses[micro_batch] = loss
        weight = self._weights[micro_batch]
        if weight:      # or it may be NaN
            self.sum += weight * float(loss.item())
            self.weight += weight

    def backward(self, micro_batch: int) -> Arrays:
        """The gradient of the loss of a micro-batch."""
        loss = self._losses.pop(micro_batch)
        xp = chainer.backend.get_array_module(loss)
        return (xp.full_like(loss, self._weights[micro_batch] / self._total
                             * self._scale),)


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
    """Senders and receivers of one rank, to all ranks of a pipeline.

    Boundary b lies between chunks b and b + 1.  The first tags are those of
    arrays from any rank to any other, and of batches; then come two per
    boundary, for activations and for gradients.

    Args:
        comm: The ranks of one pipeline; rank r has the chunks c with
            ``c % size == r``.  All channels get tags of their own: no
            message that earlier ones left under way can arrive here.
        last: Number of the pipeline's last chunk.
        xp: ``numpy`` or ``cupy``: where received arrays lie.

    Attributes:
        senders: By kind of the action that sends and number of the chunk.
        receivers: By kind of the action that receives and number of the
            chunk.
        batch_in: From the rank before: batches.
        batch_out: To the next rank.
    """

    def __init__(self, comm: MPI.Comm, last: int, xp: Any = numpy) -> None:
        self.senders: dict[tuple[Kind, int], Sender] = {}
        self.receivers: dict[tuple[Kind, int], Receiver] = {}
        self.batch_in: Receiver | None = None
        self.batch_out: Sender | None = None
        self._to: dict[int, Sender] = {}
        self._from: dict[int, Receiver] = {}
        self._all: list[Sender | Receiver] = []
        self._shared: _Shared | None = None
        size, rank = comm.size, comm.rank
        if size == 1:
            return
        # Apart from whatever else is sent there.
        shared = once(comm, 'channels', lambda: _Shared(comm.Dup()))
        tag, shared.tags = shared.tags, shared.tags + 2 + 2 * last
        self._shared = shared

        def end(kind: Any, peer: int, number: int, *how: Any) -> Any:
            self._all.append(kind(shared.comm, peer, tag + number, *how,
                                  shared.is_far(peer)))
            return self._all[-1]
        for peer in range(size):
            if peer != rank:
                self._to[peer] = end(Sender, peer, 0)
                self._from[peer] = end(Receiver, peer, 0, xp)
        if rank > 0:
            self.batch_in = end(Receiver, rank - 1, 1, numpy)
        if rank < size - 1:
            self.batch_out = end(Sender, rank + 1, 1)
        for chunk in range(rank, last + 1, size):
            below, above = (chunk - 1) % size, (chunk + 1) % size
            if chunk > 0:
                self.receivers[Kind.RECEIVE_ACTIVATION, chunk] = end(
                    Receiver, below, 2 * chunk, xp)
                self.senders[Kind.SEND_GRADIENT, chunk] = end(
                    Sender, below, 1 + 2 * chunk)
            if chunk < last:
                self.senders[Kind.SEND_ACTIVATION, chunk] = end(
                    Sender, above, 2 + 2 * chunk)
                self.receivers[Kind.RECEIVE_GRADIENT, chunk] = end(
                    Receiver, above, 3 + 2 * chunk, xp)

    def send(self, rank: int, arrays: Arrays) -> None:
        """Starts to send to any rank, beside the schedule."""
        self._to[rank].send(arrays)

    def receive(self, rank: int) -> Arrays:
        """Receives what a rank sends by :meth:`send`."""
        return self._from[rank].receive()

    def flush(self) -> None:
        """Waits until all that was sent has left."""
        for end in self._all:
            if isinstance(end, Sender):
                end.flush()

    def fail(self, text: str) -> None:
        """Tells all ranks that this one cannot go on."""
        for end in self._all:
            if isinstance(end, Receiver):
                end.cancel()
        for end in self._all:
            if isinstance(end, Sender):
                with contextlib.suppress(MPI.Exception):
                    end.fail(text)

    def spoil(self) -> None:
        """Has the communicator never freed; on all ranks of a failed step."""
        if self._shared:
            self._shared.spoilt = True


class Stage:
    """What one rank of a pipeline does in a step.

    Args:
        rank: Of the stage in its pipeline.
        channels: To the other ranks.
        last: Number of the pipeline's last chunk.
        recomputed: Numbers of the chunks that keep their inputs only, and
            run forward again before backward.
        events: Where to write what happens.

    Attributes:
        channels: As given; others may take their place between two steps.
        sums: Where gradients of parameters are added up.
    """

    def __init__(self, rank: int, channels: Channels, last: int,
                 recomputed: frozenset[int], events: EventStream) -> None:
        self._rank, self.channels, self._last = rank, channels, last
        self._recomputed, self._events = recomputed, events
        self.sums, self._statistics = GradientSums(), BatchStatistics()
        self._parts: dict[int, Part] = {}
        # By micro-batch and boundary: what has been made, and not been used.
        self._activations: dict[tuple[int, int], Arrays] = {}
        self._gradients: dict[tuple[int, int], Arrays] = {}
        # By micro-batch and chunk: what backward needs.
        self._inputs: dict[tuple[int, int], Arrays] = {}
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            **dict.fromkeys(_SENDS, self._send),
            **dict.fromkeys(_RECEIVES, self._receive)}
        hold(self)

    def take(self, parts: Mapping[int, Part]) -> None:
        """Sets the parts of the model that are here, by number of chunk."""
        self._parts = dict(parts)
        for part in parts.values():
            part.statistics = self._statistics

    def run(self, schedule: Schedule, inputs: list[Arrays],
            places: list[Place], loss: MeanLoss | None, train: bool,
            final: Any = None) -> list[Arrays]:
        """Does all actions of this rank in their order.

        Args:
            schedule: For as many micro-batches as there are places.
            inputs: Of the first chunk, one per micro-batch; elsewhere unused.
            places: Of the micro-batches, with any layer.
            loss: What becomes of the last chunk's output; None: the outputs
                are wanted.
            train: Whether to keep what a backward pass needs.
            final: Called for each parameter with the array that will be its
                gradient, when nothing more will be added to it.

        Returns:
            The last chunk's outputs if there is no loss.

        Raises:
            LayerError: A layer failed here.
            RemoteError: Another rank said that it failed.
        """
        self._loss, self._places, self._train = loss, places, train
        self._outputs: list[Arrays] = [()] * len(places)
        self.forget()
        if train:
            self.sums.begin([part.parameters for part in
                              self._parts.values()], final)
        for micro_batch, arrays in enumerate(inputs):
            self._activations[micro_batch, -1] = arrays
        actions = schedule.actions[self._rank]
        for key, count in Counter(
                (action.kind, action.chunk) for action in actions
                if action.kind in _RECEIVES).items():
            self.channels.receivers[key].expect(count)
        for action in actions:
            self._run[action.kind](action)
        outputs, self._outputs = self._outputs, []
        return outputs

    def finish(self, loss_scale: float | None) -> None:
        """Moves running averages, and hands over the parameters' gradients."""
        self._statistics.finish()
        self.sums.finish(loss_scale)

    def forget(self) -> None:
        """Drops what a failed step has left."""
        self.sums.forget()
        self._statistics.forget()
        for kept in (self._activations, self._gradients, self._inputs,
                     self._tapes):
            kept.clear()

    # --- one action ---------------------------------------------------------

    def _forward(self, action: Action) -> None:
        _, micro_batch, number = action
        key, part = (micro_batch, number), self._parts[number]
        arrays = self._activations.pop((micro_batch, number - 1))
        again = self._train and number in self._recomputed
        if again:
            self._refuse_moving_weights(number)
            self._inputs[key] = arrays
        counts = self._train and part.normalises(micro_batch)
        with self._events.section('forward', *key), blame(
                part.name, micro_batch), _if(
                counts, self._statistics.counting(number, part.keeps)), _if(
                again, chainer.no_backprop_mode()):
            tape, arrays = part.record(micro_batch, arrays,
                                       self._places[micro_batch])
        if self._train and not again:
            self._tapes[key] = tape
        if number < self._last:
            self._activations[key] = arrays
        elif self._loss is None:
            self._outputs[micro_batch] = arrays
        else:
            self._loss.forward(micro_batch, arrays)

    def _backward(self, action: Action) -> None:
        kind, micro_batch, number = action
        key, part = (micro_batch, number), self._parts[number]
        if key in self._inputs:
            with self._events.section('recompute', *key), blame(
                    part.name, micro_batch), recomputing(part.links):
                self._tapes[key], _ = part.record(
                    micro_batch, self._inputs.pop(key),
                    self._places[micro_batch])
        defer = kind is Kind.BACKWARD_INPUT
        with self._events.section('backward', *key):
            if number == self._last:
                assert self._loss is not None
                gradients = self._loss.backward(micro_batch)
            else:
                gradients = self._gradients.pop(key)
            tape = self._tapes[key] if defer else self._tapes.pop(key)
            self.sums.last = not defer and self._is_last(micro_batch)
            with self._blame_backward(key, tape), unchecked():
                gradients = tape.backward(gradients, self.sums.take,
                                          self.sums.take_product, defer)
            self.sums.collect(self._parts[number].parameters)
            if not defer:
                self._through(key)
        if number > 0:
            self._gradients[micro_batch, number - 1] = gradients

    def _backward_weight(self, action: Action) -> None:
        key = action.micro_batch, action.chunk
        with self._events.section('backward_weight', *key):
            tape = self._tapes.pop(key)
            self.sums.last = self._is_last(action.micro_batch)
            with self._blame_backward(key, tape), unchecked():
                tape.backward_weight()
            self._through(key)

    def _through(self, key: tuple[int, int]) -> None:
        """Notes that a micro-batch is through a chunk.

        Products that were put off are made before the last micro-batch,
        which comes by itself, so that the end of the step is short.
        """
        micro_batch, number = key
        if self._is_last(micro_batch):
            self.sums.through(self._parts[number].parameters)
        elif self._is_last(micro_batch + 1):
            self.sums.settle(self._parts[number].parameters)

    def _is_last(self, micro_batch: int) -> bool:
        return micro_batch == len(self._places) - 1

    def _send(self, action: Action) -> None:
        with self._events.section('send', action.micro_batch, action.chunk):
            arrays = self._crossing(action).pop(
                (action.micro_batch, action.boundary))
            self._events.carried(
                self.channels.senders[action.kind, action.chunk].send(
                    arrays),
                sum(getattr(array, 'nbytes', 0) for array in arrays))

    def _receive(self, action: Action) -> None:
        with self._events.section('receive', action.micro_batch,
                                  action.chunk):
            receiver = self.channels.receivers[action.kind, action.chunk]
            self._crossing(action)[
                action.micro_batch, action.boundary] = receiver.receive(
                    lambda: self._said(action, receiver.world_peer))

    def _crossing(self, action: Action) -> dict[tuple[int, int], Arrays]:
        return (self._activations if action.kind in (
            Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
            else self._gradients)

    # --- messages -----------------------------------------------------------

    def _said(self, action: Action, rank: int) -> str:
        what = ('its input' if action.kind is Kind.RECEIVE_ACTIVATION
                else 'the gradient of its output')
        return (f'{what} from rank {rank}, in stage {self._rank}, '
                f'micro-batch {action.micro_batch}')

    def _blame_backward(self, key: tuple[int, int], tape: Tape
                        ) -> contextlib.AbstractContextManager[None]:
        micro_batch, number = key
        return blame(lambda: 'the backward pass of ' + (
            tape.at or self._parts[number].name), micro_batch)

    def _refuse_moving_weights(self, number: int) -> None:
        part = self._parts[number]
        own = set(map(id, part.parameters))
        for link in part.links:
            reason = why_once(link)
            found = [getattr(link, name) for name in link._params]
            # A stage of a Chain has all links, but its own parameters only.
            if reason and (not found or own.intersection(map(id, found))):
                raise LayerError(
                    f'{part.name} has {reason}; it cannot be recomputed: '
                    "pass recompute='no stage'")


def weights_of(labels: Sequence[Sequence[tuple[int, int]]],
               sizes: Sequence[int], replicas: int = 1) -> list[float]:
    """How much each micro-batch counts in the mean loss.

    That is its number of labels that count, if a loss may leave some out,
    else of samples.  A loss that leaves out none here may leave out some on
    other replicas, and weights are added over all replicas.

    Args:
        labels: Of each micro-batch, for each loss that may leave out labels:
            how many count (-1: unknown), and how many are left out.
        sizes: Samples of each micro-batch.
        replicas: Number of replicas, each with a batch of its own.

    Raises:
        ValueError: Several losses leave out labels, and not equally many.
    """
    samples = [float(size) for size in sizes]
    every = [one for several in labels for one in several]
    if not every or len(sizes) == replicas == 1:
        return samples
    if any(count < 0 for count, _ in every):
        raise ValueError(
            'a loss ignores some of the labels that the model computes '
            'itself; pass loss_weight=, a function of the batch, to '
            'PipelineUpdater')
    leaves_out = any(left for _, left in every)
    if len({len(several) for several in labels}) == 1:
        table = numpy.array([[float(count) for count, _ in several]
                             for several in labels])
        shares = table / numpy.maximum(table.sum(0), 1)
        # No replica knows the others' shares, so numbers must be equal.
        if (abs(shares - shares[:, :1]) < 1e-12).all() and (
                replicas == 1 or not leaves_out
                or (table == table[:, :1]).all()):
            return [float(count) for count in table[:, 0]]
    if not leaves_out:
        return samples
    raise ValueError(
        'several losses ignore different numbers of labels; pass '
        'loss_weight=, a function of the batch, to PipelineUpdater')


def _if(condition: bool, block: Any) -> Any:
    """A block, if a condition holds."""
    return block if condition else _NO_BLOCK


_NO_BLOCK: Any = contextlib.nullcontext()
