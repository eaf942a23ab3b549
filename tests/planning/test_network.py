"""Messages on links take what the links' rates and latencies say."""
from chainer_fp8pipe.planning.clock import Clock
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.network import Network

import pytest


def arrivals(cluster, *messages):
    """Arrivals of messages (source, target, bytes), all sent at 0 s."""
    clock, found = Clock(), {}
    network = Network(clock, cluster)
    for message in messages:
        network.send(*message, lambda message: found.setdefault(
            message, clock.now), message)
    clock.run()
    return [found[message] for message in messages], network


def test_a_port_carries_one_message_after_the_other():
    found, network = arrivals(Cluster(range(3), 1.0, 0.5),
                              (0, 1, 2.0), (0, 2, 3.0), (1, 2, 1.0))
    # What goes to rank 2 meets there: 1.5 s, and its tail at 5.5 s.
    assert found == [2.5, 5.5, 1.5]
    assert max(network.busy.values()) == 5


def test_a_message_is_on_all_links_of_a_torus_at_a_time():
    """Two links: two latencies, but the seconds on a link once."""
    found, _ = arrivals(Cluster(range(9), 1.0, 0.5, torus=(3, 3)),
                        (0, 4, 8.0))
    assert found == [9.0]


def test_a_full_bucket_passes_a_burst_before_the_rate_counts():
    found, _ = arrivals(Cluster(range(2), 1.0, 0.5, burst=3.0),
                        (0, 1, 2.0), (0, 1, 4.0))
    assert found == [0.5, pytest.approx(0.5 + 2 + 4 - 3)]


def test_a_send_says_when_the_message_begins_and_has_left():
    network = Network(Clock(), Cluster.pairs(2, 1.0, 0.5))
    assert network.send(0, 1, 2.0, print) == (0, 2)
    assert network.send(0, 1, 1.0, print) == (2, 3)
    assert network.send(1, 0, 1.0, print) == (0, 1)
