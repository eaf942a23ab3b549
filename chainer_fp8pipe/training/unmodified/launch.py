"""Runs a script on all ranks, or refuses it in one line on all of them."""
# A script is run on each rank by old_names.run_path, in the blocks where its
# objects are made by somebody else (intercept.training_objects): by a job,
# which knows in what way the script trains, and, with --snapshots or under the
# launcher, by Restarting, which the job calls as it would call Chainer.
#
# What cannot be done is a Refusal: a line, once, and exit code 2 on all ranks.
# It is no Exception, as scripts catch those.  Most faults come up on all ranks
# at the same place, as all run the same script; refuse_together is for those
# that may not, and refuse_all waits for the others, and ends ranks that have
# found nothing.  An error of the user's own code stays what it is.
from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)
from mpi4py import MPI

from ...command_line import check_script
from ...compat.old_names import run_path
from ...intercept.patching import Patch
from ...intercept.training_objects import (
    Originals,
    creating_communicators,
    substituting,
)
from ...mpi.finalizing import keep_forever
from ...mpi.grid import ProcessGrid
from ...mpi.tracebacks import of_the_user, shown
from ...mpi.world import end_all_ranks, enter_world
from ...report.launch_protocol import say_done

#: Seconds in which the other ranks find the same fault, if they do.
_PATIENCE = 10.0
#: Exit code of a command with wrong arguments.
_CODE = 2


class Refusal(SystemExit):
    """The script does something that the command cannot do with it.

    Not an ``Exception``, which a script might catch and go on.
    """


def refuse_all(comm: MPI.Comm, refusal: Refusal, command: str) -> NoReturn:
    """Prints why, once, and ends this rank with the exit code 2.

    Call it on the ranks that refuse.  If some do not, these are ended, too.
    ``comm`` has all ranks, and is used for nothing else; ``command`` is
    named before the reason.
    """
    text = f'chainer_fp8pipe {command}: {refusal.code}\n'
    request = comm.Ibarrier()
    end = time.monotonic() + _PATIENCE
    while not request.Test():
        if time.monotonic() > end:
            end_all_ranks(text, _CODE)
        time.sleep(0.01)
    if comm.rank == 0:
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    # So that a launcher that ends all ranks when the first one fails has
    # passed the line on.
    comm.Barrier()
    with contextlib.suppress(ValueError):
        sys.stdout.flush()
    raise SystemExit(_CODE)


def refuse_together(comm: MPI.Comm, action: Callable[[], Any],
                    kind: Callable[[str], BaseException] = Refusal) -> Any:
    """Does ``action``; an error on any rank is a refusal on all.

    The first rank's message counts.  An error of the user's own code is
    raised as it is, where it came up.

    Args:
        comm: The ranks.
        action: Must not communicate.
        kind: Raised in place of a Refusal.

    Returns:
        What ``action`` returned.
    """
    result, problem, reason = None, '', None
    try:
        result = action()
    except Exception as error:      # the ranks that wait must hear of it
        reason = error
        problem = f'{type(error).__name__}: ' * (
            not isinstance(error, ValueError)) + str(error)
    if problems := list(filter(None, comm.allgather(problem))):
        if reason is not None and of_the_user(reason):
            raise reason
        raise kind(problems[0]) from reason
    return result


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
        raise Refusal(' '.join(str(error).split())) from error


