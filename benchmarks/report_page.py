"""Which library draws a timeline of 100,000 boxes, and how fast.

    python benchmarks/report_page.py

Draws the same boxes, of 8 ranks with 3 lanes each, with Bokeh and Plotly in
several ways, each as one HTML file that needs no network, in a headless
Chromium on the processor:

* file: its size;
* write: seconds to make its text, once the library is imported;
* first: seconds from the start of loading to the first picture;
* zoom, pan: pictures per second while the times in view change at every
  frame of the browser (which has 60 a second);
* their CPU: milliseconds of a processor that the page's process took for a
  picture, in all its threads, which depend less on what else runs.

"In view" draws what :file:`boxes_in_view.js` leaves of the boxes; "page" is
the page of ``write_page`` itself, for which ``--ways page`` is enough.  WebGL
is done by software (SwiftShader).  Needs Chromium, and ``pip install bokeh``,
for some ways also ``plotly``.
"""
from __future__ import annotations

import argparse
import base64
import importlib.metadata
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from chainer_fp8pipe.report import page
from chainer_fp8pipe.report.events import BUCKETS, EXCHANGE, Event
from chainer_fp8pipe.report.page.html_page import page_text
from chainer_fp8pipe.report.records.run_record import (
    FIRST,
    RecordedUpdate,
    RunRecord,
)

import numpy
from browser import SOFTWARE_WEBGL, Browser
from environment import describe

RANKS, LANES = 8, 3
COLOURS = ['#3366ab', '#de701f', '#228733', '#d978bd', '#0d8c99']

_SCRIPT = pathlib.Path(page.__file__).with_name('boxes_in_view.js')

#: Defines drawn(), which says that a picture is there, and view(), a promise
#: of pictures per second while zooming and panning for so many seconds.
_MEASURE = '''
let pictures = 0;
function drawn() {
  if (!pictures++) requestAnimationFrame(() => requestAnimationFrame(
      () => { window.first = performance.now() / 1000; }));
}
async function view(how, seconds, last) {
  const begin = performance.now(), before = pictures;
  let now = begin;
  while ((now = await new Promise(requestAnimationFrame))
         < begin + 1000 * seconds) {
    const part = (now - begin) / 1000 / seconds;
    const width = last * (how === 'zoom' ? 0.001 ** part : 0.1);
    const from = how === 'zoom' ? (last - width) / 2 : (last - width) * part;
    await show(from, from + width);
  }
  return 1000 * (pictures - before) / (performance.now() - begin);
}
'''

_BOKEH = '''
let plot;
const timer = setInterval(() => {
  const root = (window.Bokeh?.documents[0]?.roots() ?? [])[0];
  const view = root && Bokeh.index.get_by_id(root.id);
  if (!view?._actual_paint) return;
  clearInterval(timer);
  plot = root;
  const paint = view._actual_paint.bind(view);
  view._actual_paint = () => { paint(); drawn(); };
  prepare(view.frame.bbox.width);
  view.request_repaint();
}, 5);
function prepare(width) {}
function show(from, to) { plot.x_range.setv({start: from, end: to}); }
'''

_PLOTLY = '''
let plot;
addEventListener('load', async () => {
  plot = document.querySelector('.plotly-graph-div');
  prepare(1000);
  plot.on('plotly_afterplot', drawn);
  await show(0, last);
});
function prepare(width) {}
function show(from, to) {
  return Plotly.relayout(plot, {'xaxis.range': [from, to]});
}
'''

_PAGE = _MEASURE.replace('let pictures', 'var pictures') + '''
setInterval(() => {
  const [mark] = performance.getEntriesByName('timeline drawn');
  if (!mark || window.first) return;
  window.first = mark.startTime / 1000;
  const paint = timeline.view._actual_paint.bind(timeline.view);
  timeline.view._actual_paint = () => { paint(); pictures++; };
}, 5);
function show(from, to) {
  timeline.plot.x_range.setv({start: from, end: to});
}
'''

