"""Each pair of hosts is measured, by itself, in both directions."""
from collections import Counter
from unittest import mock

from chainer_fp8pipe.mpi.measured import pair_speed
from chainer_fp8pipe.mpi.measured.pair_speed import measure_pairs, rounds

import pytest

from tests.ranks import on_ranks


@pytest.mark.parametrize('count', range(10))
def test_all_meet_once_and_nobody_is_in_two_pairs_at_a_time(count):
    found = [*rounds(count)]
    pairs = Counter(frozenset(pair) for pairs in found for pair in pairs)
    assert set(pairs.values()) <= {1}
    assert len(pairs) == count * (count - 1) // 2
    for one in found:
        players = [player for pair in one for player in pair]
        assert len(players) == len(set(players))


@on_ranks(4)
@pytest.mark.parametrize(('hosts', 'expected'), [
    ('abcd', {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}),
    ('aabb', {(0, 2)}), ('abab', {(0, 1)}), ('aaaa', set())])
def test_one_rank_of_each_host_takes_part(comm, hosts, expected):
    own = comm.Dup()
    found = measure_pairs(own, [*hosts])
    own.Free()
    if comm.rank == 0:
        assert {pair[:2] for pair in found} == expected | {
            pair[::-1] for pair in expected}
        assert len(found) == 2 * len(expected)
        for pair in found:
            assert 0 < pair.latency < 60
            assert pair.bandwidth > 1e3


class Late:
    """A communicator whose long messages leave late, on made-up clocks."""

    def __init__(self, comm, seconds):
        self._comm, self._seconds, self.now = comm, seconds, 0.0
        self.rank, self.gather = comm.rank, comm.gather
        self.Irecv, self.Ibarrier = comm.Irecv, comm.Ibarrier

    def Isend(self, data, *to):
        if data.size > 64:
            self.now += self._seconds.pop(0) if self._seconds else 0.01
        return self._comm.Isend(data, *to)

    def perf_counter(self):
        self.now += 1e-5
        return self.now


@on_ranks(2)
def test_each_direction_has_its_own_speed_that_of_the_fastest_message(comm):
    own = comm.Dup()
    # Rank 0's third message would be quicker, but two have taken too long.
    late = Late(own, [0.03, 0.02, 0.04] if comm.rank else [0.2, 0.15,
                                                              0.005])
    with mock.patch.object(pair_speed, 'time', late):
        found = measure_pairs(late, ['a', 'b'])
    own.Free()
    if comm.rank == 0:
        speeds = {pair[:2]: pair.bandwidth for pair in found}
        size = pair_speed._LARGE
        assert speeds[0, 1] == pytest.approx(size / 0.15, rel=1e-3)
        assert speeds[1, 0] == pytest.approx(size / 0.02, rel=1e-3)
