"""The printed form of an exception: the user's own code, not what leads there.
"""
from __future__ import annotations

import itertools
import os
import sys
import traceback
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))) + os.sep
#: What the user has not written.
_LIBRARIES = 'chainer_fp8pipe', 'chainer', 'chainermn', 'numpy', 'mpi4py', 'os'
#: What only hands on.
_PASSING = (os.path.join(_PACKAGE, 'intercept', ''),
            os.path.join(_PACKAGE, 'mpi', 'agreement.py'))


def shown(error: BaseException) -> str:
    """The printed form of an exception: a traceback of the user's own code.

    Without what has led to the script, or stands between it and Chainer; and
    without any frames if they have been printed, or are another rank's,
    which the exception's ``is_shown`` says.
    """
    said = traceback.TracebackException.from_exception(error)
    if getattr(error, 'is_shown', False):
        return ''.join(said.format_exception_only())
    if (said.__cause__ is not None and str(error.__cause__) in str(error)
            and of_the_user(error) is None):
        said.__cause__ = None       # all ranks raise what a check has said
    one: traceback.TracebackException | None = said
    while one is not None:
        one.stack = traceback.StackSummary.from_list(_of_the_user(one.stack))
        one = one.__cause__ or (
            None if one.__suppress_context__ else one.__context__)
    return ''.join(said.format())


def of_the_user(error: BaseException) -> BaseException | None:
    """The exception of the user's own code that has led to another one.

    None if a check of the package has raised it.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    files = _files(error)
    libraries = tuple(
        os.path.dirname(file) + os.sep for name in _LIBRARIES
        if (file := getattr(sys.modules.get(name), '__file__', None)))
    return error if files and not _is_ours(files[-1]) and any(
        not file.startswith((*libraries, '<frozen', 'src/mpi4py'))
        for file in files) else None


def _files(error: BaseException) -> list[str]:
    return [frame.f_code.co_filename
            for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _of_the_user(frames: list[traceback.FrameSummary]
                 ) -> list[traceback.FrameSummary]:
    rest = list(itertools.dropwhile(
        lambda frame: (_is_ours(frame.filename)
                       or 'runpy' in frame.filename), frames))
    # Without any of the user's, the fault is in what led there.
    hidden: Any = _PACKAGE
    if not rest or _is_ours(rest[-1].filename):
        hidden = _PASSING
    return [frame for frame in rest or frames
            if not frame.filename.startswith(hidden)]
