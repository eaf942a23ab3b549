"""One rank of a pipeline: its parts of the model, and its neighbours."""
# `Stage` does what a schedule says: it runs the parts of the model that are
# here, forward and backward, and hands on what they make.  A part takes arrays
# and gives arrays and a `Tape` for the way back, whether it is some calls of a
# Chain or some layers of a `Divisible`.  The graph is cut between parts.
#
# A chunk that recomputes keeps the inputs of a micro-batch only, and runs
# forward again before backward (Griewank and Walther, Algorithm 799; Chen et
# al. 2016, where it is called checkpointing of activations).  Only functions
# run again, on what they were given: no code of the model's.
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import chainer

from ..intercept.function_calls import hold, unchecked
from ..report.stream import EventStream
from .backprop import Arrays, GradientSums, Tape
from .channel import Channels
from .layers import blame
from .means import BatchStatistics
from .randomness import Place
from .schedules import Kind, Schedule


class Part(Protocol):
    """A part of a model that is one chunk of a pipeline."""

    name: str                               # in messages
    parameters: list[chainer.Parameter]     # that it uses on this rank
    statistics: BatchStatistics             # where it notes what it normalises

    def record(self, micro_batch: int, inputs: Arrays, place: Place
               ) -> tuple[Tape, Arrays]:
        """Runs forward; the tape for backward, and the outputs."""


class Stage:
    """What one rank of a pipeline does in a step.

    Args:
        channels: To the other ranks.
        last: Number of the pipeline's last chunk.
        recomputed: Numbers of the chunks that are recomputed.
        events: Where to write what happens.
        parts: Of the model that are here, by number of chunk.
    """

    def __init__(self, channels: Channels, last: int,
                 recomputed: frozenset[int], events: EventStream,
                 parts: Mapping[int, Part]) -> None:
        self.channels, self._last = channels, last
        self._recomputed, self._events = recomputed, events
        self.sums, self._statistics = GradientSums(), BatchStatistics()
        self._parts = parts
        for part in parts.values():
            part.statistics = self._statistics
        # What has been made or has come, and was not used yet.  By what it
        # is, micro-batch and boundary: activations and their gradients; by
        # chunk: inputs that are to run again, and tapes.
        self._kept: dict[tuple[str, int, int], Any] = {}
        hold(self)

    def run(self, schedule: Schedule, inputs: list[Arrays],
            places: list[Place], slopes: Callable[[], list[float]],
            train: bool) -> list[Arrays]:
        """Does all actions of this rank in their order; the last outputs.

        Args:
            schedule: For as many micro-batches as there are places.
            inputs: Of the first chunk, one per micro-batch; elsewhere unused.
            places: Of the micro-batches, with any layer.
            slopes: Gives the gradient of each micro-batch's loss.  It may take
                some time, and is called where a rank would wait: by the
                first one when it has something to send.
            train: Whether to keep what a backward pass needs.
        """
        self._places, self._train, rank = places, train, self.channels.rank
        if 0 in self._parts:
            for micro_batch, arrays in enumerate(inputs):
                self._kept['activation', micro_batch, -1] = arrays
        for index, action in enumerate(schedule.actions[rank]):
            if index == (rank == 0):
                self._slopes = slopes()
            kind, micro_batch, number = action
            if kind is Kind.FORWARD:
                self._forward(micro_batch, number)
            else:
                self._backward(kind, micro_batch, number)
        return [self._kept.pop(('activation', number, self._last), ())
                for number in range(len(places))]

    def finish(self, loss_scale: float | None) -> None:
        """Moves running averages, and hands over the parameters' gradients."""
        self._statistics.finish()
        self.sums.finish(loss_scale)

    def forget(self) -> None:
        """Drops what a failed step has left."""
        self.sums.forget()
        self._statistics.forget()
        self._kept.clear()

    def _forward(self, micro_batch: int, number: int) -> None:
        part = self._parts[number]
        arrays = self._take('activation', micro_batch, number, number - 1)
        again = self._train and number in self._recomputed
        if again:
            self._kept['inputs', micro_batch, number] = arrays
        with self._events.section('forward', micro_batch, number), blame(
                lambda: part.name, micro_batch), chainer.using_config(
                    'enable_backprop',
                    chainer.config.enable_backprop and not again):
            tape, arrays = part.record(micro_batch, arrays,
                                       self._places[micro_batch])
        if self._train and not again:
            self._kept['tape', micro_batch, number] = tape
        self._give('activation', micro_batch, number, number, arrays)

    def _backward(self, kind: Kind, micro_batch: int, number: int) -> None:
        """The whole way back through a chunk, or one of its halves."""
        part = self._parts[number]
        gradients: Arrays = ()
        if number == self._last:
            loss, = self._kept['activation', micro_batch, number]
            gradients = chainer.backend.get_array_module(loss).full_like(
                loss, self._slopes[micro_batch]),
        elif kind is not Kind.BACKWARD_WEIGHT:
            gradients = self._take('gradient', micro_batch, number, number)
        tape = self._tape(part, micro_batch, number)
        defer = kind is Kind.BACKWARD_INPUT
        with self._events.section(kind.value.removesuffix('_input'),
                                  micro_batch, number):
            with blame(lambda: f'the backward pass of {tape.at or part.name}',
                       micro_batch), unchecked():
                if kind is Kind.BACKWARD_WEIGHT:
                    tape.backward_weight()
                else:
                    gradients = tape.backward(gradients, self.sums, defer)
            if kind is not Kind.BACKWARD_WEIGHT:
                self.sums.collect(part.parameters)
            if defer:
                self._kept['tape', micro_batch, number] = tape
            elif micro_batch >= len(self._places) - 2:
                # Products that were put off are made before the last
                # micro-batch, so that the end of the step is short.
                self.sums.settle(part.parameters)
        if number > 0 and kind is not Kind.BACKWARD_WEIGHT:
            self._give('gradient', micro_batch, number, number - 1, gradients)

    def _tape(self, part: Part, micro_batch: int, number: int) -> Tape:
        """A micro-batch's way back; of one that is recomputed, it is made."""
        inputs = self._kept.pop(('inputs', micro_batch, number), None)
        if inputs is None:
            return self._kept.pop(('tape', micro_batch, number))
        with self._events.section('recompute', micro_batch, number), \
                blame(lambda: part.name, micro_batch), \
                chainer.using_config('in_recomputing', True):
            return part.record(micro_batch, inputs,
                               self._places[micro_batch])[0]

    def _take(self, what: str, micro_batch: int, number: int, boundary: int
              ) -> Arrays:
        """What a chunk needs of what has crossed a boundary."""
        channels = self.channels
        if channels.size == 1 or boundary < 0:
            return self._kept.pop((what, micro_batch, boundary))
        with self._events.section('receive', micro_batch, number):
            return channels.receive(
                *channels.crossing(False, what, boundary),
                lambda rank: ('its input' if what == 'activation'
                              else 'the gradient of its output')
                + f' from rank {rank}, in stage {channels.rank}, '
                f'micro-batch {micro_batch}')

    def _give(self, what: str, micro_batch: int, number: int, boundary: int,
              arrays: Arrays) -> None:
        """Hands on what a chunk has made, to where it is needed."""
        channels = self.channels
        if channels.size == 1 or boundary == self._last:
            self._kept[what, micro_batch, boundary] = arrays
            return
        with self._events.section('send', micro_batch, number):
            self._events.carried(
                channels.send(arrays, *channels.crossing(
                    True, what, boundary)),
                sum(getattr(array, 'nbytes', 0) for array in arrays))
