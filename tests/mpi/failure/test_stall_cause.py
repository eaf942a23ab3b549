"""Who is the cause, of ranks that wait for each other."""
from chainer_fp8pipe.mpi.failure.stall_cause import (
    RankView,
    State,
    find_cause,
)

import pytest


def view(rank, state=State.WAITS, waits_for=(), call='agree', updates=5):
    return RankView(rank, f'rank {rank} of 4', state, '', waits_for,
                    call if state is State.WAITS else '', updates)


@pytest.mark.parametrize('state', [State.STOPPED, State.GONE, State.LEFT])
def test_a_rank_that_cannot_go_on_is_the_cause_for_certain(state):
    cause = find_cause([view(0), view(1, state), view(2, waits_for=(1,))])
    assert (cause.ranks, cause.is_certain) == ((1,), True)
    assert f'rank 1 of 4 {state.value}' in cause.text


def test_a_rank_that_is_stopped_counts_more_than_one_that_works():
    cause = find_cause([view(0, State.WORKS), view(1, State.STOPPED)])
    assert (cause.ranks, cause.is_certain) == ((1,), True)


def test_a_rank_that_works_after_others_have_left_is_no_certain_cause():
    cause = find_cause([view(0, State.WORKS), view(1, State.LEFT)])
    assert (cause.ranks, cause.is_certain) == ((0,), False)


def test_of_ranks_that_work_those_that_others_wait_for_are_the_cause():
    cause = find_cause([view(0, State.WORKS), view(1, State.WORKS),
                        view(2, waits_for=(1,))])
    assert (cause.ranks, cause.is_certain) == ((1,), False)


def test_ranks_that_wait_behind_each_other_lead_to_the_last_one():
    cause = find_cause([
        view(0, waits_for=(1,)), view(1, waits_for=(2,)),
        view(2, call='MPI: bcast')])
    assert (cause.ranks, cause.is_certain) == ((2,), True)


@pytest.mark.parametrize('other', [
    view(2, call='MPI: allreduce'), view(2, updates=6)])
def test_the_rank_in_another_call_than_most_is_the_cause(other):
    cause = find_cause([view(0), view(1), other, view(3)])
    assert (cause.ranks, cause.is_certain) == ((2,), True)
    assert 'the others:\n  rank 0 of 4' in cause.text


def test_without_a_majority_all_are_shown():
    cause = find_cause([view(0), view(1, call='MPI: bcast')])
    assert (cause.ranks, cause.is_certain) == ((0, 1), True)
    assert 'different calls' in cause.text


def test_ranks_in_one_place_have_no_cause_among_them():
    cause = find_cause([view(0), view(1)])
    assert (cause.ranks, cause.is_certain) == ((), True)
    assert 'in the same place' in cause.text


def test_of_many_ranks_some_are_shown():
    text = find_cause(view(rank, State.STOPPED) for rank in range(40)).text
    assert 'and 24 more' in text
    assert text.count('\n') == 18
