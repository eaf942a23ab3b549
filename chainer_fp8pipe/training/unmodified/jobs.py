"""Turns an unmodified script into a pipeline."""
# Every rank runs the whole script, which builds a model, an optimizer, an
# iterator, an updater, a Trainer and its extensions as in one process.  What
# Chainer would do at each of these calls is done here instead (Originals
# lists them): nothing is known of a script but what it makes.
#
# The decisive call is the StandardUpdater.  There the model is known, with
# its data and its optimizer: it is cut, and the script's own updater object
# becomes a PipelineUpdater, so that all that the script holds of it goes on to
# work.  Replicas are pipelines of one stage.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import chainer
import chainermn
import numpy
from chainer.dataset import convert
from chainer.iterators import (
    MultiprocessIterator,
    MultithreadIterator,
    SerialIterator,
)
from chainer.training.updaters import StandardUpdater
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)
from mpi4py import MPI

from ...chains import nested
from ...chains.deferred import fetching
from ...chains.partition import partition
from ...chains.placeholder import PlaceholderError
from ...intercept.training_objects import Originals
from ...mpi.arrays import broadcast_arrays
from ...mpi.grid import ProcessGrid
from ...pipeline.meetings import NotTraced
from ...pipeline.randomness import preserved
from ...pipeline.whole_model import decisions
from ...planning.partition_plan import PartitionPlan
from ...report.quantities import counted
from ..updater import (
    FollowingIterator,
    PipelineUpdater,
    show_progress_of,
)
from . import files
from .dividing import check_examples, divided, obstacle
from .files import adapted, follow_rank_0
from .launch import (
    Refusal,
    as_one_process,
    quietly,
    refuse_together,
    refusing,
)
from .undrawn import Undrawn
from .whole import WholeModel, evaluates_itself

