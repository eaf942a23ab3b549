import itertools
import re
from types import SimpleNamespace

from chainer_fp8pipe.planner.network import peers as module
from chainer_fp8pipe.planner.network.peers import Peers

import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks


@on_ranks(1, 2, 3, 4, 5)
def test_all_ranks_gather_the_same_bits(comm):
    own = numpy.array([comm.rank, numpy.nan, 1 / (comm.rank + 3)])
    found = Peers(comm, 300, 300).gather(own)
    assert found.tobytes() == numpy.array(comm.allgather(own)).tobytes()


@on_ranks(4, 5)
def test_some_ranks_gather_in_the_order_of_the_members(comm):
    members = [3, 0, 2]
    if comm.rank in members:
        found = Peers(comm, 300, 300).gather(numpy.ones(2) * comm.rank,
                                             members)
        assert found.tolist() == [[3, 3], [0, 0], [2, 2]]


@on_ranks(1, 2, 5)
def test_ranks_meet_and_leave_no_message(comm):
    peers = Peers(comm, 300, 300)
    for _ in range(3):
        peers.meet()
        peers.sync(range(comm.size))
    comm.Barrier()
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


@on_ranks(2)
def test_a_rank_that_does_not_answer_is_named_with_what_to_check(comm):
    if comm.rank == 0:
        peers = Peers(comm, 0.5, 300)
        with (pytest.raises(RuntimeError) as raised,
              peers.failing_together()):
            peers.meet()
        said = str(raised.value)
        waited, = re.match(r'rank 0 has waited (\S+) s for a message of rank '
                           '1: check', said).groups()
        assert float(waited) >= 0.5         # more where others need the core
        assert 'firewall' in said


@on_ranks(3, 4)
def test_all_ranks_that_can_be_reached_hear_who_does_not_answer(comm):
    def act():
        peers = Peers(comm, 2, 300)
        with peers.failing_together():
            peers.meet()
            peers.sync(range(comm.size))
    if comm.rank != 2:
        with pytest.raises(RuntimeError, match=r'of rank (\d, )*2') as raised:
            act()
        said = comm.Split(0, comm.rank).allgather(str(raised.value))
        assert all('waited' in text for text in said)
    else:
        comm.Split(1, comm.rank)


@on_ranks(2, 3)
def test_an_error_on_one_rank_reaches_all(comm):
    peers = Peers(comm, 300, 300)

    def act():
        with peers.failing_together():
            if comm.rank == 1:
                raise ValueError('so it goes')
            peers.sync(range(comm.size))
    with pytest.raises(RuntimeError,
                       match='rank 1 failed: ValueError: so it goes'):
        act()


@on_ranks(2)
def test_what_mpi_does_for_all_ranks_gives_its_result_or_its_error(comm):
    peers = Peers(comm, 300, 300)
    assert peers.in_time(lambda: comm.allreduce(1)) == 2
    with pytest.raises(ZeroDivisionError):
        peers.in_time(lambda: 1 // 0)


def test_what_mpi_does_for_all_ranks_may_not_hang():
    peers = Peers(MPI.COMM_SELF, 0.2, 300)
    never = MPI.COMM_SELF.irecv(source=0, tag=7)
    with pytest.raises(RuntimeError, match='rank 0 has waited'):
        peers.in_time(lambda: never.wait())
    MPI.COMM_SELF.send(None, 0, 7)


class Chatter:
    """Another rank, as a communicator shows it, and a clock."""

    size, rank = 3, 0

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.said, self.heard = [], []
        monkeypatch.setattr(module, 'time', SimpleNamespace(
            monotonic=lambda: self.now))
        monkeypatch.setattr(module, 'wait_until', lambda done: None)

    def Iprobe(self, source, tag, status):
        for one in self.heard:
            if one[1] == tag:
                status.source = one[0]
                return True
        return False

    def recv(self, source, tag):
        found = next(one for one in self.heard if one[:2] == (source, tag))
        self.heard.remove(found)
        return found[2]

    def isend(self, text, rank, tag):
        self.said.append((rank, tag, text))
        return MPI.REQUEST_NULL

    def asked(self):
        return [rank for rank, tag, _ in self.said if tag == module._QUESTION]


@pytest.fixture
def chatter(monkeypatch):
    return Chatter(monkeypatch)


def test_a_rank_that_says_it_is_alive_is_waited_for(chatter):
    peers = Peers(chatter, 10, 1000)
    for chatter.now in range(1, 100):
        for rank in chatter.asked():
            chatter.heard.append((rank, module._ALIVE, ''))
        chatter.said.clear()
        assert not peers.look(0.0, lambda: [2])


def test_of_two_late_ranks_the_one_that_is_silent_is_named(chatter):
    peers = Peers(chatter, 10, 1000)

    def wait():
        for chatter.now in range(1, 100):
            if chatter.asked():
                chatter.heard.append((1, module._ALIVE, ''))
            peers.look(0.0, lambda: [1, 2])
    with pytest.raises(RuntimeError, match='for a message of rank 2: '):
        wait()
    assert chatter.now == 11
    assert set(chatter.asked()) == {1, 2}
    told = {rank for rank, tag, text in chatter.said
            if tag == module._GIVEN_UP and 'rank 0 has waited 11 s' in text}
    assert told == {1, 2}


def test_no_wait_is_longer_than_the_longest(chatter):
    peers = Peers(chatter, 10, 50)

    def wait():
        for chatter.now in itertools.count():
            chatter.heard.append((1, module._ALIVE, ''))
            peers.look(0.0, lambda: [1])
    with pytest.raises(RuntimeError, match='for a message of rank 1'):
        wait()
    assert chatter.now == 51


def test_a_rank_that_waits_says_that_it_is_alive(chatter):
    chatter.heard.append((2, module._QUESTION, ''))
    chatter.now = 1.0
    Peers(chatter, 10, 50).look(0.0, lambda: [1])
    assert chatter.said == [(2, module._ALIVE, '')]


def test_a_rank_hears_that_others_gave_up(chatter):
    chatter.heard.append((1, module._GIVEN_UP, 'so it goes'))
    chatter.now = 1.0
    with pytest.raises(RuntimeError, match='^so it goes$'):
        Peers(chatter, 10, 50).look(0.0, lambda: [1])
