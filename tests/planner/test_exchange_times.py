from chainer_fp8pipe.planner import exchange_times
from chainer_fp8pipe.planning.step import ExchangeFigures

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks


@pytest.mark.parametrize(('seconds', 'processor', 'expected'), [
    ((.002, .009), .004, ExchangeFigures(2, .001, 1e-5, 5e-6)),
    # The longer one is never much shorter, nor does it begin before 0.
    ((.003, .002), 0, ExchangeFigures(2, .0018, 2.5e-7, 0.0)),
    ((0, .008), .1, ExchangeFigures(2, 0.0, .008 / 700, .008 / 700))])
def test_two_sizes_make_a_line(seconds, processor, expected):
    found = exchange_times.line(2, (100, 800), seconds, processor)
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(('each', 'count'), [(.01, 9), (.2, 2)])
def test_long_exchanges_are_made_fewer_times(each, count):
    now = [0.0]

    def work():
        now[0] += each
        return now[0]
    found = exchange_times.repeated(MPI.COMM_SELF, work, .5, lambda: now[0])
    assert found == pytest.approx([
        each * (number + 2) for number in range(count)])


@on_ranks(4)
def test_every_layout_is_measured_alike_on_all_ranks(comm):
    found = exchange_times.measure_layouts(comm, (1, 2, 4),
                                           ('float32', 'fp8'), 10_000, .1)
    exchanges, links = found
    assert set(exchanges) == {
        *((1, codec, algorithm) for codec in ('float32', 'fp8')
          for algorithm in ('direct', 'ring', 'torus2d')),
        (2, 'float32', 'direct'), (2, 'fp8', 'direct')}
    assert set(links) == {2, 4}
    assert {one.replicas for one in exchanges.values()} == {2, 4}
    assert all(one.element > 0 and one.fixed >= 0
               for one in exchanges.values())
    assert comm.allgather(found) == [found] * 4
