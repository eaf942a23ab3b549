import random
import statistics

from chainer_fp8pipe.planner.network import link_findings as findings
from chainer_fp8pipe.planner.network.link_findings import Port
from chainer_fp8pipe.planner.network.link_rounds import ring_rounds
from chainer_fp8pipe.planning.clock import Clock
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.job.job_profile import Figure
from chainer_fp8pipe.planning.network import Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

MB = 1e6


def seconds_of(size, rate, latency=1e-4, burst=0.0):
    """Of one message in the engine's network."""
    clock, arrived = Clock(), []
    network = Network(clock, Cluster(range(2), rate, latency, burst=burst))
    network.send(0, 1, size, lambda: arrived.append(clock.now))
    clock.run()
    return arrived[0]


def name(rank):
    return f'host {rank}'


def rounds_of(hosts, rate, repeats=3):
    """Rates of all messages of a ring's rounds; ``rate(source, target)``."""
    return [{message: [rate(*message)] * repeats for message in messages}
            for messages in ring_rounds(range(hosts))]


@given(st.floats(1e5, 1e10), st.floats(0, 1e-3), st.floats(0, 0.9))
def test_neither_bursts_nor_latencies_change_a_rate(rate, latency, part):
    size = 0.05 * rate
    times = [seconds_of(count * size, rate, latency, part * size)
             for count in (1, 3)]
    assert findings.rates_of(size, [times] * 3) == pytest.approx([rate] * 3)


def test_a_disturbed_short_load_does_not_make_a_link_fast():
    disturbed = findings.rates_of(1 * MB, [(2.9, 3.0)])
    assert disturbed == pytest.approx([4 * MB / 3])
    one_of_three = findings.rates_of(
        1 * MB, [(1.0, 3.0), (2.9, 3.0), (1.0, 3.0)])
    assert one_of_three == pytest.approx([MB] * 3)


@given(st.floats(1e6, 1e8), st.floats(1e-6, 1e-4), st.floats(1e5, 1e6))
def test_the_burst_is_that_of_the_token_bucket(rate, latency, burst):
    times = [seconds_of(size, rate, latency, burst) for size in (1, 4e6)]
    found = findings.burst(rate, 4e6, *times)
    assert found == pytest.approx(burst, rel=1e-3)


def test_a_link_without_a_bucket_has_no_burst():
    times = [seconds_of(size, 1e8, 1e-4) for size in (1, 4e6)]
    assert findings.burst(1e8, 4e6, *times) == 0
    assert findings.burst(1e8, 4e6, times[0], 1.1 * times[1]) == 0


def test_a_load_within_the_burst_gives_its_own_size():
    times = [seconds_of(size, 1e8, 1e-4, 1e7) for size in (1, 4e6)]
    assert findings.burst(1e8, 4e6, *times) == pytest.approx(4e6)


@pytest.mark.parametrize('hosts', [3, 4, 5, 8, 13])
def test_a_slow_port_is_found_and_its_peers_are_not(hosts):
    slow = hosts - 2
    rounds = rounds_of(hosts, lambda source, target: (
        10 * MB if slow in (source, target) else 100 * MB))
    found = findings.ports(rounds)
    assert {rank for rank, port in found.items()
            if statistics.median(port.slower) < 50 * MB} == {slow}
    said, = findings.slow_ports(found, name)
    assert f'host {slow} sends 10 MB/s and receives 10 MB/s' in said
    assert 'the median host 100 MB/s' in said
    assert findings.slow_pairs(rounds, found, name) == ()
    assert findings.slowest([port.slower for port in found.values()]
                            ) == Figure(10 * MB)


def test_a_port_that_is_slow_in_one_direction_is_found():
    rounds = rounds_of(5, lambda source, target: (
        10 * MB if target == 2 else 100 * MB))
    said, = findings.slow_ports(findings.ports(rounds), name)
    assert 'host 2 sends 100 MB/s and receives 10 MB/s' in said


def test_where_most_ports_are_slow_the_fast_one_is_the_measure():
    fast = {rank: Port([100 * MB] * 3, [100 * MB] * 3) for rank in range(3)}
    fast[3] = Port([300 * MB] * 3, [300 * MB] * 3)
    said = findings.slow_ports(fast, name)
    assert [text[:6] for text in said] == ['host 0', 'host 1', 'host 2']
    assert all('the fastest one 300 MB/s' in text for text in said)


