"""Blocks for scripts that know of no ranks, of which there are several."""
from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

from ...intercept.patching import Patch
from ...intercept.training_objects import LIBRARIES
from ...mpi.finalizing import keep_forever
from .launch import only_rank_0_prints

#: Seconds in which rank 0 comes to a call of another rank's, if it does.
_PATIENCE = 5.0
#: Functions of ``os`` that only the first of several ranks can call, and how
#: many paths each gets.
_ONCE = {'mkdir': 1, 'remove': 1, 'rename': 2, 'replace': 2, 'rmdir': 1,
         'unlink': 1}
#: Modules by which scripts call them, and those that are no script's.
_THROUGH = 'os', 'pathlib', 'posixpath', 'shutil'
_NO_SCRIPTS = LIBRARIES | {'tempfile'}


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """A block for a script that knows of no ranks, on all of them.

    Rank 0 alone prints and warns, and changes the folders; what comes of that
    there is what comes of it on the others.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_rank_0_prints(contextlib.redirect_stdout))
        if MPI.COMM_WORLD.size > 1:
            comm = MPI.COMM_WORLD.Dup()
            owners: list[Any] = [os]
            if sys.version_info < (3, 11):
                owners += [vars(pathlib)['_normal_accessor']]
            for name in _ONCE:
                for owner in owners:
                    if hasattr(owner, name):
                        stack.enter_context(Patch(
                            owner, name, functools.partial(_once, comm, name)))
        if MPI.COMM_WORLD.rank:
            # Not NumPy's, of values that one stage computes.
            stack.enter_context(warnings.catch_warnings())
            for kind in DeprecationWarning, FutureWarning, UserWarning:
                warnings.filterwarnings('ignore', category=kind,
                                        module=r'(?!chainer_fp8pipe\b)')
        yield


def _once(comm: MPI.Comm, name: str, original: Callable) -> Callable:
    """A function that acts on rank 0, and has its outcome on the others.

    No rank waits for ever for another one: rank 0 sends, and a call that does
    not come there is made where it is made.
    """
    def call(*args: Any, **kwargs: Any) -> None:
        if (threading.current_thread() is not threading.main_thread()
                or kwargs.get('dir_fd') is not None
                or _caller() in _NO_SCRIPTS):
            original(*args, **kwargs)
            return
        what, problem = (name, args[:_ONCE[name]]), 0
        if comm.rank == 0:
            try:
                original(*args, **kwargs)
            except OSError as error:
                problem = error.errno or 0
                raise
            finally:
                for rank in range(1, comm.size):
                    keep_forever(comm.isend((what, problem), rank))
            return
        heard = _outcome(comm, what)
        if heard:
            raise OSError(heard, os.strerror(heard), *args[:1])
        if heard is None:
            original(*args, **kwargs)
        elif name == 'mkdir' and not os.path.isdir(args[0]):  # another host
            with contextlib.suppress(FileExistsError):
                original(*args, **kwargs)
    return call


def _outcome(comm: MPI.Comm, what: Any) -> int | None:
    """The error's number of rank 0's call, 0 if it had none; None: no call."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if not comm.Iprobe():
            time.sleep(0.01)
            continue
        said, problem = comm.recv()
        if said == what:
            return problem
    return None


def _caller() -> str:
    """The package that calls a function of ``os``."""
    frame: Any = sys._getframe(3)     # behind the patch
    while frame is not None and (found := frame.f_globals.get(
            '__name__', '').partition('.')[0]) in _THROUGH:
        frame = frame.f_back
    return found if frame is not None else ''
