"""A page has what the record has, as text, tables and SVG."""
import json
import os
import re
from xml.etree import ElementTree

from chainer_fp8pipe.report import svg
from chainer_fp8pipe.report.page import main, write_page
from chainer_fp8pipe.report.record import CurvePoint, RunRecord, read_record

import pytest

from .made_up_run import MadeUpRun


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


# --- the command -------------------------------------------------------------

def test_a_folder_whose_name_is_no_utf8_has_its_page(tmp_path, capsys):
    main([MadeUpRun().write(f'{tmp_path}/fp\udcff8')])
    assert capsys.readouterr().out.splitlines()[-1].endswith(
        r'fp\udcff8/report.html')
    with open(f'{tmp_path}/fp\udcff8/report.html', encoding='utf-8') as file:
        assert '<title>fp?8</title>' in file.read()


@pytest.mark.parametrize(('arguments', 'said'), [
    (['absent'], "'absent' has no record"), ([], 'required: FOLDER'),
    (['run', 'run'], 'unrecognized arguments: run'),
    (['run', '-o', 'absent/page.html'], 'name another file with -o')])
def test_wrong_arguments_are_errors_with_code_2(
        tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    MadeUpRun().write('run')
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err
    assert os.listdir() == ['run']
    assert os.listdir('run') == ['report']
    assert read_record('run').starts
