"""The directive ``commands``: what ``--help`` says of every command."""
import argparse
import contextlib
import io
import re
from unittest import mock

from chainer_fp8pipe.__main__ import _COMMANDS, main

from sphinx.util.docutils import SphinxDirective

#: Commands of more than one word.
_LONGER = {'bench': ['bench', 'allreduce']}


class _Asked(Exception):
    """Holds the parser that was asked for its help."""


def _parser(words):
    def ask(self, file=None):
        raise _Asked(self)
    with mock.patch.object(argparse.ArgumentParser, 'print_help', ask), (
            contextlib.redirect_stdout(io.StringIO())):
        try:
            main([*words, '--help'])
        except _Asked as asked:
            return asked.args[0]
    raise RuntimeError(f'{words} has no help')


def _options(parser):
    """An option and what it does, for each one but ``--help``."""
    helper = parser._get_formatter()
    for action in parser._actions:
        if action.option_strings and action.dest != 'help':
            value = '' if action.nargs == 0 else ' ' + str(
                action.metavar or '|'.join(map(str, action.choices or ()))
                or action.dest.upper())
            yield (', '.join(action.option_strings) + value,
                   helper._expand_help(action))


def _text():
    """The page, as reStructuredText."""
    for command, (_, purpose, _) in _COMMANDS.items():
        words = _LONGER.get(command, [command])
        name = ' '.join(words)
        yield from (name, '-' * len(name), '',
                    purpose[0].upper() + purpose[1:] + '.', '')
        for option, effect in _options(_parser(words)):
            yield from (f'``{option}``', '   ' + re.sub(
                r'([\\*|`_<>])', r'\\\1', ' '.join(effect.split())), '')


class _Commands(SphinxDirective):
    def run(self):
        return self.parse_text_to_nodes('\n'.join(_text()),
                                        allow_section_headings=True)


def setup(app):
    app.add_directive('commands', _Commands)
    return {'parallel_read_safe': True}
