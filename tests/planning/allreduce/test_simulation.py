"""Simulated exchanges take what formulas and hand say."""
from chainer_fp8pipe.allreduce.plan import (
    Instruction,
    Opcode,
    Plan,
    aggregator,
    compose,
    direct,
    ring,
    torus2d,
)
from chainer_fp8pipe.planning.allreduce.codec_costs import CodecCosts
from chainer_fp8pipe.planning.allreduce.plan_checker import check
from chainer_fp8pipe.planning.allreduce.simulation import simulate
from chainer_fp8pipe.planning.cluster import Cluster

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...allreduce.plans import plans

quick = settings(max_examples=60)

RATE, LATENCY = 1e9, 1e-4
FLOAT32 = CodecCosts(4, 4)
WHOLE = {'frame_bytes': 1 << 40, 'frames_in_flight': 1}
MANY = {'frame_bytes': 4000, 'frames_in_flight': 1000}


def star(ranks, **others):
    return Cluster(range(ranks), RATE, LATENCY, **others)


def seconds(plans, cluster, codec=FLOAT32, elements=240_000, **framing):
    return simulate(plans, cluster, codec, elements,
                    **{**WHOLE, **framing}).seconds


# --- closed forms ------------------------------------------------------------

@pytest.mark.parametrize('ranks', [1, 2, 3, 5, 8])
def test_a_ring_takes_as_many_steps_as_it_has_neighbours_twice(ranks):
    """2 (P - 1) (alpha + n / (P B)): Patarasuk and Yuan 2009."""
    assert seconds([ring(ranks)], star(ranks)) == pytest.approx(
        2 * (ranks - 1) * (LATENCY + 4 * 240_000 / ranks / RATE))


@pytest.mark.parametrize('ranks', [1, 2, 3, 5, 8])
def test_direct_takes_two_steps(ranks):
    assert seconds([direct(ranks)], star(ranks)) == pytest.approx(
        2 * (ranks > 1) * (LATENCY + (ranks - 1) * 4 * 240_000 / ranks
                           / RATE))


@pytest.mark.parametrize('workers', [1, 2, 5])
def test_one_aggregator_takes_all_workers_vectors_through_its_port(workers):
    vector = 4 * 240_000 / RATE
    plan, cluster = aggregator(workers, 1), star(workers + 1)
    assert seconds([plan], cluster) == pytest.approx(
        2 * (LATENCY + workers * vector))
    # Cut through, results go out while contributions come in.
    assert seconds([plan], cluster, **MANY) == pytest.approx(
        2 * LATENCY + workers * vector, rel=5e-3)


def test_as_many_aggregators_as_workers_need_half_of_a_long_rings_time():
    vector = 4 * 240_000 / RATE
    assert seconds([aggregator(8, 8)], star(16), frame_bytes=1000,
                   frames_in_flight=1000) == pytest.approx(
        2 * LATENCY + vector, rel=0.03)


@pytest.mark.parametrize('edge', [2, 3, 4])
def test_a_torus_uses_both_dimensions_at_a_time(edge):
    """2 (X - 1) (2 alpha + n / (2 X B) (1 + 1 / X)) on an X x X torus."""
    ranks = edge ** 2
    half = 4 * 240_000 / 2 / RATE
    assert seconds(torus2d(edge, edge),
                   star(ranks, torus=(edge, edge))) == pytest.approx(
        2 * (edge - 1) * (2 * LATENCY + half / edge * (1 + 1 / edge)),
        rel=1e-3)


def test_on_cables_a_torus_takes_half_of_a_rings_time():
    cluster = Cluster(range(9), RATE, 1e-7, torus=(3, 3))
    along = Cluster([0, 1, 2, 5, 3, 4, 7, 8, 6], RATE, 1e-7, torus=(3, 3))
    framing = {'frame_bytes': 1 << 12, 'frames_in_flight': 8}
    assert seconds([ring(9)], along, **framing) == pytest.approx(
        2 * seconds(torus2d(3, 3), cluster, **framing), rel=0.02)


def test_a_ring_that_jumps_over_hosts_pays_for_it():
    """From the end of a row to the start of the next one are two links."""
    jumps = seconds([ring(9)], star(9, torus=(3, 3)))
    along = seconds([ring(9)], Cluster(
        [0, 1, 2, 5, 3, 4, 7, 8, 6], RATE, LATENCY, torus=(3, 3)))
    # A block's way round of 8 steps crosses all three jumps but one at least.
    assert jumps > along + 2 * 2 * LATENCY


@pytest.mark.parametrize('size', [500, 1000, 5000])
def test_an_idle_link_passes_a_burst_at_once(size):
    """What is longer takes its rate: a token bucket."""
    burst = 1000        # which fills again within a latency
    assert seconds([direct(2)], star(2, burst=burst), CodecCosts(1, 1),
                   elements=2 * size) == pytest.approx(
        2 * (LATENCY + max(size - burst, 0) / RATE))