#: Draws only what is in view; redraw(seen) is the library's.
_IN_VIEW = '''
let boxes, cells;
function prepare(width) {
  cells = Math.round(width);
  const array = (kind, text) => new kind(Uint8Array.from(
      atob(text), letter => letter.charCodeAt(0)).buffer);
  boxes = {start: array(Float64Array, data.start),
           end: array(Float64Array, data.end),
           look: array(Uint8Array, data.look), looks: 5};
  boxes.first = data.first;
  redraw(boxesInView(boxes, 0, last, cells));
}
'''
_BOKEH_IN_VIEW = '''
function redraw(seen) {
  plot.select_one('boxes').data_source.data = {
    left: seen.left, right: seen.right, look: seen.look.map(l => colours[l]),
    bottom: seen.row, top: seen.row.map(row => row + 0.8)};
}
function show(from, to) {
  redraw(boxesInView(boxes, from, to, cells));
  plot.x_range.setv({start: from, end: to});
}
'''
_PLOTLY_IN_VIEW = '''
function arrays(seen) {
  return {base: [seen.left], y: [seen.row],
          x: [seen.right.map((end, box) => end - seen.left[box])],
          'marker.color': [seen.look.map(look => colours[look])]};
}
function redraw(seen) { Plotly.restyle(plot, arrays(seen)); }
function show(from, to) {
  return Plotly.update(plot, arrays(boxesInView(boxes, from, to, cells)),
                       {'xaxis.range': [from, to]});
}
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split('\n\n')[0],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--boxes', type=int, default=100_000)
    parser.add_argument('--seconds', type=float, default=2.0)
    parser.add_argument('--ways', nargs='+', choices=WAYS,
                        default=list(WAYS))
    parser.add_argument('--json', metavar='FILE')
    arguments = parser.parse_args()
    print(describe())
    print(', '.join(
        f'{name} {importlib.metadata.version(name)}'
        for name in ('bokeh', 'plotly')
        if any(name in way.replace('page', 'bokeh')
               for way in arguments.ways)))
    print(f'{arguments.boxes:,} events')
    print(f'{"way":22}{"file":>7}{"write":>7}{"first":>7}'
          f'{"zoom":>7}{"CPU":>7}{"pan":>7}{"CPU":>7}')
    print(f'{"":22}{"[MB]":>7}{"[s]":>7}{"[s]":>7}'
          f'{"[1/s]":>7}{"[ms]":>7}{"[1/s]":>7}{"[ms]":>7}')
    rows = []
    for way in arguments.ways:
        rows.append(measure(way, arguments))
        print('{way:22}{megabytes:7.2f}{write:7.2f}{first:7.2f}{zoom:7.1f}'
              '{zoom_cpu:7.1f}{pan:7.1f}{pan_cpu:7.1f}'.format(**rows[-1]),
              flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows))


def measure(way: str, arguments: Any) -> dict[str, Any]:
    """One way's row of the table."""
    boxes = some_boxes(arguments.boxes)
    WAYS[way](some_boxes(100))      # imports
    begin = time.perf_counter()
    text = WAYS[way](boxes)
    write = time.perf_counter() - begin
    options = SOFTWARE_WEBGL if 'gl' in way else ()
    with tempfile.TemporaryDirectory() as folder, Browser(*options) as chrome:
        path = pathlib.Path(folder) / 'page.html'
        path.write_text(text, encoding='utf-8')
        chrome.open(path)
        last = boxes['end'].max()
        if way == 'page':
            # Its policy lets no script run that is not its own.
            chrome.run(_PAGE)
            last *= 1e3
        first = chrome.run('''new Promise(done => setInterval(() => {
            if (window.first) done(window.first) }, 10))''')
        row = {'way': way, 'megabytes': path.stat().st_size / 1e6,
               'write': write, 'first': first}
        for how in 'zoom', 'pan':
            before = chrome.processor_seconds(), chrome.run('pictures')
            row[how] = chrome.run(
                f'view("{how}", {arguments.seconds}, {last})')
            count = chrome.run('pictures') - before[1]
            row[f'{how}_cpu'] = 1e3 * (
                chrome.processor_seconds() - before[0]) / max(count, 1)
        if chrome.errors:
            print(way, *chrome.errors[:3], sep='\n  ')
        if others := [url for url in chrome.requests[1:]
                      if not url.startswith('data:')]:
            print(way, 'asks for', others)
        return row


def some_boxes(count: int) -> dict[str, numpy.ndarray]:
    """Boxes of all rows, in each one after the other, without gaps."""
    random = numpy.random.default_rng(0)
    rows = RANKS * LANES
    row = numpy.arange(count) * rows // count
    length = random.exponential(1e-3, count)
    ends = numpy.cumsum(length)
    first = numpy.searchsorted(row, numpy.arange(rows + 1))
    before = numpy.concatenate([[0], ends])[first[:-1]][row]
    return {'start': ends - length - before, 'end': ends - before,
            'row': row.astype('u1'),
            'look': random.integers(0, len(COLOURS), count, dtype='u1')}


def _shared(boxes: dict[str, numpy.ndarray], in_view: bool) -> str:
    """Scripts of both libraries; the boxes only if a script draws them."""
    data: dict[str, Any] = {name: base64.b64encode(array.tobytes()).decode()
                            for name, array in boxes.items()}
    data['first'] = numpy.searchsorted(
        boxes['row'], numpy.arange(RANKS * LANES + 1)).tolist()
    return (f'{_MEASURE}\nconst last = {boxes["end"].max()};\n'
            f'const colours = {json.dumps(COLOURS)};\n'
            + (f'const data = {json.dumps(data)};\n{_SCRIPT.read_text()}'
               if in_view else ''))


def bokeh(glyph: str, backend: str, in_view: bool = False
          ) -> Callable[[dict[str, numpy.ndarray]], str]:
    """A way of drawing with Bokeh."""
    def draw(boxes: dict[str, numpy.ndarray]) -> str:
        from bokeh.embed import file_html
        from bokeh.models import ColumnDataSource
        from bokeh.plotting import figure
        from bokeh.resources import INLINE
        plot = figure(width=1100, height=500, output_backend=backend,
                      tools='xpan,xwheel_zoom,tap',
                      x_range=(0, boxes['end'].max()),
                      y_range=(0, RANKS * LANES))
        start, end, row = boxes['start'], boxes['end'], boxes['row'] * 1.0
        colours = numpy.array(COLOURS)[boxes['look']]
        columns = {
            'quad': {'left': start, 'right': end, 'bottom': row,
                     'top': row + 0.8},
            'hbar': {'left': start, 'right': end, 'y': row + 0.4},
            'rect': {'x': (start + end) / 2, 'width': end - start,
                     'y': row + 0.4},
        }[glyph]
        # A column of colours as text would be a third of the file.
        packed = ColumnDataSource(
            {name: [] if in_view else value for name, value in {
                **columns, 'look': colours}.items()})
        getattr(plot, glyph)(
            source=packed, line_color=None, fill_color='look', name='boxes',
            **{name: name for name in columns},
            **({} if glyph == 'quad' else {'height': 0.8}))
        script = (_shared(boxes, in_view) + _BOKEH
                  + (_IN_VIEW + _BOKEH_IN_VIEW if in_view else ''))
        text = file_html(plot, INLINE)
        return text.replace('</body>', f'<script>{script}</script></body>')
    return draw


def plotly(kind: str, in_view: bool = False
           ) -> Callable[[dict[str, numpy.ndarray]], str]:
    """A way of drawing with Plotly."""
    def draw(boxes: dict[str, numpy.ndarray]) -> str:
        from plotly.graph_objects import Bar, Figure, Scattergl
        figure = Figure(layout={
            'width': 1100, 'height': 500, 'bargap': 0.2, 'dragmode': 'pan',
            'barmode': 'overlay', 'showlegend': False})
        figure.update_xaxes(range=[0, boxes['end'].max()])
        start, end, row = boxes['start'], boxes['end'], boxes['row']
        if kind == 'bar':
            if in_view:
                start = end = row = numpy.zeros(0)
            colours = numpy.array(COLOURS)[boxes['look'][:len(row)]]
            figure.add_trace(Bar(
                base=start, x=end - start, y=row, orientation='h',
                marker={'color': colours, 'line': {'width': 0}}))
        else:
            for look, colour in enumerate(COLOURS):
                mine = boxes['look'] == look
                gap = numpy.full(mine.sum(), numpy.nan)
                figure.add_trace(Scattergl(
                    x=numpy.stack([start[mine], end[mine], gap], 1).ravel(),
                    y=numpy.repeat(row[mine], 3), mode='lines',
                    line={'color': colour, 'width': 14}))
        script = (_shared(boxes, in_view) + _PLOTLY
                  + (_IN_VIEW + _PLOTLY_IN_VIEW if in_view else ''))
        text = figure.to_html(include_plotlyjs=True)
        return text.replace('</body>', f'<script>{script}</script></body>')
    return draw


def whole_page(boxes: dict[str, numpy.ndarray]) -> str:
    """The page of a run that has the boxes as events."""
    names = 'forward', 'backward', 'update', 'exchange', 'encode'
    lanes = '', EXCHANGE, BUCKETS
    return page_text([RunRecord('run', updates=[RecordedUpdate(
        0, 1, FIRST, tuple(
            Event(row // LANES, names[look], start, end,
                  lane=lanes[row % LANES])
            for start, end, row, look in zip(
                *(boxes[name].tolist()
                  for name in ('start', 'end', 'row', 'look')),
                strict=True)))])])


WAYS = {
    'page': whole_page,
    'bokeh quad canvas': bokeh('quad', 'canvas'),
    'bokeh quad webgl': bokeh('quad', 'webgl'),
    'bokeh hbar canvas': bokeh('hbar', 'canvas'),
    'bokeh hbar webgl': bokeh('hbar', 'webgl'),
    'bokeh rect canvas': bokeh('rect', 'canvas'),
    'bokeh rect webgl': bokeh('rect', 'webgl'),
    'bokeh in view canvas': bokeh('quad', 'canvas', in_view=True),
    'bokeh in view webgl': bokeh('quad', 'webgl', in_view=True),
    'plotly bar': plotly('bar'),
    'plotly scattergl': plotly('scattergl'),
    'plotly in view': plotly('bar', in_view=True),
}


if __name__ == '__main__':
    main()
