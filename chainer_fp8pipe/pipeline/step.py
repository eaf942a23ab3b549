"""``Pipeline``: one step of a pipeline over all its ranks."""
# A step of training, on every rank:
#
#   the batch     goes from the first stage from rank to rank, in messages
#   meeting 1     all have read, and are about to do the same
#   the schedule  forward and backward of all micro-batches, by messages
#   meeting 2     all are well; the means of what was reported
#   the update    exchange over replicas, hooks and optimizer, reports
#   meeting 3     all have been updated
#
# Evaluation and prediction are the same without backward and update.  These
# three are the only collective calls, unless a parameter is on several stages
# or a model is traced anew; replicas exchange gradients and two numbers more.
# Between two meetings a rank may fail anywhere, in what users have written or
# here: ``Together.heard`` tells the others, and gives up the channels, for
# which they may be waiting.
#
# Ranks rehearse the micro-batches before the first meeting, each its share:
# what a model calls may depend on the batch, and a rank that ran into that in
# the middle of the schedule would leave the others with nothing to receive.
from __future__ import annotations

import contextlib
import functools
import numbers
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainermn.links import MultiNodeBatchNormalization
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)

from ..channel.channel import describe
from ..mpi.agreement import agree, raise_together
from ..mpi.grid import Group, ProcessGrid, grid_of
from ..mpi.watch import updates
from ..mpi.world import enter_world
from ..report.stream import stream_of
from .backprop import Arrays
from .layers import blame
from .meetings import NotTraced, Together, show_traceback
from .randomness import Place, preserved
from .reported import means
from .schedules import (
    Schedule,
    at_least_one,
    bounds,
    forward_schedule,
    make_schedule,
    recomputed,
)
from .stage import BATCH, Channels, Stage
from .whole_model import TiedGradients, decide_together, decisions
from .work import Batch, Work, samples_of, work_of

#: Reads a batch.
Read = Callable[[], Batch]


