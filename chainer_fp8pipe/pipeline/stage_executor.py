"""Runs one rank's part of a schedule: chunks, channels and the loss."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..report.stream import EventStream
from .block import Arrays
from .channels import Channels
from .chunk import Chunk
from .loss import LossHead
from .randomness import Place
from .schedules import Action, Kind, Schedule

_RECEIVE = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


class StageExecutor:
    """What one rank of a pipeline does in one step.

    Args:
        chunks: This rank's, by their number in the whole pipeline.
        channels: To the neighbours.
        last: Number of the pipeline's last chunk.
        layers: How many layers the whole model has.
        events: Where to write what happens.
    """

    def __init__(self, chunks: Mapping[int, Chunk], channels: Channels,
                 last: int, layers: int, events: EventStream) -> None:
        self._chunks = dict(chunks)
        self._layers = layers
        self._channels = channels
        self._last = last
        self._events = events
        # By micro-batch and boundary: what has been made, and not been used.
        self._activations: dict[tuple[int, int], Arrays] = {}
        self._gradients: dict[tuple[int, int], Arrays] = {}
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: self._send,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECEIVE_ACTIVATION: self._receive,
            Kind.RECEIVE_GRADIENT: self._receive,
        }
        self._crossing = {
            Kind.SEND_ACTIVATION: self._activations,
            Kind.SEND_GRADIENT: self._gradients,
            Kind.RECEIVE_ACTIVATION: self._activations,
            Kind.RECEIVE_GRADIENT: self._gradients,
        }

    def run(self, schedule: Schedule, rank: int, inputs: list[Arrays],
            places: list[Place], head: LossHead | None,
            train: bool) -> list[Arrays]:
        """Does all actions of this rank in their order.

        Args:
            schedule: For as many micro-batches as there are places.
            rank: Stage of this rank.
            inputs: Of the first chunk, one per micro-batch; elsewhere unused.
            places: Of the micro-batches, with any layer.
            head: The loss; None: the last outputs are wanted instead.
            train: Whether to keep what a backward pass needs.

        Returns:
            The last chunk's outputs if there is no loss.

        Raises:
            LayerError: A layer failed here.
            RemoteError: Another rank said that it failed.
        """
        self._head, self._places, self._train = head, places, train
        self._outputs: list[Arrays] = [()] * len(places)
        self._stage = rank
        self._clear()
        for micro_batch, arrays in enumerate(inputs):
            self._activations[micro_batch, -1] = arrays
        actions = schedule.actions[rank]
        self._channels.expect(Counter(
            (action.kind, action.chunk) for action in actions
            if action.kind in _RECEIVE))
        for action in actions:
            self._run[action.kind](action)
        outputs, self._outputs = self._outputs, []
        return outputs

    def forget(self) -> None:
        """Drops what a failed step has left."""
        self._clear()
        for chunk in self._chunks.values():
            chunk.forget()

    def _clear(self) -> None:
        self._activations.clear()
        self._gradients.clear()

    # --- one action ---------------------------------------------------------

    def _forward(self, action: Action) -> None:
        _, micro_batch, number = action
        chunk = self._chunks[number]
        arrays = self._activations.pop((micro_batch, number - 1))
        run = chunk.forward if self._train else chunk.infer
        with self._events.section('forward', micro_batch, number):
            arrays = run(micro_batch, arrays, self._places[micro_batch])
            if number == self._last:
                if self._head is None:
                    self._outputs[micro_batch] = arrays
                else:
                    # Behind all layers, wherever they were cut.
                    self._head.forward(micro_batch, arrays, self._places[
                        micro_batch]._replace(layer=self._layers))
                return
        self._activations[micro_batch, number] = arrays

    def _backward(self, action: Action) -> None:
        kind, micro_batch, number = action
        chunk = self._chunks[number]
        if chunk.recompute:
            with self._events.section('recompute', micro_batch, number):
                chunk.restore(micro_batch)
        with self._events.section('backward', micro_batch, number):
            if number == self._last:
                assert self._head is not None
                gradients = self._head.backward(micro_batch)
            else:
                gradients = self._gradients.pop((micro_batch, number))
            gradients = chunk.backward(
                micro_batch, gradients, kind is Kind.BACKWARD_INPUT,
                last=self._is_last(action))
            if kind is Kind.BACKWARD:
                self._settle(action)
        if number > 0:
            self._gradients[micro_batch, number - 1] = gradients

    def _backward_weight(self, action: Action) -> None:
        with self._events.section('backward_weight', action.micro_batch,
                                 action.chunk):
            self._chunks[action.chunk].backward_weight(
                action.micro_batch, self._is_last(action))
            self._settle(action)

    def _is_last(self, action: Action) -> bool:
        return action.micro_batch == len(self._places) - 1

    def _settle(self, action: Action) -> None:
        """Has what was put off done before the last micro-batch.

        The last one comes by itself, so that the end of the step is short.
        """
        if action.micro_batch >= len(self._places) - 2:
            self._chunks[action.chunk].settle()

    def _send(self, action: Action) -> None:
        with self._events.section('send', action.micro_batch, action.chunk):
            arrays = self._crossing[action.kind].pop(
                (action.micro_batch, action.boundary))
            self._events.carried(
                self._channels.senders[action.kind, action.chunk].send(
                    arrays),
                sum(getattr(array, 'nbytes', 0) for array in arrays))

    def _receive(self, action: Action) -> None:
        with self._events.section('receive', action.micro_batch,
                                 action.chunk):
            receiver = self._channels.receivers[action.kind, action.chunk]
            self._crossing[action.kind][
                action.micro_batch, action.boundary] = receiver.receive(
                    lambda: self._said(action, receiver.world_peer))

    def _said(self, action: Action, rank: int) -> str:
        what = ('its input' if action.kind is Kind.RECEIVE_ACTIVATION
                else 'the gradient of its output')
        return (f'{what} from rank {rank}, in stage {self._stage}, '
                f'micro-batch {action.micro_batch}')
