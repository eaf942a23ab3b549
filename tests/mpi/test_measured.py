"""Links of ranks, as messages tell."""
from unittest import mock

from chainer_fp8pipe.mpi import measured
from chainer_fp8pipe.mpi.measured import measure_links

import pytest

from tests.ranks import on_ranks


class Late:
    """A communicator whose long messages leave late, on made-up clocks."""

    def __init__(self, comm, seconds):
        self._comm, self._seconds, self.now = comm, seconds, 0.0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, data, *to):
        if data.size > 64:
            self.now += self._seconds.pop(0) if self._seconds else 0.5
        return self._comm.Isend(data, *to)

    def monotonic(self):
        self.now += 1e-5
        return self.now


@on_ranks(2)
@pytest.mark.parametrize(('seconds', 'slowest'), [
    # Of each rank's long messages; the fastest counts.
    (([0.02] * 20, [0.05] * 20), 0.05), (([0.06] * 20, [0.05] * 20), 0.06),
    (([0.2, 0.15, 0.3], [0.03, 0.02, 0.04]), 0.15)])
def test_the_slower_direction_counts_and_its_fastest_message(
        comm, seconds, slowest):
    own, late = comm.Dup(), Late(comm, seconds[comm.rank])
    late._comm = own
    with mock.patch.object(measured, 'time', late):
        found = measure_links(late)
    own.Free()
    assert found == (pytest.approx(5e-6), pytest.approx(
        measured._LARGE / slowest, rel=1e-3))


@on_ranks(1, 3)
def test_links_are_the_same_on_all_ranks(comm):
    found = measure_links(comm)
    assert len(set(comm.allgather(found))) == 1
    assert comm.size > 1 or found == (0.0, float('inf'))