def quietly(run: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a Trainer, which would print an exception before it raises it.

    So would every rank; where nobody catches it, it is printed at the end.
    """
    if not args:
        kwargs.setdefault('show_loop_exception_msg', False)
    run(trainer, *args, **kwargs)


def add_script(parser: argparse.ArgumentParser,
               jobs_of: Callable[[argparse.Namespace], list[Any]],
               run: Callable[[argparse.Namespace, list[Any]], None]) -> None:
    """Adds a script and its arguments to a command, which runs the script.

    Args:
        parser: Of the command.
        jobs_of: Checks the command's options, on all ranks, and gives the
            jobs for :func:`launch`; raises ValueError about wrong options.
        run: Launches the script with them.
    """
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('arguments', metavar='ARGS', nargs=argparse.REMAINDER,
                        help="the script's own arguments")

    def checked(options: argparse.Namespace) -> Callable[[], None]:
        try:
            refuse_together(MPI.COMM_WORLD, lambda: check_script(
                options.script), ValueError)
            jobs = jobs_of(options)
        except ValueError as error:
            parser.error(str(error))
        return lambda: run(options, jobs)
    parser.set_defaults(call=checked, parser=parser)


def check_writable(option: str, directory: str) -> None:
    """Raises ValueError if an option's directory cannot be written to."""
    folder = os.path.abspath(directory)
    while not os.path.lexists(folder):      # it is made when needed
        folder = os.path.dirname(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f'{option} {directory}: {error.strerror}') from error


def launch(script: str, arguments: Sequence[str], command: str,
           *jobs: Any, comm: MPI.Comm = MPI.COMM_WORLD) -> None:
    """Runs a script as Python would, on all ranks.

    A failure or an exit code on one rank ends all ranks.

    Args:
        script: Path of the file.
        arguments: The script's own.
        command: Which of the package's commands this is, for messages.
        jobs: Each an :class:`.Originals`, which the next one has for
            Chainer, and whose ``finish()`` is called when the script has
            ended.  The last one's ``create`` is in place of
            ``chainermn.create_communicator``, and all is done in the block
            that its ``block()`` gives.
        comm: The ranks that run it.

    Raises:
        SystemExit: The script or the job has raised it.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if MPI.COMM_WORLD.size == 1:
        sys.excepthook = _print_shown
    enter_world()
    ranks = comm.Dup()      # nobody else's
    try:
        with jobs[-1].block(), creating_communicators(
                jobs[-1].create), contextlib.ExitStack() as stack:
            for job in jobs:
                stack.enter_context(substituting(job))
            run_path(script)
            for job in reversed(jobs):
                job.finish()
        say_done()
    except Refusal as refusal:
        refuse_all(ranks, refusal, command)
    except SystemExit as exit:
        if exit.code in (None, 0):
            say_done()
        elif MPI.COMM_WORLD.size > 1:
            # The other ranks may be waiting for this one.
            if isinstance(exit.code, int):
                end_all_ranks('', exit.code)
            end_all_ranks(f'{exit.code}\n', 1)
        raise


def _print_shown(kind: type[BaseException], error: BaseException,
                 trace: TracebackType | None) -> None:
    sys.stderr.write(shown(error))


@contextlib.contextmanager
def only_rank_0_prints(*redirect: Callable) -> Iterator[None]:
    """A block in which other ranks' streams lead nowhere.

    Args:
        redirect: ``contextlib.redirect_stdout``, ``redirect_stderr``.
    """
    with contextlib.ExitStack() as stack:
        if MPI.COMM_WORLD.rank:
            nowhere = stack.enter_context(open(os.devnull, 'w'))
            for stream in redirect:
                stack.enter_context(stream(nowhere))
        yield


#: Seconds in which rank 0 comes to a call of another rank's, if it does.
_CALL_PATIENCE = 5.0
#: Seconds by which the clocks of ranks and disks may differ.
_CLOCKS = 1.0
#: Functions of ``os`` that only the first of several ranks can call.
_ONCE = 'mkdir', 'remove', 'rename', 'replace', 'rmdir', 'unlink'
#: Modules by which scripts call them, and those that are no script's.
_THROUGH = 'os', 'pathlib', 'posixpath', 'shutil'
_NO_SCRIPTS = 'chainer', 'chainermn', 'chainer_fp8pipe', 'tempfile'


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """A block for a script that knows of no ranks, on all of them.

    Rank 0 alone prints and warns, and changes the folders; what comes of that
    there is what comes of it on the others.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_rank_0_prints(contextlib.redirect_stdout))
        if MPI.COMM_WORLD.size > 1:
            outcomes = _Outcomes(MPI.COMM_WORLD.Dup())
            for name in _ONCE:
                _replace(stack, name, functools.partial(outcomes.told, name))
        if MPI.COMM_WORLD.rank:
            # Not NumPy's, of values that one stage computes.
            stack.enter_context(warnings.catch_warnings())
            for kind in DeprecationWarning, FutureWarning, UserWarning:
                warnings.filterwarnings('ignore', category=kind,
                                        module=r'(?!chainer_fp8pipe\b)')
        yield


