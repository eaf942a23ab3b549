"""Turns an unmodified script into a pipeline."""
# Every rank runs the whole script, which builds a model, an optimizer, an
# iterator, an updater, a Trainer and its extensions as in one process.  What
# Chainer would do at some of these calls is done here instead (Originals
# lists them): nothing is known of a script but what it makes.
#
# The decisive call is the StandardUpdater.  There the model is known, with
# its data and its optimizer: it is cut, and the script's own updater object
# becomes a PipelineUpdater, so that all that the script holds of it goes on to
# work.  Replicas are pipelines of one stage.  From then on the script's own
# code may look at the model (looks.py), but in the calls that are marked
# `_together`: in these all ranks communicate.
#
# Rank 0's initial values, order of the data, validation set and clock count,
# as scripts draw without a seed.  The model's large parameters have no values
# before it is cut (undrawn.py), so no rank ever has the whole.
#
# Whatever cannot be done so is a Refusal, one line on all ranks that names
# the obstacle in the script and the remedy, before anything is trained; an
# error of the script's own code keeps its traceback.
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
from ...chains.deferred import fetching
from ...chains.partition import partition
from ...chains.placeholder import PlaceholderError
from ...chains.plan import PartitionPlan
from ...intercept.training_objects import Originals
from ...mpi.grid import ProcessGrid
from ...pipeline.meetings import NotTraced
from ...pipeline.randomness import preserved
from ...pipeline.whole_model import decisions
from ...report.quantities import counted
from ..updater import (
    FollowingIterator,
    PipelineUpdater,
    show_progress_of,
)
from . import files
from .checks import OWN_LOOP, check, check_updater, given_to, is_model, kind
from .dividing import divided, pack
from .launch import Refusal, quietly, refuse_together, refusing
from .looks import WholeModel
from .one_process import as_one_process
from .undrawn import Undrawn

#: What messages say that a script becomes.
_TITLE = 'a pipeline'


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
              else self.whole.closed()):
            return method(self, *args, **kwargs)
    return call


