"""One step of a pipeline over all its ranks: train, evaluate, predict."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy

from ...pipeline.batch_statistics import BatchStatistics, give_up
from ...pipeline.channels import Channels
from ...pipeline.chunk import Chunk
from ...pipeline.executor import Executor
from ...pipeline.gradient_sums import GradientSums
from ...pipeline.grid import ProcessGrid
from ...pipeline.layer_block import LayerBlock
from ...pipeline.layers import blame
from ...pipeline.loss import LossHead
from ...pipeline.randomness import Place, preserved
from ...pipeline.recorder import Recorder
from ...pipeline.schedule import Schedule, forward_schedule, make_schedule
from ...pipeline.splitting import bounds, recomputed
from ...pipeline.tape import Arrays
from .batch import Batch
from .together import Opened, Together


class Steps:
    """What a pipeline's ranks do together.

    Args:
        model: This rank's stage, a ``Divisible``.
        grid: All ranks.
        loss_fun: ``loss_fun(*outputs, target)``, a mean.
        metrics: Name to function of the same arguments.
        loss_weight: How much a micro-batch's target counts; None: guess.
        micro_batches: Into how many a batch is cut.
        schedule: The name of the schedule.
        recompute: Which stages keep their inputs only.
        activation_codec: None or ``'fp8'``.
        seed: Of what layers draw.

    Raises:
        ValueError: Options differ between ranks, or the stages do not fit
            together; on all ranks.
    """

    def __init__(self, model: Any, grid: ProcessGrid, *, loss_fun: Callable,
                 metrics: Mapping[str, Callable],
                 loss_weight: Callable | None, micro_batches: int,
                 schedule: str, recompute: Any, activation_codec: str | None,
                 seed: int) -> None:
        self.grid = grid
        self.recorder = Recorder(grid.comm.rank)
        self._model = model
        self._seed = seed
        self._micro_batches = micro_batches
        chunks = len(model.pieces)
        self.schedule: Schedule = make_schedule(
            schedule, grid.stages, micro_batches, chunks)
        self._last = grid.stages * chunks - 1
        self._recomputed = recomputed(recompute, self._last)
        self._codec = activation_codec
        self._sums = GradientSums()
        self._statistics = BatchStatistics()
        self._head = LossHead(loss_fun, metrics, loss_weight)
        self._is_first = grid.stage_index == 0
        self._is_last = grid.stage_index == grid.stages - 1
        self._together = Together(grid)

    def connect(self) -> None:
        """Opens the channels; call it on all ranks, once, before a step."""
        model, grid = self._model, self.grid
        parameters = list(model.params())
        chunks = {}
        for position, piece in enumerate(model.pieces):
            number = grid.stage_index + position * grid.stages
            chunks[number] = Chunk(
                [LayerBlock(layer, first=not layer[0],
                            statistics=self._statistics,
                            initial_seed=model.seed, xp=model.xp)
                 for layer in piece], number=number,
                recompute=number in self._recomputed, sums=self._sums,
                statistics=self._statistics, parameters=parameters)
        self._blocks = [block for chunk in chunks.values()
                        for block in chunk.blocks]
        self._channels = Channels(grid.pipeline, chunks, self._last,
                                  self._codec, model.xp)
        self._executor = Executor(chunks, self._channels, self._last,
                                  model.total, self.recorder)

    def train(self, read: Callable[[], Batch], iteration: int,
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

        def work() -> None:
            self._model.cleargrads()
            targets: list[Any] = []
            weights: list[float] = []
            total = 0.0
            try:
                targets, weights = self._deal(opened)
            finally:        # the other replicas' last stages wait for it
                total = self._total_weight(sum(weights))
            self._head.begin(targets, weights, total, loss_scale)
            with preserved(), (announced or _nobody)(
                    self._model, loss_scale) as final:
                self._sums.begin(self._blocks, final)
                self._run(self.schedule, opened, iteration, self._head,
                          train=True)
            self._statistics.finish()
            self._sums.finish(loss_scale)
        return self._means('train', work), opened.progress

    def evaluate(self, read: Callable[[], Batch]) -> dict[str, float]:
        """Loss and metrics of one batch, without training; on all ranks.

        Args:
            read: Gives the batch; called on the first stage only.
        """
        opened = self._together.open('evaluate', read)

        def work() -> None:
            targets, weights = self._deal(opened)
            self._head.begin(targets, weights, sum(weights), None)
            self._infer(opened, self._head)
        return self._means('evaluate', work)

    def predict(self, read: Callable[[], Batch], wanted: bool) -> Any:
        """The outputs for one batch, on the ranks that want them.

        Args:
            read: Gives the batch; called on the first stage only.
            wanted: Whether this rank wants them.

        Returns:
            An array, or a tuple where the last layer returns one; None on
            ranks that did not want it.
        """
        opened = self._together.open('predict', read)
        outputs: list[Any] = []

        def work() -> list[float]:
            parts = self._infer(opened, None)
            if self._is_last:
                with blame('the output', 0):
                    outputs.extend(self._model.xp.concatenate(column)
                                   for column in zip(*parts, strict=True))
            return []
        self._close('predict', work)
        return self._hand_out(tuple(outputs), wanted)

    # --- details ------------------------------------------------------------

    def _means(self, step: str, work: Callable[[], None]) -> dict[str, float]:
        """Does the work; gives the means of loss and metrics."""
        head = self._head

        def measured() -> list[float]:
            work()
            if self._is_last:
                return [*head.sums.values(), *head.totals.values()]
            return [0.0] * (2 * len(head.names))
        sums, totals = numpy.split(self._close(step, measured), 2)
        return {name: float(part / whole) if whole else 0.0
                for name, part, whole in zip(head.names, sums, totals,
                                             strict=True)}

    def _close(self, step: str, work: Callable[[], list[float]]
               ) -> numpy.ndarray:
        try:
            found = self._together.close(step, work, self._give_up)
        except BaseException:       # on all ranks
            self._channels.spoil()
            raise
        self._channels.flush()
        return found

    def _give_up(self, text: str) -> None:
        self._channels.fail(text)
        give_up(self._model, text)
        self._executor.forget()
        self._sums.forget()
        self._statistics.forget()

    def _enough(self, read: Callable[[], Batch]) -> Batch:
        batch = read()
        samples = batch.samples()
        if samples < self._micro_batches:
            raise ValueError(
                f'a batch of {samples} cannot be cut into '
                f'{self._micro_batches} micro-batches; lower micro_batches, '
                'raise the batch size, or let the iterator repeat so that '
                'no batch is short')
        return batch

    def _deal(self, opened: Opened) -> tuple[list[Any], list[float]]:
        """Targets and weights of the micro-batches, where the loss is."""
        target: Any = opened.batch.target if opened.batch else None
        if self._is_first and not self._is_last:
            self._channels.send_targets(target)
        if not self._is_last:
            return [], []
        if not self._is_first:
            target = self._channels.receive_targets()
        count = min(opened.samples, self._micro_batches)
        targets = [target[start:end]
                   for start, end in bounds(opened.samples, count)]
        return targets, self._head.count(targets)

    def _total_weight(self, weight: float) -> float:
        """What a replica's weights are to be divided by.

        The mean over replicas that follows divides by their number.
        """
        if not self._is_last or self.grid.replicas == 1:
            return weight
        return self.grid.data.allreduce(weight) / self.grid.replicas

    def _run(self, schedule: Schedule, opened: Opened, iteration: int,
             head: LossHead | None, train: bool) -> list[Arrays]:
        parts = bounds(opened.samples, schedule.micro_batches)
        inputs = [] if opened.batch is None else [
            tuple(array[start:end] for array in opened.batch.inputs)
            for start, end in parts]
        places = [Place(self._seed, iteration, 0, opened.first_sample + start)
                  for start, _ in parts]
        return self._executor.run(schedule, self.grid.stage_index, inputs,
                                  places, head, train)

    def _infer(self, opened: Opened, head: LossHead | None) -> list[Arrays]:
        schedule = _forward(self.grid.stages,
                            min(opened.samples, self._micro_batches),
                            self.schedule.chunks)
        with preserved(), chainer.using_config('train', False), \
                chainer.no_backprop_mode():
            return self._run(schedule, opened, 0, head, train=False)

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
        return outputs if len(outputs) > 1 else outputs[0]


def _nobody(model: Any, loss_scale: float | None
            ) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


_forward = functools.lru_cache(16)(forward_schedule)

