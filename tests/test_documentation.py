"""The pages say what the code does, and their code blocks run."""
import ast
import doctest
import importlib
import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import chainer_fp8pipe
from chainer_fp8pipe import export
from chainer_fp8pipe.__main__ import _COMMANDS, _parsed
from chainer_fp8pipe.communicators.factory import CHAINERMN
from chainer_fp8pipe.communicators.options import FAMILIES, OPTIONS
from chainer_fp8pipe.compat._edits import EDITS
from chainer_fp8pipe.launcher import launch_command
from chainer_fp8pipe.pipeline.schedules import SCHEDULES, make_schedule
from chainer_fp8pipe.report import page as report

import chainer
import numpy
import pytest

from tests.pipeline.graphs import peak_live
from tests.ranks import on_ranks
from tests.runs import run_alone, run_here, run_python

ROOT = Path(__file__).parent.parent
DOCS = ROOT / 'docs'
PAGES = sorted(DOCS.rglob('*.rst'))
README = ROOT / 'README.md'


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    name: str
    language: str
    code: str


def blocks_of(page):
    """The ``code-block`` directives of a page."""
    found = []
    for match in re.finditer(
            r'^\.\. code-block:: (\w+)\n((?:   :\w+:.*\n)*)\n'
            r'((?:(?:   .*)?\n)+)', page.read_text(), re.MULTILINE):
        language, options, code = match.groups()
        name = re.search(r':name: (\S+)', options)
        found.append(Block(page.stem, name[1] if name else '', language,
                           textwrap.dedent(code).strip() + '\n'))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def block(page, name):
    (found,) = (block for block in BLOCKS
                if (block.page, block.name) == (page, name))
    return found.code


def rows_of(page):
    """All rows of the list tables of a page: their cells as text.

    A cell is what follows ``* -`` or ``-``, in one line.
    """
    rows: list[list[str]] = []
    is_table = False
    for line in (DOCS / page).read_text().splitlines():
        match = re.fullmatch(r'   (\* -|  -)(?: (.*))?', line)
        if re.match(r'\S', line):
            is_table = line.startswith('.. list-table::')
        elif match:
            if match[1] == '* -':
                rows.append([])
            rows[-1].append(match[2] or '')
        elif is_table and rows and line.startswith('       '):
            rows[-1][-1] += ' ' + line.strip()
    return rows


def ran(comm, folder, code, *arguments):
    """What a script prints on these ranks, which are all."""
    done = run_python(comm, folder, code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace('\x1b[J', '')


# --- code blocks -------------------------------------------------------------

#: They have tests of their own.
NOT_ALONE = {'train', 'train-reports', 'train-resume',
             'pipeline-train', 'pipeline-resume', 'pipeline-load',
             'pipeline-predict', 'pipeline-timeline',
             'partition-train', 'partition-save'}


def readme_blocks():
    text = README.read_text() if README.exists() else ''
    return re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)


ALONE = pytest.mark.parametrize('code', [
    *(pytest.param(block.code, id=f'{block.page}-{block.name}')
      for block in BLOCKS
      if block.language == 'python' and block.name not in NOT_ALONE),
    *(pytest.param(code, id=f'readme-{place}')
      for place, code in enumerate(readme_blocks()))])


@ALONE
@on_ranks(2)
def test_a_python_block_runs_on_two_ranks(comm, code, tmp_path):
    ran(comm, tmp_path, code.replace('10_000', '1_000'))


@ALONE
def test_a_python_block_lets_chainer_import_before_it_does(code):
    """Ranks that ran another block could import Chainer anyway."""
    found = re.findall(r'^(?:import|from) (chainer\w*)', code, re.MULTILINE)
    assert found[0] == 'chainer_fp8pipe'


@pytest.mark.parametrize(
    'page', [page for page in PAGES if '\n>>> ' in page.read_text()],
    ids=lambda page: page.stem)
def test_what_a_page_shows_at_the_prompt_is_what_comes_out(page):
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted
    assert not failed


