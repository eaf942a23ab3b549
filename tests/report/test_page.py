"""A page is whole, says what is not there, and takes no text for HTML."""
import base64
import hashlib
import html.parser
import json
import re
import sys

from chainer_fp8pipe.report.page import write_page
from chainer_fp8pipe.report.record import (
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


def test_a_missing_library_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'bokeh.resources', None)
    with pytest.raises(ImportError,
                       match=r"pip install 'chainer_fp8pipe\[report\]'"):
        write_page([RunRecord('a')], tmp_path / 'report.html')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('count', [0, 27])
def test_too_few_or_too_many_runs_are_an_error(tmp_path, count):
    with pytest.raises(ValueError, match=f'1 to 26 runs, not {count}'):
        write_page([RunRecord('a')] * count, tmp_path / 'report.html')


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


def test_an_empty_record_gives_a_page_that_says_what_is_missing(read):
    texts = read(RunRecord('nothing')).texts
    for sentence in (
            'No losses or metrics were reported.',
            'No times of updates were recorded.',
            'No events of an update were kept.', 'No bytes were recorded.',
            'No state of a codec was recorded.', 'No memory was recorded.',
            'No times of reading batches were recorded.',
            'No start was recorded.', 'Nothing was recorded.'):
        assert sentence in texts


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


def test_only_the_scripts_of_the_page_may_run(read):
    page = read(MadeUpRun(epochs=1).record())
    policy = next(attributes['content'] for tag, attributes in page.elements
                  if attributes.get('http-equiv'))
    allowed = re.search('script-src ([^;]*)', policy)[1].split()
    assert allowed == [
        "'sha256-" + base64.b64encode(hashlib.sha256(
            script.encode()).digest()).decode() + "'"
        for script in page.scripts[1:]]
    assert policy.startswith("default-src 'none'")
    assert 'http' not in policy


def test_nothing_on_the_page_has_an_address(read):
    page = read(MadeUpRun(epochs=1).record())
    assert not [attributes for _, attributes in page.elements
                if attributes.keys() & {'src', 'srcset', 'action'}
                or not attributes.get('href', '#').startswith('#')]


def test_names_on_the_page_are_unique_and_links_lead_somewhere(read):
    page = read(*[MadeUpRun(name, epochs=1).record() for name in 'ab'])
    names = [attributes['id'] for _, attributes in page.elements
             if 'id' in attributes]
    assert len(names) == len(set(names))
    assert {attributes['href'][1:] for _, attributes in page.elements
            if 'href' in attributes} <= {*names}
    figures = json.loads(page.scripts[0])
    assert {figure['name'] for figure in figures} <= {*names}


def test_every_figure_has_a_table(read):
    page = read(MadeUpRun(epochs=1, overlaps=True).record())
    figures = json.loads(page.scripts[0])
    tables = [tag for tag, _ in page.elements].count('details')
    assert len(figures) > 10
    assert tables >= len(figures)


def test_the_slow_rank_is_named(read):
    texts = read(MadeUpRun(slow={2: 1.5}, noise=0.0).record()).texts
    assert any('Rank 2' in text and 'slow' in text and '1.5' in text
               for text in texts)


def test_lost_updates_of_a_start_that_died_are_counted(read):
    record = MadeUpRun(dies_at=(100,)).record()
    record.starts[1] = record.starts[1]._replace(iteration=40)
    texts = read(record).texts
    assert 'crashed or was killed; updates 41 to 60 were done again' in texts
    assert '2 starts: 1 crashed or was killed.' in texts


@pytest.mark.parametrize(('endings', 'said'), [
    ([''], 'Nothing died: one start.'),
    (['OSError: full'], 'One start, which crashed: OSError: full.'),
    ([None], 'One start, which has no end: it runs, or was killed.'),
    (['', ''], 'Nothing died: 2 starts.'),
    ([None, 'OSError: full', ''], '3 starts: 2 crashed or were killed.'),
    ([None, None], '2 starts: 1 crashed or was killed; the last one has no '
     'end: it runs, or was killed.')])
def test_how_starts_ended_is_said(read, endings, said):
    record = MadeUpRun().record()
    record.starts = [record.starts[0]._replace(number=number)
                     for number in range(len(endings))]
    record.ends = [RunEnd(number, 1e9, 100, error)
                   for number, error in enumerate(endings)
                   if error is not None]
    assert said in read(record).texts


