"""``Pipeline``: one step of a pipeline over all its ranks."""
# A step of training, on every rank:
#
#   the batch     goes from the first stage to the others, in messages
#   meeting 1     all have read, and are about to do the same
#   the schedule  forward and backward of all micro-batches, by messages
#   meeting 2     all are well; the means of what was reported
#   the update    exchange over replicas, hooks and optimizer, reports
#   meeting 3     all have been updated
#
# Evaluation and prediction are the same without backward and update.  These
# three are the only collective calls; replicas exchange gradients and a number
# more.  Between two meetings a rank may fail anywhere: it says so in the next
# one, and gives up the channels, for which others may be waiting; but of one
# that fails in the exchange replicas hear by the watch.  Ranks of a Chain
# record the first micro-batch, or all, before the first meeting, as what a
# model calls may depend on the batch.
from __future__ import annotations

import contextlib
import gc
import numbers
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import chainer
import numpy
from chainermn.links import MultiNodeBatchNormalization
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)

from ..mpi.agreement import is_raised_by_all, raise_together
from ..mpi.grid import Group, ProcessGrid, grid_of
from ..mpi.watch import updates
from ..report.stream import stream_of
from .adapter import Adapter, Batch, adapter_of
from .backprop import Arrays
from .channel import ANY, BATCH, Channels, RemoteError, describe
from .layers import blame, kind_of
from .means import of_all
from .meetings import (
    Meetings,
    NotTraced,
    counting_nothing,
    decide_together,
    decisions,
    show_traceback,
    tied_gradients,
)
from .randomness import Place, preserved
from .schedules import Schedule, bounds, make_schedule, recomputed
from .stage import Stage


