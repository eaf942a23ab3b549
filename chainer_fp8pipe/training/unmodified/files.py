"""What scripts see of the model, print, write and read, on several ranks."""
# Every rank runs the script.  Rank 0 alone prints, and changes files: what
# calls of the others' main threads write is lost.  What rank 0 has heard of
# its files counts for all: it sends each answer, and another rank that comes
# to the same call, by the line of the script, waits for it.  So whether a
# folder is there, what a clock has named it, and that it had to be made, are
# the same everywhere.  Where a rank's next call is another one than rank 0's,
# it asks its own disk; all answers that are left are void in the next meeting.
#
# The first look at a parameter of another rank fetches the whole model, which
# takes all ranks.  So a rank that looks waits in a meeting.  The others come
# to it where their code has ended or is about to communicate, and hear there
# that somebody waits, or that another rank's script does something else, which
# is refused.  Where nobody looks, that is an all-gather of some 300 bytes.
#
# After an error the other ranks may be anywhere, and in another thread they
# may be in the middle of an update: a look is an error then.
from __future__ import annotations

import builtins
import contextlib
import functools
import glob
import io
import itertools
import os
import pathlib
import shutil
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import chainer
import numpy
from mpi4py import MPI

from ...chains.deferred import LOOKS, fetching
from ...chains.placeholder import PlaceholderError, user_line
from ...intercept.patching import Patch
from ...intercept.training_objects import LIBRARIES
from ...mpi.agreement import Meeting
from ...mpi.finalizing import HeldRequest
from ...mpi.waiting import wait_until
from ...mpi.world import stderr
from .launch import Refusal, only_rank_0_prints

#: Functions by which scripts change files, and ask of them.
_CHANGES = {'chmod', 'link', 'mkdir', 'remove', 'rename', 'replace', 'rmdir',
            'rmtree', 'savetxt', 'symlink', 'touch', 'unlink', 'utime'}
_ASKS = {'glob', 'listdir', 'lstat', 'stat'}
_REPLACED = (
    *((os, name) for name in (_CHANGES | _ASKS)
      - {'glob', 'rmtree', 'savetxt', 'touch'}),
    (os, 'chdir'), (glob, 'glob'), (shutil, 'rmtree'), (builtins, 'open'),
    (io, 'open'),
    # These open by a name of their own.
    (pathlib.Path, 'touch'),
    (numpy, 'genfromtxt'), (numpy, 'loadtxt'), (numpy, 'savetxt'))
#: Modules whose files are no script's affair, though it has called them;
#: those of the package that it does not call; and where others are installed.
_NO_SCRIPTS = LIBRARIES | {'gettext', 'importlib', 'linecache',
                           'multiprocessing', 'tempfile'}
_BETWEEN = 'chainer_fp8pipe.compat', 'chainer_fp8pipe.intercept'
_INSTALLED = '<frozen', *(os.path.join(path, '') for name, path
                          in sysconfig.get_paths().items() if 'lib' in name)


# --- files -------------------------------------------------------------------