def test_each_of_several_runs_says_how_its_starts_ended(read):
    texts = read(MadeUpRun().record(), MadeUpRun().record()).texts
    assert sum('Nothing died: one start.' in text for text in texts) == 2


def test_bytes_are_means_over_updates_not_over_intervals(read):
    record = MadeUpRun().record()
    record.intervals = [
        record.intervals[0]._replace(first=first, last=last, sent={
            'between nodes': ('fp8', sent, 1.2e6)})
        for first, last, sent in ((1, 1, 9e5), (2, 100, 2.9e5))]
    assert '24.7 %' in read(record).texts      # (900 + 99 * 290) / 1200


def test_what_ended_a_start_is_said_as_the_launcher_says_it(read):
    record = MadeUpRun(dies_at=(100,)).record()
    record.starts[1] = record.starts[1]._replace(after='rank 2 was killed')
    assert 'rank 2 was killed' in read(record).texts


def test_ranks_that_do_not_report_are_counted(read):
    record = MadeUpRun(ranks=4, epochs=1).record()
    record.starts[0] = record.starts[0]._replace(reporting=(0,))
    assert any(text.startswith('1 of 4 ranks report')
               for text in read(record).texts)


def test_values_that_are_not_finite_are_counted(read):
    record = MadeUpRun(epochs=1).record()
    record.curves[3].values['main/loss'] = float('nan')
    record.curves[4].values['main/loss'] = float('inf')
    assert ('2 values of loss are not finite; their lines have gaps there.'
            in read(record).texts)


def test_the_mean_of_a_phase_weighs_intervals_by_their_updates(read):
    record = MadeUpRun(ranks=1, epochs=2).record()
    one, two = record.intervals
    record.intervals[:] = [
        one._replace(first=1, last=10, phases={'forward': 0.010}),
        two._replace(first=11, last=40, phases={'forward': 0.030})]
    # (10 * 10 ms + 30 * 30 ms) / 40
    assert '25 ms (100 %)' in read(record).texts


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


@pytest.mark.parametrize(('seconds', 'answer'), [(1e-4, 'No'), (0.1, 'Yes')])
def test_whether_ranks_wait_for_data_is_answered(read, seconds, answer):
    texts = read(MadeUpRun(epochs=1, input_seconds=seconds).record()).texts
    assert any(text.startswith(f'{answer} (') and 'rank' in text
               for text in texts)


def test_what_came_out_stands_first(read):
    record = MadeUpRun(epochs=2, noise=0.0).record()
    for point in record.curves:
        point.values['main/loss'] = 12345.0
    texts = read(record).texts
    assert texts.index('What came out?') < texts.index('Is it learning?')
    assert texts[texts.index('main/loss, at the end') + 1] == '12340'
    assert texts[texts.index('an update (median, slowest rank)') + 1] == (
        '24.5 ms')
    assert '2025-06-15' in texts[texts.index('began (UTC)') + 1]


def interval(rank, last, median, **phases):
    return RankInterval(0, rank, 1, last, (median,) * 3, (median,) * 3,
                        phases)


START = RunStart(0, 0.0, 0, 2, ('a', 'b'))


def test_the_share_of_a_link_is_bytes_over_seconds_and_speed(read):
    record = RunRecord('', [START], intervals=[
        interval(0, 10, 0.1, forward=0.1)._replace(sent={
            'between nodes': ('fp8', 2e6, 8e6),
            'inside nodes': ('fp8', 9e6, 9e6)})],
        links=[LinkReading(0, 10, 0, 1, 1e8, 1e-4)])
    said = ('Between hosts the busiest rank sends 20 % of what a link '
            'carries, on average.')
    assert said in read(record).texts
    record.links.clear()
    assert said not in read(record).texts


def test_the_slowest_ranks_newest_phases_stand_beside_the_plans(read):
    plan = START._replace(planned={'update': 2e-3, 'exchange': 1e-3},
                          spread=0.1)
    intervals = [
        interval(0, 10, 9.0, update=9e-3), interval(0, 20, 1.0, update=1e-3),
        interval(1, 20, 2.0, forward=1e-3, backward=2e-3, recompute=4e-3,
                 encode=8e-3, exchange=16e-3, input=32e-3, between=64e-3)]
    texts = ' '.join(read(RunRecord('', [plan], intervals=intervals)).texts)
    assert ('part of an update predicted measured update 2 ms - exchange '
            '1 ms 24 ms forward and backward - 7 ms other - 96 ms '
            'all 3 ms ± 10 % 127 ms') in texts
