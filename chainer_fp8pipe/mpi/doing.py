"""What this rank does, in words for other ranks: it waits, or may act."""
# A rank waits if none of its threads can go on before another rank does
# something: the main thread is in a wait of this package or in a method of one
# of mpi4py's objects, and every other thread too, or has nothing to do.  What
# is not known to wait may act: it computes, reads or sleeps.
from __future__ import annotations

import inspect
import itertools
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from . import waiting

#: States, in words that follow a rank's name.
WAITS, WORKS = 'waits for other ranks', 'does not wait for any rank'

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.abspath(f'{__file__}/../..') + os.sep
#: Threads of this package that move messages run code of these folders.
_MOVERS = tuple(os.path.join(_OURS, name, '') for name in (
    'channel', 'exchange', 'allreduce'))
#: A thread beside the main one is idle where its last frame is in these.
_IDLE = (*_MOVERS, *(_LIBRARY + name for name in (
    'threading.py', 'queue.py', 'selectors.py', 'socketserver.py',
    f'concurrent{os.sep}futures', 'multiprocessing', 'asyncio')))
#: The main thread waits for such a mover, or in compiled code.
_WAITS = ('taken', 'finish_all')
#: A call, as far as it tells of which object the method is.
_CALL = re.compile(r'\s*(?:(?:[\w, ]+=|return)\s)?\s*([\w.]+)\.(\w+)\s*\(')


class Doing(NamedTuple):
    """Whether a rank waits for others, where, and for which."""

    state: str      # WAITS or WORKS
    words: str = ''     # and where; equal on ranks that are in the same call
    waits_for: tuple[int, ...] = ()     # as far as it knows
    moves: int = 0  # differs from look to look if a rank that waits moves on


def doing() -> Doing:
    """What this rank does, but for the thread that asks."""
    stacks = {thread: [one for one, _ in traceback.walk_stack(frame)][::-1]
              for thread, frame in sys._current_frames().items()}
    stacks.pop(threading.get_ident())
    found = _of_main_thread(stacks.pop(threading.main_thread().ident or 0, []))
    names = {one.ident: one.name for one in threading.enumerate()}
    for thread, frames in stacks.items():
        if found.state == WAITS and not _is_idle(frames):
            return Doing(WORKS, f'its thread {names.get(thread, thread)} may '
                         f'act, {_where(frames)}; its main thread waits '
                         f'{found.words}')
    return found


def _of_main_thread(frames: Sequence[FrameType]) -> Doing:
    # Frames inside of a wait of this package differ from look to look.
    kept = [*itertools.takewhile(lambda one: not _is_wait(one), frames)]
    call, ranks = '', tuple[int, ...]()
    if waits := waiting.current_waits():
        call, ranks = f'for {waits[0].text}', waits[0].ranks
    elif len(kept) < len(frames):
        call = f'in {kept[-1].f_code.co_name}'
    elif frames and (name := _mpi_method(frames[-1])):
        call = f'in MPI: {name}'
    if not call:
        return Doing(WORKS, _where(kept))
    # In a loop, one wait may follow another in the same place.
    return Doing(WAITS, f'{call}; {_where(kept)}', ranks, hash((call, *(
        (frame.f_lasti, *map(id, frame.f_locals.values()))
        for frame in kept))))


def _is_wait(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file == waiting.__file__ or (
        frame.f_code.co_name in _WAITS and file.startswith(_OURS))


def _is_idle(frames: Sequence[FrameType]) -> bool:
    return (frames[-1].f_code.co_filename.startswith(_IDLE)
            or any(_is_wait(frame)
                   or frame.f_code.co_filename.startswith(_MOVERS)
                   for frame in frames) or bool(_mpi_method(frames[-1])))


def _mpi_method(frame: FrameType) -> str:
    """The method of an object of mpi4py's that a frame is in; '' if none."""
    code, line, column = frame.f_code, frame.f_lineno, 0
    if hasattr(code, 'co_positions'):   # before 3.11 a line is all there is
        line, _, column, _ = [*code.co_positions()][frame.f_lasti // 2]
    found = _CALL.match(linecache.getline(
        code.co_filename, line or frame.f_lineno or 0).encode()[
            column or 0:].decode(errors='replace'))
    if not found:
        return ''
    first, *rest = found[1].split('.')
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in rest:           # no property of the user's is called
        value = inspect.getattr_static(value, name, None)
    return found[2] * type(value).__module__.startswith('mpi4py')


def _where(frames: Sequence[FrameType]) -> str:
    """In the script; users know their own code best."""
    users = [frame for frame in frames if not (
        (file := frame.f_code.co_filename).startswith(
            (_OURS, _LIBRARY, '<frozen'))
        or f'{os.sep}site-packages{os.sep}' in file)]
    if not (last := [*frames, *users][-1:]):
        return 'at the end of its main thread'
    code = last[0].f_code
    return (f'at {os.path.basename(code.co_filename)}:{last[0].f_lineno} in '
            f'{code.co_name}')
