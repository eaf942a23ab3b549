"""A page has what the record has, as text, tables and SVG."""
import itertools
import json
import os
import re
from xml.etree import ElementTree

from chainer_fp8pipe.report import svg
from chainer_fp8pipe.report.page import main, write_page
from chainer_fp8pipe.report.record import CurvePoint, RunRecord, read_record
from chainer_fp8pipe.report.stream import Event
from chainer_fp8pipe.report.svg import chrome_trace, picture, timeline

import pytest

from .made_up_run import MadeUpRun
from .made_up_run import events as events_of_rank


def text_of(page):
    return ' '.join(re.sub('<[^>]*>', ' ', page).split())


def figures_of(page):
    """Each figure, well-formed and inside of its frame."""
    found = re.findall('<svg.*?</svg>', page, re.S)
    for figure in found:
        root = ElementTree.fromstring(figure)
        _, _, wide, high = map(float, root.get('viewBox').split())
        for one in root.iter():
            x, y = (float(one.get(name, 0)) for name in 'xy')
            assert 0 <= x <= x + float(one.get('width', 0)) <= wide
            assert 0 <= y <= high
    return found


def test_a_page_answers_its_questions(tmp_path, capsys):
    folder = tmp_path / 'fp8'
    main([MadeUpRun(slow={2: 1.5}).write(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ('fp8', f'page: {folder}/report.html')
    assert any('Rank 2 on host2 is slow' in line for line in lines)
    page = (folder / 'report.html').read_text()
    text = text_of(page)
    for words in ('1 start: nothing died.', 'accuracy 75 %',
                  'Rank 2 on host2 is slow', '1 MB', '4 MB',
                  'train.py --fast', 'report.json', 'rank 3'):
        assert words in text
    # Two curves, the phases, and an update.
    assert len(figures_of(page)) == 4
    # It asks for nothing, and runs nothing.
    assert not re.search(r'<script|<link|<img|src=|href=|url\(', page)
    assert len(page) < 60_000
    trace = json.loads((folder / 'report.json').read_text())['traceEvents']
    assert {'forward', 'backward', 'exchange'} <= {
        event['name'] for event in trace}


@pytest.mark.parametrize('name', [
    '<script>alert(1)</script>', '"><b>', '&amp;', 'a\udce9b', '日本'])
def test_names_are_text_and_nothing_else(tmp_path, name):
    path = tmp_path / 'page.html'
    write_page(RunRecord(name, curves=[
        CurvePoint(n, n, n, {name: float(n)}) for n in range(3)]), path)
    page = path.read_text()
    assert not re.search('<script|<b>', page)
    assert len(figures_of(page)) == 1


@pytest.mark.parametrize(('points', 'drawn'), [
    ([], 0), ([(1, 1.0)], 0), ([(1, 1.0), (2, 3.0)], 2),
    ([(1, 1.0), (2, float('nan')), (3, 3.0), (4, 1.0)], 3),
    ([(1, float('inf')), (2, 3.0), (3, 3.0)], 2),
    ([(n, 10.0 ** -n) for n in range(9)], 9),
    ([(n, 1e-30 * n) for n in range(9)], 9),
    ([(n, -1e30) for n in range(9)], 9),
    ([(5, 1.0), (5, 2.0)], 2)])
def test_lines_have_all_points_that_are_finite(points, drawn):
    figure = svg.lines('loss', {'main/loss': points})
    assert sum(len(path.split()) for path in re.findall(
        'points="(.*?)"', figure)) == drawn
    assert len(figures_of(figure)) == min(1, drawn)


# --- timelines ---------------------------------------------------------------

UPDATE = [event for rank, factor in enumerate((1.0, 1.5, 1.0))
          for event in events_of_rank(rank, factor, 0)]


def test_a_trace_has_ranks_with_their_threads():
    lines = chrome_trace([
        Event(1, 'forward', 2.5, 3, 4, 0, bytes=7),
        Event(0, 'encode', 0, 1, beside=True), *UPDATE[:6]])['traceEvents']
    assert {(line['pid'], line['tid'], line['args']['name'])
            for line in lines if line['name'] == 'thread_name'} == {
        (0, 0, 'main'), (0, 1, 'exchange thread'), (1, 0, 'main')}
    found = {line['name']: line for line in lines if line['ph'] == 'X'}
    forward = found['forward']
    assert (forward['pid'], forward['ts'], forward['dur'], forward['args']
            ) == (1, 2500000, 500000, {
                'micro_batch': 4, 'chunk': 0, 'bytes': 7})
    assert found['encode']['tid'] == 1
    # An outer event comes before what is inside of it.
    assert [*found].index('exchange') < [*found].index('decode')


def test_a_picture_is_a_file_with_a_row_for_each_thread():
    root = ElementTree.fromstring(picture(UPDATE, '1f1b & more'))
    words = {one.text for one in root.iter() if one.tag.endswith('}text')}
    assert {'1f1b & more', 'rank 0', 'rank 1', 'rank 2', 'beside', 'forward',
            'backward', 'update', 'exchange', 'ms'} <= words
    boxes = [one for one in root.iter() if one.tag.endswith('}rect')
             and len(one)]
    assert len(boxes) == len(UPDATE)
    rows = itertools.groupby(sorted(
        (float(one.get('y')), float(one.get('x')), float(one.get('width')))
        for one in boxes), key=lambda box: box[0])
    found = [[box[1:] for box in its] for _, its in rows]
    assert [len(its) for its in found] == 3 * [5, 1]
    order = [one[0].text.split(',')[0] for one in boxes]
    for rank in range(3):       # in front of what it is inside of
        assert order.index(f'rank {rank}: exchange') < order.index(
            f'rank {rank}: decode')


def test_nothing_is_drawn_of_nothing():
    assert timeline('', [Event(0, 'forward', 1, 1)]) == ''


# --- the command -------------------------------------------------------------

def test_a_folder_whose_name_is_no_utf8_has_its_page(tmp_path, capsys):
    main([MadeUpRun().write(f'{tmp_path}/fp\udcff8')])
    assert capsys.readouterr().out.splitlines()[-1].endswith(
        r'fp\udcff8/report.html')
    with open(f'{tmp_path}/fp\udcff8/report.html', encoding='utf-8') as file:
        assert '<title>fp?8</title>' in file.read()


@pytest.mark.parametrize(('arguments', 'said'), [
    (['absent'], 'trainer.extend'),     # what makes a record
    (['run', 'run'], 'unrecognized arguments: run'),
    (['full'], 'full/report.html cannot be written: Is a directory')])
def test_wrong_arguments_are_errors_with_code_2(
        tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    MadeUpRun().write('run')
    MadeUpRun().write('full')
    os.mkdir('full/report.html')
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err
    assert {*os.listdir()} == {'run', 'full'}
    assert os.listdir('run') == ['report']
    assert read_record('run').starts
