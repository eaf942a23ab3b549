"""Reads stacks: where a rank is, and whether it waits for other ranks."""
# A rank's thread reads the main thread's stack; where a library holds the
# interpreter, the handler of a signal writes it (``faulthandler``).  Both come
# to the same frames, from the outermost on.  The watchdog reads them, so this
# module imports the standard library only.
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

# Where this package waits, polling: what is further in changes all the time.
_WAITS = {('mpi/waiting.py', 'wait_until'), ('mpi/waiting.py', 'pause'),
          ('allreduce/engine.py', 'finish'), ('allreduce/engine.py', 'work'),
          ('exchange/reducer.py', 'taken')}
# Calls of MPI that wait for other ranks, by their methods in mpi4py.
_CALLS = frozenset((
    'Allgather', 'Allgatherv', 'Allreduce', 'Alltoall', 'Alltoallv',
    'Alltoallw', 'Barrier', 'Bcast', 'Dup', 'Exscan', 'Finalize', 'Gatherv',
    'Mprobe', 'Recv', 'Reduce_scatter', 'Reduce_scatter_block', 'Scatterv',
    'Send', 'Sendrecv', 'Split_type', 'Ssend', 'Waitall', 'Waitany',
    'Waitsome', 'allgather', 'allreduce', 'alltoall', 'barrier', 'bcast',
    'exscan', 'mprobe', 'sendrecv', 'ssend', 'waitall', 'waitany'))
# Others have methods of these names, too.
_COMMON = frozenset((
    'Free', 'Gather', 'Probe', 'Reduce', 'Scan', 'Scatter', 'Split', 'Wait',
    'gather', 'probe', 'recv', 'reduce', 'scan', 'scatter', 'send', 'wait'))
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__)))) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Frame(NamedTuple):
    """One of a stack's frames.

    Attributes:
        file: In which the function is.
        line: That it has come to.
        function: Its name.
        method: That the frame has called, if that is known; a compiled
            function has no frame of its own.
    """

    file: str
    line: int
    function: str
    method: str = ''


def frames_of_dump(text: str) -> list[Frame]:
    """The last stack that :mod:`faulthandler` has written; [] for none."""
    found = re.findall(r'File "(.*)", line (\d+) in (.*)',
                       text.rpartition('most recent call first')[2])
    return [Frame(file, int(line), function)
            for file, line, function in reversed(found)]


def before_wait(frames: Sequence[Frame]) -> list[Frame]:
    """Without what is inside a wait of this package's."""
    for number, frame in enumerate(frames):
        if _is_wait(frame):
            return [*frames[:number]]
    return [*frames]


def call(frames: Sequence[Frame]) -> str:
    """What the rank waits in; '' if it does not seem to wait.

    ``'MPI: Allreduce'``, or a function of this package's that called a wait.
    """
    kept = before_wait(frames)
    if len(kept) < len(frames):
        return f'{os.path.basename((kept or frames)[-1].file)}:' + (
            (kept or frames)[-1].function)
    import linecache

    last = frames[-1] if frames else Frame('', 0, '')
    knows_mpi = (f'{os.sep}chainermn{os.sep}' in last.file
                 or last.file.startswith(_OURS))
    names = _CALLS | _COMMON if knows_mpi else _CALLS
    methods = [last.method] if last.method else re.findall(
        r'\.(\w+)\(', linecache.getline(last.file, last.line))
    return next((f'MPI: {name}' for name in methods if name in names), '')


def place(frames: Sequence[Frame]) -> str:
    """File, line and function; of the user's code, which users know best."""
    kept = before_wait(frames) or frames
    if not kept:
        return 'the end of its main thread'
    users = [frame for frame in kept if not _is_library(frame.file)]
    frame = (users or kept)[-1]
    return (f'{os.path.basename(frame.file)}:{frame.line} in '
            f'{frame.function}')


def as_text(frames: Sequence[Frame]) -> str:
    """As in a traceback."""
    import traceback  # takes time that a watchdog does not have at its start

    return ''.join(traceback.format_list([
        traceback.FrameSummary(frame.file, frame.line, frame.function)
        for frame in frames]))


def _is_wait(frame: Frame) -> bool:
    return (frame.file.startswith(_OURS) and
            (frame.file[len(_OURS):].replace(os.sep, '/'), frame.function)
            in _WAITS)


def _is_library(file: str) -> bool:
    return (file.startswith((_OURS, _LIBRARY, '<frozen'))
            or f'{os.sep}site-packages{os.sep}' in file)
