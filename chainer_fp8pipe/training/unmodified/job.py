"""Turns an unmodified script into a pipeline."""
# Every rank runs the whole script, and what Chainer would do at some of its
# calls is done here instead (Originals).  The decisive call is the
# StandardUpdater, when model, data and optimizer are known: the model is cut,
# and the script's own updater object becomes a PipelineUpdater.  Replicas are
# pipelines of one stage.  From then on the script's own code may look at the
# model (files.py), but in the methods that are marked `_together`.
#
# Rank 0's initial values, order of the data, validation set and clock count,
# as scripts draw without a seed.  Until the model is cut, its large parameters
# have no values but a note of how to draw them (chains/deferred.py), so no
# rank ever has the whole.
from __future__ import annotations

import collections
import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chainer
import chainermn
import numpy
from chainer.dataset import convert
from chainer.serializers import npz
from chainer.training import extensions
from chainer.training.extensions import _snapshot, snapshot_writers
from mpi4py import MPI

from ...chains import nested
from ...chains.deferred import Deferral, fetching
from ...chains.partition import partition
from ...chains.plan import PartitionPlan
from ...chains.saving import saving_parts
from ...intercept.function_calls import creating
from ...intercept.training_objects import LIBRARIES, Originals, own_work
from ...mpi.agreement import agree, of_first_rank, raise_together
from ...mpi.grid import ProcessGrid
from ...pipeline.meetings import NotTraced, decisions
from ...pipeline.randomness import preserved
from ..snapshots.snapshot import Followed, counts, go_on
from ..updater import (
    FollowingIterator,
    PipelineUpdater,
    follow,
    progress,
    show_progress_of,
)
from .files import Looking, Looks
from .launch import Refusal, check, loss_of, refusing, say

_NEED_THE_WHOLE_MODEL = (
    extensions.DumpGraph, extensions.VariableStatisticsPlot,
    extensions.ParameterStatistics)
_PRINT_OR_DRAW = (
    extensions.PlotReport, extensions.PrintReport, extensions.ProgressBar)


class Options(NamedTuple):
    """How a model is divided."""

    pipeline: int           # ranks of one pipeline
    micro_batches: int = 1  # into which each replica's batch is cut
    memory: str | None = None   # a rank may use, '2 GiB'; None: no limit
    schedule: str = '1f1b'  # as for PipelineUpdater
    cut: PartitionPlan | None = None    # None: the best is searched for


