"""A page in a real browser: what it shows, and what a click or a key does."""
import time

from chainer_fp8pipe.report.events import Event
from chainer_fp8pipe.report.page import write_page
from chainer_fp8pipe.report.record import TensorHealth

import pytest

from .browser import Browser, program
from .made_up_run import MadeUpRun

EVIL = '</script><img src=x onerror="window.hit=1"><script>window.hit=1'

#: The timeline's figure, and its boxes.
PLOT = ("[...plots.values()].find(one => one.x_range.bounds && "
        "one.renderers[0]?.name === 'boxes')")
BOXES = f'({PLOT}).renderers[0].data_source.data'
#: The figure of losses.
CURVES = "[...plots.values()][0]"


@pytest.fixture(scope='module')
def browser():
    """One Chromium for all pages."""
    pytest.importorskip('bokeh', reason='Bokeh is not installed')
    if program() is None:
        pytest.skip('no Chromium is installed')
    with Browser() as chrome:
        yield chrome


@pytest.fixture(scope='module')
def show(browser, tmp_path_factory):
    """Opens the page of records, and waits until all is drawn."""
    path = tmp_path_factory.mktemp('page') / 'report.html'

    def opened(*records):
        write_page(records, path)
        browser.size(1200, 900)
        browser.prefer('light')
        browser.open(path)
        until(browser, "document.documentElement.dataset.drawn === 'yes'")
        return browser
    return opened


def until(browser, condition):
    """Waits for something that comes; the limit only ends what hangs."""
    limit = time.monotonic() + 100
    while not browser.run(condition):
        assert time.monotonic() < limit, (condition, browser.errors)
        time.sleep(0.02)


def choose(browser, label, value):
    browser.run(f"""(() => {{
      const list = [...document.querySelectorAll('label')].find(
          one => one.textContent.trim().startsWith({label!r}))
          .querySelector('select');
      list.value = {value!r};
      list.dispatchEvent(new Event('change'));
    }})()""")


def test_a_page_of_three_runs_asks_for_nothing_and_may_not(show):
    browser = show(*[MadeUpRun(name, epochs=2, seed=seed).record()
                     for seed, name in enumerate('abc')])
    assert browser.errors == []
    assert [url for url in browser.requests
            if not url.startswith('data:')] == [browser.run('location.href')]
    # All figures have a size.
    assert browser.run('''[...document.querySelectorAll('.figure')].every(
        one => one.offsetHeight > 60 && one.offsetWidth > 200)''')
    assert browser.run('''fetch('http://127.0.0.1:9/').then(
        () => 'asked', () => 'refused')''') == 'refused'
    assert any('Content Security Policy' in error
               for error in browser.errors)


def test_what_is_chosen_clicked_and_dragged(show):
    """One page, from one use to the next."""
    browser = show(MadeUpRun(epochs=3).record())
    # Curves against epochs in place of updates.
    end = f'{CURVES}.x_range.end'
    assert browser.run(end) > 100
    choose(browser, 'against', 'epoch')
    until(browser, f'{end} < 4')
    assert browser.run(f'{CURVES}.below[0].axis_label') == 'epochs'
    # Another update, with its numbers.
    before = browser.run(f'({BOXES}).right')
    choose(browser, 'update', '1')
    until(browser, f'({BOXES}).right[0] !== {before[0]}')
    end = browser.run(f'({PLOT}).x_range.end')
    assert end == pytest.approx(max(browser.run(f'({BOXES}).right')),
                                abs=1e-3)
    assert browser.run("""[...document.querySelectorAll('[data-number]')]
        .filter(one => one.dataset.number === '1')
        .every(one => !one.hidden)""")
    # A timeline that was zoomed is moved.
    browser.run(f'({PLOT}).x_range.setv({{start: {end / 4}, end: {end / 2}}})')
    browser.run(f"""document.getElementById([...plots].find(
        ([, one]) => one === {PLOT})[0]).scrollIntoView()""")
    browser.drag((600, 60), (700, 60))
    until(browser, f'({PLOT}).x_range.start < {end / 4 - 1e-3}')
    # A button of a legend hides its line, by the keyboard, too.
    browser.run("document.querySelector('button.line').focus()")
    line = browser.run("document.activeElement.dataset.line")
    browser.press('Enter', 13)
    shown = browser.run(f"""{CURVES}.renderers.flatMap(one =>
        one.data_source.data.title.map((title, place) =>
            [title, one.view.filter.booleans[place]]))""")
    assert {title for title, _ in shown} > {line}
    assert all(is_shown == (title != line) for title, is_shown in shown)
    assert browser.run(
        "document.activeElement.getAttribute('aria-pressed')") == 'false'
    assert browser.errors == []


def test_dark_and_light_wide_and_narrow(show):
    browser = show(MadeUpRun(epochs=1).record())
    look = f"""[getComputedStyle(document.body).backgroundColor,
                {CURVES}.below[0].major_label_text_color]"""
    assert browser.run(look) == ['rgb(255, 255, 255)', '#1c1c1c']
    browser.prefer('dark')
    until(browser, f"{CURVES}.below[0].major_label_text_color !== '#1c1c1c'")
    assert browser.run(look) == ['rgb(22, 24, 27)', '#e0e0e0']
    for width in 1200, 360:
        browser.size(width, 900)
        until(browser, f'document.documentElement.scrollWidth <= {width}')


def test_no_name_becomes_a_script_or_a_formula(show):
    record = MadeUpRun(EVIL, epochs=1).record()
    for name in (EVIL, '$$x^2$$'):
        record.tensors.append(TensorHealth(0, 60, name, 9, {'scale': 1.0}))
        record.curves[-1].values[f'{name}/loss'] = 1.0
    record.updates = [update._replace(events=(
        *update.events, Event(0, EVIL, update.events[0].start,
                              update.events[0].start + 1e-4, about=EVIL)))
        for update in record.updates]
    browser = show(record)
    assert browser.run('window.hit') is None
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.run("document.body.textContent")