class Files:
    """Has rank 0's script write files, and others hear of them as it does.

    Attributes:
        is_open: Whether the script's own code is being run, on all ranks.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._pid, self.is_open = comm.Dup(), os.getpid(), True
        self._sent: list[HeldRequest] = []
        # What rank 0 has told, and no call has taken; None: it meets.
        self._heard: list[Any] = []

    @contextlib.contextmanager
    def script(self) -> Iterator[None]:
        """A block for a script that knows of no ranks, on all of them."""
        owners = [*_REPLACED]
        if sys.version_info < (3, 11):
            accessor = vars(pathlib)['_normal_accessor']
            owners += [(accessor, name) for _, name in _REPLACED
                       if hasattr(accessor, name)]
        with only_rank_0_prints(), contextlib.ExitStack() as stack:
            if self._comm.rank:     # one stage alone may have cause to warn
                stack.enter_context(Patch(warnings, 'showwarning', _by_all))
                stack.enter_context(Patch(threading, 'excepthook', _by_all))
            for owner, name in owners if self._comm.size > 1 else ():
                stack.enter_context(Patch(owner, name, functools.partial(
                    self._call, name)))
            stack.callback(self.close)
            yield

    def close(self) -> None:
        """No rank waits for rank 0's script any more."""
        self.is_open = False
        if self._comm.rank == 0:
            self._tell(None)

    def _tell(self, told: Any) -> None:
        self._sent = [one for one in self._sent if not one.test()] + [
            HeldRequest(self._comm.isend(told, rank))
            for rank in range(1, self._comm.size)]

    def _next(self, ahead: int) -> Any:
        """What rank 0 has told after so much else; all of it is kept."""
        while len(self._heard) <= ahead:
            wait_until(lambda: self._comm.iprobe(0))
            self._heard.append(self._comm.recv(source=0))
        return self._heard[ahead]

    def _told(self, what: tuple[str, ...], own: Any) -> Any:
        """What rank 0 has told of a call; None: it has made another one.

        Where a line is run several times, of a path that is here: of this one.
        """
        ahead = 0
        while (told := self._next(ahead)) and told[0] == what:
            if told[1] == own or not os.path.lexists(own):
                return self._heard.pop(ahead)
            ahead += 1
        return None

    def _call(self, name: str, original: Callable, *args: Any, **kwargs: Any
              ) -> Any:
        """Calls a function of files, for the script's main thread."""
        if not args:
            args = tuple([kwargs.pop(key) for key in (
                'path', 'file', 'src', 'fname') if key in kwargs]
                or ['.'] * (name == 'listdir'))
        is_open, is_first = self.is_open, self._comm.rank == 0
        line = self._line() if (is_open or not is_first) and isinstance(
            next(iter(args), 0), (str, bytes, os.PathLike)) else ''
        if not line:
            return original(*args, **kwargs)
        mode = str([*args[1:2], kwargs.get('mode', 'r')][0]
                   ) if name == 'open' else ''
        what, (path, *more) = (name, mode, line), args

        def act(path: Any) -> Any:
            return original(path, *more, **kwargs)
        self.is_open = False        # what it calls itself is its own
        try:
            return (self._lead(what, path, act) if is_first
                    else self._follow(what, path, act, is_open))
        finally:
            self.is_open = is_open

    def _lead(self, what: tuple[str, ...], path: Any,
              act: Callable[[Any], Any]) -> Any:
        """Acts on rank 0, and tells the others what has come of it."""
        found = error = None
        try:
            # Before anything is written to it.
            found = _content(path) if {'r', '+'} <= {*what[1]} else None
            made = act(path)
            if what[0] in _ASKS:
                found = made
            return made
        except Exception as caught:
            error = caught
            raise
        finally:
            self._tell((what, os.fspath(path), found, error))

    def _follow(self, what: tuple[str, ...], path: Any,
                act: Callable[[Any], Any], is_open: bool) -> Any:
        """Does on another rank as rank 0 has told."""
        found = None
        if is_open and (told := self._told(what, os.fspath(path))):
            _, path, found, error = told
            if error is not None:
                raise error
            if what[0] in _ASKS:
                return found
        if what[0] in _CHANGES:
            return None
        if {*what[1]} & {*'wax+'}:
            if found is None and 'r' in what[1]:
                found = _content(path)
            path, lost = tempfile.mkstemp()
            os.unlink(lost)
            os.pwrite(path, found or b'', 0)
        return act(path)

    def _line(self) -> str:
        """The line of the script that calls a function; '' if none does."""
        if threading.current_thread() is threading.main_thread() and (
                os.getpid() == self._pid):
            for frame, line in traceback.walk_stack(sys._getframe(3)):
                file = frame.f_code.co_filename
                name = frame.f_globals.get('__name__', '')
                if name.startswith(_BETWEEN):
                    continue
                if name.partition('.')[0] in _NO_SCRIPTS:
                    break
                if not file.startswith(_INSTALLED):
                    return f'{file}:{line}'
        return ''


def _content(path: Any) -> bytes:
    return pathlib.Path(os.fsdecode(path)).read_bytes()


def _by_all(original: Callable, *args: Any, **kwargs: Any) -> None:
    """Prints on other ranks, too."""
    with contextlib.redirect_stderr(stderr()):
        original(*args, **kwargs)


# --- looks -------------------------------------------------------------------

def _refuse(why: str) -> NoReturn:
    raise PlaceholderError(f'{user_line()}: {why}')