class Pipeline:
    """Trains, evaluates and predicts with a model that is on several ranks.

    Make it on all ranks, and call its methods on all of them; what fails on
    one is an error on all.  :class:`PipelineUpdater` does so for Chainer's
    Trainer; in a loop of your own the first stage gives the batches::

        pipeline = Pipeline(optimizer, comm, micro_batches=4)
        for x, t in batches:
            found = pipeline.step(x, t)
            print(found['loss'])

    The arguments are those of :class:`PipelineUpdater`.

    Attributes:
        grid: The :class:`ProcessGrid` of the ranks.
        schedule: The :class:`~.schedules.Schedule`.
        iteration: The number of updates so far.
        events: What this rank does, see :mod:`chainer_fp8pipe.report`.
        follow: Told how far the first stage's data are, before forward runs.
        reports_variables: Whether an update observes a variable where a Chain
            has reported one, as Chainer's updaters do; False: a number.

    Raises:
        ValueError: As :class:`PipelineUpdater`.
    """

    reports_variables = False

    def __init__(self, optimizer: Any, comm: Any, *,
                 micro_batches: int | None = None,
                 schedule: str | None = None, recompute: Any = None,
                 seed: int = 0, device: Any = None, **options: Any) -> None:
        self.grid = grid = grid_of(comm)
        model: Any = getattr(optimizer, 'target', None)
        plan = getattr(model, 'plan', None)
        given: dict[str, Any] = {
            name: getattr(plan, name, usual) if value is None else value
            for name, value, usual in (
                ('micro_batches', micro_batches, 4),
                ('schedule', schedule, '1f1b'),
                ('recompute', recompute, False))}

        def checked() -> tuple[Adapter, Schedule, frozenset[int]]:
            if not isinstance(seed, numbers.Integral):
                raise TypeError(f'seed must be an integer, not {seed!r}')
            found = adapter_of(optimizer, grid, **options)
            for name, value in options.items():
                if value is not None and not callable(value):
                    raise TypeError(f'{name} must be a function, not '
                                    f'{value!r}')
            _check_replicas(optimizer, grid)
            last = grid.stages * found.chunks - 1
            again = recomputed(given['recompute'], last)
            order = make_schedule(given['schedule'], grid.stages,
                                  given['micro_batches'], found.chunks)
            for name, value in given.items() if plan else ():
                planned = getattr(plan, name)
                if value != planned and not (
                        name == 'recompute'
                        and again == recomputed(planned, last)):
                    raise ValueError(
                        f'the model was planned for {name}={planned!r}; pass '
                        'another to partition(), not to the updater')
            if device is not None:
                model.to_device(chainer.get_device(device))
            return found, order, again
        self._adapter, self.schedule, again = raise_together(
            grid.comm, checked, ValueError, lambda found: {
                **{name: str(value) for name, value in given.items()},
                **{name: 'none' if value is None else kind_of(value)
                   for name, value in options.items()},
                'seed': str(seed),
                'the cut of the layers': str(found[0].layout)},
            'Pass the same to PipelineUpdater on all ranks.')
        self.optimizer, self._seed, self.iteration = optimizer, int(seed), 0
        self.follow: Callable[[dict[str, Any]], object] = lambda now: None
        # One stream, so that the exchange is seen beside the computation.
        self.events = stream_of(getattr(optimizer, 'communicator', None))
        self._meetings = Meetings(grid.comm, self._waits)
        last = self.schedule.last_chunk
        self._channels = Channels(grid.pipeline, last, model.xp)
        self._stage = Stage(self._channels, last, again, self.events,
                            self._adapter.parts())

    def step(self, *arrays: Any, **named: Any) -> dict[str, Any]:
        """One update of all stages.

        Args:
            arrays: Of a batch, as the model is called with them; with a
                ``Divisible``, inputs and then the target.  They count on the
                first stage; elsewhere leave them out.
            named: Instead of them, of a Chain's batch.

        Returns:
            The means over the batch of all replicas, the same on all ranks:
            ``'loss'``, and what the model has reported, with the paths of
            its links.
        """
        return self.train(lambda: self.read(_either(arrays, named)))

    def train(self, read: Callable[[], Batch]) -> dict[str, Any]:
        """As :meth:`step`, for a batch that is read on the first stage.

        Where ``read`` raises StopIteration, all ranks do.
        """
        optimizer = self.optimizer
        if self.grid.replicas > 1 and optimizer.is_changed(self._model):
            optimizer.communicator.bcast_data(self._model)
        named = self._run('train', read)
        self.iteration += 1
        updates.finished((id(self), 'pipeline'))
        return named

    def evaluate(self, *arrays: Any, **named: Any) -> dict[str, Any]:
        """As :meth:`step`, without training, for this pipeline's batch."""
        return self._run('evaluate', lambda: self.read(
            _either(arrays, named)))

    def predict(self, *inputs: Any, method: str | None = None) -> Any:
        """The model's output; see :meth:`.PipelineUpdater.predict`."""
        def read() -> Batch:
            if not inputs or any(array is None for array in inputs):
                raise ValueError(
                    'the first stage of each pipeline needs arrays')
            return self._adapter.batch(tuple(
                getattr(array, 'array', array) for array in inputs), False)
        return self._run('predict', read, method)

    def read(self, arrays: Any) -> Batch:
        """The batch of a converter's arrays: a tuple or dictionary."""
        return self._adapter.batch(arrays)

    @property
    def _model(self) -> Any:
        return self.optimizer.target

    @property
    def _is_last(self) -> bool:
        return self.grid.stage_index == self.grid.stages - 1

    def _waits(self) -> contextlib.AbstractContextManager[None]:
        return self.events.section('receive')

    # --- a step -------------------------------------------------------------

    def _run(self, step: str, read: Callable[[], Batch],
             method: str | None = None) -> Any:
        """The result of a step: ``'train'``, ``'evaluate'``, ``'predict'``."""
        meetings = self._meetings
        with _uncollected(), self._channels.moving():
            batch, total = self._open(step, read, method)
            try:
                return self._carry_out(step, batch, total)
            except BaseException as error:      # on all ranks
                # The others hear of it in their next meeting, or where they
                # wait for this rank, and raise a RemoteError.
                try:
                    if not (isinstance(error, RemoteError)
                            and is_raised_by_all(error)):
                        self._give_up(step, str(error))
                        meetings.meet(self._comm(step), error=error)
                    raise
                finally:
                    self._stage.forget()
                    self._adapter.end(step)
                    self._channels.renew()
                    if step != 'train':     # which alone changes something
                        meetings.broken = ''

    def _carry_out(self, step: str, batch: Batch, total: float) -> Any:
        """What follows the first meeting; the result."""
        comm, adapter, train = self._comm(step), self._adapter, step == 'train'
        grid = self.grid
        scale = self.optimizer._loss_scale if train else None
        if train:
            self._model.cleargrads()

        def slopes() -> list[float]:
            weights = adapter.weigh()
            whole = total if grid.replicas > 1 else sum(weights)
            return [weight / (whole or 1.0) * (1.0 if scale is None else scale)
                    for weight in weights]
        schedule = self.schedule if train else make_schedule(
            'forward', grid.stages, batch.micro_batches, self.schedule.chunks)
        with _mode(step):
            outputs = self._stage.run(
                schedule, batch.rows(batch.inputs), self._places(batch),
                slopes, train)
        if train:
            self._stage.finish(scale)
        joined: Arrays = ()
        if step == 'predict' and self._is_last:
            with blame(lambda: 'the output', 0):
                joined = adapter.joined(outputs, batch.sizes)
        everyone, later = zip(*self._meetings.meet(comm, (
            None if step == 'predict' else adapter.reported(outputs),
            adapter.found_later())), strict=True)
        if any(one != later[0] for one in later):
            self._refuse_other_calls()
        self._channels.flush()
        adapter.end()
        result: Any = (
            self._update(everyone) if train
            else adapter.report(of_all(everyone)) if step == 'evaluate'
            else adapter.formed(self._on_all(joined, grid.stages - 1)))
        self._meetings.meet(comm)
        return result

    def _update(self, everyone: Sequence[Any]) -> dict[str, Any]:
        """Exchange, reports and update.

        Of a multi-node optimizer it does what its ``update`` does, but never
        spends an update on sending parameters.
        """
        optimizer = self.optimizer
        with tied_gradients(
                self.grid.stage_index, self._adapter.tied(), self._model,
                self._channels, self._waits):
            if type(optimizer) is _MultiNodeOptimizer:
                with self.events.section('exchange'):
                    optimizer.communicator.multi_node_mean_grad(
                        self._model, optimizer.zero_fill)
                optimizer = optimizer.actual_optimizer
        named = self._adapter.report(of_all(everyone), self.reports_variables)
        # After an exchange the replicas have the same numbers: the first
        # one's count.
        decide_together(optimizer, lambda number: float(numpy.sum(
            self._meetings.meet(self.grid.comm, 0.0 if self.grid.replica_index
                                else number))))
        with self.events.section('update'), counting_nothing(
                optimizer, self.grid.stages):
            optimizer.update()
        return named

    def _on_all(self, arrays: Arrays, stage: int, tag: int = ANY) -> Arrays:
        """What one stage has, on all; all have it by the next meeting."""
        if self.grid.stage_index != stage:
            return self._channels.receive(stage, tag)
        for rank in {*range(self.grid.stages)} - {stage}:
            self._channels.send(arrays, rank, tag)
        return arrays

    def _give_up(self, step: str, text: str) -> None:
        """Makes ranks that wait for this one fail, too."""
        self._channels.fail(text)
        if step == 'train':         # ranks may normalise with this one
            for group in {group for link in self._model.links()
                          if isinstance(group := vars(link).get('group'),
                                        Group)}:
                group.give_up(text)

    # --- before a step ------------------------------------------------------

    def _comm(self, step: str) -> Any:
        """The ranks that take part in a step."""
        return self.grid.comm if step == 'train' else self.grid.pipeline

    def _open(self, step: str, read: Callable[[], Batch], method: str | None
              ) -> tuple[Batch, float]:
        """The first meeting, where all hear what has failed anywhere.

        Returns the batch that the first stage has read, and the sum of all
        weights in the loss, by replica.
        """
        grid, meetings, adapter = self.grid, self._meetings, self._adapter
        batch, mine, value = Batch(step=step), {}, None
        with meetings.noting():
            mine = self._settings(step, method)
        if not meetings.broken:
            if grid.stage_index == 0:
                batch = self._first_batch(step, read)
            with meetings.noting(), self._waits():
                batch = self._pass_on(batch)
        if not meetings.errors and batch.micro_batches:
            with meetings.noting():
                value = self._rehearse(step, batch), sum(adapter.weights)
                mine['the unit in which micro-batches weigh, which '
                     'PipelineUpdater(loss_weight=) gives,'] = adapter.unit
        comm = self._comm(batch.step)
        try:
            heard = meetings.open(comm, {
                'the step': (batch.step
                             + ' although the data have ended' * batch.ended),
                **mine}, value)
            if batch.ended:
                raise StopIteration
            pipelines = [heard] if comm is grid.pipeline else [
                [heard[ranks[replica]] for ranks in grid.ranks]
                for replica in range(grid.replicas)]
            differ = [any(one != said[0][0] for one, _ in said)
                      for said in pipelines]
            if any(differ):
                self._refuse_other_calls(
                    differ[-1 if len(differ) == 1 else grid.replica_index])
        except BaseException as error:      # on all ranks
            adapter.end('before')
            if not isinstance(error, StopIteration):
                self._channels.renew()      # a batch may be lost on its way
            raise
        # The mean over replicas divides once more.
        return batch, sum(said[-1][1] for said in pipelines) / len(pipelines)

    def _refuse_other_calls(self, is_own: bool = True) -> NoReturn:
        if is_own:
            self._adapter.explain()
        raise NotTraced('the ranks of a pipeline have recorded other calls, '
                        'which must not depend on the rank')

    def _settings(self, step: str, method: str | None) -> dict[str, str]:
        """What else must be the same on all ranks."""
        grid, optimizer, found = self.grid, self.optimizer, {}
        if step == 'train':
            found = {'the iteration': str(self.iteration),
                     'the loss scale': str(optimizer._loss_scale),
                     **decisions(optimizer, grid.stages, grid.replicas)}
        elif step == 'predict':
            found = {'the method that predicts': self._adapter.choose(method)}
        if self._meetings.broken:       # other replicas may not know
            raise ValueError('these ranks failed before '
                             f'({self._meetings.broken}); make a new updater')
        return found

    def _rehearse(self, step: str, batch: Batch) -> Any:
        if batch.step != step:
            raise ValueError(
                f'this rank is about to {step}, but the first stage to '
                f'{batch.step}; call the same on all ranks')
        if step == 'train':
            self.follow(batch.progress)    # forward may ask the iterator
        with _mode(step):
            return self._adapter.rehearse(step, batch, self._places(batch))

    def _first_batch(self, step: str, read: Callable[[], Batch]) -> Batch:
        """The first stage's batch, cut."""
        batch = Batch(step=step)
        with self._meetings.noting():
            if not self._meetings.errors:
                try:
                    batch = self._cut(step, read())
                except StopIteration:
                    batch = Batch(step=step, ended=True)
                except BaseException:
                    show_traceback(self.grid.comm)
                    raise
        if step == 'train' and self.grid.replicas > 1:
            with self._waits():
                before = self.grid.data.allgather(batch.samples)[
                    :self.grid.replica_index]
            batch = batch._replace(first_sample=sum(before))
        return batch

    def _cut(self, step: str, batch: Batch) -> Batch:
        samples, parts = batch.samples, self.schedule.micro_batches
        if step != 'train':
            parts = min(samples, parts)
        elif samples < parts:
            raise ValueError(
                f'a batch of {samples} cannot be cut into {parts} '
                'micro-batches; lower micro_batches, raise the batch '
                'size, or let the iterator repeat')
        batch = batch._replace(step=step, micro_batches=parts)
        _words(batch)           # or it could not be sent
        if self.grid.stages > 1:
            describe(batch.arrays)
        return batch

    def _pass_on(self, batch: Batch) -> Batch:
        """The first stage's batch, on all."""
        try:
            words, *arrays = self._on_all((_words(batch), *batch.arrays), 0,
                                          BATCH)
        except BaseException as error:      # others may wait for it
            self._channels.fail(str(error))
            if not isinstance(error, Exception):
                raise
            raise ValueError('the batch was not passed on: '
                             f'{type(error).__name__}: {error}') from error
        return batch if self.grid.stage_index == 0 else pickle.loads(
            words.tobytes())._replace(arrays=arrays)

    def _places(self, batch: Batch) -> list[Place]:
        iteration = self.iteration if batch.step == 'train' else 0
        return [Place(self._seed, iteration, 0, batch.first_sample + start)
                for start, _ in bounds(batch.samples, batch.micro_batches)]


