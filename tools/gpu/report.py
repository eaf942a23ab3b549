"""The report of a run, as reStructuredText that can go into the docs."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .steps import Outcome

#: Of a step's output: the first lines and the last ones.
HEAD, TAIL = 25, 95
_WIDEST = 400
_ESCAPE = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')
_CONTROL = re.compile(r'[\x00-\x08\x0b-\x1f\x7f]')


def clean(text: str, hidden: str = '') -> list[str]:
    """The lines as a terminal would show them in the end.

    Args:
        text: With escape sequences, and lines that were written over.
        hidden: A folder whose name is left out wherever it stands.
    """
    if hidden:
        text = text.replace(hidden.rstrip('/') + '/', '')
    lines = []
    for line in text.replace('\r\n', '\n').split('\n'):
        line = _ESCAPE.sub('', line.rstrip('\r').rpartition('\r')[2])
        lines.append(_CONTROL.sub('', line.expandtabs())[:_WIDEST].rstrip())
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    left_out = len(lines) - HEAD - TAIL
    if left_out > 1:
        lines[HEAD:-TAIL] = [f'[{left_out} lines left out]']
    return lines


def literal(lines: Sequence[str]) -> list[str]:
    """A literal block; nothing if there are no lines."""
    if not lines:
        return []
    return ['::', '', *(f'   {line}'.rstrip() for line in lines), '']


def heading(text: str, mark: str) -> list[str]:
    """A title and its line."""
    return [text, mark * len(text), '']


def escaped(text: str) -> str:
    """Plain text, in one line, whatever characters are in it."""
    return re.sub(r'([\\*`_|<>])', r'\\\1', ' '.join(text.split())) or '-'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A list table."""
    lines = ['.. list-table::', '   :header-rows: 1', '']
    for row in [columns, *rows]:
        lines += [f'   {"* -" if number == 0 else "  -"} {escaped(cell)}'
                  for number, cell in enumerate(row)]
    return [*lines, '']


def section(outcome: Outcome, hidden: str = '') -> list[str]:
    """What one step did, and all that it said where it failed."""
    lines = heading(outcome.step.name, '-')
    lines += [outcome.step.about, '']
    output = clean(outcome.output, hidden)
    if outcome.state == 'done':
        output = clean(outcome.step.shown('\n'.join(output)))
    else:
        lines += [f'**{outcome.state.capitalize()}**: '
                  f'{escaped(outcome.why)}.', '']
    lines += literal(output)
    if outcome.state in ('failed', 'out of time'):
        errors = clean(outcome.errors, hidden)
        if errors:
            lines += ['What it wrote to standard error:', '',
                      *literal(errors)]
    return lines


def report(about: Mapping[str, str], outcomes: Sequence[Outcome],
           planned: int, hidden: str = '') -> str:
    """The whole report.

    Args:
        about: Machine, date and versions.
        outcomes: Of the steps that have run.
        planned: How many steps there are.
        hidden: A folder whose name is left out.
    """
    done = sum(outcome.state == 'done' for outcome in outcomes)
    lines = heading('On a GPU', '=')
    lines += [f'What ``make gpu`` found; {done} of {planned} steps are done.',
              '', *(f':{name}: {escaped(value)}'
                    for name, value in about.items()), '',
              *table(['step', 'state', 'seconds', 'why'], [
                  (outcome.step.name, outcome.state,
                   f'{outcome.seconds:.1f}', outcome.why)
                  for outcome in outcomes])]
    for outcome in outcomes:
        lines += section(outcome, hidden)
    return '\n'.join(lines).rstrip() + '\n'
