from types import SimpleNamespace
from unittest import mock

from chainer_fp8pipe.mpi.measured import link_speed
from chainer_fp8pipe.mpi.measured.link_speed import measure_links

import pytest

from tests.ranks import on_ranks


class Link:
    """A clock that messages of this rank move on, each by its own time."""

    def __init__(self, comm, latency, bandwidth):
        self._comm, self._latency, self._bandwidth = comm, latency, bandwidth
        self.now = 0.0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, data, peer):
        self._passes(data)
        return self._comm.Isend(data, peer)

    def Irecv(self, data, peer):
        self._passes(data)
        return self._comm.Irecv(data, peer)

    def _passes(self, data):
        self.now += self._latency + data.nbytes / self._bandwidth


@on_ranks(2, 3)
def test_all_ranks_hear_of_the_slowest_link(comm):
    assert measure_links(comm.Split(comm.rank)) == (0.0, float('inf'))
    # The last rank's is slower than that of the others.
    slow = 1 + (comm.rank == comm.size - 1)
    link = Link(comm, 1e-4 * slow, 1e8 / slow)
    with mock.patch.object(link_speed, 'time', SimpleNamespace(
            perf_counter=lambda: link.now)):
        speed = measure_links(link)
    assert speed.latency == pytest.approx(2e-4 + 1024 / 5e7)
    assert speed.bandwidth == pytest.approx(5e7)
    assert set(comm.allgather(speed)) == {speed}