#: What messages say that a script becomes.
_TITLE = 'a pipeline'
#: About a script that trains before it has made its updater.
OWN_LOOP = (
    'the script updates its optimizer in a loop of its own; {} needs a '
    'chainer.training.StandardUpdater, whose update() the loop or a Trainer '
    'calls')


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
        if self.whole is None:
            return method(self, *args, **kwargs)
        with self.whole.closed():
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
        check_model: Raises Refusal about a model that is not the expected
            one.
    """

    def __init__(self, comm: MPI.Comm, options: Options,
                 make_communicator: Callable[[MPI.Comm], Any],
                 create: Callable[..., Any],
                 check_model: Callable[[Any], None] = lambda model: None
                 ) -> None:
        self.comm, self._options, self.create = comm, options, create
        self._make_communicator = make_communicator
        self._check_model = check_model
        # None until the script has made an updater:
        self.updater: Any = None
        self.undrawn = Undrawn(lambda: self.updater is None)
        self.grid: Any = None
        #: The divided model, for the script's own code.
        self.whole: WholeModel | None = None

    @property
    def model(self) -> Any:
        """The model that was cut; None before."""
        return self.updater and self.updater.get_optimizer('main').target

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A block for the script, in which it says everything once."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_one_process())
            stack.enter_context(self.undrawn.building())
            stack.enter_context(fetching.set_to(None))
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
        given = dict(bound.arguments)
        given.update(given.pop('kwargs'))
        del given['self']
        self._build(updater, given)

    def update_optimizer(self, original: Callable, optimizer: Any,
                         *args: Any, **kwargs: Any) -> None:
        if self.updater is None:
            raise Refusal(OWN_LOOP.format(_TITLE))
        original(optimizer, *args, **kwargs)

    @_together
    def update(self, original: Callable, updater: Any) -> None:
        original(updater)

    @_together
    def make_trainer(self, original: Callable, trainer: Any, *args: Any,
                     **kwargs: Any) -> None:
        updater = args[0] if args else kwargs.get('updater')
        if updater is not self.updater or updater is None:
            raise Refusal(
                f'the Trainer gets a {type(updater).__name__}; {_TITLE} '
                'needs chainer.training.updaters.StandardUpdater')
        original(trainer, *args, **kwargs)
        trainer.out = self.comm.bcast(trainer.out)

    @_together
    def extend(self, original: Callable, trainer: Any, extension: Any,
               *args: Any, **kwargs: Any) -> None:
        found = adapted(extension, self)
        if found is not None:
            original(trainer, found, *args, **kwargs)

    @_together
    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        follow_rank_0(trainer, self.comm)
        try:
            quietly(original, trainer, *args, **kwargs)
        except PlaceholderError as error:
            if getattr(error, 'is_shown', False):       # of an update
                raise
            raise Refusal(f'outside of an update, {error}') from error

    def make_evaluator(self, original: Callable, evaluator: Any, *args: Any,
                       **kwargs: Any) -> None:
        original(evaluator, *args, **kwargs)
        if self.comm.rank:
            evaluator._progress_bar = False
        target = evaluator.get_all_targets().get('main')
        if not evaluates_itself(type(evaluator)) and (
                evaluator.eval_func is None
                or is_model(evaluator.eval_func, target)):
            evaluator.eval_func = _Evaluation(self, target)

    @_together
    def evaluate(self, original: Callable, evaluator: Any) -> Any:
        # Sets that were divided by chance differ between ranks; triggers
        # must not.
        function = evaluator.eval_func
        if self.whole is None:
            return self.comm.bcast(original(evaluator))
        if isinstance(function, _Evaluation) and function.is_shared:
            try:
                return self.comm.bcast(original(evaluator))
            except NotTraced as error:
                self.warn('each rank has the whole model while it evaluates, '
                          f'as {error.__cause__ or error}')
                function.can_be_shared = False
        with self.whole.lent():
            return self.comm.bcast(original(evaluator))

    save, load = _together(files.save), _together(files.load)

    # --- details ------------------------------------------------------------

    @_together
    def as_rank_0(self, value: Any) -> Any:
        """The value that rank 0 has found; call it on all ranks."""
        return self.comm.bcast(value)

    def warn(self, text: str) -> None:
        """Prints a warning on rank 0."""
        if self.comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)

    def _build(self, updater: Any, given: dict[str, Any]) -> None:
        iterator, optimizer, samples = self._checked(given)
        own, model, device = iterator, optimizer.target, given['device']
        if device is not None:
            device = chainer.get_device(device)
            model.to_device(device)
        input_device = given.get('input_device')
        input_device = (device if input_device is None
                        else chainer.get_device(input_device))
        self.grid = ProcessGrid(self.comm, pipeline=self._options.pipeline)
        self._check_model(model)
        self._place(optimizer, lambda: self._example(
            iterator, samples, given['converter'], input_device))
        if self.grid.replicas > 1:
            optimizer = chainermn.create_multi_node_optimizer(
                optimizer, self._make_communicator(self.grid.data))
            if self.grid.stage_index == 0:
                iterator = divided(iterator, self.grid.data)
        self._become(updater, iterator, optimizer, given)
        updater._device, updater._input_device = device, input_device
        used = updater.get_iterator('main')
        if isinstance(used, FollowingIterator):
            show_progress_of(used, own)     # the script's loop may ask it
        self.updater = updater
        self.whole = WholeModel(model.partition)
        self.whole.open()

    def _place(self, optimizer: Any, example: Callable[[], Any]) -> None:
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
                model, example(), self.grid, memory=options.memory,
                micro_batches=options.micro_batches,
                schedule=options.schedule, chunks=options.chunks,
                optimizer=optimizer, plan=options.cut)
        if self.comm.rank == 0:
            print(model, file=sys.stderr)

    def _become(self, updater: Any, iterator: Any, optimizer: Any,
                given: dict[str, Any]) -> None:
        options = self._options
        updater.__class__ = PipelineUpdater
        with refusing():
            PipelineUpdater.__init__(
                updater, iterator, optimizer, self.grid,
                micro_batches=options.micro_batches,
                schedule=options.schedule, converter=given['converter'],
                seed=self._seed(), auto_new_epoch=given['auto_new_epoch'])
        updater.loss_scale = given['loss_scale']
        if updater.loss_scale is not None:
            optimizer.set_loss_scale(updater.loss_scale)

    def _checked(self, given: dict[str, Any]) -> tuple[Any, Any, int]:
        """Iterator, optimizer, and samples of a micro-batch."""
        options = self._options
        replicas = self.comm.size // options.pipeline

        def check() -> tuple[Any, Any, int]:
            iterator = the_iterator(given['iterator'])
            optimizer = the_optimizer(given['optimizer'], options.pipeline)
            check_loss(given['loss_func'], optimizer.target)
            return iterator, optimizer, samples_of(
                iterator.batch_size, options.micro_batches, replicas)
        return refuse_together(self.comm, check)

    def _example(self, iterator: Any, samples: int, converter: Callable,
                 device: Any) -> Any:
        """A micro-batch: the first examples of rank 0's data set.

        A batch of the iterator would be missing in the training, and an
        iterator that reads ahead in other processes cannot be copied.
        """
        def read() -> list | None:
            if self.comm.rank:
                return None
            found = [iterator.dataset[place] for place in range(
                min(samples, len(iterator.dataset)))]
            if self.comm.size > self._options.pipeline:
                check_examples(found)
            return found
        return first_batch(self.comm, read, converter, device)

    def _seed(self) -> int:
        """The seed of dropout, drawn from the script's generator."""
        with preserved():
            return self.comm.bcast(int(numpy.random.randint(1 << 31)))


