"""Runs a script on all ranks, or refuses it in one line on all of them."""
# Each rank runs the script in blocks where its objects are made by somebody
# else (intercept.training_objects): by a job, which knows in what way the
# script trains, and by what adds snapshots and reports.  What cannot be done
# is a Refusal: a line, once, and exit code 2 on all ranks.
from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import chainer
from chainer.training.updaters import StandardUpdater
from chainermn.communicators.communicator_base import CommunicatorBase
from mpi4py import MPI

from ...command_line import check_script
from ...compat.old_names import run_path
from ...intercept.training_objects import Originals, substituting
from ...mpi.agreement import of_first_rank
from ...mpi.grid import ProcessGrid
from ...mpi.world import end_all_ranks, of_the_user, shown, stderr
from ...report.launch_protocol import DONE, tell

#: Seconds in which the other ranks find the same fault, if they do.
_PATIENCE = 10.0


class Refusal(SystemExit):
    """The script does something that the command cannot do with it.

    Not an ``Exception``, which a script might catch and go on.
    """


def _refuse_all(comm: MPI.Comm, refusal: Refusal, command: str) -> NoReturn:
    """Prints why, once, and ends all ranks with the exit code 2."""
    # mpiexec may end all ranks when the first one fails.
    say(str(refusal.code), command)
    request, end = comm.Ibarrier(), time.monotonic() + _PATIENCE
    while not request.Test():
        if time.monotonic() > end:
            end_all_ranks(f'chainer_fp8pipe {command}: {refusal.code}\n'
                          * (comm.rank > 0), 2)
        time.sleep(0.01)
    raise SystemExit(2)


@contextlib.contextmanager
def refusing() -> Any:
    """An error inside, which is the same on all ranks, is a refusal.

    One of the user's own code stays what it is, with its traceback.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if isinstance(error, MPI.Exception):    # another start may do better
            raise
        if own := of_the_user(error):
            raise own from None
        raise Refusal(_said(error)) from error


def _said(error: Exception) -> str:
    """A line, without what :func:`raise_together` puts before it."""
    return ' '.join(re.sub('^(all ranks|rank 0): ValueError: ', '',
                           str(error)).split())


def say(text: str, command: str = 'run') -> None:
    """Prints a line of a command on rank 0."""
    if MPI.COMM_WORLD.rank == 0:
        print(f'chainer_fp8pipe {command}: {text}', file=stderr(), flush=True)


#: By what is looked at: whether it can be trained, and the sentence that
#: refuses it, in which {} is its kind, or its parts, with the remedy.
_TABLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    'updater': (
        lambda updater: type(updater) is StandardUpdater,
        'the script trains with a {}; several ranks need '
        'chainer.training.updaters.StandardUpdater itself'),
    'other_updater': (
        lambda updater: updater is None,
        'the script makes a second updater; several ranks train one model'),
    **{what: (lambda found: [*found] == ['main'],
              f'the updater has the {what} {{}}; several ranks train one '
              "model with one optimizer and iterator, 'main'")
       for what in ('iterators', 'optimizers')},
    'own_loop': (
        lambda updater: updater is not None,
        'the script trains without a chainer.training.StandardUpdater; let a '
        'loop of its own, or a Trainer, call update() of one'),
    'iterator': (
        lambda iterator: hasattr(iterator, 'dataset') and hasattr(
            iterator, 'batch_size'),
        'the training data come from a {}, which has not both dataset and '
        'batch_size; take one of chainer.iterators'),
    'optimizer': (
        lambda optimizer: isinstance(optimizer, chainer.GradientMethod),
        "the optimizer is a {}, and no chainer.GradientMethod; of ChainerMN's "
        'scripts, run it without --pipeline and --plan, or leave '
        'create_multi_node_optimizer out and give --communicator'),
    'model': (
        lambda model: model is not None,
        'the optimizer has no model; call optimizer.setup(model) before '
        'making the updater'),
    'loss_func': (
        lambda function: function is None,
        'the updater has a loss function of its own, {}; put it into the '
        'model, as in L.Classifier(net, lossfun=...), and leave loss_func '
        'out')}


def check(**seen: Any) -> None:
    """Raises Refusal about what the script has made, by the table's names."""
    for name, value in seen.items():
        is_fit, sentence = _TABLE[name]
        if not is_fit(value):
            raise Refusal(sentence.format(
                ', '.join(value) if isinstance(value, Mapping) else
                getattr(value, '__name__', type(value).__name__)))