@pytest.mark.parametrize('module', [
    'communicators.factory', 'links.divisible',
    'training.large_batch', 'training.updater'])
def test_the_example_of_a_docstring_is_what_comes_out(module):
    failed, attempted = doctest.testmod(
        importlib.import_module(f'chainer_fp8pipe.{module}'))
    assert attempted
    assert not failed


# --- commands ----------------------------------------------------------------

def commands_of(page):
    """What follows the prompts of a page, continued lines joined."""
    text = re.sub(r'\\\n +', '', page.read_text())
    if page.suffix == '.md':
        text = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
        return re.findall(r'^    (\S.*)$', text, re.M)
    blocks = re.findall(r'^( *)\.\. code-block:: (?:console|shell)\n'
                        r'((?:\1   .*\n|\n)+)', text, re.MULTILINE)
    return [line for _, code in blocks for line in re.findall(
        r'^ +(?:[$#] )?((?!:)\S.*)$', code, re.MULTILINE)]


COMMANDS = pytest.mark.parametrize(
    'words', [pytest.param(shlex.split(line), id=f'{page.stem}: {line[:60]}')
              for page in [*PAGES, README] if page.exists()
              for line in commands_of(page)])


def after_python(words):
    """What Python runs and is given; nothing where no Python is called."""
    for place, word in enumerate(words):
        if word.rpartition('/')[2] == 'python':
            return [word for word in words[place + 1:] if word not in (
                '[OPTIONS]', '[ARGS]')]
    return []


@COMMANDS
def test_a_command_calls_what_there_is(words):
    ran = after_python(words)
    programs = [word.rpartition('/')[2] for word in words if '=' not in word]
    assert programs[0] in {'apt', 'docker', 'make', 'mpiexec', 'pytest',
                           'python', 'salloc', 'uv'}
    if programs[0] == 'pytest':
        assert all((ROOT / path).exists() for path in words[1:])
    if programs[0] == 'make' and len(programs) > 1:
        assert f'\n{programs[1]}:' in (ROOT / 'Makefile').read_text()
    if ran[:1] == ['-m'] and ran[1].startswith('benchmarks'):
        module = ROOT / ran[1].replace('.', '/')
        assert module.is_dir() or module.with_suffix('.py').is_file()
    elif ran and '/' in ran[0] and 'NAME' not in ran[0]:
        folder = (ROOT / ran[0]).parent
        sources = ''.join(path.read_text() for path in folder.glob('*.py'))
        assert (ROOT / ran[0]).is_file()
        for option in re.findall(r'^--[a-z][\w-]*', '\n'.join(ran), re.M):
            assert f"'{option}'" in sources, option


@COMMANDS
def test_a_command_of_the_package_has_options_that_it_knows(words):
    ran = after_python(words)
    if ran[:2] != ['-m', 'chainer_fp8pipe']:
        return
    command, *options = ran[2:]
    assert command in _COMMANDS
    if command == 'launch':     # hands what it does not know to run
        parser = launch_command._parser({})
        own, options = launch_command.divide(parser, options)
        parser.parse_args(own)
        command = 'run'
    if command in ('export', 'report'):     # have parsers of their own
        module = {'export': export, 'report': report}[command]
        known = Path(module.__file__).read_text()
        assert not [option for option in options if option[:2] == '--'
                    and f"'{option}'" not in known]
    elif command != 'install-chainer':
        _parsed([command, *options])


@pytest.mark.parametrize('code', [
    pytest.param(found.code, id=f'{found.page}-{place}')
    for place, found in enumerate(BLOCKS)
    if found.language == 'text' and 'create_communicator(' in found.code])
def test_a_call_that_is_shown_alone_has_options_that_there_are(code):
    calls = [node for node in ast.walk(ast.parse(code))
             if isinstance(node, ast.Call)]
    assert calls
    for call in calls:
        assert call.args[0].value in FAMILIES
        assert {keyword.arg for keyword in call.keywords} <= set(
            OPTIONS)


# --- the tour's script -------------------------------------------------------

