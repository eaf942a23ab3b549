"""One step of a pipeline over all its ranks: train, evaluate, predict."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chainer

from ...mpi.grid import ProcessGrid
from ...pipeline.batch_statistics import BatchStatistics, give_up
from ...pipeline.block import Arrays
from ...pipeline.channels import Channels
from ...pipeline.chunk import Chunk
from ...pipeline.gradient_sums import GradientSums
from ...pipeline.layers import blame
from ...pipeline.loss import LossHead
from ...pipeline.micro_batches import bounds, recomputed
from ...pipeline.randomness import Place, preserved
from ...pipeline.schedules.schedule import (
    Schedule,
    forward_schedule,
    make_schedule,
)
from ...pipeline.stage_executor import StageExecutor
from ...report.stream import EventStream
from .chain_work import ChainWork
from .layer_work import LayerWork
from .tied_gradients import TiedGradients
from .together import Opened, StepBatch, Sums, Together


class PipelineSteps:
    """What a pipeline's ranks do together.

    Args:
        model: This rank's stage.
        grid: All ranks.
        work: What is done with a batch: :class:`.LayerWork` or
            :class:`.ChainWork`.
        micro_batches: Into how many a batch is cut.
        schedule: The name of the schedule.
        recompute: Which stages keep their inputs only.
        activation_codec: None or ``'fp8'``.
        seed: Of what layers draw.
        events: Where to write what happens.

    Raises:
        ValueError: Options differ between ranks, or the stages do not fit
            together; on all ranks.
    """

    def __init__(self, model: Any, grid: ProcessGrid,
                 work: LayerWork | ChainWork, *, micro_batches: int,
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
        self._make_chunks()
        self._channels = Channels(self.grid.pipeline, self._chunks,
                                  self._last, self._codec, self._model.xp)
        self._make_executor()

    def adapt(self, optimizer: Any) -> None:
        """After an update: parts of the model may go to other ranks.

        Call it on all ranks.

        Args:
            optimizer: Makes update rules.
        """
        if self._work.adapt(optimizer):
            self._follow()

    def follow_plan(self, plan: Any, optimizer: Any) -> None:
        """Cuts the model as a plan says; call it on all ranks.

        Args:
            plan: Of a snapshot's run.
            optimizer: Makes update rules.
        """
        if self._work.follow_plan(plan, optimizer):
            self._follow()

    def _follow(self) -> None:
        """Takes over what has changed in the parts of the model."""
        self._work.changed = False
        self._sums = GradientSums()
        self._recomputed = self._work.recomputed(self._recomputed)
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
              loss_scale: float | None, entries: Mapping[str, str],
              announced: Callable | None = None
              ) -> tuple[dict[str, float], tuple[float, ...]]:
        """Forward and backward of one batch; gradients are in the model.

        Args:
            read: Gives the batch; called on the first stage only.
            iteration: Number of updates so far.
            loss_scale: Factor of all gradients; None for 1.
            entries: What else must be the same on all ranks.
            announced: :meth:`.CodecCommunicator.announced` of the
                communicator that averages the gradients; None without.

        Returns:
            Means of loss and metrics over all replicas, the same on all
            ranks, and the progress of the first stage's iterator.

        Raises:
            StopIteration: ``read`` raised it; on all ranks.
            RemoteError: Another rank failed.
            Exception: What failed on this rank.
        """
        opened = self._together.open(
            'train', lambda: self._enough(read),
            {'the iteration': str(iteration),
             'the loss scale': str(loss_scale), **entries})

        places = self._places(opened, self._micro_batches, iteration)
        problem = self._prepare(opened, self._micro_batches, 'train', places)

        def work() -> Sums:
            self._model.cleargrads()
            inputs: list[Arrays] = []
            targets: list[Any] = []
            weights: list[float] = []
            total = 0.0
            try:
                inputs, targets, weights = self._deal(
                    opened, self._micro_batches, 'train', problem)
            finally:        # the other replicas' last stages wait for it
                total = self._total_weight(sum(weights))
            self._head.begin(targets, weights, total, loss_scale)
            with preserved(), (announced or _nobody)(
                    self._model, loss_scale) as final:
                self._sums.begin(self._blocks, self._tied.but(final))
                self._executor.run(self.schedule, self.grid.stage_index,
                                   inputs, places, self._head, train=True)
            self._statistics.finish()
            self._sums.finish(loss_scale)
            return self._work.sums()
        means = self._means('train', work)
        self._tied.add_up()
        return means, opened.progress

    def hand_back(self) -> None:
        """Gives tied parameters their means; call it on all ranks."""
        self._tied.hand_back()

    def evaluate(self, read: Callable[[], StepBatch]) -> dict[str, float]:
        """Loss and metrics of one batch, without training; on all ranks.

        Args:
            read: Gives the batch; called on the first stage only.
        """
        opened = self._together.open('evaluate', read)
        parts = min(opened.samples, self._micro_batches)
        places = self._places(opened, parts, 0)
        problem = self._inferring(lambda: self._prepare(
            opened, parts, 'evaluate', places))

        def work() -> Sums:
            inputs, targets, weights = self._deal(opened, parts, 'evaluate',
                                                  problem)
            self._head.begin(targets, weights, sum(weights), None)
            self._infer(inputs, places, self._head)
            return self._work.sums()
        return self._means('evaluate', work)

    def predict(self, read: Callable[[], StepBatch], wanted: bool,
                method: str) -> Any:
        """The outputs for one batch, on the ranks that want them.

        Args:
            read: Gives the batch; called on the first stage only.
            wanted: Whether this rank wants them.
            method: The name of what is called.

        Returns:
            An array, or several as the model returns them; None on ranks
            that did not want it.
        """
        opened = self._together.open('predict', read,
                                     {'the method that predicts': method})
        count = min(opened.samples, self._micro_batches)
        places = self._places(opened, count, 0)
        problem = self._inferring(lambda: self._prepare(
            opened, count, 'predict', places))
        outputs: list[Any] = []
        sizes = [end - start for start, end in bounds(opened.samples, count)]

        def work() -> Sums:
            inputs, _, _ = self._deal(opened, count, 'predict', problem)
            parts = self._infer(inputs, places, None)
            if self._is_last:
                with blame('the output', 0):
                    outputs.extend(self._work.joined(parts, sizes,
                                                     self._model.xp))
            return {}
        self._close('predict', work)
        return self._hand_out(tuple(outputs), wanted)

    # --- details ------------------------------------------------------------

    def _means(self, step: str, work: Callable[[], Sums]) -> dict[str, float]:
        """Does the work; gives the means of loss and metrics."""
        return {name: part / whole if whole else 0.0 for name, (part, whole)
                in self._close(step, work).items()}

    def _close(self, step: str, work: Callable[[], Sums]) -> Sums:
        try:
            found = self._together.close(step, work, self._give_up)
        except BaseException:       # on all ranks
            self._channels.spoil()
            raise
        self._channels.flush()
        self._work.end()
        return found

    def _give_up(self, text: str) -> None:
        self._channels.fail(text)
        give_up(self._model, text)
        self._executor.forget()
        self._work.forget()
        self._sums.forget()
        self._statistics.forget()

    def _enough(self, read: Callable[[], StepBatch]) -> StepBatch:
        batch = read()
        samples = batch.samples()
        if samples < self._micro_batches:
            raise ValueError(
                f'a batch of {samples} cannot be cut into '
                f'{self._micro_batches} micro-batches; lower micro_batches, '
                'raise the batch size, or let the iterator repeat so that '
                'no batch is short')
        return batch

    def _deal(self, opened: Opened, parts: int, step: str, problem: str
              ) -> tuple[list[Arrays], list[Any], list[float]]:
        """Inputs, targets and weights of the micro-batches, where they are
        wanted."""
        if problem:
            raise ValueError(problem)
        return self._work.deal(opened, self._channels, parts, step)

    def _inferring(self, action: Callable[[], Any]) -> Any:
        with preserved(), chainer.using_config('train', False), \
                chainer.no_backprop_mode():
            return action()

    def _total_weight(self, weight: float) -> float:
        """What a replica's weights are to be divided by.

        The mean over replicas that follows divides by their number.
        """
        if not self._is_last or self.grid.replicas == 1:
            return weight
        return self.grid.data.allreduce(weight) / self.grid.replicas

    def _prepare(self, opened: Opened, parts: int, step: str,
                 places: list[Place]) -> str:
        with preserved():
            problem = self._work.prepare(opened, parts, step, places)
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

    def _hand_out(self, outputs: Arrays, wanted: bool) -> Any:
        """The last stage gives the outputs to all that want them."""
        asking = self.grid.pipeline.allgather(wanted)
        if self._is_last:
            self._channels.send_outputs(outputs, [
                rank for rank, asks in enumerate(asking)
                if asks and rank != self.grid.stage_index])
        elif wanted:
            outputs = self._channels.receive_outputs()
        if not wanted:
            return None
        return self._work.formed(outputs)


def _nobody(model: Any, loss_scale: float | None
            ) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


_forward = functools.lru_cache(16)(forward_schedule)

