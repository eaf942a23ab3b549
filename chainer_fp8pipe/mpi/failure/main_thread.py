"""Where the main thread is, as other threads see it."""
from __future__ import annotations

import dis
import os
import pathlib
import sys
import threading
import traceback
from types import CodeType, FrameType
from typing import NamedTuple

# Where this package waits, polling: what is further in changes all the time.
_WAITS = {('mpi.waiting', 'wait_until'), ('mpi.waiting', 'pause'),
          ('allreduce.bucket', 'finish'), ('allreduce.executor', 'run'),
          ('allreduce.serving', 'serve'), ('allreduce.serving', 'run'),
          ('overlap.exchange_thread', 'taken')}
_NAMES = {function for _, function in _WAITS}
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
_OURS = str(pathlib.Path(__file__).parents[2])


class ThreadPosition(NamedTuple):
    """Where the main thread is.

    Attributes:
        place: File, line and function of the user's that the thread is in,
            or of any if there is none.
        call: What it waits in: ``'MPI: Allreduce'``, a function of this
            package, or '' if it does not seem to wait.
    """

    place: str
    call: str


def signature() -> tuple:
    """Equal at two looks if the thread has not moved in between.

    Or if it is in the same wait of this package's.
    """
    return tuple((id(frame.f_code), frame.f_lasti)
                 for frame in _before_wait(_frames()))


def position() -> ThreadPosition | None:
    """Where the main thread is now; None if it has ended."""
    frames = _frames()
    if not frames:
        return None
    kept = _before_wait(frames)
    call = ''
    if len(kept) < len(frames):
        call = '.'.join(_name((kept or frames)[-1]))
    else:
        code = frames[-1].f_code
        if method := mpi_method(code.co_filename, _methods(
                code, frames[-1].f_lineno or 0)):
            call = f'MPI: {method}'
    return ThreadPosition(_place(kept or frames), call)


def stack() -> str:
    """The main thread's stack, as in a traceback."""
    frames = _frames()
    if not frames:
        return '  the main thread has ended\n'
    return ''.join(traceback.format_stack(frames[-1]))


def _frames() -> list[FrameType]:
    """The main thread's, from the outermost on."""
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity or 0)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _before_wait(frames: list[FrameType]) -> list[FrameType]:
    """Without what is inside a wait of this package's."""
    for number, frame in enumerate(frames):
        if frame.f_code.co_name in _NAMES and _name(frame) in _WAITS:
            return frames[:number]
    return frames


def _name(frame: FrameType) -> tuple[str, str]:
    module = str(frame.f_globals.get('__name__', '')).removeprefix(
        'chainer_fp8pipe.')
    return module, frame.f_code.co_name


def _place(frames: list[FrameType]) -> str:
    """In words; the innermost of the user's, as users know that best."""
    users = [frame for frame in frames if not _is_library(frame.f_code)]
    frame = (users or frames)[-1]
    code = frame.f_code
    return (f'{os.path.basename(code.co_filename)}:{frame.f_lineno} in '
            f'{code.co_name}')


def _is_library(code: CodeType) -> bool:
    return (code.co_filename.startswith((_OURS, '<frozen', sys.prefix))
            or f'{os.sep}site-packages{os.sep}' in code.co_filename
            or os.path.dirname(code.co_filename).startswith(
                os.path.dirname(os.__file__)))


def mpi_method(file: str, methods: list[str]) -> str:
    """Which of a line's methods waits for other ranks; '' if none does.

    Compiled functions have no frame, so that of mpi4py's only the names in
    the present line are known.

    Args:
        file: In which the line is.
        methods: Names of methods, or of other attributes.
    """
    knows_mpi = f'{os.sep}chainermn{os.sep}' in file or file.startswith(_OURS)
    names = _CALLS | _COMMON if knows_mpi else _CALLS
    return next((name for name in methods if name in names), '')


def _methods(code: CodeType, line: int) -> list[str]:
    """Names of attributes that a line of a function loads."""
    starts = [*dis.findlinestarts(code), (len(code.co_code), 0)]
    ranges = [(start, starts[number + 1][0])
              for number, (start, found) in enumerate(starts[:-1])
              if found == line]
    return [str(instruction.argval) for instruction
            in dis.get_instructions(code)
            if instruction.opname in ('LOAD_ATTR', 'LOAD_METHOD')
            and any(start <= instruction.offset < stop
                    for start, stop in ranges)]
