"""``bench allreduce``, which users run on their own cluster."""
from chainer_fp8pipe.bench import (
    MPI_LIBRARY,
    Result,
    measure,
    table,
)

import pytest

from tests.ranks import on_ranks, run_script

CASES = [('fp8', 'direct'), ('float32', 'ring'), ('int4', 'torus2d')]


@on_ranks(2, 4)
def test_every_case_is_timed_as_often_as_asked(comm):
    results = measure(comm, CASES, [10, 3000], repeats=3)
    assert [(one.size, one.codec, one.algorithm) for one in results] == [
        (size, *case) for size in (10, 3000)
        for case in (('float32', MPI_LIBRARY), *CASES)]
    assert all(len(one.seconds) == 3 and min(one.seconds) > 0
               for one in results)
    # All ranks have the same numbers: they were those of the slowest.
    assert len(set(comm.allgather(str(results)))) == 1
    fp8 = results[5]
    # Of the others' wires, and as much of the means.
    sent = 2 * 3000 * (comm.size - 1) / comm.size
    assert sent <= fp8.nbytes < sent + 200 * comm.size


MPI = Result(9000, 'float32', MPI_LIBRARY, (7e-3, 8e-3, 6e-3))


@pytest.mark.parametrize(('other', 'row', 'said'), [
    (Result(9000, 'int4', 'direct', (3.5e-3,) * 3, 2_000_000),
     '9,000 int4 direct 3.5 ms 3.5 - 3.5 2.00 2 MB <- fastest',
     '9,000 int4 direct'),
    (Result(9000, 'fp8', 'ring', (14e-3,), 9_000_000),
     '9,000 fp8 ring 14 ms 14 - 14 0.50 9 MB',
     'warning: no compression pays here: float32 takes 7 ms, the best codec '
     '14 ms')])
def test_the_table_compares_medians_and_says_what_is_fastest(
        other, row, said):
    text = table([MPI._replace(size=10), other._replace(size=10), MPI, other])
    lines = [' '.join(line.split()) for line in text.splitlines()]
    assert row in lines
    assert sum(line.endswith('<- fastest') for line in lines) == 2
    assert said in lines[-1]
    assert ('warning' in text) == ('warning' in said)


@pytest.mark.parametrize(('arguments', 'code', 'said'), [
    ('--sizes 2k,5000 --codecs fp8,float32 --algorithms direct,ring '
     '--repeats 2', 0, ''),
    ('--algorithms mpi_op --codecs int4', 2,
     "bench: error: algorithm='mpi_op' makes sums")])
def test_the_command_prints_a_table_or_one_line_of_all_ranks(
        arguments, code, said):
    done = run_script(3, '-m', 'chainer_fp8pipe', 'bench', 'allreduce',
                      *arguments.split())
    assert done.returncode == code, done.stderr
    assert done.stderr.count('error: ') == done.stderr.count(said) == bool(
        said) if said else not done.stderr
    assert done.stdout.count('3 ranks, ') == (not code)
    assert done.stdout.count('<- fastest') == 2 * (not code)
