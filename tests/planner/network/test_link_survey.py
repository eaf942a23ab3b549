import io
import sys
from unittest import mock

from chainer_fp8pipe.planner.network.link_rounds import (
    local_rounds,
    one_way,
    ring_rounds,
    torus_rounds,
)
from chainer_fp8pipe.planner.network.link_survey import (
    _FEW,
    _LONG,
    _MANY,
    LinkSurvey,
    _costs_of,
)
from chainer_fp8pipe.planner.network.peers import Peers
from chainer_fp8pipe.planner.network.timed_messages import INSIDE_HOSTS, Work

import pytest

from tests.ranks import on_ranks

NOTHING, PLENTY = 1e-9, 1e9     # seconds of a budget


def survey(comm, budget=NOTHING):
    return LinkSurvey(Peers(comm, 300, 300), budget)


def same_on_all(comm, found):
    return all(other == found for other in comm.allgather(found))


@pytest.mark.parametrize(('budget', 'repeats'), [(NOTHING, 1), (PLENTY, 7)])
@on_ranks(2)
def test_a_budget_is_kept_by_fewer_repeats(comm, budget, repeats):
    found = survey(comm, budget).rates(ring_rounds(range(2)), range(2), 0.5,
                                       INSIDE_HOSTS)
    assert [len(values) for rates in found for values in rates.values()
            ] == [repeats] * 2
    assert same_on_all(comm, found)


@on_ranks(4, 5)
def test_all_ranks_know_the_rate_of_every_message(comm):
    members = [0, 3, 2]
    for rounds in (ring_rounds(members), local_rounds([0, 1, 0, 1]),
                   torus_rounds([1, 3, 0, 2], 2, 2)):
        ranks = sorted({rank for messages in rounds for message in messages
                        for rank in message})
        found = survey(comm).rates(rounds, ranks, 0.5, INSIDE_HOSTS)
        assert [set(rates) for rates in found] == list(map(set, rounds))
        assert all(value > 0 for rates in found for values in rates.values()
                   for value in values)
        assert same_on_all(comm, found)


@on_ranks(3)
def test_bursts_come_with_the_rates_of_one_direction(comm):
    members = range(3)
    rates, burst = survey(comm).bursts(one_way(members), members, 0.5)
    assert set(rates) == {(0, 1)}
    assert burst >= 0
    assert same_on_all(comm, (rates, burst))


@on_ranks(2, 3)
def test_messages_cost_their_ends_time(comm):
    members = range(comm.size - 1, -1, -1)
    message, byte = survey(comm, PLENTY).costs(members, 0.5)
    assert message.value > 0
    assert byte.value >= 0
    assert same_on_all(comm, (message, byte))


def busy(load, naps=2, message=3e-6, byte=1e-9, nap=4e-5):
    """The work of a load, of which each end takes so many seconds."""
    return Work(2 * load.frames * message + 2 * load.size * byte + naps * nap,
                naps, 1.0)


def test_costs_are_without_those_of_naps():
    few, many, long = (busy(load, naps) for naps, load in enumerate(
        (_FEW, _MANY, _LONG)))
    message, byte = _costs_of(few, many, long, 4e-5)
    # Bytes of short messages are some of what these take.
    assert message == pytest.approx(3e-6 + 1e-9)
    assert byte == pytest.approx(1e-9, rel=1e-3)


@pytest.mark.parametrize('naps', [2, 20])
def test_noise_makes_no_message_free_and_no_byte_less_than_that(naps):
    many = busy(_MANY, naps)
    message, byte = _costs_of(busy(_FEW), many, busy(_LONG, naps), 1.0)
    assert message >= .1 * many.busy / 128 > 0
    assert byte >= 0


@on_ranks(3)
def test_ranks_that_only_wait_learn_the_costs_and_the_latency(comm):
    mine = survey(comm)
    message, _ = mine.costs([0, 2], 0.5)
    latency = mine.latency(ring_rounds([0, 2]), [0, 2], 0.5, message)
    assert message.value > 0
    assert latency.value > 0
    assert same_on_all(comm, (message, latency))


@on_ranks(1)
def test_progress_is_shown_on_a_terminal_only(comm):
    terminal, file = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for stream in (terminal, file):
        with mock.patch.object(sys, 'stderr', stream):
            survey(comm, 10).show('latency')
            survey(comm, 10).show('')
    assert terminal.getvalue().startswith(
        '\rmeasuring the network: latency (0 s of about 10)')
    assert terminal.getvalue().endswith(' \r')
    assert file.getvalue() == ''