def _words(batch: Batch) -> numpy.ndarray:
    """A batch without its arrays, which are sent after it, pickled."""
    return numpy.frombuffer(pickle.dumps(batch._replace(
        arrays=[], inputs=[])), numpy.uint8)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A block without Python's collector of cycles.

    The calls of a batch are many objects, which all live until the step ends.
    The collector would look at them again and again, and find none: that was
    a tenth of a step of an encoder of 500 calls.
    """
    restore = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def _mode(step: str) -> Iterator[None]:
    """A block with Chainer's settings for a step, which draws for itself."""
    with preserved(), contextlib.ExitStack() as stack:
        for name in ('train', 'enable_backprop') if step != 'train' else ():
            stack.enter_context(chainer.using_config(name, False))
        yield


def _either(arrays: tuple, named: dict[str, Any]) -> Any:
    if arrays and named:
        raise ValueError('give the arrays of a batch by position, or all of '
                         'them by name')
    return named or arrays


def _check_replicas(optimizer: Any, grid: ProcessGrid) -> None:
    if isinstance(optimizer, _DoubleBufferingOptimizer):
        raise ValueError('double buffering would average gradients while the '
                         'next step sums into them; leave it out')
    communicator = getattr(optimizer, 'communicator', None)
    sizes = [1 if communicator is None else communicator.size, *[
        link.comm.size for link in optimizer.target.links()
        if isinstance(link, MultiNodeBatchNormalization)]]
    if sizes[0] != grid.replicas or max(sizes) > grid.replicas:
        raise ValueError(
            f'a stage has {grid.replicas} replicas, and the optimizer, or a '
            f'MultiNodeBatchNormalization, is for {max(sizes)}; wrap the '
            'optimizer in create_multi_node_optimizer(optimizer, '
            'create_communicator(..., mpi_comm=grid.data)) with grid a '
            'ProcessGrid')
