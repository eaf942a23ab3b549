"""``PipelineUpdater``: pipeline-parallel training under Chainer's Trainer."""
from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import chainer
import chainer.functions as F
from chainer.dataset import concat_examples, convert
from chainer.training.updaters import StandardUpdater
from chainermn.links import MultiNodeBatchNormalization
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)

from ...chains.layers import cut_layers
from ...chains.partitioned_chain import PartitionedChain
from ...channel.channel import CODECS
from ...mpi.agreement import Signature, agree, raise_together
from ...mpi.failure.update_count import updates
from ...mpi.failure.world import enter_world
from ...mpi.grid import ProcessGrid
from ...mpi.once import once
from ...report.stream import EventStream
from ..learning_rate import check_count
from .chain_work import ChainWork, LayersWork, layout_of
from .following_iterator import FollowingIterator, progress
from .pipeline_steps import PipelineSteps
from .together import StepBatch
from .whole_model import decide_together, decisions, draw_alike


class PipelineUpdater(StandardUpdater):
    """Trains one model over several ranks, each with some of its layers.

    Make it on all ranks; from then on, an exception that nobody catches ends
    the whole job.  The batch is cut into micro-batches, which go through the
    stages as the schedule says.  Loss and gradients are those of serial
    training on the same micro-batches.  Only the ranks of the first stage
    read data; all ranks report the same loss.  The optimizer updates this
    rank's layers; clipping and dynamic loss scaling look at all stages.

    From Takisawa, Yazaki, Ishihata: "Proposing an Implementation Method for
    Pipeline Parallelism Distributed Deep Learning" (Program 3), with the
    schedules of :mod:`chainer_fp8pipe.pipeline.schedules`.

    Args:
        iterator: Gives batches on the ranks of the first stage; elsewhere it
            is not used and may be None.  The last element of an example is
            the target, the others are arguments of the first layer.
        optimizer: Set up with this rank's stage, ``Net().stage(comm)``, or
            with the model that :func:`partition` has cut.  With replicas,
            ChainerMN's multi-node optimizer around a communicator of
            ``grid.data``.
        comm: The ranks: a communicator of ChainerMN or mpi4py, or a
            :class:`ProcessGrid`.
        loss_fun: ``loss_fun(*outputs, target)``; returns a mean.  Default:
            ``softmax_cross_entropy``.  Like ``metrics`` and ``label_key``
            refused with a model that :func:`partition` has cut:
            ``model(*batch)`` is the loss, and the model reports metrics.
        micro_batches: Into how many a batch is cut; default: what a
            planned model was planned for, or 4.
        schedule: ``'gpipe'``, ``'1f1b'``, ``'interleaved'`` or
            ``'zero_bubble'``; default: what a planned model was planned
            for, or ``'1f1b'``.
        recompute: ``'no stage'``, ``'every stage'`` or ``'every stage but
            the last'``: which keep their inputs only and run forward twice.
            True and False mean the second and the first.  Default: no
            stage, or for a planned model those of its plan.
        metrics: Name to function of the loss's arguments, reported beside
            it; default: accuracy if ``loss_fun`` is left out or is
            ``softmax_cross_entropy``.
        loss_weight: ``loss_weight(target)``: how much a micro-batch counts
            in the mean loss; default: the labels that ``loss_fun`` does not
            ignore, or else samples.  Of a model that :func:`partition` has
            cut, ``loss_weight(*batch)``.  A metric may have its own, as a
            pair: ``{name: (function, weight)}``.
        converter: Makes arrays of a batch.
        device: Where the model and the arrays go.
        label_key: Index or key of the target in an example; default: the
            last.
        activation_codec: ``'fp8'``: activations and their gradients cross
            as fp8; default: as they are.
        seed: Of what layers and the loss draw, such as dropout masks;
            initial values, deferred ones too, come from the model's seed.
        auto_new_epoch: As in ``StandardUpdater``.

    Raises:
        ValueError: The ranks differ in options, the stages do not fit
            together, or the optimizer is not one for these replicas; on all
            ranks.

    .. admonition:: Example

        >>> import chainer, numpy
        >>> import chainer.links as L
        >>> from mpi4py import MPI
        >>> from chainer_fp8pipe import Divisible, PipelineUpdater
        >>> model = Divisible(L.Linear(4, 3)).stage(MPI.COMM_WORLD)
        >>> data = chainer.datasets.TupleDataset(
        ...     numpy.ones((6, 4), 'f'), numpy.zeros(6, 'i'))
        >>> updater = PipelineUpdater(
        ...     chainer.iterators.SerialIterator(data, 6),
        ...     chainer.optimizers.SGD().setup(model), MPI.COMM_WORLD,
        ...     micro_batches=3)
        >>> updater.update()
        >>> updater.iteration
        1
    """

    def __init__(self, iterator: Any, optimizer: Any, comm: Any, *,
                 loss_fun: Callable | None = None,
                 micro_batches: int | None = None,
                 schedule: str | None = None,
                 recompute: Any = None,
                 metrics: Mapping[str, Callable] | None = None,
                 loss_weight: Callable | None = None,
                 converter: Callable = concat_examples, device: Any = None,
                 label_key: Any = None, activation_codec: str | None = None,
                 seed: int = 0, auto_new_epoch: bool = True) -> None:
        enter_world()
        grid = comm if isinstance(comm, ProcessGrid) else once(
            getattr(comm, 'mpi_comm', comm), 'one pipeline',
            lambda: ProcessGrid(comm, pipeline=comm.size))
        plan = getattr(getattr(optimizer, 'target', None), 'plan', None)
        if micro_batches is None:
            micro_batches = plan.micro_batches if plan else 4
        if schedule is None:
            schedule = plan.schedule if plan else '1f1b'
        self.grid, self._seed = grid, seed
        raise_together(grid.comm, lambda: _check(
            iterator, optimizer, grid, micro_batches=micro_batches,
            activation_codec=activation_codec, seed=seed, loss_fun=loss_fun,
            metrics=metrics, label_key=label_key, loss_weight=loss_weight),
            error=ValueError)
        if loss_fun is None:
            loss_fun = F.softmax_cross_entropy
        if metrics is None:
            metrics = ({'accuracy': F.accuracy}
                       if loss_fun is F.softmax_cross_entropy else {})
        self.label_key = -1 if label_key is None else label_key
        agree(grid.comm, Signature({
            'micro_batches': str(micro_batches), 'schedule': str(schedule),
            'recompute': str(recompute), 'seed': str(seed),
            'activation_codec': str(activation_codec),
            'metrics': ', '.join(metrics)}),
            remedy='Pass the same to PipelineUpdater on all ranks.')
        model = optimizer.target
        is_chain = isinstance(model, PartitionedChain)
        if is_chain:
            model.partition.optimizer = optimizer
        else:
            problem, layout = layout_of(model, grid)
            agree(grid.comm, Signature({}), problem,
                  'Make this rank\'s model with Net().stage(comm).')
        if recompute is None:
            recompute = plan.recompute if plan else 'no stage'
        if grid.stage_index or iterator is None:
            iterator = FollowingIterator()
        start = functools.partial(
            super().__init__, iterator, optimizer, converter, device,
            auto_new_epoch=auto_new_epoch)
        raise_together(grid.comm, start, error=ValueError)

        def work() -> ChainWork:
            if is_chain:
                return ChainWork(model, model.partition, grid, loss_weight)
            whole, part = cut_layers(model, grid, layout, micro_batches,
                                     schedule)
            return LayersWork(model, whole, part, grid, loss_fun, metrics,
                              loss_weight)
        self._work = raise_together(grid.comm, work, error=ValueError)
        # One stream, so that the exchange is seen beside the computation.
        found = getattr(getattr(optimizer, 'communicator', None), 'events',
                        None)
        self.events = (found if isinstance(found, EventStream)
                       else EventStream())
        self._steps = raise_together(grid.comm, lambda: PipelineSteps(
            model, grid, self._work, micro_batches=micro_batches,
            schedule=schedule, recompute=recompute,
            activation_codec=activation_codec, seed=seed,
            events=self.events), error=ValueError)
        self._steps.connect()

    @property
    def schedule(self) -> Any:
        """The :class:`~.schedules.Schedule`."""
        return self._steps.schedule

    def update_core(self) -> None:
        """One update of all stages; call it on all ranks."""
        optimizer = self.get_optimizer('main')
        iterator = self.get_iterator('main')
        model = optimizer.target
        if self.grid.replicas > 1 and optimizer.is_changed(model):
            optimizer.communicator.bcast_data(model)
        means, now = self._steps.train(
            self._read, self.iteration, optimizer._loss_scale,
            lambda: decisions(optimizer, self.grid.stages), getattr(
                getattr(optimizer, 'communicator', None), 'announced', None))
        if isinstance(iterator, FollowingIterator):
            iterator.follow(now)
        exchange = None
        if type(optimizer) is _MultiNodeOptimizer:
            # What its update() does, but that never spends an update on
            # sending parameters: those that this forward pass has made are
            # the same on all replicas.
            exchange = functools.partial(self._exchange, optimizer, model)
            optimizer = optimizer.actual_optimizer
        self._steps.finish(lambda: self._finish(optimizer, means), exchange)
        self.events.stop()      # what follows is no part of an update
        updates.finished((id(self), 'pipeline'))
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def _exchange(self, optimizer: Any, model: Any) -> None:
        with self.events.section('exchange'):
            optimizer.communicator.multi_node_mean_grad(
                model, optimizer.zero_fill)

    def _finish(self, optimizer: Any, means: dict[str, Any]) -> None:
        """Reports and updates, which calls what users have written."""
        self._work.report(means)
        decide_together(optimizer, self._steps.add)
        draw_alike(optimizer, self._seed)
        with self.events.section('update'):
            optimizer.update()

    def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Reports loss and metrics of a batch; call it on all ranks.

        For Chainer's ``Evaluator``, on all ranks::

            extensions.Evaluator(iterator, model, eval_func=updater.evaluate)

        Args:
            args: Arrays as the converter gives them; those of the first
                stage's rank count, the others only say that a batch comes.
        """
        def read() -> StepBatch:
            if args and kwargs:
                raise ValueError('evaluate() takes the arrays of a batch by '
                                 'position, or all of them by name')
            return self._work.batch(kwargs or args, self.label_key)
        self._steps.evaluate(read, self._work.report)

    def predict(self, *inputs: Any, wanted: bool = True,
                method: str | None = None) -> Any:
        """The model's output; call it on all ranks.

        Args:
            inputs: Arrays for the first layer, or the method, of one batch;
                they count on the first stage's rank only, and may be left
                out elsewhere.
            wanted: Whether this rank wants the output.
            method: Of a model that :func:`partition` has cut: the name of
                what is called in place of the model, which would return its
                loss.  Default: the link ``predictor``, as
                ``chainer.links.Classifier`` has it, or else ``predict``.
                The method is called with each micro-batch; what it returns
                (an array or variable, or some in tuples, lists and
                dictionaries) is concatenated along the first axis.

        Returns:
            What the last layer, or the method, returns, as arrays; None
            where it was not wanted.

        Raises:
            ValueError: There is no such method, or it returns something that
                has not a row for each sample.
        """
        return self._steps.predict(lambda: _given(inputs), wanted, method)

    def serialize(self, serializer: Any) -> None:
        """As in ``StandardUpdater``; how far the data are, on all ranks."""
        super().serialize(serializer)
        iterator = self.get_iterator('main')
        now = [serializer(f'progress_{number}', value)
               for number, value in enumerate(progress(iterator))]
        if isinstance(iterator, FollowingIterator):
            iterator.follow(tuple(float(value) for value in now))

    def resumed(self) -> None:
        """All stages learn from the first how far the data are.

        ``resume`` calls this on all ranks, as a snapshot of serial training
        does not say so in this updater's way.
        """
        iterator, grid = self.get_iterator('main'), self.grid
        raise_together(grid.comm, lambda: progress(iterator))
        if grid.stage_index == 0:
            # The first replica's may read for the others.
            now = grid.data.bcast(progress(iterator))
            if isinstance(iterator, FollowingIterator):
                iterator.follow(now)
        now = grid.pipeline.bcast(progress(iterator))
        if isinstance(iterator, FollowingIterator):
            iterator.follow(now)

    def _read(self) -> StepBatch:
        iterator = self.get_iterator('main')
        arrays = convert._call_converter(
            self.converter, iterator.next(), self.input_device)
        return self._work.batch(arrays, self.label_key, progress(iterator))


def _given(inputs: tuple) -> StepBatch:
    if not inputs or any(array is None for array in inputs):
        raise ValueError('the first stage of each pipeline needs arrays')
    return StepBatch(tuple(array.array if isinstance(array, chainer.Variable)
                       else array for array in inputs), None)


def _check(iterator: Any, optimizer: Any, grid: ProcessGrid, *,
           micro_batches: Any, activation_codec: Any, seed: Any,
           loss_weight: Any, **of_layers: Any) -> None:
    """What this rank can see to be wrong by itself."""
    check_count('micro_batches', micro_batches)
    if activation_codec not in CODECS:
        raise ValueError(f'activation_codec must be one of {CODECS}, not '
                         f'{activation_codec!r}')
    if not isinstance(seed, numbers.Integral):
        raise TypeError(f'seed must be an integer, not {seed!r}')
    if loss_weight is not None and not callable(loss_weight):
        raise TypeError(f'loss_weight must be a function, not {loss_weight!r}')
    _check_layers(**of_layers)
    if iterator is None and grid.stage_index == 0:
        raise ValueError('the ranks of the first stage need an iterator')
    model = getattr(optimizer, 'target', None)
    if isinstance(model, PartitionedChain):
        given = [name for name, value in of_layers.items()
                 if value is not None]
        if given:
            raise ValueError(
                f'{" and ".join(given)} cannot be given for a model that '
                'partition() has cut: the model itself gets the whole batch, '
                'returns the loss, and reports the metrics')
        _check_partition(model, optimizer, grid)
    elif not hasattr(model, 'pieces'):
        raise TypeError('the optimizer must be set up with a Divisible '
                        '(optimizer.setup(Net().stage(comm))), or with a '
                        'model that partition(model, example, comm) has cut, '
                        f'not {type(model).__name__}')
    _check_replicas(optimizer, grid)
    for link in optimizer.target.links():
        if isinstance(link, MultiNodeBatchNormalization) and (
                link.comm.size > grid.replicas):
            raise ValueError(
                f'a MultiNodeBatchNormalization is over {link.comm.size} '
                f'ranks but a stage has {grid.replicas} replicas; the others '
                'would not answer: make its communicator with '
                'mpi_comm=grid.data of a ProcessGrid')


def _check_layers(loss_fun: Any, metrics: Any, label_key: Any) -> None:
    """Checks what only a ``Divisible`` is trained with."""
    if loss_fun is not None and not callable(loss_fun):
        raise TypeError(f'loss_fun must be a function, not {loss_fun!r}')
    if label_key is not None and not isinstance(label_key, (int, str)):
        raise TypeError('label_key must be an integer or a string, not '
                        f'{label_key!r}')
    for name, metric in (metrics or {}).items():
        both = metric if isinstance(metric, tuple) else (metric, len)
        if name == 'loss' or not isinstance(name, str) or len(both) != 2 or (
                not all(map(callable, both))):
            raise ValueError(
                f'metrics has {name!r}: {metric!r}; it must have names other '
                "than 'loss', and functions or pairs of a function and its "
                'weight')


def _check_partition(model: PartitionedChain, optimizer: Any,
                     grid: ProcessGrid) -> None:
    if model.partition.grid is not grid:
        raise ValueError('the model was cut for other ranks; give '
                         'PipelineUpdater the comm that partition() got')
    if model.partition.optimizer not in (None, optimizer):
        raise ValueError('another optimizer trains this model already; a '
                         'partitioned model has one')


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
