"""Estimates are near simulations, and the documentation's come out of them."""
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from chainer_fp8pipe.allreduce.plan import (
    aggregator,
    compose,
    direct,
    ring,
    torus2d,
)
from chainer_fp8pipe.planning.allreduce.codec_costs import CodecCosts
from chainer_fp8pipe.planning.allreduce.demand import (
    aggregator_demand,
    compose_demand,
    direct_demand,
    ring_demand,
    torus2d_demand,
)
from chainer_fp8pipe.planning.allreduce.prediction import (
    estimate,
    total_seconds,
)
from chainer_fp8pipe.planning.allreduce.simulation import simulate
from chainer_fp8pipe.planning.cluster import Cluster

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]

quick = settings(max_examples=20)

FLOAT32 = CodecCosts(4, 4, add=2.6e9, add_partial=2.6e9)
FP8 = CodecCosts(1, 4, add=4.3e9, add_partial=2.6e9, add_own=4.3e9,
                 pack=3.9e9, mean=8e8)
CODECS = {'float32': FLOAT32, 'fp8': FP8, 'fp8, all of it': CodecCosts(
    1, 4, add=4.3e9, add_partial=2.6e9, add_own=4.3e9, pack=3.9e9, mean=8e8,
    encode=9e8, decode=2.4e9, by_frame=True)}
FRAMING = {'frame_bytes': 1 << 17, 'frames_in_flight': 8}


def two_level(edge):
    return compose(direct(edge), ring(edge),
                   lambda member, group: edge * group + member, True)


#: Plans and demands of edge x edge ranks.
ALGORITHMS = {
    'ring': lambda edge: ((ring(edge ** 2),), (ring_demand(edge ** 2),)),
    'direct': lambda edge: ((direct(edge ** 2),), (direct_demand(edge ** 2),)),
    'torus2d': lambda edge: (torus2d(edge, edge), torus2d_demand(edge, edge)),
    'two levels': lambda edge: ((two_level(edge),), (compose_demand(
        direct_demand(edge), ring_demand(edge), True),)),
}


def both(name, edge, cluster, codec, elements, **framing):
    plans, demands = ALGORITHMS[name](edge)
    framing = {**FRAMING, **framing}
    cluster = Cluster(range(plans[0].ranks), **cluster)
    return (estimate(demands, cluster, codec, elements, **framing),
            simulate(plans, cluster, codec, elements, **framing))


@pytest.mark.parametrize('name', ALGORITHMS)
@quick
@given(edge=st.integers(2, 4), latency=st.floats(1e-6, 1e-4),
       rate=st.sampled_from([0.5, 1, 10, 100]),
       codec=st.sampled_from([*CODECS]),
       elements=st.sampled_from([10_000, 300_000, 1_000_000]))
def test_an_estimate_is_near_the_simulation(name, edge, latency, rate, codec,
                                            elements):
    cluster = {'rate': rate * 1.25e8, 'latency': latency,
               'message_cost': 1e-6}
    guess, timing = both(name, edge, cluster, CODECS[codec], elements)
    # Which of two plans' messages waits for which is more than it knows.
    assert guess.seconds == pytest.approx(
        timing.seconds, rel=0.2 if name == 'torus2d' else 0.15)


@pytest.mark.parametrize('name', ['ring', 'direct', 'two levels'])
@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('latency', [1e-6, 1e-4])
def test_a_chunk_that_is_alone_takes_what_the_simulation_says(name, codec,
                                                              latency):
    """Work in a rank hides latency, and encoding hides in waiting."""
    cluster = {'rate': 1.25e9, 'latency': latency, 'message_cost': 1e-6}
    guess, timing = both(name, 4, cluster, CODECS[codec], 160_000,
                         frame_bytes=1 << 20)
    assert guess.seconds == pytest.approx(timing.seconds, rel=0.01)


