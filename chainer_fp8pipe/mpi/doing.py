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
#: A thread is idle where it moves messages of this package.
_MOVERS = tuple(os.path.join(_OURS, name, '') for name in (
    'channel', 'exchange', 'allreduce'))
#: Or where its last frame is in one of these.
_IDLE = tuple(_LIBRARY + name for name in (
    'threading.py', 'queue.py', 'selectors.py', 'socketserver.py',
    f'concurrent{os.sep}futures', 'multiprocessing', 'asyncio'))
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
    main = threading.main_thread().ident or 0
    frames = stacks.pop(main, [])
    call, ranks = _call(main, frames)
    words = f'{call}; {_where(frames)}' if call else _where(frames)
    for thread, stack in stacks.items() if call else ():
        if not _is_idle(thread, stack):
            name = next((one.name for one in threading.enumerate()
                         if one.ident == thread), thread)
            return Doing(WORKS, f'its thread {name} may act, {_where(stack)}; '
                         f'its main thread waits {words}')
    # In a loop, one wait may follow another in the same place; frames of this
    # package differ from look to look.
    return Doing(WAITS if call else WORKS, words, ranks, hash((call, *(
        (frame.f_lasti, *map(id, frame.f_locals.values()))
        for frame in _outside(frames) if not _file(frame).startswith(_OURS)))))


def _is_idle(thread: int, frames: Sequence[FrameType]) -> bool:
    return (bool(_call(thread, frames)[0])
            or _file(frames[-1]).startswith(_IDLE)
            or any(_file(frame).startswith(_MOVERS) for frame in frames))


def _call(thread: int, frames: Sequence[FrameType]
          ) -> tuple[str, tuple[int, ...]]:
    """In what a thread waits for other ranks, '' if it does not; and which."""
    if waits := waiting.current_waits(thread):
        return f'for {waits[0].text}' if waits[0].text else (
            f'in {_outside(frames)[-1].f_code.co_name}'), waits[0].ranks
    return _mpi_method(frames[-1]) if frames else '', ()


def _outside(frames: Sequence[FrameType]) -> list[FrameType]:
    """Without those in a wait."""
    return [*itertools.takewhile(
        lambda frame: _file(frame) != waiting.__file__, frames)]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


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
    return f'in MPI: {found[2]}' * type(value).__module__.startswith('mpi4py')


def _where(frames: Sequence[FrameType]) -> str:
    """In the script; users know their own code best."""
    users = [frame for frame in frames if not (
        _file(frame).startswith((_OURS, _LIBRARY, '<frozen'))
        or f'{os.sep}site-packages{os.sep}' in _file(frame))]
    if not (last := [*frames, *users][-1:]):
        return 'at the end of its main thread'
    return (f'at {os.path.basename(_file(last[0]))}:{last[0].f_lineno} in '
            f'{last[0].f_code.co_name}')
