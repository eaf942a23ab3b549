"""A page has what the record has, as text, tables and SVG."""
import json
import os
import re
from xml.etree import ElementTree

from chainer_fp8pipe.report import svg
from chainer_fp8pipe.report.page import write_page
from chainer_fp8pipe.report.record import (
    CurvePoint,
    RunRecord,
    read_record,
)

import pytest

from .made_up_run import MadeUpRun


def page_of(folder, *records):
    path = folder / 'report.html'
    write_page(records, path)
    return path.read_text()


def text_of(page):
    return ' '.join(re.sub('<[^>]*>', ' ', page).split())


@pytest.fixture
def run(tmp_path):
    return read_record(MadeUpRun(slow={2: 1.5}).write(tmp_path / 'fp8'))


def test_a_page_answers_its_questions(run, tmp_path):
    page = page_of(tmp_path, run)
    text = text_of(page)
    for words in ('Nothing died: one start.', 'accuracy 75 %',
                  'Rank 2 on host2 is slow', '1 MB', '4 MB', '100 MB',
                  'train.py --fast', 'report_usual.json', 'rank 3'):
        assert words in text
    # Two curves, the phases, and two updates.
    assert page.count('<svg') == 5
    # It asks for nothing, and runs nothing.
    assert not re.search(r'<script|<link|<img|src=|href=|url\(', page)
    assert len(page) < 60_000


def test_figures_are_well_formed_and_inside_of_their_frames(run, tmp_path):
    for figure in re.findall('<svg.*?</svg>', page_of(tmp_path, run), re.S):
        root = ElementTree.fromstring(figure)
        _, _, wide, high = map(float, root.get('viewBox').split())
        for one in root.iter():
            x, y = (float(one.get(name, 0)) for name in 'xy')
            right = x + float(one.get('width', 0))
            assert 0 <= x <= right <= wide
            assert 0 <= y <= high


def test_updates_are_traces_beside_the_page(run, tmp_path):
    page_of(tmp_path, run)
    for kind in 'usual', 'slowest':
        with open(tmp_path / f'report_{kind}.json') as file:
            names = {event['name'] for event in json.load(file)[
                'traceEvents']}
        # The other ranks wait for rank 2.
        assert {'forward', 'backward', 'exchange', 'wait', 'bucket'} <= names


@pytest.mark.parametrize('name', [
    '<script>alert(1)</script>', '"><b>', '&amp;', 'a\udce9b', '日本'])
def test_names_are_text_and_nothing_else(tmp_path, name):
    record = RunRecord(name, curves=[
        CurvePoint(n, n, n, {name: float(n)}) for n in range(3)])
    page = page_of(tmp_path, record)
    assert not re.search('<script|<b>', page)
    body = re.search('<body.*</body>', page, re.S)[0]
    for figure in re.findall('<svg.*?</svg>', body, re.S):
        ElementTree.fromstring(figure)


def test_runs_stand_side_by_side(run, tmp_path):
    other = read_record(MadeUpRun(ranks=2).write(tmp_path / 'float32'))
    text = text_of(page_of(tmp_path, run, other))
    for words in ('run fp8 float32', 'A: main/loss', 'B: rank 1',
                  'report_A_usual.json', 'report_B_slowest.json'):
        assert words in text
    assert 'B: rank 2' not in text


def test_a_page_without_anything_is_a_page(tmp_path):
    assert text_of(page_of(tmp_path, RunRecord('empty'))).count(
        'Nothing was recorded.') == 6


def test_a_page_is_there_whole_or_not_at_all(run, tmp_path):
    with pytest.raises(OSError, match='nowhere'):
        write_page([run], tmp_path / 'nowhere' / 'report.html')
    assert sorted(os.listdir(tmp_path)) == ['fp8']


# --- lines -------------------------------------------------------------------

@pytest.mark.parametrize(('points', 'parts'), [
    ([], 0), ([(1, 1.0)], 0), ([(1, 1.0), (2, 3.0)], 1),
    ([(1, 1.0), (2, float('nan')), (3, 3.0), (4, 1.0)], 2),
    ([(1, float('inf')), (2, 3.0), (3, 3.0)], 1),
    ([(n, 10.0 ** -n) for n in range(9)], 1),       # logarithmic
    ([(n, 1e-30 * n) for n in range(9)], 1),
    ([(n, -1e30) for n in range(9)], 1),
    ([(5, 1.0), (5, 2.0)], 1)])
def test_lines_have_gaps_where_values_are_not_finite(points, parts):
    figure = svg.lines('loss', {'main/loss': points}, [3])
    assert figure.count('<polyline') == parts
    if figure:
        for line in ElementTree.fromstring(figure).iter('polyline'):
            for point in line.get('points').split():
                x, y = map(float, point.split(','))
                assert 0 <= x <= svg.WIDE
                assert -1 <= y <= 400


def test_a_line_of_a_million_points_is_thinned():
    figure = svg.lines('loss', {'a': [(n, n % 7) for n in range(10**6)]})
    assert len(figure) < 40_000
