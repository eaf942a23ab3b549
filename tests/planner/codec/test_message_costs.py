"""Costs of messages between ranks of a host."""
import math
import pickle

from chainer_fp8pipe.planner.codec import message_costs
from chainer_fp8pipe.planner.codec.message_costs import (
    _LONG,
    _SHORT,
    _Wire,
    busy_of,
    costs_of,
    measure_local_messages,
)

import pytest

from tests.ranks import on_ranks


def test_costs_of_messages_and_bytes_are_told_apart():
    """2 us of a message and 0.1 ns of a byte; once 3 us."""
    found = costs_of([(message + 1e-10 * _SHORT, message + 1e-10 * _LONG)
                      for message in (2e-6, 3e-6, 2e-6)])
    assert found.message.value == pytest.approx(2e-6)
    assert found.byte.value == pytest.approx(1e-10)
    assert found.byte.spread == pytest.approx(0.0, abs=1e-6)
    assert found.message.spread == pytest.approx(0.125)


def test_noise_makes_no_cost_less_than_nothing():
    found = costs_of([(3e-6, 2e-6)])
    assert (found.message.value, found.byte.value) == (3e-6, 0.0)


def test_sums_that_were_interrupted_make_no_messages_free():
    assert busy_of(3.0, 1.0) == 2
    # Other processes had the core for 4 s in the middle of sums.
    assert busy_of(3.0, 5.0) == pytest.approx(.3)


def test_a_rank_has_four_ends_for_each_other_one_in_each_chunk():
    """A contribution and a result go to it, and as many come."""
    wire = _Wire(_LONG, 3)
    chunks = wire.values.nbytes / _LONG / 3
    assert wire.ends == 4 * 2 * chunks
    assert _Wire(_LONG, 1).ends == 0


@on_ranks(1, 2, 4)
def test_all_ranks_have_the_same_costs_or_none(comm):
    found = measure_local_messages(comm, 0.0)
    assert len(set(comm.allgather(pickle.dumps(found)))) == 1
    if comm.size == 1:
        assert found is None
    else:
        assert found.message.value >= 0
        assert found.byte.value >= 0
        assert found.message.value + found.byte.value > 0


@on_ranks(2)
def test_ranks_that_are_alone_on_their_host_do_not_count(comm):
    """Rank 0 has a host of its own; so nobody has a neighbour."""
    class Hosts:
        def __getattr__(self, name):
            return getattr(comm, name)

        def Split_type(self, kind, key):
            return comm.Split(comm.rank, key)
    assert measure_local_messages(Hosts(), 0.0) is None


@on_ranks(2)
def test_a_rank_without_memory_is_an_error_on_all(comm):
    def broken(frame, ranks):
        raise MemoryError('no room')
    with pytest.MonkeyPatch.context() as monkeypatch:
        if comm.rank == 1:
            monkeypatch.setattr(message_costs, '_Wire', broken)
        with pytest.raises(RuntimeError, match='rank 1: MemoryError: no roo'):
            measure_local_messages(comm, 0.0)


@on_ranks(1)
def test_a_rank_without_messages_has_no_seconds(comm):
    exchange = message_costs._Exchange(comm, _Wire(_SHORT, 1))
    assert math.isnan(exchange.seconds())
    exchange.executor.free()