@pytest.mark.parametrize('hosts', [3, 4, 5, 8])
def test_a_slow_pair_is_found_and_its_ports_are_not(hosts):
    slow = ring_rounds(range(hosts))[0][1]
    rounds = rounds_of(hosts, lambda *message: (
        20 * MB if message == slow else 100 * MB))
    found = findings.ports(rounds)
    assert findings.slow_ports(found, name) == ()
    said, = findings.slow_pairs(rounds, found, name)
    assert said.startswith(f'host {slow[0]} sends host {slow[1]} 20 MB/s')
    assert 'pass 100 MB/s' in said


def test_a_slow_link_is_found():
    rounds = rounds_of(9, lambda *message: (
        20 * MB if message == (4, 5) else 100 * MB))
    said, = findings.slow_links(rounds, name)
    assert said.startswith('host 4 sends host 5 20 MB/s')


def test_equal_links_are_not_remarked_on():
    rounds = rounds_of(6, lambda source, target: (100 + source) * MB)
    found = findings.ports(rounds)
    assert findings.slow_ports(found, name) == ()
    assert findings.slow_pairs(rounds, found, name) == ()
    assert findings.slow_links(rounds, name) == ()


def company(share, repeats=5):
    """Of four hosts: each message alone, and all together."""
    together = rounds_of(4, lambda *message: share * 100 * MB, repeats)
    alone = [{message: [100 * MB] * repeats for message in
              (next(iter(rates)), next(iter(rates))[::-1])}
             for rates in together]
    return together, alone


@pytest.mark.parametrize('share', [0.95, 1.0, 1.1])
def test_hosts_share_nothing_if_company_hardly_slows_them_down(share):
    assert findings.trunk(*company(share)) is None


def test_the_trunk_is_what_all_get_together_in_the_slowest_round():
    together, alone = company(0.5)
    together[1] = {message: [40 * MB] * 5 for message in together[1]}
    assert findings.trunk(together, alone) == Figure(160 * MB)


def test_a_few_disturbed_repeats_are_no_trunk():
    together, alone = company(1.0)
    for rates in together:
        for values in rates.values():
            values[0] = values[1] = 60 * MB
            values[2] = 85 * MB
    assert findings.trunk(together, alone) is None


def test_half_duplex_links_are_remarked_on():
    one_way = {(0, 1): [100 * MB] * 3}
    both = [{(0, 1): [52 * MB] * 3, (1, 0): [48 * MB] * 3}]
    said, = findings.half_duplex(one_way, both)
    assert '100 MB/s in one direction alone, 50 MB/s in each' in said
    assert findings.half_duplex(one_way, [{(0, 1): [90 * MB] * 3}]) == ()


@given(st.integers(0, 10 ** 6), st.integers(2, 40), st.floats(0.01, 0.1))
def test_the_slowest_of_equal_ports_is_not_taken_for_slow(
        seed, ports, noise):
    draw = random.Random(seed)
    found = [[draw.gauss(100 * MB, noise * 100 * MB) for _ in range(7)]
             for _ in range(ports)]
    # Chance is allowed for once, and the mean of all is close to the rate.
    figure = findings.slowest(found)
    assert figure.value > (1 - 3 * noise) * 100 * MB
    assert figure.value < (1 + 2 * noise) * 100 * MB


@given(st.integers(0, 10 ** 6), st.integers(2, 40))
def test_a_port_that_is_clearly_slower_counts(seed, ports):
    draw = random.Random(seed)
    found = [[draw.uniform(98, 102) * MB for _ in range(7)]
             for _ in range(ports)]
    found[-1] = [value / 2 for value in found[-1]]
    assert findings.slowest(found) == Figure.of(found[-1])


def test_hosts_are_told_apart_by_the_rates_of_their_ranks():
    rounds = [{(0, 1): [4.0, 2.0], (1, 0): [4.0, 2.0], (2, 3): [1.0, 1.0]}]
    assert findings.by_host(rounds, [0, 0, 1, 1]) == [[4.0, 2.0], [1.0, 1.0]]


def test_ranks_that_slow_each_other_down_are_remarked_on():
    said, = findings.said_sharing(9e9, 3.39e9)
    assert '9 GB/s to each other' in said
    assert 'at once 3.39 GB/s each' in said
    assert findings.said_sharing(4e9, 3.39e9) == ()


def test_the_trunk_is_said_with_the_rate_of_a_pair():
    said = findings.said_trunk(150 * MB, 118 * MB)
    assert 'share 150 MB/s' in said
    assert 'a pair alone gets 118 MB/s' in said


@pytest.mark.parametrize(('rate', 'text'), [
    (59.7e6, '59.7 MB/s'), (1.25e9, '1.25 GB/s'), (12e3, '12 kB/s')])
def test_rates_have_units(rate, text):
    assert findings.said_rate(rate) == text
