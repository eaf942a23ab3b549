"""Plans the job of an unmodified script, which is then not run."""
from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)
from mpi4py import MPI

from ...communicators import create_communicator
from ...communicators.options import FAMILIES
from ...intercept.training_objects import Originals
from ...planning.job.configuration import USUAL_CODECS
from ...training.unmodified.dividing import obstacle
from ...training.unmodified.jobs import (
    OWN_LOOP,
    check_loss,
    check_updater,
    first_batch,
    initialise,
)
from ...training.unmodified.launch import Refusal, refuse_together, refusing
from ..example import Example
from ..planned_job import PlannedJob, plan

_TITLE = 'a plan'


class Request(NamedTuple):
    """What the user of the command line asks for; see :func:`.plan`."""

    batch: int | None = None
    memory: str | None = None
    codecs: tuple[str, ...] = USUAL_CODECS
    ranks: int | None = None
    file: str | None = None     # to save the plan in
    torus: tuple[int, int] | None = None
    budget: float = 16.0


class Planned(SystemExit):
    """The plan is made; the script ends, with the exit code 0."""


class ScriptPlan(Originals):
    """Plans a script's job when the script is about to train.

    A :class:`~chainer_fp8pipe.intercept.training_objects.Substitute`.  All
    ranks run the script until it calls ``run()`` of its Trainer or
    ``update()`` of its ``StandardUpdater``; then model, optimizer, batch and
    batch size are known.  The script writes no models, and does not go on.

    Args:
        comm: All ranks.
        script: The script's name, for messages.
        request: What is asked for.
    """

    def __init__(self, comm: MPI.Comm, script: str, request: Request) -> None:
        self._comm, self._script, self._request = comm, script, request
        self._updater: Any = None
        self._is_chainermn = False
        self._is_measuring = False      # which makes updaters, too

    def create(self, communicator_name: str = 'pure_nccl',
               mpi_comm: Any = None, **options: Any) -> Any:
        """In place of ``chainermn.create_communicator``."""
        self._is_chainermn = True
        return create_communicator(
            communicator_name if communicator_name in FAMILIES else 'float32',
            mpi_comm)

    def finish(self) -> None:
        """Raises Refusal: the script has not trained."""
        if self._updater is None:
            raise Refusal('the script has made no chainer.training.'
                          'StandardUpdater, so there is nothing to plan')
        raise Refusal('the script has ended without training: it has called '
                      'neither run() of a Trainer nor update() of its '
                      'StandardUpdater')

    # --- what the script makes ----------------------------------------------

    def make_updater(self, original: Callable, updater: Any, *args: Any,
                     **kwargs: Any) -> None:
        if self._is_measuring:
            original(updater, *args, **kwargs)
            return
        check_updater(updater, self._updater, _TITLE)
        original(updater, *args, **kwargs)
        self._updater = updater

    def update(self, original: Callable, updater: Any) -> None:
        if self._is_measuring:
            original(updater)
        else:
            self._end()

    def update_optimizer(self, original: Callable, optimizer: Any,
                         *args: Any, **kwargs: Any) -> None:
        if not self._is_measuring:
            raise Refusal(OWN_LOOP.format(_TITLE))
        original(optimizer, *args, **kwargs)

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        if trainer.updater is not self._updater:
            raise Refusal(
                f'the Trainer has a {type(trainer.updater).__name__}; '
                f'{_TITLE} needs chainer.training.updaters.StandardUpdater')
        self._end()

    def save(self, original: Callable, file: Any, obj: Any, *args: Any,
             **kwargs: Any) -> None:
        self._say(f'{file} is not written')

    # --- the plan -----------------------------------------------------------

    def _end(self) -> NoReturn:
        request = self._request
        made = self._planned()
        if request.file is not None:
            refuse_together(self._comm, lambda: self._save(made))
        self._updater.finalize()
        self._say(f'{self._script} was left at its first update: nothing is '
                  'trained, evaluated or saved')
        raise Planned(0)

    def _planned(self) -> PlannedJob:
        comm, request = self._comm, self._request
        optimizer = refuse_together(comm, self._optimizer)
        count = request.ranks or comm.size
        example = self._example()
        batch = request.batch or example.samples * (
            count if self._is_chainermn else 1)
        share = example.of(max(1, batch // count))
        model = optimizer.target
        if not all(one.is_initialized for one in model.params()):
            initialise(model, share)
        if self._is_chainermn:
            self._say("the script is ChainerMN's, which keeps the whole "
                      'model on each rank: no pipeline is looked at')
        self._is_measuring = True
        refuse_together(comm, lambda: _check_copies(model))
        with refusing():
            return plan(model, share, comm, batch=batch,
                        memory=request.memory, optimizer=optimizer,
                        codecs=request.codecs, ranks=request.ranks,
                        stages=(1,) if self._is_chainermn else (),
                        torus=request.torus, budget=request.budget,
                        show=True)

    def _optimizer(self) -> Any:
        """The optimizer itself, which has a model that returns its loss."""
        optimizers = self._updater.get_all_optimizers()
        if list(optimizers) != ['main']:
            raise ValueError(
                f'the updater has {len(optimizers)} optimizers '
                f'({", ".join(optimizers)}); {_TITLE} is of one model with '
                'one optimizer')
        found = optimizers['main']
        if isinstance(found, (_MultiNodeOptimizer,
                              _DoubleBufferingOptimizer)):
            self._is_chainermn = True
            found = found.actual_optimizer
        if found.target is None:
            raise ValueError('the optimizer has no model; call '
                             'optimizer.setup(model) before training')
        check_loss(self._updater.loss_func, found.target)
        return found

    def _example(self) -> Example:
        """The first rank's next batch, as the converter gives it."""
        updater = self._updater
        # The iterator is asked on all ranks, as iterators may be each
        # other's.
        batch = first_batch(
            self._comm, updater.get_iterator('main').next,
            updater.converter, updater.input_device)
        return refuse_together(self._comm, lambda: Example(batch))

    def _save(self, made: PlannedJob) -> None:
        if self._comm.rank == 0:
            assert self._request.file is not None
            try:
                made.save(self._request.file)
            except OSError as error:
                raise ValueError(f'-o: {error}') from error
            self._say(f'the plan is in {self._request.file}')

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f'chainer_fp8pipe plan: {text}', file=sys.stderr,
                  flush=True)


def _check_copies(model: Any) -> None:
    """Raises ValueError about a model that cannot be measured on copies."""
    parameters = {id(one): one for one in model.params()}
    if problem := obstacle(model, 'model', lambda value: copy.deepcopy(
            value, dict(parameters))):
        raise ValueError(
            f'copies of the model are measured, and it has what cannot be '
            f'copied: {problem}; have forward() open it, or keep it outside '
            'of the model')