def test_both_halves_of_a_torus_share_a_port():
    cluster = {'rate': 3.125e9, 'latency': 1e-4, 'message_cost': 1e-6}
    guess, timing = both('torus2d', 2, cluster, CodecCosts(1, 1), 1_000_000,
                         frame_bytes=1 << 20)
    assert guess.seconds == pytest.approx(timing.seconds, rel=0.01)


def test_a_small_last_chunk_has_as_many_messages():
    cluster = {'rate': 1.25e10, 'latency': 1e-6, 'message_cost': 1e-6}
    guess, timing = both('direct', 4, cluster, CodecCosts(1, 1), 160_000,
                         frame_bytes=9_000)
    assert guess.seconds == pytest.approx(timing.seconds, rel=0.03)


def test_ranks_are_busy_in_one_phase_and_wait_in_another():
    """All chunks sum at the same time, and then wait at the same time."""
    cluster = {'rate': 5e10, 'latency': 1e-4, 'message_cost': 1e-6}
    guess, timing = both('ring', 5, cluster, FLOAT32, 12_000_000,
                         frame_bytes=1 << 19, frames_in_flight=6)
    assert timing.seconds > 1.2 * timing.rank_seconds
    assert guess.seconds == pytest.approx(timing.seconds, rel=0.1)


def test_long_chains_keep_chunks_side_by_side():
    cluster = {'rate': 5e10, 'latency': 1e-4, 'message_cost': 1e-6}
    guess, timing = both('ring', 4, cluster, CODECS['fp8, all of it'],
                         6_000_000, frame_bytes=1 << 14, frames_in_flight=4)
    assert timing.seconds > 1.1 * timing.rank_seconds
    assert guess.seconds == pytest.approx(timing.seconds, rel=0.1)


@pytest.mark.parametrize('in_switch', [False, True])
@pytest.mark.parametrize('aggregators', [1, 4])
@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('elements', [50_000, 4_000_000])
def test_an_estimate_of_aggregators_is_near_the_simulation(
        in_switch, aggregators, codec, elements):
    ranks = 8 + aggregators
    cluster = Cluster(
        range(ranks), 1.25e9, 1e-5, message_cost=1e-6,
        in_switch=frozenset(range(8, ranks) if in_switch else ()))
    guess = estimate([aggregator_demand(8, aggregators)], cluster,
                     CODECS[codec], elements, **FRAMING)
    timing = simulate([aggregator(8, aggregators)], cluster, CODECS[codec],
                      elements, **FRAMING)
    assert guess.seconds == pytest.approx(timing.seconds, rel=0.12)
    assert guess.link_seconds == pytest.approx(timing.link_seconds, rel=0.01)
    assert guess.rank_seconds == pytest.approx(timing.rank_seconds, rel=0.01)


@pytest.mark.parametrize('edge', [2, 3, 5])
def test_an_estimate_is_near_the_simulation_of_cables(edge):
    cluster = {'rate': 2.5e7, 'latency': 5e-5, 'torus': (edge, edge),
               'message_cost': 1e-6}
    guess, timing = both('torus2d', edge, cluster, FLOAT32, 2_000_000)
    assert guess.seconds == pytest.approx(timing.seconds, rel=0.05)


@pytest.mark.parametrize('name', ALGORITHMS)
@pytest.mark.parametrize('codec', CODECS)
def test_what_is_busy_is_what_the_simulation_counts(name, codec):
    cluster = {'rate': 1.25e8, 'latency': 1e-5, 'message_cost': 1e-6,
               'byte_cost': 1e-10}
    guess, timing = both(name, 4, cluster, CODECS[codec], 1_600_000,
                         frame_bytes=25_000)
    assert guess.link_seconds == pytest.approx(timing.link_seconds)
    assert guess.rank_seconds == pytest.approx(timing.rank_seconds)


