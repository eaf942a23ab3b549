"""The printed form of an exception."""
from __future__ import annotations

import itertools
import os
import sys
import traceback

_PACKAGE = os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))) + os.sep
#: What the user has not written.
_LIBRARIES = 'chainer_fp8pipe', 'chainer', 'chainermn', 'numpy', 'mpi4py', 'os'
#: What only hands on.
_PASSING = (os.path.join(_PACKAGE, 'intercept', ''),
            os.path.join(_PACKAGE, 'mpi', 'agreement.py'))


def shown(error: BaseException) -> str:
    """A traceback of the user's own code, without what has led there.

    And without any frames if they have been printed, or are another rank's,
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
        rest = list(itertools.dropwhile(
            lambda frame: frame.filename.startswith(_PACKAGE)
            or 'runpy' in frame.filename, one.stack)) or list(one.stack)
        # Where the package itself has raised, it is shown.
        hidden = _PASSING if rest and rest[-1].filename.startswith(
            _PACKAGE) else (_PACKAGE,)
        one.stack = traceback.StackSummary.from_list(
            [frame for frame in rest if not frame.filename.startswith(hidden)])
        one = one.__cause__ or (
            None if one.__suppress_context__ else one.__context__)
    return ''.join(said.format())


def of_the_user(error: BaseException) -> BaseException | None:
    """The exception of the user's own code that has led to another one.

    None if a check of the package has raised it.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    files = [frame.f_code.co_filename
             for frame, _ in traceback.walk_tb(error.__traceback__)]
    libraries = tuple(
        os.path.dirname(file) + os.sep for name in _LIBRARIES
        if (file := getattr(sys.modules.get(name), '__file__', None)))
    return error if files and not files[-1].startswith(_PACKAGE) and any(
        not file.startswith((*libraries, '<frozen', 'src/mpi4py'))
        for file in files) else None
