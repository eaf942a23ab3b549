"""The pages say what the code does, and their code blocks run."""
import dataclasses
import doctest
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from chainer_fp8pipe.communicators import factory
from chainer_fp8pipe.communicators.factory import CHAINERMN
from chainer_fp8pipe.communicators.options import (
    FAMILIES,
    ExchangeOptions,
    Fp8Options,
)
from chainer_fp8pipe.compat import PATCHES

import pytest

from tests.ranks import run_script

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
    for line in (DOCS / page).read_text().splitlines():
        match = re.fullmatch(r'   (\* -|  -)(?: (.*))?', line)
        if match:
            if match[1] == '* -':
                rows.append([])
            rows[-1].append(match[2] or '')
        elif rows and line.startswith('       '):
            rows[-1][-1] += ' ' + line.strip()
    return rows


def run(directory, code, *arguments, ranks=2):
    script = directory / 'script.py'
    script.write_text(code)
    done = run_script(ranks, script.name, *arguments, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- code blocks -------------------------------------------------------------

#: They have tests of their own.
NOT_ALONE = {'train', 'train-reports', 'train-resume', 'survival'}


@pytest.mark.parametrize(
    'code', [pytest.param(block.code, id=f'{block.page}-{block.name}')
             for block in BLOCKS if block.language == 'python'
             and block.name not in NOT_ALONE])
def test_a_python_block_runs_on_two_ranks(code, tmp_path):
    run(tmp_path, code)


def readme_blocks():
    text = README.read_text() if README.exists() else ''
    return re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)


@pytest.mark.parametrize('code', readme_blocks() or ['pass'])
def test_a_python_block_of_the_readme_runs_on_two_ranks(code, tmp_path):
    run(tmp_path, code)


@pytest.mark.parametrize(
    'page', [page for page in PAGES if '\n>>> ' in page.read_text()],
    ids=lambda page: page.stem)
def test_what_a_page_shows_at_the_prompt_is_what_comes_out(page):
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted
    assert not failed


def test_the_example_of_create_communicator_is_what_comes_out():
    failed, attempted = doctest.testmod(factory)
    assert attempted
    assert not failed


# --- the tour's script -------------------------------------------------------

def changed_script():
    """The tour's script with its ``diff`` applied."""
    code = block('tour', 'train')
    for hunk in block('tour', 'two-lines').split('@@\n'):
        old, new = (''.join(line[1:] for line in hunk.splitlines(True)
                            if line[0] in kept) for kept in (' -', ' +'))
        assert old in code, f'{old!r} is not in the script'
        code = code.replace(old, new, 1)
    return code


def with_parts(code, *names):
    """The tour's script with other blocks before ``trainer.run()``."""
    parts = '\n'.join(block('tour', name) for name in names)
    return code.replace('trainer.run()', parts + 'trainer.run()')


def accuracy(printed):
    """In the last line of ``PrintReport``."""
    return float(re.findall(r'8 +[\d.]+ +([\d.]+)', printed)[-1])


def test_with_two_lines_changed_the_tours_script_learns(tmp_path):
    code = changed_script()
    assert accuracy(run(tmp_path, code)) > 0.85
    assert code.count('chainer_fp8pipe') == 2


@pytest.mark.parametrize('line', [
    line[2:] for found in BLOCKS
    if (found.page, found.language) == ('tour', 'console')
    for line in found.code.splitlines()])
