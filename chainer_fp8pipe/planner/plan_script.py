"""``python -m chainer_fp8pipe plan``: plans the job of a script."""
# All ranks run the script, whose Trainer and StandardUpdater are this module's
# (see intercept), until it is about to train: then model, optimizer, data and
# batch size are known.  The plan is made of them; the script is left there.
from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from chainermn.optimizers import _DoubleBufferingOptimizer, _MultiNodeOptimizer
from mpi4py import MPI

from ..command_line import count, some_of, unwritable
from ..communicators import create_communicator
from ..communicators.options import FAMILIES
from ..intercept.training_objects import Originals
from ..planning.job_plan import TRIED, USUAL_CODECS
from ..training.unmodified.dividing import obstacle
from ..training.unmodified.jobs import (
    OWN_LOOP,
    check_loss,
    check_updater,
    first_batch,
    initialise,
)
from ..training.unmodified.launch import (
    Refusal,
    as_one_process,
    refuse_together,
    refusing,
)
from .example import Data, Endless, Example
from .plan import plan
from .planned_job import PlannedJob
from .run_script import add_script, size

_DESCRIPTION = """
Finds the fastest way to run an unmodified Chainer or ChainerMN script:

    mpiexec -n 8 python -m chainer_fp8pipe plan -o plan.json train.py -b 64
    mpiexec -n 8 python -m chainer_fp8pipe run --plan plan.json train.py -b 64

Start it as you start your training: same hosts, same ranks, same arguments
of the script.  Options of "plan" come before SCRIPT.

All ranks run the script until it is about to train.  The command then measures
the model on a batch of the script's data, the exchanges, and the links.  It
ranks every way to run the job: stages and replicas, cuts of the model,
schedule, micro-batches, recomputation, codec, algorithm and overlap.  The
first five ways that fit into memory, ChainerMN's naive and one process then
run some updates.  These run on copies, with the script's own data.  The
command prints the fastest way, and the times of all.  It takes some 30
seconds; the script trains nothing.

The batch size of a script without ChainerMN is that of all ranks together.
The batch size of a ChainerMN script is that of each rank; its plan has
replicas only.
"""


def add_plan(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser('plan', description=_DESCRIPTION)
    parser.add_argument(
        '-o', '--output', metavar='FILE',
        help='save the plan there, as JSON, for "run --plan"')
    parser.add_argument(
        '--memory', metavar='SIZE', type=size, help='most memory of a rank '
        "beyond the interpreter's, such as 2GiB or '300 MB' (default: no "
        'limit)')
    parser.add_argument(
        '--batch', metavar='N', type=count, help='samples of an update, of '
        "all ranks together (default: the script's)")
    parser.add_argument(
        '--codecs', metavar='NAME,...', type=some_of(TRIED),
        default=USUAL_CODECS, help='formats that gradients may travel in: '
        f'{", ".join(TRIED)} (default: {",".join(USUAL_CODECS)}; float32 '
        'alone is exact)')
    parser.add_argument(
        '--ranks', metavar='N', type=count, help='plan for N ranks, as if '
        'more were added in the same way (default: for these)')
    parser.add_argument(
        '--seconds', metavar='S', type=_seconds, default=16.0,
        help='time for measuring exchanges and trying ways, about '
        '(default: 16)')
    add_script(parser, 'plan', _job)


def _job(options: argparse.Namespace) -> list[Any]:
    """What plans the script's job, if the plan can be written."""
    # Rank 0 writes; others may be on hosts where the folder is not.
    comm = MPI.COMM_WORLD
    if problem := comm.bcast(comm.rank == 0 and unwritable(options.output)):
        raise ValueError(f'-o: {problem}')
    return [ScriptPlan(comm, options)]


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float('inf'):
        raise argparse.ArgumentTypeError(f'{text!r} is no number of seconds')
    return found


_TITLE = 'a plan'


class ScriptPlan(Originals):
    """Plans a script's job when the script is about to train.

    All ranks run the script until it calls ``run()`` of its Trainer or
    ``update()`` of its ``StandardUpdater``; then model, optimizer, batch and
    batch size are known.  The script writes no models, and does not go on.

    Args:
        comm: All ranks.
        options: The parsed arguments of ``plan``.
    """

    # The script would say everything as often as there are ranks.
    block = staticmethod(as_one_process)

    def __init__(self, comm: MPI.Comm, options: argparse.Namespace) -> None:
        self._comm, self._options = comm, options
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
        made, file = self._planned(), self._options.output

        def save() -> None:
            if self._comm.rank == 0:
                try:
                    made.save(file)
                except OSError as error:
                    raise ValueError(f'-o: {error}') from error
                self._say(f'the plan is in {file}')
        if file is not None:
            refuse_together(self._comm, save)
        self._updater.finalize()
        self._say(f'{self._options.script} was left at its first update: '
                  'nothing is trained, evaluated or saved')
        raise SystemExit(0)     # the plan is made

    def _planned(self) -> PlannedJob:
        comm, options, updater = self._comm, self._options, self._updater
        optimizer = refuse_together(comm, self._optimizer)
        count = options.ranks or comm.size
        # The iterator is asked on all ranks, as iterators may be each
        # other's.
        batch = first_batch(comm, updater.get_iterator('main').next,
                            updater.converter, updater.input_device)
        example = refuse_together(comm, lambda: Example(batch))
        samples = options.batch or example.samples * (
            count if self._is_chainermn else 1)
        share = example.of(max(1, samples // count))
        model, data = optimizer.target, None
        if not all(one.is_initialized for one in model.params()):
            initialise(model, share)
        if self._is_chainermn:
            self._say("the script is ChainerMN's, which keeps the whole "
                      'model on each rank: no pipeline is looked at')
        if options.batch is options.ranks is None and (
                updater.loss_func in (None, model)):
            data = Data(Endless(updater.get_iterator('main')),
                        updater.converter, not self._is_chainermn)
        self._is_measuring = True
        refuse_together(comm, lambda: _check_copies(model))
        with refusing():
            return plan(model, share, comm, batch=samples,
                        memory=options.memory, optimizer=optimizer,
                        codecs=options.codecs,
                        ranks=options.ranks,
                        stages=(1,) if self._is_chainermn else (),
                        budget=options.seconds, show=True, data=data)

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
            f'the model cannot be copied for measuring: {problem}; have '
            'forward() open it, or keep it outside of the model')
