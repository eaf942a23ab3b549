"""Routes are those of the wiring."""
import math

from chainer_fp8pipe.planning.cluster import Cluster

import pytest
from hypothesis import given
from hypothesis import strategies as st


def links(cluster, source, target):
    return [hop.link for hop in cluster.route(source, target)]


def test_a_star_has_a_port_out_and_a_port_in():
    cluster = Cluster([0, 1, 2], 1e9, 1e-5)
    assert links(cluster, 0, 2) == [('out', 0), ('in', 2)]
    assert sum(hop.latency for hop in cluster.route(0, 2)) == 1e-5


def test_ranks_of_a_host_have_memory_in_common():
    cluster = Cluster([0, 0, 1, 1], 1e9, 1e-5, local_rate=5e9,
                      local_latency=1e-6, burst=1e4)
    assert cluster.route(0, 1) == ((('memory', 0, 1), 5e9, 1e-6, 0.0),)
    assert links(cluster, 1, 2) == [('out', 0), ('in', 1)]
    assert [hop.burst for hop in cluster.route(1, 2)] == [1e4, 1e4]


@pytest.mark.parametrize(('source', 'target', 'way'), [
    (0, 1, [0, 1]), (0, 3, [0, 3]), (3, 0, [3, 0]), (0, 4, [0, 4]),
    (0, 8, [0, 8]), (5, 11, [5, 6, 7, 11]), (1, 10, [1, 2, 10])])
def test_a_torus_goes_along_the_columns_and_then_the_rows(source, target,
                                                          way):
    cluster = Cluster(range(12), 1e9, 1e-5, torus=(3, 4))
    assert links(cluster, source, target) == list(
        zip(way, way[1:], strict=False))


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_no_way_on_a_torus_is_longer_than_needed(rows, columns, data):
    hosts = st.integers(0, rows * columns - 1)
    source, target = data.draw(hosts), data.draw(hosts)
    cluster = Cluster(range(rows * columns), 1e9, 1e-5, torus=(rows, columns))
    if source == target:
        return
    way = links(cluster, source, target)
    assert (way[0][0], way[-1][1]) == (source, target)
    needed = 0
    for one, other, count in zip(divmod(source, columns),
                                 divmod(target, columns), (rows, columns),
                                 strict=True):
        needed += min((one - other) % count, (other - one) % count)
    assert len(way) == needed
    for one, other in way:
        steps = [(a - b) % count for a, b, count in zip(
            divmod(one, columns), divmod(other, columns), (rows, columns),
            strict=True)]
        assert sum(min(step, count - step) for step, count in zip(
            steps, (rows, columns), strict=True)) == 1


def test_a_host_that_the_torus_has_not_is_an_error():
    with pytest.raises(ValueError, match='2 x 2 torus has no host 4'):
        Cluster([0, 4], 1e9, 1e-5, torus=(2, 2))


def test_a_host_in_the_switch_is_limited_by_the_others_ports_only():
    cluster = Cluster([0, 1, 2], rate=100.0, latency=1e-3,
                      in_switch=frozenset([2]))
    assert [hop.rate for hop in cluster.route(0, 2)] == [100.0, math.inf]
    assert [hop.rate for hop in cluster.route(2, 1)] == [math.inf, 100.0]
    assert [hop.rate for hop in cluster.route(0, 1)] == [100.0, 100.0]


def test_pairs_have_a_link_for_each_direction():
    cluster = Cluster.pairs(3, 1e9, 1e-5)
    assert len({links(cluster, source, target)[0] for source in range(3)
                for target in range(3) if source != target}) == 6
    for route in cluster.route(0, 1), cluster.route(2, 0):
        (_, rate, latency, burst), = route
        assert (rate, latency, burst) == (1e9, 1e-5, 0)