def test_a_command_of_the_tour_trains_the_unmodified_script(line, tmp_path):
    (tmp_path / 'train.py').write_text(block('tour', 'train'))
    launcher, arguments = line.split(' python ')
    assert re.fullmatch(r'mpiexec -n \d', launcher)
    done = run_script(2, *arguments.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 0.85


def test_the_tours_reports_and_snapshots_are_written(tmp_path):
    code = with_parts(changed_script(), 'train-reports', 'train-resume')
    code = code.replace("['epoch',", "['comm/bytes', 'epoch',")
    # An epoch has 32 updates, the very first of which only broadcasts.
    code = code.replace("('fp8')", "('fp8', warmup=31)")
    start = code.replace("(8, 'epoch')", "(3, 'epoch')")
    first = run(tmp_path, start, ranks=4)
    reported = re.findall(r'^([\d.]+) +\d ', first.replace('\x1b[J', ''),
                          re.MULTILINE)
    warm_up, chosen, later = map(float, reported)
    stated = [int(number.replace(',', '')) for number in re.search(
        r'falls from\s+([\d,]+) in the float32\s+warm-up to\s+([\d,]+), '
        r'plus (\d+) bytes', (DOCS / 'tour.rst').read_text()).groups()]
    assert [warm_up, later] == stated[:2]
    assert chosen == pytest.approx(stated[1] + stated[2] / 32, abs=0.01)
    for name in ('compression.json', 'compression.png',
                 'snapshot_iter_64.npz', 'snapshot_iter_96.npz'):
        assert (tmp_path / 'result' / name).exists(), name
    second = run(tmp_path, code, '--resume', ranks=4).replace('\x1b[J', '')
    assert re.search(r'^[\d.]+ +8 ', second, re.MULTILINE)
    assert (tmp_path / 'result' / 'snapshot_iter_256.npz').exists()


# --- tables ------------------------------------------------------------------

def test_every_communicator_is_in_the_tours_table():
    names = {name for row in rows_of('tour.rst') if len(row) == 6
             for name in re.findall(r'``(\w+)``', row[0])}
    assert names == {*FAMILIES, *CHAINERMN}


def test_every_option_is_in_the_tour_with_its_default():
    documented = {row[0]: row[1] for row in rows_of('tour.rst')
                  if len(row) == 4}
    del documented['option']
    assert documented == {
        f'``{field.name}``': f'``{field.default!r}``'
        for field in (*dataclasses.fields(ExchangeOptions),
                      *dataclasses.fields(Fp8Options))}


def test_the_tour_lists_the_papers_own_defaults():
    text = ' '.join((DOCS / 'tour.rst').read_text().split())
    for name, value in FAMILIES['fp8_paper'][1].items():
        assert f'``{name}={value!r}``' in text.partition(
            '``fp8_paper`` has ')[2]


def test_the_algorithms_constants_are_the_defaults():
    defaults = {f'``{field.name}``': field.default
                for field in dataclasses.fields(Fp8Options)}
    rows = [row for row in rows_of('algorithm.rst')
            if len(row) == 4 and row[1] in defaults]
    numbers = {row[1]: float(row[2]) for row in rows
               if re.fullmatch(r'[\d.e-]+', row[2])}
    assert len(numbers) == 5
    assert numbers == {name: defaults[name] for name in numbers}
    changed = {row[0]: row[1:3] for row in rows_of('algorithm.rst')
               if row[0] == 'headroom'}
    assert [float(cell) for cell in changed['headroom']] == [
        FAMILIES['fp8_paper'][1]['headroom'], defaults['``headroom``']]


def test_the_shares_that_survive_are_those_of_the_script(tmp_path):
    code = block('algorithm', 'survival').replace('100_000', '20_000')
    printed = [line.split() for line in run(
        tmp_path, code, ranks=1).splitlines()]
    table = [row for row in rows_of('algorithm.rst') if len(row) == 8][1:]
    assert len(printed) == len(table) == 6
    for now, documented in zip(printed, table, strict=True):
        assert now[:2] == documented[:2]
        assert list(map(float, now[2:])) == pytest.approx(
            list(map(float, documented[2:])), abs=0.021)


def test_every_patched_module_is_among_the_sharp_bits():
    documented = {name for row in rows_of('sharp_bits.rst')
                  for name in re.findall(r'``([\w.]+)``', row[0])}
    assert documented == set(PATCHES)


def test_every_benchmark_is_listed():
    scripts = {path.name for path in (ROOT / 'benchmarks').glob('*.py')
               if "__name__ == '__main__'" in path.read_text()}
    listed = {row[0].strip('`') for row in rows_of('benchmarks/index.rst')}
    assert listed - {'benchmark'} == scripts


def test_the_files_that_the_readme_links_to_exist():
    text = README.read_text() if README.exists() else ''
    for target in re.findall(r'\]\(([^)#:]+)[^):]*\)', text):
        assert (ROOT / target).exists(), target
