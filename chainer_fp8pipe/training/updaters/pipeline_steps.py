"""One step of a pipeline over all its ranks: train, evaluate, predict."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chainer

from ...channel.channel import describe
from ...mpi.grid import ProcessGrid
from ...pipeline.batch_statistics import BatchStatistics
from ...pipeline.block import Arrays
from ...pipeline.channels import Channels
from ...pipeline.chunk import Chunk
from ...pipeline.gradient_sums import GradientSums
from ...pipeline.layers import blame
from ...pipeline.loss import LossHead
from ...pipeline.micro_batches import bounds, recomputed
from ...pipeline.randomness import Place, preserved
from ...pipeline.schedules import (
    Schedule,
    forward_schedule,
    make_schedule,
)
from ...pipeline.stage_executor import StageExecutor
from ...report.stream import EventStream
from .chain_work import ChainWork
from .group_failures import give_up, hear_failures
from .reported import Reported
from .tied_gradients import TiedGradients
from .together import Opened, StepBatch, Together


class PipelineSteps:
    """What a pipeline's ranks do together.

    ``work`` is what they do with a batch; the other arguments are as for
    :class:`.PipelineUpdater`.
    """

    def __init__(self, model: Any, grid: ProcessGrid,
                 work: ChainWork, *, micro_batches: int,
                 schedule: str, recompute: Any, activation_codec: str | None,
                 seed: int, events: EventStream) -> None:
        self.grid, self._work, self._events = grid, work, events
        self._model = model
        self._seed = seed
        self._micro_batches = micro_batches
        self.schedule: Schedule = make_schedule(
            schedule, grid.stages, micro_batches, work.chunks)
        self._last = grid.stages * work.chunks - 1
        self._recomputed = recomputed(recompute, self._last)
        self._codec = activation_codec
        self._sums = GradientSums()
        self._statistics = BatchStatistics()
        self._head = work.head
        self._is_last = grid.stage_index == grid.stages - 1
        self._together = Together(grid)

    def connect(self) -> None:
        """Opens the channels; call it on all ranks, once, before a step."""
        hear_failures(self._model)
        self._make_chunks()
        self._channels = Channels(self.grid.pipeline, self._chunks,
                                  self._last, self._codec, self._model.xp)
        self._make_executor()

    def _follow(self) -> None:
        """Takes over what has changed in the parts of the model."""
        self._work.changed = False
        self._sums = GradientSums()
        self._make_chunks()
        self._make_executor()

    def _make_chunks(self) -> None:
        parameters = list(self._model.params())
        self._chunks = {number: Chunk(
            blocks, number=number, recompute=number in self._recomputed,
            sums=self._sums, statistics=self._statistics,
            parameters=parameters)
            for number, blocks in self._work.blocks(
                self._statistics).items()}
        self._blocks = [block for chunk in self._chunks.values()
                        for block in chunk.blocks]
        self._tied = TiedGradients(self.grid, self._work.tied(), parameters)

    def _make_executor(self) -> None:
        self._executor = StageExecutor(
            self._chunks, self._channels, self._last, self._work.layers,
            self._events)

    def train(self, read: Callable[[], StepBatch], iteration: int,
              loss_scale: float | None,
              entries: Callable[[], Mapping[str, str]],
              announced: Callable | None = None
              ) -> tuple[dict[str, Any], tuple[float, ...]]:
        """Forward and backward of one batch; gradients are in the model.

        Args:
            read: Gives the batch; called on the first stage only.
            iteration: Number of updates so far.
            loss_scale: Factor of all gradients; None for 1.
            entries: Gives what else must be the same on all ranks.
            announced: :meth:`.CodecCommunicator.announced` of the
                communicator that averages the gradients; None without.

        Returns:
            Means of what was reported over all replicas, the same on all
            ranks, and the progress of the first stage's iterator.

        Raises:
            Exception: As :meth:`.Together.open` and :meth:`.Together.close`.
        """
        opened = self._together.open(
            'train', lambda: self._enough(read),
            lambda: {'the iteration': str(iteration),
                     'the loss scale': str(loss_scale), **entries()})

        places = self._places(opened, self._micro_batches, iteration)
        problem = self._prepare(opened, self._micro_batches, 'train', places)

        def work() -> Reported:
            weights: list[float] = []
            try:
                self._model.cleargrads()
                inputs, targets, weights = self._deal(
                    opened, self._micro_batches, 'train', problem)
            finally:        # the other replicas' last stages wait for it
                total = self._total_weight(sum(weights))
            self._head.begin(targets, weights, total, loss_scale)
            exchange = (announced(self._model, loss_scale) if announced
                        else contextlib.nullcontext())
            with preserved(), exchange as final:
                self._sums.begin(self._blocks, self._tied.but(final))
                self._executor.run(self.schedule, self.grid.stage_index,
                                   inputs, places, self._head, train=True)
            self._statistics.finish()
            self._sums.finish(loss_scale)
            return self._work.reported()
        means = self._close('train', work)
        self._tied.add_up()
        self._work.give_back()
        return means, opened.progress

    def finish(self, action: Callable[[], None],
               exchange: Callable[[], None] | None = None) -> None:
        """Updates the model after :meth:`train`; call it on all ranks.

        Args:
            action: The optimizer's update, which may :meth:`add`.
            exchange: Averages gradients over replicas, before that.

        Raises:
            Exception: As :meth:`.Together.finish`.
        """
        def both() -> None:
            if exchange is not None:
                exchange()
                if self._work.has_ties:
                    self.add()      # another stage's may have failed
                    self._tied.hand_back()
            action()
        self._together.finish('train', both)

    def evaluate(self, read: Callable[[], StepBatch],
                 report: Callable[[dict[str, Any]], None]) -> None:
        """Reports on one batch, without training; on all ranks."""
        opened, places, problem = self._open_inference('evaluate', read)

        def work() -> Reported:
            inputs, targets, weights = self._deal(
                opened, len(places), 'evaluate', problem)
            self._head.begin(targets, weights, sum(weights), None)
            self._infer(inputs, places, self._head)
            return self._work.reported()
        means = self._close('evaluate', work)
        self._together.finish('evaluate', lambda: report(means))

    def predict(self, read: Callable[[], StepBatch], wanted: bool,
                method: str | None) -> Any:
        """The outputs for one batch, on the ranks that want them, or None.

        ``method`` is the name of what is called; None: the usual one.
        """
        opened, places, problem = self._open_inference(
            'predict', read, lambda: {
                'the method that predicts': self._work.choose(method)})
        outputs: list[Any] = []
        asks: list[bool] = []
        sizes = [end - start for start, end
                 in bounds(opened.samples, len(places))]

        def work() -> Reported:
            asks.append(bool(wanted))
            inputs, _, _ = self._deal(opened, len(places), 'predict', problem)
            parts = self._infer(inputs, places, None)
            if self._is_last:
                with blame('the output', 0):
                    outputs.extend(self._work.joined(parts, sizes,
                                                     self._model.xp))
                    # Sent, if anybody wants it, when all is well.
                    describe(outputs, None)
            return Reported()
        self._close('predict', work)
        found = self._hand_out(tuple(outputs), *asks)
        return self._together.finish('predict', lambda: (
            self._work.formed(found) if asks[0] else None))

    def add(self, number: float = 0.0) -> float:
        """As :meth:`.Together.add`."""
        return self._together.add(number)

    # --- details ------------------------------------------------------------

    def _open_inference(self, step: str, read: Callable[[], StepBatch],
                        entries: Callable[[], Mapping[str, str]] = dict
                        ) -> tuple[Opened, list[Place],
                                   BaseException | None]:
        """Opens a step; its micro-batches' places, and what is wrong."""
        opened = self._together.open(step, lambda: self._ready(read), entries)
        parts = min(opened.samples, self._micro_batches)
        places = self._places(opened, parts, 0)
        return opened, places, self._inferring(
            lambda: self._prepare(opened, parts, step, places))

    def _close(self, step: str, work: Callable[[], Reported]
               ) -> dict[str, Any]:
        """Does the work; gives the means of what was reported."""
        try:
            found = self._together.close(step, work, self._give_up)
        except BaseException:       # on all ranks
            self._channels.spoil()
            raise
        self._channels.flush()
        self._work.end()
        if step != 'train':     # where gradients are still to be added up
            self._work.give_back()
        return found

    def _give_up(self, text: str) -> None:
        self._channels.fail(text)
        give_up(self._model, text)
        self._executor.forget()
        self._work.forget()
        self._sums.forget()
        self._statistics.forget()

    def _ready(self, read: Callable[[], StepBatch]) -> StepBatch:
        batch = read()
        batch.samples()         # or says what is wrong
        return self._work.ready(batch)

    def _enough(self, read: Callable[[], StepBatch]) -> StepBatch:
        batch = self._ready(read)
        samples = batch.samples()
        if samples < self._micro_batches:
            raise ValueError(
                f'a batch of {samples} cannot be cut into '
                f'{self._micro_batches} micro-batches; lower micro_batches, '
                'raise the batch size, or let the iterator repeat so that '
                'no batch is short')
        return batch

    def _deal(self, opened: Opened, parts: int, step: str,
              problem: BaseException | None
              ) -> tuple[list[Arrays], list[Any], list[float]]:
        """Inputs, targets and weights of the micro-batches, or the error."""
        if problem is not None:
            raise problem
        return self._work.deal(opened, self._channels, parts, step)

    def _inferring(self, action: Callable[[], Any]) -> Any:
        with preserved(), chainer.using_config('train', False), \
                chainer.no_backprop_mode():
            return action()

    def _total_weight(self, weight: float) -> float:
        """A replica's divisor; the mean over replicas divides once more."""
        if not self._is_last or self.grid.replicas == 1:
            return weight
        return self.grid.data.allreduce(weight) / self.grid.replicas

    def _prepare(self, opened: Opened, parts: int, step: str,
                 places: list[Place]) -> BaseException | None:
        """Prepares a step; what is wrong, on all ranks of a pipeline.

        Other pipelines may be well: they hear of it at the end of the step.
        """
        problem: BaseException | None = None
        try:
            with preserved():
                self._work.prepare(opened, parts, step, places)
        except BaseException as error:
            problem = error
        if self._work.changed:
            self._follow()
        return problem

    def _places(self, opened: Opened, parts: int, iteration: int
                ) -> list[Place]:
        return [Place(self._seed, iteration, 0, opened.first_sample + start)
                for start, _ in bounds(opened.samples, parts)]

    def _infer(self, inputs: list[Arrays], places: list[Place],
               head: LossHead | None) -> list[Arrays]:
        schedule = _forward(self.grid.stages, len(places),
                            self.schedule.chunks)
        return self._inferring(lambda: self._executor.run(
            schedule, self.grid.stage_index, inputs, places, head,
            train=False))

    def _hand_out(self, outputs: Arrays, wanted: bool) -> Arrays:
        """The last stage gives the outputs to all that want them."""
        asking = self.grid.pipeline.allgather(wanted)
        if self._is_last:
            self._channels.send_outputs(outputs, [
                rank for rank, asks in enumerate(asking)
                if asks and rank != self.grid.stage_index])
        elif wanted:
            outputs = self._channels.receive_outputs()
        return outputs


_forward = functools.lru_cache(16)(forward_schedule)

