import math

from chainer_fp8pipe.planner.network.link_rounds import ring_rounds
from chainer_fp8pipe.planner.network.peers import Peers
from chainer_fp8pipe.planner.network.timed_messages import (
    BETWEEN_HOSTS,
    INSIDE_HOSTS,
    Load,
    answered_stream,
    nap_work,
    ping,
    stream,
    work,
)

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

PATIENT = 300, 300


@pytest.mark.parametrize('size', [1 << power for power in range(10, 31)])
def test_a_load_has_as_many_bytes_as_asked_for(size):
    load = Load.of(size)
    assert load.size == max(size, 1 << 14)
    assert 1 << 14 <= load.frame <= 1 << 20
    assert load.times(3).size == 3 * load.size
    assert load.times(3).frame == load.frame


def nothing_is_left(comm):
    comm.Barrier()
    return not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


@pytest.mark.parametrize('alert', [0.0, BETWEEN_HOSTS, INSIDE_HOSTS])
@pytest.mark.parametrize('size', [1, 1 << 20, 40 << 20])
@on_ranks(2, 3)
def test_each_source_has_a_time_when_its_load_was_here(comm, size, alert):
    members = range(comm.size)
    for messages in ring_rounds(members):
        seconds, = stream(Peers(comm, *PATIENT), members, messages,
                          Load.of(size), alert)
        assert 0 < seconds < math.inf
    assert nothing_is_left(comm)


@on_ranks(3)
def test_times_are_those_of_sources_in_the_order_of_the_round(comm):
    messages = (1, 0), (2, 0), (0, 2)
    seconds = stream(Peers(comm, *PATIENT), range(3), messages, Load.of(1),
                     0.0)
    assert len(seconds) == [2, 0, 1][comm.rank]
    assert nothing_is_left(comm)


@on_ranks(3)
def test_who_sends_knows_when_the_answer_was_here(comm):
    messages = (0, 1), (2, 1)
    seconds = answered_stream(Peers(comm, *PATIENT), range(3), messages,
                              Load.of(1 << 18))
    assert len(seconds) == [1, 0, 1][comm.rank]
    assert all(0 < value < math.inf for value in seconds)
    assert nothing_is_left(comm)


@on_ranks(2, 3, 4)
def test_pings_return_over_any_round(comm):
    peers, members = Peers(comm, *PATIENT), range(comm.size)
    for messages in ring_rounds(members):
        assert 0 < ping(peers, members, messages, 3) < math.inf
    only = ping(peers, members, ((0, 1), (1, 0)), 3)
    assert math.isnan(only) == (comm.rank > 1)
    assert nothing_is_left(comm)


@on_ranks(2, 3)
def test_work_is_of_the_processor_and_naps_are_counted(comm):
    peers, members = Peers(comm, *PATIENT), range(comm.size)
    awake = work(peers, members, Load(1 << 14, 4), 0.0)
    assert awake.naps == 0
    asleep = work(peers, members, Load(1, 64), 0.1)
    assert asleep.naps >= 1
    assert asleep.seconds >= 0.1 * asleep.naps
    assert 0 < asleep.busy < asleep.seconds
    assert nap_work(peers, 0.01) > 0
    assert nothing_is_left(comm)