def _together(method: Callable) -> Callable:
    """A method in which all ranks communicate."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.looks.block(method.__name__):
            return method(self, *args, **kwargs)
    return call


class PipelineJob(Originals):
    """Turns a script's ``StandardUpdater`` into a :class:`PipelineUpdater`.

    Args:
        comm: All ranks.
        options: How to divide the model.
        make_communicator: Makes the replicas' communicator of mpi4py's.
        create: As in :class:`.Originals`.
    """

    def __init__(self, comm: MPI.Comm, options: Options,
                 make_communicator: Callable[[MPI.Comm], Any],
                 create: Callable[..., Any]) -> None:
        self.comm, self._options, self.create = comm, options, create
        self._make_communicator = make_communicator
        self.looks = Looks(comm)
        # Until the script has made an updater.
        self.updater: Any = None
        self.model: Any = None
        self._loss_func: Any = None     # None: the model gives the loss
        self._evaluates_whole = False
        self._building = contextlib.ExitStack()

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A block for the script, in which it says everything once."""
        with self.looks.script(), self._building, fetching.set_to(None):
            self._building.enter_context(creating(Deferral()))
            yield

    @_together
    def finish(self) -> None:
        check(own_loop=self.updater)

    # --- what the script makes ----------------------------------------------

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        check(updater=updater, other_updater=self.updater)
        original(updater, *args, **kwargs)
        with self.looks.block('StandardUpdater'), own_work():
            self._divide(updater)
        self.looks.begin(self.model)

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        check(own_loop=self.updater)
        original(*args, **kwargs)

    @_together
    def update(self, original: Callable, updater: Any) -> None:
        original(updater)

    @_together
    def run_trainer(self, original: Callable, trainer: Any,
                    show_loop_exception_msg: bool = False) -> None:
        if trainer.updater is not self.updater:
            check(updater=trainer.updater)
        trainer.out = self.comm.bcast(trainer.out)      # a clock may name it
        self._adapt(trainer)
        try:
            original(trainer, show_loop_exception_msg)
        finally:
            self.looks.have_failed = False

    @_together
    def evaluate(self, original: Callable, evaluator: Any) -> Any:
        """Evaluates over the stages, or with the whole model on each rank.

        Sets that were divided by chance differ; rank 0's result counts.
        """
        own, target = evaluator.eval_func, evaluator.get_all_targets().get(
            'main')
        if self.updater and not self._evaluates_whole and (
                loss_of(own, target) or target) is (
                    self._loss_func or self.model):
            evaluator.eval_func = self.updater.evaluate
            try:
                return self.comm.bcast(original(evaluator))
            except NotTraced as error:
                say('each rank has the whole model while it evaluates, as '
                    f'{error.__cause__ or error}')
                self._evaluates_whole = True
            finally:
                evaluator.eval_func = own
        with self.looks.block('evaluate', True):
            result = original(evaluator)
        return self.comm.bcast(result)

    @_together
    def serialize(self, original: Callable, obj: Any) -> dict[str, Any]:
        """All arrays of an object, on rank 0."""
        if self.updater is None:
            return original(obj)
        with saving_parts(), self._own_alone():
            arrays = raise_together(self.comm, lambda: original(obj))
        # The first stage's counts where several have the same.
        stages = self.updater.grid.pipeline.gather(arrays) or []
        return dict(collections.ChainMap(*stages))

    @_together
    def save(self, original: Callable, file: Any, obj: Any, *args: Any,
             **kwargs: Any) -> None:
        if self.updater is not None and not isinstance(obj, dict):
            if original.__name__ != 'save_npz':
                raise Refusal('what is trained over ranks can be saved by '
                              'save_npz only')
            obj = self.serialize(npz.serialize, obj)
        of_first_rank(self.comm, lambda: original(file, obj, *args, **kwargs))

    @_together
    def load(self, original: Callable, file: Any, obj: Any, *args: Any,
             **kwargs: Any) -> None:
        """Loads on all ranks, or on none; a path is rank 0's."""
        file = self.comm.bcast(file if isinstance(
            file, (str, os.PathLike)) else None) or file
        try:
            with self._own_alone():
                raise_together(self.comm, lambda: original(
                    file, obj, *args, **kwargs), ValueError)
        except ValueError as error:     # a script may expect its own
            raise (error.__cause__ or error) from None
        if isinstance(obj, chainer.training.Trainer):
            go_on(obj.updater)

    def _own_alone(self) -> Any:
        return (self.model.partition.own_alone() if self.updater
                else contextlib.nullcontext())

    def write(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        """Rank 0 alone writes the file of a snapshot, in whatever thread."""
        if self.comm.rank == 0:
            with own_work():
                original(*args, **kwargs)

    def _adapt(self, trainer: Any) -> None:
        """Adapts a Trainer's extensions and triggers to several ranks."""
        def looking(own: Any) -> Any:
            # Those of the libraries are known to look at no parameter.
            home = type(own).__module__.partition('.')[0]
            return own if home in LIBRARIES else Looking(own, self.looks)

        def followed(trigger: Any) -> Any:      # as clocks differ
            return trigger if counts(trigger) else Followed(
                looking(trigger), self.comm)
        trainer.stop_trigger = followed(trainer.stop_trigger)
        for entry in trainer._extensions.values():
            entry.trigger, own = followed(entry.trigger), entry.extension
            is_rank_0s = isinstance(own, _PRINT_OR_DRAW)
            if needs_whole := isinstance(own, _NEED_THE_WHOLE_MODEL):
                say(f'{type(own).__name__} needs the whole model and batch on '
                    'one rank; it is left out')
            if needs_whole or is_rank_0s and self.comm.rank:
                entry.extension = _left_out(own)
            elif not is_rank_0s:
                entry.extension = looking(own)
            if isinstance(own, extensions.LogReport) and self.comm.rank:
                own._log_name = None        # others read what it collects
            if isinstance(own, _snapshot._Snapshot) and (
                    own._snapshot_on_error or isinstance(
                        own.writer, snapshot_writers.ProcessQueueWriter)):
                raise Refusal(
                    'a snapshot has snapshot_on_error=True, when ranks may be '
                    'anywhere, or a ProcessQueueWriter; leave them out')

    def _divide(self, updater: Any) -> None:
        """Cuts the model of an updater, which becomes one of a pipeline."""
        options = self._options
        replicas = self.comm.size // options.pipeline
        check(iterators=updater._iterators, optimizers=updater._optimizers)
        own, optimizer = (updater.get_iterator('main'),
                          updater.get_optimizer('main'))
        model = optimizer.target
        check(iterator=own, optimizer=optimizer, model=model)
        samples = own.batch_size // (options.micro_batches * replicas)
        if not samples:
            raise Refusal(
                f'the batch size of {own.batch_size} gives '
                f'{options.micro_batches} micro-batches of {replicas} '
                'replicas no sample each; lower --micro-batches, make a new '
                'plan, or raise the batch size')
        self._loss_func = loss_of(updater.loss_func, model)
        grid = ProcessGrid(self.comm, pipeline=options.pipeline)
        example = first_batch(
            self.comm, updater, lambda: self.comm.rank or _examples(
                own, samples, replicas))
        self._building.close()
        with refusing():
            agree(self.comm, decisions(
                optimizer, options.pipeline, replicas) | {
                f'update of parameter {name}': repr((
                    rule.enabled, sorted(rule.hyperparam.get_dict().items())))
                for name, one in model.namedparams()
                if (rule := one.update_rule) is not None},
                remedy='What a script does must not depend on the rank.')
            # The optimizer needs no second setup, which would drop its hooks.
            partition(
                model, example, grid, memory=options.memory,
                micro_batches=options.micro_batches,
                schedule=options.schedule, optimizer=optimizer,
                chunks=None if options.cut or options.schedule != 'interleaved'
                else 2, plan=options.cut, loss_func=self._loss_func)
        print(model, file=sys.stderr)
        if replicas > 1:
            optimizer = chainermn.create_multi_node_optimizer(
                optimizer, self._make_communicator(grid.data))
        iterator = (Divided(own, grid.data)
                    if replicas > 1 and grid.stage_index == 0 else own)
        with preserved():   # the seed of dropout, from the script's generator
            seed = self.comm.bcast(int(numpy.random.randint(1 << 31)))
        kept = {name: getattr(updater, name) for name in (
            'loss_scale', '_device', '_input_device')}
        updater.__class__ = PipelineUpdater
        with refusing():
            PipelineUpdater.__init__(
                updater, iterator, optimizer, grid,
                converter=updater.converter, seed=seed,
                auto_new_epoch=updater.auto_new_epoch)
        vars(updater).update(kept)
        updater.pipeline.reports_variables = True
        if grid.data.rank or grid.stage_index:
            # The script's loop may ask its own.
            show_progress_of(updater.get_iterator('main'), own)
        self.updater, self.model = updater, model


def _left_out(own: Any) -> Any:
    """Does nothing in an extension's place: snapshots have its state."""
    def nothing(trainer: Any) -> None:
        pass
    vars(nothing)['serialize'] = own.serialize
    return nothing


def _examples(iterator: Any, samples: int, replicas: int) -> Any:
    """What a micro-batch is converted of; nothing of it is used up."""
    if type(iterator).__module__.partition('.')[0] in LIBRARIES:
        # One that reads ahead in other processes cannot be copied.
        return [iterator.dataset[place]
                for place in range(min(samples, len(iterator.dataset)))]
    batch = copy.deepcopy(iterator).next()      # of any kind
    if replicas > 1:
        _check_divisible(iterator, batch)
    return batch[:samples] if isinstance(batch, list) else batch


def _check_divisible(iterator: Any, batch: Any) -> None:
    if not isinstance(batch, list):
        raise ValueError(
            f'{type(iterator).__name__} gives a {type(batch).__name__}; '
            'replicas divide a list of examples')


def first_batch(comm: MPI.Comm, updater: Any, read: Callable[[], Any]) -> Any:
    """Rank 0's examples as its converter gives them, on all ranks.

    The random numbers that a data set or a converter draws are drawn again
    later.  ``read`` is called on all ranks, and gives rank 0 the examples.
    """
    device = updater.input_device

    def converted() -> Any:
        with preserved():
            examples = read()
            leaves, tree = nested.leaves(
                None if comm.rank else convert._call_converter(
                    updater.converter, examples, device))
        return tree, [chainer.backends.cuda.to_cpu(nested.array_of(leaf))
                      for leaf in leaves]
    with refusing():
        tree, host = comm.bcast(raise_together(comm, converted, ValueError))
    to = chainer.get_device('@numpy' if device is None else device)
    return nested.rebuilt(tree, [to.send(array) for array in host])


class Divided(FollowingIterator):
    """Gives each replica consecutive samples of the batches of the first one.

    Without a seed each rank's iterator would shuffle in another order.

    Args:
        iterator: The script's.
        comm: The replicas' ranks that read.
    """

    def __init__(self, iterator: Any, comm: MPI.Comm) -> None:
        super().__init__(iterator)
        self._comm = comm
        self._own: Any = iterator if comm.rank == 0 else None

    def _read(self) -> list | None:
        """What each replica gets, where it is read; None of ended data."""
        if self._own is None:
            return None
        count = self._comm.size
        try:
            batch = self._own.next()
        except StopIteration:
            return [None] * count
        _check_divisible(self._own, batch)
        now, size = progress(self._own), len(batch)
        return [(now, batch[size * n // count:size * (n + 1) // count])
                for n in range(count)]

    def __next__(self) -> list:
        found = self._comm.scatter(raise_together(self._comm, self._read))
        if found is None:
            raise StopIteration
        now, part = found
        follow(self, now)
        return part

    def serialize(self, serializer: Any) -> None:
        if self._own is not None:
            self._own.serialize(serializer)
            follow(self, progress(self._own))

    def finalize(self) -> None:
        if self._own is not None:
            self._own.finalize()
