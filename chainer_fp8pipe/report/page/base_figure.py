"""What all figures of the page have in common."""
from __future__ import annotations

from typing import Any

#: Bokeh reads text that begins so as mathematics, for which it would load a
#: script; the zero-width space keeps it from that.
_MATHEMATICS, _SPACE = ('$$', '\\[', '\\('), '\u200b'


def base_figure(x_label: str, y_label: str | None, height: int,
                tools: str = 'xpan,xbox_zoom,reset,save', **options: Any
                ) -> Any:
    """An empty figure, without grounds, as wide as there is room.

    Args:
        x_label: Of the axis.
        y_label: Of the axis.
        height: In pixels.
        tools: Bokeh's names.
        options: Of ``bokeh.plotting.figure``.
    """
    from bokeh.plotting import figure
    plot = figure(height=height, sizing_mode='stretch_width', tools=tools,
                  x_axis_label=x_label, y_axis_label=y_label,
                  background_fill_color=None, border_fill_color=None,
                  outline_line_color=None, min_border_right=12, **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    # Canvas: a page of many WebGL figures runs out of contexts.
    plot.output_backend = 'canvas'
    return plot


def bars_height(count: int) -> int:
    """Pixels of a figure with so many bars; the more, the lower each is."""
    return 70 + count * min(max(1000 // max(count, 1), 13), 24)


def plain(text: str) -> str:
    """Text that Bokeh shows as it is."""
    return text if not text.startswith(_MATHEMATICS) else _SPACE + text


def css(colour: tuple[float, float, float]) -> str:
    """A colour as ``#rrggbb``."""
    return '#' + ''.join(f'{round(255 * part):02x}' for part in colour)
