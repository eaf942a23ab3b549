"""``python -m chainer_fp8pipe report``: folders become a page."""
import os
import shutil

from chainer_fp8pipe.report.report_command import main

import pytest

from .made_up_run import MadeUpRun


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with three runs, one of them slow."""
    monkeypatch.chdir(tmp_path)
    for name, slow in ('a/fp8', {}), ('a/int4', {2: 2.0}), ('b/fp8', {}):
        MadeUpRun(slow=slow).write(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(('arguments', 'page', 'title'), [
    (['a/fp8'], 'a/fp8/report.html', 'fp8'),
    (['a/fp8', '-o', 'one.html'], 'one.html', 'fp8'),
    (['a/int4', 'a/fp8'], 'report.html', 'int4, fp8'),
    (['a'], 'report.html', 'fp8, int4'),        # a folder of runs
    (['a/fp8', 'b/fp8'], 'report.html', 'a/fp8, b/fp8')])
def test_runs_are_told_and_have_a_page(here, capsys, arguments, page, title):
    main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[0] != ' '] == [
        *title.split(', '), f'page: {page}']
    assert any('Rank 2 on host2 is slow' in line for line in lines) == (
        'int4' in title)
    assert f'<title>{title}</title>' in (here / page).read_text()


def test_a_folder_whose_name_is_no_utf8_has_its_page(tmp_path, capsys):
    folder = MadeUpRun().write(f'{tmp_path}/fp\udcff8')
    main([folder])
    assert capsys.readouterr().out.splitlines()[-1].endswith(
        r'fp\udcff8/report.html')
    with open(f'{folder}/report.html', encoding='utf-8') as file:
        assert '<title>fp?8</title>' in file.read()


@pytest.mark.parametrize(('arguments', 'said'), [
    (['absent'], "'absent' is not a folder"), (['empty'], 'has no record'),
    ([], 'FOLDER is missing'), (['a', 'b/../a'], 'a folder is given twice'),
    (['many'], 'at most 26 runs, not 27'),
    (['a', '-o', 'absent/page.html'], 'name another file with -o')])
def test_wrong_arguments_are_errors_with_code_2(
        here, capsys, arguments, said):
    (here / 'empty').mkdir()
    if arguments == ['many']:
        for number in range(27):
            shutil.copytree(here / 'a' / 'fp8', here / 'many' / str(number))
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err
    assert not os.path.exists('report.html')


def test_help_says_where_a_record_comes_from(capsys):
    with pytest.raises(SystemExit) as error:
        main(['--help'])
    assert error.value.code == 0
    assert 'trainer.extend(chainer_fp8pipe.RunReport(comm))' in (
        capsys.readouterr().out)