def test_a_ring_of_thousands_takes_its_formula():
    """2 (P - 1) (alpha + n / (P B))."""
    cluster = Cluster((), 1e9, 1e-5)
    found = estimate([ring_demand(4096)], cluster, CodecCosts(4, 4),
                     4_096_000, frame_bytes=1 << 20, frames_in_flight=1)
    assert found.seconds == pytest.approx(2 * 4095 * (1e-5 + 4000 / 1e9))


def test_a_torus_of_thousands_takes_its_formula():
    """2 (X - 1) (2 alpha + n / (2 X B) (1 + 1 / X)), both halves at once."""
    cluster = Cluster((), 1e9, 1e-5, torus=(64, 64))
    found = estimate(torus2d_demand(64, 64), cluster, CodecCosts(4, 4),
                     4_096_000, frame_bytes=1 << 20, frames_in_flight=1)
    half = 4 * 4_096_000 / 2 / 1e9
    assert found.seconds == pytest.approx(
        2 * 63 * (2e-5 + half / 64 * (1 + 1 / 64)))


def test_frames_one_after_the_other_pay_each_latency():
    cluster = Cluster((), 1e9, 1e-3)
    one, ten = (estimate([ring_demand(4)], cluster, CodecCosts(1, 1), 400_000,
                         frame_bytes=10_000, frames_in_flight=in_flight)
                for in_flight in (1, 10))
    alone = 6 * (1e-3 + 1e-5)
    assert one.seconds == pytest.approx(10 * alone)
    assert ten.seconds == pytest.approx(alone + 9 * 1e-5)


def test_shared_cores_take_as_much_longer():
    codec = CodecCosts(1, 1, mean=1e6)
    alone, shared = (
        estimate([direct_demand(4)], Cluster((), math.inf, 0.0, cores=cores,
                                             sharing=sharing), codec, 4000,
                 frame_bytes=1 << 20, frames_in_flight=1)
        for cores, sharing in ((1, 1), (2, 5)))
    assert alone.seconds == pytest.approx(1e-3)
    assert shared.seconds == pytest.approx(2.5e-3)


def test_nothing_takes_no_time():
    found = estimate([ring_demand(4)], Cluster((), 1e9, 1.0), FLOAT32, 0,
                     frame_bytes=1, frames_in_flight=1)
    assert found == (0, 0, 0)


def test_encoding_and_decoding_come_on_top():
    timing = estimate([ring_demand(4)], Cluster((), 1e9, 1e-5), FLOAT32, 1000,
                      **FRAMING)
    codec = CodecCosts(1, 1, encode=1e3, decode=1e4)
    assert total_seconds(timing, codec, 1000) == pytest.approx(
        timing.seconds + 1.1)


def test_encoding_and_decoding_by_frames_are_in_the_exchange():
    codec = CodecCosts(1, 1, encode=1e3, decode=1e4, by_frame=True)
    cluster = Cluster((), 1e9, 1e-5)
    for in_flight in (1, 8):
        timing = estimate([ring_demand(4)], cluster, codec, 1000,
                          frame_bytes=25, frames_in_flight=in_flight)
        assert total_seconds(timing, codec, 1000) == timing.seconds
        assert timing.seconds == pytest.approx(1.1, rel=2e-3)


def test_ranks_that_share_a_host_must_be_simulated():
    with pytest.raises(ValueError, match='must be simulated'):
        estimate([ring_demand(2)], Cluster([0, 0], 1e9, 1e-5), FLOAT32, 10,
                 **FRAMING)


# --- the page ----------------------------------------------------------------

def test_the_tables_of_the_page_are_those_of_the_script():
    script = ROOT / 'benchmarks' / 'allreduce_model.py'
    printed = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)}).stdout
    page = (ROOT / 'docs' / 'allreduce_model.rst').read_text()
    tables = re.findall(r'\.\. code-block:: text\n\n((?:(?:   .*)?\n)+)', page)
    assert len(tables) >= 4
    for table in tables:
        for line in table.strip('\n').splitlines():
            assert line[3:] in printed.splitlines(), line
