"""A page is whole, says what is not there, and takes no text for HTML."""
import base64
import hashlib
import html.parser
import json
import re
import sys

from chainer_fp8pipe.report.page import write_page
from chainer_fp8pipe.report.record import (
    PHASES,
    LinkReading,
    RankInterval,
    RunEnd,
    RunRecord,
    RunStart,
    TensorHealth,
)

import pytest

from .made_up_run import MadeUpRun

EVIL = '</script><img src=x onerror="hit()">\'&$$x$$'


class Reader(html.parser.HTMLParser):
    """Collects elements, and what stands in them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.scripts = [], [], []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._script = tag == 'script'
        if self._script:
            self.scripts.append('')

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        elif data.strip():
            self.texts.append(data.strip())

    def handle_endtag(self, tag):
        self._script = False


@pytest.fixture(scope='module')
def read(tmp_path_factory):
    """The page of records; the library is needed to draw it."""
    pytest.importorskip('bokeh', reason='Bokeh is not installed')
    path = tmp_path_factory.mktemp('page') / 'report.html'

    def reader(*records):
        write_page(records, path)
        return Reader(path.read_text(encoding='utf-8'))
    return reader


# --- the file ----------------------------------------------------------------

def test_a_missing_library_and_too_many_runs_are_errors(
        monkeypatch, tmp_path):
    path = tmp_path / 'report.html'
    for count in 0, 27:
        with pytest.raises(ValueError, match=f'1 to 26 runs, not {count}'):
            write_page([RunRecord('a')] * count, path)
    monkeypatch.setitem(sys.modules, 'bokeh.resources', None)
    with pytest.raises(ImportError,
                       match=r"pip install 'chainer_fp8pipe\[report\]'"):
        write_page([RunRecord('a')], path)
    assert not list(tmp_path.iterdir())


def test_a_page_is_there_whole_or_not_at_all(read, tmp_path, monkeypatch):
    path = tmp_path / 'report.html'
    path.write_text('the page before')

    def fail(*arguments):
        raise OSError('no room')

    with monkeypatch.context() as context:
        context.setattr('os.replace', fail)
        with pytest.raises(OSError, match='no room'):
            write_page([RunRecord('a')], path)
    assert [entry.name for entry in tmp_path.iterdir()] == ['report.html']
    assert path.read_text() == 'the page before'
    write_page([RunRecord('a')], path)
    assert path.read_text(encoding='utf-8').rstrip().endswith('</html>')


def test_a_page_runs_its_own_scripts_only_and_leads_nowhere_else(read):
    page = read(*[MadeUpRun(name, epochs=2, overlaps=True).record()
                  for name in 'ab'])
    policy = next(attributes['content'] for tag, attributes in page.elements
                  if attributes.get('http-equiv'))
    assert re.search('script-src ([^;]*)', policy)[1].split() == [
        "'sha256-" + base64.b64encode(hashlib.sha256(
            script.encode()).digest()).decode() + "'"
        for script in page.scripts[1:]]
    assert policy.startswith("default-src 'none'")
    assert 'http' not in policy
    assert not [attributes for _, attributes in page.elements
                if attributes.keys() & {'src', 'srcset', 'action'}
                or not attributes.get('href', '#').startswith('#')]
    names = [attributes['id'] for _, attributes in page.elements
             if 'id' in attributes]
    assert len(names) == len({*names})
    assert {attributes['href'][1:] for _, attributes in page.elements
            if 'href' in attributes} <= {*names}
    # Every figure has its place, and a table.
    figures = json.loads(page.scripts[0])
    assert {figure['name'] for figure in figures} <= {*names}
    assert len(figures) >= 9
    assert [tag for tag, _ in page.elements].count('details') >= len(figures)


def test_names_are_text_and_nothing_else(read):
    record = MadeUpRun(EVIL, epochs=1).record()
    record.tensors.append(TensorHealth(0, 60, EVIL, 7, {'scale': 1.0}))
    record.remarks.append(EVIL)
    record.starts[0].options[EVIL] = EVIL
    page = read(record)
    assert not [tag for tag, _ in page.elements if tag == 'img']
    # Data, the library, its settings, the page's own.
    assert len(page.scripts) == 4
    assert page.texts.count(EVIL) >= 5
    assert not any(name.startswith('on') for _, attributes in page.elements
                   for name in attributes)


# --- what it says ------------------------------------------------------------

START = RunStart(0, 0.0, 0, 2, ('a', 'b'))


def interval(rank, last, median, **phases):
    return RankInterval(0, rank, 1, last, (median,) * 3, (median,) * 3,
                        phases)


def changed(run, change):
    """A made-up run, of which something is otherwise."""
    record = run.record()
    change(record)
    return record


def begun_again(record, **how):
    record.starts[1] = record.starts[1]._replace(**how)


def raised_after_a_kill(record):
    begun_again(record, after='rank 2 was killed')
    record.ends.insert(0, RunEnd(0, 1.8e9, 90, 'Exception: MPI_ERROR'))


def with_bytes(record):
    record.intervals = [
        record.intervals[0]._replace(first=first, last=last, sent={
            'between nodes': ('fp8', sent, 1.2e6)})
        for first, last, sent in ((1, 1, 9e5), (2, 100, 2.9e5))]


def with_phases(record):
    one, two = record.intervals
    record.intervals[:] = [
        one._replace(first=1, last=10, phases={'forward': 0.010}),
        two._replace(first=11, last=40, phases={'forward': 0.030})]


def with_loss(record):
    for point in record.curves:
        point.values['main/loss'] = 12345.0


def without_numbers(record):
    record.curves[3].values['main/loss'] = float('nan')
    record.curves[4].values['main/loss'] = float('inf')


LINK = RunRecord('', [START], intervals=[
    interval(0, 10, 0.1, forward=0.1)._replace(sent={
        'between nodes': ('fp8', 2e6, 8e6),
        'inside nodes': ('fp8', 9e6, 9e6)})],
    links=[LinkReading(0, 10, 0, 1, 1e8, 1e-4)])

#: Of a plan's parts what the newest interval's slowest rank has measured.
PLAN = RunRecord('', [START._replace(
    planned={'update': 2e-3, 'exchange': 1e-3}, spread=0.1)], intervals=[
        interval(0, 10, 9.0, update=9e-3), interval(0, 20, 1.0, update=1e-3),
        interval(1, 20, 2.0, forward=1e-3, backward=2e-3, recompute=4e-3,
                 encode=8e-3, exchange=16e-3, input=32e-3, between=64e-3)])

#: Without a link, of whose speed the bytes would be a share.
EVERY_PHASE = RunRecord(
    '', [START._replace(planned={'update': 1e-3})],
    intervals=[interval(0, 10, 1.0, **dict.fromkeys(PHASES, 1e-3))._replace(
        sent={'between nodes': ('fp8', 2e6, 8e6)})])

DIED = MadeUpRun(dies_at=(100,))

SAID = {
    'an empty record': (RunRecord('nothing'), [
        'No losses or metrics were reported.',
        'No times of updates were recorded.',
        'No events of an update were kept.', 'No bytes were recorded.',
        'No state of a codec was recorded.', 'No memory was recorded.',
        'No times of reading batches were recorded.',
        'No start was recorded.', 'Nothing was recorded.']),
    'the slow rank': (MadeUpRun(slow={2: 1.5}, noise=0.0).record(),
                      ['Rank 2 on node1 is slow: its own work takes 1.50']),
    'updates that were lost': (
        changed(DIED, lambda record: begun_again(record, iteration=40)),
        ['crashed or was killed; updates 41 to 60 were done again',
         '2 starts: 1 crashed or was killed.']),
    'what the launcher has seen': (
        changed(DIED, lambda record: begun_again(
            record, after='rank 2 was killed')), ['rank 2 was killed']),
    'what an error followed from': (
        changed(DIED, raised_after_a_kill), ['0 rank 2 was killed 2025']),
    # (900 + 99 * 290) / 1200 kB
    'bytes are means over updates': (changed(MadeUpRun(), with_bytes),
                                     ['24.7 %']),
    # (10 * 10 ms + 30 * 30 ms) / 40
    'so are phases': (changed(MadeUpRun(ranks=1, epochs=2), with_phases),
                      ['25 ms (100 %)']),
    'ranks that do not report': (
        changed(DIED, lambda record: begun_again(record, reporting=(0,))),
        ['1 of 4 ranks report']),
    'values that are not finite': (
        changed(MadeUpRun(epochs=1), without_numbers),
        ['2 values of loss are not finite; their lines have gaps there.']),
    'waiting for data': (
        MadeUpRun(epochs=1, input_seconds=0.1).record(), ['Yes (']),
    'waiting for none': (
        MadeUpRun(epochs=1, input_seconds=1e-4).record(), ['No (']),
    'what came out': (
        changed(MadeUpRun(epochs=2, noise=0.0), with_loss),
        ['loss 12340', 'an update 24.5 ms (median',
         'began (UTC) from update', '2025-06-15 ']),
    'the slowest link first': (
        changed(MadeUpRun(links={(0, 2): 0.1}, noise=0.0), lambda _: None),
        ['latency, least 0 2 6.25 MB/s 60 µs 0 3 62.5 MB/s']),
    'a plan beside what was measured': (
        PLAN, ['part of an update predicted measured update 2 ms - exchange '
               '1 ms 24 ms forward and backward - 7 ms other - 96 ms '
               'all 3 ms ± 10 % 127 ms']),
    'each phase in one part of a plan': (
        EVERY_PHASE, [f'all 1 ms ± 0 % {len(PHASES)} ms']),
    'a plan of which nothing was measured': (
        RunRecord('', PLAN.starts), ['all 3 ms ± 10 % -'])}


@pytest.mark.parametrize('case', SAID)
def test_a_page_says(read, case):
    record, sentences = SAID[case]
    text = ' '.join(read(record).texts)
    assert text.index('What came out?') < text.index('Is it learning?')
    for sentence in sentences:
        assert sentence in text


def test_settings_that_differ_are_marked(read):
    runs = [MadeUpRun(epochs=1, codec=codec).record()
            for codec in ('fp8', 'int4')]
    texts = read(*runs).texts
    assert {'communicator \u2260', 'command \u2260', 'optimizer'} <= {*texts}
    assert 'communicator' in read(runs[0]).texts


def test_lines_beyond_the_colours_share_one_and_its_legend(read):
    record = MadeUpRun(epochs=2).record()
    record.tensors += [
        one._replace(name=f'{one.name}{number}') for one in record.tensors
        for number in range(2)]
    texts = read(record).texts
    assert any(text.endswith(' and 11 more') for text in texts)


def test_an_interval_alone_has_a_table_and_no_figure(read):
    few, many = (read(MadeUpRun(epochs=epochs).record()).texts
                 for epochs in (1, 2))
    assert 'Memory of the process' not in few
    assert 'Memory of the process' in many
    assert 'most held on the GPU' in few
