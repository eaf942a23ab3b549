"""Turns an unmodified script into a pipeline."""
# Every rank runs the whole script, and what Chainer would do at some of its
# calls is done here instead (Originals): nothing is known of a script but what
# it makes.  The decisive call is the StandardUpdater.  There the model is
# known, with its data and its optimizer: it is cut, and the script's own
# updater object becomes a PipelineUpdater.  Replicas are pipelines of one
# stage.  From then on the script's own code may look at the model (looks.py),
# but in the calls that are marked `_together`: in these all ranks communicate.
#
# Rank 0's initial values, order of the data, validation set and clock count,
# as scripts draw without a seed.  Until the model is cut, its large parameters
# have no values but a note of how to draw them (chains/deferred.py), so no
# rank ever has the whole.
#
# Whatever cannot be done so is a Refusal before anything is trained.
from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chainer
import chainermn
import numpy
from chainer.dataset import convert
from mpi4py import MPI

from ...chains import nested
from ...chains.deferred import Deferral, fetching
from ...chains.partition import partition
from ...chains.placeholder import PlaceholderError
from ...chains.plan import PartitionPlan
from ...intercept.function_calls import creating
from ...intercept.training_objects import Originals
from ...mpi.grid import ProcessGrid
from ...pipeline.meetings import NotTraced
from ...pipeline.randomness import preserved
from ...pipeline.whole_model import decisions
from ...report.quantities import counted
from ..updater import PipelineUpdater, show_progress_of
from . import files
from .dividing import Divided
from .launch import Refusal, quietly, refuse_together, refusing
from .looks import WholeModel
from .refusals import check, loss_of, the_only


class Options(NamedTuple):
    """How a model is divided."""

    pipeline: int           # ranks of one pipeline
    micro_batches: int = 1  # into which each replica's batch is cut
    memory: str | None = None   # a rank may use, '2 GiB'; None: no limit
    schedule: str = '1f1b'  # as for PipelineUpdater
    cut: PartitionPlan | None = None    # None: the best is searched for

    @property
    def chunks(self) -> int:
        """Chunks of each rank."""
        if self.cut is not None:
            return self.cut.chunks
        return 2 if self.schedule == 'interleaved' else 1


