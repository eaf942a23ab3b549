"""Each pair of hosts is measured, by itself."""
from collections import Counter

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
        assert {pair[:2] for pair in found} == expected
        assert len(found) == len(expected)
        for pair in found:
            assert 0 < pair.latency < 60
            assert pair.bandwidth > 1e3
