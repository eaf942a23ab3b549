"""``python -m chainer_fp8pipe report``: folders become a page."""
import json
import os
import shutil
from unittest import mock

from chainer_fp8pipe.report.report_command import main

import pytest

from .made_up_run import MadeUpRun


@pytest.fixture
def pages():
    """Takes pages: names of runs, and where to."""
    found = []
    with mock.patch('chainer_fp8pipe.report.page.write_page', lambda
                    records, path: found.append(
                        ([record.name for record in records], path))):
        yield found


def run(folder, **options):
    return MadeUpRun(**options).write(folder)


def test_one_runs_page_is_in_its_folder(tmp_path, pages, capsys):
    folder = run(tmp_path / 'fp8')
    main([folder])
    assert pages == [(['fp8'], os.path.join(folder, 'report.html'))]
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ('fp8', f'page: {pages[0][1]}')


def test_a_folder_whose_name_is_no_utf8_has_its_page(tmp_path, capsys):
    folder = run(f'{tmp_path}/fp\udcff8')
    main([folder])
    assert capsys.readouterr().out.splitlines()[-1].endswith(
        r'fp\udcff8/report.html')
    with open(f'{folder}/report.html', encoding='utf-8') as file:
        assert '<title>fp?8</title>' in file.read()


def test_json_is_all_that_is_printed(tmp_path, pages, capsys):
    folders = [run(tmp_path / 'b', slow={2: 2.0}), run(tmp_path / 'a')]
    main(['--json', *folders])
    found = json.loads(capsys.readouterr().out)
    assert [one['name'] for one in found] == ['b', 'a']
    assert [len(one['findings']) for one in found] == [1, 0]
    assert found[0]['updates'] == 61
    assert not pages


def test_several_runs_are_compared_in_the_current_folder(tmp_path, pages):
    folders = [run(tmp_path / name) for name in ('fp8', 'int4')]
    main([*folders, '-o', str(tmp_path / 'both.html')])
    main(folders)
    assert pages == [(['fp8', 'int4'], str(tmp_path / 'both.html')),
                     (['fp8', 'int4'], 'report.html')]


def test_a_folder_of_runs_stands_for_those_in_it(tmp_path, pages):
    for name in 'b', 'a':
        run(tmp_path / name)
    (tmp_path / 'c').mkdir()
    main([str(tmp_path)])
    assert pages == [(['a', 'b'], 'report.html')]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, pages):
    folders = [run(tmp_path / name / 'result') for name in 'ab']
    main(folders)
    assert pages[0][0] == folders


def test_too_many_runs_are_an_error_before_any_is_drawn(
        tmp_path, pages, capsys):
    folder = run(tmp_path / 'run00')
    for number in range(1, 27):
        shutil.copytree(folder, tmp_path / f'run{number:02}')
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path)])
    assert error.value.code == 2
    assert not pages
    assert 'at most 26 runs, not 27' in capsys.readouterr().err


def test_what_is_slow_is_printed(tmp_path, pages, capsys):
    folders = [run(tmp_path / 'even'), run(tmp_path / 'slow', slow={2: 2.0})]
    main([folders[1]])
    assert 'Rank 2 on host2 is slow' in capsys.readouterr().out
    main(folders)
    even, slow = capsys.readouterr().out.split('\nslow\n')
    assert 'is slow' not in even
    assert 'Rank 2 on host2 is slow' in slow


def test_a_log_alone_is_enough(tmp_path, pages, capsys):
    (tmp_path / 'log').write_text(json.dumps([
        {'main/loss': 2.0, 'epoch': 1, 'iteration': 10, 'elapsed_time': 3}]))
    main([str(tmp_path)])
    assert len(pages) == 1
    assert 'only the log' in capsys.readouterr().out


@pytest.mark.parametrize(('arguments', 'said'), [
    (['absent'], "'absent' is not a folder"), (['.'], 'has neither a record'),
    ([], 'FOLDER is missing'), (['a', 'b/../a'], 'a folder is given twice')])
def test_wrong_arguments_are_errors_with_code_2(
        tmp_path, monkeypatch, pages, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err
    assert not pages


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    folder = run(tmp_path / 'run')
    with mock.patch('chainer_fp8pipe.report.page.write_page',
                    side_effect=PermissionError('no')), pytest.raises(
                        SystemExit):
        main([folder])
    assert 'name another file with -o' in capsys.readouterr().err


def test_help_says_where_a_record_comes_from(capsys):
    with pytest.raises(SystemExit) as error:
        main(['--help'])
    assert error.value.code == 0
    assert 'trainer.extend(chainer_fp8pipe.RunReport(comm))' in (
        capsys.readouterr().out)
