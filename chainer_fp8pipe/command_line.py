"""How the package's commands read their arguments, and refuse wrong ones.

Nothing of MPI or Chainer is imported: the launcher is no rank.
"""
from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn


class Parser(argparse.ArgumentParser):
    """Takes options that are written out; refuses in a line, names the help.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{
            'allow_abbrev': False, **kwargs,
            'formatter_class': argparse.RawDescriptionHelpFormatter})

    def error(self, message: str) -> NoReturn:
        """Ends with the exit code 2, and says what is wrong."""
        self.exit(2, f'{self.prog}: error: {message}\n'
                     f'(all about it: {self.prog} --help)\n')


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
    if match and (amount := float(match[1])) > 0:
        unit = match[2].rstrip('s') or 's'
        if unit in 'smh':
            return Interval(amount * 60 ** 'smh'.index(unit), 'second')
        if unit == 'epoch' or amount.is_integer():
            return Interval(amount, unit)
    raise argparse.ArgumentTypeError(
        f'{text!r} is no interval; write it as in 30s, 5m, 1h, '
        "'100 iterations' or '1 epoch'")


def check_script(path: str) -> None:
    """Raises ValueError, whose message is a line, if a file cannot be read."""
    try:
        open(path, 'rb').close()
    except OSError as error:
        raise ValueError(f'{path} cannot be read as a script: {reason(error)}'
                         ) from None