@contextlib.contextmanager
def as_ranks() -> Iterator[None]:
    """A block for a script that may know of ranks, on all of them.

    A directory that another rank has just made is no error.
    """
    start = MPI.COMM_WORLD.allreduce(time.time(), MPI.MIN)

    def make(original: Callable) -> Callable:
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(path, *args, **kwargs)
            except FileExistsError:
                if (kwargs.get('dir_fd') is not None
                        or _caller() == 'tempfile'
                        or not os.path.isdir(path)
                        or os.stat(path).st_ctime < start - _CLOCKS):
                    raise
        return mkdir
    with contextlib.ExitStack() as stack:
        if MPI.COMM_WORLD.size > 1:
            _replace(stack, 'mkdir', make)
        yield


class _Outcomes:
    """What has come of rank 0's calls, in their order.

    No rank waits for ever for another one: rank 0 sends, and a call that does
    not come there is made where it is made.

    Args:
        comm: All ranks; nobody else's.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._heard: list[tuple[Any, int | None]] = []

    def told(self, name: str, original: Callable) -> Callable:
        """A function that does on rank 0 what it does, and not on others."""
        def call(*args: Any, **kwargs: Any) -> None:
            if (threading.current_thread() is not threading.main_thread()
                    or kwargs.get('dir_fd') is not None
                    or _caller() in _NO_SCRIPTS):
                original(*args, **kwargs)
                return
            what = name, args[:1 + (name in ('rename', 'replace'))]
            act = functools.partial(original, *args, **kwargs)
            if self._comm.rank == 0:
                self._do(what, act)
            else:
                self._follow(what, act)
        return call

    def _do(self, what: Any, act: Callable[[], None]) -> None:
        problem: int | None = None
        try:
            act()
        except OSError as error:
            problem = error.errno
            raise
        finally:
            for rank in range(1, self._comm.size):
                keep_forever(self._comm.isend((what, problem), rank))

    def _follow(self, what: Any, act: Callable[[], None]) -> None:
        end = time.monotonic() + _CALL_PATIENCE
        while True:
            while self._comm.Iprobe():
                self._heard.append(self._comm.recv())
            at = next((at for at, (one, _) in enumerate(self._heard)
                       if one == what), None)
            if at is not None or time.monotonic() > end:
                break
            time.sleep(0.01)
        if at is None:
            act()
            return
        problem = self._heard[at][1]
        del self._heard[:at + 1]
        name, paths = what
        if problem is not None:
            raise OSError(problem, os.strerror(problem), *paths[:1])
        if name == 'mkdir' and not os.path.isdir(*paths):   # another host
            with contextlib.suppress(FileExistsError):
                act()


def _replace(stack: contextlib.ExitStack, name: str, make: Callable) -> None:
    stack.enter_context(Patch(os, name, make))
    if sys.version_info < (3, 11) and hasattr(
            accessor := vars(pathlib)['_normal_accessor'], name):
        stack.enter_context(Patch(accessor, name, make))


def _caller() -> str:
    """The package that calls a function of ``os``."""
    frame: Any = sys._getframe(3)     # behind the patch
    while frame is not None and (found := frame.f_globals.get(
            '__name__', '').partition('.')[0]) in _THROUGH:
        frame = frame.f_back
    return found if frame is not None else ''


#: Modules with these names know MPI, which says nothing about the script.
_OURS = 'chainer_fp8pipe', 'chainermn', 'mpi4py'


#: Methods of communicators that average gradients, given a model.
_MEANS = 'multi_node_mean_grad', 'allreduce_grad'
#: Those by which a script may share arrays in a way of its own.
_SHARE = ('allgather', 'allreduce', 'allreduce_obj', 'alltoall', 'gather',
          'multi_node_mean', 'recv', 'scatter', 'send')


class RankAware(Originals):
    """Refuses the first update that would not be averaged over the ranks.

    For scripts that average their gradients themselves, by ChainerMN, by
    this package or by mpi4py; Chainer makes all that they make.

    Args:
        comm: All ranks.
        script: The script's path.
        create: Makes the communicators.
    """

    block = staticmethod(as_ranks)

    def __init__(self, comm: MPI.Comm, script: str,
                 create: Callable[..., Any]) -> None:
        self._size, self._script, self._create = comm.size, script, create
        self._is_checked = comm.size == 1
        # Optimizers that were found to be right, and models that a
        # communicator has had.
        self._right: list[Any] = []
        self._averaged: set[int] = set()
        self._shares = comm.size == 1

    def finish(self) -> None:
        """The script has ended."""

    def create(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a communicator, and notes what it is used for."""
        found = self._create(*args, **kwargs)
        for names, note in (_MEANS, self._average), (_SHARE, self._share):
            for name in names:
                if hasattr(type(found), name):
                    Patch(type(found), name, note).hold(found)
        return found

    def _average(self, original: Callable) -> Callable:
        def mean(comm: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self._averaged.add(id(model))
            return original(comm, model, *args, **kwargs)
        return mean

    def _share(self, original: Callable) -> Callable:
        def share(*args: Any, **kwargs: Any) -> Any:
            self._shares = True
            return original(*args, **kwargs)
        return share

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        self._check()
        quietly(original, trainer, *args, **kwargs)

    def update_optimizer(self, original: Callable, optimizer: Any,
                         lossfun: Any = None, *args: Any, **kwargs: Any
                         ) -> None:
        self._check()

        def loss(*args: Any, **kwargs: Any) -> Any:
            # A model that is divided over ranks sends and receives in it.
            found = lossfun(*args, **kwargs)
            self._check_averaged(optimizer)
            return found
        if lossfun is None:
            self._check_averaged(optimizer)
            original(optimizer, None, *args, **kwargs)
        else:
            original(optimizer, loss, *args, **kwargs)

    def _check(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        if _knows_mpi(self._script) or _alive(ProcessGrid):
            self._shares = True
        elif not _alive(CommunicatorBase):
            raise Refusal(
                'the script creates no communicator, so each of the '
                f'{self._size} ranks would train a model of its own on all '
                'data. Run the script as it is with --pipeline '
                f'{self._size}. Or add "comm = chainermn.create_communicator'
                '()" and "optimizer = chainermn.create_multi_node_optimizer('
                'optimizer, comm)" before optimizer.setup(model)')

    def _check_averaged(self, optimizer: Any) -> None:
        if self._shares or any(optimizer is one for one in self._right):
            return
        if id(optimizer.target) in self._averaged or any(
                getattr(one, 'actual_optimizer', None) is optimizer
                for one in _alive(_MultiNodeOptimizer,
                                  _DoubleBufferingOptimizer)):
            self._right.append(optimizer)
            return
        kind, target = type(optimizer).__name__, type(optimizer.target)
        raise Refusal(
            f'the {kind} of a {target.__name__} is updated without '
            f'averaging, so each of the {self._size} ranks would train a '
            'model of its own. Give it to chainermn.'
            'create_multi_node_optimizer(optimizer, comm) before '
            'optimizer.setup(model). Or call '
            'comm.multi_node_mean_grad(model) before optimizer.update(). '
            'Scripts that import mpi4py are not checked')


def _alive(*kinds: type) -> list[Any]:
    """All objects of some kinds."""
    # By its class alone: a proxy's attributes may do anything.
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


def _knows_mpi(script: str) -> bool:
    """Whether the script, or a module that it has imported, uses mpi4py."""
    with open(script, 'rb') as file:
        if re.search(b'mpi4py|mpi_comm', file.read()):
            return True
    for name, module in list(sys.modules.items()):
        if (isinstance(module, ModuleType)
                and name.partition('.')[0] not in _OURS):
            for value in list(vars(module).values()):
                named = (value.__name__ if isinstance(value, ModuleType)
                         else type(value).__module__)
                if isinstance(named, str) and named.startswith('mpi4py'):
                    return True
    return False