def changed(code, diff, old=' -', new=' +'):
    """A script with a ``diff`` applied; or undone, with old and new turned."""
    for hunk in diff.split('@@\n'):
        before, after = (''.join(line[1:] for line in hunk.splitlines(True)
                                 if line[0] in kept) for kept in (old, new))
        assert before in code, f'{before!r} is not in the script'
        code = code.replace(before, after, 1)
    return code


def epochs(code, count=2):
    """A script that trains for fewer than its 8 epochs."""
    assert "(8, 'epoch')" in code
    return code.replace("(8, 'epoch')", f"({count}, 'epoch')")


def changed_script():
    """The tour's script with its ``diff`` applied."""
    return changed(block('first_steps', 'train'),
                   block('first_steps', 'two-lines'))


def with_parts(code, *names, page='first_steps'):
    """A script with other blocks of its page before ``trainer.run()``."""
    parts = '\n'.join(block(page, name) for name in names)
    return code.replace('trainer.run()', parts + 'trainer.run()')


def accuracy(printed):
    """In the last line of ``PrintReport``."""
    return float(re.findall(r'2 +[\d.]+ +([\d.]+)', printed)[-1])


@on_ranks(2)
def test_the_tours_script_learns_unmodified_and_with_two_lines_changed(
        comm, tmp_path):
    assert changed_script().count('chainer_fp8pipe') == 2
    found = [run_python(comm, tmp_path, epochs(changed_script()))]
    for line in block('first_steps', 'unmodified').splitlines():
        *options, script = re.fullmatch(
            r'\$ mpiexec -n \d python -m chainer_fp8pipe run (.*)',
            line)[1].split()
        assert script == 'train.py'
        found.append(run_here(comm, tmp_path, epochs(
            block('first_steps', 'train')), *options))
    for done in found:
        assert done.returncode == 0, done.stderr
        assert accuracy(done.stdout) > 0.85


@on_ranks(4)
def test_the_tours_reports_and_snapshots_are_written(comm, tmp_path):
    code = with_parts(changed_script(), 'train-reports', 'train-resume')
    code = code.replace("['epoch',", "['comm/bytes', 'epoch',")
    # An epoch has 32 updates, the very first of which only broadcasts.
    code = code.replace("('fp8')", "('fp8', warmup=31)")
    first = ran(comm, tmp_path, epochs(code, 3))
    found = re.findall(r'^([\d.]+) +\d ', first, re.MULTILINE)
    warm_up, chosen, later = map(float, found)
    page = ' '.join((DOCS / 'first_steps.rst').read_text().split())
    stated = [int(number.replace(',', '')) for number in re.search(
        r'is ([\d,]+) in the float32 warm-up and ([\d,]+) after it\. Updates '
        r'that choose new scales send (\d+) bytes more', page).groups()]
    assert warm_up == stated[0]
    # A scale is also chosen when a mean has left its range.
    for one in chosen, later:
        assert stated[1] - 8 <= one <= stated[1] + stated[2]
    for name in ('compression.json', 'snapshot_iter_64.ranks',
                 'snapshot_iter_96.ranks'):
        assert (tmp_path / 'result' / name).exists(), name
    second = ran(comm, tmp_path, epochs(code, 4), '--resume')
    assert re.search(r'^[\d.]+ +4 ', second, re.M)
    assert (tmp_path / 'result' / 'snapshot_iter_128.ranks').exists()


# --- the scripts of the pages on pipelines and on any Chain ------------------

def rows(printed):
    """The numbers in each row of ``PrintReport``."""
    return [[float(cell) for cell in row.split()] for row in re.findall(
        r'^(\d+(?: +[\d.e-]+)+) *$', printed.replace('\x1b[J', ''), re.M)]


def script(*names):
    """The page's script, with other blocks before ``trainer.run()``."""
    return epochs(with_parts(block('pipeline', 'pipeline-train'), *names,
                             page='pipeline'))


