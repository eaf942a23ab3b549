"""``PipelineUpdater``: pipeline-parallel training under Chainer's Trainer."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import chainer
from chainer.dataset import concat_examples, convert
from chainer.training.updaters import StandardUpdater

from ..mpi.agreement import raise_together
from ..pipeline.adapter import Batch
from ..pipeline.step import Pipeline

_FIELDS = ('epoch', 'is_new_epoch', 'epoch_detail', 'previous_epoch_detail')


class FollowingIterator(chainer.dataset.Iterator):
    """Knows how far the first stage's iterator is, and nothing more.

    The attributes are those of Chainer's ``SerialIterator``.

    Args:
        like: Has the data set and sizes that a script may ask for, if any.
    """

    epoch, is_new_epoch, epoch_detail = 0, False, 0.0
    previous_epoch_detail: float | None = None

    def __init__(self, like: Any = None) -> None:
        for name in 'batch_size', 'dataset', 'repeat':
            if hasattr(like, name):
                setattr(self, name, getattr(like, name))

    def __next__(self) -> Any:
        raise RuntimeError('only the ranks of the first stage read data')


def progress(iterator: Any) -> dict[str, Any]:
    """How far an iterator is."""
    return {field: getattr(iterator, field, None) for field in _FIELDS}


def follow(iterator: Any, now: Mapping[str, Any]) -> None:
    """Tells an iterator that follows how far the first stage's is."""
    if isinstance(iterator, FollowingIterator):
        iterator.__dict__.update(now)


def show_progress_of(followed: Any, iterator: Any) -> None:
    """Has an iterator that is not used say how far another one is."""
    def shown(name: str) -> property:
        return property(lambda _: getattr(followed, name),
                        lambda _, value: None)
    kind: Any = type(iterator)
    iterator.__class__ = type(kind.__name__, (kind,), {
        '__module__': kind.__module__,
        **{name: shown(name) for name in _FIELDS}})


class PipelineUpdater(StandardUpdater):
    """Trains one model over several ranks, each with some of its layers.

    Make it on all ranks.  The batch is cut into micro-batches, which go
    through the stages by the schedule.  Loss and gradients are those of serial
    training on the same micro-batches.  Only the ranks of the first stage read
    data; all ranks report the same loss.  The optimizer updates this rank's
    layers; clipping and dynamic loss scaling look at all stages.

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
        loss_func: Of a Divisible ``loss_func(*outputs, target)``, which
            returns a mean, and may report means over samples with
            ``chainer.report``; default: ``softmax_cross_entropy``, with the
            accuracy.  A model that :func:`partition` has cut returns its
            loss, or was given there a function of the batch that does, which
            may be said again here.
        micro_batches: Parts of a batch; default: those of a planned model's
            plan, or 4.
        schedule: ``'gpipe'``, ``'1f1b'``, ``'interleaved'`` or
            ``'zero_bubble'``; default: what a planned model was planned
            for, or ``'1f1b'``.
        recompute: Whether stages keep their inputs only, and run forward
            twice; or a tuple with a bool for each chunk.  Default: False, or
            for a planned model that of its plan.
        loss_weight: ``loss_weight(target)``, the weight of a micro-batch in
            the mean loss.  Default: its labels but those of the argument
            ``ignore_label`` of ``loss_func``, or else its samples.  With a
            model that :func:`partition` has cut, ``loss_weight(*batch)``;
            default: what all losses in it ignore.
        converter: Makes arrays of a batch.
        device: Where the model and the arrays go.
        seed: Of random numbers in layers and loss, such as dropout masks.
            The model's seed draws initial values, deferred ones, too.
        auto_new_epoch: As in ``StandardUpdater``.

    Raises:
        ValueError: On all ranks: options differ between ranks, stages do
            not fit together, or the optimizer is not one for these replicas.

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
                 loss_func: Callable | None = None,
                 micro_batches: int | None = None,
                 schedule: str | None = None, recompute: Any = None,
                 loss_weight: Callable | None = None,
                 converter: Callable = concat_examples, device: Any = None,
                 seed: int = 0, auto_new_epoch: bool = True) -> None:
        #: The :class:`.Pipeline`.
        self.pipeline = Pipeline(
            optimizer, comm, micro_batches=micro_batches, schedule=schedule,
            recompute=recompute, seed=seed, device=device,
            loss_func=loss_func, loss_weight=loss_weight)
        #: Its :class:`ProcessGrid`, schedule and :class:`.EventStream`.
        self.grid, self.schedule, self.events = (
            self.pipeline.grid, self.pipeline.schedule, self.pipeline.events)

        def start() -> None:
            if self.grid.stage_index == 0 and not isinstance(
                    iterator, (chainer.dataset.Iterator, dict)):
                raise ValueError('the ranks of the first stage need an '
                                 f'iterator, not {type(iterator).__name__}')
            super(PipelineUpdater, self).__init__(
                FollowingIterator(iterator) if self.grid.stage_index
                else iterator, optimizer, converter, device,
                auto_new_epoch=auto_new_epoch)
        raise_together(self.grid.comm, start, error=ValueError)

    def update_core(self) -> None:
        """One update of all stages; call it on all ranks."""
        iterator = self.get_iterator('main')
        self.pipeline.iteration = self.iteration
        self.pipeline.follow = functools.partial(follow, iterator)
        self.pipeline.train(self._read)
        if self.auto_new_epoch and iterator.is_new_epoch:
            self.get_optimizer('main').new_epoch(auto=True)

    def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Reports the loss, and its reports, of a batch; on all ranks.

        For Chainer's ``Evaluator``, on all ranks::

            extensions.Evaluator(iterator, model, eval_func=updater.evaluate)

        Args:
            args: Arrays as the converter gives them.  Those of the first
                stage count; other ranks only say that a batch comes.
        """
        self.pipeline.evaluate(*args, **kwargs)

    def predict(self, *inputs: Any, method: str | None = None) -> Any:
        """The model's output on all ranks; call it on all ranks.

        Args:
            inputs: Arrays for the first layer, or the method, of one batch.
                Only ranks of the first stage need them.
            method: With a model that :func:`partition` has cut, the name of
                a method or link that returns no loss.  Default:
                ``predictor``, as ``chainer.links.Classifier`` has it, or else
                ``predict``.  It is called with each micro-batch.  Its arrays
                or variables, also in tuples, lists and dictionaries, are
                concatenated along the first axis.

        Returns:
            The results of the last layer, or of the method, as arrays.

        Raises:
            ValueError: There is no such method, or it returns something that
                has not a row for each sample.
        """
        return self.pipeline.predict(*inputs, method=method)

    def resumed(self) -> None:
        """All stages learn from the first how far the data are.

        Who has loaded a snapshot calls this on all ranks: the iterators of
        the first stage say how far they are.
        """
        iterator, grid = self.get_iterator('main'), self.grid
        now = raise_together(grid.comm, lambda: progress(iterator))
        if grid.stage_index == 0:
            # The first replica's may read for the others.
            follow(iterator, grid.data.bcast(now))
        follow(iterator, grid.pipeline.bcast(progress(iterator)))

    def _read(self) -> Batch:
        iterator = self.get_iterator('main')
        arrays = convert._call_converter(
            self.converter, iterator.next(), self.input_device)
        return self.pipeline.read(arrays)._replace(
            progress=progress(iterator))
