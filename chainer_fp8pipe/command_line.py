"""How the package's commands read their arguments, and refuse wrong ones.

Nothing of MPI or Chainer is imported: the launcher is no rank.
"""
from __future__ import annotations

import argparse
import difflib
import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

_SECONDS = {'s': 1.0, 'm': 60.0, 'h': 3600.0}


class Parser(argparse.ArgumentParser):
    """Refuses arguments in a line, with the way to the help.

    Options are written out; one that is unknown is refused with the one that
    may have been meant.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{
            'allow_abbrev': False, **kwargs,
            'formatter_class': argparse.RawDescriptionHelpFormatter})

    def error(self, message: str) -> NoReturn:
        """Ends with the exit code 2, and says what is wrong."""
        if names := message.partition('arguments are required: ')[2]:
            message = f'{names.split(", ")[0]} is missing'
        self.exit(2, f'{self.prog}: error: {message}\n'
                     f'(all about it: {self.prog} --help)\n')

    def parse_known_args(self, args: Any = None, namespace: Any = None
                         ) -> Any:
        """Parses; leaves nothing unknown."""
        found, rest = super().parse_known_args(args, namespace)
        for word in rest:
            name = word.partition('=')[0]
            meant = difflib.get_close_matches(
                name, list(self._option_string_actions), 1)
            self.error(f'{word!r} is one argument too many'
                       if not word.startswith('-') else
                       f'there is no option {name}' + ''.join(
                           f'; did you mean {one}?' for one in meant))
        return found, rest


def reason(error: BaseException) -> str:
    """An error in words: of one of the system's neither number nor file."""
    return getattr(error, 'strerror', None) or str(error)


def as_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """For ``type=``: what a function makes of a text, or its ValueError."""
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return read


def count(text: str) -> int:
    """For ``type=``: a number of things, of which there is one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not 1 or more')
    return int(text)


def some_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """For ``type=``: some of the known names, with commas between them."""
    def names(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(',')))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f'{name!r} is none of {", ".join(known)}')
        return found
    return names


def unwritable(file: str | None) -> str:
    """Why a file cannot be written; '' if it can, or if it is None."""
    folder = os.path.dirname(os.path.abspath(file or ''))
    return ('' if file is None else
            f'there is no folder {folder}' if not os.path.isdir(folder) else
            f'{file} is a folder' if os.path.isdir(file) else
            '' if os.access(file if os.path.exists(file) else folder, os.W_OK)
            else f'{file} cannot be written')


class Interval(NamedTuple):
    """How often something happens in a training."""

    amount: float
    unit: str       # 'second', 'iteration' or 'epoch'


def parse_interval(text: str) -> Interval:
    """For ``type=``: ``'5m'``, ``'100 iterations'`` or ``'1 epoch'``.

    Times are in ``s``, ``m`` and ``h``; nothing is 0 or a part of an
    iteration.
    """
    match = re.fullmatch(
        r'\s*(\d+(?:\.\d+)?)\s*(s|m|h|(?:iteration|epoch)s?)\s*', text)
    if match and float(match[1]) > 0:
        amount, unit = float(match[1]), match[2].rstrip('s') or 's'
        if unit in _SECONDS:
            return Interval(amount * _SECONDS[unit], 'second')
        if unit == 'epoch' or amount.is_integer():
            return Interval(amount, unit)
    raise argparse.ArgumentTypeError(
        f'{text!r} is no interval; write it as in 30s, 5m, 1h, '
        "'100 iterations' or '1 epoch'")


def check_script(path: str | None) -> None:
    """Compiles a script, which every rank would fail in at its first line.

    Args:
        path: Of the file; None: no script was named.

    Raises:
        ValueError: There is no such file, it cannot be read, or it is no
            Python.  The message is a line.
    """
    if not path:
        raise ValueError('there is no script; name it after the options')
    try:
        with open(path, 'rb') as file, warnings.catch_warnings():
            warnings.simplefilter('ignore')     # Python warns when it runs it
            if path.endswith('.py'):            # it runs other things, too
                compile(file.read(), path, 'exec', dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(f'{path}, line {error.lineno}: SyntaxError: '
                         f'{error.msg}: {(error.text or "").strip()}'
                         ) from None
    except (ValueError, OSError) as error:      # bytes that are no text
        raise ValueError(f'{path} cannot be read as a script: {reason(error)}'
                         ) from None