def check_serial(found, folder, code):
    """The rows of a script without ranks, whose last number is accuracy."""
    code = code.replace('COMM_WORLD', 'COMM_SELF')
    expected = rows(run_alone(folder / 'serial', code)['stdout'])
    assert len(expected) > 1
    assert expected[-1][-1] > 0.9
    for row, other in zip(rows(found), expected, strict=True):
        assert row == pytest.approx(other, rel=5e-3)


@on_ranks(3)
def test_a_pipeline_does_what_its_page_shows(comm, tmp_path):
    """Numbers of the serial script, a table, a model that is loaded."""
    printed = ran(comm, tmp_path, script() + block(
        'pipeline', 'pipeline-predict') + '    print(y.tolist())\n')
    assert block('pipeline', 'pipeline-placement') in printed
    assert '(7, 2)' in printed
    if comm.rank:
        return
    check_serial(printed, tmp_path, changed(
        script(), block('pipeline', 'pipeline-lines'), ' +', ' -'))
    load = block('pipeline', 'pipeline-load').replace('_256', '_64')
    alone = run_alone(tmp_path, script().partition('model = Net()')[0] + load)
    with chainer.using_config('train', False):
        y = alone['model'](alone['points'][:7].astype('f')).array
    numpy.testing.assert_allclose(
        json.loads(printed.splitlines()[-1]), y, 1e-4, 1e-5)


def resumed():
    return script('pipeline-timeline', 'pipeline-resume')


@on_ranks()
def begin(comm, folder):
    ran(comm, folder, resumed().replace("(2, 'epoch')", "(1, 'epoch')"))


@pytest.fixture
def by_two(tmp_path):
    """A folder with a snapshot of two ranks after an epoch."""
    begin(ranks=2, folder=tmp_path)
    for name in 'timeline.svg', 'timeline.json':
        assert (tmp_path / 'result' / name).exists()
    return tmp_path


@on_ranks(3)
def test_the_pipelines_snapshot_moves_to_other_ranks(comm, by_two):
    found = ran(comm, by_two, resumed(), '--resume')
    if comm.rank == 0:
        (by_two / 'whole').mkdir()
    comm.Barrier()
    assert rows(found) == rows(ran(comm, by_two / 'whole', resumed()))


@on_ranks(4)
def test_the_pipelines_script_becomes_one_with_replicas(comm, tmp_path):
    printed = ran(comm, tmp_path, changed(
        script(), block('pipeline', 'hybrid-lines')))
    assert ', on stage 1,' in printed
    assert rows(printed)[-1][-1] > 0.85


@on_ranks(3)
def test_a_partitioned_chain_reports_what_the_serial_script_reports(
        comm, tmp_path):
    code = block('partition', 'partition-train')
    found = ran(comm, tmp_path, with_parts(
        code, 'partition-save', page='partition'))
    assert found.startswith('Classifier: 3 stages, 1f1b with 4 micro-batches')
    serial = changed(code, block('partition', 'partition-lines'))
    assert 'partition(' not in serial
    if comm.rank == 0:
        check_serial(found, tmp_path, serial)


# --- tables ------------------------------------------------------------------

def test_every_communicator_is_on_its_page():
    text = (DOCS / 'choosing_a_codec.rst').read_text()
    for name in (*FAMILIES, *CHAINERMN):
        assert f'``{name}``' in text, name


def test_the_page_has_the_live_micro_batches_of_the_schedules():
    text = ' '.join((DOCS / 'pipeline.rst').read_text().split())
    shown = re.search(
        r'at most (\d+) on a rank with ``gpipe``, (\d+) with ``1f1b`` and '
        r'``zero_bubble``, and (\d+) of half', text)
    gpipe, usual, interleaved = map(int, shown.groups())
    assert [max(peak_live(make_schedule(name, 4, 8, chunks)))
            for name, chunks in (('gpipe', 1), ('1f1b', 1), ('zero_bubble', 1),
                                 ('interleaved', 2))] == [
        gpipe, usual, usual, interleaved]


def test_every_schedule_is_in_a_table():
    first = [row[0] for row in rows_of('pipeline.rst')]
    for name in SCHEDULES:
        assert any(cell.startswith(f"``'{name}'``") for cell in first), name