class PipelineJob(Originals):
    """Turns a script's ``StandardUpdater`` into a :class:`PipelineUpdater`.

    All ranks run the script with rank 0's initial values, order of the data
    and validation set; rank 0 alone prints and writes.

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
        self._make_communicator = make_communicator
        # None until the script has made an updater:
        self.updater: Any = None
        self.undrawn = Undrawn(lambda: self.updater is None)
        self.grid: Any = None
        #: The divided model, for the script's own code.
        self.whole: WholeModel | None = None
        self._evaluates_whole = False

    @property
    def model(self) -> Any:
        """The model that was cut; None before."""
        return self.updater and self.updater.get_optimizer('main').target

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A block for the script, in which it says everything once."""
        with as_one_process(), self.undrawn.building(), fetching.set_to(None):
            yield

    @_together
    def finish(self) -> None:
        """Raises Refusal if the script has made no pipeline."""
        if self.updater is None:
            raise Refusal(
                'the script has made no chainer.training.StandardUpdater, so '
                f'there was nothing to train as {_TITLE}')

    # --- what the script makes ----------------------------------------------

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        if isinstance(updater, PipelineUpdater):
            original(updater, *args, **kwargs)      # it is being made here
            return
        check_updater(updater, self.updater, _TITLE)
        bound = inspect.signature(original).bind(updater, *args, **kwargs)
        bound.apply_defaults()
        self._build(updater, {**bound.arguments, **bound.kwargs})

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        if self.updater is None:
            raise Refusal(OWN_LOOP.format(_TITLE))
        original(*args, **kwargs)

    @_together
    def update(self, original: Callable, updater: Any) -> None:
        original(updater)

    @_together
    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        """Prepares a Trainer when the script has done all else to it."""
        if self.whole is None or trainer.updater is not self.updater:
            raise Refusal(
                f'the Trainer gets a {kind(trainer.updater)}; {_TITLE} '
                'needs chainer.training.updaters.StandardUpdater')
        trainer.out = self.comm.bcast(trainer.out)
        files.adapt(trainer, self)
        try:
            quietly(original, trainer, *args, **kwargs)
        except PlaceholderError as error:
            if getattr(error, 'is_shown', False):       # of an update
                raise
            raise Refusal(f'outside of an update, {error}') from error

    @_together
    def evaluate(self, original: Callable, evaluator: Any) -> Any:
        """Evaluates over the stages, or with the whole model on each rank.

        Sets that were divided by chance differ between ranks; triggers must
        not, so rank 0's result counts.
        """
        own, target = evaluator.eval_func, evaluator.get_all_targets().get(
            'main')
        if self.whole is None:
            return self.comm.bcast(original(evaluator))
        if target is self.model and not self._evaluates_whole and (
                own is None or is_model(own, target)):
            evaluator.eval_func = self.updater.evaluate
            try:
                return self.comm.bcast(original(evaluator))
            except NotTraced as error:
                self.warn('each rank has the whole model while it evaluates, '
                          f'as {error.__cause__ or error}')
                self._evaluates_whole = True
            finally:
                evaluator.eval_func = own
        with self.whole.lent():
            return self.comm.bcast(original(evaluator))

    save, load = _together(files.save), _together(files.load)

    # --- details ------------------------------------------------------------

    def warn(self, text: str) -> None:
        """Prints a warning on rank 0."""
        if self.comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)

    def _build(self, updater: Any, given: dict[str, Any]) -> None:
        options, replicas = self._options, (
            self.comm.size // self._options.pipeline)
        asked = given_to(given['iterator'], given['optimizer'],
                         given['loss_func'])

        def checked() -> int:
            check(asked)
            decisions(asked.optimizer, options.pipeline)
            return _samples(asked.iterator.batch_size, options.micro_batches,
                            replicas)
        samples = refuse_together(self.comm, checked)
        own, optimizer, device = asked.iterator, asked.optimizer, given[
            'device']
        iterator, model = own, optimizer.target
        if device is not None:
            device = chainer.get_device(device)
            model.to_device(device)
        input_device = given.get('input_device')
        input_device = (device if input_device is None
                        else chainer.get_device(input_device))
        self.grid = ProcessGrid(self.comm, pipeline=options.pipeline)

        def read() -> list | None:
            """The first examples of rank 0's data set.

            A batch of the iterator would be missing in the training, and an
            iterator that reads ahead in other processes cannot be copied.
            """
            if self.comm.rank:
                return None
            found = [own.dataset[place] for place in range(
                min(samples, len(own.dataset)))]
            if replicas > 1:
                pack(found)
            return found
        self._place(optimizer, first_batch(
            self.comm, read, given['converter'], input_device))
        if replicas > 1:
            optimizer = chainermn.create_multi_node_optimizer(
                optimizer, self._make_communicator(self.grid.data))
            if self.grid.stage_index == 0:
                iterator = divided(iterator, self.grid.data)
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
        used = updater.get_iterator('main')
        if isinstance(used, FollowingIterator):
            show_progress_of(used, own)     # the script's loop may ask it
        self.updater, self.whole = updater, WholeModel(model.partition)
        self.whole.open()

    def _place(self, optimizer: Any, example: Any) -> None:
        """Gives this rank its part of the model, and of its optimizer.

        The optimizer needs no second setup, which would drop its hooks: each
        rank's parameters are those that it was set up with, with their update
        rules, and the model names no others then.
        """
        options, model = self._options, optimizer.target
        if held := self.undrawn.held(model):
            self.warn(held)
        self.undrawn.draw_others(model)
        with refusing():
            partition(
                model, example, self.grid, memory=options.memory,
                micro_batches=options.micro_batches,
                schedule=options.schedule, chunks=options.chunks,
                optimizer=optimizer, plan=options.cut)
        if self.comm.rank == 0:
            print(model, file=sys.stderr)


def _samples(batch_size: int, micro_batches: int, replicas: int) -> int:
    """Number of samples of a micro-batch."""
    found = batch_size // (micro_batches * replicas)
    if not found:
        raise ValueError(
            f'a batch of {counted(batch_size, "sample")} cannot be cut into '
            + counted(micro_batches, 'micro-batch')
            + f' for each of {replicas} replicas' * (replicas > 1)
            + '; lower --micro-batches, make a new plan, or raise the batch '
            'size')
    return found


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

    The examples themselves may be what cannot be sent, such as open files.
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
        if comm.rank:
            return None
        leaves, tree = nested.leaves(batch)
        try:
            return MPI.pickle.dumps((tree, [chainer.backends.cuda.to_cpu(
                nested.array_of(leaf)) for leaf in leaves]))
        except Exception as error:
            raise ValueError('what the converter returns is not made of '
                             f'arrays: {error}') from error
    tree, host = MPI.pickle.loads(comm.bcast(refuse_together(comm, packed)))
    to = chainer.get_device('@numpy' if device is None else device)
    return refuse_together(comm, lambda: nested.rebuilt(
        tree, [to.send(array) for array in host]))
