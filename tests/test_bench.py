"""``bench allreduce``, which users run on their own cluster."""
import json

from chainer_fp8pipe.bench import (
    MPI_LIBRARY,
    Result,
    as_json,
    made,
    measure,
    model,
    table,
)
from chainer_fp8pipe.planning.job_plan import Configuration

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import on_ranks, run_script


def case(codec, algorithm, **options):
    return Configuration(2, codec=codec, algorithm=algorithm, options=options)


CASES = [case('fp8', 'direct'), case('float32', 'ring'),
         case('fp8', 'torus2d', partial_sums='float32')]


@on_ranks(2, 4)
def test_every_case_is_timed_as_often_as_asked(comm):
    results = measure(comm, CASES, [10, 3000], repeats=3)
    assert [(result.size, result.case) for result in results] == [
        (size, case) for size in (10, 3000) for case in (None, *CASES)]
    for result in results:
        assert len(result.seconds) == 3
        assert min(result.seconds) > 0
    # All ranks have the same numbers: they were those of the slowest.
    assert len(set(comm.allgather(str(results)))) == 1
    shares = results[-3]
    assert 0 < shares.processor < sum(shares.seconds)
    # Of the others' wires, and as much of the means.
    sent = 2 * 3000 * (comm.size - 1) / comm.size
    assert sent <= shares.nbytes < sent + 200 * comm.size


@on_ranks(3)
def test_the_timed_action_averages_different_gradients(comm):
    link = model(comm, 1000)
    mean = comm.allreduce(link.x.grad.astype(float)) / comm.size
    assert len(set(comm.allgather(link.x.grad.tobytes()))) == comm.size
    assert len(set(comm.allgather(link.x.array.tobytes()))) == 1
    communicator = made(case('float32', 'ring'), comm)
    communicator.multi_node_mean_grad(link)
    communicator.finalize()
    numpy.testing.assert_allclose(link.x.grad, mean, rtol=0, atol=1e-6)


@on_ranks(2)
def test_a_case_that_does_not_fit_is_an_error_on_all_ranks(comm):
    with pytest.raises(ValueError, match='3x5 has 15 ranks, not 2'):
        measure(comm, [case('fp8', 'torus2d', shape=(3, 5))], [10],
                1)


def results():
    return [Result(1000, None, (0.004, 0.002, 0.003)),
            Result(1000, CASES[0], (0.001, 0.0015, 0.0012)),
            Result(9000, None, (0.03, 0.03, 0.03)),
            Result(9000, CASES[0], (0.02, 0.05, 0.04)),
            Result(9000, CASES[2], (0.01, 0.01, 0.01),
                   0.004, 0.001, 9_000_000)]


def test_the_table_compares_medians_and_says_what_times_are_spent_on():
    lines = table(results()).splitlines()
    assert lines[2].split() == [
        '1,000', 'fp8', 'direct', '1.2', '1', '-', '1.5', '2.50', '0', '%',
        '100', '%', '0', '%', '0', '<-', 'fastest']
    assert lines[5].split()[7:] == ['3.00', '40', '%', '50', '%', '10', '%',
                                    '9', '<-', 'fastest']
    assert [line.endswith('<- fastest') for line in lines[1:6]] == [
        False, True, False, False, True]
    assert lines[-2].endswith("create_communicator('fp8', algorithm="
                              "'torus2d', partial_sums='float32')")
    assert lines[-1].startswith(
        'why: fp8 torus2d partial_sums=float32 takes 10 ')


@on_ranks(1)
def test_json_holds_every_time(comm):
    data = json.loads(as_json(results(), comm))
    assert data['ranks'] == 1
    assert data['results'][0] == {
        'elements': 1000, 'codec': 'float32', 'algorithm': MPI_LIBRARY,
        'options': {}, 'seconds': [0.004, 0.002, 0.003], 'shares': None}
    assert data['results'][4]['shares']['nbytes'] == 9_000_000
    assert data['results'][4]['options'] == {'partial_sums': 'float32'}


MPI, RING = (Result(10, None, (7e-3,)), Result(
    10, case('float32', 'ring'), (20e-3,), 4e-3, 1e-3, 8_000_000))


@pytest.mark.parametrize(('other', 'said'), [
    (Result(10, case('int4', 'direct'), (5e-3,), 3e-3, 0.5e-3, 10),
     'why: int4 direct takes 5 ms (3 of the processor, 1.5 of the wire, 0.5 '
     "of latency); without compression MPI's Allreduce takes 7 ms"),
    (Result(10, case('fp8', 'direct'), (10e-3,), 8e-3, 1e-3, 10),
     "warning: no compression pays here: MPI's Allreduce takes 7 ms, fp8 "
     'direct takes 10 ms (8 of the processor, 1 of the wire, 1 of latency)'),
    (RING, '<- fastest')])
def test_it_is_said_why_the_fastest_is(other, said):
    lines = table([MPI, RING, other]).splitlines()
    assert [line for line in lines if said in line]
    assert sum(line.startswith(('why', 'warning')) for line in lines) == (
        other is not RING)


@given(st.floats(1e-6, 1), st.floats(0, 2), st.floats(0, 2))
def test_shares_are_of_a_hundred(seconds, processor, latency):
    parts = Result(1, CASES[0], (seconds,), processor, latency).percent()
    assert sum(parts) == 100
    assert min(parts) >= 0


# --- the command -------------------------------------------------------------

BENCH = ('-m', 'chainer_fp8pipe', 'bench', 'allreduce')


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / 'times.json'
    done = run_script(
        3, *BENCH, '--sizes', '2k,5000', '--codecs', 'fp8,float32',
        '--algorithms', 'direct,ring', '--partial-sums', 'float32,auto',
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


def test_bad_arguments_end_all_ranks_with_one_message():
    done = run_script(2, *BENCH, '--json', '/nowhere/file')
    assert done.returncode == 2
    assert done.stderr.count('there is no folder /nowhere') == 1