def loss_of(function: Any, model: Any) -> Any:
    """A loss function; None if it is the model or its ``forward``."""
    return None if function in (model, *(
        getattr(model, name, None) for name in ('__call__', 'forward'))
        ) else function


def add_script(parser: argparse.ArgumentParser, prepare: Callable[
        [argparse.Namespace], Callable[[], None]]) -> None:
    """Adds a script and its arguments to a command.

    ``prepare`` checks the command's options, on all ranks, and gives what runs
    the script; it raises ValueError about wrong options.
    """
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('arguments', metavar='ARGS', nargs=argparse.REMAINDER,
                        help="the script's own arguments")

    def checked(options: argparse.Namespace) -> Callable[[], None]:
        try:
            of_first_rank(MPI.COMM_WORLD,
                          lambda: check_script(options.script))
            return prepare(options)
        except ValueError as error:
            parser.error(_said(error))
    parser.set_defaults(call=checked, parser=parser)


def launch(script: str, arguments: Sequence[str], command: str, *jobs: Any
           ) -> None:
    """Runs a script as Python would, on all ranks.

    A failure or an exit code on one rank ends all ranks.

    Args:
        script: Path of the file.
        arguments: The script's own.
        command: Which of the package's commands this is, for messages.
        jobs: Each an :class:`.Originals`, which the next one has for
            Chainer, in the block that the last one's ``block()`` gives.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if MPI.COMM_WORLD.size == 1:
        sys.excepthook = lambda _, error, trace: print(
            shown(error), end='', file=sys.stderr)
    ranks = MPI.COMM_WORLD.Dup()    # nobody else's
    try:
        with jobs[-1].block(), contextlib.ExitStack() as stack:
            for job in jobs:
                stack.enter_context(substituting(job))
            run_path(script)
            for job in reversed(jobs):
                job.finish()
        tell(DONE)
    except Refusal as refusal:
        _refuse_all(ranks, refusal, command)
    except SystemExit as exit:
        if exit.code in (None, 0):
            tell(DONE)
        raise


#: Never closed: a script may keep it.
_NOWHERE: Any = os.fdopen(os.open(os.devnull, os.O_WRONLY), 'w')


@contextlib.contextmanager
def only_rank_0_prints() -> Iterator[None]:
    """A block in which other ranks' streams lead nowhere."""
    _NOWHERE.of_all_ranks, rank = stderr(), MPI.COMM_WORLD.rank
    with contextlib.redirect_stdout(_NOWHERE if rank else sys.stdout), (
            contextlib.redirect_stderr(_NOWHERE if rank else sys.stderr)):
        yield


class RankAware(Originals):
    """Runs scripts that average their gradients themselves.

    One that has made no communicator of ChainerMN's or this package's, and
    does not name mpi4py, is refused when it is about to train.
    """

    block = staticmethod(contextlib.nullcontext)

    def __init__(self, comm: MPI.Comm, script: str,
                 create: Callable[..., Any]) -> None:
        self._ranks, self._script, self.create = comm.size, script, create

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        ranks, self._ranks = self._ranks, 1     # asked once
        # Of an object its class alone: a proxy's attributes may do anything.
        if ranks > 1 and b'mpi4py' not in pathlib.Path(
                self._script).read_bytes() and not any(
                issubclass(type(one), (CommunicatorBase, ProcessGrid))
                for one in gc.get_objects()):
            raise Refusal(
                'the script creates no communicator, so each of the '
                f'{ranks} ranks would train a model of its own on all '
                f'data. Run the script as it is with --pipeline {ranks}. Or '
                'add "comm = chainermn.create_communicator()" and "optimizer '
                '= chainermn.create_multi_node_optimizer(optimizer, comm)" '
                'before optimizer.setup(model)')
        original(*args, **kwargs)