@pytest.mark.parametrize('torus', [None, (2, 2)])
def test_a_link_that_is_busy_has_passed_its_burst(torus):
    burst, framing = 1e5, {'frame_bytes': 1 << 12, 'frames_in_flight': 100}
    without, with_burst = (seconds(
        [ring(4)], Cluster([0, 1, 3, 2], RATE, 1e-6, torus=torus,
                           burst=bytes_), **framing)
        for bytes_ in (0, burst))
    assert without - with_burst == pytest.approx(burst / RATE, rel=0.02)


def test_two_levels_share_a_hosts_port():
    """Four hosts of two ranks; in the host all is free.

    While one rank waits for its messages the other one uses the port.
    """
    plan = compose(direct(2), direct(4),
                   lambda member, host: 2 * host + member, True)
    cluster = Cluster([0, 0, 1, 1, 2, 2, 3, 3], RATE, LATENCY)
    assert seconds([plan], cluster) == pytest.approx(
        LATENCY + 2 * 3 / 4 * 4 * 240_000 / RATE)


# --- parts of the time -------------------------------------------------------

def test_wires_of_a_byte_take_a_quarter():
    cluster = Cluster(range(4), RATE, 0.0)
    assert seconds([ring(4)], cluster, CodecCosts(1, 1)) == pytest.approx(
        seconds([ring(4)], cluster) / 4)


def test_partial_sums_travel_in_their_own_size():
    """A ring of four: 1 contribution, 2 partial sums, 3 results."""
    cluster = Cluster(range(4), RATE, 0.0)
    assert seconds([ring(4)], cluster, CodecCosts(1, 4)) == pytest.approx(
        (1 + 2 * 4 + 3) * 60_000 / RATE)


@pytest.mark.parametrize(('cost', 'elements'), [
    ('add', 60_000), ('add_partial', 120_000), ('add_own', 180_000),
    ('pack', 120_000), ('mean', 60_000), ('encode', 0), ('decode', 0)])
def test_every_operation_of_the_codec_counts_as_often_as_it_is_done(
        cost, elements):
    """In a ring of four, all in one chain; rates are in elements."""
    cluster = star(4)
    slow = CodecCosts(4, 4, **{cost: 1e6})
    timing = simulate([ring(4)], cluster, slow, 240_000, **WHOLE)
    assert timing.rank_seconds == pytest.approx(elements / 1e6)
    assert timing.seconds == pytest.approx(
        seconds([ring(4)], cluster) + elements / 1e6)


def test_a_switch_that_aggregates_waits_for_the_tail_of_a_message():
    """Its own port is no limit, but the workers' are."""
    cluster = star(4, in_switch=frozenset([3]))
    assert seconds([aggregator(3, 1)], cluster) == pytest.approx(
        2 * (LATENCY + 4 * 240_000 / RATE))
    assert seconds([aggregator(3, 1)], cluster, **MANY) == pytest.approx(
        2 * LATENCY + 4 * (240_000 + 1000) / RATE)


def test_an_aggregator_has_no_contribution_to_add():
    timing = simulate([aggregator(3, 1)], star(4),
                      CodecCosts(4, 4, add_own=1.0), 1000, **WHOLE)
    assert timing.rank_seconds == 0


def test_a_mean_of_one_is_not_encoded():
    assert seconds([ring(1)], star(1), CodecCosts(4, 4, mean=1.0)) == 0


def test_messages_keep_both_ranks_busy():
    cluster = star(2, message_cost=1e-3, byte_cost=1e-8)
    size = 4 * 120_000
    assert seconds([ring(2)], cluster) == pytest.approx(
        2 * (LATENCY + size / RATE + 2 * (1e-3 + 1e-8 * size)))


def test_ranks_that_share_a_core_wait_for_each_other():
    costs = CodecCosts(4, 4, mean=1e6)
    alone = star(4)
    two = star(4, cores=1, sharing=2)
    half = star(4, cores=2, sharing=4)
    network = seconds([direct(4)], alone)
    encoding = 60_000 / 1e6
    assert seconds([direct(4)], alone, costs) == pytest.approx(
        network + encoding)
    for cluster in two, half:
        assert seconds([direct(4)], cluster, costs) == pytest.approx(
            network + 2 * encoding, rel=1e-2)


@pytest.mark.parametrize(('time_slice', 'end'), [(0.0, 6), (1.5, 5)])
def test_a_rank_keeps_a_core_that_others_wait_for_its_time_slice(
        time_slice, end):
    """Every message takes 1 s of its sender and 1 s of rank 2.

    In turns, on one core, those of rank 0 arrive at 1 and 3 s, of rank 1 at 2
    and 4 s.  If rank 0 keeps the core, its second one arrives at 2 s already.
    """
    blocks = (0, 1), (1, 2)
    plan = Plan('own', 3, 3, 2, (
        *(tuple(Instruction(Opcode.SEND_PARTIAL, 2,
                            *block) for block in blocks)
          for rank in (0, 1)),
        tuple(Instruction(Opcode.RECEIVE_PARTIAL, rank, *block)
              for rank in (0, 1) for block in blocks)), ((), (), ((0, 2),)),
        3, ((), (), ()))
    cluster = Cluster(range(3), 1e12, 0.0, message_cost=1.0, cores=1,
                      sharing=2, time_slice=time_slice)
    assert seconds([plan], cluster, elements=2) == pytest.approx(end)


