"""What a page is made of, before any HTML.

Text is plain here; the template escapes it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Colours of lines that the colour-blind tell apart, on white and on black
#: (Okabe and Ito 2008, without black and yellow).
LINE_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00',
                '#56b4e9', '#8c8c8c')

#: A table on the page has at most so many rows.
MOST_ROWS = 200


class Table(NamedTuple):
    """Rows of text.

    Attributes:
        header: Of the columns.
        rows: Each with a text per column.
        remark: What the rows leave out.
    """

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    remark: str = ''


class LegendEntry(NamedTuple):
    """A name and its colour.

    Attributes:
        label: The name.
        colour: As CSS has it.
        dash: Whether its line is dashed.
        line: Name of the line that a click hides; '' if none does.
    """

    label: str
    colour: str
    dash: bool = False
    line: str = ''


class Choice(NamedTuple):
    """A list to choose from, above a figure.

    Attributes:
        kind: What the page's script does with it.
        label: In front of it.
        options: Values and their texts.
    """

    kind: str
    label: str
    options: tuple[tuple[str, str], ...]


@dataclass
class Drawing:
    """A figure with what belongs to it.

    Attributes:
        name: Unique on the page; letters, digits and '-'.
        title: Above it.
        model: Bokeh's.
        table: What the figure shows, in numbers.
        legend: Names of colours.
        choices: Lists above it.
        data: For the page's script.
        kind: ``'timeline'`` where the script draws it, else ''.
        wide: Whether it has the page's whole width.
    """

    name: str
    title: str
    model: Any
    table: Table
    legend: list[LegendEntry] = field(default_factory=list)
    choices: tuple[Choice, ...] = ()
    data: Any = None
    kind: str = ''
    wide: bool = False


@dataclass
class PageSection:
    """A question that one has about a run, and its answer.

    Attributes:
        name: For links; letters and '-'.
        title: The question.
        sentences: What is to be said first.
        drawings: Figures.
        tables: Tables that belong to no figure, with their titles.
    """

    name: str
    title: str
    sentences: list[str] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    tables: list[tuple[str, Table]] = field(default_factory=list)


def thinned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]
            ) -> Table:
    """A table of evenly chosen rows, if there are more than a page takes."""
    if len(rows) <= MOST_ROWS:
        return Table(header, rows)
    step = (len(rows) - 1) / (MOST_ROWS - 1)
    return Table(header, [rows[round(step * row)]
                          for row in range(MOST_ROWS)],
                 f'{MOST_ROWS} of {len(rows):,} rows, evenly chosen.')


def said_of(run: str, sentence: str) -> str:
    """A sentence about a run: which one, if there are several."""
    return f'Run {run}: {sentence}' if run else sentence


def label(run: str, text: str) -> str:
    """A text about a run: its letter in front, if there are several."""
    return f'{run} {text}' if run else text