class Pipeline:
    """Trains, evaluates and predicts with a model that is on several ranks.

    Make it on all ranks, and call its methods on all of them; what fails on
    one is an error on all.  :class:`PipelineUpdater` does so for Chainer's
    Trainer; in a loop of your own the first stage gives the batches::

        pipeline = Pipeline(optimizer, comm, micro_batches=4)
        for x, t in batches:
            found = pipeline.step(x, t)
            print(found['loss'])

    The arguments are those of :class:`PipelineUpdater`; ``options`` are
    ``loss_weight`` and what only a ``Divisible`` is trained with.

    Attributes:
        grid: The :class:`ProcessGrid` of the ranks.
        schedule: The :class:`~.schedules.Schedule`.
        iteration: The number of updates so far.
        events: What this rank does, see :mod:`chainer_fp8pipe.report`.

    Raises:
        ValueError: The ranks differ in options, the stages do not fit
            together, or the optimizer is not one for these replicas; on all
            ranks.
    """

    def __init__(self, optimizer: Any, comm: Any, *,
                 micro_batches: int | None = None,
                 schedule: str | None = None, recompute: Any = None,
                 seed: int = 0, device: Any = None, **options: Any) -> None:
        enter_world()
        self.grid = grid = grid_of(comm)
        model: Any = getattr(optimizer, 'target', None)
        plan = getattr(model, 'plan', None)
        if micro_batches is None:
            micro_batches = plan.micro_batches if plan else 4
        if schedule is None:
            schedule = plan.schedule if plan else '1f1b'
        if recompute is None:
            recompute = plan.recompute if plan else 'no stage'

        def work() -> Work:
            at_least_one('micro_batches', micro_batches)
            if not isinstance(seed, numbers.Integral):
                raise TypeError(f'seed must be an integer, not {seed!r}')
            found = work_of(optimizer, grid, **options)
            _check_replicas(optimizer, grid)
            if device is not None:
                model.to_device(chainer.get_device(device))
            return found
        self._work = raise_together(grid.comm, work, error=ValueError)
        agree(grid.comm, {
            'micro_batches': str(micro_batches), 'schedule': str(schedule),
            'recompute': str(recompute), 'seed': str(seed),
            'metrics': ', '.join(self._work.metrics)},
            remedy='Pass the same to PipelineUpdater on all ranks.')
        agree(grid.comm, {}, self._work.problem())
        self.optimizer, self._seed = optimizer, int(seed)
        self.iteration = 0
        #: Told how far the first stage's data are, before forward runs.
        self.follow: Callable[[tuple[float, ...]], object] = _leave
        last = grid.stages * self._work.chunks - 1

        def order() -> tuple[Schedule, frozenset[int]]:
            again = recomputed(recompute, last)
            for name, differs in () if plan is None else (
                    ('micro_batches', micro_batches != plan.micro_batches),
                    ('schedule', schedule != plan.schedule),
                    ('recompute', again != recomputed(plan.recompute, last))):
                if differs:
                    raise ValueError(
                        f'the model was planned for {name}='
                        f'{getattr(plan, name)!r}; pass another to '
                        'partition(), not to the updater')
            return make_schedule(schedule, grid.stages, micro_batches,
                                 self._work.chunks), again
        self.schedule, again = raise_together(grid.comm, order,
                                              error=ValueError)
        # One stream, so that the exchange is seen beside the computation.
        self.events = stream_of(getattr(optimizer, 'communicator', None))
        self._together = Together(grid.comm, self.events, 'receive')
        self._stage = Stage(
            grid.stage_index, Channels(grid.pipeline, last, model.xp), last,
            again, self.events)
        self._stage.take(self._work.parts())
        self._tie()

    def step(self, *arrays: Any, **named: Any) -> dict[str, Any]:
        """One update of all stages.

        Args:
            arrays: Of a batch, as the model is called with them; with a
                ``Divisible``, inputs and then targets.  They count on the
                first stage; elsewhere leave them out.
            named: Instead of them, by name.

        Returns:
            The means over the batch of all replicas, the same on all ranks:
            ``'loss'``, and what the model has reported, with the paths of
            its links.
        """
        return self.train(lambda: self.read(_either(arrays, named)))[0]

    def train(self, read: Read
              ) -> tuple[dict[str, Any], tuple[float, ...]]:
        """As :meth:`step`, for a batch that is read on the first stage.

        Returns:
            The result of :meth:`step`, and the first stage's progress.

        Raises:
            StopIteration: ``read`` raised it; on all ranks.
        """
        grid, comm = self.grid, self.grid.comm
        optimizer = self.optimizer
        if grid.replicas > 1 and optimizer.is_changed(self._model):
            optimizer.communicator.bcast_data(self._model)
        scale = optimizer._loss_scale
        batch, problem = self._open(
            'train', read, lambda: {
                'the iteration': str(self.iteration),
                'the loss scale': str(scale),
                **decisions(optimizer, grid.stages, grid.replicas)})
        with self._heard('train', comm):
            weights: list[float] = []
            try:
                self._model.cleargrads()
                if problem is not None:
                    raise problem
                inputs, weights = self._work.deal('train', batch,
                                                  self._channels)
            finally:        # the other replicas' last stages wait for it
                total = self._total_weight(sum(weights))
            self._work.mean.begin(weights, total, scale)
            announced = getattr(getattr(optimizer, 'communicator', None),
                                'announced', None)
            exchange = (announced(self._model, scale) if announced
                        else contextlib.nullcontext())
            with _mode('train'), exchange as final:
                self._stage.run(
                    self.schedule, inputs,
                    self._places(batch, self.iteration), self._work.mean,
                    train=True, final=self._tied.but(final))
            self._stage.finish(scale)
            found = means(self._together.meet(comm, self._work.reported()))
        with self._heard('train', comm):
            self._channels.flush()
            self._work.end()
            with self.events.section('receive'):
                self._tied.add_up()
            named = self._update(found)
            self._together.meet(comm)
        self.iteration += 1
        updates.finished((id(self), 'pipeline'))
        return named, batch.progress

    def evaluate(self, *arrays: Any, **named: Any) -> dict[str, Any]:
        """Loss and metrics of a batch, without training; on all ranks.

        Arguments and result are those of :meth:`step`, for the batch of this
        pipeline.
        """
        return self._infer(
            'evaluate', lambda: self.read(_either(arrays, named)), dict,
            lambda outputs, batch: self._work.reported(),
            lambda found: self._work.report(means(found)))

    def predict(self, *inputs: Any, wanted: bool = True,
                method: str | None = None) -> Any:
        """The model's output; see :meth:`.PipelineUpdater.predict`."""
        outputs: Arrays = ()

        def say(parts: list[Arrays], batch: Batch) -> bool:
            nonlocal outputs
            asks = bool(wanted)
            if self._is_last:
                with blame(lambda: 'the output', 0):
                    outputs = self._work.joined(parts, batch.sizes)
                    # Sent, if anybody wants it, when all is well.
                    describe(outputs)
            return asks

        def hand_out(asking: list[bool]) -> Any:
            found = outputs
            if self._is_last:
                for rank, asks in enumerate(asking[:-1]):
                    if asks:
                        self._channels.sender(rank).send(outputs)
                self._channels.flush()
            elif asking[self.grid.stage_index]:
                found = self._channels.receiver(self.grid.stages - 1).receive()
            return (self._work.formed(found)
                    if asking[self.grid.stage_index] else None)
        return self._infer(
            'predict', lambda: self._work.batch(
                _given(inputs), with_target=False),
            lambda: {'the method that predicts': self._work.choose(method)},
            say, hand_out)

    def read(self, arrays: Any) -> Batch:
        """The batch of a converter's arrays: a tuple or dictionary."""
        return self._work.batch(arrays)

    def _infer(self, step: str, read: Read,
               entries: Callable[[], Mapping[str, str]],
               say: Callable[[list[Arrays], Batch], Any],
               then: Callable[[list[Any]], Any]) -> Any:
        """Runs forward only; ``then`` of what ``say`` gives on each rank."""
        comm = self.grid.pipeline
        batch, problem = self._open(step, read, entries)
        if isinstance(problem, NotTraced):      # on all ranks
            self._work.forget(step)
            raise problem
        with self._heard(step, comm):
            if problem is not None:
                raise problem
            inputs, weights = self._work.deal(step, batch, self._channels)
            self._work.mean.begin(weights, sum(weights), None)
            with _mode(step):
                outputs = self._stage.run(
                    _forward(self.grid.stages, len(batch.sizes),
                             self.schedule.chunks),
                    inputs, self._places(batch, 0),
                    self._work.mean if step == 'evaluate' else None,
                    train=False)
            found = self._together.meet(comm, say(outputs, batch))
        with self._heard(step, comm):
            self._channels.flush()
            self._work.end()
            result = then(found)
            self._together.meet(comm)
        return result

    # --- before a step ----------------------------------------------------

    @property
    def _model(self) -> Any:
        return self.optimizer.target

    @property
    def _is_last(self) -> bool:
        return self.grid.stage_index == self.grid.stages - 1

    @property
    def _channels(self) -> Channels:
        return self._stage.channels

    def _tie(self) -> None:
        self._tied = TiedGradients(
            self.grid, self._work.tied(),
            [one for _, one in self._model.namedparams()], self._channels)

    def _open(self, step: str, read: Read,
              entries: Callable[[], Mapping[str, str]] = dict
              ) -> tuple[Batch, BaseException | None]:
        """All ranks learn what the first stage has read, or that it failed.

        Args:
            step: ``'train'``, ``'evaluate'`` or ``'predict'``.
            read: Gives the batch; called on the first stage only.
            entries: Gives what else must be the same on all ranks.

        Returns:
            The batch, and the error that all ranks of this pipeline have
            found in it; other pipelines hear of it in the next meeting.

        Raises:
            StopIteration: ``read`` raised it; on all ranks.
            ValueError: It raised something else, ranks are about to do
                different things, a rehearsal or an earlier step failed; on
                all ranks.
            BaseException: What is no Exception, on the rank that raised it.
        """
        grid, together = self.grid, self._together
        error: BaseException | None = None
        mine: dict[str, str] = {}
        try:
            mine = dict(entries())
            together.must_go_on()       # other replicas may not know
        except BaseException as reason:     # the others wait for this rank
            error = reason
        batch = Batch(step=step)
        if not together.broken:
            if grid.stage_index == 0:
                batch, error = self._read(step, read, error)
            with self.events.section('receive'):
                batch = self._pass_on(batch)
        value = None
        if error is None and batch.sizes:
            value, error = self._trying(step, lambda: self._rehearse(
                step, batch))
        comm = grid.comm if batch.step == 'train' else grid.pipeline
        heard = together.begin(comm, error, {
            'the step': (batch.step
                         + ' although the data have ended' * batch.ended),
            **mine}, value)
        if batch.ended:
            raise StopIteration
        _, problem = self._trying(step, lambda: self._work.prepare(
            step, batch, heard if comm is grid.pipeline else [
                heard[ranks[grid.replica_index]]
                for ranks in grid.ranks]))
        return batch, problem

    def _rehearse(self, step: str, batch: Batch) -> Any:
        if batch.step != step:
            raise ValueError(
                f'this rank is about to {step}, but the first stage to '
                f'{batch.step}; call the same on all ranks')
        if step == 'train':
            self.follow(batch.progress)    # forward may ask the iterator
        return self._work.rehearse(step, batch, self._places(
            batch, self.iteration * (step == 'train')))

    def _read(self, step: str, read: Read, error: BaseException | None
              ) -> tuple[Batch, BaseException | None]:
        """The first stage's batch, cut."""
        batch = Batch(step=step)
        if error is None:
            try:
                new = read()
                samples = samples_of(new.arrays or [new.target],
                                     lists=True)
                sizes = [end - start for start, end in bounds(
                    samples, self._parts(step, samples))]
                batch = self._work.cut(new._replace(step=step), sizes)
            except StopIteration:
                batch = Batch(step=step, ended=True)
            except BaseException as reason:     # the others wait
                error = reason
                show_traceback(self.grid.comm)
        if step == 'train' and self.grid.replicas > 1:
            with self.events.section('receive'):
                before = self.grid.data.allgather(sum(batch.sizes))[
                    :self.grid.replica_index]
            batch = batch._replace(first_sample=sum(before))
        return batch, error

    def _pass_on(self, batch: Batch) -> Batch:
        """The batch, from each stage to the next."""
        rank = self.grid.stage_index
        before = (self._channels.receiver(rank - 1, BATCH) if rank else None)
        after = (None if self._is_last
                 else self._channels.sender(rank + 1, BATCH))
        if before is None:
            words = pickle.dumps(batch._replace(parts=[], target=None))
            message: Arrays = (numpy.frombuffer(words, numpy.uint8),)
        else:
            message = before.receive()
            batch = pickle.loads(message[0].tobytes())
        if after is not None:
            after.send(message)
        parts = batch.parts
        for number in range(len(batch.trees)):
            if before is not None:
                parts.append(list(before.receive()))
            if after is not None:
                after.send(parts[number])
        return batch

    def _parts(self, step: str, samples: int) -> int:
        """The number of micro-batches."""
        parts = self.schedule.micro_batches
        if step != 'train':
            return min(samples, parts)
        if samples < parts:
            raise ValueError(
                f'a batch of {samples} cannot be cut into {parts} '
                'micro-batches; lower micro_batches, raise the batch size, '
                'or let the iterator repeat')
        return parts

    def _places(self, batch: Batch, iteration: int) -> list[Place]:
        return [Place(self._seed, iteration, 0, batch.first_sample + start)
                for start, _ in bounds(sum(batch.sizes),
                                       len(batch.sizes))]

    # --- the work, and what follows it ------------------------------------

    def _trying(self, step: str, action: Callable[[], Any]
                ) -> tuple[Any, BaseException | None]:
        """An action's result in the step's mode, or its exception."""
        try:
            with _mode(step):
                return action(), None
        except BaseException as error:      # the others wait for this rank
            return None, error

    @contextlib.contextmanager
    def _heard(self, step: str, comm: Any) -> Any:
        """As :meth:`.Together.heard`, for a part of a step.

        After a training step that has failed ranks may have been updated, or
        not.  Any other has changed nothing: what follows it has new channels,
        which nothing of it can reach.
        """
        def tell(text: str) -> None:
            self._channels.fail(text)
            if step == 'train':     # ranks may normalise with this one
                for group in {vars(link).get('group')
                              for link in self._model.links()}:
                    if isinstance(group, Group):
                        group.give_up(text)
            self._stage.forget()
            self._work.forget(step)
        try:
            with self._together.heard(comm, tell):
                yield
        except BaseException:       # on all ranks
            self._channels.spoil()
            if step != 'train':
                self._together.broken = ''
                self._stage.channels = Channels(
                    self.grid.pipeline, self.schedule.last_chunk,
                    self._model.xp)
                self._tie()
            raise

    def _total_weight(self, weight: float) -> float:
        """A replica's divisor; the mean over replicas divides once more."""
        if not self._is_last or self.grid.replicas == 1:
            return weight
        with self.events.section('receive'):
            return self.grid.data.allreduce(weight) / self.grid.replicas

    def _update(self, found: dict[str, Any]) -> dict[str, Any]:
        """Exchange, reports and update, which call what users have written.

        Of a multi-node optimizer it does what its ``update`` does, but never
        spends an update on sending parameters: those that this forward pass
        has made are the same on all replicas.
        """
        optimizer = self.optimizer
        if type(optimizer) is _MultiNodeOptimizer:
            with self.events.section('exchange'):
                optimizer.communicator.multi_node_mean_grad(
                    self._model, optimizer.zero_fill)
            if self._work.has_ties:
                self._add(0.0)      # another stage's may have failed
                self._tied.hand_back()
            optimizer = optimizer.actual_optimizer
        named = self._work.report(found)
        decide_together(optimizer, self._add)
        with self.events.section('update'):
            optimizer.update()
        return named

    def _add(self, number: float) -> float:
        """Sums a number over the stages, the same sum on all ranks.

        After an exchange the replicas have the same numbers: the first one's
        count.
        """
        return self._together.add(
            0.0 if self.grid.replica_index else number)