def test_chunks_hide_latency_if_enough_are_in_flight():
    cluster = Cluster(range(4), RATE, 1e-3)
    chunk = {'frame_bytes': 4 * 6000}           # of ten
    alone = 6 * (1e-3 + 24_000 / RATE)
    assert seconds([ring(4)], cluster, frames_in_flight=1,
                   **chunk) == pytest.approx(10 * alone)
    assert seconds([ring(4)], cluster, frames_in_flight=10,
                   **chunk) == pytest.approx(alone + 9 * 24_000 / RATE)


@pytest.mark.parametrize('in_flight', [1, 3])
def test_frames_are_encoded_before_they_leave_and_decoded_in_the_end(
        in_flight):
    """In the time of other frames, where others are in flight."""
    cluster = Cluster(range(2), 1e6, 0.0)
    codec = CodecCosts(1, 1, encode=1e6, decode=1e6, by_frame=True)
    # Both ranks send half of each chunk of 2,000 elements, twice.  Their own
    # half they encode while the other one's message is on its way.
    found = seconds([direct(2)], cluster, codec, 12_000, frame_bytes=1000,
                    frames_in_flight=in_flight)
    assert found == pytest.approx(6 * 5e-3 if in_flight == 1 else
                                  6 * 4e-3, rel=0.1)


def test_a_chunk_ends_when_what_it_sent_has_left():
    """One in flight; a message takes 1 s on a link, and 1 s to be added.

    Three workers' messages arrive at 1, 2 and 3 s and are added by 4 s; the
    last result has left at 7 s.  The next chunk's first message is there at 6
    s, but its first sum starts at 7 s.
    """
    codec = CodecCosts(1, 1, add=1000.0)
    assert seconds([aggregator(3, 1)], Cluster(range(4), 1000.0, 0.0), codec,
                   elements=2000, frame_bytes=1000) == pytest.approx(13)


def test_what_is_busy_is_counted():
    timing = simulate([direct(4)], star(4, message_cost=1e-6), FLOAT32,
                      240_000, frame_bytes=24_000, frames_in_flight=4)
    assert timing.link_seconds == pytest.approx(
        2 * 3 / 4 * 4 * 240_000 / RATE)
    assert timing.rank_seconds == pytest.approx(10 * 12 * 1e-6)
    assert timing.seconds > timing.link_seconds


# --- in general --------------------------------------------------------------

@quick
@given(plans(9), st.sampled_from([0, 1, 3, 1000]), st.integers(1, 300),
       st.integers(1, 3))
def test_every_plan_comes_to_an_end_and_sends_what_the_checker_counts(
        plan, elements, frame, in_flight):
    cluster = Cluster(range(plan.ranks), RATE, LATENCY, message_cost=1e-6,
                      cores=2, sharing=3)
    timing = simulate([plan], cluster, CodecCosts(1, 1), elements,
                      frame_bytes=frame, frames_in_flight=in_flight)
    report = check(plan)
    sent = max(sum(float(traffic.elements) for traffic in way(rank).values())
               for rank in range(plan.ranks)
               for way in (report.sent, report.received))
    # Blocks differ by one element, of which a rank sends each twice at most.
    assert timing.link_seconds == pytest.approx(
        sent * elements / RATE, abs=4 * plan.ranks * plan.blocks / RATE)
    assert timing.seconds >= timing.link_seconds
    if elements >= plan.blocks:
        assert timing.seconds >= report.steps * LATENCY


def test_a_message_that_arrives_early_waits_for_its_step():
    """Rank 0 is asked for rank 1's contribution after rank 2's late one."""
    plan = Plan('own', 3, 3, 1, (
        (Instruction(Opcode.RECEIVE_PARTIAL, 2, 0, 1),
         Instruction(Opcode.RECEIVE_PARTIAL, 1, 0, 1),
         ), (Instruction(Opcode.SEND_PARTIAL, 0, 0, 1),),
        (Instruction(Opcode.SEND_PARTIAL, 0, 0, 1),)), (((0, 1),), (), ()), 3,
        ((), (), ()))
    cluster = Cluster([0, 1, 0], 1e6, 0.0, local_latency=5.0)
    assert seconds([plan], cluster, CodecCosts(1, 1, add=1e6),
                   elements=1_000_000) == pytest.approx(7)


def test_a_plan_of_other_ranks_is_an_error():
    with pytest.raises(ValueError, match='for 3 ranks, the cluster has 2'):
        seconds([ring(3)], star(2))
