"""What this rank does, in words for other ranks: it waits, or may act."""
# A rank waits if none of its threads can go on before another rank does
# something: the main thread is in a wait of this package or in a method of one
# of mpi4py's objects, and every other thread too, or has nothing to do.  Of a
# call into compiled code there is no frame, only the place in the line that
# makes it.  Whatever is not known to wait may act: it computes, reads or
# sleeps, and the job may go on by itself.
from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from . import waiting

#: States, in words that follow a rank's name.
WAITS, WORKS = 'waits for other ranks', 'does not wait for any rank'

_MOST_FRAMES, _SHOWN = 60, 16
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.abspath(f'{__file__}/../..') + os.sep
#: Threads of this package that move messages, and wait as the main one does.
_MOVERS = tuple(os.path.join(_OURS, name, '') for name in (
    'channel', 'exchange', 'allreduce'))
#: The main thread waits for a mover, or in compiled code.
_WAITS = ('taken', 'finish_all')
#: Where a thread has nothing to do.
_IDLE = tuple(_LIBRARY + name for name in (
    'threading.py', 'queue.py', 'selectors.py', 'socketserver.py',
    f'concurrent{os.sep}futures', 'multiprocessing', 'asyncio'))
#: A call, as far as it tells of which object the method is.
_CALL = re.compile(r'\s*(?:(?:[\w, ]+=|return)\s)?\s*([\w.]+)\.(\w+)\s*\(')


class Doing(NamedTuple):
    """Whether a rank waits for others, where, and for which.

    Attributes:
        state: ``WAITS`` or ``WORKS``.
        words: Details, and where.
        stack: As in a traceback.
        call: What it waits in; equal on ranks that are in the same call.
        waits_for: Ranks that it waits for, as far as it knows.
        moves: Differs from look to look if a rank that waits moves on.
    """

    state: str
    words: str
    stack: str = ''
    call: str = ''
    waits_for: tuple[int, ...] = ()
    moves: int = 0


def doing() -> Doing:
    """What this rank does, but for the thread that asks."""
    own, main = threading.get_ident(), threading.main_thread().ident
    stacks = {thread: _frames(frame)
              for thread, frame in sys._current_frames().items()}
    found = _of_main_thread(stacks.pop(main or 0, []))
    for thread, frames in stacks.items():
        if found.state == WAITS and thread != own and not _is_idle(frames):
            name = next((one.name for one in threading.enumerate()
                         if one.ident == thread), str(thread))
            return Doing(WORKS, f'its thread {name} may act, {_where(frames)};'
                         f' its main thread waits {found.words}',
                         _stack(frames))
    return found


def _of_main_thread(frames: Sequence[FrameType]) -> Doing:
    # Frames inside of a wait of this package differ from look to look.
    depth = next((number for number, frame in enumerate(frames)
                  if _is_wait(frame)), len(frames))
    kept = frames[:depth] or frames
    where, stack, call = _where(kept), _stack(kept), ''
    # In a loop, one wait may follow another in the same place.
    moves = hash(tuple(part for frame in kept for part in (
        frame.f_lasti, *map(id, _variables(frame)))))
    if waits := waiting.current_waits():
        text, ranks = waits[0]
        return Doing(WAITS, f'for {text}; {where}', stack, '', ranks,
                     hash((text, moves)))
    if depth < len(frames):
        code = kept[-1].f_code
        call = f'{os.path.basename(code.co_filename)}:{code.co_name}'
    elif frames and (name := _mpi_method(frames[-1])):
        call = f'MPI: {name}'
    return (Doing(WAITS, f'in {call}; {where}', stack, call, (), moves)
            if call else Doing(WORKS, where, stack))


def _is_wait(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file == waiting.__file__ or (
        frame.f_code.co_name in _WAITS and file.startswith(_OURS))


def _is_idle(frames: Sequence[FrameType]) -> bool:
    """Whether a thread beside the main one cannot act by itself."""
    return (not frames or frames[-1].f_code.co_filename.startswith(_IDLE)
            or any(_is_wait(frame)
                   or frame.f_code.co_filename.startswith(_MOVERS)
                   for frame in frames) or bool(_mpi_method(frames[-1])))


def _mpi_method(frame: FrameType) -> str:
    """The method of an object of mpi4py's that a frame is in; '' if none."""
    found = _CALL.match(_call_of(frame))
    if not found:
        return ''
    first, *rest = found[1].split('.')
    value = frame.f_globals.get(first) if frame.f_trace else (
        frame.f_locals.get(first, frame.f_globals.get(first)))
    for name in rest:           # no property of the user's is called
        value = inspect.getattr_static(value, name, None)
    return found[2] * type(value).__module__.startswith('mpi4py')


def _call_of(frame: FrameType) -> str:
    """The source of the call that a frame makes, from Python 3.11 on.

    Before it is that of the line, which may make several.
    """
    code, number = frame.f_code, frame.f_lineno or 0
    line = linecache.getline(code.co_filename, number)
    if not hasattr(code, 'co_positions'):
        return line
    first, _, column, _ = next(
        (one for place, one in enumerate(code.co_positions())
         if place == frame.f_lasti // 2), (None,) * 4)
    if first is None or column is None:     # python -X no_debug_ranges
        return line
    line = linecache.getline(code.co_filename, first)
    return line.encode()[column:].decode(errors='replace')


def _frames(frame: FrameType | None) -> list[FrameType]:
    """From the outermost on; the last ones."""
    found: list[FrameType] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _variables(frame: FrameType) -> tuple[Any, ...]:
    # To look at those of a frame in a debugger would undo what that sets.
    return () if frame.f_trace else (*frame.f_locals.values(),)


def _where(frames: Sequence[FrameType]) -> str:
    """In the script; users know their own code best."""
    if not frames:
        return 'at the end of its main thread'
    users = [frame for frame in frames if not (
        (file := frame.f_code.co_filename).startswith(
            (_OURS, _LIBRARY, '<frozen'))
        or f'{os.sep}site-packages{os.sep}' in file)]
    last = (users or frames)[-1]
    return (f'at {os.path.basename(last.f_code.co_filename)}:{last.f_lineno} '
            f'in {last.f_code.co_name}')


def _stack(frames: Sequence[FrameType]) -> str:
    return ''.join(
        f'    {frame.f_code.co_filename}:{frame.f_lineno} in '
        f'{frame.f_code.co_name}\n' for frame in frames[-_SHOWN:])
