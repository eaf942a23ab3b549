"""A page in a real browser: what it shows, and what a click or a key does."""
import time

from chainer_fp8pipe.report.diagnosis import explain_waits
from chainer_fp8pipe.report.events import Event
from chainer_fp8pipe.report.page import write_page
from chainer_fp8pipe.report.records.run_record import (
    FIRST,
    RecordedUpdate,
    RunRecord,
    TensorHealth,
)

import numpy
import pytest

from benchmarks.browser import Browser, program

from ..made_up_run import MadeUpRun

EVIL = '</script><img src=x onerror="window.hit=1"><script>window.hit=1'

#: The timeline's figure, and a part of it by its name.
PLOT = "plots.get('timeline')"
PART = PLOT + ".renderers.find(one => one.name === '{}').data_source.data"


@pytest.fixture(scope='module')
def browser():
    """One Chromium for all pages."""
    pytest.importorskip('bokeh', reason='Bokeh is not installed')
    if program() is None:
        pytest.skip('no Chromium is installed')
    with Browser() as chrome:
        yield chrome


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of records, and waits until all is drawn."""
    def opened(*records):
        write_page(records, tmp_path / 'report.html')
        browser.size(1200, 900)
        browser.prefer('light')
        browser.open(tmp_path / 'report.html')
        until(browser, "document.documentElement.dataset.drawn === 'yes'")
        return browser

    return opened


def until(browser, condition):
    """Waits for something that comes; the limit only ends what hangs."""
    limit = time.monotonic() + 100
    while not browser.run(condition):
        assert time.monotonic() < limit, (condition, browser.errors)
        time.sleep(0.02)


def part(browser, name):
    return browser.run(f'({{...{PART.format(name)}}})')


def place(browser, x, y):
    """Pixels of the window of a time in ms and a row."""
    browser.run("document.getElementById('timeline').scrollIntoView()")
    return browser.run(f'''(() => {{
      const {{view}} = timeline, box = view.frame.bbox;
      const {{left, top}} = view.el.getBoundingClientRect();
      return [left + view.frame.x_scale.compute({x}),
              top + view.frame.y_scale.compute({y})];
    }})()''')


def chosen(browser):
    return browser.run(
        "document.getElementById('timeline-chosen').textContent")


def test_no_error_and_no_request_from_a_page_of_three_runs(show):
    browser = show(*[MadeUpRun(name, epochs=2, seed=seed).record()
                     for seed, name in enumerate('abc')])
    assert browser.errors == []
    assert [url for url in browser.requests
            if not url.startswith('data:')] == [
        browser.run('location.href')]
    # All figures have a size.
    assert browser.run('''[...document.querySelectorAll('.figure')].every(
        one => one.offsetHeight > 60 && one.offsetWidth > 200)''')


def test_the_page_may_ask_for_nothing(show):
    browser = show(MadeUpRun(epochs=1).record())
    assert browser.run('''fetch('http://127.0.0.1:9/').then(
        () => 'asked', () => 'refused')''') == 'refused'
    assert any('Content Security Policy' in error
               for error in browser.errors)


def test_a_click_names_what_a_rank_waited_for(show):
    record = MadeUpRun(epochs=1, slow={2: 1.5}).record()
    update = record.updates[0]
    origin = min(event.start for event in update.events)
    wait = next(event for event in explain_waits(update.events)
                if event.rank == 0 and event.name == 'wait')
    browser = show(record)
    browser.click(*place(browser, 1e3 * (
        (wait.start + wait.end) / 2 - origin), -0.1))
    until(browser, "document.getElementById('timeline-chosen')"
          ".textContent.includes('waited')")
    assert f'for {wait.about}' in chosen(browser)
    assert 'rank 2: backward' in wait.about
    box = part(browser, 'chosen')
    assert [box['left'][0], box['right'][0]] == pytest.approx(
        [1e3 * (wait.start - origin), 1e3 * (wait.end - origin)], abs=1e-3)


def test_keys_zoom_move_and_choose(show):
    browser = show(MadeUpRun(epochs=1).record())
    browser.run("document.getElementById('timeline').focus()")
    view = f'[{PLOT}.x_range.start, {PLOT}.x_range.end]'
    start, end = browser.run(view)
    browser.press('+', 187)
    assert browser.run(view) == pytest.approx([end / 4, 3 * end / 4])
    browser.press('ArrowLeft', 37)
    assert browser.run(view) == pytest.approx([end / 8, 5 * end / 8])
    browser.press('Home', 36)
    assert browser.run(view) == [start, end]
    browser.press('.', 190)
    browser.press('.', 190)
    assert chosen(browser).startswith('rank 0: forward, ')
    browser.press('ArrowDown', 40)
    assert 'rank 0, buckets' in chosen(browser)


def test_dragging_and_the_wheel_move_and_zoom(show):
    browser = show(MadeUpRun(epochs=1).record())
    end = browser.run(f'{PLOT}.x_range.end')
    browser.run("document.querySelector('[data-move=in]').click()")
    middle = place(browser, end / 2, 1)
    browser.drag(middle, (middle[0] + 100, middle[1]))
    until(browser, f'{PLOT}.x_range.start < {end / 4 - 1}')
    before = browser.run(f'{PLOT}.x_range.end - {PLOT}.x_range.start')
    browser.call('Input.dispatchMouseEvent', type='mouseWheel', x=middle[0],
                 y=middle[1], deltaX=0, deltaY=-100, modifiers=2)
    until(browser, f'{PLOT}.x_range.end - {PLOT}.x_range.start < '
          f'{0.99 * before}')


def test_dark_and_light(show):
    browser = show(MadeUpRun(epochs=1).record())
    look = '''[getComputedStyle(document.body).backgroundColor,
               plots.get('curve-0').below[0].major_label_text_color,
               document.querySelector('#timeline-legend .swatch')
                   .style.backgroundColor]'''
    light = browser.run(look)
    browser.prefer('dark')
    until(browser, "plots.get('curve-0').below[0].major_label_text_color"
          f" !== '{light[1]}'")
    dark = browser.run(look)
    assert light[0] == 'rgb(255, 255, 255)'
    assert dark[0] == 'rgb(22, 24, 27)'
    assert (light[1], dark[1]) == ('#1c1c1c', '#e0e0e0')
    assert light[2] == dark[2]      # the input's colour is that of pictures


def choose(browser, kind, value):
    browser.run(f'''(() => {{
      const list = document.querySelector('select[data-kind={kind}]');
      list.value = {value!r};
      list.dispatchEvent(new Event('change'));
    }})()''')


def test_curves_are_drawn_against_what_is_chosen(show):
    browser = show(MadeUpRun(epochs=3).record())
    end = "plots.get('curve-0').x_range.end"
    assert browser.run(end) > 100
    choose(browser, 'axis', 'epoch')
    until(browser, f'{end} < 4')
    assert browser.run(
        "plots.get('curve-1').below[0].axis_label") == 'epochs'
    assert browser.errors == []


def test_a_button_of_the_legend_hides_its_line(show):
    browser = show(MadeUpRun(epochs=1).record())
    browser.run("document.querySelector('button.line').focus()")
    line = browser.run("document.activeElement.dataset.line")
    browser.press('Enter', 13)
    assert not any(browser.run(
        "plots.get('curve-0').renderers.filter("
        f"one => one.name === '{line}').map(one => one.visible)"))
    assert browser.run(
        "document.activeElement.getAttribute('aria-pressed')") == 'false'


def test_a_chosen_tensor_stands_out_in_all_figures(show):
    browser = show(MadeUpRun(epochs=2).record())
    browser.run('''(() => {
      const list = document.querySelector('select[data-figure=tensors-0]');
      list.value = '/fc2/b';
      list.dispatchEvent(new Event('change'));
    })()''')
    for figure in ('tensors-0', 'tensors-3'):
        widths = browser.run(f'''(() => {{
          const data = plots.get('{figure}').renderers[0].data_source.data;
          return Array.from(data.title, (title, line) =>
              [title, data.width[line]]);
        }})()''')
        assert [title for title, width in widths if width > 3] == ['/fc2/b']


def test_no_name_becomes_a_script_or_a_formula(show):
    record = MadeUpRun(EVIL, epochs=1).record()
    for name in (EVIL, '$$x^2$$'):
        record.tensors.append(TensorHealth(0, 60, name, 9, {'scale': 1.0}))
        record.curves[-1].values[f'{name}/loss'] = 1.0
    first = record.updates[0]
    record.updates[0] = first._replace(events=(
        *first.events, Event(0, EVIL, first.events[0].start,
                             first.events[0].start + 1e-4, about=EVIL)))
    browser = show(record)
    browser.run("document.getElementById('timeline').focus()")
    for _ in range(12):
        browser.press('.', 190)
    browser.run("document.getElementById('timeline-table').open = true")
    assert browser.run('window.hit') is None
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.run("document.body.textContent")


def many_events(count, ranks=8):
    """One update in which ranks do one thing after the other."""
    random = numpy.random.default_rng(1)
    names = numpy.array(['forward', 'backward', 'encode', 'decode'])
    events = []
    for rank in range(ranks):
        ends = numpy.cumsum(random.exponential(1e-4, count // ranks))
        for start, end, name in zip(
                [0.0, *ends[:-1]], ends, random.choice(names, len(ends)),
                strict=True):
            events.append(Event(rank, str(name), float(start), float(end)))
    return tuple(events)


def test_100_000_events_are_a_small_file_and_few_boxes(show, tmp_path):
    events = many_events(100_000)
    browser = show(RunRecord('many', updates=[
        RecordedUpdate(0, 1, FIRST, events)]))
    assert (tmp_path / 'report.html').stat().st_size < 6e6
    assert browser.errors == []
    pixels = browser.run('timeline.view.frame.bbox.width')
    assert 1000 < len(part(browser, 'boxes')['left']) <= 2 * 8 * pixels
    # From close by, the boxes are the events that they are.
    browser.run(f'{PLOT}.x_range.setv({{start: 500, end: 501}})')
    until(browser, PART.format('boxes') + '.left.length < 1000')
    boxes = part(browser, 'boxes')
    own = [event for event in events if event.rank == 3
           and 1e3 * event.end >= 500 and 1e3 * event.start <= 501
           and event.end - event.start > 2e-6]
    drawn = {(round(left, 2), round(right, 2))
             for left, right, top in zip(
                 boxes['left'], boxes['right'], boxes['top'], strict=True)
             if 2.5 < top < 3.5}
    assert len(own) > 5
    assert {(round(1e3 * event.start, 2), round(1e3 * event.end, 2))
            for event in own} <= drawn


def accessible(browser):
    """Role and name of all that a screen reader comes to."""
    return [(node['role']['value'], node.get('name', {}).get('value', ''))
            for node in browser.call('Accessibility.getFullAXTree')['nodes']
            if not node['ignored']]


def test_a_screen_reader_finds_the_timeline_in_numbers(show):
    record = MadeUpRun(epochs=1, overlaps=True).record()
    browser = show(record)
    browser.call('Accessibility.enable')
    assert not browser.run("document.getElementById('timeline-table').open")
    found = accessible(browser)
    names = [name for _, name in found]
    for row in ('rank 0', 'rank 3', 'rank 0, buckets',
                'rank 3, exchange thread'):
        assert ('rowheader', row) in found
    assert {('columnheader', name) for name in (
        'rank', 'forward', 'collective communication', 'bucket on its way')
        } <= {*found}
    event = next(event for event in record.updates[0].events
                 if (event.rank, event.name) == (1, 'forward'))
    cell, = browser.run('''[...document.querySelectorAll(
        '#timeline-summary tr')].filter(row =>
        row.cells[0].textContent === 'rank 1').map(row => [...row.cells].find(
            (_, at) => row.parentElement.parentElement.tHead.rows[0]
                .cells[at].textContent === 'forward').textContent)''')
    number, unit = cell.split()
    assert unit == 'ms'
    assert float(number) == pytest.approx(1e3 * (event.end - event.start),
                                          rel=1e-3)
    assert ('cell', cell) in found or ('gridcell', cell) in found
    # It says how to open the other table, which is there under that name.
    caption, = [name for name in names
                if 'Single events follow after the button' in name
                and name.startswith('Timeline of update')][:1]
    opens = caption.split('“')[1].split('”')[0]
    assert any(role.startswith('Disclosure') and name == opens
               for role, name in found)
    browser.run("document.querySelector('#timeline-table summary').focus()")
    browser.press('Enter', 13)
    until(browser, "document.querySelectorAll('#timeline-table tr').length")
    assert any('rank 1: forward' in name for _, name in accessible(browser))


def test_the_numbers_are_those_of_the_update_that_is_shown(show):
    browser = show(MadeUpRun(epochs=2).record())
    numbers = "document.getElementById('timeline-summary').textContent"
    before = browser.run(numbers)
    choose(browser, 'update', '3')
    until(browser, f'{numbers} !== {before!r}')
    assert browser.run("document.querySelector('[data-kind=update]')"
                       '.selectedOptions[0].textContent') in browser.run(
                           numbers)


def test_a_box_that_began_long_ago_is_still_in_view(show):
    """Also where short ones have come and gone in its row since."""
    browser = show(RunRecord('empty'))
    seen = browser.run('''(() => {
      const {left, right, row} = boxesInView({
        start: [0, 1, 2, 8, 0, 1], end: [9, 2, 3, 10, 1, 2],
        look: [0, 1, 1, 0, 0, 0], first: [0, 4, 6], looks: 2}, 5, 7, 4);
      return left.map((_, at) => [left[at], right[at], row[at]]);
    })()''')
    assert seen == [[0, 9, 0]]


def test_a_cell_shows_what_takes_most_of_its_time(show):
    browser = show(RunRecord('empty'))
    # In cells of 1: look 1 takes 0.5 of the first, look 0 takes 0.3; the
    # second has look 1 only; then a long box; then nothing.
    seen = browser.run('''(() => {
      const {left, right, look, box} = boxesInView({
        start: [0.0, 0.3, 0.6, 1.2, 2.0], end: [0.3, 0.6, 0.8, 1.5, 3.5],
        look: [0, 1, 1, 1, 0], first: [0, 5], looks: 2}, 0, 4, 4);
      return left.map((_, at) => [left[at], right[at], look[at], box[at]]);
    })()''')
    assert sorted(seen) == [[0, 2, 1, -1], [2, 3.5, 0, 4]]