def _together(method: Callable) -> Callable:
    """A method in which all ranks communicate."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with (contextlib.nullcontext() if self.whole is None
              else self.whole.seen(looks=False)):
            return method(self, *args, **kwargs)
    return call


class PipelineJob(Originals):
    """Turns a script's ``StandardUpdater`` into a :class:`PipelineUpdater`.

    Args:
        comm: All ranks.
        options: How to divide the model.
        make_communicator: Makes the replicas' communicator of mpi4py's.
        create: Makes the communicators of a script that asks for any.
    """

    def __init__(self, comm: MPI.Comm, options: Options,
                 make_communicator: Callable[[MPI.Comm], Any],
                 create: Callable[..., Any]) -> None:
        self.comm, self._options, self.create = comm, options, create
        self.messages = comm.Dup()      # of by_first_rank
        self._make_communicator = make_communicator
        # None until the script has made an updater:
        self.updater: Any = None
        self.grid: Any = None
        #: The divided model, for the script's own code.
        self.whole: Any = None
        self._loss_func: Any = None     # None: the model gives the loss
        self._evaluates_whole = False
        self._building = contextlib.ExitStack()

    @property
    def model(self) -> Any:
        """The model that was cut; None before."""
        return self.updater and self.updater.get_optimizer('main').target

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A block for the script, in which it says everything once."""
        with files.as_one_process(), self._building, fetching.set_to(None):
            self._building.enter_context(creating(Deferral()))
            yield

    @_together
    def finish(self) -> None:
        """Raises Refusal if the script has made no pipeline."""
        if self.updater is None:
            raise Refusal('the script has made no chainer.training.'
                          'StandardUpdater, so there was nothing to train as '
                          'a pipeline')

    # --- what the script makes ----------------------------------------------

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        if isinstance(updater, PipelineUpdater):
            original(updater, *args, **kwargs)      # it is being made here
            return
        check(updater=updater, other_updater=self.updater)
        bound = inspect.signature(original).bind(updater, *args, **kwargs)
        bound.apply_defaults()
        self._build(updater, {**bound.arguments, **bound.kwargs})

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        check(own_loop=self.updater)
        original(*args, **kwargs)

    @_together
    def update(self, original: Callable, updater: Any) -> None:
        original(updater)

    @_together
    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        if trainer.updater is not self.updater:
            check(updater=trainer.updater)
        trainer.out = self.comm.bcast(trainer.out)
        files.adapt(trainer, self)
        try:
            quietly(original, trainer, *args, **kwargs)
        except PlaceholderError as error:
            if getattr(error, 'is_shown', False):       # of an update
                raise
            raise Refusal(f'outside of an update, {error}') from error
        finally:
            self.whole.has_failed = False

    @_together
    def evaluate(self, original: Callable, evaluator: Any) -> Any:
        """Evaluates over the stages, or with the whole model on each rank.

        Sets that were divided by chance differ; rank 0's result counts.
        """
        own, target = evaluator.eval_func, evaluator.get_all_targets().get(
            'main')
        if self.whole is None:
            return self.comm.bcast(original(evaluator))
        if not self._evaluates_whole and (loss_of(own, target) or target) is (
                self._loss_func or self.model):
            evaluator.eval_func = self.updater.evaluate
            try:
                return self.comm.bcast(original(evaluator))
            except NotTraced as error:
                self.warn('each rank has the whole model while it evaluates, '
                          f'as {error.__cause__ or error}')
                self._evaluates_whole = True
            finally:
                evaluator.eval_func = own
        with self.whole.seen():
            self.whole.fetch()
            return self.comm.bcast(original(evaluator))

    serialize = _together(files.serialize)
    save, load = _together(files.save), _together(files.load)

    # --- details ------------------------------------------------------------

    def warn(self, text: str) -> None:
        """Prints a warning on rank 0."""
        if self.comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)

    def _build(self, updater: Any, given: dict[str, Any]) -> None:
        options, replicas = self._options, (
            self.comm.size // self._options.pipeline)
        own, optimizer, samples = refuse_together(
            self.comm, lambda: self._checked(given, replicas))
        iterator, model, device = own, optimizer.target, given['device']
        self._loss_func = loss_of(given['loss_func'], model)
        if device is not None:
            device = chainer.get_device(device)
            model.to_device(device)
        input_device = (device if given.get('input_device') is None
                        else chainer.get_device(given['input_device']))
        self.grid = ProcessGrid(self.comm, pipeline=options.pipeline)
        # A batch of the iterator would be missing in the training, and one
        # that reads ahead in other processes cannot be copied.
        example = first_batch(
            self.comm, lambda: self.comm.rank or [
                own.dataset[place]
                for place in range(min(samples, len(own.dataset)))],
            given['converter'], input_device)
        self._building.close()
        # The optimizer needs no second setup, which would drop its hooks.
        with refusing():
            partition(
                model, example, self.grid, memory=options.memory,
                micro_batches=options.micro_batches,
                schedule=options.schedule, chunks=options.chunks,
                optimizer=optimizer, plan=options.cut,
                loss_func=self._loss_func)
        if self.comm.rank == 0:
            print(model, file=sys.stderr)
        if replicas > 1:
            optimizer = chainermn.create_multi_node_optimizer(
                optimizer, self._make_communicator(self.grid.data))
            if self.grid.stage_index == 0:
                iterator = Divided(iterator, self.grid.data)
        with preserved():   # the seed of dropout, from the script's generator
            seed = self.comm.bcast(int(numpy.random.randint(1 << 31)))
        updater.__class__ = PipelineUpdater
        with refusing():
            PipelineUpdater.__init__(
                updater, iterator, optimizer, self.grid,
                micro_batches=options.micro_batches,
                schedule=options.schedule, converter=given['converter'],
                seed=seed, auto_new_epoch=given['auto_new_epoch'])
        updater.loss_scale = given['loss_scale']
        if updater.loss_scale is not None:
            optimizer.set_loss_scale(updater.loss_scale)
        updater._device, updater._input_device = device, input_device
        if self.grid.data.rank or self.grid.stage_index:
            # The script's loop may ask its own.
            show_progress_of(updater.get_iterator('main'), own)
        self.updater, self.whole = updater, WholeModel(model)
        self.whole.open()

    def _checked(self, given: dict[str, Any], replicas: int
                 ) -> tuple[Any, Any, int]:
        """Iterator, optimizer, and the samples of a micro-batch."""
        iterator = the_only(given['iterator'], 'iterators')
        optimizer = the_only(given['optimizer'], 'optimizers')
        check(iterator=iterator, mean=optimizer, optimizer=optimizer,
              model=optimizer.target)
        decisions(optimizer, self._options.pipeline)
        size, parts = iterator.batch_size, self._options.micro_batches
        if size < parts * replicas:
            raise ValueError(
                f'a batch of {counted(size, "sample")} cannot be cut into '
                + counted(parts, 'micro-batch')
                + f' for each of {replicas} replicas' * (replicas > 1)
                + '; lower --micro-batches, make a new plan, or raise the '
                'batch size')
        return iterator, optimizer, size // (parts * replicas)


def initialise(model: chainer.Link, example: Any) -> None:
    """Initialises parameters that get their shape in a forward pass.

    They are drawn as in the first forward pass of a training; nothing else
    of the model changes.

    Args:
        model: Returns its loss.
        example: A batch as the converter gives it.
    """
    clone = copy.deepcopy(model)
    args, kwargs = nested.arguments_of(example)
    with chainer.using_config('train', True), chainer.no_backprop_mode():
        clone(*args, **kwargs)
    drawn = dict(clone.namedparams())
    with preserved():
        for name, parameter in model.namedparams():
            if not parameter.is_initialized:
                parameter.copydata(drawn[name])


def first_batch(comm: MPI.Comm, read: Callable[[], Any], converter: Callable,
                device: Any) -> Any:
    """Rank 0's examples as its converter gives them, on all ranks.

    The random numbers that a data set or a converter draws are drawn again
    later.

    Args:
        comm: All ranks.
        read: Gives rank 0 the examples; called on all ranks.
        converter: Of the updater.
        device: Of the inputs; None: the arrays are NumPy's.
    """
    def packed() -> bytes | None:
        state = random.getstate()
        with preserved():
            examples = read()
            batch = None if comm.rank else convert._call_converter(
                converter, examples, device)
        random.setstate(state)
        leaves, tree = nested.leaves(batch)
        return MPI.pickle.dumps((tree, [chainer.backends.cuda.to_cpu(
            nested.array_of(leaf)) for leaf in leaves]))
    tree, host = MPI.pickle.loads(comm.bcast(refuse_together(comm, packed)))
    to = chainer.get_device('@numpy' if device is None else device)
    return refuse_together(comm, lambda: nested.rebuilt(
        tree, [to.send(array) for array in host]))
