"""Writes the page: its sections, Bokeh, scripts, all in one file."""
from __future__ import annotations

import base64
import hashlib
import json
import os
import pathlib
import string
from collections.abc import Sequence
from typing import Any

from ..atomic_write import written_whole
from ..records.run_record import RunRecord
from .byte_bars import byte_section
from .compression_health import compression_section
from .curve_figures import curve_section
from .phase_bars import phase_section
from .rank_figures import input_section, memory_section
from .run_history import history_section, settings_section
from .sections import PageSection
from .slowness import slowness_section
from .timeline_figure import timeline_section

_SECTIONS = (curve_section, phase_section, timeline_section,
             slowness_section, byte_section, compression_section,
             memory_section, input_section, history_section,
             settings_section)

#: In this order, as one script.
_SCRIPTS = ('boxes_in_view.js', 'timeline_data.js', 'timeline_view.js',
            'page.js')

_HERE = pathlib.Path(__file__).parent


def write_page(records: Sequence[RunRecord], path: str | os.PathLike[str]
               ) -> None:
    """Writes one HTML file, which needs no other file and no network.

    Several runs are drawn over each other.  The file is there in one piece:
    it is written under another name first.

    Args:
        records: Of at least one run and at most 26.
        path: Of the file, e.g. ``report.html``.

    Raises:
        ImportError: Bokeh is missing.
        ValueError: There is no record, or there are too many.
    """
    if not 1 <= len(records) <= len(string.ascii_uppercase):
        raise ValueError('a report is about 1 to '
                         f'{len(string.ascii_uppercase)} runs, not '
                         f'{len(records)}')
    text = page_text(records)
    with written_whole(path) as file:
        file.write(text)


def page_text(records: Sequence[RunRecord]) -> str:
    """The page as text; see :func:`write_page`."""
    try:
        from bokeh.resources import Resources
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as reason:
        raise ImportError(
            'a report is drawn with Bokeh; install it with "pip install '
            '\'chainer_fp8pipe[report]\'"') from reason
    runs = ({'': records[0]} if len(records) == 1
            else dict(zip(string.ascii_uppercase, records, strict=False)))
    sections = [make(runs) for make in _SECTIONS]
    # The library without widgets and tables, which the page does not have.
    library = Resources('inline', components=['bokeh'],
                        minified=True).js_raw
    scripts = [*library, '\n'.join(
        (_HERE / name).read_text(encoding='utf-8') for name in _SCRIPTS)]
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined)
    return environment.get_template('page.html').render(
        runs=runs, sections=sections, scripts=scripts, data=_data(sections),
        hashes=[_hash(script) for script in scripts],
        style=(_HERE / 'page.css').read_text(encoding='utf-8'))


def _data(sections: list[PageSection]) -> str:
    """What the script needs, as JSON that cannot end its element."""
    from bokeh.embed import json_item
    drawings = [drawing for section in sections
                for drawing in section.drawings]
    data: dict[str, Any] = {
        'figures': [{'name': drawing.name, 'kind': drawing.kind,
                     'item': json_item(drawing.model, drawing.name)}
                    for drawing in drawings],
        'timeline': next((drawing.data for drawing in drawings
                          if drawing.kind == 'timeline'), None)}
    return json.dumps(data).replace('<', '\\u003c')


def _hash(script: str) -> str:
    """What a content security policy calls a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
