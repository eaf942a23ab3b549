"""Clocks and links of ranks, as messages tell."""
import time
from collections import Counter
from types import SimpleNamespace
from unittest import mock

from chainer_fp8pipe.mpi import measured
from chainer_fp8pipe.mpi.measured import (
    clock_name,
    measure_links,
    measure_offsets,
    measure_pairs,
    rounds,
)

import pytest

from tests.ranks import on_ranks

#: Seconds that each rank's clock is ahead of the machine's.
AHEAD = 0.0, 1000.0, -50.0, 3.5


def ahead(seconds):
    """Has this rank's clock be ahead."""
    return mock.patch.object(measured, 'time', SimpleNamespace(
        monotonic=lambda: time.monotonic() + seconds))


@on_ranks(2, 4)
def test_offsets_are_right_to_the_error_that_is_said(comm):
    own = comm.Dup()
    with ahead(AHEAD[comm.rank]):
        found = measure_offsets(own, [*map(str, range(comm.size))])
    own.Free()
    assert bool(found) == (comm.rank == 0)
    for (offset, error), expected in zip(found, AHEAD, strict=False):
        assert abs(offset - expected) <= error + 1e-9


@on_ranks(4)
def test_ranks_that_share_a_clock_are_asked_once_or_never(comm):
    own = comm.Dup()
    with ahead(5.0 * (comm.rank > 1)):
        found = measure_offsets(own, ['one', 'one', 'other', 'other'])
    own.Free()
    if comm.rank == 0:
        assert found[:2] == [(0.0, 0.0)] * 2
        assert found[2] == found[3]
        assert abs(found[2][0] - 5) <= found[2][1] + 1e-9
    names = comm.allgather(clock_name())
    assert names[0] == names[1] != ''


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
    ('aabb', {(0, 2)}), ('aaaa', set())])
def test_one_rank_of_each_host_takes_part(comm, hosts, expected):
    own = comm.Dup()
    found = measure_pairs(own, hosts)
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

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, data, *to):
        if data.size > 64:
            self.now += self._seconds.pop(0) if self._seconds else 0.01
        return self._comm.Isend(data, *to)

    def monotonic(self):
        self.now += 1e-5
        return self.now


@on_ranks(2)
def test_each_direction_has_its_own_speed_that_of_the_fastest_message(comm):
    own, size = comm.Dup(), measured._LARGE
    assert measure_links(own.Split(comm.rank)) == (0.0, float('inf'))
    # Rank 0's third message would be quicker, but two have taken too long.
    late = Late(own, [0.03, 0.02, 0.04] if comm.rank else [0.2, 0.15,
                                                              0.005])
    with mock.patch.object(measured, 'time', late):
        found = measure_pairs(late, 'ab')
        late._seconds = [0.05] * 20 if comm.rank else [0.02] * 20
        slowest = measure_links(late)
    own.Free()
    if comm.rank == 0:
        speeds = {pair[:2]: pair.bandwidth for pair in found}
        assert speeds[0, 1] == pytest.approx(size / 0.15, rel=1e-3)
        assert speeds[1, 0] == pytest.approx(size / 0.02, rel=1e-3)
    # All ranks hear of the slower direction.
    assert slowest == (pytest.approx(5e-6), pytest.approx(size / 0.05,
                                                          rel=1e-3))