class _Evaluation:
    """The function of an ``Evaluator``, which may precede the updater.

    Ranks share the work where the target is the model that is trained, and
    each of them has the whole model where it is another.
    """

    def __init__(self, job: PipelineJob, target: Any) -> None:
        self._job, self._target = job, target
        self.can_be_shared = True

    @property
    def is_shared(self) -> bool:
        return self.can_be_shared and self._target is self._job.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._job.updater.evaluate if self.is_shared
                else self._target)(*args, **kwargs)


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
    def convert_on_rank_0() -> tuple[Any, list[numpy.ndarray]] | None:
        state = random.getstate()
        with preserved():
            examples = read()
            batch = None if comm.rank else convert._call_converter(
                converter, examples, device)
        random.setstate(state)
        if comm.rank:
            return None
        leaves, tree = nested.leaves(batch)
        if problem := obstacle(tree, 'batch', MPI.pickle.dumps):
            raise ValueError('what the converter returns is not made of '
                             f'arrays: {problem}')
        return tree, [chainer.backends.cuda.to_cpu(nested.array_of(leaf))
                      for leaf in leaves]
    tree, host = refuse_together(comm, convert_on_rank_0) or (None, None)
    tree, host = broadcast_arrays(comm, tree, host)
    to = chainer.get_device('@numpy' if device is None else device)
    return refuse_together(comm, lambda: nested.rebuilt(
        tree, [to.send(array) for array in host]))


def check_updater(updater: Any, before: Any, title: str) -> None:
    """Raises Refusal about any but a script's only ``StandardUpdater``."""
    if type(updater) is not StandardUpdater:
        raise Refusal(
            f'the script trains with a {type(updater).__name__}; {title} '
            'needs chainer.training.updaters.StandardUpdater itself')
    if before is not None:
        raise Refusal(f'the script makes a second updater; {title} is of one '
                      'model with one updater')


# --- checks ------------------------------------------------------------------

_ITERATORS = SerialIterator, MultiprocessIterator, MultithreadIterator


def the_iterator(given: Any) -> Any:
    """The only iterator of an updater."""
    iterator = _only(given, 'iterators')
    if not isinstance(iterator, _ITERATORS):
        names = ', '.join(kind.__name__ for kind in _ITERATORS)
        raise ValueError(
            f'the training data come from a {type(iterator).__name__}; '
            f'unmodified scripts are trained with {names}')
    return iterator


def the_optimizer(given: Any, stages: int) -> Any:
    """The only optimizer of an updater."""
    optimizer = _only(given, 'optimizers')
    if isinstance(optimizer, (_MultiNodeOptimizer,
                              _DoubleBufferingOptimizer)):
        raise ValueError(
            "the script's optimizer is ChainerMN's multi-node optimizer; run "
            'it without --pipeline and --plan, or leave '
            'create_multi_node_optimizer out and give --communicator')
    if not isinstance(optimizer, chainer.GradientMethod):
        raise ValueError(
            f'the optimizer is a {type(optimizer).__name__}; several ranks '
            'can train with optimizers of one gradient only '
            '(chainer.GradientMethod)')
    if optimizer.target is None:
        raise ValueError('the optimizer has no model; call '
                         'optimizer.setup(model) before making the updater')
    decisions(optimizer, stages)
    return optimizer


def check_loss(loss_func: Any, model: chainer.Link) -> None:
    """Raises ValueError if the loss is not inside of the model."""
    if loss_func is not None and not is_model(loss_func, model):
        name = getattr(loss_func, '__name__', type(loss_func).__name__)
        raise ValueError(
            f'the updater has a loss function of its own, {name}; put it '
            'into the model, as in L.Classifier(net, lossfun=...), and leave '
            'loss_func out')


def is_model(function: Any, model: Any) -> bool:
    """Whether a function is the model, or its ``forward``."""
    return function is model or (
        getattr(function, '__self__', None) is model
        and function.__name__ in ('__call__', 'forward'))


def samples_of(batch_size: int, micro_batches: int, replicas: int) -> int:
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


def _only(given: Any, what: str) -> Any:
    if not isinstance(given, Mapping):
        return given
    if list(given) != ['main']:
        raise ValueError(
            f'the updater has {len(given)} {what} ({", ".join(given)}); '
            'what is trained over ranks is one model, with one optimizer and '
            'one iterator')
    return given['main']
