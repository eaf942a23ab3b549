"""How the package's commands read their arguments, and refuse wrong ones."""
from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Refuses arguments in a line, with the way to the help.

    Options are written out; one that is unknown is refused before anything
    else, with the one that may have been meant.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{
            'allow_abbrev': False, **kwargs,
            'formatter_class': argparse.RawDescriptionHelpFormatter})

    def error(self, message: str, hint: str = '') -> NoReturn:
        """Ends with the exit code 2.

        Args:
            message: What is wrong.
            hint: What would be right, if the help is not meant.
        """
        start = 'the following arguments are required: '
        if message.startswith(start):
            names = message.removeprefix(start).split(', ')
            message = f'{names[0]} is missing'
        self.exit(2, f'{self.prog}: error: {message}\n'
                     f'({hint or "all about it"}: {self.prog} --help)\n')

    def parse_known_args(self, args: Any = None, namespace: Any = None
                         ) -> Any:
        """Parses; leaves nothing unknown."""
        if args is not None:
            args = self._checked(list(args))
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f'{rest[0]!r} is one argument too many')
        return found, rest

    def _checked(self, words: list[str]) -> list[str]:
        """The words, with values such as -3MB as their options' values."""
        checked: list[str] = []
        known = self._option_string_actions
        positional = [action for action in self._actions
                      if not action.option_strings]
        while words:
            word = words.pop(0)
            name, equals, _ = word.partition('=')
            if word == '--' or not word.startswith('-'):
                if any(action.nargs in (argparse.REMAINDER, argparse.PARSER)
                       for action in positional):
                    # What follows is a script's or a command's.
                    return [*checked, word, *words]
            elif name in known:
                if known[name].nargs is None and not equals and words and (
                        words[0].partition('=')[0] not in known):
                    word = f'{word}={words.pop(0)}'
            elif len(word) > 1 and not (
                    word[1] != '-' and word[:2] in known):
                self.error(f'there is no option {name}'
                           + did_you_mean(name, known))
            checked.append(word)
        return checked


def did_you_mean(word: str, known: Iterable[str], alike: float = 0.6) -> str:
    """``'; did you mean --snapshots?'``, or nothing."""
    found = difflib.get_close_matches(word, list(known), 1, alike)
    return f'; did you mean {found[0]}?' if found else ''



def count(text: str) -> int:
    """For ``type=``: a number of things, of which there is one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not 1 or more')
    return int(text)
