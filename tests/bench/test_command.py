"""``python -m chainer_fp8pipe bench allreduce``."""
import json

import pytest

from tests.ranks import run_script

BENCH = ('-m', 'chainer_fp8pipe', 'bench', 'allreduce')


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / 'times.json'
    done = run_script(
        3, *BENCH, '--sizes', '2k,5000', '--codecs', 'fp8,float32',
        '--algorithms', 'direct,ring', '--partial-sums', 'wire,float16',
        '--frame-bytes', '1k', '--repeats', '2', '--json', str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('3 ranks, ') == 1
    assert done.stdout.count('<- fastest') == 2
    rows = json.loads(file.read_text())['results']
    # MPI's own; fp8: direct, ring in two forms; float32: direct, ring.
    assert len(rows) == 2 * (1 + 3 + 2)
    assert {row['elements'] for row in rows} == {2000, 5000}
    assert {row['options'].get('frame_bytes') for row in rows} == {
        None, 1000}


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--sizes', '8x'], "'8x' is no number of elements"),
    (['--codecs', 'fp9'], "'fp9' is none of int4"),
    (['--algorithms', 'tree'], "'tree' is none of direct"),
    (['--repeats', '0'], "'0' is not 1 or more"),
    (['--json', '/nowhere/file'], 'there is no folder /nowhere')])
def test_bad_arguments_end_all_ranks_with_one_message(arguments, message):
    done = run_script(2, *BENCH, *arguments)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1


def test_one_rank_alone_is_told_how_to_start():
    done = run_script(1, *BENCH)
    assert done.returncode == 2
    assert 'mpiexec -n 2' in done.stderr