def _after(has_to: Callable, act: Callable, original: Callable, self: Any,
           *args: Any, **kwargs: Any) -> Any:
    if has_to(self):
        act()
    return original(self, *args, **kwargs)


class Looks(Files):
    """Says when code may look at the model, and when ``comm`` communicates."""

    def __init__(self, comm: MPI.Comm) -> None:
        super().__init__(comm)
        self._meeting = Meeting(self._comm)
        self._partition: Any = None     # until there is one
        #: Whether the training has failed, and looks are errors.
        self.have_failed = False

    def begin(self, model: Any) -> None:
        """From now on the script's code may look at a model that is cut."""
        held, main = model.partition, threading.get_ident()
        elsewhere = {*map(id, held.names.parameters.values())} - {
            *map(id, held.placement.own.values())}

        def is_elsewhere(parameter: Any) -> bool:
            return fetching.now is not None and id(parameter) in elsewhere
        LOOKS.hold(held)
        for owner, name, has_to, act in (
                (chainer.Parameter, '_get_grad', is_elsewhere, lambda: _refuse(
                    'the gradient is on another rank; look at it in a hook of '
                    'the optimizer that is called for each parameter '
                    '(call_for_each_param = True)')),
                # Or this rank would have it from now on.
                (chainer.Parameter, '_set_array', is_elsewhere, self.look),
                (type(model), 'namedparams',
                 lambda _: threading.get_ident() != main, lambda: _refuse(
                    'a thread of the script sees a part of the model only; '
                    'look at it in the main thread'))):
            Patch(owner, name, functools.partial(_after, has_to, act)
                  ).hold(held)
        self._partition = held
        self._set(self.is_open)

    @contextlib.contextmanager
    def block(self, what: str, is_open: bool = False) -> Iterator[None]:
        """A block of code that may look, if it is open, or communicates.

        Enter and leave it on all ranks; ``what`` says what it does.
        """
        before = self.is_open
        if before:
            self._meet(what)
        self._set(is_open)
        try:
            yield
            if is_open:
                self._meet(f'the end of {what}')
        finally:        # after an error the others may be somewhere else
            self._set(before)

    def look(self) -> None:
        """Has the whole model here until the block ends."""
        if self._partition.is_whole:
            return
        if self.have_failed:
            _refuse('after an error each rank has a part of the model only')
        self._meet(None)

    def _set(self, is_open: bool) -> None:
        """Gives back what was fetched."""
        # After an error each rank has files of its own.
        self.is_open = is_open and not self.have_failed
        if self._partition is not None:
            self._partition.placement.give_back()
            fetching.now = self.look if is_open else None

    def _meet(self, what: str | None) -> None:
        """Meets the others until nobody looks; who does so meets them once.

        ``what`` is done next, or None: this rank looks.
        """
        while not self.have_failed:
            if self._comm.rank == 0:
                self._tell(None)
            else:
                # What none has asked for is void, but where this rank only
                # looks, and will ask when it goes on.
                told = next(number for number in itertools.count()
                            if self._next(number) is None)
                del self._heard[told * (what is None):told + 1]
            said = self._meeting.say(what)
            if None in said:
                self._partition.placement.fetch()
                if what is None:
                    return
            elif len({*said}) == 1:
                break
            else:
                self.have_failed = True     # in what ends the script, too
                raise Refusal(
                    'the script does not do the same on all ranks: '
                    + ', '.join(f'{one} on rank {rank}' for rank, one in
                                enumerate(said) if one not in said[:rank])
                    + '; let no clock or random number without a seed '
                    'decide that')


class Looking:
    """A script's own extension or trigger, which may look at the model."""

    def __init__(self, own: Any, looks: Looks) -> None:
        self._own = self.__wrapped__ = own
        self._looks = looks

    def __call__(self, *args: Any) -> Any:
        return self._call(self._own, *args)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        return (functools.partial(self._call, value)
                if value and name in ('initialize', 'finalize') else value)

    def on_error(self, *args: Any) -> None:
        """Has looks refused, and calls the extension's."""
        self._looks.have_failed = True
        if getattr(self._own, 'on_error', None):
            self._call(self._own.on_error, *args)

    def _call(self, method: Callable, *args: Any) -> Any:
        with self._looks.block(getattr(
                self._own, '__name__', type(self._own).__name__), True):
            return method(*args)