def test_every_public_name_is_in_the_api():
    listed = re.findall(r'^\.\. auto\w+:: (\S+)', ''.join(
        page.read_text() for page in DOCS.glob('api/*.rst')), re.MULTILINE)
    names = {name.rpartition('.')[2].partition('(')[0] for name in listed}
    for name in chainer_fp8pipe.__all__:
        assert name in names | {'__version__'}, name


def test_the_algorithms_constants_are_the_defaults():
    defaults = {f'``{field.name}``': field.default
                for field in OPTIONS.values()}
    rows = [row for row in rows_of('algorithm.rst')
            if len(row) == 4 and row[1] in defaults]
    numbers = {row[1]: float(row[2]) for row in rows
               if re.fullmatch(r'[\d.e-]+', row[2])}
    assert len(numbers) == 4
    assert numbers == {name: defaults[name] for name in numbers}


def test_the_shares_that_survive_are_those_of_the_script(tmp_path):
    code = (DOCS / 'survival.py').read_text().replace('100_000', '20_000')
    printed = [line.split() for line in run_alone(
        tmp_path, code)['stdout'].splitlines()]
    table = [row for row in rows_of('algorithm.rst') if len(row) == 8][1:]
    assert len(printed) == len(table) == 6
    for now, documented in zip(printed, table, strict=True):
        assert now[:2] == documented[:2]
        assert list(map(float, now[2:])) == pytest.approx(
            list(map(float, documented[2:])), abs=0.021)


def test_every_edited_module_is_on_the_page_of_what_is_edited():
    documented = {name for row in rows_of('compatibility.rst')
                  for name in re.findall(
                      r'``((?:chainer|chainermn|onnx_chainer)\b[\w.]*)``',
                      row[0])}
    assert documented == {
        edit.module.removesuffix('.__init__') for edit in EDITS
        if edit.module != 'METADATA'}


def test_every_benchmark_is_listed():
    # What a benchmark starts by itself has no options.
    scripts = {path.name for path in (ROOT / 'benchmarks').glob('*.py')
               if re.search(r'\b(ArgumentP|p)arser\(', path.read_text())
               and path.name != 'environment.py'}
    listed = {row[0].strip('`') for row in rows_of('benchmarks/index.rst')}
    assert listed - {'benchmark'} == scripts


@pytest.mark.parametrize('row', [
    pytest.param(row, id=row[0]) for row in rows_of('benchmarks/figures.rst')
    if ':download:' in row[-1]])
def test_a_figure_is_in_the_raw_text_beside_it(row):
    raw = re.sub(r'(?<=\d),(?=\d{3})', '', (DOCS / 'benchmarks' / re.search(
        r'<(.*)>', row[-1])[1]).read_text())
    shown = re.findall(r'(?<![\w.])\d[\d.]*(?= (?:ms|MB|s|%|\+-)(?!\w))',
                       ' '.join(row[1:3]))
    assert len(shown) >= 2
    assert set(re.findall(r'[\d.]*\d', raw)) >= set(shown)


JAPANESE = README.with_name('README.ja.md')


def test_the_japanese_readme_has_the_commands_code_and_figures():
    if not README.exists():
        return
    pages = [page.read_text() for page in (README, JAPANESE)]
    code, numbers, links = ([re.findall(pattern, text, re.M | re.S)
                             for text in pages] for pattern in (
        r'^(?:    \S[^\n]*|```\w*\n.*?^```)$',
        r'(?<![\w.])\d[\d,.]*\d', r'\]\((docs[^)]*)\)'))
    assert len(code[0]) > 10
    assert code[0] == code[1]
    assert sorted(numbers[0]) == sorted(numbers[1])
    assert links[0] == links[1]


@pytest.mark.parametrize('page', [README, JAPANESE])
def test_the_files_that_the_readme_links_to_exist(page):
    text = page.read_text() if page.exists() else ''
    for target in re.findall(r'\]\(([^)#:]+)[^):]*\)', text):
        assert (ROOT / target).exists(), target