_forward = functools.lru_cache(16)(forward_schedule)


def _leave(progress: tuple[float, ...]) -> None:
    """Nobody asks how far the data are."""


@contextlib.contextmanager
def _mode(step: str) -> Iterator[None]:
    """A block with Chainer's settings for a step, which draws for itself."""
    with preserved():
        if step == 'train':
            yield
        else:
            with chainer.using_config('train', False), \
                    chainer.no_backprop_mode():
                yield


def _either(arrays: tuple, named: dict[str, Any]) -> Any:
    if arrays and named:
        raise ValueError('give the arrays of a batch by position, or all of '
                         'them by name')
    return named or arrays


def _given(inputs: tuple) -> tuple:
    if not inputs or any(array is None for array in inputs):
        raise ValueError('the first stage of each pipeline needs arrays')
    return tuple(array.array if isinstance(array, chainer.Variable)
                 else array for array in inputs)


def _check_replicas(optimizer: Any, grid: ProcessGrid) -> None:
    if isinstance(optimizer, _DoubleBufferingOptimizer):
        raise ValueError('double buffering would average gradients while the '
                         'next step sums into them; leave it out')
    communicator = getattr(optimizer, 'communicator', None)
    if communicator is None:
        if grid.replicas > 1:
            raise ValueError(
                f'{grid.replicas} replicas would go apart; wrap the optimizer '
                'in create_multi_node_optimizer(optimizer, '
                'create_communicator(..., mpi_comm=grid.data))')
    elif communicator.size != grid.replicas:
        raise ValueError(
            f"the optimizer's communicator has {communicator.size} ranks but "
            f'a stage has {grid.replicas} replicas; make the communicator '
            'with mpi_comm=grid.data of a ProcessGrid')
    for link in optimizer.target.links():
        if isinstance(link, MultiNodeBatchNormalization) and (
                link.comm.size > grid.replicas):
            raise ValueError(
                f'a MultiNodeBatchNormalization is over {link.comm.size} '
                f'ranks but a stage has {grid.replicas} replicas; the others '
                'would not answer: make its communicator with '
                'mpi_comm=grid.data of a ProcessGrid')
